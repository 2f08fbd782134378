# SPDX-License-Identifier: Apache-2.0
import math
import random
from dataclasses import replace

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_slo.core.admission.program import Capacity, plan_admission
from vllm_slo.core.routing.policy import (
    RANKS,
    Route,
    least_loaded,
    power_of_two,
    prefix_first,
    round_robin,
    route,
)
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.virtual_replica import (
    LOST_AFTER_S,
    STALE_S,
    UNLISTED_AFTER_S,
    RoutedRequest,
    VirtualReplica,
)
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand

SIX_A_UNIT = StepTimeModel(((0.0, 0.0, 0.0), (1 / 6, 0.0, 0.0)), max_tokens=1000)
"""The engine of SLOs-Serve's figure 3: six tokens in a unit of time."""

IDLE = ReplicaState(
    SIX_A_UNIT,
    free_blocks=1_000,
    total_blocks=1_000,
    block_sizes=(16,),
    seats=100,
    max_step_tokens=1_000,
    max_model_len=1_000,
)
ASKS = RoutedRequest(6, 6, deadline_s=6.0, tpot_s=1.0, wants_promise=True)


def replicas(*states: ReplicaState) -> list[VirtualReplica]:
    found = []
    for n, state in enumerate(states):
        one = VirtualReplica(f"r{n}")
        one.update(state, 0.0)
        found.append(one)
    return found


def busy(count: int) -> ReplicaState:
    """An engine that promised ``count`` of figure 3's requests; it could take six in all."""
    return replace(IDLE, decoding={1.0: count}, running=count)


def ask(request: RoutedRequest, shadows: list[VirtualReplica], **options) -> Route:
    return route(request, shadows, options.pop("now_s", 0.0), rng=random.Random(0), **options)


# The paper's example: figure 3's burst, figure 7's way of a request.


def test_figure_3_and_7_a_burst_spreads_until_nobody_can_promise() -> None:
    shadows = replicas(busy(3), busy(3))
    targets = []
    for n in range(8):
        found = ask(ASKS, shadows, turn=0)
        if found.promised:
            next(d for d in shadows if d.name == found.target).sent(n + 1, ASKS, 0.0, promised=True)
        targets.append((found.target, found.promised, found.hops))
    # Figure 3: three of four new requests fit beside three running ones.
    assert targets[:3] == [("r0", True, 1)] * 3
    assert targets[3:6] == [("r1", True, 2)] * 3
    assert {(promised, hops) for _, promised, hops in targets[6:]} == {(False, 2)}


def test_the_way_begins_with_the_replica_whose_turn_it_is() -> None:
    shadows = replicas(IDLE, IDLE, IDLE)
    assert [ask(ASKS, shadows, turn=n).target for n in range(4)] == ["r0", "r1", "r2", "r0"]
    assert ask(ASKS, shadows, turn=1).left == ("r2", "r0")


def test_a_request_passes_a_replica_that_cannot_keep_its_objective() -> None:
    shadows = replicas(busy(6), IDLE)
    found = ask(ASKS, shadows, turn=0)
    assert (found.target, found.promised, found.hops) == ("r1", True, 2)
    relaxed = replace(ASKS, tpot_s=float("inf"), deadline_s=60.0)
    assert ask(relaxed, replicas(busy(5), IDLE), turn=0).target == "r0"


@pytest.mark.parametrize(
    ("backup", "declines", "target", "acted"),
    [
        ("as_asked", False, "r2", "best_effort"),
        ("as_asked", True, None, "decline"),
        ("best_effort", True, "r2", "best_effort"),
        ("decline", False, None, "decline"),
    ],
)
def test_at_the_hop_limit_the_backup_acts(backup, declines, target, acted) -> None:
    shadows = replicas(busy(6), busy(6), IDLE)
    found = ask(replace(ASKS, declines=declines), shadows, max_hops=2, backup=backup)
    assert (found.target, found.backup, found.hops, found.promised) == (target, acted, 2, False)
    assert found.reason == "decode"
    assert found.retry_after_s > 0
    one_more = ask(replace(ASKS, declines=declines), shadows, max_hops=3, backup=backup)
    assert (one_more.target, one_more.promised, one_more.hops) == ("r2", True, 3)


