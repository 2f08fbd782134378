# SPDX-License-Identifier: Apache-2.0
"""core/speculation/window_pace.py: the pace of late requests, and how far a step is stretched."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_slo.core.batching.decodes import limit_of
from vllm_slo.core.speculation.window_pace import (
    GRID,
    stretched_s,
    working_tpot_s,
)
from vllm_slo.core.types import INFINITY, DecodeView

seconds = st.floats(0.005, 0.3)


def decode(*, late_s: float = 0.0, left: float = 8.0, tpot_s: float = 0.050) -> DecodeView:
    """A request with ``left`` tokens of its window to come, so many seconds behind, at time 0."""
    return DecodeView("r", tpot_s - late_s, left * tpot_s - late_s, left, tpot_s)


def test_who_is_on_schedule_or_ahead_keeps_its_tpot() -> None:
    for late_s in (0.0, -0.2):
        assert working_tpot_s(0.0, decode(late_s=late_s), 0.001) == 0.050
    assert working_tpot_s(0.0, decode(tpot_s=INFINITY), 0.001) == INFINITY


@given(st.floats(1e-4, 0.25), st.floats(1.0, 10.0))
def test_who_fell_behind_keeps_its_window_at_the_pace_planned(late_s: float, left: float) -> None:
    view = decode(late_s=late_s, left=left)
    pace_s = limit_of(0.0, view, 0.0)
    assume(0.002 < pace_s < 0.050)
    found = working_tpot_s(0.0, view, 0.001)
    assert found * left <= view.window_end_s + 1e-9
    assert pace_s / GRID <= found * (1 + 1e-9)
    steps = math.log(0.050 / found) / math.log(GRID)
    assert steps == pytest.approx(round(steps), abs=1e-6)  # so that there are few of them


def test_no_pace_is_asked_for_that_cannot_be_reached() -> None:
    """Rounding stops at it; a window that it cannot save hurries nobody."""
    view = decode(late_s=0.2, left=8.0)  # 25 ms a token
    assert working_tpot_s(0.0, view, 0.0249) == 0.0249
    assert working_tpot_s(0.0, view, 0.0251) == 0.050
    assert working_tpot_s(0.0, view, 0.080) == 0.080
    assert working_tpot_s(0.0, decode(late_s=0.5), 0.020) == 0.050


# --- what a step may be stretched for -------------------------------------------------------------


@given(seconds, st.floats(1.0, 40.0), seconds, seconds)
def test_a_step_of_one_token_is_what_the_batch_plan_allows(
    tpot_s: float, left: float, ahead_s: float, now_s: float
) -> None:
    end_s = now_s + left * tpot_s + ahead_s
    decode = DecodeView("r", end_s - (left - 1.0) * tpot_s, end_s, left, tpot_s)
    assert stretched_s(now_s, decode, 1.0) == pytest.approx(limit_of(now_s, decode, 0.0))
