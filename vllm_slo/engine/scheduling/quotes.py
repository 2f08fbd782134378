# SPDX-License-Identifier: Apache-2.0
"""Answers what a request would be promised if it came now; nothing is changed by it.

Such a request comes like any other, so its prompt is read and cut into tokens as one that is
served. It carries `QUOTE_KEY` and is never scheduled. A step answers a few of those that wait and
leaves the others to the next one, so that a flood of them holds up nobody who is served. The answer
is the stop reason with which the request ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Final, NamedTuple

from vllm.v1.request import Request

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.admission.incremental import IncrementalAdmission, Verdict
from vllm_slo.core.admission.quote import Competition, Quote, quote
from vllm_slo.core.types import INFINITY, Demand
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling.admission import AdmissionController
from vllm_slo.engine.scheduling.quotas import Quotas
from vllm_slo.engine.scheduling.request_facts import yields_one_token
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.slo_request import UNCLASSED, SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.workload import CommittedLoad, Workload
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics
from vllm_slo.slo.model import SLO
from vllm_slo.slo.verdicts import PLANNING_FAILED, pack_quote

MOST_IN_STEP: Final = 8
"""Quotes that one step answers at most: as many as one API server lets in at once
(`http_quote.MOST`), so that one server's clients wait for one step where the time allows it."""
TIME_SHARE: Final = 0.1
"""Share of the engine's time that quotes may take, step by step. One of them is answered all the
same, so that none waits for ever: a quote takes about 1 ms beside 256 promises
(benchmarks/results/quotes.md), and a step of so many rarely less than 10 ms."""


class _Asking(NamedTuple):
    """A request that waits for its answer.

    Attributes:
        came_s: when it came to the scheduler.
        age_s: how long before that it had come to the server.
    """

    request: Request
    slo: SLO | None
    came_s: float
    age_s: float