def test_hops_made_before_count() -> None:
    shadows = replicas(IDLE, IDLE)
    assert ask(ASKS, shadows, max_hops=3, already_asked=2).hops == 3
    spent = ask(ASKS, shadows, max_hops=3, already_asked=3)
    assert (spent.promised, spent.backup, spent.hops) == (False, "best_effort", 3)


def test_nobody_there() -> None:
    assert ask(ASKS, []) == Route(None)


def test_retry_after_is_the_soonest_of_those_asked() -> None:
    late, soon = (replace(busy(6), finish_interval_s=wait_s) for wait_s in (9.0, 4.0))
    found = ask(replace(ASKS, declines=True), replicas(late, soon))
    assert found.retry_after_s == 4.0
    assert ask(replace(ASKS, declines=True), replicas(late, soon), max_hops=1).retry_after_s == 9.0


# Against an oracle that shares no code with the shadow.


def random_state(rng: random.Random) -> ReplicaState:
    step_s = rng.choice([0.0, 0.05, 0.2])
    return ReplicaState(
        StepTimeModel(((0.0, 0.0, step_s), (rng.uniform(0.005, 0.1), 0.0, 0.01)), kv_s=1e-6),
        start_s=rng.choice([0.0, 0.1]),
        committed=tuple(
            Demand(f"c{n}", rng.uniform(0.2, 8), rng.randint(1, 60), rng.choice([0.5, 1.0]), 2)
            for n in range(rng.randint(0, 3))
        ),
        decoding={tpot: rng.randint(1, 4) for tpot in (0.5, 1.0) if rng.random() < 0.5},
        decoding_context=rng.randint(0, 500),
        free_blocks=rng.choice([3, 50]),
        total_blocks=60,
        block_sizes=(16,),
        seats=rng.choice([0, 1, 10]),
        max_step_tokens=rng.choice([16, 1000]),
        max_model_len=400,
        lengths={"chat": (30, 2, 5, 8, 12, 18, 25, 30, 40)} if rng.random() < 0.5 else {},
    )


def random_request(rng: random.Random) -> RoutedRequest:
    return RoutedRequest(
        rng.randint(1, 120),
        rng.choice([None, 8, 64]),
        deadline_s=rng.uniform(0.05, 8.0),
        tpot_s=rng.choice([0.3, 0.5, 1.0, float("inf")]),
        wants_promise=True,
        slo_class=rng.choice(["chat", "none"]),
        expected_output_tokens=rng.choice([None, 20]),
    )


def promised_by_program(request: RoutedRequest, state: ReplicaState, taken_s: float, now_s: float):
    """The replica's own program on the replica's own clock."""
    shadow = VirtualReplica("oracle")
    shadow.update(state, taken_s)
    demand = replace(shadow.demand(request), deadline_s=shadow.demand(request).deadline_s - taken_s)
    start_s = max(state.start_s, now_s - taken_s)
    if request.deadline_s - taken_s <= start_s:
        return False
    plan = plan_admission(
        start_s,
        [demand],
        state.committed,
        state.decoding,
        state.model,
        Capacity(state.free_blocks, state.seats, state.max_step_tokens, state.token_share),
        decoding_context=state.decoding_context,
    )
    return bool(plan.admitted)


