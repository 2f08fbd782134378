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
def test_a_step_of_best_effort_is_a_quarter_of_a_ttft_or_two_tpots(
    ttft_s: float, tpot_s: float
) -> None:
    """Down to the grid on which objectives are remembered, and never above it."""
    both = recent((ttft_s, tpot_s, 0.0)).responsive_step_s(1.0, 1e-3)
    exact = max(ttft_s / 4, 2 * tpot_s)
    assert exact / GRID * 0.999 <= both <= exact * 1.001
    stretched_s = recent((ttft_s, tpot_s, 0.0)).stretched_step_s(1.0, 1e-3)
    assert tpot_s / GRID * 0.999 <= stretched_s <= both * 1.001
    assert recent((INFINITY, tpot_s, 0.0)).stretched_step_s(1.0, 1e-3) == INFINITY
    tpot_only = recent((INFINITY, tpot_s, 0.0)).responsive_step_s(1.0, 1e-3)
    assert 2 * tpot_s / GRID * 0.999 <= tpot_only <= 2 * tpot_s * 1.001


def test_the_tightest_counts_while_it_is_remembered_and_can_be_kept() -> None:
    seen = recent((INFINITY, 1.0, 50.0), (INFINITY, 0.1, 0.0))
    tight, loose = seen.responsive_step_s(60.0, 0.01), seen.responsive_step_s(60.0, 0.2)
    assert tight <= 0.2
    assert 1.6 <= loose <= 2.0  # no step is as short as 0.1
    assert seen.responsive_step_s(60.1, 0.01) == loose  # forgotten
    assert seen.responsive_step_s(111.0, 0.01) == INFINITY
