# SPDX-License-Identifier: Apache-2.0
"""Predicted output lengths: declared, learnt or capped, against numpy's quantile."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_slo.core.lengths.output_length import (
    LengthPrediction,
    OutputLengthPredictor,
    hold_of,
    length_of,
)

lengths = st.lists(st.integers(1, 60), max_size=60)
# Sixty-fourths are exact in binary, so numpy and the predictor break ties alike.
quantiles = st.integers(1, 63).map(lambda n: n / 64)


def seen(values: list[int], slo_class: str = "chat", **options: Any) -> OutputLengthPredictor:
    predictor = OutputLengthPredictor(**options)
    for value in values:
        predictor.observe(slo_class, value)
    return predictor


def test_a_declared_length_wins_within_the_cap() -> None:
    predictor = seen([5] * 20)
    assert predictor.predict("chat", 100, declared=30) == LengthPrediction(30, "declared")
    assert predictor.predict("chat", 20, declared=30) == LengthPrediction(20, "declared")


def test_a_declaration_that_was_outgrown_counts_no_more() -> None:
    predictor = seen([5] * 10 + [50] * 10)
    assert predictor.predict("chat", 100, declared=30, generated=29).source == "declared"
    assert predictor.predict("chat", 100, declared=30, generated=30) == (50, "quantile")
    assert predictor.predict("chat", 100, declared=30, generated=50) == (100, "cap")


def test_a_class_is_believed_from_its_eighth_request_on() -> None:
    predictor = OutputLengthPredictor()
    for _ in range(7):
        predictor.observe("chat", 12)
        assert predictor.predict("chat", 100) == (100, "cap")
    predictor.observe("chat", 12)
    assert predictor.predict("chat", 100) == (12, "quantile")
    assert predictor.predict("code", 100) == (100, "cap")


def test_only_requests_that_got_as_far_are_asked() -> None:
    predictor = seen([10] * 90 + [200] * 10, quantile=0.5)
    assert predictor.predict("chat", 500) == (10, "quantile")
    assert predictor.predict("chat", 500, generated=9) == (10, "quantile")
    assert predictor.predict("chat", 500, generated=10) == (200, "quantile")
    assert predictor.predict("chat", 500, generated=200) == (500, "cap")


def test_old_requests_are_forgotten() -> None:
    predictor = seen([900] * 32, window=32)
    assert predictor.predict("chat", 1000).tokens == 900
    for _ in range(32):
        predictor.observe("chat", 3)
    assert predictor.predict("chat", 1000, generated=2) == (3, "quantile")
    assert predictor.predict("chat", 1000, generated=3) == (1000, "cap")


@pytest.mark.parametrize("quantile", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_quantile_outside_its_range_is_refused(quantile: float) -> None:
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        OutputLengthPredictor(quantile)


@given(lengths, quantiles, st.integers(0, 70), st.integers(1, 40))
@example(list(range(1, 11)), 0.5, 0, 40)
def test_learnt_is_the_quantile_of_the_survivors_in_the_window(
    values: list[int], quantile: float, generated: int, window: int
) -> None:
    predictor = seen(values, quantile=quantile, window=window)
    remembered = values[-window:]
    survivors = [v for v in remembered if v > generated]
    got = predictor.predict("chat", 1000, generated=generated)
    if len(remembered) < 8 or not survivors:
        assert got == (1000, "cap")
    else:
        expected = np.quantile(survivors, quantile, method="inverted_cdf")
        assert got == (int(expected), "quantile")


@given(
    lengths,
    quantiles,
    st.integers(1, 80),
    st.one_of(st.none(), st.integers(1, 200)),
    st.integers(0, 79),
)
@example([5] * 8, 0.5, 1, None, 0)
def test_a_prediction_is_possible(
    values: list[int], quantile: float, cap: int, declared: int | None, generated: int
) -> None:
    """More than what is there already, and within the cap."""
    generated = min(generated, cap - 1)
    got = seen(values, quantile=quantile).predict("chat", cap, declared, generated)
    assert generated + 1 <= got.tokens <= cap
    assert got.source in ("declared", "quantile", "cap")
    assert (got.source == "declared") == (declared is not None and declared > generated)


@given(lengths, quantiles)
def test_a_higher_quantile_never_predicts_less(values: list[int], quantile: float) -> None:
    low, high = (seen(values, quantile=q).predict("chat", 99).tokens for q in (quantile, 0.99))
    assert low <= high


# --- memory to set aside -------------------------------------------------------------------------


def hold(predictor: OutputLengthPredictor, generated: int = 0, declared: int | None = None) -> int:
    return predictor.expected_hold("chat", 100, 1000, declared, generated)


def test_a_class_that_always_ends_alike_is_set_aside_whole() -> None:
    assert hold(seen([50] * 16)) == 150
    assert hold(seen([50] * 16), generated=20) == 150


def test_what_few_reach_is_not_set_aside_for_all() -> None:
    """Half end at 10, half at 200: (100 + 10) of all, or (100 + 200) of half."""
    assert hold(seen([10] * 8 + [200] * 8)) == 150
    assert hold(seen([10] * 8 + [200] * 8), generated=10) == 300


def test_without_knowledge_only_the_next_token_is_set_aside() -> None:
    assert hold(OutputLengthPredictor()) == 101
    assert hold(seen([5] * 7), generated=3) == 104
    assert hold(seen([5] * 20), generated=5) == 106


def test_a_declared_length_is_taken_at_its_word() -> None:
    assert hold(seen([5] * 20), declared=300) == 400
    assert hold(seen([5] * 20), declared=3000) == 1100
    assert hold(seen([50] * 20), generated=40, declared=40) == 150


@given(lengths, st.integers(0, 70))
def test_what_is_set_aside_is_what_survivors_hold_on_average(
    values: list[int], generated: int
) -> None:
    got = hold(seen(values), generated)
    survivors = sorted(v for v in values if v > generated)
    if len(values) < 8 or not survivors:
        assert got == 101 + generated
        return
    curve = [(100 + n) * sum(v >= n for v in survivors) / len(survivors) for n in set(survivors)]
    # Eight points of the curve are looked at, not all; none of them lies above it.
    assert 101 + generated <= got <= max(*curve, 101 + generated)
    if len(survivors) <= OutputLengthPredictor.PARTS:
        assert got == max(int(max(curve)), 101 + generated)


@given(
    lengths,
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.integers(1, 90), st.integers(1, 70), st.integers(0, 70)
        ),
        min_size=1,
        max_size=20,
    ),
)
def test_questions_between_observations_change_no_answer(
    values: list[int], asked: list[tuple[str, int, int, int]]
) -> None:
    one = OutputLengthPredictor()
    known: list[tuple[str, int]] = []
    for slo_class, prompt, max_tokens, generated in asked:
        fresh = OutputLengthPredictor()
        for name, length in known:
            fresh.observe(name, length)
        for _ in range(2):
            said = one.expected_hold(slo_class, prompt, max_tokens, None, generated)
            assert said == fresh.expected_hold(slo_class, prompt, max_tokens, None, generated)
        for length in values[:3]:
            one.observe(slo_class, length)
            known.append((slo_class, length))


# --- what somebody else is told of it ------------------------------------------------------------


def test_points_are_said_of_believed_classes_alone() -> None:
    predictor = seen([5] * 7)
    assert predictor.points("chat") == ()
    assert predictor.all_points() == {}
    predictor.observe("chat", 9)
    predictor.observe("code", 9)
    assert predictor.points("chat") == (9, *[5] * 7, 9, 8)
    assert predictor.all_points() == {"chat": predictor.points("chat")}
    assert predictor.points("unheard of") == ()


@given(
    st.lists(st.integers(0, 60), max_size=60),
    quantiles,
    st.integers(1, 40),
    st.integers(1, 200),
    st.integers(1, 80),
    st.one_of(st.none(), st.integers(0, 200)),
)
@example([0] * 8, 0.5, 40, 10, 20, None)
def test_points_say_of_a_new_request_what_the_predictor_says(
    values: list[int],
    quantile: float,
    window: int,
    prompt: int,
    max_tokens: int,
    declared: int | None,
) -> None:
    predictor = seen(values, quantile=quantile, window=window)
    points = predictor.points("chat")
    predicted = predictor.predict("chat", max_tokens, declared)
    assert length_of(points, max_tokens, declared) == predicted.tokens
    assert hold_of(points, prompt, max_tokens, declared) == predictor.expected_hold(
        "chat", prompt, max_tokens, declared, 0
    )


# --- answers that were cut off -------------------------------------------------------------------


def observed(values: list[tuple[int, bool]], **options: Any) -> OutputLengthPredictor:
    """(tokens, whether ``max_tokens`` cut the answer off there) of each request."""
    predictor = OutputLengthPredictor(**options)
    for tokens, cut_off in values:
        predictor.observe("chat", tokens, cut_off=cut_off)
    return predictor


cut = st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=40)


@given(cut, quantiles)
@example([(3, False), (5, True), (7, False), (9, True), (10, False), (12, False)] * 2, 0.5)
def test_learnt_is_the_quantile_of_the_product_limit(
    values: list[tuple[int, bool]], quantile: float
) -> None:
    """Kaplan and Meier's S(t), in fractions: the product of 1 - ends at t / at risk at t."""
    got = observed(values, quantile=quantile).predict("chat", 1000)
    if sum(not cut_off for _, cut_off in values) < 8:
        assert got == (1000, "cap")
        return
    count, rank = len(values), math.ceil(Fraction(quantile) * len(values)) - 1
    wanted = (rank + Fraction(1, 2)) / count
    survival, expected = Fraction(1), None
    for time in sorted({tokens for tokens, _ in values}):
        at_risk = sum(tokens >= time for tokens, _ in values)
        ends = sum(tokens == time and not cut_off for tokens, cut_off in values)
        survival *= 1 - Fraction(ends, at_risk)
        if expected is None and 1 - survival >= wanted:
            expected = time
    assert got == ((1000, "cap") if expected is None else (expected, "quantile"))


