# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_slo.core.routing.state_pace import (
    AT_ONCE_S,
    BURST,
    EARNED_S,
    LONG_STEP_S,
    SLOW_S,
    StatePace,
)


def told(news_s: list[float], steps: int, step_s: float = 0.02) -> list[float]:
    """When states are told of an engine that steps ``steps`` times, with news at such times."""
    pace, times, waiting, left = StatePace(), [], False, sorted(news_s)
    for n in range(steps):
        now_s = n * step_s
        while left and left[0] <= now_s:
            waiting, _ = True, left.pop(0)
        if pace.is_due(now_s, news=waiting, step_s=step_s):
            pace.told(now_s)
            times.append(now_s)
            waiting = False
    return times


def test_few_news_are_told_with_the_next_step() -> None:
    times = told([1.001, 1.021, 1.041, 5.0], 400)
    assert {1.02, 1.04, 1.06, 5.0} <= {round(at_s, 3) for at_s in times}


def test_without_news_an_engine_that_works_is_told_of_now_and_then() -> None:
    times = told([], 500)
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) <= SLOW_S + 0.02
    assert len(times) <= 10.0 / SLOW_S + 1


def test_many_news_cost_no_more_than_some() -> None:
    some, many = (told([n / rate for n in range(10 * rate)], 500) for rate in (12, 50))
    assert len(many) <= 10.0 / EARNED_S + BURST
    assert len(some) <= len(many)


@settings(max_examples=examples(100))
@given(st.lists(st.floats(0.0, 10.0), max_size=200))
def test_news_never_wait_long_and_never_crowd(news_s: list[float]) -> None:
    times = told(news_s, 520)
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps, default=1.0) >= AT_ONCE_S - 1e-9
    for at_s in news_s:
        assert any(at_s <= time_s <= at_s + EARNED_S + 0.041 for time_s in times)
    for first in times:
        assert sum(first <= at_s < first + 1.0 for at_s in times) <= 1.0 / EARNED_S + BURST + 1


@pytest.mark.parametrize("step_s", [LONG_STEP_S + 0.001, 5.0])
def test_before_a_long_step_it_is_always_due(step_s: float) -> None:
    pace = StatePace()
    pace.told(1.0)
    assert pace.is_due(1.0, news=False, step_s=step_s)
    assert not pace.is_due(1.0, news=True, step_s=LONG_STEP_S)
