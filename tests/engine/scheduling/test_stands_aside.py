# SPDX-License-Identifier: Apache-2.0
"""Planning that fails many steps in a row stands aside: what requests, metrics, the log and a front
are told then, and how it comes back. And what a test sees of a fault."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fault_injection import Fault, InjectedError, Site

pytest.importorskip("vllm")

from vllm_slo import SLO
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.scheduling import controller, step_planner
from vllm_slo.engine.scheduling.admission import AdmissionController
from vllm_slo.engine.scheduling.containment import FIRST_ASIDE_S, MOST_FAILED_STEPS
from vllm_slo.engine.scheduling.controller import Controller
from vllm_slo.engine.scheduling.quotes import Quotes
from vllm_slo.engine.telemetry import faults
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.slo.keys import EXEMPT_KEY, GROUP_KEY, INTERNAL_KEYS
from vllm_slo.slo.verdicts import PLANNING_FAILED, Declined, Quoted, unpack

MODEL = StepTimeModel(((0.0, 0.0, 0.01), (0.0, 0.0, 0.0)), max_tokens=8192)
EASY = SLO(ttft_ms=60_000, tpot_ms=10_000)
PLAN_STEP = Site(step_planner, "plan_step")
ALWAYS = float("inf")


@pytest.fixture
def engine(config_folder: Path) -> VirtualEngine:
    return make(config_folder, contains_faults=True)


def make(folder: Path, slo_config: dict[str, Any] | None = None, **options: Any) -> VirtualEngine:
    return VirtualEngine(
        Scheduler,
        folder,
        MODEL.predict_shape_s,
        EngineShape(200, 16, 16, 256, 1024),
        believed=MODEL,
        slo_config=slo_config,
        options=options,
    )


@pytest.fixture
def errors() -> Iterator[list[logging.LogRecord]]:
    """What is logged as an error."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler, names = (
        Keep(logging.ERROR),
        (faults.__name__, "vllm_slo.engine.scheduling.containment"),
    )
    for name in names:
        logging.getLogger(name).addHandler(handler)
    yield records
    for name in names:
        logging.getLogger(name).removeHandler(handler)


def series(engine: VirtualEngine, name: str) -> dict[str, float]:
    """Part -> value of a series."""
    registry = engine.scheduler.parts.metrics.registry
    samples = [s for family in registry.collect() for s in family.samples if s.name == name]
    return {sample.labels.get("part", ""): sample.value for sample in samples}


def run(engine: VirtualEngine, most: int = 300) -> None:
    for _ in range(most):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError(f"unfinished: {list(engine.scheduler.requests)}")


def stand_aside(engine: VirtualEngine) -> None:
    """Fail as many steps as it takes."""
    engine.add("long", 40, 60, EASY)
    engine.step()  # promised
    with Fault(Site(Controller, "plan"), times=ALWAYS).injected():
        for number in range(MOST_FAILED_STEPS + 1):
            assert not engine.scheduler.parts.containment.stands_aside, number
            engine.step()
    assert engine.scheduler.parts.containment.stands_aside


@pytest.mark.parametrize(
    ("keys", "default_class", "reported"),
    [
        ({}, None, False),
        ({GROUP_KEY: "choices"}, None, False),
        ({EXEMPT_KEY: 1}, "chat", False),
        ({}, "chat", True),
        ({"slo_ttft_ms": 60_000}, None, True),
        ({"slo_ttft_ms": None}, None, False),
    ],
)
def test_an_arrival_that_is_lost_is_reported_to_those_who_have_an_objective(
    config_folder: Path, keys: dict[str, Any], default_class: str | None, reported: bool
) -> None:
    config = {"classes": {"chat": {"ttft_ms": 60_000}}, "default_class": default_class}
    engine = make(config_folder, contains_faults=True, slo_config=config)
    internal = any(key in INTERNAL_KEYS for key in keys)
    flat = engine.seal.sealed(keys) if internal else keys
    with Fault(Site(Controller, "on_arrival")).injected() as fault:
        engine.add("one", 40, 8, cast(SLO, SimpleNamespace(to_extra_args=lambda: flat)))
    assert fault.raised == 1
    run(engine)
    outcome = engine.outcomes["one"]
    assert len(outcome.token_ids) == 8
    assert (outcome.report is not None) == reported
    assert outcome.report is None or outcome.report["reason"] == PLANNING_FAILED


def test_a_fault_costs_a_step_its_plan(
    engine: VirtualEngine, errors: list[logging.LogRecord]
) -> None:
    engine.add("one", 40, 8, EASY)
    engine.add("two", 300, 8, EASY)
    with Fault(PLAN_STEP, times=2).injected() as fault:
        run(engine)
    assert fault.raised == 2
    for name in ("one", "two"):
        outcome = engine.outcomes[name]
        assert len(outcome.token_ids) == 8
        assert outcome.report is not None
        assert (outcome.report["promised"], outcome.report["attained"]) == (True, True)
        assert outcome.report["reason"] is None
    (record,) = errors
    assert "step_planner failed in vllm_slo.engine.scheduling.step_planner" in record.getMessage()
    assert record.exc_info is not None and record.exc_info[0] is InjectedError
    assert series(engine, "vllm_slo:planning_failures_total") == {"step_planner": 2}
    assert series(engine, "vllm_slo:planning_stands_aside") == {"": 0}


