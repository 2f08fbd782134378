# SPDX-License-Identifier: Apache-2.0
"""What a scheduler says of itself, and how it is sent: vLLM's real objects, a virtual clock."""

from __future__ import annotations

import errno
import itertools
import math
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patience import patience

pytest.importorskip("vllm")

from vllm_slo import SLO
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_pace import AT_ONCE_S, EARNED_S, SLOW_S
from vllm_slo.core.routing.state_stream import StateDecoder, StateEncoder
from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand
from vllm_slo.engine.composition import Parts
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.scheduling import replica_reports
from vllm_slo.engine.telemetry import state
from vllm_slo.engine.telemetry.state import StatePublisher, pack, unpack
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.slo.access import Seal
from vllm_slo.slo.keys import SEAL_KEY

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
EASY = SLO(ttft_ms=5000, tpot_ms=100)


class Listener:
    """The other end: a bound socket, as a replica's process has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)

    def all(self) -> list[ReplicaState]:
        """What has come so far."""
        states = []
        while True:
            try:
                message = self.socket.recv(state.MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return states
            line, taken_s = unpack(message)
            assert 0 <= time.monotonic() - taken_s < patience(60)
            told = StateDecoder().read(line).state
            assert told is not None
            states.append(told)

    def last(self) -> ReplicaState:
        return self.all()[-1]


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    listening = Listener(tmp_path / "state")
    monkeypatch.setenv(state.SOCKET_VARIABLE, str(listening.path))
    yield listening
    listening.socket.close()


@pytest.fixture
def engine(config_folder: Path) -> Iterator[Callable[..., VirtualEngine]]:
    made = []

    def make(**options: Any) -> VirtualEngine:
        model = options.pop("model", ROOFLINE)
        one = VirtualEngine(
            Scheduler, config_folder, model.predict_shape_s, believed=model, **options
        )
        made.append(one)
        return one

    yield make
    for one in made:
        publisher = parts_of(one).reports._publisher
        if publisher is not None:
            publisher.close()


def mine(*numbers: int) -> dict[str, frozenset[int]]:
    """Tickets of a front without a name."""
    return {"": frozenset(numbers)}


def parts_of(engine: VirtualEngine) -> Parts:
    scheduler = engine.scheduler
    assert isinstance(scheduler, Scheduler)
    return scheduler.parts


@dataclass
class Said:
    """What the scheduler is told of a request: its SLO, and what the middleware adds to it and
    seals."""

    seal: Seal
    slo: SLO | None
    more: dict[str, Any]

    def to_extra_args(self) -> dict[str, Any]:
        flat = {**(self.slo.to_extra_args() if self.slo else {}), **self.more}
        return self.seal.sealed(flat) if self.more else flat


def add(
    engine: VirtualEngine,
    name: str,
    slo: SLO | None,
    ticket: object = None,
    prompt: int = 100,
    output: int = 20,
    **more: Any,
) -> None:
    more |= {"slo_ticket": ticket} if ticket is not None else {}
    said: Any = Said(engine.seal, slo, more)
    engine.add(name, prompt, output, said)


# --- what is said --------------------------------------------------------------------------------


def test_an_idle_engine(engine: Any) -> None:
    one = engine(shape=EngineShape(num_blocks=501, max_num_seqs=7, max_model_len=2000))
    assert parts_of(one).reports.state() == ReplicaState(
        model=ROOFLINE,
        free_blocks=500,
        total_blocks=500,
        block_sizes=(16,),
        seats=7,
        max_step_tokens=2048,
        max_model_len=2000,
    )


def test_a_promise_from_its_arrival_to_its_end(engine: Any) -> None:
    one = engine()
    add(one, "a", EASY, "3", prompt=3000)
    waiting = parts_of(one).reports.state()
    assert (waiting.running, waiting.waiting, waiting.backlog_tokens) == (0, 1, 3000)
    assert (waiting.tickets, waiting.seen, waiting.committed) == (mine(3), {"": 3}, ())
    one.step()
    begun = parts_of(one).reports.state()
    # Due 5 s after its arrival. What its last step may overrun is not known after one step.
    due_s: Any = pytest.approx(5.0)
    assert begun.committed == (
        Demand("a", due_s, 3000 - 2048, 0.1, begun.committed[0].blocks, 1.0,
               begun.committed[0].context_tokens),
    )  # fmt: skip
    assert (begun.running, begun.waiting, begun.backlog_tokens) == (1, 0, 3000 - 2048)
    assert begun.free_blocks == begun.total_blocks - begun.committed[0].blocks
    assert begun.seats == waiting.seats - 1
    # It holds blocks of 16 tokens; the promise has spoken for its answer as well.
    held = -(-2048 // 16)
    assert waiting.kv_usage == 0.0
    assert begun.kv_usage == pytest.approx(held / begun.total_blocks)
    while not one.outcomes["a"].token_times_s:
        one.step()
    decoding = parts_of(one).reports.state()
    assert (decoding.committed, decoding.decoding) == ((), {0.1: 1})
    assert decoding.decoding_context >= 3000
    assert (decoding.backlog_tokens, decoding.tickets) == (0, mine(3))
    one.run()
    ended = parts_of(one).reports.state()
    assert (ended.decoding, ended.tickets, ended.seen) == ({}, {}, {"": 3})
    assert (ended.running, ended.waiting) == (0, 0)


def test_a_step_under_way_counts_as_computed_and_the_next_begins_at_its_end(engine: Any) -> None:
    one = engine()
    add(one, "a", EASY, prompt=3000)
    one.scheduler.schedule()
    said = parts_of(one).reports.state()
    assert said.start_s - said.now_s == pytest.approx(0.0004 * 2048 + 0.01)
    assert said.committed[0].prefill_tokens == 3000 - 2048


def test_what_has_no_promise_is_counted_and_not_committed(engine: Any) -> None:
    one = engine()
    add(one, "best", SLO(ttft_ms=5000, tier="best_effort"), "1")
    add(one, "plain", None, prompt=500)
    add(one, "hopeless", SLO(ttft_ms=1), "2")
    said = parts_of(one).reports.state()
    assert (said.waiting, said.backlog_tokens) == (3, 700)
    one.scheduler.schedule()
    said = parts_of(one).reports.state()
    assert (said.running + said.waiting, said.committed, said.decoding) == (3, (), {})
    assert said.free_blocks == said.total_blocks
    assert said.kv_usage > 0.0
    assert (said.tickets, said.seen) == (mine(1, 2), {"": 2})


def test_the_choices_of_a_request_share_its_mark(engine: Any) -> None:
    one = engine()
    for name in "abc":
        add(one, name, EASY, "5")
    assert parts_of(one).reports.state().tickets == mine(5)


def test_a_request_that_is_refused_was_seen(engine: Any) -> None:
    one = engine()
    add(one, "bad", None, "9", slo_ttft_ms=-1)
    one.run()
    assert parts_of(one).reports.state().seen == {"": 9}


@pytest.mark.parametrize("mark", ["0", "-3", 4, 1.5, None, [1], "", "A:1"])
def test_a_mark_that_is_none_is_ignored(engine: Any, mark: object) -> None:
    one = engine()
    add(one, "a", EASY, slo_ticket=mark)
    said = parts_of(one).reports.state()
    assert parts_of(one).tracker.live.keys() == {"a"}
    assert (said.tickets, said.seen) == ({}, {})


@pytest.mark.parametrize("seal", [None, "", "0" * 64])
def test_a_mark_of_somebody_else_is_not_believed(engine: Any, seal: str | None) -> None:
    one = engine()
    said: Any = SimpleNamespace(
        to_extra_args=lambda: (
            {**EASY.to_extra_args(), "slo_ticket": "7"} | ({} if seal is None else {SEAL_KEY: seal})
        )
    )
    one.add("a", 100, 20, said)
    assert (parts_of(one).tracker.live, parts_of(one).reports.state().seen) == ({}, {})
    one.run()
    assert str(one.outcomes["a"].stop_reason).startswith("slo_invalid:")


def test_lengths_are_learnt_and_told(engine: Any) -> None:
    one = engine()
    for i in range(8):
        add(one, f"r{i}", EASY, output=5)
    one.run()
    assert parts_of(one).reports.state().lengths == {"custom": (5,) * 9 + (8,)}


def test_much_is_cut_and_fits_one_message(engine: Any, listener: Listener) -> None:
    shape = EngineShape(num_blocks=200_000, max_num_seqs=3000, max_num_batched_tokens=4096)
    one = engine(shape=shape, slo_config={"max_planned_new": 63})
    listener.all()
    for i in range(1100):
        add(one, f"cmpl-{i:032x}-0-{i:08x}", SLO(ttft_ms=80_000_000), str(10**12 + i), prompt=30)
        if i % 60 == 59:
            parts_of(one).controller.promise_now("none")
    for i in range(4000):
        add(one, f"best{i}", SLO(tier="best_effort"), str(10**12 + 2000 + i), prompt=3)
    parts_of(one).controller.promise_now("none")
    said = parts_of(one).reports.state()
    assert len(said.committed) == replica_reports.MAX_COMMITTED
    assert len(said.tickets[""]) == replica_reports.MAX_TICKETS
    assert said.waiting == 5100
    parts_of(one).controller.on_empty()
    told = listener.last()
    assert told.tickets == said.tickets
    assert len(told.committed) == len(said.committed)


def test_ids_of_clients_may_be_long(engine: Any, listener: Listener) -> None:
    one = engine(shape=EngineShape(num_blocks=20_000))
    for i in range(60):
        add(one, f"cmpl-{'x' * 40_000}-{i}", SLO(ttft_ms=80_000_000), str(i + 1), prompt=3000)
    one.step()
    said = parts_of(one).reports.state()
    assert len(said.committed) > 55
    told = listener.last()
    assert told.tickets == said.tickets
    assert [d.request_id for d in told.committed] == [
        str(i + 1) for i in range(len(said.committed))
    ]


# --- age -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age_ms", "seconds"),
    [(250.0, 0.25), (40, 0.04), (0, 0.0), (-5.0, 0.0), (math.inf, 86_400.0), (2**63, 86_400.0),
     (math.nan, 0.0), ("250", 0.0), (None, 0.0)],
)  # fmt: skip
def test_a_request_arrived_when_it_came_to_the_front(
    engine: Any, age_ms: object, seconds: float
) -> None:
    one = engine()
    one.clock.advance(1000.0)
    add(one, "a", SLO(ttft_ms=86_400_000), slo_age_ms=age_ms)
    tracked = parts_of(one).tracker.live["a"]
    assert tracked.arrival_s == pytest.approx(1000.0 - seconds)
    assert tracked.deadline_s == pytest.approx(1000.0 - seconds + 86_400)
    if seconds < 10:
        one.run()
        report = one.outcomes["a"].report
        first_s = one.outcomes["a"].token_times_s[0] - 1000.0
        assert report["ttft_ms"] == pytest.approx((first_s + seconds) * 1e3, abs=1e-2)


def test_an_absolute_deadline_does_not_move(engine: Any) -> None:
    one = engine()
    one.clock.advance(1000.0)
    add(one, "a", None, prefill_ddl=1002.0, slo_age_ms=500.0)
    tracked = parts_of(one).tracker.live["a"]
    assert tracked.arrival_s == pytest.approx(999.5)
    assert tracked.deadline_s == pytest.approx(1002.0)


def test_marks_alone_make_no_slo(engine: Any) -> None:
    one = engine()
    add(one, "a", None, "2", slo_age_ms=500.0)
    assert parts_of(one).tracker.live == {}
    assert parts_of(one).reports.state().seen == {"": 2}


# --- how it is sent ------------------------------------------------------------------------------


def test_nothing_is_sent_unless_asked_for(engine: Any) -> None:
    assert parts_of(engine()).reports._publisher is None
    assert StatePublisher.from_environment() is None


QUICK = StepTimeModel(((0.0, 0.0, 0.001), (0.0, 0.0, 0.001)), max_tokens=8192)
"""A step takes a millisecond."""


def test_an_engine_speaks_at_its_start_of_news_and_when_it_is_done(
    engine: Any, listener: Listener
) -> None:
    one = engine(model=QUICK)
    assert listener.last() == parts_of(one).reports.state()
    one.clock.advance(100.0)  # until now it waited
    add(one, "a", EASY, "1", output=50)
    add(one, "b", EASY, "2", output=100)
    one.step()
    assert [s.tickets for s in listener.all()] == [mine(1, 2)]
    while one.scheduler.requests:
        one.step()
    said = listener.all()
    # Their first tokens, the end of the one, that of the other.
    assert [s.tickets for s in said] == [mine(1, 2), mine(2), {}]
    assert [(s.committed, s.running) for s in said] == [((), 2), ((), 1), ((), 0)]
    assert said[0].now_s == pytest.approx(100.0 + AT_ONCE_S, abs=0.002)
    assert said[-1].seen == {"": 2}


def test_of_work_without_news_it_speaks_now_and_then(engine: Any, listener: Listener) -> None:
    one = engine(model=QUICK)
    one.clock.advance(100.0)
    add(one, "a", EASY, "1", output=1000)
    one.run()
    said = [state.now_s for state in listener.all()]
    assert len(said) == pytest.approx(1.0 / SLOW_S, abs=4)
    context = [after - before for before, after in itertools.pairwise(said[3:-1])]
    assert context == pytest.approx([SLOW_S] * len(context), abs=0.003)


def test_of_much_news_it_speaks_seldom(engine: Any, listener: Listener) -> None:
    one = engine(model=QUICK)
    one.clock.advance(100.0)
    begun_s, said = one.clock.now_s, []
    for number in range(1, 400):
        add(one, f"r{number}", EASY, str(number), output=20)
        for _ in range(5):
            one.step()
        said += listener.all()
    assert len(said) == pytest.approx((one.clock.now_s - begun_s) / EARNED_S, abs=8)


def test_before_a_long_step_it_always_speaks(engine: Any, listener: Listener) -> None:
    one = engine()
    add(one, "a", SLO(ttft_ms=5000), "1", output=10)
    one.step()
    listener.all()
    for _ in range(9):
        parts_of(one).reports.publish()  # it has just spoken, more often than it may
        listener.all()
    add(one, "b", SLO(ttft_ms=5000), "2", prompt=2000)
    one.step()
    assert [s.tickets for s in listener.all()] == [mine(1, 2)]


def test_a_promise_that_does_not_change_is_published_as_it_was(
    engine: Any, listener: Listener
) -> None:
    """Step times are learnt meanwhile, and prompts before its own are computed."""
    one = engine(model=QUICK, slo_config={"max_planned_new": 63})
    one.clock.advance(1.0)
    for number in range(1, 9):
        add(one, f"r{number}", SLO(ttft_ms=80_000_000), str(number), prompt=40_000 // number)
    one.step()
    (first, *_), rows = listener.all()[-1:], []
    for _ in range(3):
        one.step()
        parts_of(one).reports.publish()
        rows.append({d.request_id: d for d in listener.last().committed})
    before = {d.request_id: d for d in first.committed}
    same = [key for key in before if all(row.get(key) == before[key] for row in rows)]
    assert len(same) >= len(before) - 2 > 3


def test_the_highest_tickets_of_the_last_fronts_are_kept(engine: Any) -> None:
    one = engine()
    reports = parts_of(one).reports
    for number in range(replica_reports.MAX_FRONTS + 3):
        reports.saw(Ticket(f"f{number}", 5))
        reports.saw(Ticket("f0", number + 1))
    seen = reports.state().seen
    assert len(seen) == replica_reports.MAX_FRONTS
    assert seen["f0"] == replica_reports.MAX_FRONTS + 3
    assert "f1" not in seen
    reports.saw(Ticket("f0", 4))
    assert reports.state().seen == seen


def test_tickets_are_told_by_front(engine: Any) -> None:
    one = engine()
    for name, ticket in (("x", "a:1"), ("y", "b:1"), ("z", "a:2"), ("n", "7")):
        add(one, name, EASY, ticket)
    said = parts_of(one).reports.state()
    assert said.tickets == {"a": {1, 2}, "b": {1}, "": {7}}
    assert said.seen == {"a": 2, "b": 1, "": 7}


def test_a_client_that_leaves_an_engine_without_steps_is_told_of(
    engine: Any, listener: Listener
) -> None:
    one = engine()
    one.clock.advance(1.0)
    add(one, "a", EASY, "1", output=10)
    one.step()
    assert listener.last().tickets == mine(1)
    one.abort("a")
    assert [s.tickets for s in listener.all()] == [{}]


def test_the_stock_path_speaks_too(engine: Any, listener: Listener) -> None:
    one = engine()
    listener.all()
    one.clock.advance(1.0)
    add(one, "plain", None, output=5)
    one.run()
    said = listener.all()
    assert [s.running for s in said] == [1, 0]


def test_nobody_listens_and_then_somebody_does(tmp_path: Path) -> None:
    publisher = StatePublisher(str(tmp_path / "state"))
    one = ReplicaState(model=ROOFLINE, seen={"": 1})
    publisher.publish(one)
    listening = Listener(tmp_path / "state")
    publisher.publish(one)
    assert listening.all() == [one]
    listening.socket.close()
    publisher.publish(one)  # a socket that nobody reads any more
    listening.path.unlink()
    again = Listener(tmp_path / "state")
    publisher.publish(one)
    assert again.all() == [one]
    again.socket.close()
    publisher.close()


def test_what_cannot_be_sent_is_complained_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = Listener(tmp_path / "state")
    publisher = StatePublisher(str(listening.path))
    large = ReplicaState(model=ROOFLINE, lengths={"x" * 4 * state.MAX_MESSAGE_BYTES: (1,)})
    said: list[Any] = []
    monkeypatch.setattr(state.logger, "error", lambda *words: said.append(words[-1]))
    publisher.publish(large)
    publisher.publish(large)
    assert [error.errno for error in said] == [errno.EMSGSIZE]
    one = ReplicaState(model=ROOFLINE, seen={"": 1})
    publisher.publish(one)
    assert listening.all() == [one]
    listening.socket.close()
    publisher.close()


def test_who_is_slow_gets_the_last_state_later(tmp_path: Path) -> None:
    """Nothing is read before all is published, so whoever waited for a reader would for ever."""
    listening = Listener(tmp_path / "state")
    publisher = StatePublisher(str(listening.path))
    for seen in range(200):
        publisher.publish(ReplicaState(model=ROOFLINE, running=seen))
    end = time.monotonic() + patience(10.0)
    said = [s.running for s in listening.all()]
    while said[-1] != 199:
        assert time.monotonic() < end
        time.sleep(0.01)
        said += [s.running for s in listening.all()]
    assert said == [*range(len(said) - 1), 199]
    assert 1 < len(said) < 200
    publisher.close()
    listening.socket.close()


def test_messages_say_when_they_were_taken() -> None:
    one = ReplicaState(model=ROOFLINE, seen={"": 4})
    before = time.monotonic()
    line, taken_s = unpack(pack(StateEncoder().line(one)))
    assert before <= taken_s <= time.monotonic()
    assert StateDecoder().read(line).state == one
    for broken in (b"", b"{}", b"x\n{}"):
        with pytest.raises(ValueError, match=r"message|float"):
            unpack(broken)


@pytest.mark.usefixtures("listener")
def test_publishing_changes_no_decision(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = []
    for asked in (True, False):
        if not asked:
            monkeypatch.delenv(state.SOCKET_VARIABLE)
        one = engine(margin=1.02)
        for i in range(30):
            add(one, f"r{i}", SLO(ttft_ms=200 + 90 * i, tpot_ms=40 + i), i + 1, prompt=80 + 7 * i)
        one.run()
        timings.append({name: o.token_times_s for name, o in one.outcomes.items()})
        assert (parts_of(one).reports._publisher is not None) == asked
    assert timings[0] == timings[1]
