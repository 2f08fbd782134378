# SPDX-License-Identifier: Apache-2.0
"""How sure a TPOT window is: the odds against every outcome, and windows played to their end."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_slo.core.speculation import window_odds
from vllm_slo.core.speculation.window_odds import (
    ACCEPTANCES,
    DOUBT,
    LEAST_COUNTED,
    MOST_TOKENS,
    WindowOdds,
)
from vllm_slo.core.speculation.window_pace import STEP_TIME_MARGIN, stretched_s
from vllm_slo.core.types import DecodeView

acceptances = st.integers(0, ACCEPTANCES - 1).map(lambda place: place / ACCEPTANCES)
times_s = st.lists(st.floats(0.001, 0.1), min_size=1, max_size=4).map(np.array)


def yields(acceptance: float, length: int) -> list[float]:
    """P(Y = 1), P(Y = 2), ... of a step that verifies ``length`` tokens."""
    rejected = [acceptance**n * (1.0 - acceptance) for n in range(length - 1)]
    return [*rejected, acceptance ** (length - 1)]


def chance(acceptance: float, length: int, steps: int, tokens: int) -> float:
    """That so many steps yield so many tokens, of every outcome."""
    each = yields(acceptance, length)
    return sum(
        math.prod(each[n - 1] for n in outcome)
        for outcome in itertools.product(range(1, length + 1), repeat=steps)
        if sum(outcome) >= tokens
    )


def window(left: int, left_s: float, tpot_s: float) -> DecodeView:
    """At time 0: so many tokens are due within ``left_s``."""
    return DecodeView("r", left_s - (left - 1) * tpot_s, left_s, float(left), tpot_s)


def test_two_tokens_in_doubt() -> None:
    """One draft, accepted with 0.75, 10 ms a step. Ten tokens are sure after eight steps: fewer
    than two of eight drafts are accepted with probability 0.0004; of seven, fewer than three with
    0.0129, too often."""
    odds = WindowOdds(np.array([1.0, 0.010]))
    assert odds.sure_s(0.75, 10) == pytest.approx(0.080)
    assert 1 - chance(0.75, 2, 7, 10) == pytest.approx(0.0129, abs=1e-4)
    assert odds.sure_s(0.75, 0) == 0.0


@given(acceptances, times_s, st.integers(1, 6))
def test_sure_is_what_every_outcome_says(
    acceptance: float, step_s: np.ndarray, tokens: int
) -> None:
    best = min(
        seconds
        * next(k for k in range(tokens + 1) if chance(acceptance, length, k, tokens) >= sure)
        for length, seconds in enumerate(step_s, 1)
        for sure in [1.0 - DOUBT - 1e-12]
    )
    assert WindowOdds(step_s).sure_s(acceptance, tokens) == pytest.approx(best)


@given(acceptances, times_s, st.integers(1, 6), st.floats(0.0, 0.5))
def test_the_surest_length_is_that_of_most_outcomes(
    acceptance: float, step_s: np.ndarray, tokens: int, left_s: float
) -> None:
    chances = [
        chance(acceptance, length, min(int(left_s / seconds), tokens), tokens)
        for length, seconds in enumerate(step_s, 1)
    ]
    found = WindowOdds(step_s).surest_length(0.0, window(tokens, left_s, 0.05), acceptance)
    assert chances[found - 1] == pytest.approx(max(chances), abs=1e-9)
    assert all(other < chances[found - 1] - 1e-12 for other in chances[: found - 1])


@given(acceptances, times_s, st.floats(0.0, 200.0), st.floats(0.0, 40.0))
def test_more_tokens_take_longer_and_luck_only_helps(
    acceptance: float, step_s: np.ndarray, tokens: float, more: float
) -> None:
    odds = WindowOdds(step_s)
    sure_s = odds.sure_s(acceptance, tokens)
    assert sure_s <= odds.sure_s(acceptance, tokens + more) + 1e-12
    assert sure_s <= math.ceil(tokens) * step_s[0] + 1e-12
    assert odds.sure_s(0.0, tokens) == pytest.approx(math.ceil(tokens) * step_s.min())


def exact_steps(acceptance: float, length: int, tokens: int) -> int:
    """The fewest steps of ``length`` that yield so many tokens with probability 1 - `DOUBT`."""
    each, have, steps = np.array([0.0, *yields(acceptance, length)]), np.ones(1), 0
    while have[:tokens].sum() > DOUBT:
        have, steps = np.convolve(have, each), steps + 1
    return steps


@given(acceptances, st.integers(2, 5), st.integers(MOST_TOKENS + 1, 8 * MOST_TOKENS))
def test_the_luck_of_a_long_window_evens_out(acceptance: float, length: int, tokens: int) -> None:
    """Windows of 32 tokens in a row would each be allowed to be unlucky. The number of steps at 32
    tokens is a whole one; so is the exact one here."""
    odds = WindowOdds(np.array([*[1e9] * (length - 1), 1.0]))  # no other length pays
    rounding = math.sqrt(tokens / MOST_TOKENS) + 1.0
    exact = exact_steps(acceptance, length, tokens)
    assert odds.sure_s(acceptance, tokens) == pytest.approx(exact, abs=rounding + 1.0, rel=0.03)


def test_long_windows_are_judged_as_short_ones_at_their_pace() -> None:
    odds = WindowOdds(np.array([0.030, 0.035, 0.040]))
    whole = odds.sure_s(0.6, MOST_TOKENS)
    assert whole < odds.sure_s(0.6, MOST_TOKENS + 1) < 1.1 * whole
    assert odds.sure_s(0.6, 4 * MOST_TOKENS) < 3.9 * whole
    short, long = window(10, 0.2, 0.02), window(100, 2.0, 0.02)
    assert odds.surest_length(0.0, long, 0.6) == odds.surest_length(0.0, short, 0.6) == 3


def test_a_window_that_no_step_keeps_surely_gets_the_surest_step() -> None:
    """Ten tokens in 200 ms. Steps of two tokens take 31 ms, those of one 30: two are the surest.
    20 ms are left for each token, so a step of 31 ms counts on 1.55 of them."""
    odds, decode = WindowOdds(np.array([0.030, 0.031])), window(10, 0.2, 0.025)
    counted = odds.surest_tokens(0.0, decode, 0.5)
    assert counted == pytest.approx(1.55)
    assert stretched_s(0.0, decode, counted) == pytest.approx(0.031)


@given(acceptances, times_s, st.integers(1, 20), st.floats(0.1, 3.0))
def test_prompts_get_the_time_of_sure_tokens_and_nodes_that_of_the_surest_step(
    acceptance: float, step_s: np.ndarray, tokens: int, ahead: float
) -> None:
    odds, decode = WindowOdds(step_s), window(tokens, ahead * tokens * 0.05, 0.05)
    counted = odds.counted_tokens(0.0, decode, acceptance, len(step_s))
    given_to = odds.tree_tokens(0.0, decode, acceptance, len(step_s))
    assert given_to.by_prompts == counted
    assert given_to.by_nodes >= counted
    surest_s = step_s[odds.surest_length(0.0, decode, acceptance) - 1]
    if counted >= 1.0:
        assert given_to.by_nodes == counted
    elif surest_s <= decode.window_end_s:
        assert stretched_s(0.0, decode, given_to.by_nodes) >= surest_s - 1e-9


def test_a_step_that_yields_one_token_can_be_made_up_for() -> None:
    """Ten tokens at 50 ms, 30 ms a step without drafts, a tenth more to be sure: what nine of them
    leave of 500 ms may go into one step; and no more is counted on than it yields."""
    decode = window(10, 0.5, 0.050)
    odds = WindowOdds(np.array([0.030, *[0.031] * 15]))
    counted = odds.counted_tokens(0.0, decode, 0.98, 16)
    assert stretched_s(0.0, decode, counted) == pytest.approx(0.5 - 9 * STEP_TIME_MARGIN * 0.030)
    assert odds.counted_tokens(0.0, decode, 0.5, 2) == 1.5


@given(acceptances, st.integers(1, 5), st.floats(0.01, 0.03))
def test_an_answer_that_may_end_is_on_time_at_each_token(
    acceptance: float, length: int, plain_s: float
) -> None:
    """Where plain steps keep the TPOT, a step that yields one token ends by when that is due."""
    odds = WindowOdds(np.array([plain_s + 0.01, *[plain_s + 0.02] * 4]), plain_s)
    decode = window(10, 0.5, 0.050)._replace(may_end=True)
    counted = odds.counted_tokens(0.0, decode, acceptance, length)
    assert stretched_s(0.0, decode, counted) == pytest.approx(0.050)
    hurried = WindowOdds(np.array([0.060, 0.061]))  # a TPOT that needs drafts
    late = window(10, 0.7, 0.050)._replace(may_end=True)
    assert hurried.counted_tokens(0.0, late, 0.98, 2) == pytest.approx(
        hurried.counted_tokens(0.0, late._replace(may_end=False), 0.98, 2)
    )


def test_who_is_late_stretches_nothing() -> None:
    odds = WindowOdds(np.array([0.030, 0.031]))
    for left_s in (0.1, 0.0, -1.0):
        assert odds.counted_tokens(0.0, window(10, left_s, 0.025), 0.5, 2) == LEAST_COUNTED


@given(
    st.floats(0.02, 0.2),
    st.integers(1, 50),
    st.floats(-0.05, 0.3),
    st.floats(0.1, 0.9),
    acceptances,
)
def test_a_window_survives_steps_of_single_tokens(
    tpot_s: float, left: int, late: float, plain: float, acceptance: float
) -> None:
    """Every step is stretched as far as it may be and yields one token: the window is kept as long
    as steps without drafts could keep it when it began."""
    plain_s, now_s, end_s = plain * tpot_s, 0.0, left * tpot_s * (1.0 - late)
    odds = WindowOdds(plain_s * np.array([1.0, 1.01, 1.02]))
    assume(left * STEP_TIME_MARGIN * plain_s <= end_s)
    while left:
        decode = DecodeView("r", end_s - (left - 1) * tpot_s, end_s, float(left), tpot_s)
        counted = odds.counted_tokens(now_s, decode, acceptance, 3)
        now_s += max(stretched_s(now_s, decode, counted), plain_s)
        left -= 1
        assert now_s + left * plain_s <= end_s + 1e-9


def test_a_step_may_last_as_long_as_the_rest_surely_comes_later() -> None:
    """Eleven tokens in 200 ms: ten of them are sure after eight steps of 10 ms, a margin on top."""
    odds = WindowOdds(np.array([1.0, 0.010]))
    decode = window(11, 0.2, 0.018)
    assert odds.spare_s(0.0, decode, 0.75) == pytest.approx(0.2 - STEP_TIME_MARGIN * 0.080)
    assert odds.spare_s(0.1, decode, 0.75) == pytest.approx(0.1 - STEP_TIME_MARGIN * 0.080)
    assert odds.spare_s(0.0, decode._replace(window_left=1.0), 0.75) == 0.2


@given(st.integers(1, ACCEPTANCES - 1), st.integers(2, 4), st.integers(2, 7), st.integers(0, 4))
def test_after_the_longest_step_the_window_is_kept_by_most_outcomes(
    place: int, length: int, left: int, spared: int
) -> None:
    """Steps of one length only, so that all outcomes can be counted."""
    acceptance = place / ACCEPTANCES
    odds = WindowOdds(np.array([*[1e3] * (length - 1), 0.010]))
    decode = window(left, 0.015 * left + 0.01 * spared, 0.015)
    later_s = decode.window_end_s - odds.spare_s(0.0, decode, acceptance)
    steps = math.floor(later_s / (STEP_TIME_MARGIN * 0.010) + 1e-6)
    assert chance(acceptance, length, steps, left - 1) >= 1.0 - DOUBT
    assert chance(acceptance, length, steps - 1, left - 1) < 1.0 - DOUBT


def outcomes(seed: int, acceptance: float) -> Iterator[int]:
    """Drafts accepted of steps that verify two tokens."""
    coin = random.Random(seed)
    while True:
        yield 1 if coin.random() < acceptance else 0


@pytest.mark.parametrize("doubt", [DOUBT, 1.0])
def test_only_drafts_keep_it_and_prompts_take_what_is_left(
    doubt: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without drafts takes 30 ms where 28 are asked for. Prompts stretch each step as far as
    they may: hardly a window in a thousand is missed, and where nothing is doubted, most are."""
    monkeypatch.setattr(window_odds, "DOUBT", doubt)
    window_odds._sure_steps.cache_clear()
    odds = WindowOdds(np.array([0.030, 0.031]))
    accepted, missed, longest_s = outcomes(0, 0.7), 0, 0.0
    for _ in range(4000):
        now_s, left = 0.0, 10
        while left > 0:
            decode = window(left, 0.280 - now_s, 0.028)
            took_s = max(stretched_s(0.0, decode, odds.counted_tokens(0.0, decode, 0.7, 2)), 0.031)
            longest_s = max(longest_s, took_s)
            now_s, left = now_s + took_s, left - 1 - next(accepted)
        missed += now_s > 0.280 + 1e-9
    window_odds._sure_steps.cache_clear()
    if doubt < 1.0:
        assert missed <= 20
        assert longest_s > 0.040, "prompts get something"
    else:
        assert missed > 400
