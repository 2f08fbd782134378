# SPDX-License-Identifier: Apache-2.0
"""The virtual engine with virtual drafts: real scheduler objects, trees of known chances."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_slo import tiny
from vllm_slo.config.class_names import TREE_PROPOSER, TREE_WORKER
from vllm_slo.core.speculation.model_chain import Plan
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.speculation import messages
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.sim.virtual_draft import beams

SPECULATION = {"max_depth": 5, "max_width": 3, "max_nodes": 15, "draft_tokens": 64}


class TreeEngine(VirtualEngine):
    """A virtual engine whose drafts guess the best child right with probability ``honest``, each
    other with 15% of the rest; their own probabilities are the true ones.

    Args:
        model: true and believed step times without drafting.
        honest: chance of the best child of each node; of each draft, where there are several.
        pass_s: seconds of one pass of the draft; of each.
        verify_s: seconds that a step with trees takes beyond its tokens.
        agree: (drafter, verifier) -> how often the second would say what the first guesses.
    """

    def __init__(
        self,
        model: StepTimeModel,
        *,
        honest: float | tuple[float, ...] = 0.7,
        pass_s: float | tuple[float, ...] = 0.002,
        verify_s: float = 0.0,
        agree: Mapping[tuple[int, int], float] | None = None,
        shape: EngineShape | None = None,
        slo_config: dict[str, Any] | None = None,
        speculation: dict[str, Any] | None = None,
        seed: int = 0,
        contains_faults: bool = False,
    ) -> None:
        self.honest = honest if isinstance(honest, tuple) else (honest,)
        self.pass_s = pass_s if isinstance(pass_s, tuple) else (pass_s,)
        self.agree = dict(agree or {})
        self.verify_s = verify_s
        pool = [str(tiny.path("draft")), *(f"draft{i}" for i in range(1, len(self.honest)))]
        said = {**SPECULATION, **(speculation or {}), "draft_model": pool}
        super().__init__(
            Scheduler,
            tiny.path("target"),
            lambda shape: (
                model.predict_s(shape.tokens, shape.context_tokens)
                + self.verify_s * bool(self.history[-1].scheduled_spec_decode_tokens)
                + self._drafting_s()
            ),
            shape or EngineShape(max_model_len=512, max_num_seqs=64, block_size=32),
            believed=model,
            slo_config={**(slo_config or {}), "speculation": said},
            seed=seed,
            options={"contains_faults": contains_faults},
            worker_cls=TREE_WORKER,
            speculative_config={
                "method": "custom_class",
                "model": TREE_PROPOSER,
                "num_speculative_tokens": said["max_nodes"],
            },
        )
        self.seen_trees: list[tuple[SchedulerOutput, messages.StepTrees]] = []
        self.accepted: list[int] = []
        self.fail: dict[int, str] = {}
        """Models that are to fail in the next step, and why."""
        self._report = messages.DraftingReport()
        self._next_token = 100

    def _drafting_s(self) -> float:
        """Of the step just scheduled, whose drafting takes place here."""
        self._report = self._work(self.history[-1])
        return self._report.seconds

    def _work(self, output: SchedulerOutput) -> messages.DraftingReport:
        """The passes of the models in a step."""
        report = messages.DraftingReport(dropped=dict(self.fail))
        plan, n = messages.of(output).plan, len(output.num_scheduled_tokens)
        if plan.depth and len(plan.chain) == 1:
            report.passes = [
                (plan.chain[0], n * plan.width, self.pass_s[plan.chain[0]])
            ] * plan.depth
        elif plan.depth:
            left = [plan.depth] * n
            while any(left):
                left = self._round(plan, left, report)
        report.seconds = sum(seconds for _, _, seconds in report.passes)
        return report

    def _round(self, plan: Plan, left: list[int], report: messages.DraftingReport) -> list[int]:
        """One round of a chain; what each request lacks after it."""
        top, chain = len(plan.chain) - 1, plan.chain
        own = [min(max(lacking - top, 0), plan.window) for lacking in left]
        for step in range(max(own)):
            report.passes.append((chain[0], sum(o > step for o in own), self.pass_s[chain[0]]))
        for drafter, verifier in pairwise(chain):
            chance, kept = self.agree[drafter, verifier], []
            for guesses in own:
                hits = 0
                while hits < guesses and self._rng.random() < chance:
                    hits += 1
                kept.append(hits)
            tried = sum(min(k + 1, o) for k, o in zip(kept, own, strict=True))
            report.edges.append(messages.EdgeTrials(drafter, verifier, tried, sum(kept)))
            tokens = sum(o + 1 for o, lacking in zip(own, left, strict=True) if lacking)
            report.passes.append((verifier, tokens, self.pass_s[verifier]))
            own = [k + 1 if lacking else 0 for k, lacking in zip(kept, left, strict=True)]
        return [max(lacking - o, 0) for lacking, o in zip(left, own, strict=True)]

    def step(self) -> SchedulerOutput:
        output = super().step()
        self.seen_trees.append((output, messages.of(output)))
        self.scheduler.update_draft_token_ids(self._draft(output))
        return output

    def _draft(self, output: SchedulerOutput) -> messages.DraftTrees:
        step = messages.of(output)
        plan = step.plan
        failed, self.fail = self.fail, {}
        names: list[str] = []
        rows = []
        for name in output.num_scheduled_tokens if plan.depth and not failed else ():
            request = self.scheduler.requests.get(name)
            if request is None or request.is_prefill_chunk or name in step.silent:
                continue
            names.append(name)
            rows.append(self._candidates(self.honest[plan.chain[-1]], plan.depth, plan.width))
        if not names:
            return messages.DraftTrees.none()
        tokens, parents, said = (np.concatenate(part) for part in zip(*rows, strict=True))
        return messages.DraftTrees(
            names,
            [],
            [len(row[0]) for row in rows],
            tokens,
            parents.astype(np.int32),
            said,
            plan.width,
            plan.chain[-1],
            plan.depth,
        )

    def _candidates(
        self, honest: float, depth: int, width: int
    ) -> tuple[list[int], list[int], list[float]]:
        """A beam search where each node's children have the chances of the class."""
        tree, first = beams(honest, depth, width), self._next_token
        self._next_token = 100 + (first + len(tree.parents) - 100) % 1900
        tokens = [100 + (first + i - 100) % 1900 for i in range(len(tree.parents))]
        return tokens, tree.parents, tree.chances

    def _result(self, output: SchedulerOutput, sampling: list[str]) -> ModelRunnerOutput:
        chosen = set(sampling)
        names = list(output.num_scheduled_tokens)
        done = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[self._given(output, n) if n in chosen else [] for n in names],
        )
        messages.note_drafting(done, self._report)
        return done

    def _given(self, output: SchedulerOutput, name: str) -> list[int]:
        """What a request gets: a walk down its tree by the true chances, and one more token."""
        tokens = output.scheduled_spec_decode_tokens.get(name, [])
        parents = messages.of(output).parents.get(name, [])
        assert len(tokens) == len(parents)
        planted = self.scheduler.parts.speculation._scheduled
        start = planted.starts.get(name, 0)
        given, at, passed = [], -1, False
        while not passed:
            passed, left = True, self._rng.random()
            for node, parent in enumerate(parents):
                if parent != at:
                    continue
                left -= planted.probabilities[start + node]
                if left < 0.0:
                    given.append(tokens[node])
                    at, passed = node, False
                    break
        if parents:
            self.accepted.append(len(given))
        request = self.scheduler.requests[name]
        length = self.lengths[name] - request.num_output_tokens
        given.append(99)
        if len(given) >= length:
            given = [*given[: length - 1], 2]
        return given
