# SPDX-License-Identifier: Apache-2.0
"""A first token that comes after its deadline breaks the promise, and the answer goes on all the
same."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from promise_engine import CHAT, ROOFLINE, Make, counts, maker
from vllm.v1.core.sched.interface import PauseState

from vllm_slo import SLO
from vllm_slo.sim.harness import Outcome, VirtualEngine

pytestmark = [pytest.mark.slow, pytest.mark.versions]


@pytest.fixture
def make(config_folder: Path) -> Make:
    return maker(config_folder)


def begin_late(engine: VirtualEngine, name: str, by_s: float) -> None:
    """Send a request that is promised, and get its first token ``by_s`` after its deadline."""
    engine.add("before", 10, 80)  # one slow step does not mean now that all are
    engine.run()
    engine.add(name, 400, 40, CHAT, max_tokens=40)
    engine.step_time = lambda _: 0.6 + by_s
    engine.step()
    engine.step_time = ROOFLINE.predict_shape_s
    assert engine.outcomes[name].token_times_s


def serve_beside_overload(engine: VirtualEngine, name: str) -> None:
    """Serve a request to its end, while others ask for more than there is all the time."""
    begun_s, number = engine.clock.now_s, 0
    while not engine.outcomes[name].finish_reason:
        if engine.clock.now_s > begun_s + 0.1 * number:
            engine.add(f"n{number}", 600, 2, SLO(ttft_ms=600, tpot_ms=100), max_tokens=2)
            number += 1
        engine.step()
    engine.run()
    for report in (engine.outcomes[f"n{n}"].report for n in range(number)):
        assert report is not None
        assert report["late"] or not report["promised"] or report["ttft_ms"] <= 600.0


def check_pace(seen: Outcome) -> None:
    """The promise of a first token was broken, and the rest of the answer kept its TPOT."""
    times_s = seen.token_times_s
    assert (times_s[-1] - times_s[0]) / (len(times_s) - 1) <= 0.06
    assert seen.report is not None and seen.report["promised"] and not seen.report["late"]
    assert seen.report["attained"] is False and seen.report["tpot_ms"] <= 60.0


@pytest.mark.parametrize("by_s", [0.0001, 0.05])
def test_an_answer_that_begins_late_goes_on_at_its_pace(make: Make, by_s: float) -> None:
    engine = make()
    begin_late(engine, "late", by_s)
    serve_beside_overload(engine, "late")
    check_pace(engine.outcomes["late"])
    assert counts(engine, "promises_broken") == {("ttft",): 1.0}


def test_an_answer_that_begins_long_after_its_deadline_goes_on_at_its_pace(make: Make) -> None:
    """Its prompt is best effort from its deadline on."""
    engine = make()
    engine.add("late", 400, 40, CHAT, max_tokens=40)
    assert engine.scheduler.promise_now("late")
    tracked = engine.scheduler.parts.tracker.get("late")
    engine.clock.advance(0.7)
    engine.add("other", 600, 2, SLO(ttft_ms=600, tpot_ms=100), max_tokens=2)
    engine.step()
    assert not tracked.promised and counts(engine, "promises_broken") == {("ttft",): 1.0}
    serve_beside_overload(engine, "late")
    check_pace(engine.outcomes["late"])
    assert counts(engine, "promises_broken") == {("ttft",): 1.0}


def test_a_first_token_on_its_way_is_not_late_before_it_has_come(make: Make) -> None:
    """The step in flight should end after the deadline, and ends before it."""
    engine = make(overlap=True)
    engine.add("before", 10, 80)
    engine.run()
    engine.add("r", 400, 40, CHAT, max_tokens=40)
    assert engine.scheduler.promise_now("r")
    tracked = engine.scheduler.parts.tracker.get("r")
    engine.clock.advance(tracked.deadline_s - 0.165 - engine.clock.now_s)
    engine.step_time = lambda _: 0.16
    engine.step()
    engine.step_time = ROOFLINE.predict_shape_s
    engine.add("other", 600, 2, CHAT)
    engine.step()
    assert tracked.first_token_s is not None and tracked.promised
    engine.run()
    report = engine.outcomes["r"].report
    assert report is not None and report["promised"] and report["attained"], report
    assert not counts(engine, "promises_broken")


def test_a_broken_promise_is_counted_once(make: Make) -> None:
    """The engine is paused later."""
    engine = make()
    begin_late(engine, "late", 0.05)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not engine.scheduler.parts.tracker.get("late").promised
    assert counts(engine, "promises_broken") == {("ttft",): 1.0}
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert counts(engine, "promises_broken") == {("ttft",): 1.0}


def test_an_answer_whose_late_promise_broke_goes_on_at_its_pace(make: Make) -> None:
    engine = make()
    for number in range(8):
        engine.add(f"b{number}", 400, 30, CHAT, max_tokens=30)
    engine.step()
    tracked = next(t for t in engine.scheduler.parts.tracker if t.late is not None)
    engine.scheduler.parts.promises.begin_turn(tracked)
    engine.clock.advance(tracked.deadline_s - 0.001 - engine.clock.now_s)
    while tracked.first_token_s is None:
        engine.step()
    assert tracked.first_token_s > tracked.late.deadline_s
    engine.step()
    assert tracked.promised and tracked.tpot_s == tracked.late.slack * 0.06
    engine.run()
    report = engine.outcomes[tracked.request.request_id].report
    assert report is not None and report["late_promise"]["kept"] is False
    assert report["tpot_ms"] <= report["late_promise"]["tpot_ms"]
