# SPDX-License-Identifier: Apache-2.0
"""Makes promises, withdraws them and refuses them, in all books that know of them."""

from __future__ import annotations

from typing import Final

from vllm_slo.core.admission.late import LatePromise
from vllm_slo.core.ordering.starvation_guard import StarvationGuard
from vllm_slo.engine.scheduling.choice_groups import ChoiceGroups
from vllm_slo.engine.scheduling.endings import Endings
from vllm_slo.engine.scheduling.quotas import Quotas
from vllm_slo.engine.scheduling.quotes import Quotes
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.ruling import Ruling
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics
from vllm_slo.slo.verdicts import Declined

TTFT: Final = "ttft"
"""Label of promises that broke because a first token came too late."""


class Promises:
    """Carries out what is decided of the promises of one engine.

    Args:
        quotas: how much each tenant may be promised; None: as much as there is.
        groups: which requests are declined together.
        endings: ends those that are declined.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        clock: StepClock,
        quotes: Quotes,
        quotas: Quotas | None,
        guard: StarvationGuard,
        groups: ChoiceGroups,
        metrics: SchedulerMetrics,
        endings: Endings,
    ) -> None:
        self._tracker = tracker
        self._clock = clock
        self._competition = quotes.competition
        self._quotas = quotas
        self._guard = guard
        self._groups = groups
        self._metrics = metrics
        self._endings = endings

    def carry_out(self, ruling: Ruling) -> None:
        """Promise, move, refuse and send away; a choice is refused with the one beside it that is
        declined."""
        for request_id in ruling.turns:
            self.begin_turn(self._tracker.live[request_id])
        for request_id, late in ruling.late.items():
            self._promise_late(self._tracker.live[request_id], late)
        for request_id, reason in ruling.sent_away.items():
            if (tracked := self._tracker.get(request_id)) is not None:
                self._send_away(tracked, reason, ruling.retry_after_s[request_id])
        for request_id, reason in ruling.moved.items():
            self._move(self._tracker.live[request_id], reason)
        beside = self._groups.refused_with(ruling.refused, self._tracker.live)
        for request_id, due_s in ruling.admitted.items():
            if request_id not in beside:
                self._promise(self._tracker.live[request_id], due_s)
        causes = {**dict(zip(ruling.refused, ruling.refused, strict=True)), **beside}
        for request_id, cause in causes.items():
            self.refuse(
                self._tracker.live[request_id],
                ruling.refused[cause],
                ruling.retry_after_s[cause],
                beside=request_id in beside,
            )

    def _promise(self, tracked: SLORequest, due_s: float) -> None:
        outcome = "promised_later" if tracked.planned else "promised"
        tracked.planned = True
        self._guard.remove(tracked.request.request_id)
        self._tracker.promise(tracked, due_s)
        self._competition.promised(tracked.remaining_tokens, self._clock.now_s)
        if self._quotas is not None:
            self._quotas.promised(tracked, self._clock.now_s)
        self._metrics.admission(tracked.slo_class, outcome)

    def _promise_late(self, tracked: SLORequest, late: LatePromise) -> None:
        tracked.late = late
        self._metrics.admission(tracked.slo_class, "promised_late")

    def begin_turn(self, tracked: SLORequest) -> None:
        """The late promise of a request, or the rest of a broken one, is kept like any other from
        now on."""
        self._guard.remove(tracked.request.request_id)
        self._tracker.begin_turn(tracked)

    def _send_away(self, tracked: SLORequest, reason: str, retry_after_s: float) -> None:
        """Decline a request, and the choices beside it, if none of them has a token."""
        for one in self._groups.to_decline_with(tracked):
            one.reason = reason
            self._decline(one, reason, retry_after_s)

    def _move(self, tracked: SLORequest, reason: str) -> None:
        """Others have the place of a promise of which nothing was computed and nobody told: it is
        as if the request had been refused. It may ask again."""
        self._tracker.withdraw(tracked)
        tracked.was_promised = False
        tracked.reason = reason
        if self._quotas is not None:
            self._quotas.ended(tracked, self._clock.now_s, refunded=True)
        self._metrics.admission(tracked.slo_class, "moved", reason)

    def withdraw(self, tracked: SLORequest, objective: str) -> None:
        """A promise that can no longer be kept is withdrawn: the request goes on best effort.

        A late one counts as kept or not when the request ends.

        ``objective``: that is not kept, or the reason.
        """
        self._tracker.withdraw(tracked)
        if self._quotas is not None:
            self._quotas.ended(tracked, self._clock.now_s, refunded=True)
        if tracked.late is None and not tracked.broken:
            self._metrics.broken(tracked.slo_class, objective)
        tracked.broken = objective == TTFT

    def begun_late(self, tracked: SLORequest) -> None:
        """The first token of a request came later than promised. The rest of the answer still keeps
        its pace: later promises were made beside it, and best effort may have to wait for long.

        If that token is in time by what the request asked for itself, its late promise is
        withdrawn, and admission may promise the rest as it was asked for.
        """
        if tracked.late is None:
            self._metrics.broken(tracked.slo_class, TTFT)
        elif tracked.first_token_s is not None and tracked.first_token_s <= tracked.deadline_s:
            self.withdraw(tracked, TTFT)

    def refuse(
        self, tracked: SLORequest, reason: str, retry_after_s: float, *, beside: bool = False
    ) -> None:
        """Serve a request without a promise, or decline it where it asks for that.

        Args:
            tracked: the request.
            reason: what stood in the way.
            retry_after_s: when the same request might be promised.
            beside: whether it is refused only because a choice beside it is.
        """
        first = not tracked.planned
        tracked.planned = True
        if first:
            tracked.reason = reason
        if tracked.slo.on_unattainable == "decline" and tracked.first_token_s is None:
            if first or beside or tracked.request.num_computed_tokens == 0:
                self._decline(tracked, reason, retry_after_s)
        elif first:
            self._metrics.admission(tracked.slo_class, "best_effort", reason)

    def _decline(self, tracked: SLORequest, reason: str, retry_after_s: float) -> None:
        self._metrics.admission(tracked.slo_class, "declined", reason)
        answer = Declined(max(round(retry_after_s * 1e3), 1), tracked.reason or reason)
        self._groups.declined(tracked, answer)
        if self._quotas is not None:  # a promise that is taken back costs nothing
            self._quotas.ended(tracked, self._clock.now_s, refunded=True)
        self._endings.end(tracked.request, answer.pack())
