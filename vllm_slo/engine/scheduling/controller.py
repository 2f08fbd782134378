# SPDX-License-Identifier: Apache-2.0
"""Between vLLM's scheduler and the policies: follows requests, asks ``core`` what to promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.admission import program
from vllm_slo.core.admission.idle_probe import SLOW, IdleProbe, whom_to_probe
from vllm_slo.core.admission.opportunistic import Pace, Sustainable, has_headroom
from vllm_slo.core.batching.pressure import Pressure
from vllm_slo.core.batching.recent_objectives import RecentObjectives
from vllm_slo.core.clock import Clock
from vllm_slo.core.lengths.forecast import LengthQuery
from vllm_slo.core.lengths.output_length import LengthPrediction, OutputLengthPredictor
from vllm_slo.core.ordering.starvation_guard import StarvationGuard
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.sessions.end_to_end import end_to_end_pace
from vllm_slo.core.step_time.estimator import StepTimeEstimator, horizon_of
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.core.types import INFINITY, AdmissionPlan, DecodeView, Demand, PrefillView
from vllm_slo.engine.scheduling import request_views
from vllm_slo.engine.scheduling.best_effort import BestEffort
from vllm_slo.engine.scheduling.choice_groups import ChoiceGroups
from vllm_slo.engine.scheduling.quotas import REASON, Quotas
from vllm_slo.engine.scheduling.quotes import Quotes
from vllm_slo.engine.scheduling.request_views import NO_CHUNKED_PREFILL, SLORequest
from vllm_slo.engine.scheduling.sessions import SessionRounds
from vllm_slo.engine.scheduling.stage_marks import AnswerMarks, StageMarks
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.step_planner import Nudge, StepPlanner
from vllm_slo.engine.serving.profile import find_profile
from vllm_slo.engine.speculation.tenants import TenantShares
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics
from vllm_slo.engine.telemetry.state import INTERVAL_S, StatePublisher, state_of
from vllm_slo.engine.telemetry.tracing import RequestSpans
from vllm_slo.errors import ConfigError, InvalidSLOError
from vllm_slo.slo.access import Seal, check_internal
from vllm_slo.slo.model import SLO, has_slo_key
from vllm_slo.slo.verdicts import Declined, Invalid

if TYPE_CHECKING:
    from vllm_slo.engine.scheduler import Scheduler

logger = init_logger(__name__)

MIN_REPLAN_S = 0.02
"""Promises are not thought over more often than this, but for arrivals."""
NEARLY = 1.25
"""A request waits for its turn if a TPOT so many times as long as its own can be borne at all."""

UNLABELLED = "none"

WayToDecode: TypeAlias = tuple[StepTimeModel, program.Speculated]
CommittedLoad: TypeAlias = tuple[list[Demand], dict[float, int], int, int]
"""(promises before their first token, decoding count by TPOT, their KV tokens, blocks)."""


class _Ways(NamedTuple):
    """What promises may count on at a time, beside requests of which this is the tightest TPOT."""

    now_s: float
    tightest_s: float
    ways: list[WayToDecode]


class Steering:
    """The state of multi-SLO scheduling on one engine.

    Args:
        scheduler: whose requests, blocks and limits it reads. It changes none of them.
        clock: time.
        step_time: what is known of step times; None: a profile of this engine, or the prior.
        marks: where stages end; None: as the answers say.
        seal: proves who wrote the internal keys; None: that of the environment.

    Attributes:
        tracked: the live requests that carry an SLO, by id.
        can_promise: whether prompts can be cut, without which nothing is planned and vLLM is left
            to itself.
        total_blocks: KV blocks there are.
        finish_interval_s: observed seconds between two promises that ended.
        seen: the highest ticket that ever came; see ``views.ticket``.
        expected: tokens that the next step is to yield, of requests that have drafts for it.
        in_flight: tokens that steps on their way are to yield, of requests with drafts in them.
        plain: steps of plain decoding, for promises to count on.
        speculation: a TPOT -> decoding with trees that keeps it, for promises to count on, and the
            step times with it; None: plain decoding.
        sustainable: a TPOT -> how many requests typical steps keep it for, and what decoding is
        then
            like.
        best_effort: in which order requests without a promise are served; None: as they arrive.
        waiting: how long they have had no tokens, and what is kept for them.
        tenants: whose drafts are verified beyond what objectives need; None: the likeliest.
        quotas: how much each tenant may be promised; None: as much as there is.

    Raises:
        ConfigError, ProfileError: the configuration cannot be used.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        step_time: StepTimeEstimator | None = None,
        marks: StageMarks | None = None,
        seal: Seal | None = None,
    ) -> None:
        vllm_config = scheduler.vllm_config
        self.can_promise = (
            vllm_config.scheduler_config.enable_chunked_prefill
            or vllm_config.model_config.runner_type != "generate"
        )
        if not self.can_promise:
            logger.warning(
                "Chunked prefill is off, so no objective can be promised: vLLM schedules all "
                "requests by itself, and reports say %s. vLLM turns it off for some models, and "
                "--no-enable-chunked-prefill for all.",
                NO_CHUNKED_PREFILL,
            )
        self.config = SLOConfig.from_additional_config(vllm_config.additional_config)
        self.classes = self.config.slo_classes()
        self._marks = marks or AnswerMarks(scheduler.structured_output_manager)
        for name, slo in self.classes.items():
            try:
                self._marks.check(slo)
            except InvalidSLOError as error:
                raise ConfigError(f"classes.{name}.{error}") from None
        self.clock = clock
        self.now_s = clock.monotonic_s()
        estimator = step_time or StepTimeEstimator(
            find_profile(vllm_config, self.config.profile),
            horizon=horizon_of(self.config.tpot_window_tokens),
        )
        self.steps = StepClock(
            estimator, self.config.margin_quantile, self.config.tpot_window_tokens, self.now_s
        )
        self.lengths = OutputLengthPredictor(self.config.output_length_quantile)
        self.metrics = SchedulerMetrics(vllm_config.parallel_config.data_parallel_index)
        self.tracked: dict[str, SLORequest] = {}
        self.scheduler = scheduler
        self.max_step_tokens = scheduler.max_num_scheduled_tokens
        self.total_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        self.block_sizes = [
            manager.block_size
            for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
            if isinstance(manager.kv_cache_spec, FullAttentionSpec)
        ]
        self._last_plan_s = -INFINITY
        self._idle_probe = IdleProbe(self.config.ageing_s)
        self._arrived = False
        self._ended_since_plan = 0
        self._last_end_s = self.now_s
        self.finish_interval_s = 1.0
        self._recent = RecentObjectives()
        self.pressure = Pressure(self.config.ageing_s / 2)
        self._unpromised = 0
        self._ended: list[Request] = []
        self._refused: list[Request] = []
        self._quotes = Quotes(self)
        self._groups = ChoiceGroups()
        self._unordered = False
        self._ways = _Ways(-INFINITY, INFINITY, [])
        self.seen = 0
        self.expected: dict[str, float] = {}
        self.in_flight: dict[str, float] = {}
        self.plain: Callable[[], StepTimeModel] = lambda: self.steps.plain_promise_model
        self.speculation: Callable[[float], WayToDecode | None]
        self.sustainable: Sustainable
        self.without_trees()
        ordered = self.config.best_effort.order != "fcfs" and self.can_promise
        self.best_effort = BestEffort(self, self.config) if ordered else None
        self.waiting = StarvationGuard(
            self.config.ageing_s, self.config.best_effort_token_share, keep_starved=not ordered
        )
        fair = self.config.speculation.share == "tenants"
        self.tenants = TenantShares(self) if fair else None
        self.sessions = SessionRounds(self)
        self.quotas = Quotas(self, self.config) if self.config.quotas.on else None
        self._checks_access = self.config.access is not None
        self._seal = seal or (Seal.of_checked() if self._checks_access else Seal.from_environment())
        self._spans = RequestSpans.from_config(vllm_config.observability_config)
        self._publisher = StatePublisher.from_environment()
        program.warm_up()
        if self._publisher is not None:
            self._publisher.publish(self.state(), self.now_s)

    def without_trees(self) -> None:
        """From now on, decoding is plain."""
        self.speculation = lambda _: None
        self.sustainable = self._plainly_sustainable

    def _plainly_sustainable(self, tpot_s: float) -> tuple[float, program.Speculated]:
        return self.steps.verifying_model.time_to_tokens(tpot_s), program.PLAIN

    @property
    def active(self) -> bool:
        """Whether any live request carries an SLO, or there is an order for those without."""
        ordered = self.best_effort is not None and bool(self.scheduler.requests)
        return bool(self.tracked) or bool(self._refused) or bool(self._quotes) or ordered

    # What happens to requests.

    def on_arrival(self, request: Request) -> None:
        """Begin to track a request if it carries an SLO; an invalid one is refused in this step."""
        quote = request_views.wants_quote(request)
        if self.best_effort is not None and not quote:
            self.best_effort.on_arrival(request)
        params = request.sampling_params
        if params is None:
            return
        try:
            if self._checks_access and self._seal is not None:
                self._seal.check(params.extra_args)
            check_internal(params.extra_args, self._seal)
            ticket, before_s = request_views.ticket(request), request_views.age_before_s(request)
            self.seen = max(self.seen, ticket)
            slo = self._slo_of(request, request.arrival_time - before_s)
        except InvalidSLOError as error:
            logger.warning("request %s refused: %s", request.request_id, error)
            request.stop_reason = Invalid(str(error)).pack()
            self._refused.append(request)
            return
        now_s = self.clock.monotonic_s()
        arrival_s = now_s - request_views.age_s(request, self.clock.epoch_s()) - before_s
        if quote:
            self.scheduler.set_aside(request)
            self._quotes.add(request, slo, arrival_s, now_s)
        elif slo is not None:
            self._track(request, slo, arrival_s, ticket, now_s)

    def _track(
        self, request: Request, slo: SLO, arrival_s: float, ticket: int, now_s: float
    ) -> None:
        tracked = SLORequest(request, slo, arrival_s, self.config.tpot_window_tokens, ticket)
        for _ in range(self._marks.first_stage(request, slo)):
            tracked.next_stage()
        if (declined := self._groups.begin(tracked)) is not None:
            self.metrics.admission(tracked.slo_class, "declined", declined.reason)
            request.stop_reason = declined.pack()
            self._refused.append(request)
            return
        self.keep_end_to_end(tracked)
        self.sessions.begin(tracked)
        self.tracked[request.request_id] = tracked
        self._arrived = True
        self._unpromised += 1
        self._recent.add(tracked.deadline_s - arrival_s, tracked.reserved_tpot_s, now_s)
        if tracked.slo.effective_tier != "guaranteed":
            stands_back = tracked.reason is not None
            outcome = "best_effort" if stands_back else "best_effort_asked"
            self.metrics.admission(tracked.slo_class, outcome, tracked.reason or "")

    def keep_end_to_end(self, tracked: SLORequest) -> None:
        """Derive from a request's end-to-end objective what it may take to its first token, and for
        each token after."""
        if tracked.slo.e2e_ms is None:
            return
        self.look_up_prefix(tracked)
        model = self.steps.expected_model
        work = program.work_tokens(model, tracked.remaining_tokens)
        tokens = float(self.predicted_length(tracked).tokens)
        prefill_s, token_s = model.predict_s(work), model.predict_s(1)
        tracked.keep_pace(*end_to_end_pace(tracked.slo.e2e_ms / 1e3, prefill_s, token_s, tokens))

    def _slo_of(self, request: Request, arrival_epoch_s: float) -> SLO | None:
        """What a request asks for. Where access is checked, who did that has named the default
        class; and where there is no telling when a prompt has arrived, nothing can be kept."""
        extra = request.sampling_params.extra_args
        slo = None
        if has_slo_key(extra):
            slo = SLO.from_extra_args(extra, classes=self.classes, arrival_s=arrival_epoch_s)
        if slo is not None:
            if request.resumable and slo.has_objective:
                raise InvalidSLOError("slo", "the prompt comes in parts", "leave objectives out")
            self._marks.check(slo)
        elif self.config.default_class and self._takes_default(request):
            return self.classes[self.config.default_class]
        return slo

    def _takes_default(self, request: Request) -> bool:
        """Whether a request without an SLO is one of the default class."""
        return not (self._checks_access or request.resumable or request_views.is_exempt(request))

    def on_tokens(self, request: Request, count: int) -> None:
        """Record tokens of the step whose output is being processed."""
        if self.best_effort is not None:
            self.best_effort.on_tokens(request, count)
        tracked = self.tracked.get(request.request_id)
        if tracked is not None and count:
            first = tracked.first_token_s is None
            self._record(tracked, count)
            if first and tracked.note_beginning():
                self._break(tracked, "ttft")

    def _record(self, tracked: SLORequest, count: int) -> None:
        """Add new tokens to the stages they belong to."""
        request, slo = tracked.request, tracked.slo
        while count and not tracked.tpot.is_last:
            stage, before = tracked.tpot.stage, tracked.tpot.tokens
            ended = self._marks.end_of(request, slo, stage, before, count)
            if ended is None:
                break
            tracked.on_tokens(ended, self.now_s)
            tracked.next_stage()
            self._ended_since_plan += tracked.promised  # it may draw less from here on
            count -= ended
        if count:
            tracked.on_tokens(count, self.now_s)

    def on_end(
        self, request: Request, blocks: Sequence[KVCacheBlock] = ()
    ) -> dict[str, Any] | None:
        """Stop tracking a request; returns its report if it carried an SLO.

        Args:
            request: which; it has been freed.
            blocks: what ``sessions.blocks_of`` said of it before.
        """
        by_itself = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_REPETITION,
        ) or self._marks.has_stopped(request)
        self.waiting.remove(request.request_id)
        self._quotes.forget(request.request_id)
        if request in self._refused:  # its client left before it was told
            self._refused.remove(request)
        if self.best_effort is not None:
            self.best_effort.on_end(request, by_itself=by_itself)
        tracked = self.tracked.pop(request.request_id, None)
        if by_itself and self.best_effort is None and not request_views.yields_one_token(request):
            label = UNLABELLED if tracked is None else tracked.slo_class
            cut_off = request_views.is_cut_off(request)
            self.lengths.observe(label, request.num_output_tokens, cut_off=cut_off)
        if tracked is None:
            return None
        self._groups.end(tracked)
        if tracked.promised:
            if self.quotas is not None:
                self.quotas.ended(tracked, self.now_s, refunded=by_itself)
            self._count_finish(tracked.arrival_s)
        else:
            self._unpromised -= 1
        attained = self.sessions.in_time(tracked, tracked.attained() if by_itself else None)
        self.sessions.end(tracked, attained, blocks, answered=by_itself)
        if by_itself:
            self.metrics.finished(
                tracked.slo_class,
                attained,
                promised=tracked.was_promised,
                tokens=request.num_output_tokens,
                ttft_s=tracked.first_token_s and tracked.first_token_s - tracked.arrival_s,
                tpot_s=tracked.tpot.worst_s,
            )
            if tracked.tpot.stages > 1:
                self.metrics.stages(tracked.slo_class, tracked.tpot.results())
        if not self.tracked:
            self.metrics.publish_soon(**self._gauges())
        if self._spans is not None:
            self._spans.ended(tracked, attained, self.clock)
        return self._report(tracked, attained)

    def _report(self, tracked: SLORequest, attained: bool | None) -> dict[str, Any]:
        report, session = tracked.report(attained), self.sessions.told(tracked, attained)
        return report if session is None else {**report, "session": session}

    def report_now(self, request_id: str) -> dict[str, Any] | None:
        """The report of a live request as it would be if it ended here; None without an SLO."""
        tracked = self.tracked.get(request_id)
        if tracked is None:
            return None
        return self._report(tracked, self.sessions.in_time(tracked, tracked.attained()))

    def on_empty(self) -> None:
        """The last live request has ended: no step may follow that says so."""
        self.metrics.publish_soon(**self._gauges())
        if self._publisher is not None:
            self._publisher.publish(self.state(), self.now_s)

    def _count_finish(self, arrival_s: float) -> None:
        """Count the end of a promise; the time before it arrived is no wait for its end."""
        self._ended_since_plan += 1
        gap_s = self.now_s - max(self._last_end_s, arrival_s)
        self._last_end_s = self.now_s
        self.finish_interval_s += 0.1 * (gap_s - self.finish_interval_s)

    def take_ended(self) -> list[Request]:
        """Requests ended by the scheduler itself whose clients have not been told yet."""
        ended, self._ended = self._ended, []
        return ended

    def _break(self, tracked: SLORequest, objective: str) -> None:
        """A promise that can no longer be kept is withdrawn: the request goes on best effort."""
        tracked.promised = False
        if self.quotas is not None:
            self.quotas.ended(tracked, self.now_s, refunded=True)
        self._unpromised += 1
        self._unordered = True
        self.metrics.broken(tracked.slo_class, objective)

    # What happens to steps.

    def begin_step(self) -> float:
        """Read the clock for a new step."""
        self.now_s = self.clock.monotonic_s()
        return self.now_s

    def on_scheduled(self, output: SchedulerOutput, shape: BatchShape, begun_s: float) -> None:
        """A step was handed to the engine."""
        self.steps.scheduled(output, shape, begun_s)
        self.sessions.scheduled(shape.tokens)
        if self._publisher is not None:
            # A long step says nothing while it runs.
            long = self.steps.next_start_s(begun_s) - begun_s > INTERVAL_S
            if long or self._publisher.due(begun_s):
                self._publisher.publish(self.state(), begun_s)

    def on_output(self, output: SchedulerOutput, drafting_s: float = 0.0) -> None:
        """A step is done: learn from how long it took, drafting the next one's trees apart."""
        self.now_s = self.clock.monotonic_s()
        measured = self.steps.done(output, self.now_s, drafting_s)
        if measured is not None:
            self.metrics.step(*measured)
        if self.metrics.due(self.now_s):
            self.sessions.close_quiet(self.now_s)
            self.metrics.publish(self.now_s, **self._gauges())

    def on_updated(self, output: SchedulerOutput) -> None:
        """The output of a step has been processed."""
        if self.best_effort is not None:
            self.best_effort.observe(output)

    def _gauges(self) -> dict[str, float]:
        waiting = [t for t in self.tracked.values() if not t.promised]
        oldest_s = min((t.arrival_s for t in waiting), default=self.now_s)
        return {
            "promised_requests": sum(t.promised for t in self.tracked.values()),
            "best_effort_requests": len(waiting),
            "best_effort_age_seconds": self.now_s - oldest_s,
            "step_time_margin_ratio": self.steps.margin,
            "step_time_bias_ratio": self.steps.estimator.correction.bias,
            **self.sessions.gauges(),
        }

    @property
    def quotes_waiting(self) -> int:
        """How many requests wait for nothing but an answer."""
        return len(self._quotes)

    def requests_to_serve(self) -> list[Request]:
        """The live requests, without those that only ask."""
        requests = self.scheduler.requests
        if not self._quotes:
            return list(requests.values())
        return [request for name, request in requests.items() if name not in self._quotes]

    def state(self) -> ReplicaState:
        """What somebody else needs to know to plan with this engine as it does itself."""
        return state_of(self)

    # Planning.

    def plan(self) -> Nudge | None:
        """The nudge for the step about to be scheduled; None: let vLLM do as it does."""
        if self._nothing_to_decide():
            return None
        self._settle_refused()
        self._choose_starved()
        start_s = self.steps.next_start_s(self.now_s)
        if self._quotes:
            for request, answer in self._quotes.take(start_s):
                self._end(request, answer)
        self._withdraw_expired(start_s)
        model = self.steps.promise_model
        if self._should_admit():
            self._admit(start_s, model)
        if not self.can_promise or not (self.tracked or self._orders_who_waits()):
            return None
        return StepPlanner(self, start_s, model).nudge()

    def promise_now(self, request_id: str) -> bool:
        """Rule on everything that asks for a promise now; whether this request got one."""
        start_s = self.steps.next_start_s(self.begin_step())
        self._withdraw_expired(start_s)
        self._admit(start_s, self.steps.promise_model)
        return request_id in self.tracked and self.tracked[request_id].promised

    def _nothing_to_decide(self) -> bool:
        """Whether every live request is a promised one that decodes."""
        scheduler = self.scheduler
        return not (
            self._arrived
            or self._unpromised
            or self._refused
            or self._quotes
            or scheduler.waiting
            or scheduler._inflight_prefills
            or len(scheduler.running) != len(self.tracked)
        )

    def _orders_who_waits(self) -> bool:
        """Whether somebody waits, and not simply for their turn."""
        scheduler = self.scheduler
        waiting = scheduler.waiting or scheduler.kv_holding_waiting
        return self.best_effort is not None and bool(waiting)

    def _settle_refused(self) -> None:
        refused, self._refused = self._refused, []
        for request in refused:
            self._end(request, str(request.stop_reason))

    def _end(self, request: Request, stop_reason: str) -> None:
        self.scheduler.end_request(request, stop_reason)
        self._ended.append(request)

    def _withdraw_expired(self, start_s: float) -> None:
        """An expired deadline makes a request best effort, never urgent."""
        for tracked in self.tracked.values():
            waits = tracked.promised and tracked.first_token_s is None
            if waits and tracked.deadline_s <= start_s:
                self._break(tracked, "ttft")
        for request_id in self.quotas.overdrawn(self.now_s) if self.quotas else ():
            self._break(self.tracked[request_id], REASON)

    def _should_admit(self) -> bool:
        since_s = self.now_s - self._last_plan_s
        if self._arrived:
            return True
        if since_s < MIN_REPLAN_S or not self._unpromised:
            return False
        return self._ended_since_plan > 0 or since_s >= self.config.replan_interval_s

    def _admit(self, start_s: float, model: StepTimeModel) -> None:
        """Run the dynamic program over everything that asks for a promise."""
        self._arrived = False
        self._last_plan_s = self.now_s
        self._ended_since_plan = 0
        self._turn_away(start_s)
        if not self.can_promise:
            return
        for tracked in self.tracked.values():
            if tracked.end_s < INFINITY and tracked.decodes and not tracked.promised:
                left = self.predicted_length(tracked).tokens - tracked.request.num_output_tokens
                tracked.keep_end(max(left, 1))
        if self.quotas is not None:
            wanting = [t for t in self.tracked.values() if t.wants_promise(start_s)]
            waits = self.quotas.charge(wanting, self.now_s, model)
            self._settle((), dict.fromkeys(waits, REASON), waits, {})
        asking = self.asking(start_s)
        if not asking:
            return
        plan, new = self.best_plan(asking, start_s, model)
        due_s = {demand.request_id: demand.deadline_s for demand in new}
        admitted, refused = plan.admitted, plan.refused
        if admitted:
            self._idle_probe.promised()
        elif probe := self.probe(plan, asking, start_s):
            self.steps.doubt()
            self._idle_probe.probed()
            admitted = (probe,)
            refused = {name: reason for name, reason in refused.items() if name != probe}
        self._settle(admitted, refused, plan.retry_after_s, due_s)

    def probe(
        self, plan: AdmissionPlan, asking: Sequence[SLORequest], start_s: float
    ) -> str | None:
        """Who is promised what they ask to find out how fast steps are; see
        ``core.admission.idle_probe``."""
        hoped, idle_s = self.steps.fastest_model, self.steps.idle_s(self.now_s)
        if hoped is None or plan.admitted or not self._idle_probe.is_due(idle_s):
            return None
        if self.scheduler.running or any(t.promised for t in self.tracked.values()):
            return None
        slow = [t for t in asking if plan.refused.get(t.request.request_id) in SLOW]
        refused = [self.demand(t, start_s, hoped) for t in slow]
        return whom_to_probe(refused, hoped, self.capacity(0, 0), start_s)

    def asking(self, start_s: float, *others: SLORequest) -> list[SLORequest]:
        """Whom the dynamic program is to consider in a step that begins at ``start_s``."""
        asking = [t for t in (*self.tracked.values(), *others) if t.wants_promise(start_s)]
        if self.quotas is not None:
            asking = [t for t in asking if t.request.request_id not in self.quotas.over]
        asking.sort(key=lambda t: (t.planned, t.deadline_s))
        return asking[: self.config.max_planned_new]

    def best_plan(
        self,
        asking: Sequence[SLORequest],
        start_s: float,
        model: StepTimeModel,
        committed_load: CommittedLoad | None = None,
    ) -> tuple[AdmissionPlan, list[Demand]]:
        """Whom the dynamic program would promise what they ask, by the best way to decode; and what
        each of them asks of the engine. Nothing is promised by it. ``committed_load``: those of
        this moment, where they are known."""
        new = [self.demand(t, start_s, model) for t in asking]
        if self.quotas is not None:
            new = self.quotas.normalised(asking, new)
        committed, decoding, context, blocks = committed_load or self.committed_load(start_s, model)
        capacity = self.capacity(len(committed) + sum(decoding.values()), blocks)
        tightest_s = min((t.reserved_tpot_s for t in asking), default=INFINITY)
        plans = [
            program.plan_admission(
                start_s,
                new,
                committed,
                decoding,
                believed,
                capacity,
                decoding_context=context,
                speculated=speculated,
            )
            for believed, speculated in self.ways_to_decode(tightest_s)
        ]
        worth = {demand.request_id: demand.value for demand in new}
        return max(plans, key=lambda plan: sum(worth[name] for name in plan.admitted)), new

    def capacity(self, promised: int, blocks: int) -> program.Capacity:
        """What is left beside so many promises that hold so many KV blocks."""
        return program.Capacity(
            blocks=self.total_blocks - blocks,
            seats=self.seats(promised),
            max_step_tokens=self.max_step_tokens,
            token_share=1.0 - self.reserved_share(),
            finish_interval_s=self.finish_interval_s,
        )

    def ways_to_decode(self, tpot_s: float = INFINITY) -> list[WayToDecode]:
        """What a promise may count on: plain steps, and steps that verify trees; also one of a
        request that is not there, of such a TPOT."""
        known = self._ways
        if known.now_s == self.now_s and known.tightest_s <= tpot_s:
            return known.ways
        own_s = min(
            (t.reserved_tpot_s for t in self.tracked.values() if t.promised or not t.missed),
            default=INFINITY,
        )
        tightest_s = min(own_s, tpot_s)
        ways = [(self.plain(), program.PLAIN)]
        trees = self.speculation(tightest_s) if tightest_s < INFINITY else None
        if trees is not None:
            ways.append(trees)
        if tightest_s == own_s:  # what holds for a request that is not there is nobody else's
            self._ways = _Ways(self.now_s, tightest_s, ways)
        return ways

    def can_wait(self, tracked: SLORequest) -> bool:
        """Whether a request had better not begin without a promise.

        Without a TTFT it loses nothing by waiting, and begun beside too many others it loses its
        TPOT. It waits if it could have that at all, and not too long.
        """
        return (
            tracked.deadline_s == INFINITY
            and tracked.reserved_tpot_s < INFINITY
            and tracked.request.num_computed_tokens == 0
            and tracked.wants_promise(self.now_s)
            and not self.is_aged(tracked.request)
            and self.sustainable(tracked.reserved_tpot_s * NEARLY)[0] >= 1.0
        )

    def has_room_for(self, tracked: SLORequest) -> bool:
        """Whether a request may begin beside those that run, or are promised to."""
        live = {request.request_id for request in self.scheduler.running}
        keeping = [
            self._pace(t)
            for name, t in self.tracked.items()
            if (t.promised or t.opportunistic or name in live)
            and not t.missed
            and t.reserved_tpot_s < INFINITY
        ]
        return has_headroom(keeping, self._pace(tracked), self.sustainable)

    def length_query(self, request: Request) -> LengthQuery:
        """What is known of an answer's length when its request arrives."""
        tracked = self.tracked.get(request.request_id)
        return LengthQuery(
            UNLABELLED if tracked is None else tracked.slo_class,
            request.num_prompt_tokens,
            request.max_tokens,
            None if tracked is None else tracked.slo.expected_output_tokens,
            request.prompt_token_ids or (),
        )

    def _pace(self, tracked: SLORequest) -> Pace:
        """What a request asks of steps while it runs."""
        request = tracked.request
        length = self.lengths.predict(
            tracked.slo_class, request.max_tokens, tracked.slo.expected_output_tokens
        )
        return Pace(tracked.reserved_tpot_s, request.num_prompt_tokens / length.tokens)

    def _turn_away(self, start_s: float) -> None:
        """New requests for which nothing can be planned: their deadline has passed already, or
        there are no plans at all."""
        reason = "expired" if self.can_promise else NO_CHUNKED_PREFILL
        hopeless = {
            t.request.request_id: reason
            for t in self.tracked.values()
            if not t.planned
            and t.slo.effective_tier == "guaranteed"
            and not (self.can_promise and t.wants_promise(start_s))
        }
        if hopeless:
            self._settle((), hopeless, dict.fromkeys(hopeless, self.finish_interval_s), {})

    def _settle(
        self,
        admitted: tuple[str, ...],
        refused: dict[str, str],
        retry_after_s: dict[str, float],
        due_s: dict[str, float],
    ) -> None:
        beside = self._groups.refused_with(refused, self.tracked)
        admitted = tuple(name for name in admitted if name not in beside)
        refused = {**refused, **{name: refused[cause] for name, cause in beside.items()}}
        retry_after_s = {
            **retry_after_s,
            **{name: retry_after_s[cause] for name, cause in beside.items()},
        }
        for request_id in admitted:
            tracked = self.tracked[request_id]
            tracked.promise(due_s[request_id])
            self._quotes.competition.promised(tracked.remaining_tokens, self.now_s)
            if self.quotas is not None:
                self.quotas.promised(tracked, self.now_s)
            self._unpromised -= 1
            self.waiting.remove(request_id)
            self._unordered = True
            self.metrics.admission(tracked.slo_class, "late" if tracked.planned else "promised")
            tracked.planned = True
        for request_id, reason in refused.items():
            tracked = self.tracked[request_id]
            first = not tracked.planned
            tracked.planned = True
            if first:
                tracked.reason = reason
                self._note_refusal(tracked, reason)
            if tracked.slo.on_unattainable == "decline" and tracked.first_token_s is None:
                waits = tracked.request.num_computed_tokens == 0
                if waits or first or request_id in beside:
                    self.metrics.admission(tracked.slo_class, "declined", reason)
                    wait_ms = max(round(retry_after_s[request_id] * 1e3), 1)
                    answer = Declined(wait_ms, tracked.reason or reason)
                    self._groups.declined(tracked, answer)
                    if self.quotas is not None:  # a promise that is taken back costs nothing
                        self.quotas.ended(tracked, self.now_s, refunded=True)
                    self._end(tracked.request, answer.pack())
            elif first:
                self.metrics.admission(tracked.slo_class, "best_effort", reason)

    def _note_refusal(self, tracked: SLORequest, reason: str) -> None:
        if reason == "prefill":
            self.pressure.refused(self.now_s, ttft=tracked.deadline_s < INFINITY)
        elif reason == "memory":
            self.pressure.short_of(self.blocks_for(tracked.request.num_tokens), self.now_s)

    def reserved_share(self) -> float:
        """Share of the tokens that best effort may claim before promises."""
        return self.waiting.reserved_share(self.now_s)

    def _choose_starved(self) -> None:
        requests = self.scheduler.requests
        if self.scheduler.num_waiting_for_streaming_input:  # their clients let them wait, not we
            for name in tuple(self.waiting.since_s):
                if requests[name].status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                    self.waiting.remove(name)
        self.waiting.choose_starved(self.now_s)

    def seats(self, promised: int) -> int:
        """Places for promises beside so many."""
        if not self.can_promise:
            return 0
        return self.scheduler.max_num_active_reqs - promised - self.waiting.reserved_seats

    def demand(
        self, tracked: SLORequest, start_s: float, model: StepTimeModel, origin_s: float = 0.0
    ) -> Demand:
        """What serving a request within its objectives asks from now on.

        Its deadline is counted from ``origin_s``.
        """
        request = tracked.request
        length = self.predicted_length(tracked)
        self.look_up_prefix(tracked)
        work = program.work_tokens(model, tracked.remaining_tokens, request.num_computed_tokens)
        return request_views.demand(
            tracked,
            start_s - origin_s,
            tracked.due_s(start_s, model.predict_s(work)),
            work,
            length,
            self._blocks_of(tracked),
            origin_s + model.predict_s(0),
        )

    def predicted_length(self, tracked: SLORequest) -> LengthPrediction:
        """Of a request's answer, what it has of it counted."""
        request = tracked.request
        return self.lengths.predict(
            tracked.slo_class,
            request.max_tokens,
            tracked.slo.expected_output_tokens,
            request.num_output_tokens,
        )

    def _blocks_of(self, tracked: SLORequest) -> int:
        """KV blocks to set aside for a request."""
        request = tracked.request
        tokens = self.lengths.expected_hold(
            tracked.slo_class,
            request.num_prompt_tokens,
            request.max_tokens,
            tracked.slo.expected_output_tokens,
            request.num_output_tokens,
        )
        return self.blocks_for(tokens)

    def look_up_prefix(self, tracked: SLORequest) -> None:
        """How much of a prompt that has not started the prefix cache holds now."""
        manager, request = self.scheduler.kv_cache_manager, tracked.request
        if request.num_computed_tokens == 0 and manager.prefix_cache_lookup_enabled(request):
            _, tracked.cached_tokens, _ = manager.coordinator.find_longest_cache_hit(
                request.block_hashes, request.num_tokens - 1
            )

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that ``tokens`` tokens hold, never more than there are: a request that vLLM
        would run alone is not refused for memory. Bounded caches (sliding window, state) are left
        to vLLM."""
        blocks = sum(-(-tokens // size) for size in self.block_sizes)
        return min(blocks, self.total_blocks)

    def held_blocks(self, request: Request) -> int:
        """KV blocks that a request holds."""
        blocks = self.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        return sum(map(len, blocks))

    def committed_load(
        self, start_s: float, model: StepTimeModel, origin_s: float = 0.0
    ) -> CommittedLoad:
        """What is promised. Deadlines are counted from ``origin_s``."""
        committed: list[Demand] = []
        decoding: dict[float, int] = {}
        context = blocks = 0
        for tracked in self.tracked.values():
            if not tracked.promised:
                continue
            if tracked.decodes:
                blocks += self._blocks_of(tracked)
                decoding[tracked.reserved_tpot_s] = decoding.get(tracked.reserved_tpot_s, 0) + 1
                context += tracked.request.num_computed_tokens
            else:
                demand = self.demand(tracked, start_s, model, origin_s)
                blocks += demand.blocks
                committed.append(demand)
        return committed, decoding, context, blocks

    def may_start(self, starting: PrefillView, start_s: float, model: StepTimeModel) -> bool:
        """Whether a prefill may end before its deadline; see ``admission.can_start_early``."""
        if starting.tpot_s == INFINITY:
            return True
        committed, decoding, context, _ = self.committed_load(start_s, model)
        pending = [d for d in committed if d.request_id != starting.request_id]
        capacity = program.Capacity(0.0, 1, self.max_step_tokens, 1.0 - self.reserved_share())
        return any(
            program.can_start_early(
                start_s,
                starting.tpot_s,
                pending,
                decoding,
                believed,
                capacity,
                decoding_context=context,
                speculated=speculated,
            )
            for believed, speculated in self.ways_to_decode()
        )

    def decode_view(self, tracked: SLORequest, start_s: float) -> DecodeView:
        """A promised decoding request before a step that begins at ``start_s``."""
        name = tracked.request.request_id
        expected, in_flight = self.expected.get(name, 1.0), self.in_flight.get(name)
        return request_views.decode_view(tracked, start_s, self.steps.strength, expected, in_flight)

    def responsive_step_s(self, model: StepTimeModel, tpots: float = 2.0) -> float:
        """Longest step that best effort may cause, by a model that keeps the margin of promises;
        see ``RecentObjectives``."""
        shortest_s = self.steps.expected_model.predict_s(1)
        step_s = self._recent.responsive_step_s(self.now_s, shortest_s, tpots)
        return step_s * model.predict_s(1) / shortest_s

    def since_served_s(self, request: Request) -> float:
        """When a best-effort request last got tokens, or arrived."""
        return self.waiting.seen(request.request_id, self.now_s)

    def is_aged(self, request: Request) -> bool:
        """Whether a best-effort request has had no tokens for too long, or had not."""
        return self.waiting.is_aged(request.request_id, self.now_s)

    def served(self, request_id: str) -> None:
        """Note that a request got tokens; one with a promise has no place among those who wait."""
        tracked = self.tracked.get(request_id)
        if tracked is None or not tracked.promised:
            self.waiting.served(request_id, self.now_s)

    def take_unordered(self) -> bool:
        """Whether promises came or went since the running list was last put in order."""
        unordered, self._unordered = self._unordered, False
        return unordered or self.best_effort is not None
