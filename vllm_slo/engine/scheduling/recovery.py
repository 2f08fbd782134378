# SPDX-License-Identifier: Apache-2.0
"""What is done where a policy has failed: no request is lost, and each report says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.request import Request

from vllm_slo.core.ordering.starvation_guard import StarvationGuard
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling import request_facts
from vllm_slo.engine.scheduling.best_effort import BestEffort
from vllm_slo.engine.scheduling.choice_groups import ChoiceGroups
from vllm_slo.engine.scheduling.endings import Endings
from vllm_slo.engine.scheduling.intake import Intake
from vllm_slo.engine.scheduling.promises import Promises
from vllm_slo.engine.scheduling.quotas import Quotas
from vllm_slo.engine.scheduling.quotes import Quotes, unanswered
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.ruling import Ruling
from vllm_slo.engine.scheduling.sessions import SessionRounds
from vllm_slo.engine.scheduling.slo_request import SLORequest, lost_report
from vllm_slo.engine.telemetry.request_recorder import RequestRecorder
from vllm_slo.slo.verdicts import PLANNING_FAILED


class Recovery:
    """Puts the books of one engine right after a fault, and does without plans."""

    def __init__(
        self,
        state: SchedulerState,
        intake: Intake,
        tracker: RequestTracker,
        promises: Promises,
        quotes: Quotes,
        quotas: Quotas | None,
        best_effort: BestEffort | None,
        sessions: SessionRounds,
        guard: StarvationGuard,
        groups: ChoiceGroups,
        recorder: RequestRecorder | None,
        endings: Endings,
    ) -> None:
        self._state = state
        self._intake = intake
        self._tracker = tracker
        self._promises = promises
        self._quotes = quotes
        self._quotas = quotas
        self._best_effort = best_effort
        self._sessions = sessions
        self._guard = guard
        self._groups = groups
        self._recorder = recorder
        self._endings = endings
        self._lost: set[str] = set()  # requests with an SLO that could not be tracked

    # Of a step.

    def without_plan(self) -> None:
        """A step could not be planned, and vLLM schedules it: do what may not wait for the next."""
        for tracked in self._tracker:
            tracked.disturbed = True
        self._tracker.arrived = True  # the ruling that was due may not have been made
        if (request := self._quotes.answering) is not None:
            self._quotes.forget(request.request_id)
            self._endings.refuse(request, unanswered())
        self.reconcile()
        self._endings.end_refused()

    def without_promises(self, retry_after_s: float) -> None:
        """In place of a plan while planning stands aside: no promise is kept up or made, and no
        request waits for one.

        ``retry_after_s``: when planning is tried again.
        """
        for request in self._quotes.waiting():
            self._endings.end(request, unanswered(retry_after_s))
        self._endings.end_refused()
        if self._tracker.promised:
            for tracked in self._tracker:
                if tracked.promised:
                    tracked.reason = PLANNING_FAILED
                    self._promises.withdraw(tracked, PLANNING_FAILED)
        new = [
            tracked.request.request_id
            for tracked in self._tracker.without_promise()
            if not tracked.planned and tracked.slo.effective_tier == "guaranteed"
        ]
        if new:
            refused = dict.fromkeys(new, PLANNING_FAILED)
            self._promises.carry_out(Ruling({}, refused, dict.fromkeys(new, retry_after_s)))

    # Of a request.

    def stand_back(self, tracked: SLORequest) -> None:
        """Serve a request that cannot be followed without a promise to its end."""
        tracked.slo = replace(tracked.slo, tier="best_effort")
        tracked.reason = PLANNING_FAILED
        if tracked.promised:
            self._promises.withdraw(tracked, PLANNING_FAILED)

    def lost_arrival(self, request: Request) -> None:
        """A request has come, and could not be followed: it is served without a promise, and its
        report says why. One that only asks for a quote is refused."""
        if request_facts.wants_quote(request):
            self._quotes.forget(request.request_id)
            self._endings.refuse(request, unanswered())
        elif (tracked := self._tracker.get(request.request_id)) is not None:
            self.stand_back(tracked)
        elif self._intake.has_slo(request):
            self._lost.add(request.request_id)
        self.reconcile()

    def report_of_lost(self, request_id: str) -> dict[str, Any] | None:
        """The report of a request that could not be followed from its arrival on; None: it was, or
        it has no SLO."""
        if request_id not in self._lost:
            return None
        self._lost.remove(request_id)
        return lost_report(promised=False)

    def lost_end(self, request: Request) -> dict[str, Any] | None:
        """A request has ended, and its end could not be followed; returns its report if it carried
        an SLO."""
        tracked = self._tracker.get(request.request_id)
        self.reconcile()
        if tracked is None:
            return self.report_of_lost(request.request_id)
        return lost_report(promised=tracked.was_promised)

    # Of the books.

    def reconcile(self) -> None:
        """After a fault: no part follows a request that has ended, and none misses a live one."""
        live = {name: r for name, r in self._state.requests.items() if not r.is_finished()}
        self._tracker.retain(live)
        self._groups.retain(self._tracker.live)
        self._guard.retain(live)
        self._quotes.retain(live)
        self._endings.retain(live)
        if self._recorder is not None:
            self._recorder.retain(live)
        if self._quotas is not None:
            self._quotas.retain(live)
        if self._best_effort is not None:
            self._best_effort.reconcile(r for n, r in live.items() if n not in self._quotes)
        self._sessions.recount()