@settings(max_examples=examples(200))
@given(st.integers(0, 2**32))
def test_a_request_goes_to_the_first_in_turn_whose_program_admits_it(seed: int) -> None:
    rng = random.Random(seed)
    states = [random_state(rng) for _ in range(rng.randint(1, 4))]
    taken_s, now_s = rng.uniform(0, 2), 2.0 + rng.choice([0.0, 0.3])
    shadows = [VirtualReplica(f"r{n}") for n in range(len(states))]
    for shadow, state in zip(shadows, states, strict=True):
        shadow.update(state, taken_s)
    request = replace(random_request(rng))
    request = replace(request, deadline_s=request.deadline_s + 2.0)
    turn, max_hops = rng.randint(0, 9), rng.randint(1, 4)
    order = [(turn + n) % len(states) for n in range(len(states))][:max_hops]
    expected = next(
        (n for n in order if promised_by_program(request, states[n], taken_s, now_s)), None
    )
    found = ask(request, shadows, now_s=now_s, turn=turn, max_hops=max_hops)
    assert found.promised == (expected is not None)
    assert found.hops <= max_hops
    if expected is not None:
        assert found.target == f"r{expected}"
        assert found.hops == order.index(expected) + 1
    else:
        assert found.backup == "best_effort"


# The shadow's picture.


def test_what_was_sent_counts_until_the_replica_lists_it() -> None:
    (shadow,) = replicas(busy(3))
    for ticket in (1, 2, 3):
        assert shadow.judge(ASKS, 0.0).promised
        shadow.sent(ticket, ASKS, 0.0, promised=True)
    assert not shadow.judge(ASKS, 0.0).promised
    # An account from before they arrived changes nothing; one that lists them replaces them.
    shadow.update(busy(3), 0.1)
    assert not shadow.judge(ASKS, 0.1).promised
    shadow.update(replace(busy(4), tickets={"": frozenset((1,))}, seen={"": 3}), 0.2)
    assert not shadow.judge(ASKS, 0.2).promised
    shadow.update(replace(busy(4), tickets={"": frozenset((1, 2, 3))}, seen={"": 3}), 0.2)
    assert shadow.judge(ASKS, 0.2).promised


def test_what_ended_before_it_was_listed_is_forgotten() -> None:
    (shadow,) = replicas(busy(3))
    for ticket in (1, 2, 3):
        shadow.sent(ticket, ASKS, 0.0, promised=True)
    shadow.ended(2)
    shadow.ended(2)
    shadow.ended(77)
    assert shadow.outstanding == 2
    assert shadow.judge(ASKS, 0.0).promised


def test_what_the_replica_saw_and_does_not_list_is_over_after_a_while() -> None:
    (shadow,) = replicas(busy(3))
    for ticket in (1, 2, 3):
        shadow.sent(ticket, ASKS, 0.0, promised=True)
    unlisted = replace(busy(3), seen={"": 3})
    shadow.update(unlisted, 0.3)
    assert not shadow.judge(ASKS, 0.3).promised
    shadow.update(unlisted, 0.7)
    assert shadow.judge(ASKS, 0.7).promised
    assert shadow.outstanding == 0


def test_a_request_that_began_draws_tokens_and_no_prompt() -> None:
    tight = replace(ASKS, prompt_tokens=30, deadline_s=6.0, tpot_s=3.0)
    (shadow,) = replicas(IDLE)
    shadow.sent(1, tight, 0.0, promised=True)
    assert not shadow.judge(tight, 0.0).promised
    shadow.began(1)
    assert shadow.judge(tight, 0.0).promised
    shadow.began(1)
    shadow.ended(1)
    assert shadow.load_tokens == 0


def test_a_best_effort_request_takes_nothing_from_promises_but_counts_as_load() -> None:
    (shadow,) = replicas(IDLE)
    before = shadow.judge(ASKS, 0.0)
    for ticket in range(1, 50):
        shadow.sent(ticket, replace(ASKS, wants_promise=False), 0.0, promised=False)
    assert shadow.judge(ASKS, 0.0) == before
    assert shadow.load_tokens == 49 * 6


