# SPDX-License-Identifier: Apache-2.0
"""core/step_time/fit.py."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from step_shapes import TRUE, shapes

from vllm_slo.core.step_time.fit import fit, nnls
from vllm_slo.core.step_time.model import BatchShape, Sample, chunk_pairs
from vllm_slo.errors import ProfileError


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


@pytest.mark.parametrize("seed", range(3))
def test_fit_to_live_steps_that_mostly_decode(seed: int) -> None:
    """The first tokens of a step cost more than later ones, which no maximum of two lines says. The
    many short steps must not decide alone."""
    rng = random.Random(seed)
    samples = []
    for _ in range(1000):
        decodes, chunk = rng.randint(1, 6), rng.random() < 0.25 and int(10 ** rng.uniform(1, 2.6))
        context = sum(rng.randint(20, 600) for _ in range(decodes))
        tokens, pairs = decodes + chunk, context + decodes + chunk_pairs(chunk, 0)
        seconds = 0.012 + 4e-4 * min(tokens, 8) + 3.7e-4 * tokens + 2.8e-6 * context + 1e-7 * pairs
        shape = BatchShape(tokens, 0, context, decodes + bool(chunk), pairs)
        samples.append((shape, seconds * rng.gauss(1.0, 0.07)))
    assert fit(samples).r2 > 0.95


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
