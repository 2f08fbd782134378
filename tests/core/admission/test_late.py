# SPDX-License-Identifier: Apache-2.0
"""When a request's turn comes whose objectives cannot be promised."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.admission.late import (
    FULL,
    LEAST,
    LONGEST_S,
    MARGIN,
    TURN,
    AskedLoad,
    LatePromise,
    TurnRate,
    expected_wait_s,
    late_promise,
)


def rate_of(served: list[int], waited_s: float) -> TurnRate:
    rate = TurnRate()
    rate.waited(waited_s)
    for tokens in served:
        rate.served(tokens)
    return rate


def test_a_promise_is_a_multiple_of_the_expected_wait() -> None:
    assert late_promise(10.0, 2.0, 1.0) == LatePromise(
        10.0 + TURN * MARGIN * 2, 10.0 + MARGIN * 2, 1
    )
    assert late_promise(10.0, 1.01 * LONGEST_S / MARGIN, 1.0) is None


def test_nothing_is_promised_beyond_what_the_request_waits_for() -> None:
    assert late_promise(10.0, 2.0, 2.0, latest_s=10.0 + MARGIN * 2) is not None
    assert late_promise(10.0, 2.0, 2.0, latest_s=9.9 + MARGIN * 2) is None


def test_a_turn_has_come_until_its_time_is_over() -> None:
    late = LatePromise(5.0, 8.0, 1.0)
    assert [late.has_come(t) for t in (4.9, 5.0, 7.9, 8.0)] == [False, True, True, False]


def test_the_longer_of_two_estimates_counts() -> None:
    quick, slow = rate_of([100] * 400, 1.0), rate_of([100] * 4, 8.0)
    assert expected_wait_s(1.0, 0.0, TurnRate(), 500) == 1.0
    assert expected_wait_s(1.0, 0.5, TurnRate(), 500) == 2.0
    assert expected_wait_s(1.0, 0.5, quick, 500) == 2.0
    assert expected_wait_s(1.0, 0.5, slow, 500) == pytest.approx(500 * 8 / 200)


def test_in_overload_only_what_was_left_of_late_tells_a_time() -> None:
    assert expected_wait_s(0.1, FULL, TurnRate(), 500) is None
    assert expected_wait_s(None, 0.1, TurnRate(), 500) is None
    served = rate_of([100] * 4, 8.0)
    assert expected_wait_s(0.1, FULL, served, 500) == pytest.approx(20.0)
    assert expected_wait_s(None, 0.1, served, 500) == pytest.approx(20.0)


def test_a_time_is_not_told_that_others_have_waited_in_vain() -> None:
    """Nothing was left in 3 seconds: then a wait of 2 is not to be expected, one of 4 may be."""
    assert expected_wait_s(2.0, 0.0, rate_of([], 3.0), 500) is None
    assert expected_wait_s(4.0, 0.0, rate_of([], 3.0), 500) == 4.0


def test_few_requests_that_were_served_are_little_evidence() -> None:
    assert rate_of([700], 5.0).wait_s(700) == pytest.approx(5.0 / LEAST)
    assert rate_of([700] * 4, 5.0).wait_s(700) == pytest.approx(2.5)  # 4 - sqrt(4) of them
    assert TurnRate().wait_s(100) is None


@given(st.lists(st.integers(1, 5000), min_size=2), st.floats(0.01, 100.0), st.floats(1.0, 1e5))
def test_a_wait_is_never_shorter_than_at_the_rate_that_was_seen(
    served: list[int], waited_s: float, tokens: float
) -> None:
    rate = rate_of(served, waited_s)
    wait_s = rate.wait_s(tokens)
    assert wait_s is None or wait_s >= tokens * waited_s / sum(served) * (1 - 1e-9)


def test_what_was_served_is_forgotten_while_others_wait() -> None:
    rate = rate_of([500] * 100, 10.0)
    known = rate.wait_s(500)
    rate.waited(100.0)
    later = rate.wait_s(500)
    assert known is not None and (later is None or later > 10 * known)


@pytest.mark.parametrize("asked", [0.3, 0.8, 2.0])
def test_the_load_is_that_of_a_poisson_process(asked: float) -> None:
    rng, load, now_s = random.Random(0), AskedLoad(), 0.0
    assert load.share(0.0) == 0.0
    shares = []
    while now_s < 3000.0:
        now_s += rng.expovariate(4.0)
        load.asked(asked * rng.expovariate(4.0), now_s)
        shares.append(load.share(now_s))
    assert sum(shares) / len(shares) == pytest.approx(asked, rel=0.1)
    assert load.share(now_s + 100.0) < 0.01


@pytest.mark.parametrize("load", [0.3, 0.6, 0.85])
def test_requests_without_a_promise_wait_as_long_as_the_load_says(load: float) -> None:
    """An oracle that knows nothing of the formula: a server whose promised requests come in a
    Poisson process and go first, and one request behind them that needs a second of work."""
    rng, waits = random.Random(1), []
    for _ in range(3000):
        left_s, now_s = 1.0, 0.0
        next_s, promised = rng.expovariate(10.0), deque[float]()
        while left_s > 1e-9:
            if promised:
                now_s += promised.popleft()
            else:
                step_s = min(left_s, max(next_s - now_s, 0.0))
                left_s, now_s = left_s - step_s, now_s + step_s
            while next_s <= now_s:
                promised.append(rng.expovariate(10.0 / load))
                next_s += rng.expovariate(10.0)
        waits.append(now_s)
    mean_s = sum(waits) / len(waits)
    assert expected_wait_s(1.0, load, TurnRate(), 100) == pytest.approx(mean_s, rel=0.1)
