# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of trees: candidates come in, selected trees go out with the next step.

A step is planned in three parts. First trees are chosen as if it were of all roots and no prompts:
what objectives need (AdaServe's SLO-customised selection), then what pays; it is planned with the
trees of the promised requests, and what these are expected to yield (``plant``). Then the trees of
everybody who is in the plan are chosen anew, within the time that it leaves (``fill``). Last, the
parents and what is to be drafted next travel with the step (``send``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_slo.config.model import SpeculationConfig
from vllm_slo.core.admission.program import PLAIN, Speculated
from vllm_slo.core.batching.step import decode_limit_s
from vllm_slo.core.speculation import token_tree
from vllm_slo.core.speculation.calibration import ACCEPTED_NODE, DraftCalibration, outcomes
from vllm_slo.core.speculation.candidate_trees import (
    CandidateTrees,
    Marks,
    StepLoad,
    StepNodes,
    TPOTLimit,
    nodes_of_step,
    tpot_needs,
)
from vllm_slo.core.speculation.chain_forecast import DraftLoad
from vllm_slo.core.speculation.measured_trees import MeasuredTrees
from vllm_slo.core.speculation.model_chain import ModelChains
from vllm_slo.core.speculation.tree_arrangement import arrange_trees
from vllm_slo.core.speculation.tree_budget import (
    sustained_trees,
    worthwhile_nodes,
)
from vllm_slo.core.speculation.tree_selection import (
    FOR_SLO,
    FOR_THROUGHPUT,
    node_worths,
    select_trees,
)
from vllm_slo.core.speculation.tree_shape import TreeControl, depth_and_width
from vllm_slo.core.speculation.window_pace import counted_tokens
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY, DecodeView
from vllm_slo.engine.scheduling import request_views
from vllm_slo.engine.scheduling.request_views import SLORequest
from vllm_slo.engine.scheduling.step_planner import Nudge
from vllm_slo.engine.speculation import grammar, messages
from vllm_slo.engine.speculation.draft_models import Candidate, Drafting, Drafts
from vllm_slo.engine.speculation.draft_servers import RemoteDrafting
from vllm_slo.engine.speculation.messages import DraftTrees, StepTrees
from vllm_slo.engine.speculation.tenants import Verified

if TYPE_CHECKING:
    from vllm_slo.engine.scheduler import Scheduler
    from vllm_slo.engine.scheduling.controller import Steering, WayToDecode

logger = init_logger(__name__)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EPS = 1e-9
SURE = 1.1
PROMISED_WINDOW = 16
"""Most tokens over which promises average what trees yield."""
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


class Planted(NamedTuple):
    """The trees that a step verifies, as flat arrays of (K,) nodes, request by request.

    Attributes:
        starts: request -> where its nodes begin.
        models: whose guesses they are.
        tokens: of the nodes.
        parents: by index within the tree, -1 for the root.
        probabilities: the draft's, of each node given its path.
        best: whether the draft gave no sibling more.
        chances: calibrated path probabilities.
    """

    starts: dict[str, int]
    models: Ints
    tokens: Ints
    parents: NDArray[np.int32]
    probabilities: Floats
    best: NDArray[np.bool_]
    chances: Floats

    @classmethod
    def none(cls) -> Planted:
        """No trees."""
        tokens, floats = np.empty(0, dtype=np.int64), np.empty(0)
        return cls({}, tokens, tokens, tokens.astype(np.int32), floats, floats > 0.0, floats)


class Speculation:
    """Plants the trees of each step.

    Args:
        scheduler: whose requests and blocks it reads; of requests it sets ``spec_token_ids``.
        steering: what is promised, and how long steps take.
        config: how deep and wide.

    Attributes:
        drafting: which draft models or servers work, and what their guesses are worth.
    """

    def __init__(self, scheduler: Scheduler, steering: Steering, config: SpeculationConfig) -> None:
        self.scheduler = scheduler
        self.steering = steering
        self.config = config
        on_cpu = scheduler.vllm_config.device_config.device_type == "cpu"
        self._path_tokens = PATH_TOKENS if on_cpu else 0.0
        self._multiple = CPU_MULTIPLE if on_cpu else 1
        self.drafting: Drafts = (
            Drafting(steering, config, self._path_tokens)
            if config.draft_servers is None
            else RemoteDrafting(steering, config)
        )
        self._measured = MeasuredTrees(
            min(steering.config.tpot_window_tokens, PROMISED_WINDOW),
            steering.config.margin_quantile,
        )
        self._candidates: dict[str, Candidate] = {}
        self._planted = Planted.none()
        self._requests: list[Request] = []
        self._views: dict[str, DecodeView] = {}
        self._found_limits: tuple[list[str], list[TPOTLimit]] = [], []
        self._trees: CandidateTrees | None = None
        self._tokens = np.empty(0, dtype=np.int64)
        self._said = np.empty(0)
        self._best = np.empty(0, dtype=np.bool_)
        self._chosen = 0, 0
        self._prompt_tokens = 0
        self._selection_s = 0.0
        steering.speculation = self._promisable
        self._ahead_s: Floats | None = None
        self._dear_s = 0.0
        self._bears: dict[float, tuple[float, Speculated]] = {}
        steering.sustainable = self._sustainable
        _warm_up(config.max_depth)
        steering.metrics.speculation_on(True)

    # Before a step is planned.

    def plant(self) -> None:
        """Give promised requests the trees that the step is to be planned with; decide what is to
        be drafted after it."""
        began_s = time.perf_counter()
        self._bears.clear()
        self._ahead_s = None
        self._views.clear()
        self._found_limits = [], []
        self._planted = Planted.none()
        self.steering.expected.clear()
        for request in self.scheduler.running:
            request.spec_token_ids = []
        barred = self._barred()
        self._trees = None if barred else self._gather()
        if self._trees is not None:
            self._require(self._trees)
        self._decide(barred)
        if self._trees is not None and any(t.promised for t in self.steering.tracked.values()):
            self._plant_promised(self._trees)
        self._selection_s = time.perf_counter() - began_s

    def _gather(self) -> CandidateTrees | None:
        """The candidates of this step; ``self._requests`` are whose they are, those of one draft
        model side by side."""
        mine = self._candidates
        self._requests = [r for r in self.scheduler.running if self._may_grow(r)]
        self._requests.sort(key=lambda r: mine[r.request_id].model)
        if not self._requests:
            return None
        found = [mine[r.request_id] for r in self._requests]
        offsets = np.cumsum([0, *(len(c.tokens) for c in found)])
        parents = np.concatenate([c.parents for c in found])
        self._tokens = np.concatenate([c.tokens for c in found])
        self._said = np.concatenate([c.probabilities for c in found])
        chances, self._best = self.drafting.chances(found, offsets, parents, self._said)
        sizes = np.diff(offsets)
        lacked = [(r.max_tokens - r.num_output_tokens - 1) for r in self._requests]
        useful = np.asarray(lacked) * [c.width for c in found]
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        chances[place >= np.repeat(useful, sizes)] = 0.0  # too deep for what a request lacks
        limits = np.asarray(self._node_limits())
        worths = node_worths(offsets, chances, parents, self._best, self._path_tokens)
        if self.steering.tenants is not None:
            names = [request.request_id for request in self._requests]
            worths *= np.repeat(self.steering.tenants.weights(names), sizes)
        return CandidateTrees(offsets, parents, chances, worths, limits)

    def _may_grow(self, request: Request) -> bool:
        candidate = self._candidates.get(request.request_id)
        return (
            candidate is not None
            and candidate.at == request.num_tokens
            and request_views.is_decoding(request)
            and not self._is_silent(request.request_id)
        )

    def _is_silent(self, request_id: str) -> bool:
        """Whether a request, or its class, wants nothing drafted."""
        tracked = self.steering.tracked.get(request_id)
        return tracked is not None and tracked.slo.speculation == "off"

    def _barred(self) -> bool:
        """Whether a request is running beside which no tree can be sampled."""
        return any(
            request.sampling_params is not None
            and request.sampling_params.thinking_token_budget is not None
            for request in self.scheduler.running
        )

    def _node_limits(self) -> list[int]:
        """Most nodes of each request for which there is memory, without anybody's preemption.

        A root needs its own slot and, once accepted, one for the draft; nodes follow. Roots come
        first: a new block goes to a tree only if every running request could have one.
        """
        scheduler = self.scheduler
        size = scheduler.block_size
        spare = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        spare -= len(scheduler.running)
        limits = []
        held = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        for request in self._requests:
            blocks = held.get(request.request_id, ())
            free = len(blocks) * size - request.num_tokens - scheduler.num_lookahead_tokens
            most = min(self.config.max_nodes, scheduler.max_model_len - request.num_tokens - 1)
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
        steering = self.steering
        start_s = self._start_s()
        step_s = self._step_s()
        ahead = self._ahead()
        for place, request in enumerate(self._requests):
            tracked = steering.tracked.get(request.request_id)
            if tracked is None or tracked.missed or tracked.tpot_s == INFINITY:
                continue
            if not tracked.decodes:
                continue
            view = self._view(tracked)
            left = max(request.max_tokens - request.num_output_tokens, 1)
            needs = tpot_needs(view, start_s, left)
            if needs.pace_s * ahead >= step_s:
                candidates.require(place, needs, promised=tracked.promised)

    def _start_s(self) -> float:
        """When the step begins that is being planned."""
        return self.steering.steps.next_start_s(self.steering.now_s)

    def _view(self, tracked: SLORequest) -> DecodeView:
        """A decoding request before the step, a token of it being expected; looked at once."""
        name = tracked.request.request_id
        if name not in self._views:
            strength = self.steering.steps.strength
            self._views[name] = request_views.decode_view(tracked, self._start_s(), strength)
        return self._views[name]

    def _step_s(self) -> float:
        """A step of all roots and of as many nodes as the last one had, by the time to promise
        by."""
        tokens = len(self.scheduler.running) + sum(self._chosen)
        return self.steering.steps.promise_model.predict_s(tokens, self._context())

    def _ahead(self) -> float:
        """Tokens that a step yields at best, of a typical tree."""
        return 1.0 + float(self.drafting.typical[:, 0].sum())

    def _decide(self, barred: bool) -> None:
        """What is drafted after this step: the chain, equations 8 and 9, and what pays.

        Where first tokens come too late, nothing is drafted that no objective needs: the time is
        the prompts'.
        """
        active = len(self.scheduler.running)
        behind = self._behind()
        late = self.steering.pressure.first_tokens_late(self.steering.now_s)
        idle = late and not behind and not self.config.min_depth
        if barred or not active or idle:
            self.drafting.nothing()
            return
        deepest, widest = depth_and_width(active, self._control())
        least = min(self.config.min_width, widest)
        widths = tuple(w for w in sorted({*WIDTHS, widest}) if least <= w <= widest)
        beginning = sum(request.num_output_tokens == 1 for request in self.scheduler.running)
        least = self.config.min_depth
        load = DraftLoad(active, self._context(), deepest, widths, behind, least, beginning)
        self.drafting.decide(load)
        self._dear_s = max(0.8 * self._dear_s, self.drafting.plan.drafting_s)

    def _drafting_s(self) -> Floats:
        """(depths,) seconds of drafting for all who run, by how far ahead; asked several times in a
        step, so answered once."""
        if self._ahead_s is None:
            self._ahead_s = self.drafting.ahead_s(len(self.scheduler.running))
        return self._ahead_s

    def _behind(self) -> int:
        """Requests whose TPOT may need nodes in the step after this one: they ask for more than a
        plain step gives, or lag."""
        lag = 0 if self._trees is None else self._trees.behind(self._step_s())
        step_s = self.steering.steps.verifying_model.predict_s(len(self.scheduler.running))
        ask = sum(
            t.tpot_s < step_s and not t.missed and t.first_token_s is not None
            for t in self.steering.tracked.values()
        )
        return max(lag, ask)

    def _sustainable(self, tpot_s: float) -> tuple[float, Speculated]:
        """How many requests keep a TPOT together, by typical step times, and with what trees; asked
        for every request that waits, so answered once a step."""
        if tpot_s not in self._bears:
            messages, _, most = sustained_trees(
                self.drafting.typical,
                1.0,
                tpot_s,
                self.steering.steps.verifying_model,
                drafting_s=self._drafting_s(),
            )
            self._bears[tpot_s] = most, messages
        return self._bears[tpot_s]

    def _promisable(self, tpot_s: float) -> WayToDecode | None:
        """Decoding with trees that keeps a TPOT, for promises to count on."""
        steps, share = self.steering.steps, self._measured.share()
        plain = steps.plain_promise_model
        speculated, drafting_s, _ = sustained_trees(
            self.drafting.typical,
            share,
            tpot_s,
            plain,
            drafting_s=self._drafting_s() * steps.margin,
        )
        return None if speculated == PLAIN else (plain.besides(drafting_s), speculated)

    def _control(self) -> TreeControl:
        """Equation 8's B1 is the largest batch within the tightest TPOT, what is accepted of a
        typical tree's best path counted."""
        config, steering = self.config, self.steering
        tightest_s = min(
            (t.tpot_s for t in steering.tracked.values() if t.promised), default=INFINITY
        )
        tokens = steering.max_step_tokens
        if tightest_s < INFINITY:
            tokens = steering.steps.verifying_model.time_to_tokens(tightest_s * self._ahead())
        return TreeControl(
            verifier_tokens=max(min(tokens, steering.max_step_tokens), 1),
            speculator_tokens=config.draft_tokens,
            max_depth=config.max_depth,
            min_depth=config.min_depth,
            max_width=config.max_width,
        )

    def _plant_promised(self, candidates: CandidateTrees) -> None:
        """Choose trees for a step of all roots; the promised requests' are planned with."""
        steering = self.steering
        taken = self._choose(candidates, replace(self._load(None), others=0)).marks > 0
        tokens, gains = self._tokens[taken].tolist(), candidates.gains(taken).tolist()
        end = 0
        for place, (request, count) in enumerate(
            zip(self._requests, candidates.counts(taken).tolist(), strict=True)
        ):
            end += count
            tracked = steering.tracked.get(request.request_id)
            if count and tracked is not None and (tracked.promised or tracked.holds_tpot):
                request.spec_token_ids = tokens[end - count : end]
                gain = self._counted_share(self._view(tracked)) * gains[place]
                steering.expected[request.request_id] = 1.0 + gain

    # When a step is planned.

    def fill(self, nudge: Nudge | None) -> None:
        """Plant the trees of the step, within the time that the plan leaves.

        Args:
            nudge: the plan, whose grants are raised by the nodes; None: vLLM plans by itself.
        """
        candidates = self._trees
        if candidates is None:
            self._chosen = 0, 0
            return
        began_s = time.perf_counter()
        granted = np.asarray([_is_granted(nudge, request) for request in self._requests])
        candidates.leave_out(granted)
        step = self._choose(candidates, self._load(nudge))
        self._plant(candidates, step.marks)
        taken = float(candidates.gains(step.marks > 0).sum())
        self.drafting.used(taken / step.hoped if step.hoped else 1.0)
        if nudge is not None:
            for request in itertools.compress(self._requests, granted):
                nudge.token_budget += len(request.spec_token_ids)
                nudge.tokens[request.request_id] = 1 + len(request.spec_token_ids)
        self._selection_s += time.perf_counter() - began_s

    def _choose(self, candidates: CandidateTrees, load: StepLoad) -> StepNodes:
        """The nodes of a step."""
        steps = self.steering.steps
        return nodes_of_step(candidates, load, steps.expected_model, steps.promise_model)

    def _load(self, nudge: Nudge | None) -> StepLoad:
        """The step as planned; the nodes planted so far are taken out of the nudge."""
        running, most = self.scheduler.running, self.steering.max_step_tokens
        if nudge is None:
            roots = planned = sum(map(request_views.is_decoding, running))
            prompts = self.scheduler.waiting or len(running) > roots
            others = most - roots if prompts else 0
            limit_s = min((limit.limit_s for limit in self._limits()), default=INFINITY)
            deadline_s = INFINITY
        else:
            for request in self._requests:
                if nudge.tokens.get(request.request_id):
                    nudge.token_budget -= len(request.spec_token_ids)
            roots = sum(
                request_views.is_decoding(r) and bool(nudge.tokens.get(r.request_id))
                for r in running
            )
            planned, limit_s = nudge.token_budget, nudge.limit_s
            deadline_s = nudge.deadline_s
            others = max(planned - roots, 0)
        return StepLoad(
            roots,
            others,
            planned,
            self._context(),
            most,
            limit_s,
            deadline_s,
            self._limits,
            self._multiple,
        )

    def _context(self) -> int:
        """KV tokens that the running requests read."""
        return sum(r.num_computed_tokens for r in self.scheduler.running)

    def _limits(self) -> list[TPOTLimit]:
        """Longest step of a token that keeps the TPOT of each promised request that decodes."""
        tracked = self.steering.tracked
        names = [name for name, one in tracked.items() if one.promised and one.decodes]
        known, limits = self._found_limits
        if names != known:  # promises come and go while a step is planned
            limits = self._find_limits(names)
            self._found_limits = names, limits
        return limits

    def _find_limits(self, names: Sequence[str]) -> list[TPOTLimit]:
        start_s = self._start_s()
        places = {request.request_id: place for place, request in enumerate(self._requests)}
        found = []
        for name in names:
            tracked = self.steering.tracked[name]
            view = self._view(tracked)
            if view.window_end_s > start_s:  # else it is lost, and hurries nobody
                limit_s = decode_limit_s(start_s, view, 0.0)
                tpot_s = tracked.tpot_s * self._counted_share(view)
                found.append(TPOTLimit(limit_s, tpot_s, places.get(name, -1)))
        return found

    def _counted_share(self, view: DecodeView) -> float:
        """Share of a tree's gain that a step may be stretched for."""
        hoped = max(self._ahead(), 1.0 + EPS)
        counted = counted_tokens(self._start_s(), view, hoped, self._sure_s())
        return (counted - 1.0) / (hoped - 1.0)

    def _sure_s(self) -> float:
        """Seconds of a step of all who decode without trees."""
        model = self.steering.steps.plain_promise_model
        plain_s = model.predict_s(max(len(self.scheduler.running), 1), self._context())
        return SURE * (plain_s + self._dear_s)

    def _plant(self, candidates: CandidateTrees, chosen: Marks) -> None:
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
        self._planted = Planted(
            starts,
            np.repeat([self._candidates[r.request_id].model for r in self._requests], counts),
            found,
            parents,
            self._said[where],
            self._best[where],
            candidates.chances[where],
        )
        phases = np.bincount(chosen[where], minlength=FOR_THROUGHPUT + 1).tolist()
        self._chosen = phases[FOR_SLO], phases[FOR_THROUGHPUT]

    def _keep_allowed(self, request: Request, chosen: Marks) -> None:
        """Leave of a structured request's chosen nodes what its grammar allows."""
        candidate = self._candidates[request.request_id]
        manager = self.scheduler.structured_output_manager
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

    def send(self, output: SchedulerOutput) -> None:
        """Attach to a step what the worker must know; the step may have cut trees short."""
        drafts = output.scheduled_spec_decode_tokens
        planted, starts = self._planted.parents.tolist(), self._planted.starts
        parents: dict[str, Sequence[int]] = {
            name: planted[starts[name] : starts[name] + len(tokens)]
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

    def _speaking(self, output: SchedulerOutput, silent: Container[str]) -> list[Request]:
        """Requests that get tokens in a step and want drafts after them."""
        return [
            request
            for name in output.num_scheduled_tokens
            if name not in silent
            and (request := self.scheduler.requests.get(name)) is not None
            and not request.is_prefill_chunk
        ]

    def grammar_output(self, output: SchedulerOutput) -> GrammarOutput | None:
        """The bit masks of a step: one row for each node of a structured request's tree."""
        scheduler = self.scheduler
        names = [
            name
            for name in output.num_scheduled_tokens
            if (request := scheduler.requests.get(name))
            and request.use_structured_output
            and not request.is_prefill_chunk
        ]
        if not output.has_structured_output_requests or not names:
            return None
        sent = messages.of(output).parents
        tokens = output.scheduled_spec_decode_tokens
        masks = [
            grammar.masks(
                scheduler.structured_output_manager,
                scheduler.requests[name],
                tokens.get(name, ()),
                sent.get(name, ()),
            )
            for name in names
        ]
        return GrammarOutput(names, np.concatenate(masks), [len(tokens.get(n, ())) for n in names])

    # After a step.

    def observe(self, output: SchedulerOutput, done: ModelRunnerOutput) -> None:
        """Learn from a step: what was accepted of its trees, and what drafting took."""
        step, report = messages.of(output), messages.drafting_of(done)
        self.drafting.learn(step.plan, report, self._given(done), quiet=not self._prompt_tokens)
        self.steering.metrics.tree_times(draft_s=report.seconds, selection_s=self._selection_s)
        self.drafting.observe(self._round(output, done))
        if self.steering.tenants is not None:
            self.steering.tenants.observe(self._round(output, done))
        names, given = [], []
        for name in step.parents:
            index = done.req_id_to_index.get(name)
            known = index is not None and name in self._planted.starts
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
        requests, sampled = self.scheduler.requests, done.sampled_token_ids
        return [
            (len(sampled[index]), request.max_tokens - request.num_output_tokens)
            for name, index in done.req_id_to_index.items()
            if index < len(sampled) and sampled[index] and (request := requests.get(name))
        ]

    def _learn(self, names: Sequence[str], counts: Ints, given: Sequence[list[int]]) -> None:
        """Learn from the tokens that came ``given`` out of trees of ``counts`` nodes."""
        planted, deepest = self._planted, self.config.max_depth
        starts = np.asarray([planted.starts[name] for name in names], dtype=np.int64)
        lengths = [len(tokens) for tokens in given]
        depths, fates = outcomes(
            starts,
            counts,
            planted.tokens,
            planted.parents,
            np.cumsum([0, *lengths]),
            np.asarray(list(itertools.chain.from_iterable(given)), dtype=np.int64),
        )
        sums = np.cumsum(np.append(0.0, planted.chances))
        hoped = (1.0 + sums[starts + counts] - sums[starts]).tolist()
        for name, hope, length in zip(names, hoped, lengths, strict=True):
            self._measured.observe(name, hope, length)
        seen, hit = fates > 0, fates == ACCEPTED_NODE
        self.drafting.accepted(
            *(planted.models[seen], depths[seen], planted.probabilities[seen]),
            *(hit[seen], planted.best[seen]),
        )
        self.steering.metrics.tree_step(
            accepted=[length - 1 for length in lengths],
            verified_by_depth=np.bincount(depths, minlength=deepest + 1)[1:].tolist(),
            accepted_by_depth=np.bincount(depths[hit], minlength=deepest + 1)[1:].tolist(),
            nodes_slo=self._chosen[0],
            nodes_throughput=self._chosen[1],
        )

    def offer(self, drafts: DraftTrees) -> None:
        """Take the candidates that the worker drafted after the last step."""
        end = 0
        for name, count in zip(drafts.req_ids, drafts.counts, strict=True):
            own = slice(end, end := end + count)
            request = self.scheduler.requests.get(name)
            if count and request is not None and not request.is_finished():
                self._candidates[name] = Candidate(
                    request.num_tokens,
                    self.drafting.author(drafts, name),
                    drafts.width,
                    drafts.tokens[own],
                    drafts.parents[own],
                    drafts.probabilities[own],
                )

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._candidates.pop(request_id, None)
        self._measured.forget(request_id)
        self.drafting.forget(request_id)


def _is_granted(nudge: Nudge | None, request: Request) -> bool:
    """Whether the plan lets a decoding request take part in the step."""
    return nudge is None or nudge.tokens.get(request.request_id, 0) > 0


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
