# SPDX-License-Identifier: Apache-2.0
"""core/step_time/model.py: the model, its fit and its online correction."""

import json
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_slo.core.step_time.least_squares import nnls
from vllm_slo.core.step_time.model import (
    DEFAULT_HORIZON,
    DEFAULT_MARGIN,
    BatchShape,
    OnlineCorrection,
    Sample,
    StepTimeEstimator,
    StepTimeModel,
    chunk_pairs,
    fit,
)
from vllm_slo.errors import ProfileError

FLAT_THEN_LINEAR = StepTimeModel(((0.0, 0.002, 0.040), (0.0005, 0.001, 0.020)), 1e-5, 8192)
TRUE = StepTimeModel(((0.0002, 0.0, 0.037), (0.0005, 0.0, 0.012)), 3e-6, pair_s=2e-8)

rates = st.one_of(st.just(0.0), st.floats(1e-9, 1e-2), st.floats(1e-300, 1e-15))
models = st.builds(
    StepTimeModel,
    st.tuples(st.tuples(rates, rates, rates), st.tuples(rates, rates, rates)),
    rates,
    st.integers(1, 100_000),
    rates,
)


def shapes(seed: int = 0, n: int = 200) -> list[BatchShape]:
    rng = random.Random(seed)
    made = []
    for _ in range(n):
        if rng.random() < 0.5:
            decodes = rng.randint(1, 64)
            made.append(BatchShape.of([(1, rng.randint(0, 4000)) for _ in range(decodes)]))
        else:
            made.append(BatchShape.of([(rng.randint(2, 1024), rng.randint(0, 6000))]))
    return made


def test_prediction_by_hand() -> None:
    model = FLAT_THEN_LINEAR
    assert model.predict_s(1) == pytest.approx(0.040)
    assert model.predict_s(40) == pytest.approx(0.040)  # both lines meet here
    assert model.predict_s(100) == pytest.approx(0.070)
    assert model.predict_s(100, context_tokens=2000) == pytest.approx(0.090)
    assert model.predict_s(1, spec_steps=3) == pytest.approx(0.046)
    assert model.predict_s(100, spec_steps=3) == pytest.approx(0.073)
    assert replace(model, pair_s=1e-6).predict_s(100, pairs=5000) == pytest.approx(0.075)


def test_shape_of_a_batch_by_hand() -> None:
    assert chunk_pairs(1, 10) == 11
    assert chunk_pairs(3, 10) == 11 + 12 + 13
    shape = BatchShape.of([(1, 10), (3, 10)], spec_steps=2)
    assert shape == BatchShape(tokens=4, spec_steps=2, context_tokens=20, requests=2, pairs=47)
    assert TRUE.predict_shape_s(shape) == TRUE.predict_s(4, 20, 2, 47)


def test_inverse_by_hand() -> None:
    model = FLAT_THEN_LINEAR
    assert model.time_to_tokens(0.0399) == 0
    assert model.time_to_tokens(0.070) == 100
    assert model.time_to_tokens(0.0901, context_tokens=2000) == 100
    assert model.time_to_tokens(1e9) == 8192
    assert model.time_to_tokens(math.inf) == 8192
    assert model.time_to_tokens(math.nan) == 0
    assert model.time_to_tokens(-1.0) == 0
    # 100 tokens behind 400 cached ones: 0.07 s of lines and 40,000 pairs at 1 us.
    priced = replace(model, pair_s=1e-6)
    assert priced.time_to_tokens(0.1101, pairs_per_token=400) == 100


@settings(max_examples=examples(500))
@given(
    models,
    st.one_of(st.floats(0, 10), st.floats(1e-300, 1e-6)),
    st.integers(0, 10**6),
    st.integers(0, 20),
    st.integers(0, 10**9),
    st.integers(0, 10**5),
)
def test_inverse_is_exact(
    model: StepTimeModel, time_s: float, context: int, spec_steps: int, pairs: int, per_token: int
) -> None:
    def seconds(n: int) -> float:
        return model.predict_s(n, context, spec_steps, pairs + n * per_token)

    n = model.time_to_tokens(time_s, context, spec_steps, pairs, per_token)
    assert 0 <= n <= model.max_tokens
    assert n == 0 or seconds(n) <= time_s
    assert n == model.max_tokens or seconds(n + 1) > time_s


