# SPDX-License-Identifier: Apache-2.0
"""Answers what a request would be promised if it came now; nothing is changed by it.

Such a request comes like any other, so its prompt is read and cut into tokens as one that is
served. It carries `QUOTE_KEY`, is never scheduled, and ends in the step in which it came: its stop
reason is the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from vllm_slo.core.outlook import Outlook, Verdict
from vllm_slo.core.quote import Competition, Quote, quote
from vllm_slo.core.types import INFINITY, Demand
from vllm_slo.engine.views import Tracked
from vllm_slo.slo import SLO, pack_quote

if TYPE_CHECKING:
    from vllm_slo.engine.steering import Commitments, Steering


class Quotes:
    """The requests that only ask.

    Args:
        steering: what is promised, and by which step times. Nothing in it is changed.

    Attributes:
        competition: who may be promised something before a request comes that was told "yes".
    """

    def __init__(self, steering: Steering) -> None:
        self.steering = steering
        self.competition = Competition()
        self._asking: list[tuple[Request, SLO | None, float]] = []

    def __len__(self) -> int:
        return len(self._asking)

    def add(self, request: Request, slo: SLO | None, arrival_s: float) -> None:
        """A request that wants to know came at ``arrival_s``."""
        self._asking.append((request, slo, arrival_s))

    def take(self, start_s: float) -> list[tuple[Request, str]]:
        """Those who asked, and what each is told."""
        asking, self._asking = self._asking, []
        steering = self.steering
        standing = steering.commitments(start_s, steering.steps.promise_model)
        return [
            (request, pack_quote(self.answer(request, slo, arrival_s, start_s, standing)))
            for request, slo, arrival_s in asking
            if not request.is_finished()
        ]

    def answer(
        self,
        request: Request,
        slo: SLO | None,
        arrival_s: float,
        start_s: float,
        standing: Commitments,
    ) -> dict[str, Any]:
        """What ``request`` would be promised by a step that starts at ``start_s``, beside the
        promises that are ``standing`` then; for JSON, times in milliseconds.

        What it asks of the engine does not depend on its objectives, so a request without any is
        told what it could ask for.
        """
        steering = self.steering
        one = Tracked(request, slo or SLO(), arrival_s, steering.config.tpot_window_tokens)
        model = steering.steps.promise_model
        asking = steering.asking(start_s, one)
        plan, asked = steering.best_plan(asking, start_s, model, standing)
        ahead = self.competition.tokens(steering.config.quote_holds_s, steering.now_s)
        name = request.request_id
        probes = steering.probe(plan, asking, start_s) == name
        others, considered = set(plan.admitted) - {name}, {*plan.admitted, *plan.refused}
        beside = [demand for demand in asked if demand.request_id in others]
        demand = steering.demand(one, start_s, model)
        beside_others = replace(demand, prefill_tokens=demand.prefill_tokens + round(ahead))
        guard_s = model.predict_s(0)
        outlooks = self._outlooks(standing, beside, one.reserved_tpot_s)
        asked_s = one.deadline_s - arrival_s, one.reserved_tpot_s

        def ask(ttft_s: float, tpot_s: float) -> Verdict:
            if (ttft_s, tpot_s) == asked_s and name in considered:
                refused = None if probes else plan.refused.get(name)
                if probes or refused is not None or not ahead:
                    return Verdict(refused is None, refused, plan.retry_after_s.get(name, 0.0))
            # Without a TTFT a prompt has a moment to begin all the same; see `Tracked.due_s`.
            due_s = demand.deadline_s if ttft_s == INFINITY else arrival_s + ttft_s - guard_s
            return _best(outlooks, replace(beside_others, deadline_s=due_s, tpot_s=tpot_s), start_s)

        lone_s = model.predict_s(demand.prefill_tokens) + guard_s + start_s - arrival_s
        found = quote(*asked_s, ask, lone_s, steering.steps.expected_model.predict_s(1))
        return self._said(one, found, start_s)

    def _said(self, one: Tracked, found: Quote, start_s: float) -> dict[str, Any]:
        reason, retry_after_s, cheapest = found.reason, found.retry_after_s, found.cheapest
        if one.slo.effective_tier != "guaranteed":
            reason = "best_effort" if one.slo.has_objective else "no_objective"
        elif one.deadline_s <= start_s:
            reason = "expired"
        elif (wait_s := self._wait_for_quota_s(one)) > 0.0:
            reason, retry_after_s, cheapest = "quota", wait_s, None
        promised = found.promised and reason is None
        self.steering.metrics.quoted(one.slo_class, promised, reason)
        return {
            "promised": promised,
            "reason": reason,
            "retry_after_ms": None if promised else max(round(retry_after_s * 1e3), 1),
            "class": one.slo.slo_class,
            "ttft_ms": _ms(found.ttft_s),
            "tpot_ms": _ms(found.tpot_s),
            "cheapest": cheapest and {"ttft_ms": _ms(cheapest[0]), "tpot_ms": _ms(cheapest[1])},
            "in_the_way": {} if promised else self._in_the_way(reason, one),
        }

    def _wait_for_quota_s(self, one: Tracked) -> float:
        """Seconds until the request's tenant could pay its promise; 0: now."""
        steering = self.steering
        if steering.quotas is None:
            return 0.0
        return steering.quotas.wait_s(one, steering.now_s, steering.steps.promise_model)

    def _outlooks(
        self, standing: Commitments, beside: Sequence[Demand], tpot_s: float
    ) -> list[Outlook]:
        """What is promised, and is about to be, by each way to decode beside a request of such a
        TPOT."""
        steering = self.steering
        committed, decoding, context, blocks = standing
        committed = [*committed, *beside]
        blocks += sum(demand.blocks for demand in beside)
        capacity = steering.capacity(len(committed) + sum(decoding.values()), blocks)
        return [
            Outlook(
                committed,
                decoding,
                believed,
                capacity,
                decoding_context=context,
                speculated=speculated,
            )
            for believed, speculated in steering.ways_to_decode(tpot_s)
        ]

    def _in_the_way(self, reason: str | None, one: Tracked) -> dict[str, int]:
        """Promises that stand in the way, by class: for a prompt those that are due before it and
        those that draw tokens already, else all of them."""
        if reason not in ("prefill", "decode", "memory", "seats"):
            return {}
        found: Counter[str] = Counter()
        for other in self.steering.tracked.values():
            before = other.decodes or other.deadline_s <= one.deadline_s
            if other.promised and (reason != "prefill" or before):
                found[other.slo_class] += 1
        return dict(found)


def _best(outlooks: list[Outlook], demand: Demand, start_s: float) -> Verdict:
    """Promised if any way to decode does."""
    said = [outlook.judge(demand, start_s) for outlook in outlooks]
    return next((one for one in said if one.promised), said[0])


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None or time_s == INFINITY else round(time_s * 1e3, 3)
