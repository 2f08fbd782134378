# SPDX-License-Identifier: Apache-2.0
"""The order of requests without a promise, and which of them give way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.ordering.best_effort import preemptions, rank_best_effort
from vllm_slo.core.types import BestEffortView


def waiting(
    name: str, since_s: float, needed_blocks: int, *, decoding: bool = False
) -> BestEffortView:
    return BestEffortView(name, since_s, 10, decoding, 0, needed_blocks)


def test_best_effort_that_has_begun_is_served_first_but_for_the_starved() -> None:
    requests = [
        waiting("new", 90.0, 4),
        waiting("begun", 95.0, 0, decoding=True)._replace(begun=True),
        waiting("lost its place", 95.0, 4)._replace(begun=True),
        waiting("just", 70.0, 4),
        waiting("aged", 69.9, 4),
        waiting("refused", 98.0, 4)._replace(asked=True),
        waiting("starved", 98.0, 4),
        waiting("begun and aged", 10.0, 4)._replace(begun=True),
        waiting("begun and refused", 95.0, 4)._replace(begun=True, asked=True),
    ]
    ranked = [r.request_id for r in rank_best_effort(requests, 100.0, 30.0, "starved")]
    begun = ["begun and aged", "begun", "lost its place", "begun and refused"]
    assert ranked == ["starved", *begun, "refused", "aged", "new", "just"]
    assert [r.request_id for r in rank_best_effort(requests, 100.0, 30.0)][:4] == begun


@given(st.integers(0, 30), st.integers(0, 30), st.lists(st.integers(0, 8), max_size=7))
def test_the_fewest_victims_in_order_give_way(needed: int, free: int, sizes: list[int]) -> None:
    victims = [(f"v{i}", n) for i, n in enumerate(sizes)]
    enough = [k for k in range(len(sizes) + 1) if free + sum(sizes[:k]) >= needed]
    expected = enough[0] if enough else len(sizes)
    assert preemptions(needed, free, victims) == tuple(name for name, _ in victims[:expected])