def test_chunk_by_hand() -> None:
    model = StepTimeModel(((0.0, 0.0, 0.040), (0.001, 0.0, 0.020)), 1e-5, pair_s=1e-6)
    # 10 decodes at 100 tokens each, and 50 tokens behind 200: 0.08 + 0.012 + 1e-6 * (1010 + 11275)
    pairs = 10 * chunk_pairs(1, 100) + chunk_pairs(50, 200)
    assert model.predict_s(60, 1200, 0, pairs) == pytest.approx(0.104285)
    assert model.chunk_to_fit(0.10429, 200, 10, 1000, 0, 1010) == 50
    assert model.chunk_to_fit(0.10428, 200, 10, 1000, 0, 1010) == 49
    assert model.chunk_to_fit(0.0401, 200, 10, 1000, 0, 1010) == 0


@settings(max_examples=examples(300))
@given(
    models,
    st.floats(0, 10),
    st.integers(0, 10**5),
    st.integers(0, 10**4),
    st.integers(0, 10**6),
    st.integers(0, 10**9),
)
def test_chunk_is_exact(
    model: StepTimeModel, time_s: float, behind: int, tokens: int, context: int, pairs: int
) -> None:
    def seconds(n: int) -> float:
        return model.predict_s(tokens + n, context + behind, 3, pairs + chunk_pairs(n, behind))

    n = model.chunk_to_fit(time_s, behind, tokens, context, 3, pairs)
    assert n >= 0
    assert n == 0 or (seconds(n) <= time_s and tokens + n <= model.max_tokens)
    assert tokens + n >= model.max_tokens or seconds(n + 1) > time_s


@given(models, st.integers(0, 10**5), st.integers(0, 10**5), st.integers(0, 10**6))
def test_more_work_never_takes_less_time(
    model: StepTimeModel, tokens: int, more: int, context: int
) -> None:
    base = model.predict_s(tokens, context, 1, 10)
    assert model.predict_s(tokens + more, context, 1, 10) >= base
    assert model.predict_s(tokens, context + more, 1, 10) >= base
    assert model.predict_s(tokens, context, 1 + more, 10) >= base
    assert model.predict_s(tokens, context, 1, 10 + more) >= base


@given(models)
def test_serialisation_round_trip(model: StepTimeModel) -> None:
    assert StepTimeModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf, "0.1", None, True])
@pytest.mark.parametrize("where", ["k1", "k2", "b", "kv_s", "pair_s"])
def test_bad_coefficients_are_refused(bad: object, where: str) -> None:
    term: dict[str, Any] = {"k1": 0.0, "k2": 0.0, "b": 0.0}
    rest: dict[str, Any] = {"kv_s": 0.0, "pair_s": 0.0}
    (term if where in term else rest)[where] = bad
    with pytest.raises(ProfileError, match=where):
        StepTimeModel(((0.0, 0.0, 0.0), tuple(term.values())), **rest)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"terms": 3, "kv_s": 0.0, "max_tokens": 1},
        {"terms": [[0, 0, 1]], "kv_s": 0.0, "max_tokens": 1},
        {"terms": [[0, 0, 1], [0, 1]], "kv_s": 0.0, "max_tokens": 1},
        {"terms": [[0, 0, 1], [0, 0, 1]], "kv_s": 0.0, "max_tokens": 0},
        {"terms": [[0, 0, 1], [0, 0, 1]], "kv_s": 0.0, "max_tokens": 1.5},
        [],
        None,
    ],
)
def test_broken_serialised_models_are_refused(broken: Any) -> None:
    with pytest.raises(ProfileError):
        StepTimeModel.from_dict(broken)


def test_scaling() -> None:
    assert TRUE.scaled(2.0).predict_s(50, 100, 0, 300) == 2 * TRUE.predict_s(50, 100, 0, 300)
    for factor in (-1.0, math.nan, math.inf):
        with pytest.raises(ProfileError):
            TRUE.scaled(factor)


