# SPDX-License-Identifier: Apache-2.0
"""core/step_time/budget.py: how many tokens fit into a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.step_time.budget import (
    Lines,
    step_seconds,
    step_seconds_compiled,
    tokens_within,
    tokens_within_compiled,
    whole_tokens_within,
)

ROOFLINE = Lines(0.0, 0.0, 0.040, 0.0005, 0.001, 0.020)
rates = st.one_of(st.just(0.0), st.floats(1e-7, 1e-2))
lines = st.builds(Lines, rates, rates, rates, rates, rates, rates)
times = st.floats(0.0, 10.0)
most = st.floats(1.0, 1e5)
drafts = st.floats(0.0, 9.0)


def test_by_hand() -> None:
    assert tokens_within(ROOFLINE, 0.0399, 1000.0, 0.0) == 0.0
    assert tokens_within(ROOFLINE, 0.040, 1000.0, 0.0) == (0.040 - 0.020) / 0.0005
    assert tokens_within(ROOFLINE, 0.070, 1000.0, 10.0) == (0.070 - 0.001 * 10 - 0.020) / 0.0005
    assert tokens_within(ROOFLINE, 9.0, 1000.0, 0.0) == 1000.0
    assert whole_tokens_within(ROOFLINE, 0.06999, 1000.0, 0.0) == 99
    assert whole_tokens_within(ROOFLINE, 0.070 - 1e-14, 1000.0, 0.0) == 100  # a rounding error


@given(lines, times, most, drafts)
def test_it_is_the_inverse_of_a_steps_time(
    lines: Lines, time_s: float, most: float, drafts: float
) -> None:
    tokens = tokens_within(lines, time_s, most, drafts)
    assert 0.0 <= tokens <= most
    if tokens > 0.0:
        assert step_seconds(lines, tokens, drafts) <= time_s * (1.0 + 1e-12)
    if tokens < most:
        assert step_seconds(lines, tokens * (1.0 + 1e-9) + 1e-9, drafts) >= time_s * (1.0 - 1e-12)


@given(lines, times, most, drafts)
def test_compiled_code_answers_to_the_digit(
    lines: Lines, time_s: float, most: float, drafts: float
) -> None:
    tokens = tokens_within(lines, time_s, most, drafts)
    assert tokens_within_compiled(lines, time_s, most, drafts) == tokens
    seconds = step_seconds(lines, tokens, drafts)
    assert step_seconds_compiled(lines, tokens, drafts) == seconds
