# SPDX-License-Identifier: Apache-2.0
"""How long draft servers are waited for, and for how many tokens: against every other choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.speculation.draft_rounds import (
    DOUBT,
    FIRST_TOKEN_S,
    OUTLIER,
    Crowd,
    DraftTimes,
    plan_round,
)
from vllm_slo.core.speculation.proportional_fairness import grant_tokens
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY

STEEP = StepTimeModel(((0.0, 0.0, 0.016), (0.0012, 0.0, 0.004)), max_tokens=2048)
"""Ten tokens for the price of one, then each costs."""


def crowd_of(
    acceptances: list[float],
    token_s: list[float],
    *,
    depth: int = 3,
    weights: list[float] | None = None,
    most: int = 8,
    paces_s: list[float] | None = None,
) -> Crowd:
    """Requests of one drafter each."""
    n = len(acceptances)
    return Crowd(
        np.array(weights or [1.0] * n),
        np.array(acceptances),
        np.outer(token_s, np.arange(1.0, depth + 1.0)),
        np.full(n, most),
        np.array(paces_s or [INFINITY] * n),
        STEEP.predict_s(n),
    )


def rate(crowd: Crowd, drafts: tuple[int, ...], wait_s: float) -> float:
    """Weighted tokens per second."""
    chances = [a ** np.arange(s + 1.0) for a, s in zip(crowd.acceptances, drafts, strict=True)]
    tokens = sum(w * row.sum() for w, row in zip(crowd.weights, chances, strict=True))
    return float(tokens / (STEEP.predict_s(len(drafts) + sum(drafts)) + wait_s))


def wait_of(crowd: Crowd, drafts: tuple[int, ...]) -> float:
    """Seconds until all these drafts are there."""
    waits = [crowd.drafting_s[i, s - 1] for i, s in enumerate(drafts) if s]
    return float(max(waits, default=0.0))


@given(
    st.lists(st.floats(0.05, 0.95), min_size=2, max_size=2),
    st.lists(st.sampled_from([0.0005, 0.001, 0.004, 0.02]), min_size=2, max_size=2),
    st.lists(st.floats(0.2, 5.0), min_size=2, max_size=2),
)
def test_no_other_choice_yields_more_per_second(
    acceptances: list[float], token_s: list[float], weights: list[float]
) -> None:
    """Of two drafters every wait is looked at that could be the best."""
    crowd = crowd_of(acceptances, token_s, weights=weights)
    found = plan_round(crowd, STEEP, room=100)
    drafts = grant_tokens(
        crowd.weights, crowd.acceptances, found.budget, least=found.least, most=found.most
    )
    chosen = rate(crowd, tuple(drafts.tolist()), found.wait_s)
    best = max(
        rate(crowd, drafts, wait_of(crowd, drafts))
        for drafts in itertools.product(range(4), repeat=2)
    )
    assert chosen == pytest.approx(best, rel=1e-9)
    assert (drafts <= found.most).all()


def test_what_does_not_pay_is_not_drafted() -> None:
    assert plan_round(crowd_of([0.3], [0.02]), STEEP, room=100).wait_s == 0.0
    assert plan_round(crowd_of([0.9], [0.001]), STEEP, room=100).wait_s == pytest.approx(0.003)
    assert plan_round(crowd_of([0.9], [0.001]), STEEP, room=0).budget == 0


def test_a_slow_drafter_drafts_what_it_can_meanwhile() -> None:
    found = plan_round(crowd_of([0.9, 0.9], [0.001, 0.0025]), STEEP, room=100)
    assert found.most.tolist() == [3, 2]
    assert found.wait_s == pytest.approx(0.005)


def test_a_promise_that_needs_drafts_gets_them_first() -> None:
    """A step of 16 ms and a pace of 9: not one token less would do, whatever others gain."""
    paces_s = [0.009, INFINITY, INFINITY]
    crowd = crowd_of([0.8, 0.9, 0.9], [0.001] * 3, paces_s=paces_s, weights=[0.01, 1.0, 1.0])
    found = plan_round(crowd, STEEP, room=4)
    assert found.least.tolist()[1:] == [0, 0]
    assert found.least[0] > 0
    step_s = STEEP.predict_s(3 + found.budget) + found.wait_s
    assert 0.009 * crowd.tokens(found.least)[0] >= step_s
    fewer = found.least - np.array([1, 0, 0], dtype=found.least.dtype)
    assert 0.009 * crowd.tokens(fewer)[0] < step_s
    assert found.budget >= found.least.sum()


def test_a_promise_gets_the_drafts_it_needs_though_they_do_not_pay() -> None:
    """Twelve tokens, each further one dear: 0.6 tokens of one request are not worth it to all."""
    nobody = [INFINITY] * 12
    assert plan_round(crowd_of([0.6] * 12, [0.001] * 12), STEEP, room=100).budget == 0
    crowd = crowd_of([0.6] * 12, [0.001] * 12, paces_s=[0.014, *nobody[1:]])
    found = plan_round(crowd, STEEP, room=100)
    assert found.least.tolist() == [1, *[0] * 11]
    assert found.budget == 1


def test_a_promise_that_needs_none_bounds_the_wait() -> None:
    """Eighteen milliseconds a token and steps of sixteen: two are left, however good drafts are."""
    free = plan_round(crowd_of([0.9], [0.001]), STEEP, room=100)
    bound = plan_round(crowd_of([0.9], [0.001], paces_s=[0.018]), STEEP, room=100)
    assert free.wait_s == pytest.approx(0.003)
    assert bound.wait_s == pytest.approx(0.002)
    assert bound.least.tolist() == [0]


def test_a_promise_beyond_help_asks_for_nothing() -> None:
    crowd = crowd_of([0.5, 0.9], [0.001] * 2, paces_s=[0.001, INFINITY])
    assert plan_round(crowd, STEEP, room=100).least.tolist() == [0, 0]


def test_drafts_that_are_asked_for_are_made_though_they_do_not_pay() -> None:
    crowd = crowd_of([0.1, 0.1], [0.02, 0.03])
    found = plan_round(crowd, STEEP, room=100, shallowest=2)
    assert found.wait_s == pytest.approx(0.06)
    assert found.least.tolist() == [2, 2]
    assert found.budget >= 4


# --- what drafters take --------------------------------------------------------------------------


def test_times_are_learnt_quickly_and_then_steadily() -> None:
    times = DraftTimes()
    for _ in range(12):
        times.observe(0.021, 0.020, 4)
    assert times.token_s == pytest.approx(0.005, rel=0.1)
    assert times.link_s == pytest.approx(0.001, rel=0.1)
    assert times.ahead_s(3) == pytest.approx(times.link_s + times.token_s * np.array([1, 2, 3]))
    assert times.within(0.009, 8) == 1
    assert times.within(1.0, 8) == 8
    before = times.token_s
    times.observe(1.0, 1.0, 1)
    assert times.token_s < before * (1.0 + OUTLIER / 10)


def test_what_came_too_late_is_taken_for_longer_than_it_was_waited_for() -> None:
    times = DraftTimes()
    for _ in range(60):
        times.observe(0.010, None, 2)
    assert times.ahead_s(2)[1] == pytest.approx(0.020, rel=0.05)


def test_who_was_too_slow_is_tried_again_and_believed_at_once() -> None:
    times = DraftTimes()
    for _ in range(60):
        times.observe(0.05, 0.05, 1)
    slow_s = float(times.ahead_s(1)[0])
    for _ in range(round(3 / DOUBT)):
        times.rest()
    assert times.ahead_s(1)[0] < FIRST_TOKEN_S + 0.1 * slow_s
    times.observe(0.05, 0.05, 1)
    assert times.ahead_s(1)[0] == pytest.approx(slow_s, rel=0.01)


def test_a_round_without_tokens_tells_only_of_the_link() -> None:
    times = DraftTimes()
    times.observe(0.004, 0.001, 0)
    assert times.token_s == FIRST_TOKEN_S
    assert times.link_s > 0.0