def test_memory_and_seats_of_what_was_sent_are_taken() -> None:
    (shadow,) = replicas(replace(IDLE, free_blocks=2))
    assert shadow.judge(ASKS, 0.0).promised
    shadow.sent(1, ASKS, 0.0, promised=True)
    shadow.sent(2, ASKS, 0.0, promised=True)
    assert shadow.judge(ASKS, 0.0).reason == "memory"
    (shadow,) = replicas(replace(IDLE, seats=1))
    shadow.sent(1, ASKS, 0.0, promised=True)
    assert shadow.judge(ASKS, 0.0).reason == "seats"


def test_a_cached_prompt_is_cheaper_where_it_is_cached() -> None:
    long = replace(ASKS, prompt_tokens=200, deadline_s=6.0)
    shadows = replicas(IDLE, IDLE)
    assert not ask(long, shadows).promised
    cached = replace(long, cached_tokens={"r1": 190})
    found = ask(cached, shadows)
    assert (found.target, found.hops) == ("r1", 1)


def test_prefix_affinity_yields_to_the_objective() -> None:
    shadows = replicas(IDLE, busy(6))
    found = ask(replace(ASKS, cached_tokens={"r1": 5}), shadows)
    assert (found.target, found.promised, found.hops) == ("r0", True, 2)


def test_an_expired_deadline_is_refused_and_never_urgent() -> None:
    (shadow,) = replicas(IDLE)
    assert shadow.judge(replace(ASKS, deadline_s=-1.0), 0.0).reason == "expired"
    assert shadow.judge(ASKS, 6.5).reason == "expired"


def test_an_idle_replica_whose_word_is_old_is_asked_itself() -> None:
    slow = replace(IDLE, model=SIX_A_UNIT.scaled(1000.0))

    def asked(state: ReplicaState, age_s: float, *, sent: bool = False) -> bool:
        (one,) = replicas(state)
        request = replace(ASKS, deadline_s=age_s + 6.0)
        if sent:
            one.sent(1, request, age_s, promised=False)
        return one.judge(request, age_s).promised

    assert asked(slow, STALE_S)
    assert not asked(slow, STALE_S - 1.0)
    assert not asked(slow, STALE_S, sent=True)
    assert not asked(replace(slow, running=1), STALE_S)
    assert not asked(replace(slow, seats=0), STALE_S)


def test_a_replica_that_has_not_spoken_promises_nothing() -> None:
    silent = VirtualReplica("r0")
    assert silent.judge(ASKS, 0.0) == (False, "unknown", 1.0)
    silent.sent(1, ASKS, 0.0, promised=True)
    silent.ended(1)
    assert silent.outstanding == 0
    assert silent.work_s(ASKS) == 0.0


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.sampled_from("sbe"), st.integers(1, 6), st.booleans()), max_size=40))
def test_whatever_happens_an_empty_double_is_as_new(events) -> None:
    (shadow,) = replicas(busy(2))
    fresh = shadow.judge(ASKS, 0.0), shadow.load_tokens
    for what, ticket, promised in events:
        if what == "s" and ticket not in shadow._sent:
            shadow.sent(ticket, ASKS, 0.0, promised=promised)
        elif what == "b":
            shadow.began(ticket)
        elif what == "e":
            shadow.ended(ticket)
        assert shadow.load_tokens >= 0
    for ticket in range(1, 7):
        shadow.ended(ticket)
    assert (shadow.judge(ASKS, 0.0), shadow.load_tokens) == fresh


# Several fronts, and ends that nobody tells.


def listing(count: int, **fronts: tuple[int, ...]) -> ReplicaState:
    """A busy replica that lists such tickets, ``_`` for the front without a name."""
    named = {name.strip("_"): numbers for name, numbers in fronts.items() if numbers}
    return replace(
        busy(count),
        tickets={front: frozenset(numbers) for front, numbers in named.items()},
        seen={front: max(numbers) for front, numbers in named.items()},
    )


