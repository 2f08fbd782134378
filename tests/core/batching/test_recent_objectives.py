# SPDX-License-Identifier: Apache-2.0
"""How long a step of best effort alone may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.batching.recent_objectives import GRID, RecentObjectives
from vllm_slo.core.types import INFINITY


def recent(*objectives: tuple[float, float, float]) -> RecentObjectives:
    """Objectives seen: (ttft_s, tpot_s, when)."""
    seen = RecentObjectives(memory_s=60.0)
    for ttft_s, tpot_s, at_s in objectives:
        seen.add(ttft_s, tpot_s, at_s)
    return seen


def test_nothing_seen_limits_nothing() -> None:
    assert recent().responsive_step_s(0.0, 0.01) == INFINITY
    assert recent((INFINITY, INFINITY, 0.0)).responsive_step_s(0.0, 0.01) == INFINITY


@given(st.floats(0.1, 1e4), st.floats(0.02, 1e3))
def test_a_step_is_a_quarter_of_a_ttft_or_a_tpot(ttft_s: float, tpot_s: float) -> None:
    """Down to the grid on which objectives are remembered, and never above it."""
    both = recent((ttft_s, tpot_s, 0.0)).responsive_step_s(1.0, 1e-3)
    exact = max(ttft_s / 4, tpot_s)
    assert exact / GRID * 0.999 <= both <= exact * 1.001
    ttft_only = recent((ttft_s, INFINITY, 0.0)).responsive_step_s(1.0, 1e-3)
    assert ttft_s / 4 / GRID * 0.999 <= ttft_only <= ttft_s / 4 * 1.001


@given(st.floats(0.02, 1e3))
def test_a_tpot_alone_limits_no_step_before_its_first_token(tpot_s: float) -> None:
    assert recent((INFINITY, tpot_s, 0.0)).responsive_step_s(1.0, 1e-3) == INFINITY


def test_the_tightest_counts_while_it_is_remembered_and_can_be_kept() -> None:
    seen = recent((8.0, INFINITY, 50.0), (0.8, INFINITY, 0.0))
    tight, loose = seen.responsive_step_s(60.0, 0.01), seen.responsive_step_s(60.0, 0.9)
    assert tight <= 0.2
    assert 1.6 <= loose <= 2.0  # no step is as short as 0.8
    assert seen.responsive_step_s(60.1, 0.01) == loose  # forgotten
    assert seen.responsive_step_s(111.0, 0.01) == INFINITY
