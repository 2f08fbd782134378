# SPDX-License-Identifier: Apache-2.0
"""Requests that begin without a promise and keep their TPOT all the same, as there is headroom."""

from __future__ import annotations

from vllm_slo.core.admission.opportunistic import Pace, has_headroom
from vllm_slo.core.ordering.starvation_guard import StarvationGuard
from vllm_slo.core.types import INFINITY
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling.decode_model import DecodeModel
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.request_views import decode_view
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.workload import Workload

NEARLY = 1.25
"""A request waits for its turn if a TPOT so many times as long as its own can be kept at all."""


class OpportunisticStarts:
    """Decides who begins without a promise."""

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        workload: Workload,
        clock: StepClock,
        decoding: DecodeModel,
        guard: StarvationGuard,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._workload = workload
        self._clock = clock
        self._decoding = decoding
        self._guard = guard

    def had_better_wait(self, tracked: SLORequest) -> bool:
        """Whether a request had better not begin without a promise.

        Without a TTFT it loses nothing by waiting, and begun beside too many others it loses its
        TPOT. It waits for its turn if it could have that at all.
        """
        now_s = self._clock.now_s
        return (
            tracked.deadline_s == INFINITY
            and tracked.reserved_tpot_s < INFINITY
            and tracked.request.num_computed_tokens == 0
            and tracked.wants_promise(now_s)
            and not self._guard.must_begin(tracked.request.request_id, now_s)
            and self._decoding.sustainable(tracked.reserved_tpot_s * NEARLY)[0] >= 1.0
        )

    def has_headroom(self, tracked: SLORequest) -> bool:
        """Whether a request may begin beside those that run, or are promised to."""
        running = {request.request_id for request in self._state.running}
        keeping = [
            self._pace(t)
            for name, t in self._tracker.live.items()
            if (t.promised or ((t.opportunistic or name in running) and not t.missed))
            and t.reserved_tpot_s < INFINITY
        ]
        decoding = self._decoding
        pace = self._pace(tracked)
        return has_headroom(keeping, pace, decoding.sustainable, decoding.spread())

    def is_planned_for(self, tracked: SLORequest) -> bool:
        """Whether a request without a promise is planned for like a promised one: until it begins,
        if it need not begin at once; then only where drafts yield, since in plain steps the margin
        of promises is all that there is to spare."""
        if not tracked.decodes:
            name, now_s = tracked.request.request_id, self._clock.now_s
            return tracked.holds_tpot and not self._guard.must_begin(name, now_s)
        return tracked.holds_tpot and bool(self._decoding.yields.next_step)

    def _pace(self, tracked: SLORequest) -> Pace:
        """What a request asks of steps while it runs. The time by which it is ahead in its TPOT
        window is spread over an answer: one that begins now stays for a whole one."""
        request, tpot_s = tracked.request, tracked.reserved_tpot_s
        length = self._workload.lengths.predict(
            tracked.slo_class, request.max_tokens, tracked.slo.expected_output_tokens
        )
        if tracked.decodes:
            start_s = self._clock.start_s
            view = decode_view(tracked, start_s)
            ahead_s = view.window_end_s - start_s - view.window_left * tpot_s
            tpot_s += max(ahead_s, 0.0) / length.tokens
        return Pace(tpot_s, request.num_prompt_tokens / length.tokens)
