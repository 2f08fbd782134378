# SPDX-License-Identifier: Apache-2.0
"""core/speculation/tiers.py: few tiers, none planned more loosely than its requests asked."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.speculation.tiers import MAX_TIERS, gather_tiers

INF = math.inf
seconds = st.floats(0.005, 0.3)
paces = st.lists(st.tuples(seconds | st.just(INF), st.floats(0.02, 0.98)), max_size=40)


@given(paces)
def test_tiers_are_few_and_nobody_is_planned_for_more_loosely(
    found: list[tuple[float, float]],
) -> None:
    tiers, places = gather_tiers(found)
    assert len(tiers) == min(len(set(found)), MAX_TIERS)
    assert sum(tier.requests for tier in tiers) == len(found) == len(places)
    for place, tier in enumerate(tiers):
        members = [pace for pace, at in zip(found, places, strict=True) if at == place]
        assert len(members) == tier.requests
        assert min(tpot_s for tpot_s, _ in members) == tier.tpot_s
        mean = sum(chance for _, chance in members) / len(members)
        assert tier.acceptance == pytest.approx(mean)
        assert (tier.tpot_s == INF) == all(tpot_s == INF for tpot_s, _ in members)


def test_the_most_alike_are_merged() -> None:
    asked = [(0.02, 0.5), (0.03, 0.5), (0.05, 0.5), (0.05, 0.52), (0.1, 0.5), (INF, 0.5)]
    tiers, places = gather_tiers(asked)
    assert places == [0, 1, 2, 2, 3, 4]
    assert tiers[2][:2] == (2, 0.05)
    assert tiers[2].acceptance == pytest.approx(0.51)
