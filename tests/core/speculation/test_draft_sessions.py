# SPDX-License-Identifier: Apache-2.0
"""Both ends' books of what draft servers hold, through every order of rounds, losses, restarts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.speculation.draft_sessions import HeldPrefixes, SentPrefixes

ANY = 10**6


class Pair:
    """One verifier's book and its drafter's, with the messages between them."""

    def __init__(self, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self.connect()

    def connect(self) -> None:
        self.sent, self.held = SentPrefixes(self.max_sessions), HeldPrefixes(self.max_sessions)

    def round(self, prefixes: dict[str, list[int]], *, arrives: bool = True) -> dict[str, int]:
        """Ask for these; the number of each session. The drafter reports what it lost."""
        changes = {name: self.sent.change(name, prefix, ANY) for name, prefix in prefixes.items()}
        ended = self.sent.take_ended(ANY)
        if not arrives:
            self.sent.unsent(ended)
            return {}
        self.held.end(ended)
        numbers = {}
        for name, change in changes.items():
            assert change is not None
            numbers[name] = change.number
            if not self.held.change(change.number, change.keep, change.tokens):
                self.sent.lost([change.number])
        return numbers


tokens = st.lists(st.integers(0, 3), max_size=6)  # few values: prefixes often share their beginning
events = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["round", "unsent"]),
            st.dictionaries(st.sampled_from("abcde"), tokens.filter(bool), min_size=1, max_size=3),
        ),
        st.tuples(st.just("end"), st.sampled_from("abcde")),
        st.tuples(st.just("loses"), st.integers(0, 30)),
        st.tuples(st.just("restart"), st.none()),
    ),
    max_size=25,
)


@given(events, st.integers(3, 5))
def test_the_drafter_holds_what_it_is_asked_to_go_on_from(script: list, max_sessions: int) -> None:
    """A drafter that keeps its book never loses a session; one that forgets gets all tokens the
    next time but one. Numbers are never used again."""
    pair, used, forgot = Pair(max_sessions), set(), False
    for event, what in script:
        if event == "end":
            pair.sent.end(what)
        elif event == "loses":
            pair.held.end([what])
            forgot = True
        elif event == "restart":
            pair.connect()
            used, forgot = set(), False
        else:
            known = {name for name in what if name in pair.sent}
            numbers = pair.round(what, arrives=event == "round")
            fresh = {number for name, number in numbers.items() if name not in known}
            assert not fresh & used
            used |= set(numbers.values())
            for name, number in numbers.items():
                if number in pair.held:
                    assert pair.held.prefix(number) == what[name]
                else:
                    assert forgot and name not in pair.sent
            assert len(pair.held) <= max_sessions and len(pair.sent) <= max_sessions
    final = {name: [1, 2, 3] for name in "abc"}
    pair.round(final)
    numbers = pair.round(final)
    assert [pair.held.prefix(numbers[name]) for name in "abc"] == [[1, 2, 3]] * 3


@given(tokens, tokens)
def test_only_what_differs_is_sent(one: list[int], other: list[int]) -> None:
    sent = SentPrefixes(1)
    sent.change("a", one, ANY)
    change = sent.change("a", np.array(other, dtype=np.int32), ANY)
    assert change is not None
    assert one[: change.keep] + change.tokens == other
    longer = one[: change.keep + 1] == other[: change.keep + 1] and len(change.tokens) > 0
    assert not (longer and len(one) > change.keep), "one more could have been kept"
    assert all(type(token) is int for token in change.tokens), "or it could not be encoded"


def test_accepted_tokens_are_all_that_a_step_costs() -> None:
    rng = random.Random(0)
    prefix = [rng.randrange(1000) for _ in range(2000)]
    sent = SentPrefixes(4)
    first = sent.change("a", prefix, ANY)
    assert first is not None and first.keep == 0 and first.tokens == prefix
    second = sent.change("a", [*prefix, 7, 8, 9], ANY)
    assert second is not None and (second.keep, second.tokens) == (2000, [7, 8, 9])


def test_what_is_too_long_is_not_sent_and_changes_nothing() -> None:
    sent = SentPrefixes(4)
    assert sent.change("a", [1, 2, 3], 2) is None
    assert "a" not in sent
    first = sent.change("a", [1, 2, 3], 3)
    assert sent.change("a", [1, 2, 3, 4, 5], 1) is None
    again = sent.change("a", [1, 2, 3, 4, 5], 2)
    assert first is not None and again is not None
    assert (again.number, again.keep) == (first.number, 3)


def test_the_callers_array_may_change_afterwards() -> None:
    """vLLM keeps a request's tokens in one array that it writes to."""
    sent, tokens = SentPrefixes(1), np.array([1, 2, 3], dtype=np.int32)
    sent.change("a", tokens, ANY)
    tokens[1] = 9
    change = sent.change("a", tokens, ANY)
    assert change is not None and (change.keep, change.tokens) == (1, [9, 3])


def test_what_a_drafter_lost_is_sent_whole_under_a_new_number() -> None:
    sent = SentPrefixes(2)
    for name in ("a", "b"):
        sent.change(name, [1, 2], ANY)
    sent.lost([0, 17])
    change = sent.change("a", [1, 2], ANY)
    assert change is not None and (change.number, change.keep, change.tokens) == (2, 0, [1, 2])
    other = sent.change("b", [1, 2], ANY)
    assert other is not None and (other.number, other.keep, other.tokens) == (1, 2, [])
    assert sent.take_ended(ANY) == [], "it need not be told"


def test_the_session_asked_for_longest_ago_makes_room() -> None:
    sent = SentPrefixes(2)
    for name in ("a", "b", "a", "c"):
        sent.change(name, [1], ANY)
    assert "a" in sent and "c" in sent and "b" not in sent
    assert sent.ended and sent.take_ended(ANY) == [1]
    assert not sent.ended


def test_the_end_of_a_session_is_told_once_and_in_parts() -> None:
    sent = SentPrefixes(8)
    for name in "abcd":
        sent.change(name, [1], ANY)
        sent.end(name)
        sent.end(name)
    assert sent.take_ended(3) == [0, 1, 2]
    assert sent.take_ended(3) == [3]
    sent.unsent([3])
    assert sent.take_ended(3) == [3]


@pytest.mark.parametrize(
    ("number", "keep"), [(0, 3), (5, 1)], ids=["more than it holds", "of an unknown session"]
)
def test_a_drafter_that_cannot_keep_that_much_has_lost_it(number: int, keep: int) -> None:
    held = HeldPrefixes(2)
    assert held.change(0, 0, [1, 2])
    assert not held.change(number, keep, [9])
    assert number not in held


def test_a_drafter_holds_no_more_than_it_said() -> None:
    held = HeldPrefixes(2)
    assert held.change(0, 0, [1]) and held.change(1, 0, [2])
    assert not held.change(2, 0, [3])
    assert held.change(1, 1, [5]), "those it holds go on"
    held.end([0])
    assert held.change(2, 0, [3])
    held.clear()
    assert len(held) == 0


def test_what_was_handed_out_does_not_change() -> None:
    held = HeldPrefixes(2)
    held.change(0, 0, [1, 2, 3])
    given_out = held.prefix(0)
    held.change(0, 1, [9])
    assert given_out == [1, 2, 3]
    assert held.prefix(0) == [1, 9]
