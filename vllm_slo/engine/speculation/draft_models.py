# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the draft models: which of them work, and what their guesses are worth.

The worker runs them and reports what it saw; here that is learnt from, and the next plan is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_slo.config.speculation import SpeculationConfig
from vllm_slo.core.arrays import Bools, Floats, Ints, Parents
from vllm_slo.core.speculation.calibration import DraftCalibration
from vllm_slo.core.speculation.chain_forecast import DraftLoad
from vllm_slo.core.speculation.model_chain import ModelChains, Plan
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.speculation.messages import NO_DRAFT, DraftingReport, DraftTrees, Grant
from vllm_slo.engine.speculation.tenants import Verified
from vllm_slo.engine.telemetry.speculation_metrics import SpeculationMetrics

logger = init_logger(__name__)


TARGET = "target"
"""The served model's name among those of the drafts, in metrics."""


@dataclass(slots=True)
class Candidate:
    """What a draft model guesses of one request.

    Attributes:
        at: tokens of the request when it was drafted; of another length, it is out of date.
        model: whose guesses they are, by its place in the pool.
        width: nodes of a layer.
        depth: that the tree was to have.
        tokens, parents: the nodes, layer by layer.
        probabilities: the draft's, of each node given its path.
    """

    at: int
    model: int
    width: int
    depth: int
    tokens: Ints
    parents: Parents
    probabilities: Floats


class Drafts(Protocol):
    """Where the drafts of an engine come from, as `engine.speculation.trees` sees it: draft models
    beside the served one (`DraftModels`), or draft servers (`engine.speculation.draft_servers`)."""

    @property
    def plan(self) -> Plan:
        """What is drafted after the step that is being planned."""

    @property
    def typical(self) -> Floats:
        """(depths, width) path probabilities of what is drafted now, typically."""

    @property
    def out(self) -> bool:
        """Whether nothing will ever be drafted any more."""

    def nothing(self) -> None:
        """After the next step nothing is drafted."""

    def decide(self, load: DraftLoad, model: StepTimeModel) -> None:
        """Choose what is drafted after the next step, by what steps take without drafting."""

    def grants(self, requests: Sequence[Request], /) -> dict[str, Grant]:
        """What draft servers are to draft for the requests that get tokens in a step."""

    def deadline_s(self, output: SchedulerOutput, /) -> float:
        """How long a step may wait for what was granted."""

    def ahead_s(self, requests: int, /) -> Floats:
        """(depths,) seconds of drafting for so many requests, by how far ahead."""

    def author(self, drafts: DraftTrees, request_id: str, /) -> int:
        """Whose candidates have come for a request: `Candidate.model`."""

    def chances(
        self, found: Sequence[Candidate], offsets: Ints, parents: Parents, said: Floats
    ) -> tuple[Floats, Bools]:
        """Calibrated path probabilities of all nodes, and which have no likelier sibling; what is
        typical of each model is brought up to date.

        Args:
            found: candidates, those of one model side by side.
            offsets: (n+1,) where each one's nodes begin.
            parents, said: (N,) of all nodes.
        """

    def accepted(self, models: Ints, depths: Ints, said: Floats, hit: Bools, best: Bools) -> None:
        """Learn which of the nodes that the target looked at it accepted.

        Args:
            models: whose nodes they are, (N,).
            depths: of the nodes, (N,).
            said: the models' probabilities of them, (N,).
            hit: whether they were accepted, (N,).
            best: whether they have no likelier sibling, (N,).
        """

    def observe(self, verified: Iterable[Verified], /) -> None:
        """Take in what became of the drafts of everybody who decoded in a step."""

    def learn(
        self,
        plan: Plan,
        report: DraftingReport,
        given: Sequence[tuple[int, int]],
        /,
        *,
        verified: int,
        quiet: bool,
    ) -> None:
        """Take in a step.

        Args:
            plan: what was drafted after it.
            report: what that was like.
            given: of each request how many tokens it got, and how many it lacked to its longest.
            verified: nodes that it verified.
            quiet: whether there were no prompts in it.
        """

    def forget(self, request_id: str, /) -> None:
        """A request has ended."""