def test_a_promise_that_is_missed_after_a_fault_says_why(engine: VirtualEngine) -> None:
    engine.add("late", 40, 8, SLO(ttft_ms=2_000))
    with Fault(Site(Controller, "plan")).injected():
        engine.scheduler.promise_now("late")
        engine.clock.advance(2.0)
        run(engine)
    report = engine.outcomes["late"].report
    assert report is not None
    assert (report["promised"], report["attained"]) == (True, False)
    assert report["reason"] == PLANNING_FAILED


def test_a_simulation_and_a_test_see_faults(config_folder: Path) -> None:
    strict = make(config_folder)
    strict.add("one", 40, 8, EASY)
    with Fault(PLAN_STEP).injected(), pytest.raises(InjectedError):
        strict.step()


def test_planning_that_fails_many_steps_in_a_row_stands_aside(
    engine: VirtualEngine, errors: list[logging.LogRecord]
) -> None:
    stand_aside(engine)
    assert series(engine, "vllm_slo:planning_stands_aside") == {"": 1}
    assert "stands aside for 60 s" in errors[-1].getMessage()
    assert len(errors) == 2  # the fault, and that it stands aside
    assert engine.scheduler.state().seats == 0
    assert engine.scheduler.promise_now("long") is False
    engine.add("new", 40, 8, EASY)
    engine.add("declined", 40, 8, SLO(ttft_ms=60_000, on_unattainable="decline"))
    engine.add("quote", 40, 8, EASY, quote=True)
    engine.add("plain", 40, 8)
    run(engine)
    for name, count in {"long": 60, "new": 8, "plain": 8}.items():
        assert len(engine.outcomes[name].token_ids) == count
    long, new = (engine.outcomes[name].report for name in ("long", "new"))
    assert long is not None and (long["promised"], long["reason"]) == (True, PLANNING_FAILED)
    assert new is not None and (new["promised"], new["reason"]) == (False, PLANNING_FAILED)
    declined = unpack(engine.outcomes["declined"].stop_reason)
    assert isinstance(declined, Declined) and declined.reason == PLANNING_FAILED
    assert 0 < declined.retry_after_ms <= FIRST_ASIDE_S * 1e3
    quoted = unpack(engine.outcomes["quote"].stop_reason)
    assert isinstance(quoted, Quoted) and quoted.quote["reason"] == PLANNING_FAILED
    assert 0 < quoted.quote["retry_after_ms"] <= FIRST_ASIDE_S * 1e3


def test_planning_comes_back(engine: VirtualEngine) -> None:
    stand_aside(engine)
    run(engine)
    engine.clock.advance(FIRST_ASIDE_S)
    engine.add("after", 40, 8, EASY)
    run(engine)
    report = engine.outcomes["after"].report
    assert report is not None and report["promised"]
    assert series(engine, "vllm_slo:planning_stands_aside") == {"": 0}
    assert engine.scheduler.state().seats > 0


def test_planning_that_still_fails_stands_aside_at_once_and_for_longer(
    engine: VirtualEngine,
) -> None:
    stand_aside(engine)
    run(engine)
    held = engine.scheduler.parts.containment
    engine.clock.advance(FIRST_ASIDE_S)
    engine.add("after", 40, 8, EASY)
    with Fault(PLAN_STEP, times=ALWAYS).injected():
        engine.step()
        assert not held.stands_aside
        engine.step()
    assert held.stands_aside
    assert FIRST_ASIDE_S < held.retry_after_s <= 2 * FIRST_ASIDE_S


@pytest.mark.parametrize(
    "site",
    [
        Site(AdmissionController, "rulings"),
        Site(controller.StepClock, "scheduled"),
        Site(controller.StepClock, "done"),
        Site(controller.StepClock, "tick"),
        Site(Controller, "on_updated"),
        Site(Controller, "on_arrival"),
        Site(Controller, "on_end"),
        Site(Controller, "report_now"),
        Site(Quotes, "answer"),
    ],
    ids=str,
)
def test_a_call_that_always_fails(engine: VirtualEngine, site: Site) -> None:
    """Everything is served to its end, with the reason where there is a report."""
    with Fault(site, times=ALWAYS).injected():
        for number in range(6):
            engine.add(f"r{number}", 40, 30, EASY, stop=["so"] if number == 1 else ())
            engine.step()
        engine.add("quote", 40, 8, EASY, quote=True)
        run(engine)
    for number in range(6):
        outcome = engine.outcomes[f"r{number}"]
        assert len(outcome.token_ids) == 30
        report = outcome.report
        assert report is not None
        assert (report["promised"] and report["attained"]) or report["reason"] == PLANNING_FAILED
    assert isinstance(unpack(engine.outcomes["quote"].stop_reason), Quoted)
    assert not engine.scheduler.parts.tracker.live
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
