# SPDX-License-Identifier: Apache-2.0
"""How long best effort has waited, and for whom something is kept."""

from __future__ import annotations

from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_slo.core.ordering.starvation_guard import StarvationGuard

AGEING_S, SHARE = 10.0, 0.1


def waiting(
    *, share: float = SHARE, keep_starved: bool = True, **since_s: float
) -> StarvationGuard:
    one = StarvationGuard(AGEING_S, share, keep_starved=keep_starved)
    one.since_s.update(since_s)
    return one


def test_who_waited_longest_is_the_elder_until_it_ends() -> None:
    one = waiting(young=4.0, old=0.0, older=-2.0)
    assert (one.starved, one.reserved_share(9.0), one.reserved_seats) == (None, 0.0, 0)
    one.choose_starved(9.0)
    assert (one.starved, one.reserved_share(9.0), one.reserved_seats) == ("older", SHARE, 1)
    one.served("older", 9.0)
    one.choose_starved(30.0)  # the others have waited longer by now
    assert one.starved == "older"
    assert one.must_begin("older", 9.5)
    assert not one.must_begin("old", 30.0)  # its turn has not come
    one.remove("older")
    assert (one.starved, one.reserved_share(30.0), one.reserved_seats) == (None, 0.0, 0)
    one.choose_starved(30.0)
    assert one.starved == "old"


def test_nobody_is_the_elder_before_it_has_waited_too_long() -> None:
    one = waiting(r=0.0)
    one.choose_starved(AGEING_S)
    assert one.starved is None
    assert not one.must_begin("r", AGEING_S)
    one.choose_starved(AGEING_S + 0.1)
    assert one.starved == "r"
    assert one.must_begin("r", AGEING_S + 0.1)


def test_a_request_that_comes_back_by_an_old_name_is_not_the_elder_by_it() -> None:
    one = waiting(r=0.0)
    one.choose_starved(20.0)
    one.remove("r")
    one.choose_starved(20.0)
    assert one.seen("r", 20.0) == 20.0
    assert one.starved is None
    assert not one.must_begin("r", 20.0)


def test_without_a_share_no_place_is_kept_either() -> None:
    one = waiting(share=0.0, r=0.0)
    one.choose_starved(20.0)
    assert (one.starved, one.reserved_share(20.0), one.reserved_seats) == ("r", 0.0, 0)


def test_where_an_order_chooses_the_share_is_nobodys() -> None:
    one = waiting(keep_starved=False, r=0.0, other=5.0)
    one.choose_starved(20.0)
    assert (one.starved, one.reserved_seats) == (None, 0)
    assert [one.reserved_share(now_s) for now_s in (10.0, 10.1)] == [0.0, SHARE]
    assert [one.must_begin(name, 10.1) for name in ("r", "other")] == [True, False]
    one.served("r", 12.0)
    assert [one.reserved_share(now_s) for now_s in (15.0, 15.1)] == [0.0, SHARE]


class Anybody(RuleBasedStateMachine):
    """Requests come, are served and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = StarvationGuard(AGEING_S, SHARE, keep_starved=True)
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
    def remove(self, name: int) -> None:
        self.waiting.remove(str(name))
        self.last.pop(name, None)
        if str(name) == self.chosen:
            self.chosen = None

    @rule(seconds=st.floats(0.0, 2.0 * AGEING_S))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def choose(self) -> None:
        self.waiting.choose_starved(self.now_s)
        if self.chosen is None and self.last:
            oldest_s = min(self.last.values())
            if self.now_s - oldest_s > AGEING_S:
                starved = self.waiting.starved
                assert starved is not None
                assert self.last[int(starved)] == oldest_s
                self.chosen = starved

    @invariant()
    def only_the_choice_changes_who_it_is(self) -> None:
        assert self.waiting.starved == self.chosen
        assert self.waiting.reserved_share(self.now_s) == (SHARE if self.chosen else 0.0)
        assert self.waiting.reserved_seats == (self.chosen is not None)

    @precondition(lambda self: self.last)
    @invariant()
    def one_at_a_time_must_begin(self) -> None:
        for name in self.last:
            must = self.waiting.must_begin(str(name), self.now_s)
            assert must == (str(name) == self.chosen)


TestAnybody = Anybody.TestCase
TestAnybody.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)


@given(work=st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_all_end_when_promises_leave_a_token_a_second(work: list[int]) -> None:
    """Whoever is not the starved loses to a promise all it had, in every step."""
    one = StarvationGuard(AGEING_S, SHARE, keep_starved=True)
    left = {str(name): tokens for name, tokens in enumerate(work)}
    now_s = 0.0
    for name in left:
        one.seen(name, now_s)
    while left:
        now_s += 1.0
        assert now_s <= AGEING_S + 2.0 + sum(work) + len(work)
        one.choose_starved(now_s)
        if one.reserved_share(now_s):
            assert one.starved is not None
            one.served(one.starved, now_s)
            left[one.starved] -= 1
            if not left[one.starved]:
                del left[one.starved]
                one.remove(one.starved)