def test_nnls_against_all_active_sets() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, y = rng.normal(size=(12, 4)), rng.normal(size=12)
        x = nnls(a, y)
        assert (x >= 0).all()
        gradient = a.T @ (a @ x - y)  # optimal: >= 0 everywhere, 0 where x > 0
        assert (gradient > -1e-7).all()
        assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-7


def test_fit_recovers_the_coefficients_under_noise_and_outliers() -> None:
    rng = random.Random(1)
    samples = [(s, TRUE.predict_shape_s(s) * rng.gauss(1.0, 0.03)) for s in shapes()]
    samples[5] = (samples[5][0], samples[5][1] * 20)
    samples[50] = (samples[50][0], samples[50][1] * 5)
    report = fit(samples)
    assert report.n == 200
    assert report.model.kv_s == pytest.approx(TRUE.kv_s, rel=0.15)
    assert report.model.pair_s == pytest.approx(TRUE.pair_s, rel=0.15)
    for shape in shapes(seed=2):
        assert report.model.predict_shape_s(shape) == pytest.approx(
            TRUE.predict_shape_s(shape), rel=0.06
        )


def test_fit_is_exact_without_noise_and_says_so() -> None:
    report = fit([(s, TRUE.predict_shape_s(s)) for s in shapes()])
    assert report.r2 > 0.9999
    assert report.worst_residual_ratio < 0.01
    assert report.worst_residual_s < 0.01


def test_fit_reports_residuals_by_hand() -> None:
    samples = [(BatchShape(10), 0.1)] * 20 + [(BatchShape(10), 0.2)]
    report = fit(samples)
    assert report.model.predict_s(10) == pytest.approx(0.1, rel=0.02)
    assert report.worst_residual_s == pytest.approx(0.1, rel=0.02)
    assert report.worst_residual_ratio == pytest.approx(0.5, rel=0.02)


def test_terms_can_be_left_out() -> None:
    samples = [(s, TRUE.predict_shape_s(s)) for s in shapes()]
    assert fit(samples, pair_term=False).model.pair_s == 0.0
    assert fit(samples, kv_term=False).model.kv_s == 0.0


garbage = st.tuples(
    st.builds(
        BatchShape,
        st.integers(-5, 10**10),
        st.integers(-2, 50),
        st.integers(-5, 10**7),
        st.integers(0, 9),
        st.integers(-5, 10**12),
    ),
    st.floats(),
)


@settings(max_examples=examples(200))
@given(st.lists(garbage, max_size=30))
def test_fit_of_garbage_is_non_negative(samples: list[Sample]) -> None:
    kept = 2 * [(BatchShape(8), 0.01)]
    model = fit(kept + samples).model  # construction refuses negative coefficients
    assert 0.0 < model.predict_s(1) <= model.predict_s(100, 100, 1, 100) < math.inf


def test_a_lone_token_takes_time_in_every_fit() -> None:
    """As in the first steps of a live engine: few shapes, and the slowest have most context."""
    slow = [(BatchShape(5, 4, 100 + n, 1, 515 + 5 * n), 0.025 + n * 2e-4) for n in range(8)]
    prompts = [(BatchShape(n, 4, 0, 1, n * (n + 1) // 2), 3e-6 * n * n) for n in (40, 60, 80)]
    attention_alone = fit(slow + prompts)
    assert attention_alone.model.kv_s == attention_alone.model.pair_s == 0.0
    assert attention_alone.model.predict_s(1) > 1e-4
    drafting_alone = fit([(BatchShape(5, n, 0, 1, 15), 0.004 * n) for n in (1, 2, 4)] * 4)
    assert drafting_alone.model.terms[0][1] == drafting_alone.model.terms[1][1] == 0.0
    assert drafting_alone.model.predict_s(1) > 1e-3


@pytest.mark.parametrize("samples", [[], [(BatchShape(1), 0.1)], [(BatchShape(0), 0.1)] * 9])
def test_fit_needs_two_usable_samples(samples: list[Sample]) -> None:
    with pytest.raises(ProfileError, match="usable"):
        fit(samples)


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
