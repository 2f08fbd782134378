# SPDX-License-Identifier: Apache-2.0
"""The virtual engine with virtual draft servers: real schedulers, chains of known chances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_slo import tiny
from vllm_slo.config.class_names import REMOTE_PROPOSER, TREE_WORKER
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.speculation import messages
from vllm_slo.engine.speculation.draft_servers import DraftServers
from vllm_slo.engine.speculation.messages import Grant
from vllm_slo.engine.speculation.servers_report import DrafterRound, DrafterView, ServersReport
from vllm_slo.sim.harness import EngineShape, VirtualEngine

from virtual_trees import TreeEngine  # isort: skip


@dataclass
class Drafter:
    """A draft server as it is.

    Attributes:
        honest: chance of each of its tokens to be accepted; it says so.
        token_s, link_s: seconds of each token of its longest draft, and of its answer's way.
        there: whether it said hello.
        up: whether it answers; when asked before that it does not is known, it is late.
    """

    honest: float = 0.7
    token_s: float = 0.002
    link_s: float = 0.0005
    max_sessions: int = 64
    max_model_len: int = 512
    there: bool = True
    up: bool = True


class RemoteEngine(TreeEngine):
    """A virtual engine that draft servers draft for.

    Args:
        model: true and believed step times without drafting.
        drafters: by name.
    """

    def __init__(
        self,
        model: StepTimeModel,
        drafters: Mapping[str, Drafter],
        *,
        shape: EngineShape | None = None,
        slo_config: dict[str, Any] | None = None,
        speculation: dict[str, Any] | None = None,
        seed: int = 0,
        contains_faults: bool = False,
    ) -> None:
        self.drafters = dict(drafters)
        said = {"draft_servers": "tcp://127.0.0.1:5700", "max_nodes": 8, **(speculation or {})}
        VirtualEngine.__init__(
            self,
            Scheduler,
            tiny.path("target"),
            lambda shape: model.predict_s(shape.tokens, shape.context_tokens) + self._drafting_s(),
            shape or EngineShape(max_model_len=512, max_num_seqs=64, block_size=32),
            believed=model,
            slo_config={**(slo_config or {}), "speculation": said},
            seed=seed,
            options={"contains_faults": contains_faults},
            worker_cls=TREE_WORKER,
            speculative_config={
                "method": "custom_class",
                "model": REMOTE_PROPOSER,
                "num_speculative_tokens": said["max_nodes"],
            },
        )
        self.seen_trees: list[tuple[SchedulerOutput, messages.StepTrees]] = []
        self.accepted: list[int] = []
        self._report = messages.DraftingReport()
        self._next_token = 100
        self._late: set[str] = set()

    @property
    def drafting(self) -> DraftServers:
        found = self.scheduler._speculation.drafting
        assert isinstance(found, DraftServers)
        return found

    def granted(self, last: int = 0) -> list[dict[str, Grant]]:
        """What was granted in each step, or in the last ones."""
        return [step.grants for _, step in self.seen_trees[-last:]]

    def by_drafter(self, last: int = 0) -> dict[str, int]:
        """Tokens that each drafter was granted, altogether."""
        found = dict.fromkeys(self.drafters, 0)
        for grants in self.granted(last):
            for grant in grants.values():
                found[grant.drafter] += grant.tokens
        return found

    def _work(self, output: SchedulerOutput) -> messages.DraftingReport:
        """The round of a step."""
        step, longest = messages.of(output), dict[str, int]()
        for grant in step.grants.values():
            longest[grant.drafter] = max(longest.get(grant.drafter, 0), grant.tokens)
        rounds, self._late = [], set()
        for name, tokens in longest.items():
            drafter = self.drafters[name]
            draft_s = drafter.token_s * tokens
            wait_s = drafter.link_s + draft_s
            if wait_s > step.deadline_s or not drafter.up:
                self._late.add(name)
                rounds.append(DrafterRound(name, step.deadline_s, None, tokens))
            else:
                rounds.append(DrafterRound(name, wait_s, draft_s, tokens))
        report = messages.DraftingReport(seconds=max((done.wait_s for done in rounds), default=0.0))
        views = tuple(_view(name, d) for name, d in sorted(self.drafters.items()) if d.there)
        report.servers = ServersReport(views, tuple(rounds), (), 0.0, report.seconds)
        return report

    def _draft(self, output: SchedulerOutput) -> messages.DraftTrees:
        found = [
            (name, grant)
            for name, grant in messages.of(output).grants.items()
            if grant.drafter not in self._late
        ]
        if not found:
            return messages.DraftTrees.none()
        counts = [grant.tokens for _, grant in found]
        said = [[self.drafters[grant.drafter].honest] * grant.tokens for _, grant in found]
        return messages.DraftTrees(
            [name for name, _ in found],
            [],
            counts,
            100 + np.arange(sum(counts)) % 1900,
            np.concatenate([np.arange(-1, n - 1, dtype=np.int32) for n in counts]),
            np.concatenate(said),
        )

    def _result(self, output: SchedulerOutput, sampling: list[str]) -> ModelRunnerOutput:
        for name in messages.of(output).grants:
            assert name in sampling, "who gets no token is not drafted for"
        return super()._result(output, sampling)


def _view(name: str, drafter: Drafter) -> DrafterView:
    return DrafterView(
        name=name,
        model="virtual",
        max_model_len=drafter.max_model_len,
        max_sessions=drafter.max_sessions,
        sessions=0,
        up=drafter.up,
        suspended=False,
        ignored=False,
        link_s=drafter.link_s,
        faults={},
    )
