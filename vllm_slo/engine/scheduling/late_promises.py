# SPDX-License-Identifier: Apache-2.0
"""Gives a time to requests whose objectives cannot be promised, and sends away those that would
not wait so long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import Final

from vllm_slo.core.admission.incremental import IncrementalAdmission
from vllm_slo.core.admission.late import (
    FULL,
    AskedLoad,
    LatePromise,
    TurnRate,
    expected_wait_s,
    late_promise,
    soonest,
    work_s,
)
from vllm_slo.core.types import INFINITY, Demand
from vllm_slo.engine.scheduling.quotas import Quotas
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.ruling import Ruling
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.workload import Workload
from vllm_slo.slo.verdicts import QUEUE, WAIT

MOST_IN_STEP: Final = 8
"""Requests that are given a time by one step at most, where admission has to be asked for it. Each
takes 0.2 ms beside 30 to 120 live requests, so eight of them take less than 2 ms (simulated loads
on two cores)."""


class LatePromises:
    """The turns of the requests of one engine.

    Args:
        quotas: how much each tenant may be promised; None: as much as there is.
        can_promise: whether anything can be promised on this engine.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        workload: Workload,
        clock: StepClock,
        quotas: Quotas | None,
        *,
        can_promise: bool,
    ) -> None:
        self._tracker = tracker
        self._workload = workload
        self._clock = clock
        self._quotas = quotas
        self._can_promise = can_promise
        self._load, self._rate = AskedLoad(), TurnRate()
        self._last_s = clock.now_s
        self._waiting = False
        self._next_s = INFINITY

    def is_due(self, start_s: float) -> bool:
        """Whether by a step that begins at ``start_s`` a turn has come, or a request has waited as
        long as it wants to."""
        return start_s >= self._next_s

    def note_arrivals(self, start_s: float) -> None:
        """Count what the requests ask for that admission has not ruled on yet."""
        model, most = self._clock.expected_model, self._workload.max_step_tokens
        for tracked in self._tracker.without_promise():
            if tracked.planned or not _asks(tracked):
                continue
            request, slo = tracked.request, tracked.slo
            answer, source = self._workload.lengths.predict(
                tracked.slo_class, request.max_tokens, slo.expected_output_tokens, quantile=0.5
            )
            if source == "cap":  # nothing is known: as long as its prompt, say
                answer = min(answer, request.num_prompt_tokens)
            context = request.num_prompt_tokens + answer // 2
            self._load.asked(
                work_s(model, most, tracked.remaining_tokens, answer, context), start_s
            )

    def note_started(self, tracked: SLORequest) -> None:
        """A request has its first token."""
        if _asks(tracked) and tracked.planned and not tracked.promised:
            self._rate.served(tracked.request.num_prompt_tokens - tracked.cached_tokens)

    def turns(self, start_s: float) -> Ruling:
        """Whose promises, late or broken, are kept from now on. Admission is to rule after that,
        so that it counts them. ``start_s``: when the next step begins."""
        unpromised = self._tracker.without_promise()
        turns = (t.request.request_id for t in unpromised if _has_turn(t, start_s))
        return Ruling(turns=tuple(turns))

    def rulings(self, start_s: float) -> Iterator[Ruling]:
        """Who is given a time, and who is sent away; after admission has ruled. Each ruling is to
        be carried out before the next is asked for.

        ``start_s``: when the next step begins.
        """
        now_s = self._clock.now_s
        if self._waiting:
            self._rate.waited(max(now_s - self._last_s, 0.0))
        self._last_s = now_s
        unpromised = self._tracker.without_promise()
        waiting = [t for t in unpromised if t.first_token_s is None]
        waiting.sort(key=lambda t: t.arrival_s)
        queue = [t for t in waiting if t.planned and _asks(t)]
        self._waiting = bool(queue)
        begun = (t for t in unpromised if _has_begun(t))
        yield Ruling(turns=tuple(t.request.request_id for t in begun))
        if waiting:
            sent_away = self._not_to_wait(waiting, start_s)
            late: dict[str, LatePromise] = {}
            retry_after_s = dict.fromkeys(sent_away, self._tracker.finish_interval_s)
            if self._can_promise:
                for tracked, wait_s, slack in self._expected(queue, sent_away, start_s):
                    name, latest_s = tracked.request.request_id, tracked.latest_start_s
                    if start_s + wait_s > latest_s:
                        sent_away[name], retry_after_s[name] = WAIT, wait_s
                    elif promise := late_promise(start_s, wait_s, slack, latest_s):
                        late[name] = promise
            yield Ruling(late=late, sent_away=sent_away, retry_after_s=retry_after_s)
        turns_s = (t.late.turn_s for t in queue if t.late is not None and not t.promised)
        times_s = (*turns_s, *(t.latest_start_s for t in waiting))
        self._next_s = min((at_s for at_s in times_s if at_s > start_s), default=INFINITY)

    def _not_to_wait(self, waiting: Sequence[SLORequest], start_s: float) -> dict[str, str]:
        """Requests that have waited as long as they want to, or behind too many of their class:
        why."""
        found: dict[str, str] = {}
        ahead: Counter[str] = Counter()
        for tracked in waiting:
            most, before = tracked.slo.max_waiting, ahead[tracked.slo_class]
            ahead[tracked.slo_class] += 1
            if tracked.request.num_computed_tokens:
                continue
            if tracked.latest_start_s <= start_s:
                found[tracked.request.request_id] = WAIT
            elif most is not None and before >= most and tracked.late is None:
                found[tracked.request.request_id] = QUEUE
                ahead[tracked.slo_class] -= 1
        return found

    def _expected(
        self, queue: Sequence[SLORequest], sent_away: Container[str], start_s: float
    ) -> Iterator[tuple[SLORequest, float, float]]:
        """Requests that have no time yet: seconds until each is expected to be served, and how
        many times its TPOT it can have. Those of which nobody knows are left out."""
        over = self._quotas.over if self._quotas is not None else {}
        model, load = self._clock.promise_model, self._load.share(start_s)
        outlooks: Sequence[IncrementalAdmission] = ()
        asked, tokens = 0, 0
        for tracked in queue:
            name = tracked.request.request_id
            if tracked.promised or name in sent_away:
                continue
            tokens += tracked.remaining_tokens
            if tracked.late is not None or tracked.was_promised or name in over:
                continue
            soonest_s: float | None = None
            slack = 1.0
            if load < FULL:
                asked += 1
                if asked > MOST_IN_STEP:
                    return
                if not outlooks:
                    outlooks = self._workload.outlooks(self._workload.committed(start_s, model))
                demand = self._workload.demand(tracked, start_s, model)
                ahead = replace(demand, prefill_tokens=max(demand.prefill_tokens, tokens))
                soonest_s, slack = soonest(
                    _promises(ahead, outlooks, start_s), model.predict_s(ahead.prefill_tokens)
                )
            wait_s = expected_wait_s(soonest_s, load, self._rate, tokens)
            if wait_s is not None:
                yield tracked, wait_s, slack


def _promises(
    demand: Demand, outlooks: Sequence[IncrementalAdmission], start_s: float
) -> Callable[[float, float], bool]:
    """Whether a request could be promised its first token in so many seconds, with so many times
    its TPOT, by any way to decode."""

    def promised(in_s: float, slack: float) -> bool:
        asked = replace(demand, deadline_s=start_s + in_s, tpot_s=demand.tpot_s * slack)
        return any(outlook.judge(asked, start_s).promised for outlook in outlooks)

    return promised


def _has_turn(tracked: SLORequest, start_s: float) -> bool:
    """Whether the turn of a request has come, or it has begun before and missed an objective."""
    if tracked.late is not None and tracked.late.has_come(start_s):
        return True
    return _has_begun(tracked) and tracked.missed


def _has_begun(tracked: SLORequest) -> bool:
    """Whether the answer of a request has begun, and it has a late promise or a broken one. If it
    can still keep what it asked for, admission rules on that first."""
    return tracked.first_token_s is not None and (tracked.late is not None or tracked.broken)


def _asks(tracked: SLORequest) -> bool:
    """Whether a request asks for a promise that its first token comes in time."""
    return tracked.deadline_s < INFINITY and tracked.slo.effective_tier == "guaranteed"
