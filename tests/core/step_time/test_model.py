# SPDX-License-Identifier: Apache-2.0
"""core/step_time/model.py: the model and its inverses."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from step_shapes import TRUE

from vllm_slo.core.step_time.model import BatchShape, StepTimeModel, chunk_pairs
from vllm_slo.errors import ProfileError

FLAT_THEN_LINEAR = StepTimeModel(((0.0, 0.002, 0.040), (0.0005, 0.001, 0.020)), 1e-5, 8192)

rates = st.one_of(st.just(0.0), st.floats(1e-9, 1e-2), st.floats(1e-300, 1e-15))
models = st.builds(
    StepTimeModel,
    st.tuples(st.tuples(rates, rates, rates), st.tuples(rates, rates, rates)),
    rates,
    st.integers(1, 100_000),
    rates,
)


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


@settings(max_examples=examples(500))
@given(models, st.one_of(st.floats(0, 10), st.floats(1e-300, 1e-6)), st.integers(0, 10**6))
def test_inverse_is_exact(model: StepTimeModel, time_s: float, context: int) -> None:
    n = model.time_to_tokens(time_s, context)
    assert 0 <= n <= model.max_tokens
    assert n == 0 or model.predict_s(n, context) <= time_s
    assert n == model.max_tokens or model.predict_s(n + 1, context) > time_s


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


@given(st.integers(0, 5000), st.integers(0, 50_000))
def test_in_a_filled_step_no_token_is_free(tokens: int, context: int) -> None:
    model = StepTimeModel(((0.0, 0.0, 0.020), (1e-4, 0.0, 0.004)), kv_s=1e-7)
    filled = model.filled()
    took_s = filled.predict_s(tokens, context)
    assert took_s <= model.predict_s(tokens, context)
    assert took_s == pytest.approx(1e-4 * tokens + 1e-7 * context)
    if tokens > 200:
        assert took_s == pytest.approx(model.predict_s(tokens, context) - 0.004)
