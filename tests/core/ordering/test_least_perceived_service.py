# SPDX-License-Identifier: Apache-2.0
"""LAPS-SD: the paper's figure 1, equation 6 by hand, every order of few requests, properties."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from depth import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_slo.core.ordering.least_perceived_service import (
    Perception,
    ServiceOrder,
    ServiceQueues,
    ServiceView,
    TypicalRounds,
    execution_s,
)
from vllm_slo.core.types import BestEffortOrder

QUEUES = ServiceQueues(count=3, first_s=1.0, ratio=4.0)
LAPS = ServiceOrder("laps_sd", QUEUES, ageing_s=1e9)
POLICIES: tuple[BestEffortOrder, ...] = ("fcfs", "lp_sjf", "las", "laps_sd")

seconds = st.floats(0.0, 50.0)
views = st.builds(
    ServiceView,
    request_id=st.uuids().map(str),
    arrival=st.integers(0, 1000),
    waited_s=seconds,
    length=st.integers(1, 500),
    attained_s=seconds,
    remaining_s=st.none() | seconds,
    placed=st.booleans(),
    settled=st.booleans(),
    progress_s=seconds,
    kept_s=st.floats(0.0, 5.0),
    blocks=st.integers(0, 20),
)
crowds = st.lists(views, max_size=8, unique_by=lambda view: view.request_id)


def waiting(name: str, **known: float | bool | None) -> ServiceView:
    return ServiceView(name, float(name[1:]), **known)  # type: ignore[arg-type]


def mean_latency_ms(order: ServiceOrder, views: Sequence[ServiceView]) -> float:
    """One after the other, each as long as it remains."""
    now_s = total_s = 0.0
    for view in order.rank(views):
        assert view.remaining_s is not None
        now_s += view.remaining_s
        total_s += now_s
    return 1e3 * total_s / len(views)


# Figure 1 and equation 6.


def test_figure_1() -> None:
    """A token takes 10 ms to verify: of 10 tokens half of the candidates are accepted, of 5 one in
    ten, of 12 four in five."""
    views = [
        ServiceView(f"R{n}", n, length=length, remaining_s=0.01 * length / acceptance)
        for n, (length, acceptance) in enumerate([(10, 0.5), (5, 0.1), (12, 0.8)], start=1)
    ]
    assert mean_latency_ms(ServiceOrder("fcfs"), views) == pytest.approx(583.3, abs=0.1)
    assert mean_latency_ms(ServiceOrder("lp_sjf"), views) == pytest.approx(683.3, abs=0.1)
    best = min(
        sum((3 - place) * view.remaining_s for place, view in enumerate(order)) / 3
        for order in itertools.permutations(views)
        if all(view.remaining_s is not None for view in order)
    )
    laps = mean_latency_ms(ServiceOrder("laps_sd"), views)
    assert laps == pytest.approx(1e3 * best) == pytest.approx(450.0)


def test_equation_6_by_hand() -> None:
    """90 tokens, 4 drafts of which half are accepted: 3 tokens a round, so 30 rounds of 4 x 2 ms
    and 22 ms."""
    assert execution_s(90, 4, 0.5, 0.002, 0.022) == pytest.approx(30 * 0.030)
    assert execution_s(90, 0, 0.0, 0.002, 0.022) == pytest.approx(90 * 0.022)


@given(st.lists(st.floats(0.01, 20.0), min_size=1, max_size=6))
def test_no_order_of_known_requests_waits_less(remaining: list[float]) -> None:
    """Within a queue; queues are coarser than that only by what they do not tell apart."""
    views = [waiting(f"r{n}", remaining_s=left) for n, left in enumerate(remaining)]
    best = min(
        sum((len(order) - place) * left for place, left in enumerate(order))
        for order in itertools.permutations(remaining)
    )
    assert mean_latency_ms(LAPS, views) == pytest.approx(1e3 * best / len(views))


# Queues.


def test_thresholds_grow_by_a_ratio() -> None:
    assert [QUEUES.level(s) for s in (0.0, 1.0, 1.1, 4.0, 4.1, 16.1, 1e9)] == [0, 0, 1, 1, 2, 2, 2]


@given(seconds, seconds, st.integers(1, 8), st.floats(0.01, 5.0), st.floats(1.01, 8.0))
def test_more_service_is_never_in_a_higher_queue(
    one: float, other: float, count: int, first_s: float, ratio: float
) -> None:
    queues = ServiceQueues(count, first_s, ratio)
    levels = [queues.level(s) for s in sorted((one, other))]
    assert levels == sorted(levels) and 0 <= levels[0] <= levels[1] < count


def test_new_requests_come_first_as_they_arrived_then_by_attained_service() -> None:
    views = [
        waiting("r4", attained_s=0.0),
        waiting("r1", attained_s=5.0),
        waiting("r2", attained_s=2.0),
        waiting("r3", attained_s=0.5),
    ]
    assert [view.request_id for view in LAPS.rank(views)] == ["r3", "r4", "r2", "r1"]


def test_perceptible_ones_go_first_in_their_queue_the_shortest_at_the_front() -> None:
    views = [
        waiting("r1", attained_s=0.2),
        waiting("r2", attained_s=9.0, remaining_s=0.8),
        waiting("r3", attained_s=9.0, remaining_s=0.3),
        waiting("r4", attained_s=0.2, remaining_s=30.0),
    ]
    assert [view.request_id for view in LAPS.rank(views)] == ["r3", "r2", "r1", "r4"]


def test_least_attained_service_perceives_nothing() -> None:
    views = [waiting("r1", attained_s=9.0, remaining_s=0.1), waiting("r2", attained_s=0.5)]
    order = ServiceOrder("las", QUEUES, ageing_s=1e9)
    assert [view.request_id for view in order.rank(views)] == ["r2", "r1"]


# Perception.


def test_the_rate_is_believed_when_it_has_stood_still() -> None:
    """After rounds of 4 drafts with 4, 0, 2, 2, 2 accepted the rate of all is 1, 1/2, 1/2, 1/2,
    1/2: in three rounds it moved by nothing after the fourth."""
    perception = Perception(3, 0.05, TypicalRounds())
    for accepted in (4, 0, 2):
        perception.round(0.03, 4, accepted)
        assert perception.acceptance is None and perception.remaining_s(90) is None
    perception.round(0.03, 4, 2)
    assert perception.acceptance == pytest.approx(0.5)
    assert perception.remaining_s(90) == pytest.approx(0.9)
    assert perception.attained_s == perception.progress_s == pytest.approx(0.12)


def test_a_rate_once_believed_follows_what_happens() -> None:
    perception = Perception(2, 0.5, TypicalRounds())
    for accepted in (4, 4, 0, 0, 0, 0):
        perception.round(0.03, 4, accepted)
    assert perception.acceptance == pytest.approx((8 / 20 + 8 / 24) / 2)


def test_rounds_without_drafts_say_nothing_of_the_rate() -> None:
    perception = Perception(2, 0.05, TypicalRounds())
    perception.round(0.03, 4, 2)
    for _ in range(5):
        perception.round(0.02, 0, 0)
    assert perception.acceptance is None
    plain = Perception(2, 0.05, TypicalRounds())
    for _ in range(2):
        plain.round(0.02, 0, 0)
    assert plain.remaining_s(10) == pytest.approx(0.2)


def test_with_no_rounds_to_wait_for_the_typical_ones_are_believed_at_first() -> None:
    """Typical: of 4 drafts 2 are accepted, in 30 ms, so 3 tokens a round. Two such rounds count
    beside one of one's own in which 4 of 4 are accepted, in 45 ms: the rate is 8/12, and a round of
    4 drafts takes 35 ms."""
    typical = TypicalRounds()
    one = Perception(0, 0.2, typical)
    assert one.remaining_s(90) is None, "nobody has seen a round"
    for _ in range(TypicalRounds.MEMORY):
        typical.observe(0.03, 4, 2)
    assert one.acceptance == pytest.approx(0.5)
    assert one.remaining_s(90) == pytest.approx(0.9)
    one.place()
    assert one.settled
    assert one.shows_s == pytest.approx(3 * 0.03)
    one.round(0.045, 4, 4)
    assert one.acceptance == pytest.approx(8 / 12, rel=0.01)
    assert one.remaining_s(110) == pytest.approx(110 / (4 * 8 / 12 + 1) * 0.035, rel=0.01)


def test_one_round_without_drafts_does_not_make_a_request_a_long_one() -> None:
    typical = TypicalRounds()
    for _ in range(50):
        typical.observe(0.03, 4, 2)
    one = Perception(0, 0.2, typical)
    one.round(0.02, 0, 0)
    assert one.acceptance == pytest.approx(0.5, abs=0.01)
    assert one.remaining_s(90) == pytest.approx(0.9, rel=0.25)


def test_rounds_without_any_drafts_are_plain_decoding() -> None:
    one = Perception(0, 0.2, TypicalRounds())
    one.round(0.02, 0, 0)
    assert one.acceptance == 0.0 and one.remaining_s(10) == pytest.approx(0.2)


def test_what_is_typical_follows_the_newest_rounds_and_counts_requests_alike() -> None:
    typical = TypicalRounds()
    assert (typical.round_s, typical.drafted, typical.accepted) == (0.0, 0.0, 0.0)
    for _ in range(100):
        typical.observe(0.03, 4, 4)
    for _ in range(5 * TypicalRounds.MEMORY):
        typical.observe(0.02, 2, 1)
    assert (typical.accepted, typical.drafted) == pytest.approx((1.0, 2.0), rel=0.01)
    assert typical.round_s == pytest.approx(0.02, rel=0.01)
    typical = TypicalRounds()
    for rounds, accepted in ((1000, 0), (Perception.SHOWN, 4)):
        one = Perception(3, 0.2, typical)
        for _ in range(rounds):
            one.round(0.03, 4, accepted)
    assert typical.accepted == pytest.approx(2.0)


def test_a_place_begins_anew_and_reading_is_no_progress() -> None:
    perception = Perception(2, 0.05, TypicalRounds())
    perception.read(0.5)
    perception.round(0.02, 0, 0)
    assert (perception.attained_s, perception.progress_s) == pytest.approx((0.52, 0.02))
    perception.place()
    assert perception.progress_s == 0.0 and not perception.settled
    perception.round(0.02, 0, 0)
    perception.place()
    assert perception.settled


# Places.


def test_a_lower_queue_gives_way_to_a_newcomer() -> None:
    views = [waiting("r1", placed=True, attained_s=2.0, progress_s=2.0), waiting("r2")]
    assert LAPS.give_way(LAPS.rank(views), 0, 0) == ("r1",)
    assert LAPS.give_way(LAPS.rank(views), 1, 0) == ()


def test_nobody_gives_way_before_the_switch_has_paid() -> None:
    views = [waiting("r1", placed=True, attained_s=2.0, progress_s=0.2, kept_s=0.3), waiting("r2")]
    assert LAPS.give_way(LAPS.rank(views), 0, 0) == ()


def test_a_settled_request_keeps_its_place() -> None:
    known = waiting("r1", placed=True, attained_s=2.0, progress_s=2.0, remaining_s=30.0)
    assert LAPS.give_way(LAPS.rank([known, waiting("r2")]), 0, 0) == ("r1",)
    settled = known._replace(settled=True)
    assert LAPS.give_way(LAPS.rank([settled, waiting("r2")]), 0, 0) == ()
    bold = replace(LAPS, preempt_known=True)
    assert bold.give_way(bold.rank([settled, waiting("r2")]), 0, 0) == ("r1",)
    assert bold.give_way(bold.rank([settled, waiting("r2", remaining_s=29.0)]), 0, 0) == ("r1",)
    costly = settled._replace(kept_s=2.0)
    assert bold.give_way(bold.rank([costly, waiting("r2", remaining_s=29.0)]), 0, 0) == ()


def test_no_place_is_taken_that_would_not_be_enough() -> None:
    views = [
        waiting("r1", placed=True, attained_s=2.0, progress_s=2.0, blocks=3),
        waiting("r2", placed=True, attained_s=9.0, progress_s=2.0, blocks=4),
        waiting("r3", blocks=9),
    ]
    assert LAPS.give_way(LAPS.rank(views), 1, 1) == ()
    assert LAPS.give_way(LAPS.rank(views), 1, 2) == ("r2", "r1")


def begin(
    ranked: Sequence[ServiceView], chosen: Sequence[ServiceView], places: int, free: int
) -> list[ServiceView]:
    """The waiting requests that begin in free places and in those of the ``chosen``."""
    begun = []
    places, free = places + len(chosen), free + sum(view.blocks for view in chosen)
    for view in (view for view in ranked if not view.placed):
        if places < 1 or view.blocks > free:
            break
        begun.append(view)
        places, free = places - 1, free - view.blocks
    return begun


@given(crowds, st.sampled_from(POLICIES), st.integers(0, 3), st.integers(0, 30), seconds)
def test_whose_place_is_taken(
    crowd: list[ServiceView], policy: BestEffortOrder, places: int, free: int, ageing_s: float
) -> None:
    order = ServiceOrder(policy, QUEUES, ageing_s)
    ranked = order.rank(crowd)
    assert sorted(ranked) == sorted(crowd)
    by_id = {view.request_id: view for view in crowd}
    chosen = [by_id[name] for name in order.give_way(ranked, places, free)]
    assert len(set(chosen)) == len(chosen)
    assert not (chosen and policy in ("fcfs", "lp_sjf"))
    for view in chosen:
        assert view.placed and view.progress_s >= view.kept_s
        assert not (view.settled and policy == "laps_sd")
    begun = begin(ranked, chosen, places, free)
    urgent = [v for v in begun if all(ranked.index(v) < ranked.index(c) for c in chosen)]
    assert not chosen or urgent


ONE_FREE_PLACE = [
    ServiceView("a", 0, remaining_s=2.0, placed=True, progress_s=4.0, kept_s=4.0),
    ServiceView("b", 0),
    ServiceView("c", 0, remaining_s=0.0),
]
"""``c`` begins in the free place. ``b`` is in a higher queue than ``a`` and begins in its place."""


def may_take(waiting: ServiceView, placed: ServiceView) -> bool:
    """Whether a place may go from one request to another."""
    if waiting.remaining_s is None:
        return LAPS.level(waiting) < LAPS.level(placed)
    if placed.remaining_s is None:
        return LAPS.level(waiting) <= LAPS.level(placed)
    return waiting.remaining_s + placed.kept_s < placed.remaining_s


@given(crowds, st.integers(0, 3), st.integers(0, 30))
@example(ONE_FREE_PLACE, 1, 0)
def test_a_place_goes_to_a_higher_queue_or_to_one_that_is_known(
    crowd: list[ServiceView], places: int, free: int
) -> None:
    ranked = LAPS.rank(crowd)
    names = LAPS.give_way(ranked, places, free)
    chosen = [view for view in ranked if view.request_id in names]
    begun = begin(ranked, chosen, places, free)
    assert all(any(may_take(waiting, placed) for waiting in begun) for placed in chosen)
    if not places and not any(view.blocks for view in begun):
        assert len(begun) == len(chosen), "every place that is taken is used"


def test_a_free_place_is_taken_before_one_that_is_held() -> None:
    assert LAPS.give_way(LAPS.rank(ONE_FREE_PLACE), 1, 0) == ("a",)
    assert LAPS.give_way(LAPS.rank(ONE_FREE_PLACE), 2, 0) == ()
    assert LAPS.give_way(LAPS.rank(ONE_FREE_PLACE), 0, 0) == ()  # c is not shorter by 4 s


# Nothing starves.


def serve(order: ServiceOrder, end_s: float) -> list[tuple[str, float]]:
    """One place, a step a tenth of a second. A request of 5 s, and forever one of 0.1 s as soon as
    the last one has ended; returns (request, when it ended)."""
    now_s, ended, made = 0.0, [], 1
    left = {"r0": 5.0, "r1": 0.1}
    known = {name: Perception(2, 0.05, TypicalRounds()) for name in left}
    waits = dict.fromkeys(left, 0.0)
    placed: str | None = None
    turns: dict[str, float] = {}
    while now_s < end_s:
        crowd = [
            ServiceView(
                *(name, float(name[1:]), now_s - waits[name], 1.0, known[name].attained_s, None),
                *(placed == name, known[name].settled, known[name].progress_s),
                max(0.2, turns.get(name, 0.0)),
            )
            for name in left
        ]
        turns |= {v.request_id: order.turn_s(v) for v in crowd if not v.placed}
        ranked = order.rank(crowd)
        way = order.give_way(ranked, int(placed is None), 0)
        if placed is None or way:
            new = next(v.request_id for v in ranked if not v.placed)
            waits.update(dict.fromkeys(way, now_s))
            placed = new
            known[new].place()
        now_s += 0.1
        known[placed].round(0.1, 4, made % 3)
        left[placed] -= 0.1
        waits[placed] = now_s
        if left[placed] < 1e-9:
            ended.append((placed, now_s))
            for gone in (left, known, waits):
                gone.pop(placed)  # type: ignore[attr-defined]
            placed = None
            made += 1
            name = f"r{made}"
            left[name], known[name], waits[name] = 0.1, Perception(2, 0.05, TypicalRounds()), now_s
    return ended


@settings(deadline=None, max_examples=examples(20))
@given(st.sampled_from(["las", "laps_sd"]), st.floats(0.5, 3.0))
def test_a_long_request_ends_though_short_ones_never_cease(
    policy: BestEffortOrder, ageing_s: float
) -> None:
    ended = dict(serve(ServiceOrder(policy, QUEUES, ageing_s), 400.0))
    assert "r0" in ended
    starved = dict(serve(ServiceOrder(policy, QUEUES, 1e9), 100.0))
    assert "r0" not in starved
