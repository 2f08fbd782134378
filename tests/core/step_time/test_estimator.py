# SPDX-License-Identifier: Apache-2.0
"""core/step_time/estimator.py: bias, margin and refits by live steps."""

from __future__ import annotations

import math
import random

import pytest
from step_shapes import TRUE, shapes

from vllm_slo.core.step_time.estimator import (
    DEFAULT_HORIZON,
    DEFAULT_MARGIN,
    OnlineCorrection,
    StepTimeEstimator,
)
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel


def test_correction_before_any_step() -> None:
    correction = OnlineCorrection()
    assert (correction.bias, correction.margin(0.95)) == (1.0, DEFAULT_MARGIN)
    assert correction.promise_model(TRUE, 0.95).predict_s(1) == pytest.approx(
        TRUE.predict_s(1) * DEFAULT_MARGIN
    )
    with pytest.raises(ValueError, match="quantile"):
        correction.margin(1.0)


@pytest.mark.parametrize("quantile", [0.9, 0.95, 0.99])
def test_promises_of_a_slow_noisy_model_hold(quantile: float) -> None:
    rng = random.Random(3)
    correction = OnlineCorrection()
    kept, asked = 0, 4000
    for i in range(asked + 500):
        limit = correction.bias * correction.margin(quantile)
        promised = spent = 0.0
        for _ in range(DEFAULT_HORIZON):
            predicted = rng.uniform(0.03, 0.2)
            actual = predicted * 1.05 * max(rng.gauss(1.0, 0.10), 0.2)
            correction.observe(predicted, actual)
            promised += predicted * limit
            spent += actual
        kept += i >= 500 and spent <= promised
    assert correction.bias == pytest.approx(1.05, abs=0.04)
    assert kept / asked >= quantile - 0.02
    assert correction.margin(quantile) < 1.2  # and it does not promise next to nothing


def test_correction_ignores_what_is_not_a_time() -> None:
    correction = OnlineCorrection()
    for bad in (math.nan, math.inf, -math.inf, -1.0, 0.0):
        correction.observe(bad, 1.0)
        correction.observe(1.0, bad)
    correction.observe(1e-300, 1e300)
    assert (len(correction), correction.bias) == (0, 1.0)


def test_hiccups_do_not_move_the_bias_and_a_lasting_change_does() -> None:
    correction = OnlineCorrection()
    for i in range(200):
        correction.observe(1.0, 50.0 if i % 40 == 0 else 1.0)
    assert correction.bias == 1.0
    for _ in range(40):
        correction.observe(1.0, 2.0)
    assert correction.bias == 2.0


def test_a_machine_that_slept_goes_on_promising() -> None:
    correction = OnlineCorrection()
    for _ in range(20):
        correction.observe(1.0, 1.0)
    correction.observe(1.0, 3000.0)
    for _ in range(DEFAULT_HORIZON):
        correction.observe(1.0, 1.0)
    assert correction.margin(0.95) < 5.0  # and not 300


def test_memory_of_the_correction_is_bounded() -> None:
    correction = OnlineCorrection()
    for i in range(3000):
        correction.observe(1.0, 1.0 + (i * 7919 % 100) / 100)
    assert len(correction) == OnlineCorrection.MARGIN_WINDOW
    assert correction.bias == pytest.approx(1.5, abs=0.1)


def test_without_a_profile_the_shape_is_learnt() -> None:
    rng = random.Random(4)
    fast = StepTimeModel(((0.0, 0.0, 0.008), (0.00003, 0.0, 0.004)), 2e-8, pair_s=5e-10)
    estimator = StepTimeEstimator()
    for shape in shapes(seed=5, n=400):
        estimator.observe(shape, fast.predict_shape_s(shape) * rng.gauss(1.0, 0.02))
        estimator.observe(shape, math.nan)
    for shape in shapes(seed=6, n=100):
        expected = fast.predict_shape_s(shape)
        assert estimator.expected().predict_shape_s(shape) == pytest.approx(expected, rel=0.15)
        assert estimator.promise(0.95).predict_shape_s(shape) > 0.9 * expected
    assert len(estimator._buckets) < 200


def test_a_profile_keeps_its_shape() -> None:
    estimator = StepTimeEstimator(TRUE)
    for shape in shapes(n=300):
        estimator.observe(shape, 3 * TRUE.predict_shape_s(shape))
    assert estimator.base is TRUE
    assert estimator.expected().predict_s(9) == pytest.approx(3 * TRUE.predict_s(9))


def test_decodes_alone_do_not_invent_a_slope() -> None:
    estimator = StepTimeEstimator()
    for _ in range(500):
        estimator.observe(BatchShape.of([(1, 100)] * 4), 0.02)
    assert estimator.base == StepTimeModel.prior()
    assert estimator.expected().predict_s(4, 400, 0, 404) == pytest.approx(0.02)
