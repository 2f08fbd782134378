# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of trees: candidates come in, selected trees go out with the next step.

A step is planned in three parts. First trees are chosen as if the step had all roots and no
prompts: what objectives need (AdaServe's SLO-customised selection), then what pays. The step is
planned with the trees of the promised requests, and with what these are expected to yield
(``propose``). Then the trees of all requests in the plan are chosen anew, within the time that the
plan leaves (``select``). Last, the parents and what is to be drafted next travel with the step
(``attach``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.admission.program import Speculated
from vllm_slo.core.batching.pressure import Pressure
from vllm_slo.core.speculation import token_tree
from vllm_slo.core.speculation.calibration import ACCEPTED_NODE, DraftCalibration, outcomes
from vllm_slo.core.speculation.candidate_trees import (
    CandidateTrees,
    Marks,
    StepLoad,
    StepNodes,
    nodes_of_step,
    tpot_needs,
)
from vllm_slo.core.speculation.chain_forecast import DraftLoad
from vllm_slo.core.speculation.model_chain import ModelChains
from vllm_slo.core.speculation.tree_arrangement import arrange_trees
from vllm_slo.core.speculation.tree_budget import sustained_trees, worthwhile_nodes
from vllm_slo.core.speculation.tree_selection import (
    FOR_SLO,
    FOR_THROUGHPUT,
    node_worths,
    select_trees,
)
from vllm_slo.core.speculation.tree_shape import TreeControl, depth_and_width
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.core.types import INFINITY
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling import request_facts
from vllm_slo.engine.scheduling.decode_model import TokenYields, WayToDecode
from vllm_slo.engine.scheduling.kv_blocks import KVBlocks
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.step_schedule import StepSchedule
from vllm_slo.engine.speculation import grammar, messages
from vllm_slo.engine.speculation.draft_models import Candidate, DraftModels, Drafts
from vllm_slo.engine.speculation.draft_servers import DraftServers
from vllm_slo.engine.speculation.messages import DraftTrees, StepTrees
from vllm_slo.engine.speculation.scheduled_trees import ScheduledTrees
from vllm_slo.engine.speculation.tenants import TenantShares, Verified
from vllm_slo.engine.speculation.tree_limits import TreeLimits
from vllm_slo.engine.telemetry.speculation_metrics import SpeculationMetrics

logger = init_logger(__name__)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EPS = 1e-9
TARGET = "target"
"""The served model's name among those of the drafts, in metrics."""
WIDTHS = 1, 2
"""Widths of trees to choose from beside the widest."""
PATH_TOKENS = 1.0
"""What verifying another path of a tree takes on CPU besides its nodes, in tokens: its row reads
the request's context again, a block of it is copied, and its keys and values are written twice (see
``tree_attention``). Where the kernel takes masks it is nothing."""
CPU_MULTIPLE = 4
"""On CPU a matrix product of 49 rows takes a fifth longer than one of 48 or of 52: rows go by four
through its kernels, the odd ones one by one."""


class Trees:
    """Chooses the trees of each step; a `Speculation`.

    Args:
        state: whose requests it reads; of these it sets ``spec_token_ids``.
        tracker: the requests that carry an SLO.
        blocks: KV memory.
        clock: step times.
        pressure: whether first tokens come too late.
        metrics: where trees are counted.
        tenants: whose drafts are verified beyond what objectives need; None: the likeliest.
        config: how deep and wide trees are, and how TPOTs are judged.
        max_step_tokens: tokens of one step at most.

    Attributes:
        drafting: which draft models or servers work, and what their guesses are worth.
        draft_padding: 0, as a tree is as large as it is.
        yields: tokens that the step is expected to yield, of promised requests with trees.
    """

    draft_padding = 0
    speculates = True

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        blocks: KVBlocks,
        clock: StepClock,
        pressure: Pressure,
        metrics: SpeculationMetrics,
        tenants: TenantShares | None,
        config: SLOConfig,
        max_step_tokens: int,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._blocks = blocks
        self._clock = clock
        self._pressure = pressure
        self._metrics = metrics
        self._tenants = tenants
        self._max_step_tokens = max_step_tokens
        self._block_size = state.block_size
        self.config = config.speculation
        self.yields = TokenYields()
        on_cpu = state.vllm_config.device_config.device_type == "cpu"
        self._path_tokens = PATH_TOKENS if on_cpu else 0.0
        self._multiple = CPU_MULTIPLE if on_cpu else 1
        self.drafting: Drafts = (
            DraftModels(clock, metrics, self.config, self._path_tokens)
            if self.config.draft_servers is None
            else DraftServers(
                state, tracker, clock, self.yields, metrics, self.config, max_step_tokens
            )
        )
        self._limits = TreeLimits(state, tracker, clock, self.drafting, config)
        self._candidates: dict[str, Candidate] = {}
        self._scheduled = ScheduledTrees.none()
        self._requests: list[Request] = []
        self._trees: CandidateTrees | None = None
        self._tokens = np.empty(0, dtype=np.int64)
        self._probabilities = np.empty(0)
        self._best = np.empty(0, dtype=np.bool_)
        self._chosen = 0, 0
        self._prompt_tokens = 0
        self._selection_s = 0.0
        _warm_up(self.config.max_depth)
        metrics.speculation_on(True)

    # Before a step is planned.

    def propose(self, *, active: bool) -> None:
        """Give promised requests the trees that the step is to be planned with; decide what is to
        be drafted after it. Trees are verified whether or not steps are planned."""
        began_s = time.perf_counter()
        self._limits.begin_step()
        self._scheduled = ScheduledTrees.none()
        self.yields.next_step.clear()
        for request in self._state.running:
            request.spec_token_ids = []
        barred = self._barred()
        self._trees = None if barred else self._gather()
        if self._trees is not None:
            self._require(self._trees)
        self._decide(barred)
        if self._trees is not None and self._tracker.promised:
            self._propose_promised(self._trees)
        self._selection_s = time.perf_counter() - began_s

    def _gather(self) -> CandidateTrees | None:
        """The candidates of this step; ``self._requests`` are whose they are, those of one draft
        model side by side."""
        mine = self._candidates
        self._requests = [r for r in self._state.running if self._may_grow(r)]
        self._requests.sort(key=lambda r: mine[r.request_id].model)
        if not self._requests:
            return None
        found = [mine[r.request_id] for r in self._requests]
        offsets = np.cumsum([0, *(len(c.tokens) for c in found)])
        parents = np.concatenate([c.parents for c in found])
        self._tokens = np.concatenate([c.tokens for c in found])
        self._probabilities = np.concatenate([c.probabilities for c in found])
        chances, self._best = self.drafting.chances(found, offsets, parents, self._probabilities)
        sizes = np.diff(offsets)
        lacked = [(r.max_tokens - r.num_output_tokens - 1) for r in self._requests]
        useful = np.asarray(lacked) * [c.width for c in found]
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        chances[place >= np.repeat(useful, sizes)] = 0.0  # too deep for what a request lacks
        limits = np.asarray(self._node_limits())
        worths = node_worths(offsets, chances, parents, self._best, self._path_tokens)
        if self._tenants is not None:
            names = [request.request_id for request in self._requests]
            worths *= np.repeat(self._tenants.weights(names), sizes)
        return CandidateTrees(offsets, parents, chances, worths, limits)

    def _may_grow(self, request: Request) -> bool:
        candidate = self._candidates.get(request.request_id)
        return (
            candidate is not None
            and candidate.at == request.num_tokens
            and request_facts.is_decoding(request)
            and not self._is_silent(request.request_id)
        )

    def _is_silent(self, request_id: str) -> bool:
        """Whether a request, or its class, wants nothing drafted."""
        tracked = self._tracker.get(request_id)
        return tracked is not None and tracked.slo.speculation == "off"

    def _barred(self) -> bool:
        """Whether a request is running beside which no tree can be sampled."""
        return any(
            request.sampling_params is not None
            and request.sampling_params.thinking_token_budget is not None
            for request in self._state.running
        )

    def _node_limits(self) -> list[int]:
        """Most nodes of each request for which there is memory, without anybody's preemption.

        A root needs its own slot and, once accepted, one for the draft; nodes follow. Roots come
        first: a new block goes to a tree only if every running request could have one.
        """
        state, size = self._state, self._block_size
        spare = self._blocks.free - len(state.running)
        limits = []
        for request in self._requests:
            free = self._blocks.spare_slots(request, size) - state.lookahead_tokens
            most = min(self.config.max_nodes, state.max_model_len - request.num_tokens - 1)
            if most > free:
                extra = -(-(most - free) // size)
                if extra <= spare:
                    spare -= extra
                else:
                    most = max(free, 0)
            limits.append(max(most, 0))
        return limits

    def _require(self, candidates: CandidateTrees) -> None:
        """A(r) of every request that has a TPOT and can still keep it."""
        start_s = self._clock.start_s
        step_s = self._step_s()
        ahead = self._limits.ahead()
        for place, request in enumerate(self._requests):
            tracked = self._tracker.get(request.request_id)
            if tracked is None or tracked.missed or tracked.tpot_s == INFINITY:
                continue
            if not tracked.decodes:
                continue
            view = self._limits.view(tracked)
            left = max(request.max_tokens - request.num_output_tokens, 1)
            needs = tpot_needs(view, start_s, left)
            if needs.pace_s * ahead >= step_s:
                candidates.require(place, needs, promised=tracked.promised)

    def _step_s(self) -> float:
        """A step of all roots and of as many nodes as the last one had, by the time to promise
        by."""
        tokens = len(self._state.running) + sum(self._chosen)
        return self._clock.promise_model.predict_s(tokens, self._limits.context())

    def _decide(self, barred: bool) -> None:
        """What is drafted after this step: the chain, equations 8 and 9, and what pays.

        Where first tokens come too late, nothing is drafted that no objective needs: the time is
        the prompts'.
        """
        active = len(self._state.running)
        behind = self._behind()
        late = self._pressure.first_tokens_late(self._clock.now_s)
        idle = late and not behind and not self.config.min_depth
        if barred or not active or idle:
            self.drafting.nothing()
            return
        deepest, widest = depth_and_width(active, self._control())
        least = min(self.config.min_width, widest)
        widths = tuple(w for w in sorted({*WIDTHS, widest}) if least <= w <= widest)
        beginning = sum(request.num_output_tokens == 1 for request in self._state.running)
        least = self.config.min_depth
        load = DraftLoad(active, self._limits.context(), deepest, widths, behind, least, beginning)
        self.drafting.decide(load)
        self._limits.note_drafting(self.drafting.plan.drafting_s)

    def _behind(self) -> int:
        """Requests whose TPOT may need nodes in the step after this one: they ask for more than a
        plain step gives, or lag."""
        lag = 0 if self._trees is None else self._trees.behind(self._step_s())
        step_s = self._clock.verifying_model.predict_s(len(self._state.running))
        ask = sum(
            t.tpot_s < step_s and not t.missed and t.first_token_s is not None
            for t in self._tracker
        )
        return max(lag, ask)

    def plain(self) -> StepTimeModel:
        """Times of steps without trees, for promises to count on."""
        return self._limits.plain()

    def speculative(self, tpot_s: float) -> WayToDecode | None:
        """Decoding with trees that keeps a TPOT, for promises to count on."""
        return self._limits.speculative(tpot_s)

    def sustainable(self, tpot_s: float) -> tuple[float, Speculated]:
        """How many requests keep a TPOT together, by typical step times, and with what trees."""
        return self._limits.sustainable(tpot_s)

    def _control(self) -> TreeControl:
        """Equation 8's B1 is the largest batch within the tightest TPOT, what is accepted of a
        typical tree's best path counted."""
        config, tokens = self.config, self._max_step_tokens
        tightest_s = min((t.tpot_s for t in self._tracker if t.promised), default=INFINITY)
        if tightest_s < INFINITY:
            tokens = self._clock.verifying_model.time_to_tokens(tightest_s * self._limits.ahead())
        return TreeControl(
            verifier_tokens=max(min(tokens, self._max_step_tokens), 1),
            speculator_tokens=config.draft_tokens,
            max_depth=config.max_depth,
            min_depth=config.min_depth,
            max_width=config.max_width,
        )

    def _propose_promised(self, candidates: CandidateTrees) -> None:
        """Choose trees for a step of all roots; the promised requests' are planned with."""
        taken = self._choose(candidates, replace(self._load(None), others=0)).marks > 0
        tokens, gains = self._tokens[taken].tolist(), candidates.gains(taken).tolist()
        end = 0
        for place, (request, count) in enumerate(
            zip(self._requests, candidates.counts(taken).tolist(), strict=True)
        ):
            end += count
            tracked = self._tracker.get(request.request_id)
            if count and tracked is not None and (tracked.promised or tracked.holds_tpot):
                request.spec_token_ids = tokens[end - count : end]
                gain = self._limits.counted_share(self._limits.view(tracked)) * gains[place]
                self.yields.next_step[request.request_id] = 1.0 + gain

    # When a step is planned.

    def select(self, schedule: StepSchedule | None) -> None:
        """Choose the trees of the step, within the time that the plan leaves.

        Args:
            schedule: the plan, whose grants are raised by the nodes; None: vLLM plans by itself.
        """
        candidates = self._trees
        if candidates is None:
            self._chosen = 0, 0
            return
        began_s = time.perf_counter()
        granted = np.asarray([_is_granted(schedule, request) for request in self._requests])
        candidates.leave_out(granted)
        step = self._choose(candidates, self._load(schedule))
        self._place(candidates, step.marks)
        taken = float(candidates.gains(step.marks > 0).sum())
        self.drafting.used(taken / step.hoped if step.hoped else 1.0)
        if schedule is not None:
            for request in itertools.compress(self._requests, granted):
                schedule.token_budget += len(request.spec_token_ids)
                schedule.tokens[request.request_id] = 1 + len(request.spec_token_ids)
        self._selection_s += time.perf_counter() - began_s

    def _choose(self, candidates: CandidateTrees, load: StepLoad) -> StepNodes:
        """The nodes of a step."""
        clock = self._clock
        return nodes_of_step(candidates, load, clock.expected_model, clock.promise_model)

    def _load(self, schedule: StepSchedule | None) -> StepLoad:
        """The step as planned; the nodes planted so far are taken out of the schedule."""
        running, most = self._state.running, self._max_step_tokens
        if schedule is None:
            roots = planned = sum(map(request_facts.is_decoding, running))
            prompts = self._state.waiting or len(running) > roots
            others = most - roots if prompts else 0
            limits = self._limits.limits(self._requests)
            limit_s = min((limit.limit_s for limit in limits), default=INFINITY)
            deadline_s = INFINITY
        else:
            for request in self._requests:
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
            lambda: self._limits.limits(self._requests),
            self._multiple,
        )

    def _place(self, candidates: CandidateTrees, chosen: Marks) -> None:
        """Give each request its chosen nodes, as many as there are extra paths for."""
        for place, request in enumerate(self._requests):
            if request.use_structured_output:
                self._keep_allowed(request, chosen[candidates.part(place)])
        deepest = [r.max_tokens - r.num_output_tokens - 1 for r in self._requests]
        nodes, parents, counts = arrange_trees(
            candidates.offsets,
            candidates.chances,
            candidates.parents,
            chosen,
            np.asarray(deepest, dtype=np.int64),
            self.config.draft_tokens,
        )
        where = nodes + np.repeat(candidates.offsets[:-1], counts)
        found = self._tokens[where]
        tokens, starts, end = found.tolist(), {}, 0
        for request, count in zip(self._requests, counts.tolist(), strict=True):
            request.spec_token_ids = tokens[end : end + count]
            if count:
                starts[request.request_id] = end
                end += count
        self._scheduled = ScheduledTrees(
            starts,
            np.repeat([self._candidates[r.request_id].model for r in self._requests], counts),
            found,
            parents,
            self._probabilities[where],
            self._best[where],
            candidates.chances[where],
        )
        phases = np.bincount(chosen[where], minlength=FOR_THROUGHPUT + 1).tolist()
        self._chosen = phases[FOR_SLO], phases[FOR_THROUGHPUT]

    def _keep_allowed(self, request: Request, chosen: Marks) -> None:
        """Leave of a structured request's chosen nodes what its grammar allows."""
        candidate = self._candidates[request.request_id]
        manager = self._state.structured_output
        kept = np.flatnonzero(chosen).tolist()
        if not kept or not grammar.constrains_now(manager, request):
            chosen[:] = 0
            return
        tokens, parents = token_tree.reorder(
            candidate.tokens.tolist(), candidate.parents.tolist(), kept
        )
        allowed = grammar.allowed(request, tokens, parents)
        chosen[[node for place, node in enumerate(kept) if place not in allowed]] = 0

    # With a step.

    def attach(self, output: SchedulerOutput, shape: BatchShape) -> BatchShape:
        """Attach to a step what the worker must know; the step may have cut trees short. The shape
        is returned without drafting, which is measured apart."""
        drafts = output.scheduled_spec_decode_tokens
        parents_of, starts = self._scheduled.parents.tolist(), self._scheduled.starts
        parents: dict[str, Sequence[int]] = {
            name: parents_of[starts[name] : starts[name] + len(tokens)]
            for name, tokens in drafts.items()
        }
        silent = frozenset(filter(self._is_silent, output.num_scheduled_tokens))
        self._prompt_tokens = 0
        for name, scheduled in output.num_scheduled_tokens.items():
            self._candidates.pop(name, None)
            if scheduled > 1 + len(drafts.get(name, ())):
                self._prompt_tokens += scheduled
        grants = self.drafting.grants(self._speaking(output, silent))
        wait_s = self.drafting.deadline_s(output) if grants else 0.0
        messages.attach(output, StepTrees(parents, self.drafting.plan, silent, grants, wait_s))
        return replace(shape, spec_steps=0)

    def _speaking(self, output: SchedulerOutput, silent: Container[str]) -> list[Request]:
        """Requests that get tokens in a step and want drafts after them."""
        return [
            request
            for name in output.num_scheduled_tokens
            if name not in silent
            and (request := self._state.requests.get(name)) is not None
            and not request.is_prefill_chunk
        ]

    def grammar_output(
        self, output: SchedulerOutput, _as_vllm: Callable[[SchedulerOutput], GrammarOutput | None]
    ) -> GrammarOutput | None:
        """The bit masks of a step: for each structured request one row for the root and one for
        each node of its tree."""
        requests = self._state.requests
        names = [
            name
            for name in output.num_scheduled_tokens
            if (request := requests.get(name))
            and request.use_structured_output
            and not request.is_prefill_chunk
        ]
        if not output.has_structured_output_requests or not names:
            return None
        sent = messages.of(output).parents
        tokens = output.scheduled_spec_decode_tokens
        masks = [
            grammar.masks(
                self._state.structured_output,
                requests[name],
                tokens.get(name, ()),
                sent.get(name, ()),
            )
            for name in names
        ]
        return GrammarOutput(names, np.concatenate(masks), [len(tokens.get(n, ())) for n in names])

    # After a step.

    def drafting_s(self, _output: SchedulerOutput, done: ModelRunnerOutput) -> float:
        """Seconds of a step that went into drafting for the next one."""
        return messages.drafting_of(done).seconds

    def observe(self, output: SchedulerOutput, done: ModelRunnerOutput) -> None:
        """Learn from a step: what was accepted of its trees, and what drafting took."""
        step, report = messages.of(output), messages.drafting_of(done)
        self.drafting.learn(step.plan, report, self._given(done), quiet=not self._prompt_tokens)
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
        """What became of the trees of everybody who decoded in a step."""
        drafts = output.scheduled_spec_decode_tokens
        for name, scheduled in output.num_scheduled_tokens.items():
            offered, index = len(drafts.get(name, ())), done.req_id_to_index.get(name)
            given = [] if index is None else done.sampled_token_ids[index]
            if given and scheduled == 1 + offered:
                yield Verified(name, offered, len(given) - 1)

    def _given(self, done: ModelRunnerOutput) -> list[tuple[int, int]]:
        """Of each request that got tokens how many, and how many it lacked to its longest."""
        requests, sampled = self._state.requests, done.sampled_token_ids
        return [
            (len(sampled[index]), request.max_tokens - request.num_output_tokens)
            for name, index in done.req_id_to_index.items()
            if index < len(sampled) and sampled[index] and (request := requests.get(name))
        ]

    def _learn(self, names: Sequence[str], counts: Ints, given: Sequence[list[int]]) -> None:
        """Learn from the tokens that came ``given`` out of trees of ``counts`` nodes."""
        scheduled, deepest = self._scheduled, self.config.max_depth
        starts = np.asarray([scheduled.starts[name] for name in names], dtype=np.int64)
        lengths = [len(tokens) for tokens in given]
        depths, fates = outcomes(
            starts,
            counts,
            scheduled.tokens,
            scheduled.parents,
            np.cumsum([0, *lengths]),
            np.asarray(list(itertools.chain.from_iterable(given)), dtype=np.int64),
        )
        sums = np.cumsum(np.append(0.0, scheduled.chances))
        hoped = (1.0 + sums[starts + counts] - sums[starts]).tolist()
        for name, hope, length in zip(names, hoped, lengths, strict=True):
            self._limits.observe(name, hope, length)
        seen, hit = fates > 0, fates == ACCEPTED_NODE
        self.drafting.accepted(
            *(scheduled.models[seen], depths[seen], scheduled.probabilities[seen]),
            *(hit[seen], scheduled.best[seen]),
        )
        self._metrics.tree_step(
            accepted=[length - 1 for length in lengths],
            verified_by_depth=np.bincount(depths, minlength=deepest + 1)[1:].tolist(),
            accepted_by_depth=np.bincount(depths[hit], minlength=deepest + 1)[1:].tolist(),
            nodes_slo=self._chosen[0],
            nodes_throughput=self._chosen[1],
        )

    def receive(self, drafts: DraftTokenIds) -> bool:
        """Take the candidates that the worker drafted after the last step."""
        if not isinstance(drafts, DraftTrees):
            return False
        end = 0
        for name, count in zip(drafts.req_ids, drafts.counts, strict=True):
            own = slice(end, end := end + count)
            request = self._state.requests.get(name)
            if count and request is not None and not request.is_finished():
                self._candidates[name] = Candidate(
                    request.num_tokens,
                    self.drafting.author(drafts, name),
                    drafts.width,
                    drafts.tokens[own],
                    drafts.parents[own],
                    drafts.probabilities[own],
                )
        return True

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._candidates.pop(request_id, None)
        self._limits.forget(request_id)
        self.drafting.forget(request_id)


def _is_granted(schedule: StepSchedule | None, request: Request) -> bool:
    """Whether the plan lets a decoding request take part in the step."""
    return schedule is None or schedule.tokens.get(request.request_id, 0) > 0


def _warm_up(max_depth: int) -> None:
    """Compile the hot loops now instead of at the first request."""
    calibration = DraftCalibration(max_depth)
    calibration.observe(np.ones(1, dtype=np.int64), np.full(1, 0.5), np.ones(1, dtype=np.bool_))
    offsets, parents = np.array([0, 1]), np.array([-1], dtype=np.int32)
    chances, _ = calibration.path_probabilities(offsets, parents, np.full(1, 0.5))
    one = np.zeros(1, dtype=np.int64)
    outcomes(one, one + 1, one, parents, np.array([0, 1]), one)
    node_worths(offsets, chances, parents, np.ones(1, dtype=np.bool_), 1.0)
    chosen = select_trees(
        offsets, chances, parents, np.ones(1), np.ones(1), budget=2, most=np.ones(1)
    )
    arrange_trees(offsets, chances, parents, chosen, np.ones(1, dtype=np.int64), 1)
    model, chains = StepTimeModel.prior(), ModelChains(("draft", "middle"), max_depth, 1)
    chains.choose(DraftLoad(1, 0, max_depth), model, 0.0)
    chains.times[0].observe(1, 0.001)
    chains.shapes[0].observe_nodes(np.ones(1), one + 1, np.array([0, 1]))
    drafting_s = chains.drafting_s((0, 1), 1, 1)
    sustained_trees(chains.shapes[0].typical, 1.0, 0.1, model, drafting_s=drafting_s)
    worthwhile_nodes(chances, 1, 0, 0, model, 1)
