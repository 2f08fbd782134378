# SPDX-License-Identifier: Apache-2.0
"""The shadow states of a Serve deployment's replicas, in one process that routes."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from vllm_slo import SLO
from vllm_slo.config.sections import RoutingConfig
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_stream import StateEncoder
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand
from vllm_slo.router.body_reader import Asked
from vllm_slo.router.prompts import Prompt
from vllm_slo.router.serve_shadows import ACCOUNTED_AFTER_S, ServeShadows
from vllm_slo.wire.serve_stats import ServeStats

NOW_S = 1_000.0
MODEL = StepTimeModel(((0.001, 0.0, 0.0), (0.0001, 0.0, 0.0)), max_tokens=1000)
IDLE = ReplicaState(
    MODEL,
    free_blocks=1_000,
    total_blocks=1_000,
    block_sizes=(16,),
    seats=3,
    max_step_tokens=512,
    max_model_len=4_096,
)
FULL = replace(IDLE, seats=0)
BUSY = replace(IDLE, backlog_tokens=5_000)
EASY = Asked(SLO(ttft_ms=60_000, tpot_ms=5_000), Prompt(tokens=10), 10)
PLAIN = Asked(None, Prompt(tokens=10), 10)
CHUNKS = (b"a", b"b")
SESSION = replace(EASY, prompt=Prompt(tokens=200, chunks=CHUNKS, is_ids=True))


def stats(state: ReplicaState | None, taken_s: float = NOW_S, asked_s: float = NOW_S) -> Any:
    line = None if state is None else StateEncoder().line(state).decode()
    return ServeStats(asked_s, taken_s, line).to_stats()


def shadows(turn: int = 0, **states: ReplicaState) -> ServeShadows:
    found = ServeShadows(RoutingConfig(), Random(0))
    found._turn = turn
    for name, state in states.items():
        found.hear(name, stats(state))
    return found


def first(found: ServeShadows, call: str, asked: Asked = EASY, now_s: float = NOW_S) -> str:
    """Where a new request goes; the replicas are a and b."""
    (one,), *_ = found.ranks((call, 1), asked, now_s, ["a", "b"], now_s)
    return one


@pytest.mark.parametrize("turn", [0, 1])
def test_a_request_goes_to_the_replica_that_can_promise(turn: int) -> None:
    found = shadows(turn, a=FULL, b=BUSY)
    assert found.ranks(("1", 1), EASY, NOW_S, ["a", "b"], NOW_S) == [["b"], ["a"], []]
    assert first(found, "2", PLAIN) == "a"  # the queue is shorter there


def test_if_nobody_can_promise_it_goes_where_the_queue_is_shortest() -> None:
    found = shadows(a=replace(FULL, backlog_tokens=5_000), b=FULL)
    decline = replace(EASY, slo=SLO(ttft_ms=60_000, on_unattainable="decline"))
    assert first(found, "1") == first(found, "2", decline) == "b"


def test_what_was_sent_counts_until_a_state_accounts_for_it() -> None:
    found = shadows(a=IDLE, b=FULL)
    assert [first(found, str(n)) for n in range(3)] == ["a"] * 3
    # All three places of a are taken, by this process alone. b has the shorter queue.
    assert first(found, "3") == "b"
    early = NOW_S + ACCOUNTED_AFTER_S / 2
    found.hear("a", stats(replace(IDLE, seats=2), early, early))
    assert first(found, "3", now_s=early) == "b"
    late = NOW_S + ACCOUNTED_AFTER_S * 2
    found.hear("a", stats(replace(IDLE, seats=1), late, late))
    assert first(found, "3", now_s=late) == "a"
    assert first(found, "4", now_s=late) == "b"


def test_what_ended_does_not_count() -> None:
    found = shadows(a=IDLE, b=FULL)
    assert [first(found, str(n)) for n in range(4)] == ["a", "a", "a", "b"]
    found.ended(("1", 1))
    found.ended(("1", 1))  # Serve may tell it twice
    assert [first(found, "4"), first(found, "5")] == ["a", "b"]


def test_calls_of_one_request_count_each() -> None:
    found = shadows(a=IDLE, b=FULL)
    targets = [found.ranks(("same", n), EASY, NOW_S, ["a", "b"], NOW_S)[0] for n in range(4)]
    assert targets == [["a"], ["a"], ["a"], ["b"]]
    for left in (2, 1, 0, 0):
        found.completed("same", "a")
        assert found._shadows["a"].virtual.outstanding == left
    found.completed("other", "b")
    assert found._shadows["b"].virtual.outstanding == 1


def test_a_request_that_is_placed_again_counts_once() -> None:
    found = shadows(a=IDLE, b=FULL)
    assert [first(found, "same") for _ in range(6)] == ["a"] * 6


def test_a_request_counts_where_it_was_taken() -> None:
    found = shadows(a=IDLE, b=replace(IDLE, backlog_tokens=9_999))
    assert first(found, "1", PLAIN) == "a"
    found.accepted(("1", 1), "b", NOW_S)
    assert found._shadows["a"].virtual.outstanding == 0
    assert found._shadows["b"].virtual.outstanding == 1
    # It came there later than it was sent: a state from between does not have it.
    found.accepted(("1", 1), "b", NOW_S + 1.0)
    between = NOW_S + 1.0 + ACCOUNTED_AFTER_S / 2
    found.hear("b", stats(replace(BUSY, running=1), between, between))
    assert found._shadows["b"].virtual.outstanding == 1
    found.accepted(("unknown", 1), "b", NOW_S)
    assert found._shadows["b"].virtual.outstanding == 1


def test_a_session_returns_to_the_replica_that_has_its_beginning() -> None:
    found = shadows(a=IDLE, b=IDLE)
    assert first(found, "1", SESSION) == "b"  # a had its turn before
    found.accepted(("1", 1), "b", NOW_S)
    # Then it is full.
    assert [first(found, str(n), SESSION) for n in range(2, 6)] == ["b", "b", "a", "a"]


def test_promises_of_other_processes_are_in_the_state() -> None:
    slow = Demand("x", 59.0, 590_000, 5.0, 1)  # 59 seconds of prompts, due then
    found = shadows(a=replace(IDLE, committed=(slow,)), b=FULL)
    assert first(found, "1") == "b"


def test_without_fresh_states_two_replicas_are_taken_at_random() -> None:
    names = ["a", "b", "c"]
    for told in ({}, stats(IDLE, asked_s=NOW_S - 2.1), {"vllm_slo": "?"}, {"another": 1}):
        found = ServeShadows(RoutingConfig(), Random(0))
        for name in names:
            found.hear(name, told)
        pairs = set()
        for n in range(50):
            pair, rest = found.ranks((str(n), 1), EASY, NOW_S, names, NOW_S)
            assert sorted([*pair, *rest]) == names and len(pair) == 2
            pairs.add(frozenset(pair))
        assert len(pairs) == 3


def test_a_silent_replica_comes_last() -> None:
    found = shadows(a=IDLE, b=FULL)
    found.hear("c", stats(IDLE, asked_s=NOW_S - 60))
    assert found.ranks(("1", 1), EASY, NOW_S, ["c", "b", "a"], NOW_S) == [["a"], ["b"], ["c"]]


def test_an_idle_replica_that_is_still_asked_is_fresh() -> None:
    found = shadows(a=FULL, b=IDLE)
    later = NOW_S + 600.0
    for name, state in (("a", FULL), ("b", IDLE)):
        found.hear(name, stats(state, NOW_S, later))
    assert first(found, "1", now_s=later) == "b"


def test_a_lost_request_is_not_counted_for_ever_at_an_idle_replica() -> None:
    found = shadows(a=IDLE, b=FULL)
    assert [first(found, str(n)) for n in range(4)] == ["a", "a", "a", "b"]
    later = NOW_S + 10.0
    found.hear("a", stats(IDLE, NOW_S, later))  # it was asked again, and has no newer state
    found.hear("b", stats(FULL, NOW_S, later))
    assert first(found, "4", now_s=later) == "a"


def test_a_new_replica_without_a_state_gets_requests() -> None:
    found = ServeShadows(RoutingConfig(), Random(0))
    found.hear("a", stats(BUSY))
    found.hear("b", stats(None))
    assert first(found, "1") == "a"
    assert first(found, "2", PLAIN) == "b"


def test_a_state_that_cannot_be_read_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    found = shadows(a=IDLE, b=FULL)
    for n in range(3):
        moment = NOW_S + n
        found.hear("a", ServeStats(moment, moment + 0.1, "no state").to_stats())
    unreadable = '{"n":0,"whole":true,"age_s":0,"state":{"model":7}}'
    found.hear("c", ServeStats(NOW_S, NOW_S, unreadable).to_stats())
    assert found.ranks(("1", 1), EASY, NOW_S, ["a", "b", "c"], NOW_S) == [["b"], [], ["a", "c"]]
    assert [record.args[0] for record in caplog.records] == ["a", "c"]  # type: ignore[index]
    found.hear("a", stats(IDLE, NOW_S + 5, NOW_S + 5))
    assert first(found, "2", now_s=NOW_S + 5) == "a"


def test_a_replica_that_left_is_forgotten() -> None:
    found = shadows(a=IDLE, b=FULL)
    assert first(found, "1") == "a"
    found.keep(["b"])
    found.accepted(("1", 1), "a", NOW_S)
    found.ended(("1", 1))
    assert set(found._shadows) == {"b"} and not found._sent
    assert found.ranks(("2", 1), EASY, NOW_S, ["b"], NOW_S) == [["b"], [], []]


def test_other_policies_ask_for_no_promise() -> None:
    found = ServeShadows(RoutingConfig(policy="least_loaded"), Random(0))
    found.hear("a", stats(BUSY))
    found.hear("b", stats(FULL))
    assert first(found, "1") == "b"