def test_short_caps_do_not_make_answers_look_short() -> None:
    rng = np.random.default_rng(5)
    natural, caps = rng.geometric(1 / 200, 256), rng.choice([1, 50, 200, 4000], 256)
    values = [(int(min(n, cap)), bool(n > cap)) for n, cap in zip(natural, caps, strict=True)]
    true = np.quantile(natural, 0.5)
    learnt = observed(values, quantile=0.5).predict("chat", 4000).tokens
    taken_at_their_word = seen([n for n, _ in values], quantile=0.5).predict("chat", 4000).tokens
    those_that_ended = [n for n, cut_off in values if not cut_off]
    dropped = seen(those_that_ended, quantile=0.5).predict("chat", 4000).tokens
    assert abs(learnt - true) < 0.25 * true
    assert taken_at_their_word < 0.5 * true
    assert dropped < 0.75 * true


def test_where_all_are_cut_off_the_cap_is_expected_and_memory_for_what_was_seen() -> None:
    predictor = observed([(24, True)] * 20)
    assert predictor.predict("chat", 24) == (24, "quantile")
    assert predictor.predict("chat", 500) == (500, "cap")
    assert predictor.expected_hold("chat", 100, 24, None, 0) == 124
    assert predictor.expected_hold("chat", 100, 500, None, 0) == 124
    assert predictor.expected_hold("chat", 100, 500, None, 30) == 131