def test_a_front_counts_its_own_tickets_and_no_others() -> None:
    shadows = VirtualReplica("r0", "a"), VirtualReplica("r0", "b")
    for shadow in shadows:
        shadow.update(busy(4), 0.0)
    for n, shadow in enumerate(shadows):
        shadow.sent(1, ASKS, 0.0, promised=True)
        # The replica lists the other one's request of the same number.
        shadow.update(listing(4, **{"ba"[n]: (1,)}), 0.1)
        assert not shadow.judge(ASKS, 0.1).promised
        shadow.update(listing(4, **{"ab"[n]: (1,)}), 0.2)
        assert shadow.judge(ASKS, 0.2).promised


def test_a_listed_request_ends_when_it_is_not_listed_any_more() -> None:
    (shadow,) = replicas(busy(3))
    for ticket in (1, 2):
        shadow.sent(ticket, ASKS, 0.0, promised=True)
    shadow.update(listing(5, _=(1, 2)), 0.01)
    assert shadow.outstanding == 2
    shadow.update(listing(4, _=(2,)), 0.02)
    assert shadow.outstanding == 1
    shadow.ended(1)
    shadow.update(replace(busy(3), seen={"": 2}), 0.03)
    assert shadow.outstanding == 0


def test_an_idle_replica_has_none_of_what_was_sent_long_ago() -> None:
    (shadow,) = replicas(IDLE)
    shadow.sent(1, ASKS, 0.0, promised=True)
    shadow.confirm(LOST_AFTER_S)
    assert shadow.outstanding == 1
    shadow.confirm(LOST_AFTER_S + 0.1)
    assert (shadow.outstanding, shadow.load_tokens) == (0, 0)


def test_what_is_never_listed_is_forgotten_in_the_end() -> None:
    (shadow,) = replicas(busy(3))
    shadow.sent(1, replace(ASKS, wants_promise=False), 0.0, promised=False)
    before = shadow.load_tokens
    shadow.confirm(LOST_AFTER_S + 0.1)
    assert (shadow.outstanding, shadow.load_tokens) == (1, before - 6)
    shadow.confirm(UNLISTED_AFTER_S + 0.1)
    assert shadow.outstanding == 0


class TwoFronts:
    """Two fronts with a shadow each over one replica. ``way`` and ``here``: (front, number) of the
    requests on their way and at the replica."""

    def __init__(self) -> None:
        self.shadows = [VirtualReplica("r0", "a"), VirtualReplica("r0", "b")]
        self.way: set[tuple[int, int]] = set()
        self.here: set[tuple[int, int]] = set()
        self.numbers, self.seen = [0, 0], [0, 0]
        for shadow in self.shadows:
            shadow.update(self.state(), 0.0)

    def state(self) -> ReplicaState:
        listed = {
            front: frozenset(n for f, n in self.here if f == i) for i, front in enumerate("ab")
        }
        return replace(
            busy(len(self.here)),
            tickets={front: numbers for front, numbers in listed.items() if numbers},
            seen={front: self.seen[i] for i, front in enumerate("ab") if self.seen[i]},
        )

    def send(self, front: int, number: int, now_s: float) -> None:
        self.numbers[front] += 1
        self.way.add((front, self.numbers[front]))
        request = replace(ASKS, deadline_s=now_s + 6.0)
        self.shadows[front].sent(self.numbers[front], request, now_s, promised=True)

    def arrive(self, front: int, number: int, now_s: float) -> None:
        if (front, number) in self.way:
            self.way.remove((front, number))
            self.here.add((front, number))
            self.seen[front] = max(self.seen[front], number)

    def begin(self, front: int, number: int, now_s: float) -> None:
        if (front, number) in self.here:
            self.shadows[front].began(number)

    def end(self, front: int, number: int, now_s: float) -> None:
        """It ends, and nobody tells the front."""
        self.way.discard((front, number))
        self.here.discard((front, number))

    def told(self, front: int, number: int, now_s: float) -> None:
        """It ends, and the front is told."""
        self.end(front, number, now_s)
        self.shadows[front].ended(number)

    def update(self, front: int, number: int, now_s: float) -> None:
        self.shadows[front].update(self.state(), now_s)

    def confirm(self, front: int, number: int, now_s: float) -> None:
        self.shadows[front].confirm(now_s)


