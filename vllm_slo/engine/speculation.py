# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of trees: candidates come in, selected trees go out with the next step.

A step is planned in three parts. First each promised request gets the nodes that its TPOT needs in
this step, and the step is planned with them (``plant_needed``, AdaServe's SLO-customised
selection). Then the time that the plan leaves, as far as it pays, goes to the likeliest nodes of
all requests (``fill``, throughput-optimised selection). Last, the parents and what is to be drafted
next travel with the step (``send``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_slo.config import SpeculationConfig
from vllm_slo.core import token_tree
from vllm_slo.core.admission import PLAIN
from vllm_slo.core.batch_plan import decode_limit_s
from vllm_slo.core.draft_calibration import DraftCalibration
from vllm_slo.core.tree_budget import (
    DraftDepth,
    DraftTimes,
    MeasuredSpeculation,
    node_floor,
    worthwhile_nodes,
)
from vllm_slo.core.tree_selection import (
    FOR_SLO,
    FOR_THROUGHPUT,
    TreeControl,
    arrange_trees,
    depth_and_width,
    select_trees,
)
from vllm_slo.core.types import INFINITY
from vllm_slo.engine import tree_grammar, trees, views
from vllm_slo.engine.step_planner import Nudge
from vllm_slo.engine.trees import DraftTrees, StepTrees

if TYPE_CHECKING:
    from vllm_slo.engine.scheduler import Scheduler
    from vllm_slo.engine.steering import Steering

logger = init_logger(__name__)

Floats = NDArray[np.float64]
Marks = NDArray[np.int8]

SURE_SHARE = 0.8
"""Of the expected tokens of a tree, what a promise is lengthened by."""
PROMISED_WINDOW = 16
"""Most tokens over which promises average what trees yield."""


@dataclass(slots=True)
class Candidate:
    """What the draft guesses of one request.

    Attributes:
        at: tokens of the request when it was drafted; of another length, it is out of date.
        tokens, parents: the nodes.
        probabilities: the draft's, of each node given its path.
    """

    at: int
    tokens: NDArray[np.int64]
    parents: NDArray[np.int32]
    probabilities: Floats


class Planted(NamedTuple):
    """The part of it that a step verifies; lists of one length."""

    tokens: list[int]
    parents: list[int]
    probabilities: list[float]


class Grove:
    """The candidates of all requests that one step could verify, as flat arrays.

    Attributes:
        requests: whose they are.
        found: their candidates.
        offsets, parents: as ``tree_selection`` takes them.
        chances: calibrated path probabilities.
        limits: most nodes of each request.
        required: A(r) of each request; -inf where nothing is needed, or nothing helps.
        promised: whether it is promised.
        pace_s: seconds per token at which each request still keeps its TPOT; infinite without one.
        slo_floor: least path probability of a node that is to help an objective.
    """

    def __init__(
        self,
        requests: list[Request],
        found: list[Candidate],
        limits: list[int],
        calibration: DraftCalibration,
    ) -> None:
        self.requests = requests
        self.found = found
        self.limits = np.asarray(limits, dtype=np.int64)
        self.offsets = np.cumsum([0, *(len(c.tokens) for c in found)])
        self.parents = np.concatenate([c.parents for c in found])
        said = np.concatenate([c.probabilities for c in found])
        self.chances = calibration.path_probabilities(self.offsets, self.parents, said)
        self.required = np.full(len(requests), -INFINITY)
        self.pace_s = np.full(len(requests), INFINITY)
        self.slo_floor = 0.0
        self.promised = np.zeros(len(requests), dtype=np.bool_)

    def part(self, place: int) -> slice:
        """Where the nodes of one request lie."""
        return slice(int(self.offsets[place]), int(self.offsets[place + 1]))

    def select(self, budget: int, *, throughput: bool) -> Marks:
        """Algorithm 2 over the grove."""
        return select_trees(
            self.offsets,
            self.chances,
            self.parents,
            self.required,
            np.full(len(self.requests), len(self.chances)),
            budget=budget,
            most=self.limits,
            throughput_phase=throughput,
            slo_floor=self.slo_floor,
        )


class Speculation:
    """Plants the trees of each step.

    Args:
        scheduler: whose requests and blocks it reads; of requests it sets ``spec_token_ids``.
        steering: what is promised, and how long steps take.
        config: how deep and wide.

    Attributes:
        calibration: what the draft's probabilities are worth.
        failed: whether the draft has stopped for good.
    """

    def __init__(self, scheduler: Scheduler, steering: Steering, config: SpeculationConfig) -> None:
        self.scheduler = scheduler
        self.steering = steering
        self.config = config
        self.calibration = DraftCalibration(config.max_depth)
        self.failed = False
        self._depths = DraftDepth(config.max_depth, config.max_width)
        self._times = DraftTimes()
        self._measured = MeasuredSpeculation(
            min(steering.config.tpot_window_tokens, PROMISED_WINDOW),
            steering.config.margin_quantile,
        )
        self._shape = 0, 1
        self._candidates: dict[str, Candidate] = {}
        self._planted: dict[str, Planted] = {}
        self._grove: Grove | None = None
        self._needed = 0
        self._chosen = 0, 0
        self._selection_s = 0.0
        steering.speculated = self._measured.speculated
        _warm_up(config.max_depth)
        steering.metrics.speculation_on(True)

    # Before a step is planned.

    def plant_needed(self) -> None:
        """Give promised requests the nodes that their TPOT needs, for the step to be planned with
        them; decide what is to be drafted after it."""
        began_s = time.perf_counter()
        self._planted.clear()
        self.steering.expected.clear()
        self._chosen = 0, 0
        self._needed = 0
        for request in self.scheduler.running:
            request.spec_token_ids = []
        self._grove = self._gather()
        if self._grove is not None:
            self._require(self._grove)
        self._decide_shape()
        if self._grove is not None and self._grove.required.max() > 1.0:
            self._plant_needed(self._grove)
        self._selection_s = time.perf_counter() - began_s

    def _gather(self) -> Grove | None:
        requests = [r for r in self.scheduler.running if self._may_grow(r)]
        if not requests or self._barred():
            return None
        found = [self._candidates[r.request_id] for r in requests]
        grove = Grove(requests, found, self._node_limits(requests), self.calibration)
        depth, width = self._shape
        if depth and len(grove.chances) == len(requests) * depth * width:
            self._depths.observe(grove.chances.reshape(len(requests), -1), depth, width)
        return grove

    def _may_grow(self, request: Request) -> bool:
        candidate = self._candidates.get(request.request_id)
        return (
            candidate is not None
            and candidate.at == request.num_tokens
            and views.is_decoding(request)
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

    def _node_limits(self, requests: list[Request]) -> list[int]:
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
        for request in requests:
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

    def _require(self, grove: Grove) -> None:
        """A(r) of every request that has a TPOT and can still keep it, for a step of the roots
        alone."""
        steering = self.steering
        start_s = steering.steps.next_start_s(steering.now_s)
        roots = len(self.scheduler.running)
        step_s = steering.steps.promise_model.predict_s(roots, self._context())
        ahead = self._ahead()
        strength = steering.steps.strength
        for place, request in enumerate(grove.requests):
            tracked = steering.tracked.get(request.request_id)
            if tracked is None or tracked.missed or tracked.tpot_s == INFINITY:
                continue
            needs = views.tpot_needs(tracked, start_s, start_s + step_s, strength)
            if needs is not None and needs.pace_s * ahead >= step_s:
                grove.pace_s[place], grove.required[place] = needs
                grove.promised[place] = tracked.promised
        behind = int(np.count_nonzero(grove.required > 1.0))
        model = steering.steps.expected_model
        grove.slo_floor = node_floor(behind, roots, ahead, model, step_s)

    def _ahead(self) -> float:
        """Tokens that a step yields at best, of a typical tree."""
        return 1.0 + float(self._depths.typical.chances[:, 0].sum())

    def _decide_shape(self) -> None:
        """Depth and width of what is drafted after this step: equations 8 and 9, and what pays."""
        active = len(self.scheduler.running)
        steps = self.steering.steps
        if self.failed or not active:
            self._shape = 0, 1
            steps.drafting(0.0, 0.0)
            return
        deepest, width = depth_and_width(active, self._control())
        beams = min(active * width, self.config.draft_tokens)
        pass_s = self._times.pass_s(beams)
        model, context = steps.verifying_model, self._context()
        depth = self._depths.choose(active, context, deepest, width, pass_s, model)
        if self._wanting():
            step_s = model.predict_s(active, context)
            depth = max(depth, self._depths.fastest(step_s, deepest, width, pass_s))
        depth = max(depth, self.config.min_depth)
        self._shape = depth, width
        steps.drafting(depth * pass_s, self._times.token_s if depth else 0.0)

    def _wanting(self) -> bool:
        """Whether a request's TPOT may need nodes in the step after this one: it asks for more
        than a plain step gives, or lags."""
        if self._grove is not None and self._grove.required.max() > 1.0:
            return True
        step_s = self.steering.steps.verifying_model.predict_s(len(self.scheduler.running))
        return any(
            t.tpot_s < step_s and not t.missed and t.first_token_s is not None
            for t in self.steering.tracked.values()
        )

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

    def _plant_needed(self, grove: Grove) -> None:
        """Choose what objectives need; the promised requests' part is planned with."""
        chosen = grove.select(self.steering.max_step_tokens, throughput=False)
        self._needed = int(np.count_nonzero(chosen))
        gains = np.add.reduceat(np.where(chosen > 0, grove.chances, 0.0), grove.offsets[:-1])
        grove.pace_s *= 1.0 + gains
        for place in np.flatnonzero(grove.promised):
            request, part = grove.requests[place], grove.part(place)
            nodes = np.flatnonzero(chosen[part])
            if len(nodes):
                request.spec_token_ids = grove.found[place].tokens[nodes].tolist()
                gain = float(grove.chances[part][nodes].sum())
                self.steering.expected[request.request_id] = 1.0 + gain

    # When a step is planned.

    def fill(self, nudge: Nudge | None) -> None:
        """Plant the trees of the step, within the time that the plan leaves.

        Args:
            nudge: the plan, whose grants are raised by the nodes; None: vLLM plans by itself.
        """
        grove = self._grove
        if grove is None:
            return
        began_s = time.perf_counter()
        granted = np.asarray([_is_granted(nudge, request) for request in grove.requests])
        grove.limits = np.where(granted, grove.limits, 0)
        roots, others, room = self._room(nudge, grove)
        likely = np.sort(grove.chances[np.repeat(granted, np.diff(grove.offsets))])[::-1]
        model = self.steering.steps.expected_model
        most = self.steering.max_step_tokens - roots - others
        nodes = worthwhile_nodes(likely, roots, others, self._context(), model, most)
        needed = min(self._needed, max(room, 0))
        worthwhile = nodes
        nodes = min(nodes, self._unhurried(grove, roots + others, needed))
        if nodes > room:
            nodes = self._affordable(grove, likely, nodes, roots + others, nudge) or max(room, 0)
        nodes = max(nodes, needed)
        budget = len(grove.requests) + nodes
        chosen = grove.select(budget, throughput=True)
        self._plant(grove, chosen)
        hoped = float(likely[:worthwhile].sum())
        self._depths.used(float(grove.chances[chosen > 0].sum()) / hoped if hoped else 1.0)
        if nudge is not None:
            for request in itertools.compress(grove.requests, granted):
                nudge.token_budget += len(request.spec_token_ids)
                nudge.tokens[request.request_id] = 1 + len(request.spec_token_ids)
        self._selection_s += time.perf_counter() - began_s

    def _room(self, nudge: Nudge | None, grove: Grove) -> tuple[int, int, int]:
        """(requests that decode in the step, its other tokens, nodes for which there is time).

        The nodes planted so far are taken out of the nudge.
        """
        scheduler, steering = self.scheduler, self.steering
        most = steering.max_step_tokens
        if nudge is None:
            roots = sum(views.is_decoding(r) for r in scheduler.running)
            prompts = scheduler.waiting or len(scheduler.running) > roots
            return roots, (most - roots if prompts else 0), self._free(roots, self._limit_s())
        for request in grove.requests:
            if nudge.tokens.get(request.request_id):
                nudge.token_budget -= len(request.spec_token_ids)
        roots = sum(
            views.is_decoding(r) and bool(nudge.tokens.get(r.request_id)) for r in scheduler.running
        )
        others = max(nudge.token_budget - roots, 0)
        return roots, others, self._free(nudge.token_budget, nudge.limit_s)

    def _free(self, used: int, limit_s: float) -> int:
        """Tokens that a step of ``used`` tokens may still take."""
        most = self.steering.max_step_tokens
        if limit_s < INFINITY:
            model = self.steering.steps.promise_model
            most = min(most, model.time_to_tokens(limit_s, self._context()))
        return most - used

    def _context(self) -> int:
        """KV tokens that the running requests read."""
        return sum(r.num_computed_tokens for r in self.scheduler.running)

    def _unhurried(self, grove: Grove, used: int, needed: int) -> int:
        """Nodes beside which requests that hurry without a promise still keep their TPOT; where
        even the ``needed`` ones take too long, those that cost no time."""
        hurry_s = float(grove.pace_s.min())
        if hurry_s == INFINITY:
            return self.steering.max_step_tokens
        model = self.steering.steps.expected_model
        context = self._context()
        least_s = model.predict_s(used + needed, context)
        return model.time_to_tokens(max(hurry_s, least_s), context) - used

    def _affordable(
        self, grove: Grove, likely: Floats, most: int, used: int, nudge: Nudge | None
    ) -> int:
        """Nodes, at most ``most``, that make a step longer than a TPOT allows and yield the tokens
        to make up for it; 0 where none do, or a prompt's deadline is what limits the step."""
        limits = self._limits_s()
        if nudge is not None and nudge.limit_s < min(limits.values(), default=INFINITY) - 1e-6:
            return 0
        places = {request.request_id: place for place, request in enumerate(grove.requests)}
        tracked = self.steering.tracked
        context = self._context()
        for nodes in (most, most * 3 // 4, most // 2, most // 4):
            if nodes < 1:
                break
            taken = np.where(grove.chances >= likely[nodes - 1], grove.chances, 0.0)
            gains = SURE_SHARE * np.add.reduceat(taken, grove.offsets[:-1])
            step_s = self.steering.steps.promise_model.predict_s(used + nodes, context)
            if all(
                step_s
                <= limit_s + (gains[places[name]] if name in places else 0.0) * tracked[name].tpot_s
                for name, limit_s in limits.items()
            ):
                return nodes
        return 0

    def _limit_s(self) -> float:
        """Longest step that keeps every promise of a batch that vLLM plans by itself."""
        return min(self._limits_s().values(), default=INFINITY)

    def _limits_s(self) -> dict[str, float]:
        """Longest step that keeps the TPOT of each promised request that decodes."""
        steering = self.steering
        steps = steering.steps
        start_s = steps.next_start_s(steering.now_s)
        shortest_s = steps.promise_model.predict_s(len(self.scheduler.running))
        return {
            name: decode_limit_s(start_s, steering.decode_view(tracked, start_s), shortest_s)
            for name, tracked in steering.tracked.items()
            if tracked.promised and tracked.decodes
        }

    def _plant(self, grove: Grove, chosen: Marks) -> None:
        """Give each request its chosen nodes, as many as there are extra paths for."""
        for place, request in enumerate(grove.requests):
            request.spec_token_ids = []
            if request.use_structured_output:
                self._keep_allowed(request, grove.found[place], chosen[grove.part(place)])
        deepest = [r.max_tokens - r.num_output_tokens - 1 for r in grove.requests]
        nodes, parents, counts = arrange_trees(
            grove.offsets,
            grove.chances,
            grove.parents,
            chosen,
            np.asarray(deepest, dtype=np.int64),
            self.config.draft_tokens,
        )
        phases = [0, 0, 0]
        ends = np.cumsum(counts).tolist()
        for place, (end, count) in enumerate(zip(ends, counts.tolist(), strict=True)):
            if not count:
                continue
            candidate, request = grove.found[place], grove.requests[place]
            order = nodes[end - count : end]
            request.spec_token_ids = candidate.tokens[order].tolist()
            self._planted[request.request_id] = Planted(
                request.spec_token_ids,
                parents[end - count : end].tolist(),
                candidate.probabilities[order].tolist(),
            )
            for phase in chosen[grove.part(place)][order].tolist():
                phases[phase] += 1
        self._chosen = phases[FOR_SLO], phases[FOR_THROUGHPUT]

    def _keep_allowed(self, request: Request, candidate: Candidate, chosen: Marks) -> None:
        """Leave of a structured request's chosen nodes what its grammar allows."""
        manager = self.scheduler.structured_output_manager
        kept = np.flatnonzero(chosen).tolist()
        if not kept or not tree_grammar.constrains_now(manager, request):
            chosen[:] = 0
            return
        tokens, parents = token_tree.reorder(
            candidate.tokens.tolist(), candidate.parents.tolist(), kept
        )
        allowed = tree_grammar.allowed(request, tokens, parents)
        chosen[[node for place, node in enumerate(kept) if place not in allowed]] = 0

    # With a step.

    def send(self, output: SchedulerOutput) -> None:
        """Attach to a step what the worker must know; the step may have cut trees short."""
        drafts = output.scheduled_spec_decode_tokens
        parents: dict[str, Sequence[int]] = {
            name: self._planted[name].parents[: len(tokens)] for name, tokens in drafts.items()
        }
        silent = frozenset(filter(self._is_silent, output.num_scheduled_tokens))
        prompt_tokens = 0
        for name, scheduled in output.num_scheduled_tokens.items():
            self._candidates.pop(name, None)
            if scheduled > 1 + len(drafts.get(name, ())):
                prompt_tokens += scheduled
        trees.attach(output, StepTrees(parents, *self._shape, silent, prompt_tokens))

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
        sent = trees.of(output).parents
        tokens = output.scheduled_spec_decode_tokens
        masks = [
            tree_grammar.masks(
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
        step = trees.of(output)
        drafting_s = trees.drafting_s(done)
        beams = min(len(output.num_scheduled_tokens) * step.width, self.config.draft_tokens)
        self._times.observe(step.depth, beams, step.prompt_tokens, drafting_s)
        self.steering.metrics.tree_times(draft_s=drafting_s, selection_s=self._selection_s)
        seen = _Seen(self.config.max_depth)
        for name, parents in step.parents.items():
            index = done.req_id_to_index.get(name)
            planted = self._planted.get(name)
            if index is not None and planted is not None and done.sampled_token_ids[index]:
                given = done.sampled_token_ids[index]
                seen.walk(planted, parents, given)
                self._measured.observe(name, len(parents), len(given))
        if seen.accepted:
            self.calibration.observe(
                np.asarray(seen.depths), np.asarray(seen.said), np.asarray(seen.hits)
            )
            self.steering.metrics.tree_step(
                accepted=seen.accepted,
                verified_by_depth=seen.verified_by_depth,
                accepted_by_depth=seen.accepted_by_depth,
                nodes_slo=self._chosen[0],
                nodes_throughput=self._chosen[1],
            )

    def offer(self, drafts: DraftTrees) -> None:
        """Take the candidates that the worker drafted after the last step."""
        if drafts.failure is not None and not self.failed:
            self.failed = True
            self.steering.speculated = lambda: PLAIN
            self.steering.metrics.speculation_on(False)
            logger.error("vllm-slo: speculation is off: %s", drafts.failure)
        for row, name in enumerate(drafts.req_ids):
            request = self.scheduler.requests.get(name)
            if request is not None and not request.is_finished():
                self._candidates[name] = Candidate(
                    request.num_tokens,
                    drafts.tokens[row],
                    drafts.parents[row],
                    drafts.probabilities[row],
                )

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._candidates.pop(request_id, None)
        self._measured.forget(request_id)


class _Seen:
    """What became of the nodes of a step's trees.

    Attributes:
        accepted: accepted nodes of each tree.
        depths, said, hits: of every node whose parent was accepted: its depth, the draft's
            probability, whether it was accepted.
        verified_by_depth, accepted_by_depth: nodes, from depth 1 on.
    """

    def __init__(self, max_depth: int) -> None:
        self.accepted: list[int] = []
        self.depths: list[int] = []
        self.said: list[float] = []
        self.hits: list[bool] = []
        self.verified_by_depth = [0] * max_depth
        self.accepted_by_depth = [0] * max_depth

    def walk(self, planted: Planted, parents: Sequence[int], given: list[int]) -> None:
        """Follow the tokens that came out of one tree."""
        self.accepted.append(len(given) - 1)
        for depth in token_tree.depths(parents):
            self.verified_by_depth[depth - 1] += 1
        due = {-1: (1, given[0])}  # visited node -> depth and token of what follows it
        for node, parent in enumerate(parents):
            if parent not in due:
                continue
            depth, token = due[parent]
            hit = planted.tokens[node] == token
            self.depths.append(depth)
            self.said.append(planted.probabilities[node])
            self.hits.append(hit)
            if hit:
                self.accepted_by_depth[depth - 1] += 1
                if depth < len(given):
                    due[node] = depth + 1, given[depth]


def _is_granted(nudge: Nudge | None, request: Request) -> bool:
    """Whether the plan lets a decoding request take part in the step."""
    return nudge is None or nudge.tokens.get(request.request_id, 0) > 0


def _warm_up(max_depth: int) -> None:
    """Compile the hot loops now instead of at the first request."""
    calibration = DraftCalibration(max_depth)
    calibration.observe(np.ones(1, dtype=np.int64), np.full(1, 0.5), np.ones(1, dtype=np.bool_))
    offsets, parents = np.array([0, 1]), np.array([-1], dtype=np.int32)
    chances = calibration.path_probabilities(offsets, parents, np.full(1, 0.5))
    chosen = select_trees(
        offsets, chances, parents, np.ones(1), np.ones(1), budget=2, most=np.ones(1)
    )
    arrange_trees(offsets, chances, parents, chosen, np.ones(1, dtype=np.int64), 1)