@given(cut, st.integers(1, 200), st.integers(1, 80), st.integers(0, 70))
@example([(1, True)] * 9, 10, 20, 0)
def test_a_front_is_told_the_same_of_answers_that_were_cut_off(
    values: list[tuple[int, bool]], prompt: int, max_tokens: int, generated: int
) -> None:
    predictor = observed(values)
    points = predictor.points("chat")
    predicted = predictor.predict("chat", max_tokens)
    assert length_of(points, max_tokens, None) == predicted.tokens
    held = predictor.expected_hold("chat", prompt, max_tokens, None, 0)
    assert hold_of(points, prompt, max_tokens, None) == held
    assert held <= prompt + max(1, *(tokens for tokens, _ in [(1, True), *values]))
    later = predictor.predict("chat", max_tokens, generated=generated).tokens
    assert min(generated + 1, max_tokens) <= later <= max_tokens
    assert predictor.expected_hold("chat", prompt, 99, None, generated) > prompt + generated


def test_those_that_were_cut_off_are_forgotten_in_turn() -> None:
    predictor = observed([(5, True)] * 8, window=8)
    for tokens in range(1, 9):
        assert predictor.predict("chat", 100).source == "cap"
        predictor.observe("chat", tokens)
    assert predictor.predict("chat", 100) == (8, "quantile")
