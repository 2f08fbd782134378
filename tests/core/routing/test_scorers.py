# SPDX-License-Identifier: Apache-2.0
"""Routing by llm-d's mix of scores."""

from __future__ import annotations

import random
from dataclasses import replace

from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_slo.core.routing.policy import RANKS, scorers
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.virtual_replica import RoutedRequest, VirtualReplica
from vllm_slo.core.step_time.model import StepTimeModel

IDLE = ReplicaState(
    StepTimeModel(((0.0, 0.0, 0.01), (1e-4, 0.0, 0.0)), max_tokens=1000),
    free_blocks=100,
    total_blocks=100,
    block_sizes=(16,),
    seats=10,
    max_step_tokens=1000,
    max_model_len=1000,
)
REQUEST = RoutedRequest(100)


def replicas(*states: ReplicaState | None) -> list[VirtualReplica]:
    made = []
    for number, state in enumerate(states):
        replica = VirtualReplica(f"r{number}")
        if state is not None:
            replica.update(state, 0.0)
        made.append(replica)
    return made


def order(request: RoutedRequest, shadows: list[VirtualReplica], seed: int = 0) -> list[str]:
    return [replica.name for replica in scorers(request, shadows, 0, random.Random(seed))]


def test_queue_cache_and_prefix_add_up_by_weight() -> None:
    shadows = replicas(
        replace(IDLE, waiting=4, kv_usage=0.0),  # 2 x 0   + 2 x 1.0 + 3 x 0.9 = 4.7
        replace(IDLE, waiting=0, kv_usage=0.5),  # 2 x 1   + 2 x 0.5 + 3 x 0   = 3.0
        replace(IDLE, waiting=2, kv_usage=0.0),  # 2 x 0.5 + 2 x 1.0 + 3 x 0   = 3.0 + 0.3
        replace(IDLE, waiting=0, kv_usage=0.1),  # 2 x 1   + 2 x 0.9 + 3 x 0   = 3.8
    )
    cached = replace(REQUEST, cached_tokens={"r0": 90, "r2": 10})
    assert order(cached, shadows) == ["r0", "r3", "r2", "r1"]
    # Without prefixes: 2.0, 3.0, 3.0, 3.8. The weight of the prefix alone put r0 first.
    assert order(REQUEST, shadows)[0] == "r3"
    assert order(REQUEST, shadows)[-1] == "r0"
    # 3 x 0.6 = 1.8 ties r0 with r3 at 3.8; one token more or less decides.
    assert order(replace(REQUEST, cached_tokens={"r0": 61}), shadows)[0] == "r0"
    assert order(replace(REQUEST, cached_tokens={"r0": 59}), shadows)[0] == "r3"


def test_equal_queues_score_one_however_long() -> None:
    long = replace(IDLE, waiting=9)
    assert order(REQUEST, replicas(replace(long, kv_usage=0.2), long)) == ["r1", "r0"]


def test_what_was_sent_since_the_last_word_does_not_count() -> None:
    shadows = replicas(replace(IDLE, kv_usage=0.1), IDLE)
    for ticket in range(1, 9):
        shadows[1].sent(ticket, REQUEST, 0.0, promised=False)
    assert order(REQUEST, shadows) == ["r1", "r0"]


def test_equals_are_drawn_at_random() -> None:
    shadows = replicas(IDLE, IDLE, IDLE)
    assert {order(REQUEST, shadows, seed)[0] for seed in range(50)} == {"r0", "r1", "r2"}


def test_a_replica_that_has_not_spoken_is_scored_for_its_prefix() -> None:
    shadows = replicas(None, replace(IDLE, kv_usage=1.0), IDLE)
    # 3 x 0.7 = 2.1 against 2 x 1 + 2 x 0 = 2.0 and 2 x 1 + 2 x 1 = 4.0.
    cached = replace(REQUEST, cached_tokens={"r0": 70})
    assert order(cached, shadows) == ["r2", "r0", "r1"]
    assert order(REQUEST, shadows) == ["r2", "r1", "r0"]


@st.composite
def shadows_and_request(draw: st.DrawFn) -> tuple[list[VirtualReplica], RoutedRequest]:
    states = draw(
        st.lists(
            st.none()
            | st.builds(
                lambda waiting, usage, backlog: replace(
                    IDLE, waiting=waiting, kv_usage=usage, backlog_tokens=backlog
                ),
                st.integers(0, 50),
                st.floats(0.0, 1.0),
                st.integers(0, 5_000),
            ),
            min_size=1,
            max_size=6,
        )
    )
    shadows = replicas(*states)
    cached = {shadow.name: draw(st.integers(0, 200)) for shadow in shadows if draw(st.booleans())}
    return shadows, replace(REQUEST, cached_tokens=cached)


@settings(max_examples=examples(60))
@given(shadows_and_request(), st.integers(0, 99), st.integers(0, 99))
def test_every_ranking_is_a_permutation_and_follows_its_seed(
    case: tuple[list[VirtualReplica], RoutedRequest], turn: int, seed: int
) -> None:
    shadows, request = case
    for rank in RANKS.values():
        first, second = (
            [r.name for r in rank(request, shadows, turn, random.Random(seed))] for _ in range(2)
        )
        assert first == second
        assert sorted(first) == sorted(shadow.name for shadow in shadows)
