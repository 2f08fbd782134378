# SPDX-License-Identifier: Apache-2.0
"""Follows the work of every request, so that best effort can be ordered by it (LAPS-SD)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.lengths.forecast import (
    LengthForecaster,
    LengthQuery,
    QuantileForecaster,
    forecast_error,
)
from vllm_slo.core.lengths.output_length import LengthPrediction, OutputLengthPredictor
from vllm_slo.core.ordering.least_perceived_service import (
    Perception,
    ServiceOrder,
    ServiceQueues,
    ServiceView,
    TypicalRounds,
)
from vllm_slo.core.ordering.starvation_guard import StarvationGuard
from vllm_slo.core.step_time.model import StepTimeModel, chunk_pairs
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling import request_facts
from vllm_slo.engine.scheduling.kv_blocks import KVBlocks
from vllm_slo.engine.scheduling.length_regressor import LengthRegressor
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.slo_request import UNLABELLED
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics

OVERRUN = 0.1
"""Tokens that a request is taken to have left once it is longer than was foretold, as a share of
its tokens so far."""


class _Known:
    """A live request.

    Attributes:
        number: by arrival.
        perception: its work so far.
        query: what is known of its answer's length.
        first: predicted length, when it was first asked for.
        length: predicted length now.
        foreseen_s: the whole service it needs, as first foreseen.
        placed: whether it held a place when it was last looked at.
        preemptions: how often it had lost one by then.
        turn_s: seconds of rounds for which it keeps the place that it got last.
        beginning: seconds of work and KV blocks that it needs before its next round.
        begins: by which model, and with how many tokens, computed and in all.
    """

    __slots__ = (
        "beginning",
        "begins",
        "first",
        "foreseen_s",
        "length",
        "number",
        "perception",
        "placed",
        "preemptions",
        "query",
        "turn_s",
    )

    def __init__(self, number: int, perception: Perception) -> None:
        self.number = number
        self.perception = perception
        self.query: LengthQuery | None = None
        self.first = self.length = LengthPrediction(0, "cap")
        self.foreseen_s: float | None = None
        self.placed = False
        self.preemptions = 0
        self.turn_s = 0.0
        self.beginning = 0.0, 0
        self.begins: tuple[StepTimeModel | None, int, int] = None, 0, 0


class BestEffort:
    """The order of requests without a promise on one engine.

    Args:
        metrics: where it is told how forecasts turned out.
        config: names the policy.

    Attributes:
        order: the policy.
        lengths: what foretells how long answers will be.

    Raises:
        ConfigError: lengths are to be learnt, and scikit-learn is missing.
    """

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        blocks: KVBlocks,
        clock: StepClock,
        guard: StarvationGuard,
        lengths: OutputLengthPredictor,
        metrics: SchedulerMetrics,
        config: SLOConfig,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._blocks = blocks
        self._clock = clock
        self._guard = guard
        self._metrics = metrics
        chosen = config.best_effort
        queues = ServiceQueues(chosen.queues, chosen.first_queue_s, chosen.queue_ratio)
        self.order = ServiceOrder(chosen.order, queues, config.ageing_s, chosen.preempt_known)
        median = QuantileForecaster(lengths)
        self.lengths: LengthForecaster = median
        if chosen.output_length == "learnt":
            self.lengths = LengthRegressor(median)
        self._stable = chosen.stable_rounds, chosen.stable_change
        self._typical = TypicalRounds()
        self._numbers = itertools.count()
        self._known: dict[str, _Known] = {}
        # Without drafts the time of its rounds is known from the start.
        self._plain = state.vllm_config.speculative_config is None

    # What happens to requests.

    def on_arrival(self, request: Request) -> None:
        """Begin to follow a request."""
        self._known[request.request_id] = _Known(
            next(self._numbers), Perception(*self._stable, self._typical)
        )

    def on_end(self, request: Request, *, by_itself: bool) -> None:
        """Stop following a request."""
        known = self._known.pop(request.request_id, None)
        if known is None or not by_itself:
            return
        metrics, tokens = self._metrics, request.num_output_tokens
        if not request_facts.yields_one_token(request):
            query = known.query or self._length_query(request)
            self.lengths.observe(query, tokens, cut_off=request_facts.is_cut_off(request))
        if tokens and known.first.source != "cap":
            metrics.foretold_length(known.first.source, forecast_error(known.first.tokens, tokens))
        if known.foreseen_s is not None:
            metrics.foreseen_service(known.foreseen_s, known.perception.attained_s)

    def reconcile(self, requests: Iterable[Request]) -> None:
        """Follow these requests, and no others."""
        live = {request.request_id: request for request in requests}
        for name in [name for name in self._known if name not in live]:
            del self._known[name]
        for name, request in live.items():
            if name not in self._known:
                self.on_arrival(request)

    def _note_served(self, request_id: str) -> None:
        """A request got tokens. Only one without a promise is noted: others do not wait."""
        tracked = self._tracker.get(request_id)
        if tracked is None or not tracked.promised:
            self._guard.served(request_id, self._clock.now_s)

    def _length_query(self, request: Request) -> LengthQuery:
        """What is known of an answer's length when its request arrives."""
        tracked = self._tracker.get(request.request_id)
        return LengthQuery(
            UNLABELLED if tracked is None else tracked.slo_class,
            request.num_prompt_tokens,
            request.max_tokens,
            None if tracked is None else tracked.slo.expected_output_tokens,
            request.prompt_token_ids or (),
        )

    def _foretell(self, known: _Known, request: Request) -> LengthPrediction:
        """The predicted length of a request's whole answer; predicted anew once it is longer."""
        done = request.num_output_tokens
        if known.query is None:
            known.query = self._length_query(request)
            known.first = known.length = self.lengths.predict(known.query, done)
        elif known.length.tokens <= done:
            known.length = self.lengths.predict(known.query, done)
        return known.length

    def observe(self, output: SchedulerOutput, done: ModelRunnerOutput) -> None:
        """Count the work of a step for everybody who was in it.

        The work of a request is the time that a step of it alone would take, drafting included.
        """
        places, sampled = done.req_id_to_index, done.sampled_token_ids
        model = self._clock.expected_model
        drafts = output.scheduled_spec_decode_tokens
        for name, tokens in output.num_scheduled_tokens.items():
            known, request = self._known.get(name), self._state.requests.get(name)
            if known is None or request is None:
                continue
            self._note_served(name)
            context = max(request.num_computed_tokens - tokens, 0)
            seconds = model.predict_s(tokens, context, pairs=chunk_pairs(tokens, context))
            drafted = len(drafts.get(name, ()))
            given = len(sampled[places[name]]) if sampled and name in places else 0
            if given and tokens == 1 + drafted:
                known.perception.round(seconds, drafted, given - 1)
                self._foresee(known, request)
            else:
                known.perception.read(seconds)

    def _foresee(self, known: _Known, request: Request) -> None:
        """Note what a request is to take altogether, once that can be known."""
        if known.foreseen_s is None and known.perception.acceptance is not None:
            remaining_s = self._remaining_s(known, request)
            if remaining_s is not None:
                known.foreseen_s = known.perception.attained_s + remaining_s

    # The order.

    def rank(self, requests: Iterable[Request]) -> list[ServiceView]:
        """Requests in serving order, the most urgent first."""
        return self.order.rank([self._view(request) for request in requests])

    def give_way(self, ranked: Sequence[ServiceView], places: int, free: int) -> tuple[str, ...]:
        """The requests whose places others are to have. A perceptible request that could have given
        way, and did not have to, keeps its place for good."""
        chosen = self.order.give_way(ranked, places, free)
        for view in ranked:
            movable = view.placed and view.progress_s >= view.kept_s
            if movable and view.remaining_s is not None and view.request_id not in chosen:
                self._known[view.request_id].perception.settled = True
        return chosen

    def _view(self, request: Request) -> ServiceView:
        name = request.request_id
        known = self._known[name]
        perception = known.perception
        placed = request.status == RequestStatus.RUNNING
        # It may have lost its place and got another without being looked at in between.
        if placed and not (known.placed and known.preemptions == request.num_preemptions):
            perception.place()
        known.placed, known.preemptions = placed, request.num_preemptions
        remaining_s = self._remaining_s(known, request)
        if placed:
            kept_s = max(self._switch_s(request), known.turn_s, perception.shows_s)
            blocks = self._blocks.held(request)
        else:
            kept_s, (again_s, blocks) = 0.0, self._beginning(known, request)
            remaining_s = None if remaining_s is None else remaining_s + again_s
        view = ServiceView(
            name,
            known.number,
            self._clock.now_s - self._guard.seen(name, self._clock.now_s),
            self._foretell(known, request).tokens,
            perception.attained_s,
            remaining_s,
            placed,
            perception.settled,
            perception.progress_s,
            kept_s,
            blocks,
        )
        if not placed:
            known.turn_s = self.order.turn_s(view)
        return view

    def _remaining_s(self, known: _Known, request: Request) -> float | None:
        """Seconds of a request's own rounds to its end; None: nobody knows."""
        tokens, source = self._foretell(known, request)
        done = request.num_output_tokens
        left = float(max(tokens - done, 1))
        if source == "cap":  # nothing is known, or it got further than was foretold
            if known.first.source == "cap":
                return None
            left = min(left, OVERRUN * done)
        if self._plain and known.perception.acceptance is None:
            return left * self._clock.expected_model.predict_s(1)
        return known.perception.remaining_s(left)

    def _beginning(self, known: _Known, request: Request) -> tuple[float, int]:
        """Seconds of computing that a waiting request needs before its next round, and KV blocks
        that it needs. Computed anew when its tokens or the model have changed."""
        model = self._clock.expected_model
        computed, tokens = request.num_computed_tokens, request.num_tokens
        if known.begins[0] is not model or known.begins[1:] != (computed, tokens):
            left = request_facts.tokens_to_next_sample(request)
            blocks = 0 if request_facts.holds_kv(request) else self._blocks.needed(tokens)
            again_s = model.predict_s(left, computed, pairs=chunk_pairs(left, computed))
            known.beginning, known.begins = (again_s, blocks), (model, computed, tokens)
        return known.beginning

    def _switch_s(self, request: Request) -> float:
        """Seconds of computing a request's KV again."""
        tokens = request.num_computed_tokens
        model = self._clock.expected_model
        return model.predict_s(tokens, pairs=chunk_pairs(tokens, 0))
