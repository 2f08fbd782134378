# SPDX-License-Identifier: Apache-2.0
"""When a draft server is given up, and when it is asked again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.speculation.drafter_health import (
    FAULTS,
    IGNORED_S,
    LONGEST_REST_S,
    MISSES,
    SHORTEST_REST_S,
    Attendance,
    Conduct,
)

STEP_S = 0.05


def missing(times: int) -> Attendance:
    attendance = Attendance()
    for _ in range(times):
        attendance.missed(0.0)
    return attendance


def test_a_few_missed_deadlines_in_a_row_suspend() -> None:
    assert not missing(MISSES - 1).suspended
    assert missing(MISSES).suspended
    attendance = missing(MISSES - 1)
    attendance.answered()
    for _ in range(MISSES - 1):
        attendance.missed(0.0)
    assert not attendance.suspended, "not in a row"


def test_a_sign_of_life_ends_the_rest_when_it_is_over() -> None:
    attendance = missing(MISSES)
    attendance.lives()
    assert not attendance.rested(SHORTEST_REST_S - 0.01)
    assert attendance.suspended
    assert not attendance.rested(SHORTEST_REST_S)
    assert not attendance.suspended


def test_who_is_silent_is_called_and_comes_back_at_once() -> None:
    attendance = missing(MISSES)
    assert attendance.rested(SHORTEST_REST_S), "time for a call"
    assert not attendance.rested(SHORTEST_REST_S), "one is enough"
    attendance.lives()
    attendance.rested(SHORTEST_REST_S + 0.001)
    assert not attendance.suspended


def test_a_call_answered_long_ago_is_no_sign_of_life() -> None:
    attendance = missing(MISSES)
    attendance.rested(1.0)
    attendance.lives()
    attendance.rested(1.0)
    attendance.missed(1.0)
    attendance.lives()
    attendance.rested(1.1)
    assert attendance.suspended, "it has to rest first"


def test_one_miss_after_a_rest_is_enough_and_an_answer_wipes_the_slate() -> None:
    attendance = missing(MISSES)
    attendance.lives()
    attendance.rested(1.0)
    attendance.missed(1.0)
    assert attendance.suspended
    attendance.lives()
    attendance.rested(9.0)
    attendance.answered()
    attendance.missed(9.0)
    assert not attendance.suspended


def test_calls_become_rare() -> None:
    attendance = missing(MISSES)
    calls = [step * STEP_S for step in range(1200) if attendance.rested(step * STEP_S)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(calls)]
    assert gaps[0] == pytest.approx(2 * SHORTEST_REST_S, abs=2 * STEP_S)
    assert gaps[-1] == pytest.approx(LONGEST_REST_S, abs=2 * STEP_S)
    assert all(later >= earlier - 2 * STEP_S for earlier, later in itertools.pairwise(gaps))


def test_who_is_late_for_ever_costs_one_deadline_in_a_while() -> None:
    """Its late answers are signs of life, and yet hardly anybody waits for it."""
    attendance, waited = Attendance(), 0
    for step in range(1200):
        attendance.rested(step * STEP_S)
        if not attendance.suspended:
            waited += 1
            attendance.missed(step * STEP_S)
            attendance.lives()
    assert waited <= MISSES + 6 + 60 / LONGEST_REST_S


@given(st.lists(st.sampled_from(["miss", "late", "answer", "wait", "call"]), max_size=60))
def test_nobody_alive_stays_suspended(script: list[str]) -> None:
    """Whatever came before, a drafter that lives is asked again after the longest rest."""
    attendance, now_s = Attendance(), 0.0
    for event in script:
        now_s += 1.0 if event == "wait" else 0.01
        if attendance.rested(now_s) and event == "call":
            attendance.lives()
        elif event == "miss" and not attendance.suspended:
            attendance.missed(now_s)
        elif event == "answer" and not attendance.suspended:
            attendance.answered()
        elif event == "late":
            attendance.lives()
    attendance.lives()
    attendance.rested(now_s + LONGEST_REST_S)
    assert not attendance.suspended


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30))
def test_a_link_is_never_thought_faster_than_its_last_answer(seconds: list[float]) -> None:
    attendance = Attendance()
    for took_s in seconds:
        attendance.travelled(took_s)
        assert took_s <= attendance.link_s <= max(seconds)
    for _ in range(60):
        attendance.travelled(0.01)
    assert attendance.link_s == pytest.approx(0.01, abs=1e-3)


def test_a_late_answer_is_believed_by_and_by() -> None:
    """It may have lain about for long before it was found."""
    attendance = Attendance()
    found = []
    for _ in range(4):
        attendance.overdue(0.3, 0.2)
        found.append(attendance.link_s)
    assert found == pytest.approx([0.05, 0.1, 0.2, 0.3])


def test_who_sends_nonsense_is_ignored_for_a_while() -> None:
    conduct = Conduct()
    assert [conduct.bad(5.0) for _ in range(FAULTS)] == [False] * (FAULTS - 1) + [True]
    assert conduct.ignored(5.0 + IGNORED_S - 0.01)
    assert not conduct.ignored(5.0 + IGNORED_S)
    assert not conduct.bad(5.0 + IGNORED_S), "and then starts anew"


def test_good_answers_make_up_for_bad_ones() -> None:
    conduct = Conduct()
    for _ in range(3 * FAULTS):
        assert not conduct.bad(0.0)
        conduct.good()