EVENTS = st.tuples(
    st.sampled_from(["send", "arrive", "begin", "end", "told", "update", "confirm"]),
    st.integers(0, 1),
    st.integers(1, 5),
    st.floats(0.0, 0.3),
)


@settings(max_examples=examples(200))
@given(st.lists(EVENTS, max_size=60))
def test_two_fronts_agree_with_their_replica_and_forget_what_ended(events) -> None:
    """A front that has nothing on its way judges by the state alone: the other one's requests are
    seen, and its own are not counted twice. When all has ended and the replica has said so, nothing
    is left, whether ends were told or not."""
    world, now_s = TwoFronts(), 0.0
    for what, front, number, pause_s in events:
        now_s += pause_s
        getattr(world, what)(front, number, now_s)
        assert all(shadow.load_tokens >= 0 for shadow in world.shadows)
    now_s += LOST_AFTER_S + 0.1
    for front, shadow in enumerate(world.shadows):
        shadow.update(world.state(), now_s)
        if world.numbers[front] > world.seen[front]:
            continue  # for all that is known it is on its way
        plain = VirtualReplica("r0")
        plain.update(world.state(), now_s)
        request = replace(ASKS, deadline_s=now_s + 6.0)
        assert shadow.judge(request, now_s) == plain.judge(request, now_s)
        assert shadow.outstanding <= sum(f == front for f, _ in world.here)
    world.here.clear()
    for shadow in world.shadows:
        shadow.update(world.state(), now_s + LOST_AFTER_S + 0.1)
        assert (shadow.outstanding, shadow.load_tokens) == (0, 0)


def test_the_clock_of_the_replica_does_not_matter() -> None:
    promise = Demand("p", 3.0, 12, 1.0, 2)
    one, other = replicas(replace(busy(3), committed=(promise,), start_s=0.5), busy(3))
    late = replace(promise, deadline_s=1003.0)
    there = replace(busy(3), committed=(late,), now_s=1000.0, start_s=1000.5)
    other.update(there, 0.0)
    for deadline_s in (0.4, 1.0, 2.0, 4.0, 8.0):
        request = replace(ASKS, deadline_s=deadline_s)
        assert one.judge(request, 0.1) == pytest.approx(other.judge(request, 0.1))
        other.sent(1, request, 0.1, promised=True)
        one.sent(1, request, 0.1, promised=True)
        assert one.judge(ASKS, 0.1).promised == other.judge(ASKS, 0.1).promised


# Rankings.


def test_rankings_are_permutations() -> None:
    shadows = replicas(IDLE, busy(1), busy(2))
    rng = random.Random(0)
    for rank in RANKS.values():
        for turn in range(5):
            assert sorted(d.name for d in rank(ASKS, shadows, turn, rng)) == ["r0", "r1", "r2"]


def test_round_robin_and_prefix_first() -> None:
    shadows = replicas(IDLE, IDLE, IDLE)
    rng = random.Random(0)
    assert [d.name for d in round_robin(ASKS, shadows, 4, rng)] == ["r1", "r2", "r0"]
    known = replace(ASKS, cached_tokens={"r0": 4})
    assert [d.name for d in prefix_first(known, shadows, 4, rng)] == ["r0", "r1", "r2"]


def test_least_loaded_counts_backlog_and_what_is_on_its_way() -> None:
    shadows = replicas(replace(IDLE, backlog_tokens=50), IDLE, replace(IDLE, backlog_tokens=20))
    rng = random.Random(0)
    assert [d.name for d in least_loaded(ASKS, shadows, 0, rng)] == ["r1", "r2", "r0"]
    shadows[1].sent(1, replace(ASKS, prompt_tokens=30), 0.0, promised=False)
    assert [d.name for d in least_loaded(ASKS, shadows, 0, rng)] == ["r2", "r1", "r0"]
    cached = replace(ASKS, cached_tokens={"r0": 45})
    assert least_loaded(cached, shadows, 0, rng)[0].name == "r0"


