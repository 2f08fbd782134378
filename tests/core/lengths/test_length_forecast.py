# SPDX-License-Identifier: Apache-2.0
"""Central guesses of output lengths against numpy's quantile, and their errors against formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.lengths.forecast import (
    ForecastError,
    LengthQuery,
    QuantileForecaster,
    RunningMean,
    forecast_error,
)
from vllm_slo.core.lengths.output_length import LengthPrediction, OutputLengthPredictor

lengths = st.lists(st.integers(1, 60), max_size=40)
# Sixty-fourths are exact in binary, so numpy and the forecaster break ties alike.
quantiles = st.integers(1, 63).map(lambda n: n / 64)


def seen(values: list[int], quantile: float = 0.5) -> QuantileForecaster:
    forecaster = QuantileForecaster(OutputLengthPredictor(), quantile)
    for value in values:
        forecaster.observe(chat(), value)
    return forecaster


def chat(max_tokens: int = 1000, declared: int | None = None) -> LengthQuery:
    return LengthQuery("chat", 100, max_tokens, declared)


def test_the_median_of_the_class_is_the_guess() -> None:
    forecaster = seen([10] * 4 + [30] * 2 + [500] * 3)
    assert forecaster.predict(chat()) == LengthPrediction(30, "quantile")
    assert forecaster.predict(chat(max_tokens=20)) == LengthPrediction(20, "quantile")
    assert forecaster.predict(LengthQuery("code", 100, 1000)) == LengthPrediction(1000, "cap")


@given(lengths, quantiles, st.integers(0, 70))
def test_it_is_the_quantile_of_those_that_got_further(
    values: list[int], quantile: float, generated: int
) -> None:
    got = seen(values, quantile).predict(chat(), generated)
    survivors = [value for value in values if value > generated]
    if len(values) < 8 or not survivors:
        assert got == (1000, "cap")
    else:
        expected = np.quantile(survivors, quantile, method="inverted_cdf")
        assert got == (int(expected), "quantile")


def test_a_declared_length_is_taken_at_its_word_until_it_is_outgrown() -> None:
    forecaster = seen([5] * 10 + [50] * 9)
    assert forecaster.predict(chat(declared=30)) == (30, "declared")
    assert forecaster.predict(chat(declared=30), generated=29) == (30, "declared")
    assert forecaster.predict(chat(declared=30), generated=30) == (50, "quantile")
    assert forecaster.predict(chat(max_tokens=20, declared=30)) == (20, "declared")


@given(
    lengths,
    quantiles,
    st.integers(1, 80),
    st.one_of(st.none(), st.integers(1, 200)),
    st.integers(0, 79),
)
def test_a_guess_is_possible(
    values: list[int], quantile: float, cap: int, declared: int | None, generated: int
) -> None:
    """More than what is there already, and within the cap."""
    generated = min(generated, cap - 1)
    got = seen(values, quantile).predict(chat(cap, declared), generated)
    assert generated + 1 <= got.tokens <= cap
    assert (got.source == "declared") == (declared is not None and declared > generated)


def test_what_it_sees_teaches_the_lengths_that_memory_is_planned_by() -> None:
    lengths = OutputLengthPredictor(0.9)
    forecaster = QuantileForecaster(lengths)
    for tokens in range(1, 11):
        forecaster.observe(chat(), tokens)
    assert lengths.predict("chat", 1000).tokens == 9, "by its own quantile"
    assert forecaster.predict(chat()).tokens == 5
    assert lengths.points("chat")[-1] == 10, "and each of them once"


@pytest.mark.parametrize("quantile", [0.0, 1.0, -0.1, float("nan")])
def test_a_quantile_outside_its_range_is_refused(quantile: float) -> None:
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        QuantileForecaster(OutputLengthPredictor(), quantile)


def test_requests_that_look_alike_are_told_apart() -> None:
    one, other = chat(), chat()
    assert one != other
    assert len({one, other}) == 2


# --- errors ---------------------------------------------------------------------------------------


def test_errors_by_hand() -> None:
    assert forecast_error(50, 200) == ForecastError(ratio=0.25, relative=0.75)
    assert forecast_error(300, 100) == ForecastError(ratio=3.0, relative=2.0)
    assert forecast_error(7, 0) == forecast_error(7, 1), "an empty answer counts as one token"


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_the_relative_error_is_how_far_the_ratio_is_from_one(predicted: int, actual: int) -> None:
    error = forecast_error(predicted, actual)
    assert error.relative == pytest.approx(abs(error.ratio - 1.0))
    assert (error.relative == 0.0) == (predicted == actual)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_a_running_mean_is_the_mean_until_its_memory_is_full(values: list[float]) -> None:
    running = RunningMean(memory=30)
    for value in values:
        running.add(value)
    assert running.mean == pytest.approx(np.mean(values), abs=1e-9)


def test_then_the_newest_value_weighs_one_part_of_its_memory() -> None:
    running = RunningMean(memory=10)
    assert running.mean == 0.0
    for _ in range(50):
        running.add(2.0)
    running.add(12.0)
    assert running.mean == pytest.approx(3.0)
    for _ in range(100):
        running.add(5.0)
    assert running.mean == pytest.approx(5.0, abs=1e-3), "what was is forgotten"
