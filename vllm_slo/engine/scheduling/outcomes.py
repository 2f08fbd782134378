# SPDX-License-Identifier: Apache-2.0
"""What became of requests: reports to their clients, metrics, spans, the recording."""

from __future__ import annotations

from typing import Any

from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.sessions import SessionRounds
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics
from vllm_slo.engine.telemetry.request_recorder import RequestRecorder
from vllm_slo.engine.telemetry.tracing import RequestSpans


class Outcomes:
    """Tells how the requests of one engine did.

    Args:
        spans: makes a span for each request; None where tracing is off.
        recorder: is told of each request; None: nothing is recorded.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        sessions: SessionRounds,
        clock: StepClock,
        metrics: SchedulerMetrics,
        spans: RequestSpans | None,
        recorder: RequestRecorder | None,
    ) -> None:
        self._tracker = tracker
        self._sessions = sessions
        self._clock = clock
        self._metrics = metrics
        self._spans = spans
        self._recorder = recorder

    def ended(self, tracked: SLORequest, attained: bool | None, *, by_itself: bool) -> None:
        """Count a request that has ended, and make its span.

        Args:
            tracked: the request.
            attained: whether it kept its objectives, `SessionRounds.in_time`; None: it had none,
                or was cut off.
            by_itself: whether its answer came to its end.
        """
        if by_itself:
            first_s = tracked.first_token_s
            self._metrics.finished(
                tracked.slo_class,
                attained,
                promised="late" if tracked.late is not None else str(tracked.was_promised).lower(),
                tokens=tracked.request.num_output_tokens,
                ttft_s=first_s and first_s - tracked.arrival_s,
                tpot_s=tracked.tpot.worst_s,
            )
            if tracked.late is not None:
                self._metrics.late_promise(tracked.slo_class, kept=tracked.late_kept)
            if tracked.tpot.stages > 1:
                self._metrics.stages(tracked.slo_class, tracked.tpot.results())
        if not len(self._tracker):
            self.publish_soon()
        if self._spans is not None:
            self._spans.ended(tracked, attained, self._clock.clock)
        if self._recorder is not None:
            now_s, request = self._clock.now_s, tracked.request
            self._recorder.ended(request, tracked, attained, now_s, by_itself=by_itself)

    def report_now(self, tracked: SLORequest) -> dict[str, Any]:
        """The report of a live request as it would be if it ended here."""
        return self.report(tracked, self._sessions.in_time(tracked, tracked.attained()))

    def report(self, tracked: SLORequest, attained: bool | None) -> dict[str, Any]:
        """The report of a request that ends now.

        ``attained``: whether it kept its objectives; None: it had none, or was cut off.
        """
        report, session = tracked.report(attained), self._sessions.told(tracked, attained)
        return report if session is None else {**report, "session": session}

    def publish_soon(self) -> None:
        """Bring the gauges up to date although no step may follow."""
        self._metrics.publish_soon(**self._gauges())

    def publish_if_due(self) -> None:
        """Bring the gauges up to date, now and then."""
        now_s = self._clock.now_s
        if self._metrics.due(now_s):
            self._sessions.close_quiet(now_s)
            self._metrics.publish(now_s, **self._gauges())

    def _gauges(self) -> dict[str, float]:
        waiting = [t for t in self._tracker if not t.promised]
        oldest_s = min((t.arrival_s for t in waiting), default=self._clock.now_s)
        return {
            "promised_requests": len(self._tracker) - len(waiting),
            "best_effort_requests": len(waiting),
            "best_effort_age_seconds": self._clock.now_s - oldest_s,
            "step_time_margin_ratio": self._clock.margin,
            "step_time_bias_ratio": self._clock.estimator.correction.bias,
            **self._sessions.gauges(),
        }