class DraftModels:
    """Follows the draft models of one engine; see `Drafts`.

    Args:
        path_tokens: what another path of a tree costs besides its nodes, in tokens.

    Attributes:
        chains: which models work, and how.
        calibrations: what each one's probabilities are worth.
        plan: what is drafted after the step that is being planned.
        fixed: drafted after every step from now on; None: what is fastest. For measurements.
    """

    def __init__(
        self,
        clock: StepClock,
        metrics: SpeculationMetrics,
        config: SpeculationConfig,
        path_tokens: float,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self.pool = config.pool
        self.names = (*short_names(config.pool), TARGET)
        self.calibrations = [DraftCalibration(config.max_depth) for _ in config.pool]
        self.chains = ModelChains(
            config.pool, config.max_depth, config.max_width, path_tokens, config.draft_tokens
        )
        self.plan = NO_DRAFT
        self.fixed: Plan | None = None
        self._drafted = NO_DRAFT
        for name in self.names[:-1]:
            metrics.draft_model_up(name, up=True)

    # What is to be drafted.

    def nothing(self) -> None:
        self.plan = NO_DRAFT
        self._clock.drafting(0.0, 0.0)

    def decide(self, load: DraftLoad, model: StepTimeModel) -> None:
        clock = self._clock
        if self.fixed is None:
            self.plan = self.chains.choose(load, model, clock.now_s)
        else:
            self.plan = self.fixed
        prompt_s = sum(self.chains.times[model].token_s for model in self.plan.chain)
        verifying_s = load.verifying_s if self.plan.chain else 0.0
        clock.drafting(self.plan.drafting_s + verifying_s, prompt_s)

    @property
    def out(self) -> bool:
        return not self.chains.likely

    @property
    def typical(self) -> Floats:
        return self.chains.shapes[self._chain[-1]].typical

    def ahead_s(self, requests: int) -> Floats:
        return self.chains.drafting_s(self._chain, max(requests, 1), 1)

    @property
    def _chain(self) -> tuple[int, ...]:
        """The chain at work, or the one that would be."""
        return self.chains.likely or (0,)

    def grants(self, _requests: Sequence[Request]) -> dict[str, Grant]:
        return {}  # the plan says what is drafted

    def deadline_s(self, _output: SchedulerOutput) -> float:
        return 0.0

    def author(self, drafts: DraftTrees, _request_id: str) -> int:
        return drafts.model

    # What guesses are worth.

    def observe(self, _verified: Iterable[Verified]) -> None:
        """What became of whole trees is told node by node, by `accepted`."""

    def forget(self, _request_id: str) -> None: ...

    def chances(
        self, found: Sequence[Candidate], offsets: Ints, parents: Parents, said: Floats
    ) -> tuple[Floats, Bools]:
        paths, best = np.empty(len(said)), np.empty(len(said), dtype=np.bool_)
        start = 0
        for _, group in itertools.groupby(found, key=lambda candidate: candidate.model):
            part = list(group)
            model = part[0].model
            own = offsets[start : start + len(part) + 1]
            nodes, starts = slice(int(own[0]), int(own[-1])), own - own[0]
            paths[nodes], best[nodes] = self.calibrations[model].path_probabilities(
                starts, parents[nodes], said[nodes]
            )
            sizes = np.diff(starts)
            layers = np.repeat([c.width for c in part], sizes)
            depths = (np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)) // layers + 1
            asked = np.array([c.depth for c in part], dtype=np.int64)
            whole = _as_deep(paths[nodes], depths, starts, asked)
            self.chains.shapes[model].observe_nodes(*whole)
            start += len(part)
        return paths, best

    def accepted(self, models: Ints, depths: Ints, said: Floats, hit: Bools, best: Bools) -> None:
        for model in map(int, np.unique(models)):
            of = models == model
            self.calibrations[model].observe(depths[of], said[of], hit[of], best[of])
            main = of & best
            self.chains.edges.observe_acceptance(
                model,
                len(self.pool),
                int(np.count_nonzero(main)),
                int(np.count_nonzero(main & hit)),
            )

    # What steps were like.

    def learn(
        self,
        plan: Plan,
        report: DraftingReport,
        given: Sequence[tuple[int, int]],
        *,
        verified: int,
        quiet: bool,
    ) -> None:
        if quiet:
            self._learn_yield(given, verified)
        self._drafted = plan
        edges = self.chains.edges
        for model, tokens, seconds in report.passes:
            self.chains.times[model].observe(tokens, seconds)
        for edge in report.edges:
            edges.observe_acceptance(*edge)
        for one, other, score in report.similarities:
            edges.observe_similarity(one, other, score)
        for model, reason in report.dropped.items():
            self._drop(model, reason)
        if plan.depth:
            self._count(plan, report)

    def _learn_yield(self, given: Sequence[tuple[int, int]], verified: int) -> None:
        """Hold what trees yielded against what was expected of whole trees. A request that is about
        to end has less of one, and tells nothing. Nor does a step with hardly any nodes."""
        drafted = self._drafted
        lengths = [tokens for tokens, lacked in given if lacked > drafted.depth]
        if verified >= drafted.requests and 2 * len(lengths) > drafted.requests:
            self.chains.observe_step(drafted, sum(lengths) / len(lengths))

    def _count(self, plan: Plan, report: DraftingReport) -> None:
        names, edges = self.names, self.chains.edges
        self._metrics.drafting(
            ">".join(names[model] for model in plan.chain),
            [(names[model], seconds) for model, _, seconds in report.passes],
            [(names[i], names[j], tried, kept) for i, j, tried, kept in report.edges],
            [(names[i], names[j], edges.similarity(i, j)) for i, j, _ in report.similarities],
        )

    def _drop(self, model: int, reason: str) -> None:
        """A model has failed for good: the others go on, or none does."""
        self.chains.drop(model)
        logger.error("vllm-slo: the draft model %s is out: %s", self.pool[model], reason)
        self._metrics.draft_model_up(self.names[model], up=False)
        if not self.chains.likely:
            logger.error("vllm-slo: speculation is off: no draft model is left")
            self._metrics.speculation_on(False)


def _as_deep(chances: Floats, depths: Ints, starts: Ints, asked: Ints) -> tuple[Floats, Ints, Ints]:
    """Trees as deep as they were to be: those that end before do so where nothing likely follows,
    so their missing depths are nodes that are worth nothing."""
    counts = np.diff(starts)
    deep = np.maximum.reduceat(depths, starts[:-1])
    lacking = np.maximum(asked - deep, 0)
    if not lacking.any():
        return chances, depths, starts
    more, trees = np.cumsum(lacking), np.arange(len(counts))
    below = np.arange(more[-1]) - np.repeat(more - lacking, lacking) + np.repeat(deep, lacking) + 1
    owners = np.concatenate((np.repeat(trees, counts), np.repeat(trees, lacking)))
    order = np.argsort(owners, kind="stable")
    return (
        np.concatenate((chances, np.zeros(len(below))))[order],
        np.concatenate((depths, below))[order],
        np.append(0, np.cumsum(counts + lacking)),
    )


def short_names(pool: Sequence[str]) -> list[str]:
    """The last parts of the models' names, or whole names where these do not tell them apart."""
    names = [name.rstrip("/").rpartition("/")[2] for name in pool]
    return names if len({*names, TARGET}) > len(names) else list(pool)
