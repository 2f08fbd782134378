# SPDX-License-Identifier: Apache-2.0
"""How long best effort has waited, and for whom something is kept."""

from __future__ import annotations

from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_slo.core.waiting import Waiting

AGEING_S, SHARE = 10.0, 0.1


def waiting(*, share: float = SHARE, elders: bool = True, **since_s: float) -> Waiting:
    one = Waiting(AGEING_S, share, elders=elders)
    one.since_s.update(since_s)
    return one


def test_who_waited_longest_is_the_elder_until_it_ends() -> None:
    one = waiting(young=4.0, old=0.0, older=-2.0)
    assert (one.elder, one.kept_share(9.0), one.kept_seats) == (None, 0.0, 0)
    one.choose_elder(9.0)
    assert (one.elder, one.kept_share(9.0), one.kept_seats) == ("older", SHARE, 1)
    one.served("older", 9.0)
    one.choose_elder(30.0)  # the others have waited longer by now
    assert one.elder == "older"
    assert one.is_aged("older", 9.5)
    one.gone("older")
    assert (one.elder, one.kept_share(30.0), one.kept_seats) == (None, 0.0, 0)
    one.choose_elder(30.0)
    assert one.elder == "old"


def test_nobody_is_the_elder_before_it_has_waited_too_long() -> None:
    one = waiting(r=0.0)
    one.choose_elder(AGEING_S)
    assert one.elder is None
    assert not one.is_aged("r", AGEING_S)
    one.choose_elder(AGEING_S + 0.1)
    assert one.elder == "r"


def test_a_request_that_comes_back_by_an_old_name_is_not_the_elder_by_it() -> None:
    one = waiting(r=0.0)
    one.choose_elder(20.0)
    one.gone("r")
    one.choose_elder(20.0)
    assert one.seen("r", 20.0) == 20.0
    assert one.elder is None
    assert not one.is_aged("r", 20.0)


def test_without_a_share_no_place_is_kept_either() -> None:
    one = waiting(share=0.0, r=0.0)
    one.choose_elder(20.0)
    assert (one.elder, one.kept_share(20.0), one.kept_seats) == ("r", 0.0, 0)


def test_where_an_order_chooses_the_share_is_nobodys() -> None:
    one = waiting(elders=False, r=0.0, other=5.0)
    one.choose_elder(20.0)
    assert (one.elder, one.kept_seats) == (None, 0)
    assert [one.kept_share(now_s) for now_s in (10.0, 10.1)] == [0.0, SHARE]
    one.served("r", 12.0)
    assert [one.kept_share(now_s) for now_s in (15.0, 15.1)] == [0.0, SHARE]


class Anybody(RuleBasedStateMachine):
    """Requests come, are served and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = Waiting(AGEING_S, SHARE, elders=True)
        self.now_s = 0.0
        self.last: dict[int, float] = {}
        self.chosen: str | None = None

    @rule(name=st.integers(0, 5))
    def looked_at(self, name: int) -> None:
        assert self.waiting.seen(str(name), self.now_s) == self.last.setdefault(name, self.now_s)

    @rule(name=st.integers(0, 5))
    def served(self, name: int) -> None:
        self.waiting.served(str(name), self.now_s)
        self.last[name] = self.now_s

    @rule(name=st.integers(0, 5))
    def gone(self, name: int) -> None:
        self.waiting.gone(str(name))
        self.last.pop(name, None)
        if str(name) == self.chosen:
            self.chosen = None

    @rule(seconds=st.floats(0.0, 2.0 * AGEING_S))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def choose(self) -> None:
        self.waiting.choose_elder(self.now_s)
        if self.chosen is None and self.last:
            oldest_s = min(self.last.values())
            if self.now_s - oldest_s > AGEING_S:
                elder = self.waiting.elder
                assert elder is not None
                assert self.last[int(elder)] == oldest_s
                self.chosen = elder

    @invariant()
    def only_the_choice_changes_who_it_is(self) -> None:
        assert self.waiting.elder == self.chosen
        assert self.waiting.kept_share(self.now_s) == (SHARE if self.chosen else 0.0)
        assert self.waiting.kept_seats == (self.chosen is not None)

    @precondition(lambda self: self.last)
    @invariant()
    def ages_are_those_of_the_last_tokens(self) -> None:
        for name, since_s in self.last.items():
            aged = self.now_s - since_s > AGEING_S or str(name) == self.chosen
            assert self.waiting.is_aged(str(name), self.now_s) == aged


TestAnybody = Anybody.TestCase
TestAnybody.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)


@given(work=st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_all_end_when_promises_leave_a_token_a_second(work: list[int]) -> None:
    """Whoever is not the elder loses to a promise all it had, in every step."""
    one = Waiting(AGEING_S, SHARE, elders=True)
    left = {str(name): tokens for name, tokens in enumerate(work)}
    now_s = 0.0
    for name in left:
        one.seen(name, now_s)
    while left:
        now_s += 1.0
        assert now_s <= AGEING_S + 2.0 + sum(work) + len(work)
        one.choose_elder(now_s)
        if one.kept_share(now_s):
            assert one.elder is not None
            one.served(one.elder, now_s)
            left[one.elder] -= 1
            if not left[one.elder]:
                del left[one.elder]
                one.gone(one.elder)
