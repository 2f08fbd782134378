# SPDX-License-Identifier: Apache-2.0
"""How many replicas the demand of late would have needed."""

from __future__ import annotations

import pytest

from vllm_slo.core.routing.demand_meter import DemandMeter, Load
from vllm_slo.core.routing.policy import Route
from vllm_slo.core.routing.virtual_replica import RoutedRequest

ASKS = RoutedRequest(6, 6, deadline_s=6.0, tpot_s=1.0, wants_promise=True)
PROMISED, REFUSED = Route("r0", True, 1), Route("r0", False, 1, "best_effort", "prefill")


def metered(count: int, decision: Route, work_s: float = 1.0) -> DemandMeter:
    meter = DemandMeter(window_s=30.0, target=0.5)
    for n in range(count):
        meter.came(n * 30.0 / count)
        meter.routed(ASKS, decision, n * 30.0 / count, work_s)
    return meter


def test_work_that_nobody_promised_asks_for_more_replicas() -> None:
    assert metered(15, PROMISED).load(29.9).replicas(2) == 2
    assert metered(15, REFUSED).load(29.9).replicas(2) == 3
    assert metered(60, REFUSED).load(29.9).replicas(2) == 5
    assert metered(60, REFUSED, work_s=4.0).load(29.9).replicas(2) == 17


def test_replicas_go_when_none_was_refused_and_the_rest_suffices() -> None:
    assert metered(15, PROMISED).load(29.9).replicas(8) == 2
    assert metered(15, PROMISED).load(29.9).replicas(1) == 1
    meter = metered(15, PROMISED)
    assert meter.load(90.0).replicas(8) == 0


def test_none_is_wanted_without_requests() -> None:
    assert DemandMeter(30.0, 0.7).load(5.0).replicas(0) == 0
    assert DemandMeter(30.0, 0.7).load(5.0).replicas(1) == 0


def test_one_is_wanted_for_a_request_of_which_no_work_is_known() -> None:
    meter = DemandMeter(30.0, 0.7)
    meter.came(5.0)
    assert [meter.load(34.9).replicas(ready) for ready in (0, 1, 3)] == [1, 1, 3]
    assert [meter.load(35.0).replicas(ready) for ready in (0, 1, 3)] == [0, 0, 0]


@pytest.mark.parametrize("decision", [PROMISED, REFUSED])
def test_two_fronts_want_together_what_one_would_want(decision: Route) -> None:
    one, halves = metered(60, decision), [metered(0, decision) for _ in range(2)]
    for n in range(60):
        halves[n % 2].came(n / 2)
        halves[n % 2].routed(ASKS, decision, n / 2, 1.0)
    halves.append(DemandMeter(30.0, 0.5))  # a front without a client
    together = sum((half.load(29.9) for half in halves), start=Load())
    alone = one.load(29.9)
    for ready in (1, 4, 9):
        assert together.replicas(ready) == alone.replicas(ready)