class Quotes:
    """The requests that only ask, in the order in which they came.

    Args:
        quotas: how much each tenant may be promised; None: as much as there is.
        config: how long the room for a "yes" is held.
        obstacle: why nothing can be promised on this engine, or None; see `obstacles`.

    Attributes:
        competition: who may be promised something before a request comes that was told "yes".
        answering: the request whose answer is being worked out, or could not be; None: there is
            none.
    """

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        workload: Workload,
        admission: AdmissionController,
        clock: StepClock,
        quotas: Quotas | None,
        metrics: SchedulerMetrics,
        config: SLOConfig,
        *,
        obstacle: str | None,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._workload = workload
        self._admission = admission
        self._clock = clock
        self._quotas = quotas
        self._metrics = metrics
        self._holds_s = config.quote_holds_s
        self._window = config.tpot_window_tokens
        self._obstacle = obstacle
        self.competition = Competition()
        self.answering: Request | None = None
        self._asking: dict[str, _Asking] = {}
        self._last_s = -INFINITY

    def __len__(self) -> int:
        return len(self._asking)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._asking

    def add(self, request: Request, slo: SLO | None, arrival_s: float, now_s: float) -> None:
        """A request that wants to know came: at ``arrival_s`` to the server, now to here."""
        self._asking[request.request_id] = _Asking(request, slo, now_s, now_s - arrival_s)

    def forget(self, request_id: str) -> None:
        """A request has ended: it was answered, or its client left. Others are not known here."""
        self._asking.pop(request_id, None)
        if self.answering is not None and self.answering.request_id == request_id:
            self.answering = None

    def retain(self, live: Container[str]) -> None:
        """Forget the requests that are not live."""
        for name in [name for name in self._asking if name not in live]:
            self.forget(name)

    def waiting(self) -> list[Request]:
        """All that wait for an answer."""
        return [asking.request for asking in self._asking.values()]

    def answers(self, start_s: float) -> Iterator[tuple[Request, str]]:
        """The answers for the first of those that wait; at least one where any do. Each request is
        to be ended with its answer before the next one is asked for.

        There are as many as one step may be held up for: `MOST_IN_STEP`, or fewer where one more
        would exceed `TIME_SHARE` of a step: of the mean of the last steps, or of what the running
        requests alone take if that is more. Those that were left to this step are answered as if
        they came now: a request that is to be served would not have waited for other quotes.
        """
        clock = self._clock
        begun_s = clock.clock.monotonic_s()
        running = max(len(self._state.running), 1)
        usual_s = max(clock.mean_s, clock.expected_model.predict_s(running))
        committed = self._workload.committed(start_s, clock.promise_model)
        first = list(islice(self._asking.values(), MOST_IN_STEP))
        for count, (self.answering, slo, came_s, age_s) in enumerate(first, start=1):
            arrival_s = (clock.now_s if came_s <= self._last_s else came_s) - age_s
            answer = self.answer(self.answering, slo, arrival_s, start_s, committed)
            yield self.answering, pack_quote(answer)
            each_s = (clock.clock.monotonic_s() - begun_s) / count
            if each_s * (count + 1) > TIME_SHARE * usual_s:
                break
        self._last_s = clock.now_s

    def answer(
        self,
        request: Request,
        slo: SLO | None,
        arrival_s: float,
        start_s: float,
        committed: CommittedLoad,
    ) -> dict[str, Any]:
        """What ``request`` would be promised by a step that starts at ``start_s``, beside the
        promises that are ``committed`` then; for JSON, times in milliseconds.

        What it asks of the engine does not depend on its objectives, so a request without any is
        told what it could ask for. Where nothing can be promised at all, every request is told so.
        """
        if self._obstacle is not None:
            later_s = self._tracker.finish_interval_s
            never = Quote(False, self._obstacle, later_s, None, None, None)
            return self._told(slo or SLO(), never, {})
        one = SLORequest(request, slo or SLO(), arrival_s, self._window)
        self._workload.keep_end_to_end(one)
        model = self._clock.promise_model
        asking = self._admission.asking(start_s, one)
        plan, asked = self._admission.best_plan(asking, start_s, model, committed)
        ahead = self.competition.tokens(self._holds_s, self._clock.now_s)
        name = request.request_id
        probes = self._admission.probe(plan, asking, start_s) == name
        others, considered = set(plan.admitted) - {name}, {*plan.admitted, *plan.refused}
        beside = [demand for demand in asked if demand.request_id in others]
        demand = self._workload.demand(one, start_s, model)
        beside_others = replace(demand, prefill_tokens=demand.prefill_tokens + round(ahead))
        guard_s = self._workload.overrun_s(model.predict_s(demand.prefill_tokens))
        outlooks = self._workload.outlooks(committed, beside, one.reserved_tpot_s)
        asked_s = one.deadline_s - arrival_s, one.asked_tpot_s
        decodes = not yields_one_token(request)

        def ask(ttft_s: float, tpot_s: float) -> Verdict:
            if (ttft_s, tpot_s) == asked_s and name in considered:
                refused = None if probes else plan.refused.get(name)
                if probes or refused is not None or not ahead:
                    return Verdict(refused is None, refused, plan.retry_after_s.get(name, 0.0))
            # Without a TTFT a prompt has a moment to begin all the same; see `SLORequest.due_s`.
            due_s = demand.deadline_s if ttft_s == INFINITY else arrival_s + ttft_s - guard_s
            kept_s = tpot_s if decodes else INFINITY
            return _best(outlooks, replace(beside_others, deadline_s=due_s, tpot_s=kept_s), start_s)

        lone_s = model.predict_s(demand.prefill_tokens) + guard_s + start_s - arrival_s
        found = quote(*asked_s, ask, lone_s, self._clock.expected_model.predict_s(1))
        return self._said(one, found, start_s)

    def _said(self, one: SLORequest, found: Quote, start_s: float) -> dict[str, Any]:
        reason, retry_after_s, cheapest = found.reason, found.retry_after_s, found.cheapest
        if one.slo.effective_tier != "guaranteed":
            reason = "best_effort" if one.slo.has_objective else "no_objective"
        elif one.deadline_s <= start_s:
            reason = "expired"
        elif (wait_s := self._wait_for_quota_s(one)) > 0.0:
            reason, retry_after_s, cheapest = "quota", wait_s, None
        found = found._replace(
            promised=found.promised and reason is None,
            reason=reason,
            retry_after_s=retry_after_s,
            cheapest=cheapest,
        )
        in_the_way = {} if found.promised else self._in_the_way(reason, one)
        return self._told(one.slo, found, in_the_way)

    def _told(self, slo: SLO, found: Quote, in_the_way: dict[str, int]) -> dict[str, Any]:
        """What the client reads."""
        promised, cheapest = found.promised, found.cheapest
        self._metrics.quoted(slo.slo_class or UNCLASSED, promised, found.reason)
        return {
            "promised": promised,
            "reason": found.reason,
            "retry_after_ms": None if promised else max(round(found.retry_after_s * 1e3), 1),
            "class": slo.slo_class,
            "ttft_ms": _ms(found.ttft_s),
            "tpot_ms": _ms(found.tpot_s),
            "cheapest": cheapest and {"ttft_ms": _ms(cheapest[0]), "tpot_ms": _ms(cheapest[1])},
            "in_the_way": in_the_way,
        }

    def _wait_for_quota_s(self, one: SLORequest) -> float:
        """Seconds until the request's tenant could pay its promise; 0: now."""
        if self._quotas is None:
            return 0.0
        return self._quotas.wait_s(one, self._clock.now_s, self._clock.promise_model)

    def _in_the_way(self, reason: str | None, one: SLORequest) -> dict[str, int]:
        """Promises that stand in the way, by class: for a prompt those that are due before it and
        those that draw tokens already, else all of them."""
        if reason not in ("prefill", "decode", "memory", "seats"):
            return {}
        found: Counter[str] = Counter()
        for other in self._tracker:
            before = other.decodes or other.deadline_s <= one.deadline_s
            if other.promised and (reason != "prefill" or before):
                found[other.slo_class] += 1
        return dict(found)


def unanswered(retry_after_s: float = 0.0) -> str:
    """The stop reason of a request for a quote that could not be worked out.

    ``retry_after_s``: when it may be asked for again.
    """
    nothing = dict.fromkeys(("class", "ttft_ms", "tpot_ms", "cheapest"))
    wait_ms = max(round(retry_after_s * 1e3), 1)
    said = {"promised": False, "reason": PLANNING_FAILED, "retry_after_ms": wait_ms, **nothing}
    return pack_quote({**said, "in_the_way": {}})


def _best(outlooks: list[IncrementalAdmission], demand: Demand, start_s: float) -> Verdict:
    """Promised if any way to decode does."""
    said = [outlook.judge(demand, start_s) for outlook in outlooks]
    return next((one for one in said if one.promised), said[0])


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None or time_s == INFINITY else round(time_s * 1e3, 3)