def test_power_of_two_never_takes_the_fuller_one_of_its_pair() -> None:
    shadows = replicas(*(replace(IDLE, backlog_tokens=10 * n) for n in range(4)))
    rng = random.Random(1)
    firsts = {power_of_two(ASKS, shadows, 0, rng)[0].name for _ in range(200)}
    assert firsts == {"r0", "r1", "r2"}


@pytest.mark.parametrize("policy", sorted(RANKS.keys() - {"slo"}))
def test_the_other_policies_ask_for_no_promise(policy: str) -> None:
    found = ask(ASKS, replicas(busy(6), busy(6)), policy=policy)
    assert found.target is not None
    assert (found.promised, found.hops, found.backup) == (False, 0, None)


def test_without_an_objective_the_shortest_queue_is_taken() -> None:
    shadows = replicas(replace(IDLE, backlog_tokens=50), IDLE)
    found = ask(replace(ASKS, wants_promise=False), shadows, turn=0)
    assert (found.target, found.hops) == ("r1", 0)


def test_a_queue_is_as_long_as_its_replica_takes_for_it() -> None:
    """40 tokens at half speed take longer than 60 at full speed, and 20 at half speed do not."""
    slow = replace(IDLE, model=SIX_A_UNIT.scaled(2.0), backlog_tokens=40)
    fast = replace(IDLE, backlog_tokens=60)
    plain = replace(ASKS, wants_promise=False)
    assert ask(plain, replicas(slow, fast)).target == "r1"
    assert ask(plain, replicas(replace(slow, backlog_tokens=20), fast)).target == "r0"
    # What is cached there saves its own time; what was sent since counts.
    cached = replace(plain, cached_tokens={"r0": 11})
    assert ask(cached, replicas(slow, fast)).target == "r0"
    shadows = replicas(slow, fast)
    shadows[1].sent(1, replace(ASKS, prompt_tokens=21), 0.0, promised=False)
    assert ask(plain, shadows).target == "r0"
    # By tokens while the speed of one is not known.
    silent = VirtualReplica("r2")
    silent.sent(1, replace(ASKS, prompt_tokens=50), 0.0, promised=False)
    assert ask(plain, [*replicas(slow, fast), silent]).target == "r0"
    # A request that nobody can promise goes there, too.
    full = [replace(state, seats=0) for state in (slow, fast)]
    assert ask(ASKS, replicas(*full)).target == "r1"


def test_work_is_time_or_memory_whichever_is_more() -> None:
    (shadow,) = replicas(IDLE)
    compute_s = shadow.work_s(ASKS)
    assert compute_s == pytest.approx((6 + 7) / 6, rel=0.2)
    at_least_one = StepTimeModel(((0.0, 0.0, 1.0), (1 / 6, 0.0, 0.0)), max_tokens=1000)
    (small,) = replicas(replace(IDLE, model=at_least_one, total_blocks=1, free_blocks=1))
    assert small.work_s(ASKS) == pytest.approx(6 / 6 + 7 * 1.0, rel=0.2)


def test_a_loose_objective_holds_memory_no_longer_than_its_steps_take() -> None:
    model = StepTimeModel(((0.0, 0.0, 10.0), (1 / 6, 0.0, 0.0)), kv_s=1e-3, max_tokens=1000)
    (shadow,) = replicas(replace(IDLE, model=model, total_blocks=4, free_blocks=4))
    work_s = [shadow.work_s(replace(ASKS, tpot_s=t)) for t in (2.0, 8.0, 20.0, 3600.0, math.inf)]
    assert work_s == sorted(work_s)
    assert work_s[0] < work_s[1] < work_s[2] == work_s[4]
    # Four of them share its time; a step of theirs takes ten seconds, and some for what it reads.
    assert work_s[4] == pytest.approx((6 / 6 + 7 * 10.0) / 4, rel=0.1)
