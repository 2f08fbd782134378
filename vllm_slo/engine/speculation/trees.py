# SPDX-License-Identifier: Apache-2.0
"""Speculation with trees: drafts send candidates, and each step verifies some of their nodes.

1. ``propose`` selects trees before the step is planned, as if all running requests decoded and no
   prompt was computed. The nodes that objectives need come first (AdaServe's SLO-customised
   selection), then the nodes that raise the throughput. The step is planned with the trees of
   promised requests, and with the tokens that these are expected to yield.
2. ``select`` selects the trees of all requests anew when the step is planned, within the time that
   the plan leaves.
3. ``attach`` sends with the step what the worker must know: the parents of the nodes, and what to
   draft after the step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.admission.program import Speculated
from vllm_slo.core.arrays import Ints, Marks
from vllm_slo.core.speculation.candidate_trees import (
    CandidateTrees,
    StepLoad,
    nodes_of_step,
    tpot_needs,
)
from vllm_slo.core.speculation.tree_arrangement import arrange_trees
from vllm_slo.core.speculation.tree_selection import (
    FOR_SLO,
    FOR_THROUGHPUT,
)
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.core.types import INFINITY
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling import request_facts
from vllm_slo.engine.scheduling.decode_model import TokenYields, WayToDecode
from vllm_slo.engine.scheduling.kv_blocks import KVBlocks
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.responsive_steps import ResponsiveSteps
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.step_schedule import StepSchedule
from vllm_slo.engine.speculation import grammar, messages
from vllm_slo.engine.speculation.candidates import Candidates, StepCandidates
from vllm_slo.engine.speculation.draft_models import DraftModels, Drafts
from vllm_slo.engine.speculation.draft_servers import DraftServers
from vllm_slo.engine.speculation.messages import StepTrees
from vllm_slo.engine.speculation.next_drafts import NextDrafts
from vllm_slo.engine.speculation.no_speculation import wants_no_drafts
from vllm_slo.engine.speculation.scheduled_trees import ScheduledTrees
from vllm_slo.engine.speculation.tenants import TenantShares, Verified
from vllm_slo.engine.speculation.tree_limits import TreeLimits
from vllm_slo.engine.speculation.verifying_time import VerifyingTime
from vllm_slo.engine.telemetry.speculation_metrics import SpeculationMetrics

PATH_TOKENS = 1.0
"""What verifying another path of a tree costs on CPU besides its nodes, in tokens. Its row reads
the request's context again, a block of it is copied, and its keys and values are written twice
(see ``tree_attention``). It costs nothing where the kernel takes masks."""
CPU_MULTIPLE = 4
"""The tokens of a step are made a multiple of this on CPU. A matrix product of 49 rows takes a
fifth longer than one of 48 or of 52: the kernels take four rows at a time, the rest one by one."""


class Trees:
    """Chooses the trees of each step; a `Speculation`. It sets ``spec_token_ids`` of requests.

    Args:
        tenants: whose drafts are verified beyond those that objectives need; None: the likeliest.
        max_step_tokens: most tokens of one step.

    Attributes:
        drafting: which draft models or servers work, and what their drafts are worth.
        draft_padding: 0. A tree has no placeholders.
        yields: tokens that the step is expected to yield, of promised requests with trees.
        fixed_nodes: verified of each request on average, whether they pay or not; None: those
            that pay. For measurements.
    """

    draft_padding = 0
    speculates = True
    verifies_trees = True

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        blocks: KVBlocks,
        clock: StepClock,
        responsive: ResponsiveSteps,
        metrics: SpeculationMetrics,
        tenants: TenantShares | None,
        config: SLOConfig,
        max_step_tokens: int,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._clock = clock
        self._metrics = metrics
        self._tenants = tenants
        self._max_step_tokens = max_step_tokens
        self.config = config.speculation
        self.yields = TokenYields()
        self.fixed_nodes: int | None = None
        on_cpu = state.vllm_config.device_config.device_type == "cpu"
        path_tokens = PATH_TOKENS if on_cpu else 0.0
        self._multiple = CPU_MULTIPLE if on_cpu else 1
        self.drafting: Drafts = (
            DraftModels(clock, metrics, self.config, path_tokens)
            if self.config.draft_servers is None
            else DraftServers(
                state, tracker, clock, self.yields, metrics, self.config, max_step_tokens
            )
        )
        self._verifying = VerifyingTime(clock)
        self._limits = TreeLimits(
            *(state, tracker, clock, responsive, self.drafting, self._verifying, config)
        )
        self._candidates = Candidates(
            state, tracker, blocks, self.drafting, tenants, self.config, path_tokens
        )
        self._next_drafts = NextDrafts(
            *(state, tracker, blocks, clock, self._limits, self.drafting, self.config),
            max_step_tokens,
        )
        self._step: StepCandidates | None = None
        self._scheduled = ScheduledTrees.none()
        self._chosen = 0, 0  # nodes for objectives, nodes for throughput
        self._prompt_tokens = 0
        self._selection_s = 0.0
        metrics.speculation_on(True)

    # Before a step is planned.

    def propose(self, *, active: bool) -> None:
        began_s = time.perf_counter()
        self._limits.begin_step()
        self._scheduled = ScheduledTrees.none()
        self.yields.next_step.clear()
        self.yields.spare_s.clear()
        for request in self._state.running:
            request.spec_token_ids = []
        barred = self._trees_are_barred()
        self._step = None if barred else self._candidates.gather()
        lagging = 0
        if self._step is not None:
            step_s = self._step_s()
            self._note_needs(self._step, step_s)
            lagging = self._step.trees.behind(step_s)
        self._next_drafts.decide(lagging, barred=barred)
        if self._step is not None and self._tracker.promised:
            self._propose_promised(self._step)
        self._selection_s = time.perf_counter() - began_s

    def _trees_are_barred(self) -> bool:
        """Whether a request is running beside which the sampler cannot sample trees."""
        return any(
            request.sampling_params is not None
            and request.sampling_params.thinking_token_budget is not None
            for request in self._state.running
        )

    def _note_needs(self, step: StepCandidates, step_s: float) -> None:
        """Note A(r) of every request that can still keep its TPOT."""
        start_s = self._clock.start_s
        ahead = self._limits.ahead()
        for place, request in enumerate(step.requests):
            tracked = self._tracker.get(request.request_id)
            if tracked is None or tracked.missed or tracked.tpot_s == INFINITY:
                continue
            if not tracked.decodes:
                continue
            view = self._limits.view(tracked)
            left = max(request.max_tokens - request.num_output_tokens, 1)
            needs = tpot_needs(view, start_s, left)
            if needs.pace_s * ahead >= step_s:
                step.trees.require(place, needs, promised=tracked.promised)

    def _step_s(self) -> float:
        """Seconds of a step of all roots and of as many nodes as the last step had. These are the
        step times that promises are made by."""
        tokens = len(self._state.running) + sum(self._chosen)
        return self._clock.promise_model.predict_s(tokens, self._limits.context())

    def plain(self) -> StepTimeModel:
        return self._limits.plain()

    def speculative(self, tpot_s: float) -> WayToDecode | None:
        return self._limits.speculative(tpot_s)

    def sustainable(self, tpot_s: float) -> tuple[float, Speculated]:
        return self._limits.sustainable(tpot_s)

    def spread(self) -> float:
        return self._limits.spread()

    def _propose_promised(self, step: StepCandidates) -> None:
        """Choose trees for a step of all roots, and give promised requests theirs."""
        trees = step.trees
        load = replace(self._load(step, None), others=0)
        taken = self._choose(trees, load) > 0
        tokens, gains = step.tokens[taken].tolist(), trees.gains(taken).tolist()
        end = 0
        for place, (request, count) in enumerate(
            zip(step.requests, trees.counts(taken).tolist(), strict=True)
        ):
            end += count
            tracked = self._tracker.get(request.request_id)
            if tracked is None or not (tracked.promised or tracked.holds_tpot):
                continue
            request.spec_token_ids = tokens[end - count : end]
            if tracked.tpot_s < INFINITY and tracked.decodes:
                view = self._limits.view(tracked)
                counted = self._limits.counted_tokens(view, gains[place])
                self.yields.next_step[request.request_id] = counted
                self.yields.spare_s[request.request_id] = self._limits.spare_s(view)

    # When a step is planned.

    def select(self, schedule: StepSchedule | None) -> None:
        step = self._step
        if step is None:
            self._chosen = 0, 0
            return
        began_s = time.perf_counter()
        granted = np.asarray([_is_granted(schedule, request) for request in step.requests])
        step.trees.leave_out(granted)
        self._place(step, self._choose(step.trees, self._load(step, schedule)))
        if schedule is not None:
            for request in itertools.compress(step.requests, granted):
                schedule.token_budget += len(request.spec_token_ids)
                schedule.tokens[request.request_id] = 1 + len(request.spec_token_ids)
        self._selection_s += time.perf_counter() - began_s

    def _choose(self, trees: CandidateTrees, load: StepLoad) -> Marks:
        if self.fixed_nodes is not None:
            return self._measured(trees, self.fixed_nodes)
        return nodes_of_step(trees, load, self._clock.expected_model, self._clock.promise_model)

    def _measured(self, trees: CandidateTrees, fixed_nodes: int) -> Marks:
        """The nodes of a measurement: see ``fixed_nodes``."""
        nodes = fixed_nodes * int(np.count_nonzero(trees.limits))
        return trees.select(nodes, 0.0, 0.0)

    def _load(self, step: StepCandidates, schedule: StepSchedule | None) -> StepLoad:
        """The step without nodes. Those that it was planned with are taken out of the schedule."""
        running, most = self._state.running, self._max_step_tokens
        if schedule is None:
            roots = planned = sum(map(request_facts.is_decoding, running))
            prompts = self._state.waiting or len(running) > roots
            others = most - roots if prompts else 0
            limits = self._limits.limits(step.requests)
            limit_s = min((limit.limit_s for limit in limits), default=INFINITY)
            deadline_s = INFINITY
        else:
            for request in step.requests:
                if schedule.tokens.get(request.request_id):
                    schedule.token_budget -= len(request.spec_token_ids)
            roots = sum(
                request_facts.is_decoding(r) and bool(schedule.tokens.get(r.request_id))
                for r in running
            )
            planned, limit_s = schedule.token_budget, schedule.limit_s
            deadline_s = schedule.deadline_s
            others = max(planned - roots, 0)
        return StepLoad(
            roots,
            others,
            planned,
            self._limits.context(),
            most,
            limit_s,
            deadline_s,
            lambda: self._limits.limits(step.requests),
            self._multiple,
        )

    def _place(self, step: StepCandidates, chosen: Marks) -> None:
        """Give each request its chosen nodes, as far as there are extra paths for them."""
        requests, trees = step.requests, step.trees
        for place, request in enumerate(requests):
            if request.use_structured_output:
                step.keep_allowed(place, chosen, self._state.structured_output)
        deepest = [r.max_tokens - r.num_output_tokens - 1 for r in requests]
        nodes, parents, counts = arrange_trees(
            trees.offsets,
            trees.chances,
            trees.parents,
            chosen,
            np.asarray(deepest, dtype=np.int64),
            self.config.draft_tokens,
        )
        where = nodes + np.repeat(trees.offsets[:-1], counts)
        found = step.tokens[where]
        tokens, starts, end = found.tolist(), {}, 0
        for request, count in zip(requests, counts.tolist(), strict=True):
            request.spec_token_ids = tokens[end : end + count]
            if count:
                starts[request.request_id] = end
                end += count
        self._scheduled = ScheduledTrees(
            starts,
            np.repeat(step.models, counts),
            found,
            parents,
            step.probabilities[where],
            step.best[where],
            trees.chances[where],
        )
        phases = np.bincount(chosen[where], minlength=FOR_THROUGHPUT + 1).tolist()
        self._chosen = phases[FOR_SLO], phases[FOR_THROUGHPUT]

    # With a step.

    def attach(self, output: SchedulerOutput, shape: BatchShape) -> BatchShape:
        drafts = output.scheduled_spec_decode_tokens
        parents_of, starts = self._scheduled.parents.tolist(), self._scheduled.starts
        parents: dict[str, Sequence[int]] = {
            # The step may have cut trees short.
            name: parents_of[starts[name] : starts[name] + len(tokens)]
            for name, tokens in drafts.items()
        }
        # First of all, as a worker that did not know the parents could not verify these nodes.
        messages.attach(output, StepTrees(parents))
        silent = frozenset(
            name for name in output.num_scheduled_tokens if wants_no_drafts(self._tracker.get(name))
        )
        self._prompt_tokens = 0
        for name, scheduled in output.num_scheduled_tokens.items():
            self._candidates.forget(name)
            if scheduled > 1 + len(drafts.get(name, ())):
                self._prompt_tokens += scheduled
        grants = self.drafting.grants(self._speaking(output, silent))
        wait_s = self.drafting.deadline_s(output) if grants else 0.0
        messages.attach(output, StepTrees(parents, self.drafting.plan, silent, grants, wait_s))
        shape = replace(shape, spec_steps=0)  # drafting is measured apart
        self._verifying.scheduled(shape, has_trees=any(parents.values()))
        return shape

    def _speaking(self, output: SchedulerOutput, silent: Container[str]) -> list[Request]:
        """Requests that get tokens in a step and want drafts after them."""
        return [
            request
            for name in output.num_scheduled_tokens
            if name not in silent
            and (request := self._state.requests.get(name)) is not None
            and not request.is_prefill_chunk
        ]

    def tree_masks(self, output: SchedulerOutput) -> GrammarOutput | None:
        return grammar.step_masks(self._state.structured_output, self._state.requests, output)

    # After a step.

    def drafting_s(self, _output: SchedulerOutput, done: ModelRunnerOutput) -> float:
        return messages.drafting_of(done).seconds + self._verifying.step_s

    def observe(self, output: SchedulerOutput, done: ModelRunnerOutput) -> None:
        step, report = messages.of(output), messages.drafting_of(done)
        self._verifying.done(
            decoded_only=bool(output.num_scheduled_tokens) and not self._prompt_tokens
        )
        self.drafting.learn(
            step.plan,
            report,
            self._given(done),
            verified=sum(map(len, step.parents.values())),
            quiet=not self._prompt_tokens,
        )
        self._metrics.tree_times(draft_s=report.seconds, selection_s=self._selection_s)
        self.drafting.observe(self._round(output, done))
        if self._tenants is not None:
            self._tenants.observe(self._round(output, done))
        names, given = [], []
        for name in step.parents:
            index = done.req_id_to_index.get(name)
            known = index is not None and name in self._scheduled.starts
            if known and done.sampled_token_ids[index]:
                names.append(name)
                given.append(done.sampled_token_ids[index])
        if names:
            counts = [len(step.parents[name]) for name in names]
            self._learn(names, np.asarray(counts, dtype=np.int64), given)

    def _round(self, output: SchedulerOutput, done: ModelRunnerOutput) -> Iterator[Verified]:
        """What became of the drafts of each request that decoded in a step."""
        drafts = output.scheduled_spec_decode_tokens
        for name, scheduled in output.num_scheduled_tokens.items():
            offered, index = len(drafts.get(name, ())), done.req_id_to_index.get(name)
            given = [] if index is None else done.sampled_token_ids[index]
            if given and scheduled == 1 + offered:
                yield Verified(name, offered, len(given) - 1)

    def _given(self, done: ModelRunnerOutput) -> list[tuple[int, int]]:
        """(new tokens, tokens that it lacked to its longest) of each request that got tokens."""
        requests, sampled = self._state.requests, done.sampled_token_ids
        return [
            (len(sampled[index]), request.max_tokens - request.num_output_tokens)
            for name, index in done.req_id_to_index.items()
            if index < len(sampled) and sampled[index] and (request := requests.get(name))
        ]

    def _learn(self, names: Sequence[str], counts: Ints, given: Sequence[list[int]]) -> None:
        """Learn from the tokens ``given`` of trees of ``counts`` nodes."""
        scheduled, deepest = self._scheduled, self.config.max_depth
        outcome = scheduled.outcome(names, counts, given)
        for name, expected, tokens in zip(names, outcome.expected, given, strict=True):
            self._limits.observe(name, expected, len(tokens))
        depths, seen, hit = outcome.depths, outcome.seen, outcome.accepted
        self.drafting.accepted(
            *(scheduled.models[seen], depths[seen], scheduled.probabilities[seen]),
            *(hit[seen], scheduled.best[seen]),
        )
        self._metrics.tree_step(
            accepted=[len(tokens) - 1 for tokens in given],
            verified_by_depth=np.bincount(depths, minlength=deepest + 1)[1:].tolist(),
            accepted_by_depth=np.bincount(depths[hit], minlength=deepest + 1)[1:].tolist(),
            nodes_slo=self._chosen[0],
            nodes_throughput=self._chosen[1],
        )

    def receive(self, drafts: DraftTokenIds) -> bool:
        return self._candidates.receive(drafts)

    def forget(self, request_id: str) -> None:
        self._candidates.forget(request_id)
        self._limits.forget(request_id)
        self.drafting.forget(request_id)


def _is_granted(schedule: StepSchedule | None, request: Request) -> bool:
    """Whether the plan lets a decoding request take part in the step."""
    return schedule is None or schedule.tokens.get(request.request_id, 0) > 0
