# SPDX-License-Identifier: Apache-2.0
"""Between vLLM's scheduler and the policies: gathers views, asks ``core``, turns plans into nudges.

What is measured as a step's time: from its ``schedule()`` call, or from the end of the step before
it if that was still running then (async scheduling overlaps the two), until its output arrives.
Time in which the engine had nothing to do is not counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from vllm_slo.config import SLOConfig
from vllm_slo.core import admission, batch_plan
from vllm_slo.core.batch_plan import RecentObjectives
from vllm_slo.core.clock import Clock
from vllm_slo.core.output_length import OutputLengthPredictor
from vllm_slo.core.step_time import BatchShape, StepTimeEstimator, StepTimeModel
from vllm_slo.core.types import INFINITY, Demand, PrefillView, StepPlan
from vllm_slo.engine import views
from vllm_slo.engine.metrics import SchedulerMetrics
from vllm_slo.engine.profile import find_profile
from vllm_slo.engine.recording import shape_of
from vllm_slo.engine.views import Tracked
from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo import SLO, has_slo_key

if TYPE_CHECKING:
    from vllm_slo.engine.scheduler import Scheduler

logger = init_logger(__name__)

WAITING_LOOKAHEAD = 64
"""Best-effort requests considered per step; more could not start in one step anyway."""

MIN_REPLAN_S = 0.02
MODEL_REFRESH_STEPS = 8
"""The corrected step-time models are rebuilt this often; their correction moves slowly."""

UNLABELLED = "none"


@dataclass(slots=True)
class Nudge:
    """What vLLM's ``schedule()`` is to find.

    Attributes:
        preempt: best-effort requests whose KV goes first.
        running: the running list in the order in which it gives way (last first), or None: as is.
        waiting: waiting requests that may start, in order.
        offered: the same as a set.
        tokens: request id -> most tokens of this step.
        token_budget: tokens of the whole step.
        timestamp: for vLLM's preemption event.
    """

    preempt: list[Request]
    running: list[Request] | None
    waiting: list[Request]
    offered: set[Request]
    tokens: dict[str, int]
    token_budget: int
    timestamp: float


class _Step(NamedTuple):
    """One scheduled step: (when it was scheduled, shape, predicted seconds)."""

    begun_s: float
    shape: BatchShape
    predicted_s: float


class Steering:
    """The state of multi-SLO scheduling on one engine.

    Args:
        scheduler: whose requests, blocks and limits it reads. It changes none of them.
        clock: time.
        step_time: what is known of step times; None: a profile of this engine, or the prior.

    Raises:
        ConfigError, ProfileError: the configuration cannot be used.
    """

    def __init__(
        self, scheduler: Scheduler, clock: Clock, step_time: StepTimeEstimator | None = None
    ) -> None:
        vllm_config = scheduler.vllm_config
        self.config = SLOConfig.from_additional_config(vllm_config.additional_config)
        self.classes = self.config.slo_classes()
        self.clock = clock
        self.estimator = step_time or StepTimeEstimator(
            find_profile(vllm_config, self.config.profile)
        )
        self.lengths = OutputLengthPredictor(self.config.output_length_quantile)
        self.metrics = SchedulerMetrics(vllm_config.parallel_config.data_parallel_index)
        self.tracked: dict[str, Tracked] = {}
        self._scheduler = scheduler
        self._max_step_tokens = scheduler.max_num_scheduled_tokens
        self._total_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        self._block_sizes = [
            manager.block_size
            for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
            if isinstance(manager.kv_cache_spec, FullAttentionSpec)
        ]
        self._now_s = clock.monotonic_s()
        self._steps: deque[_Step] = deque()
        self._busy_until_s = self._now_s
        self._last_done_s = self._now_s
        self._last_plan_s = -INFINITY
        self._arrived = False
        self._ended_since_plan = 0
        self._last_end_s = self._now_s
        self._finish_interval_s = 1.0
        self._served_s: dict[str, float] = {}
        self._recent = RecentObjectives()
        self._unpromised = 0
        self._steps_learnt = 0
        self._refresh_models()
        self._ended: list[tuple[Request, str]] = []
        self._refused: list[Request] = []
        self._unordered = False
        admission.warm_up()

    @property
    def active(self) -> bool:
        """Whether any live request carries an SLO."""
        return bool(self.tracked) or bool(self._refused)

    # What happens to requests.

    def on_arrival(self, request: Request) -> None:
        """Begin to track a request if it carries an SLO; an invalid one is refused in this step."""
        params = request.sampling_params
        if params is None:
            return
        try:
            slo = self._slo_of(params.extra_args, request.arrival_time)
        except InvalidSLOError as error:
            logger.warning("request %s refused: %s", request.request_id, error)
            request.stop_reason = f"slo_invalid:{error}"
            self._refused.append(request)
            return
        if slo is None:
            return
        now_s = self.clock.monotonic_s()
        arrival_s = now_s - views.age_s(request, self.clock.epoch_s())
        tracked = Tracked(request, slo, arrival_s, self.config.tpot_window_tokens)
        self.tracked[request.request_id] = tracked
        self._arrived = True
        self._unpromised += 1
        self._recent.add(tracked.deadline_s - arrival_s, tracked.tpot_s, now_s)
        if tracked.slo.effective_tier != "guaranteed":
            self.metrics.admission(tracked.slo_class, "best_effort_asked")

    def _slo_of(self, extra: dict[str, Any] | None, arrival_epoch_s: float) -> SLO | None:
        slo = None
        if has_slo_key(extra):
            slo = SLO.from_extra_args(extra, classes=self.classes, arrival_s=arrival_epoch_s)
        if slo is None and self.config.default_class:
            return self.classes[self.config.default_class]
        return slo

    def on_tokens(self, request: Request, count: int) -> None:
        """Record tokens of the step whose output is being processed."""
        tracked = self.tracked.get(request.request_id)
        if tracked is not None and count:
            first = tracked.first_token_s is None
            tracked.on_tokens(count, self._now_s)
            if first and tracked.promised and tracked.missed:
                self._break(tracked, "ttft")

    def on_end(self, request: Request) -> dict[str, Any] | None:
        """Stop tracking a request; returns its report if it carried an SLO."""
        by_itself = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        self._served_s.pop(request.request_id, None)
        tracked = self.tracked.pop(request.request_id, None)
        if by_itself:
            label = UNLABELLED if tracked is None else tracked.slo_class
            self.lengths.observe(label, request.num_output_tokens)
        if tracked is None:
            return None
        if tracked.promised:
            self._count_finish(tracked.arrival_s)
        else:
            self._unpromised -= 1
        attained = tracked.attained() if by_itself else None
        if by_itself:
            self.metrics.finished(
                tracked.slo_class,
                attained,
                promised=tracked.was_promised,
                tokens=request.num_output_tokens,
                ttft_s=tracked.first_token_s and tracked.first_token_s - tracked.arrival_s,
                tpot_s=tracked.tpot.worst_s,
            )
        if not self.tracked:
            self.metrics.publish_soon(**self._gauges())
        return tracked.report(attained)

    def _count_finish(self, arrival_s: float) -> None:
        """Count the end of a promise; the time before it arrived is no wait for its end."""
        self._ended_since_plan += 1
        gap_s = self._now_s - max(self._last_end_s, arrival_s)
        self._last_end_s = self._now_s
        self._finish_interval_s += 0.1 * (gap_s - self._finish_interval_s)

    def take_ended(self) -> list[Request]:
        """Requests ended by the scheduler itself whose clients have not been told yet."""
        ended = [request for request, _ in self._ended]
        self._ended.clear()
        return ended

    def _break(self, tracked: Tracked, objective: str) -> None:
        """A promise that can no longer be kept is withdrawn: the request goes on best effort."""
        tracked.promised = False
        self._unpromised += 1
        self._unordered = True
        self.metrics.broken(tracked.slo_class, objective)

    # What happens to steps.

    def begin_step(self) -> float:
        """Read the clock for a new step."""
        self._now_s = self.clock.monotonic_s()
        return self._now_s

    def on_scheduled(self, output: SchedulerOutput, begun_s: float) -> None:
        """Remember a step until its output comes; empty ones are not measured."""
        if not output.num_scheduled_tokens:
            return
        shape = shape_of(output)
        predicted_s = self._expected_model.predict_shape_s(shape)
        self._steps.append(_Step(begun_s, shape, predicted_s))
        self._busy_until_s = max(self._busy_until_s, begun_s) + predicted_s

    def on_output(self, output: SchedulerOutput) -> None:
        """A step is done: learn from how long it took."""
        now_s = self._now_s = self.clock.monotonic_s()
        if output.num_scheduled_tokens and self._steps:
            step = self._steps.popleft()
            actual_s = now_s - max(step.begun_s, self._last_done_s)
            self._learn(step.shape, actual_s)
            self.metrics.step(step.predicted_s, actual_s)
            self._last_done_s = now_s
            self._busy_until_s = now_s + sum(s.predicted_s for s in self._steps)
        if self.metrics.due(now_s):
            self.metrics.publish(now_s, **self._gauges())

    def _learn(self, shape: BatchShape, actual_s: float) -> None:
        self.estimator.observe(shape, actual_s)
        self._steps_learnt += 1
        if self._steps_learnt % MODEL_REFRESH_STEPS == 0:
            self._refresh_models()

    def _refresh_models(self) -> None:
        self._promise_model = self.estimator.promise(self.config.margin_quantile)
        self._expected_model = self.estimator.expected()
        jitter = self.estimator.correction.jitter(self.config.margin_quantile)
        self.strength = 1.0 - min(jitter / self.config.tpot_window_tokens, 0.1)

    def _gauges(self) -> dict[str, float]:
        waiting = [t for t in self.tracked.values() if not t.promised]
        oldest_s = min((t.arrival_s for t in waiting), default=self._now_s)
        return {
            "promised_requests": sum(t.promised for t in self.tracked.values()),
            "best_effort_requests": len(waiting),
            "best_effort_age_seconds": self._now_s - oldest_s,
            "step_time_margin_ratio": self.estimator.correction.margin(self.config.margin_quantile),
            "step_time_bias_ratio": self.estimator.correction.bias,
        }

    # Planning.

    def plan(self) -> Nudge | None:
        """The nudge for the step about to be scheduled; None: let vLLM do as it does."""
        if self._nothing_to_decide():
            return None
        self._settle_refused()
        start_s = max(self._now_s, self._busy_until_s if self._steps else self._now_s)
        self._withdraw_expired(start_s)
        model = self._promise_model
        if self._should_admit():
            self._admit(start_s, model)
        if not self.tracked:
            return None
        return _StepPlanner(self, start_s, model).nudge()

    def _nothing_to_decide(self) -> bool:
        """Whether every live request is a promised one that decodes."""
        scheduler = self._scheduler
        return not (
            self._arrived
            or self._unpromised
            or self._refused
            or scheduler.waiting
            or scheduler._inflight_prefills
            or len(scheduler.running) != len(self.tracked)
        )

    def _settle_refused(self) -> None:
        for request in self._refused:
            if not request.is_finished():
                self._end(request, str(request.stop_reason))
        self._refused.clear()

    def _end(self, request: Request, stop_reason: str) -> None:
        self._scheduler.end_request(request, stop_reason)
        self._ended.append((request, stop_reason))

    def _withdraw_expired(self, start_s: float) -> None:
        """An expired deadline makes a request best effort, never urgent."""
        for tracked in self.tracked.values():
            waits = tracked.promised and tracked.first_token_s is None
            if waits and tracked.deadline_s <= start_s:
                self._break(tracked, "ttft")

    def _should_admit(self) -> bool:
        since_s = self._now_s - self._last_plan_s
        if self._arrived:
            return True
        if since_s < MIN_REPLAN_S or not self._unpromised:
            return False
        return self._ended_since_plan > 0 or since_s >= self.config.replan_interval_s

    def _admit(self, start_s: float, model: StepTimeModel) -> None:
        """Run the dynamic program over everything that asks for a promise."""
        self._arrived = False
        self._last_plan_s = self._now_s
        self._ended_since_plan = 0
        self._turn_away_expired(start_s)
        asking = [t for t in self.tracked.values() if t.wants_promise(start_s)]
        if not asking:
            return
        asking.sort(key=lambda t: (t.planned, t.deadline_s))
        asking = asking[: min(self.config.max_planned_new, admission.MAX_NEW)]
        new = [self.demand(t, start_s, model) for t in asking]
        committed, decoding, context, blocks = self.commitments(start_s, model)
        promised = len(committed) + sum(decoding.values())
        plan = admission.plan_admission(
            start_s,
            new,
            committed,
            decoding,
            model,
            admission.Capacity(
                blocks=self._total_blocks - blocks,
                seats=self._scheduler.max_num_active_reqs - promised,
                max_step_tokens=self._max_step_tokens,
                token_share=1.0 - self.kept_share(),
                finish_interval_s=self._finish_interval_s,
            ),
            decoding_context=context,
        )
        self._settle(plan.admitted, plan.refused, plan.retry_after_s)

    def _turn_away_expired(self, start_s: float) -> None:
        """New requests whose deadline passed before anything could be planned for them."""
        expired = {
            t.request.request_id: "expired"
            for t in self.tracked.values()
            if not t.planned
            and t.slo.effective_tier == "guaranteed"
            and not t.wants_promise(start_s)
        }
        if expired:
            self._settle((), expired, dict.fromkeys(expired, self._finish_interval_s))

    def _settle(
        self, admitted: tuple[str, ...], refused: dict[str, str], retry_after_s: dict[str, float]
    ) -> None:
        for request_id in admitted:
            tracked = self.tracked[request_id]
            tracked.promise()
            self._unpromised -= 1
            self._served_s.pop(request_id, None)
            self._unordered = True
            self.metrics.admission(tracked.slo_class, "late" if tracked.planned else "promised")
            tracked.planned = True
        for request_id, reason in refused.items():
            tracked = self.tracked[request_id]
            first = not tracked.planned
            tracked.planned = True
            if tracked.slo.on_unattainable == "decline" and tracked.first_token_s is None:
                if tracked.request.num_computed_tokens == 0 or first:
                    self.metrics.admission(tracked.slo_class, "declined", reason)
                    wait_ms = max(round(retry_after_s[request_id] * 1e3), 1)
                    self._end(tracked.request, f"slo_declined:{wait_ms}")
            elif first:
                self.metrics.admission(tracked.slo_class, "best_effort", reason)

    def kept_share(self) -> float:
        """Share of the tokens that an aged best-effort request may claim before promises."""
        oldest_s = min(self._served_s.values(), default=INFINITY)
        aged = self._now_s - oldest_s > self.config.ageing_s
        return self.config.best_effort_token_share if aged else 0.0

    def demand(self, tracked: Tracked, start_s: float, model: StepTimeModel) -> Demand:
        """What serving a request within its objectives asks from now on."""
        request = tracked.request
        length = self.lengths.predict(
            tracked.slo_class,
            request.max_tokens,
            tracked.slo.expected_output_tokens,
            request.num_output_tokens,
        )
        tokens = request.num_prompt_tokens + length.tokens
        if length.source == "cap":
            # A cap is no prediction: like vLLM, ask only for what is known to be needed.
            tokens = request.num_tokens + 1
        self._look_up_prefix(tracked)
        work = admission.work_tokens(model, tracked.remaining_tokens, request.num_computed_tokens)
        return views.demand(
            tracked, start_s, work, length, self.blocks_for(tokens), model.predict_s(0)
        )

    def _look_up_prefix(self, tracked: Tracked) -> None:
        """How much of a prompt that has not started the prefix cache holds now."""
        manager, request = self._scheduler.kv_cache_manager, tracked.request
        if request.num_computed_tokens == 0 and manager.prefix_cache_lookup_enabled(request):
            _, tracked.cached_tokens, _ = manager.coordinator.find_longest_cache_hit(
                request.block_hashes, request.num_tokens - 1
            )

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that ``tokens`` tokens hold, never more than there are: a request that vLLM
        would run alone is not refused for memory. Bounded caches (sliding window, state) are left
        to vLLM."""
        blocks = sum(-(-tokens // size) for size in self._block_sizes)
        return min(blocks, self._total_blocks)

    def commitments(
        self, start_s: float, model: StepTimeModel
    ) -> tuple[list[Demand], dict[float, int], int, int]:
        """(promises before their first token, decoding count by TPOT, their KV tokens, blocks)."""
        committed: list[Demand] = []
        decoding: dict[float, int] = {}
        context = blocks = 0
        for tracked in self.tracked.values():
            if not tracked.promised:
                continue
            demand = self.demand(tracked, start_s, model)
            blocks += demand.blocks
            if demand.prefill_tokens:
                committed.append(demand)
            else:
                decoding[tracked.tpot_s] = decoding.get(tracked.tpot_s, 0) + 1
                context += tracked.request.num_computed_tokens
        return committed, decoding, context, blocks

    def may_start(self, starting: PrefillView, start_s: float, model: StepTimeModel) -> bool:
        """Whether a prefill may end before its deadline; see ``admission.can_start_early``."""
        committed, decoding, context, _ = self.commitments(start_s, model)
        pending = [d for d in committed if d.request_id != starting.request_id]
        return admission.can_start_early(
            start_s,
            starting.tpot_s,
            pending,
            decoding,
            model,
            admission.Capacity(0.0, 1, self._max_step_tokens, 1.0 - self.kept_share()),
            decoding_context=context,
        )

    def responsive_step_s(self, model: StepTimeModel) -> float:
        """Longest step that best effort may cause, by a model that keeps the margin of promises."""
        step_s = self._recent.responsive_step_s(self._now_s, self._expected_model.predict_s(1))
        return step_s * model.predict_s(1) / self._expected_model.predict_s(1)

    def since_served_s(self, request: Request) -> float:
        """When a best-effort request last got tokens, or arrived."""
        return self._served_s.setdefault(request.request_id, self._now_s)

    def served(self, request_id: str) -> None:
        self._served_s[request_id] = self._now_s

    def take_unordered(self) -> bool:
        """Whether promises came or went since the running list was last put in order."""
        unordered, self._unordered = self._unordered, False
        return unordered


class _StepPlanner:
    """Plans one step: sorts requests into views, asks ``core.batch_plan``, builds the nudge."""

    def __init__(self, steering: Steering, start_s: float, model: StepTimeModel) -> None:
        self.steering = steering
        self.scheduler = steering._scheduler
        self.start_s = start_s
        self.model = model
        self.decodes: list[Tracked] = []
        self.prefills: list[Tracked] = []
        self.others: list[Request] = []
        self.resuming = 0
        self._sort_running()

    def _sort_running(self) -> None:
        tracked = self.steering.tracked
        for request in self.scheduler.running:
            one = tracked.get(request.request_id)
            if one is None or not one.promised:
                self.others.append(request)
            elif views.is_decoding(request):
                self.decodes.append(one)
            else:
                self.prefills.append(one)

    def nudge(self) -> Nudge | None:
        waiting_promised, waiting_others = self._sort_waiting()
        quiet = not (waiting_promised or waiting_others or self.prefills)
        if quiet and not self.others:
            return None
        self.prefills += waiting_promised
        self.prefills.sort(key=lambda t: (t.deadline_s, t.arrival_s, t.request.request_id))
        others = self._rank(self.others + waiting_others)
        preempt = self._preemptions(waiting_promised)
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        free += sum(self._held(r) for r in preempt)
        others = [r for r in others if r not in preempt and self._finds_memory(r, free)]
        self.prefills = [t for t in self.prefills if self._finds_memory(t.request, free)]
        plan = self._plan(others, preempt)
        for request in others:
            if plan.tokens.get(request.request_id):
                self.steering.served(request.request_id)
        return self._build(plan, preempt, waiting_promised, waiting_others)

    def _sort_waiting(self) -> tuple[list[Tracked], list[Request]]:
        """Waiting requests that could start: promised, best effort (the first few).

        vLLM asks a blocked request whether it may go on only while a step has tokens left, and a
        planned step has none: so it is asked here.
        """
        scheduler = self.scheduler
        tracked = self.steering.tracked
        promised: list[Tracked] = []
        others: list[Request] = []
        loras = {views.lora_id(r) for r in scheduler.running}
        for request in (*scheduler.kv_holding_waiting, *scheduler.waiting):
            if views.is_blocked(request) and not scheduler._handle_blocked_waiting_request(request):
                continue
            if not self._takes_lora(request, loras):
                continue
            one = tracked.get(request.request_id)
            self.resuming += views.holds_kv(request)
            if one is not None and one.promised:
                promised.append(one)
            elif len(others) < WAITING_LOOKAHEAD:
                others.append(request)
        return promised, others

    def _takes_lora(self, request: Request, loaded: set[int]) -> bool:
        """Whether a request finds its LoRA among those ``loaded``, or a slot for it.

        vLLM counts the LoRAs of the requests in the step; here running requests may sit one out,
        and all must fit when they are back.
        """
        config, lora = self.scheduler.lora_config, views.lora_id(request)
        return config is None or lora == 0 or lora in loaded or len(loaded - {0}) < config.max_loras

    def _rank(self, others: list[Request]) -> list[Request]:
        """Best effort in serving order: aged first, then decoding, then by place in line."""
        now_s, ageing_s = self.steering._now_s, self.steering.config.ageing_s

        def key(request: Request) -> tuple[bool, bool]:
            aged = now_s - self.steering.since_served_s(request) > ageing_s
            running = request.status == RequestStatus.RUNNING
            return (not aged, not (running and views.is_decoding(request)))

        return sorted(others, key=key)

    def _preemptions(self, starting: list[Tracked]) -> list[Request]:
        """Best-effort requests that must give up memory or seats to promises, latest first."""
        if not self.others:
            return []
        scheduler, steering = self.scheduler, self.steering
        pool = scheduler.kv_cache_manager.block_pool
        promised = [*self.decodes, *self.prefills]
        needed = len(self.decodes) * len(steering._block_sizes)
        needed += sum(
            steering.blocks_for(t.request.num_tokens + 1) - self._held(t.request)
            for t in promised
            if not views.is_decoding(t.request) or t.request.num_computed_tokens == 0
        )
        seats = (
            scheduler.max_num_active_reqs
            - len(scheduler.running)
            - (scheduler.num_waiting_for_streaming_input)
        )
        free = pool.get_num_free_blocks()
        short = len(starting) - seats
        if needed <= free and short <= 0:
            return []
        victims = list(reversed(self.others))
        by_id = {request.request_id: request for request in victims}
        chosen = batch_plan.preemptions(
            needed, free, [(r.request_id, self._held(r)) for r in victims]
        )
        names = [r.request_id for r in victims[: max(short, len(chosen), 0)]]
        return [
            by_id[name] for name in names if scheduler._request_blocks_can_be_freed(by_id[name])
        ]

    def _finds_memory(self, request: Request, free_blocks: int) -> bool:
        """Whether vLLM could start a waiting request; tokens planned for one that cannot start
        would be taken from those who hold the memory it waits for."""
        if request.status == RequestStatus.RUNNING or views.holds_kv(request):
            return True
        return self.steering.blocks_for(request.num_tokens) <= free_blocks

    def _held(self, request: Request) -> int:
        ids = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return sum(len(group) for group in ids)

    def _plan(self, others: list[Request], preempt: list[Request]) -> StepPlan:
        steering, scheduler = self.steering, self.scheduler
        share = steering.kept_share()
        running = len(scheduler.running) - len(preempt)
        limits = batch_plan.StepLimits(
            max_step_tokens=steering._max_step_tokens,
            best_effort_tokens=int(share * self._fullest_step()),
            best_effort_step_s=steering.responsive_step_s(self.model),
            seats=scheduler.max_num_active_reqs
            - running
            - self.resuming
            - scheduler.num_waiting_for_streaming_input,
        )
        return batch_plan.plan_step(
            self.start_s,
            [views.decode_view(t, self.start_s, steering.strength) for t in self.decodes],
            [views.prefill_view(t) for t in self.prefills],
            [views.best_effort_view(r, steering.since_served_s(r)) for r in others],
            self.model,
            limits,
            may_start=lambda view: steering.may_start(view, self.start_s, self.model),
        )

    def _fullest_step(self) -> int:
        tightest = min((t.tpot_s for t in self.decodes), default=INFINITY)
        if tightest == INFINITY:
            return self.steering._max_step_tokens
        return self.model.time_to_tokens(tightest)

    def _with_padding(self, token_budget: int, starting: int) -> int:
        """Room for the drafts to which vLLM pads a request that starts with one token; it would
        rather start nobody than that one without. Nobody gets more than was granted."""
        padding = starting * self.scheduler.num_spec_tokens
        return min(token_budget + padding, self.steering._max_step_tokens)

    def _build(
        self,
        plan: StepPlan,
        preempt: list[Request],
        waiting_promised: list[Tracked],
        waiting_others: list[Request],
    ) -> Nudge:
        tokens = plan.tokens
        offered: list[Request] = []
        loras = {views.lora_id(r) for r in self.scheduler.running if r not in preempt}
        for request in (*(t.request for t in waiting_promised), *waiting_others):
            if tokens.get(request.request_id) and self._takes_lora(request, loras):
                offered.append(request)
                loras.add(views.lora_id(request))
        # As vLLM does: who holds blocks must never wait behind who may not get any.
        offered.sort(key=views.holds_kv, reverse=True)
        running = None
        if preempt or self.steering.take_unordered():
            out = set(preempt)
            running = [t.request for t in (*self.decodes, *self.prefills)]
            running = [r for r in running if r.status == RequestStatus.RUNNING]
            running += [r for r in self.others if r not in out]
        return Nudge(
            preempt,
            running,
            offered,
            set(offered),
            tokens,
            self._with_padding(plan.token_budget, len(offered)),
            self.steering._now_s,
        )
