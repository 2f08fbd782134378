# SPDX-License-Identifier: Apache-2.0
"""Multi-SLO scheduling on one engine: follows requests from arrival to end, carries out what
admission rules, and has each step planned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_slo.core.ordering.starvation_guard import StarvationGuard
from vllm_slo.core.step_time.model import BatchShape
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling import request_facts
from vllm_slo.engine.scheduling.admission import AdmissionController
from vllm_slo.engine.scheduling.best_effort import BestEffort
from vllm_slo.engine.scheduling.choice_groups import ChoiceGroups
from vllm_slo.engine.scheduling.containment import Containment
from vllm_slo.engine.scheduling.endings import Endings
from vllm_slo.engine.scheduling.intake import Intake
from vllm_slo.engine.scheduling.late_promises import LatePromises
from vllm_slo.engine.scheduling.outcomes import Outcomes
from vllm_slo.engine.scheduling.promises import TTFT, Promises
from vllm_slo.engine.scheduling.quotas import REASON, Quotas
from vllm_slo.engine.scheduling.quotes import Quotes
from vllm_slo.engine.scheduling.recovery import Recovery
from vllm_slo.engine.scheduling.replica_reports import ReplicaReports
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.responsive_steps import ResponsiveSteps
from vllm_slo.engine.scheduling.sessions import SessionRounds
from vllm_slo.engine.scheduling.slo_request import UNLABELLED, SLORequest
from vllm_slo.engine.scheduling.stage_marks import StageMarks
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.step_planner import StepPlanner
from vllm_slo.engine.scheduling.step_schedule import StepSchedule
from vllm_slo.engine.scheduling.workload import Workload
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics
from vllm_slo.engine.telemetry.request_recorder import RequestRecorder
from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo.verdicts import Invalid

logger = init_logger(__name__)

PAUSED = "paused"
"""Reason of a promise that was withdrawn as the engine was paused, or put to sleep."""


class Controller:
    """Follows the requests of one engine and plans its steps.

    Args:
        quotas: how much each tenant may be promised; None: as much as there is.
        best_effort: in which order requests without a promise are served; None: as they arrive.
        responsive: how long a step may be that no promise limits.
        recorder: is told of arrivals, and of the ends that `outcomes` is not told of; None: nothing
            is recorded.
        endings: ends the requests that are not served.
        containment: holds the faults that cost one request or one series, and no step's plan.
        tpot_window: tokens over which a TPOT is judged.
        can_promise: whether anything can be promised on this engine. Without that nothing is
            planned, and vLLM is left to itself.
    """

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        clock: StepClock,
        intake: Intake,
        marks: StageMarks,
        workload: Workload,
        admission: AdmissionController,
        late: LatePromises,
        planner: StepPlanner,
        quotes: Quotes,
        quotas: Quotas | None,
        best_effort: BestEffort | None,
        sessions: SessionRounds,
        guard: StarvationGuard,
        groups: ChoiceGroups,
        promises: Promises,
        recovery: Recovery,
        responsive: ResponsiveSteps,
        outcomes: Outcomes,
        recorder: RequestRecorder | None,
        reports: ReplicaReports,
        metrics: SchedulerMetrics,
        endings: Endings,
        containment: Containment,
        *,
        tpot_window: int,
        can_promise: bool,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._clock = clock
        self._intake = intake
        self._marks = marks
        self._workload = workload
        self._admission = admission
        self._late = late
        self._planner = planner
        self._quotes = quotes
        self._quotas = quotas
        self._best_effort = best_effort
        self._sessions = sessions
        self._guard = guard
        self._groups = groups
        self._promises = promises
        self._recovery = recovery
        self._responsive = responsive
        self._outcomes = outcomes
        self._recorder = recorder
        self._reports = reports
        self._metrics = metrics
        self._endings = endings
        self._containment = containment
        self._window = tpot_window
        self._can_promise = can_promise
        self._stalled = False
        self.may_stop: set[str] = set()
        """The tracked requests that a stop string may end, which vLLM's API server finds."""
        reports.publish()

    @property
    def active(self) -> bool:
        """Whether any live request carries an SLO, or the next one would find too long a step, or
        there is an order for those without."""
        ordered = self._best_effort is not None and bool(self._state.requests)
        held = bool(self._endings.refused) or bool(self._quotes)
        return bool(self._tracker.live) or held or ordered or self._responsive.are_needed

    @property
    def answers_waiting(self) -> int:
        """How many requests wait for nothing but an answer from here: a quote, or their end."""
        return len(self._quotes) + len(self._endings.untold)

    # What happens to requests.

    def on_arrival(self, request: Request) -> None:
        """Begin to track a request if it carries an SLO; an invalid one is refused in this step."""
        asks = request_facts.wants_quote(request)
        if self._best_effort is not None and not asks:
            self._best_effort.on_arrival(request)
        if request.sampling_params is None:
            return
        try:
            self._intake.check(request)
            ticket = request_facts.ticket(request)
            self._reports.saw(ticket)
            slo, arrival_s = self._intake.read(request)
        except InvalidSLOError as error:
            logger.warning("request %s refused: %s", request.request_id, error)
            self._endings.refuse(request, Invalid(str(error)).pack())
            return
        if self._recorder is not None and not asks and not request_facts.is_exempt(request):
            with self._containment.single:
                self._recorder.arrived(request, slo, arrival_s)
        if asks:
            self._quotes.add(request, slo, arrival_s, self._clock.clock.monotonic_s())
            self._state.set_aside(request)
        elif slo is not None:
            self._track(SLORequest(request, slo, arrival_s, self._window, ticket))

    def _track(self, tracked: SLORequest) -> None:
        for _ in range(self._marks.first_stage(tracked.request, tracked.slo)):
            tracked.next_stage()
        if (declined := self._groups.begin(tracked)) is not None:
            self._metrics.admission(tracked.slo_class, "declined", declined.reason)
            self._endings.refuse(tracked.request, declined.pack())
            return
        self._workload.keep_end_to_end(tracked)
        tracked.may_end_early = self._workload.may_end_early(tracked)
        self._sessions.begin(tracked)
        self._tracker.add(tracked)
        if request_facts.may_stop(tracked.request):
            self.may_stop.add(tracked.request.request_id)
        ttft_s = tracked.deadline_s - tracked.arrival_s
        if self._can_promise:
            self._responsive.note(ttft_s, tracked.reserved_tpot_s)
        if tracked.slo.effective_tier != "guaranteed":
            stands_back = tracked.reason is not None
            outcome = "best_effort" if stands_back else "best_effort_asked"
            self._metrics.admission(tracked.slo_class, outcome, tracked.reason or "")

    def _record_new_tokens(self, tracked: SLORequest) -> None:
        """Record the tokens that a request has got since this was last called."""
        count = tracked.request.num_output_tokens - tracked.recorded
        if count <= 0:
            tracked.recorded += count  # a prompt that comes in parts begins its answer anew
            return
        first = tracked.first_token_s is None
        while count and not tracked.tpot.is_last:
            stage, before = tracked.tpot.stage, tracked.tpot.tokens
            end = self._marks.end_of(tracked.request, tracked.slo, stage, before, count)
            if end is None:
                break
            tracked.on_tokens(end, self._clock.now_s)
            tracked.next_stage()
            self._tracker.ended += tracked.promised  # it may draw less from here on
            count -= end
        if count:
            tracked.on_tokens(count, self._clock.now_s)
        if first:
            self._tracker.started(tracked)
            self._late.note_started(tracked)
            if tracked.note_beginning():
                self._promises.begun_late(tracked)
            # Admission looks again: the rest of such an answer is guaranteed from now on.
            self._tracker.ended += tracked.late is not None or tracked.broken

    def on_end(
        self, request: Request, blocks: Sequence[KVCacheBlock] = ()
    ) -> dict[str, Any] | None:
        """Stop tracking a request; returns its report if it carried an SLO.

        Args:
            request: the request; it has been freed.
            blocks: what ``sessions.blocks_of`` gave for it before.
        """
        by_itself = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_REPETITION,
        ) or self._marks.has_stopped(request)
        name = request.request_id
        tracked = self._tracker.get(name)
        if tracked is not None:
            self._record_new_tokens(tracked)
        self._guard.remove(name)
        self._quotes.forget(name)
        self._endings.on_end(request)
        self.may_stop.discard(name)
        if self._best_effort is not None:
            self._best_effort.on_end(request, by_itself=by_itself)
        elif by_itself and not request_facts.yields_one_token(request):
            label = UNLABELLED if tracked is None else tracked.slo_class
            cut_off = request_facts.is_cut_off(request)
            self._workload.lengths.observe(label, request.num_output_tokens, cut_off=cut_off)
        if tracked is None:
            if self._recorder is not None:
                now_s = self._clock.now_s
                with self._containment.single:
                    self._recorder.ended(request, None, None, now_s, by_itself=by_itself)
            return self._recovery.report_of_lost(name)
        return self._finish(tracked, blocks, by_itself=by_itself)

    def _finish(
        self, tracked: SLORequest, blocks: Sequence[KVCacheBlock], *, by_itself: bool
    ) -> dict[str, Any]:
        now_s = self._clock.now_s
        attained = self._sessions.in_time(tracked, tracked.attained() if by_itself else None)
        report = self._outcomes.report(tracked, attained)
        with self._containment.single:
            self._groups.end(tracked)
            if tracked.promised and self._quotas is not None:
                self._quotas.ended(tracked, now_s, refunded=by_itself)
            self._tracker.remove(tracked.request.request_id, now_s)
            self._sessions.end(tracked, attained, blocks, answered=by_itself)
            self._outcomes.ended(tracked, attained, by_itself=by_itself)
            return report
        self._recovery.reconcile()
        return report

    def report_now(self, request_id: str) -> dict[str, Any] | None:
        """The report of a live request as it would be if it ended here; None without an SLO."""
        tracked = self._tracker.get(request_id)
        return None if tracked is None else self._outcomes.report_now(tracked)

    def on_pause(self, *, everybody: bool) -> None:
        """The operator pauses the engine, which keeps no promise meanwhile: they are withdrawn. A
        request that can still attain asks for a new one when the engine goes on.

        ``everybody``: also requests that run; else they run on to their end.
        """
        self._clock.tick()
        for tracked in list(self._tracker):
            waits = tracked.request.status != RequestStatus.RUNNING
            if tracked.promised and (everybody or waits):
                tracked.reason = PAUSED if tracked.late is None else tracked.reason
                self._promises.withdraw(tracked, PAUSED)
                self._tracker.ended += 1
        self._reports.publish()

    def on_empty(self) -> None:
        """The last live request has ended, and no step may follow."""
        self._outcomes.publish_soon()
        self._reports.publish()

    # What happens to steps.

    def begin_step(self) -> None:
        """A step is to be scheduled now."""
        self._clock.tick()

    def plan(self) -> StepSchedule | None:
        """The schedule of the step; None: let vLLM do as it does."""
        if not self.active or self._nothing_to_decide():
            self._stalled = False
            return None
        self._endings.end_refused()
        self._choose_starved()
        start_s = self._clock.start_s
        if self._quotes:
            for request, answer in self._quotes.answers(start_s):
                self._endings.end(request, answer)
        self._withdraw_expired(start_s)
        if self._admission.is_due or self._late.is_due(start_s):
            self._admit(start_s)
        schedule = None
        if self._can_promise and (
            self._tracker.live or self._responsive.are_needed or self._orders_waiting()
        ):
            schedule = self._planner.plan(start_s)
        if self._stalled:
            # Nothing of the last plan could be done: vLLM serves who runs, and frees memory.
            self._stalled = False
            return None
        return schedule

    def on_scheduled(
        self, output: SchedulerOutput, shape: BatchShape, schedule: StepSchedule | None
    ) -> None:
        """A step was handed to the engine.

        Args:
            output: the step.
            shape: what it computes.
            schedule: as `plan` returned it.
        """
        self._stalled = (
            schedule is not None
            and schedule.token_budget > 0
            and not output.num_scheduled_tokens
            and not any(map(request_facts.is_blocked, schedule.waiting))  # it began to load its KV
        )
        self._clock.scheduled(output, shape, self._clock.now_s)
        with self._containment.single:
            self._sessions.scheduled(shape.tokens)
            self._reports.publish_with_step()

    def on_output(self, output: SchedulerOutput, drafting_s: float = 0.0) -> None:
        """A step is done: learn from how long it took, ``drafting_s`` of it left out."""
        now_s = self._clock.tick()
        measured = self._clock.done(output, now_s, drafting_s)
        with self._containment.single:
            if measured is not None:
                self._metrics.step(*measured)
            self._outcomes.publish_if_due()

    def on_updated(self, output: SchedulerOutput, done: ModelRunnerOutput) -> None:
        """The output of a step has been processed: requests have their tokens."""
        now_s = self._clock.now_s
        for tracked in self._tracker.live.values():
            count = tracked.request.num_output_tokens - tracked.recorded
            if count > 0 and tracked.first_token_s is not None and tracked.tpot.is_last:
                tracked.on_tokens(count, now_s)  # the usual case
            elif count:
                with self._containment.single:
                    self._record_new_tokens(tracked)
                    continue
                self._recovery.stand_back(tracked)
        if self._best_effort is not None:
            self._best_effort.observe(output, done)

    def promise_now(self, request_id: str) -> bool:
        """Rule on everything that asks for a promise now; whether this request got one."""
        self._clock.tick()
        start_s = self._clock.start_s
        self._withdraw_expired(start_s)
        self._admit(start_s)
        tracked = self._tracker.get(request_id)
        return tracked is not None and tracked.promised

    # Planning.

    def _nothing_to_decide(self) -> bool:
        """Whether every live request is a promised one that decodes, and may do so in this step."""
        state, tracker = self._state, self._tracker
        return not (
            tracker.arrived
            or tracker.unpromised
            or self._endings.refused
            or self._quotes
            or state.waiting
            or state.any_prefills
            or len(state.running) != len(tracker)
            or not self._planner.all_may_decode()
        )

    def _orders_waiting(self) -> bool:
        """Whether requests wait, and not simply for their turn."""
        return self._best_effort is not None and self._state.any_waits

    def _choose_starved(self) -> None:
        """Requests that wait for their own client starve by its will, not by ours."""
        if self._state.awaiting_input:
            requests = self._state.requests
            for name in tuple(self._guard.since_s):
                if requests[name].status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                    self._guard.remove(name)
        self._guard.choose_starved(self._clock.now_s)

    def _withdraw_expired(self, start_s: float) -> None:
        """An expired deadline makes a request best effort, never urgent. A first token that is on
        its way is not late before it has come."""
        for tracked in list(self._tracker.promised_before_first_token()):
            if tracked.deadline_s <= start_s and not request_facts.is_decoding(tracked.request):
                self._promises.withdraw(tracked, TTFT)
        if self._quotas is not None:
            for request_id in self._quotas.overdrawn(self._clock.now_s):
                self._promises.withdraw(self._tracker.live[request_id], REASON)

    def _admit(self, start_s: float) -> None:
        self._late.note_arrivals(start_s)
        self._promises.carry_out(self._late.turns(start_s))
        for ruling in chain(self._admission.rulings(start_s), self._late.rulings(start_s)):
            self._promises.carry_out(ruling)
