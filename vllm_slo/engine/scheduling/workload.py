# SPDX-License-Identifier: Apache-2.0
"""What requests ask of the engine, what is committed to them, and what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_slo.core.admission.incremental import IncrementalAdmission
from vllm_slo.core.admission.program import PLAIN, Capacity, chunks_delay_s, work_tokens
from vllm_slo.core.batching.decodes import Decodes
from vllm_slo.core.lengths.output_length import LengthPrediction, OutputLengthPredictor
from vllm_slo.core.ordering.starvation_guard import StarvationGuard
from vllm_slo.core.sessions.rounds import end_to_end_pace
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY, Demand
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling import request_views
from vllm_slo.engine.scheduling.decode_model import DecodeModel, WayToDecode
from vllm_slo.engine.scheduling.expected_memory import ExpectedMemory
from vllm_slo.engine.scheduling.kv_blocks import KVBlocks
from vllm_slo.engine.scheduling.request_facts import is_decoding
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.slo_request import SharedPrefix, SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock

EARLY = 0.02
"""Share of short answers in a class from which on any answer of it may be short. A convention: at
most so many promises may be broken because of that."""


class CommittedLoad(NamedTuple):
    """What is promised.

    Attributes:
        pending: promises before their first token.
        decoding: TPOT -> promised requests that decode, by the TPOT that is reserved for them.
        context: KV tokens that those read.
        blocks: KV blocks that all of them hold or are to hold; what they share counts once.
        squares: sum of the squares of what each of them is to hold beside that, see
            `best_effort_memory`.
        prefixes: what they share.
    """

    pending: list[Demand]
    decoding: Mapping[float, int]
    context: int
    blocks: int
    squares: int
    prefixes: Sequence[SharedPrefix | None]

    @property
    def requests(self) -> int:
        """How many requests are promised."""
        return len(self.pending) + sum(self.decoding.values())


class _DecodingLoad(NamedTuple):
    """Of `CommittedLoad`, the part of the requests that decode.

    Attributes:
        resuming: promised requests that had a token and are to be computed again first.
        tpots_s, context, squares: as in `CommittedLoad`.
        blocks: that they hold or are to hold beside what they share.
        prefixes: what they share.
    """

    resuming: Sequence[SLORequest]
    tpots_s: Mapping[float, int]
    context: int
    blocks: int
    squares: int
    prefixes: Sequence[SharedPrefix | None]


class _Need(NamedTuple):
    """What a request needs by a model of step times.

    Attributes:
        model: the model.
        work_tokens: its prefill, in tokens of no context.
        prefill_s: seconds of it.
        chunks_s: seconds by which it takes longer, since vLLM cuts it into chunks.
        length: of its answer.
        blocks: KV blocks to set aside.
    """

    model: StepTimeModel
    work_tokens: float
    prefill_s: float
    chunks_s: float
    length: LengthPrediction
    blocks: int


class _Ways(NamedTuple):
    """What promises may count on at a time, beside requests of which this is the tightest TPOT."""

    now_s: float
    tightest_s: float
    ways: list[WayToDecode]


class Workload:
    """The demands of requests against the capacity of one engine.

    Args:
        max_step_tokens: tokens of one step at most.
        chunk_tokens: tokens of one prompt in a step at most; 0: as many as the step holds.
        can_promise: whether anything can be promised on this engine.
    """

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        blocks: KVBlocks,
        memory: ExpectedMemory,
        clock: StepClock,
        lengths: OutputLengthPredictor,
        decoding: DecodeModel,
        guard: StarvationGuard,
        *,
        max_step_tokens: int,
        chunk_tokens: int,
        can_promise: bool,
    ) -> None:
        self.blocks = blocks
        self.memory = memory
        self.lengths = lengths
        self.max_step_tokens = max_step_tokens
        self._state = state
        self._tracker = tracker
        self._clock = clock
        self._decoding = decoding
        self._guard = guard
        self._chunk_tokens = chunk_tokens
        self._can_promise = can_promise
        self._ways = _Ways(-INFINITY, INFINITY, [])
        self._committed: tuple[tuple[object, ...], CommittedLoad] | None = None
        self._decoding_load: tuple[tuple[int, int], _DecodingLoad] | None = None
        self._tightest_of, self._tightest_s = (-1, -1), INFINITY
        self._needs: dict[str, _Need] = {}
        self._needs_of = -1

    @property
    def speculates(self) -> bool:
        """Whether there may ever be drafts."""
        return self._decoding.speculates

    # What one request asks.

    def predicted_length(self, tracked: SLORequest) -> LengthPrediction:
        """Length of a request's answer, the tokens that it has included."""
        request = tracked.request
        return self.lengths.predict(
            tracked.slo_class,
            request.max_tokens,
            tracked.slo.expected_output_tokens,
            request.num_output_tokens,
        )

    def may_end_early(self, tracked: SLORequest) -> bool:
        """Whether more than `EARLY` of such answers end before a TPOT window is full, as far as is
        known. The stages of an answer may be short, whatever its length."""
        length = self.lengths.predict(
            tracked.slo_class,
            tracked.request.max_tokens,
            tracked.slo.expected_output_tokens,
            quantile=EARLY,
        )
        staged = len(tracked.slo.answer_stages) > 1
        return staged or length.source == "cap" or length.tokens <= tracked.window

    def demand(
        self, tracked: SLORequest, start_s: float, model: StepTimeModel, origin_s: float = 0.0
    ) -> Demand:
        """What serving a request within its objectives asks from now on.

        Its deadline is counted from ``origin_s``.
        """
        need = self._need(tracked, model)
        return request_views.demand(
            tracked,
            start_s - origin_s,
            tracked.due_s(start_s, need.prefill_s),
            need.work_tokens,
            need.length,
            need.blocks,
            origin_s + self.overrun_s(need.prefill_s) + need.chunks_s,
        )

    def overrun_s(self, longest_s: float) -> float:
        """Seconds by which the step may overrun that ends at a deadline. Margins cover runs of
        steps, and noise evens out in a run, but not in its last step.

        ``longest_s``: that step takes no longer.
        """
        asked = self._clock.ticks, self._tracker.changes
        if self._tightest_of != asked:
            self._tightest_of = asked
            self._tightest_s = min((t.reserved_tpot_s for t in self._tracker), default=INFINITY)
        return self._clock.jitter * min(longest_s, self._tightest_s)

    def _need(self, tracked: SLORequest, model: StepTimeModel) -> _Need:
        """What a request needs; worked out once while nothing happens to it."""
        ticks, name = self._clock.ticks, tracked.request.request_id
        if self._needs_of != ticks:
            self._needs_of = ticks
            self._needs.clear()
        need = self._needs.get(name)
        if need is None or need.model is not model:
            self.blocks.look_up_prefix(tracked)
            computed = tracked.request.num_computed_tokens or tracked.cached_tokens
            work = work_tokens(model, tracked.remaining_tokens, computed)
            delay_s = chunks_delay_s(
                model, tracked.remaining_tokens, self._chunk_tokens, self.max_step_tokens
            )
            length, blocks = self.predicted_length(tracked), self.memory.of_request(tracked)
            need = _Need(model, work, model.predict_s(work), delay_s, length, blocks)
            self._needs[name] = need
        return need

    def keep_end_to_end(self, tracked: SLORequest) -> None:
        """Derive from a request's end-to-end objective what it may take to its first token, and for
        each token after."""
        if tracked.slo.e2e_ms is None:
            return
        self.blocks.look_up_prefix(tracked)
        model = self._clock.expected_model
        work = work_tokens(model, tracked.remaining_tokens)
        tokens = float(self.predicted_length(tracked).tokens)
        prefill_s, token_s = model.predict_s(work), model.predict_s(1)
        tracked.keep_pace(*end_to_end_pace(tracked.slo.e2e_ms / 1e3, prefill_s, token_s, tokens))

    def decode_rows(self, tracked: Sequence[SLORequest], start_s: float) -> Decodes:
        """Promised decoding requests before a step that begins at ``start_s``."""
        strengths = self._clock.strength, self._clock.first_strength
        return request_views.decode_rows(tracked, start_s, strengths, self._decoding.yields)

    # What all of them ask, and what is left.

    def committed(
        self, start_s: float, model: StepTimeModel, origin_s: float = 0.0
    ) -> CommittedLoad:
        """What is promised. Deadlines are counted from ``origin_s``."""
        asked = self._clock.ticks, self._tracker.changes, start_s, model, origin_s
        if self._committed is None or self._committed[0] != asked:
            self._committed = asked, self._load(start_s, model, origin_s)
        return self._committed[1]

    def _load(self, start_s: float, model: StepTimeModel, origin_s: float) -> CommittedLoad:
        asked = self._clock.ticks, self._tracker.decoding_changes
        if self._decoding_load is None or self._decoding_load[0] != asked:
            self._decoding_load = asked, self._load_of_decodes()
        decoding = self._decoding_load[1]
        pending = [*self._tracker.promised_before_first_token(), *decoding.resuming]
        demands = [self.demand(t, start_s, model, origin_s) for t in pending]
        holds = [demand.blocks for demand in demands]
        prefixes = [*decoding.prefixes, *map(self.memory.shared_prefix, pending)]
        return CommittedLoad(
            demands,
            decoding.tpots_s,
            decoding.context,
            decoding.blocks + sum(holds) + self.blocks.distinct(prefixes),
            decoding.squares + sum([blocks * blocks for blocks in holds]),
            prefixes,
        )

    def _load_of_decodes(self) -> _DecodingLoad:
        """The load of promised requests that decode."""
        decodes: list[SLORequest] = []
        resuming: list[SLORequest] = []
        for tracked in self._tracker.live.values():
            if tracked.promised and tracked.first_token_s is not None:
                (decodes if is_decoding(tracked.request) else resuming).append(tracked)
        prefixes = [self.blocks.shared_prefix(t.request) for t in decodes]
        return _DecodingLoad(
            resuming,
            Counter([t.reserved_tpot_s for t in decodes]),
            sum([t.request.num_computed_tokens for t in decodes]),
            *self.memory.of_decodes(decodes, prefixes),
            prefixes,
        )

    def capacity(self, promised: int, blocks: int) -> Capacity:
        """What is left beside so many promises that hold so many KV blocks."""
        return Capacity(
            blocks=self.blocks.total - blocks,
            seats=self.seats(promised),
            max_step_tokens=self.max_step_tokens,
            token_share=1.0 - self.reserved_share(),
            finish_interval_s=self._tracker.finish_interval_s,
        )

    def outlooks(
        self, load: CommittedLoad, beside: Sequence[Demand] = (), tpot_s: float = INFINITY
    ) -> list[IncrementalAdmission]:
        """What is promised, and is about to be, by each way to decode: admission that judges one
        more request at a time.

        Args:
            load: what is promised.
            beside: what is about to be promised.
            tpot_s: of a request that is to be judged and is not tracked.
        """
        blocks = load.blocks + sum(demand.blocks for demand in beside)
        capacity = self.capacity(load.requests + len(beside), blocks)
        return [
            IncrementalAdmission(
                [*load.pending, *beside],
                load.decoding,
                believed,
                capacity,
                decoding_context=load.context,
                speculated=speculated,
            )
            for believed, speculated in self.ways_to_decode(tpot_s)
        ]

    def seats(self, promised: int) -> int:
        """Seats for promises beside so many."""
        if not self._can_promise:
            return 0
        return self._state.max_running - promised - self._guard.reserved_seats

    def reserved_share(self) -> float:
        """Share of the tokens that best effort may claim before promises."""
        return self._guard.reserved_share(self._clock.now_s)

    def ways_to_decode(self, tpot_s: float = INFINITY) -> list[WayToDecode]:
        """What a promise may count on: plain steps, and steps with drafts; also for a request that
        is not tracked, of such a TPOT."""
        if not self.speculates:
            return [(self._decoding.plain(), PLAIN)]
        known, now_s = self._ways, self._clock.now_s
        if known.now_s == now_s and known.tightest_s <= tpot_s:
            return known.ways
        own_s = min(
            (t.reserved_tpot_s for t in self._tracker if t.promised or not t.missed),
            default=INFINITY,
        )
        tightest_s = min(own_s, tpot_s)
        ways = [(self._decoding.plain(), PLAIN)]
        drafts = self._decoding.speculative(tightest_s) if tightest_s < INFINITY else None
        if drafts is not None:
            ways.append(drafts)
        if tightest_s == own_s:  # what holds for a request that is not tracked is nobody else's
            self._ways = _Ways(now_s, tightest_s, ways)
        return ways
