# SPDX-License-Identifier: Apache-2.0
"""A paused engine keeps no promise. They are withdrawn and counted as such; reports stay true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState

from vllm_slo import SLO
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import VirtualEngine

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
CHAT = SLO(ttft_ms=1000, tpot_ms=100)


@pytest.fixture
def engine(config_folder: Path) -> Callable[[], VirtualEngine]:
    def make() -> VirtualEngine:
        return VirtualEngine(Scheduler, config_folder, ROOFLINE.predict_shape_s, believed=ROOFLINE)

    return make


def broken(one: VirtualEngine, objective: str) -> float:
    labels = {"engine": "0", "slo_class": "custom", "objective": objective}
    registry = one.scheduler.parts.metrics.registry
    return float(registry.get_sample_value("vllm_slo:promises_broken_total", labels) or 0)


def pause(one: VirtualEngine, state: PauseState, seconds: float) -> None:
    one.scheduler.set_pause_state(state)
    one.clock.advance(seconds)
    one.scheduler.set_pause_state(PauseState.UNPAUSED)


def test_promises_are_withdrawn_as_paused(engine: Callable[[], VirtualEngine]) -> None:
    one = engine()
    for name in ("decodes", "waits"):
        one.add(name, 50, 60, CHAT)
        assert one.scheduler.promise_now(name)
        if name == "decodes":
            one.step()
            one.step()
    pause(one, PauseState.PAUSED_ALL, 10.0)
    assert one.scheduler.parts.tracker.promised == 0
    assert (broken(one, "paused"), broken(one, "ttft")) == (2, 0)
    one.run()
    for outcome in one.outcomes.values():
        assert outcome.report is not None
        assert (outcome.report["promised"], outcome.report["reason"]) == (True, "paused")
        assert not outcome.report["attained"]
    assert one.outcomes["waits"].report["ttft_ms"] > 10_000
    assert broken(one, "ttft") == 0


def test_what_runs_on_keeps_its_promise(engine: Callable[[], VirtualEngine]) -> None:
    """A pause in which running requests come to their end; the others wait."""
    one = engine()
    one.add("decodes", 50, 20, CHAT)
    one.step()
    one.step()
    one.add("waits", 50, 20, CHAT)
    assert one.scheduler.promise_now("waits")
    one.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(30):
        one.step()
    one.scheduler.set_pause_state(PauseState.UNPAUSED)
    one.run()
    first = one.outcomes["decodes"].report
    assert first is not None
    assert (first["promised"], first["reason"], first["attained"]) == (True, None, True)
    assert broken(one, "paused") == 1
    assert one.outcomes["waits"].report["reason"] == "paused"


def test_after_a_short_pause_the_same_is_promised_again(
    engine: Callable[[], VirtualEngine],
) -> None:
    one = engine()
    one.add("waits", 50, 20, CHAT)
    assert one.scheduler.promise_now("waits")
    pause(one, PauseState.PAUSED_ALL, 0.1)
    one.step()
    assert one.scheduler.parts.tracker.promised == 1
    one.run()
    report = one.outcomes["waits"].report
    assert report is not None
    assert report["attained"]
