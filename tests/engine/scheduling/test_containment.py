# SPDX-License-Identifier: Apache-2.0
"""Each call into a policy, and each call into a part of the scheduler, fails: no request is lost,
no token, no block and no promise, and the next requests are planned as before."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import call_tables
import pytest
from core_calls import CoreCall, core_calls, wired
from depth import DEPTH
from fault_injection import Call, Fault, InjectedError, Site, counted, sites

pytest.importorskip("vllm")

from contained_runs import EASY, SCENARIOS, STEPS, Run, Scenario

from vllm_slo.engine.scheduling import containment
from vllm_slo.engine.scheduling.containment import LONGEST_ASIDE_S, Containment
from vllm_slo.engine.scheduling.controller import Controller
from vllm_slo.engine.speculation import messages
from vllm_slo.engine.telemetry import faults, metrics, recording
from vllm_slo.engine.telemetry.exposition import SeriesFile
from vllm_slo.engine.telemetry.prompt_hashes import PromptHashes
from vllm_slo.engine.telemetry.recording_files import RecordingFiles
from vllm_slo.engine.telemetry.series import Members

pytestmark = pytest.mark.slow

ALWAYS = float("inf")
COUNTED = "counted"
"""Name of the run whose calls are counted. A new engine that plays it makes the same calls again:
the name decides the prompts."""


@pytest.fixture(scope="module", autouse=True)
def all_calls_are_wired() -> Iterator[None]:
    with wired(core_calls()):
        yield


@pytest.fixture(scope="module")
def begun(config_folder: Path) -> dict[str, Counter[Call]]:
    """Scenario -> calls that are made while its engine is built."""
    made = {name: Counter[Call]() for name in SCENARIOS}
    for name, scenario in SCENARIOS.items():
        with counted(made[name], core_calls()):
            close(scenario.engine(config_folder))
    return made


@pytest.fixture(scope="module")
def made(config_folder: Path) -> dict[str, Counter[Call]]:
    """Scenario -> calls that it makes, and how often."""
    made = {name: Counter[Call]() for name in SCENARIOS}
    for name, scenario in SCENARIOS.items():
        engine = scenario.begin(config_folder)
        with counted(made[name], injectable()):
            run = scenario.run(engine, COUNTED)
            run.play()
        run.check()
        assert engine.scheduler.parts.containment.failures == run.failed, name
        close(engine)
    return made


IN_THREAD = (PromptHashes, RecordingFiles)
"""What the thread of a recording calls: ``telemetry/test_recording_writer.py``."""


def injectable() -> list[Call]:
    """All calls but those of what contains the faults, and those that virtual engines make."""
    of_engines = Site(messages, "of"), Site(messages.DraftTrees, "none")
    exempt = (Containment, recording, containment._Contained, faults, *IN_THREAD)
    parts = [site for site in sites() if site.owner not in exempt and site not in of_engines]
    return [*core_calls(), *parts]


UNCOUNTED = {
    Site(faults.FaultLog, "note"),
    Site(containment, "part_of"),
    Site(metrics.SchedulerMetrics, "planning_failed"),
    Site(metrics.SchedulerMetrics, "stands_aside"),
}
"""What tells of a fault, and fails itself."""
TRIED_ONCE = {
    Site(Controller, "plan"),
    Site(Members, "of"),
    Site(SeriesFile, "write_soon"),
}
"""What fails or tells of faults in a scenario that has faults of its own: tried in others."""


def close(engine: Any) -> None:
    if (publisher := engine.scheduler.parts.reports._publisher) is not None:
        publisher.close()


# --- nothing is forgotten ------------------------------------------------------------------------


def test_every_call_into_the_policies_is_made_or_listed(made: dict[str, Counter[Call]]) -> None:
    reached = {call for calls in made.values() for call in calls}
    never = [call for call in core_calls() if call not in reached]
    listed = {*call_tables.AT_START, *call_tables.ELSEWHERE, *call_tables.VERIFYING}
    forgotten = [
        str(call)
        for call in never
        if call.place not in listed
        and not call.place.startswith((*call_tables.FRONT, *call_tables.LINK, *call_tables.PROFILE))
    ]
    assert not forgotten, "\n".join(forgotten)
    idle = listed - {call.place for call in never}
    assert not idle, f"listed, and made all the same or not there: {idle}"


def test_the_list_misses_no_call(config_folder: Path) -> None:
    """Each frame of a policy that is entered from the engine is entered at a place of the list."""
    listed = {(call.module, call.span) for call in core_calls()}
    missed: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or not module_of(frame).startswith("vllm_slo.core"):
            return
        module = module_of(caller)
        if module.startswith("vllm_slo.engine") and caller.f_code.co_filename.endswith(".py"):
            positions = list(caller.f_code.co_positions())[caller.f_lasti // 2]
            line, last, column, end = map(int, map(str, positions))
            if (module, (line, column, last, end)) not in listed:
                missed.add(f"{module}, line {line}: {frame.f_code.co_qualname}")

    for scenario in SCENARIOS.values():
        engine = scenario.begin(config_folder)
        run = scenario.run(engine, "profiled")
        sys.setprofile(profile)
        try:
            run.play()
        finally:
            sys.setprofile(None)
        close(engine)
    assert not missed, "\n".join(sorted(missed))


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


# --- while it serves -----------------------------------------------------------------------------


MOMENTS: dict[str, dict[str, Any]] = {
    "once": {},
    "once it is done": {"after": True},
    "always": {"times": ALWAYS},
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", SCENARIOS)
def test_each_call_fails(
    config_folder: Path, kind: str, moment: str, made: dict[str, Counter[Call]]
) -> None:
    chosen, when = tried(kind, moment, made), MOMENTS[moment]
    scenario, wrong = SCENARIOS[kind], dict[str, str]()
    engine = scenario.begin(config_folder)
    for number, (call, first) in enumerate(chosen):
        fine = False
        try:
            fine = play_with(engine, scenario, Fault(call, first, **when), f"{number}")
            if not fine:  # an engine that has learnt makes another number of calls
                close(engine)
                engine = scenario.begin(config_folder)
                assert play_with(engine, scenario, Fault(call, first, **when), COUNTED)
        except Exception as error:  # noqa: BLE001 (all are reported at the end)
            wrong[f"{call} (from call {first})"] = f"{type(error).__name__}: {error}"[:300]
        if scenario.once or not fine:
            close(engine)
            engine = scenario.begin(config_folder)
    close(engine)
    assert not wrong, "\n".join(f"{call}: {what}" for call, what in wrong.items())


def tried(kind: str, moment: str, made: dict[str, Counter[Call]]) -> list[tuple[Call, int]]:
    """The calls that fail in a scenario, and from which time on: each call in the first scenario
    that makes it; in deep tests in all of them, at its first time and halfway. A part of the
    scheduler fails once, since no engine can do without a part that always fails.
    """
    names = list(SCENARIOS)
    earlier = {call for name in names[: names.index(kind)] for call in made[name]}
    chosen: list[tuple[Call, int]] = []
    for call, count in sorted(made[kind].items(), key=lambda one: str(one[0])):
        if moment != "once" and not isinstance(call, CoreCall):
            continue
        if DEPTH > 1 and not (call in TRIED_ONCE and call in earlier):
            chosen += [(call, first) for first in sorted({1, 1 + count // 2})]
        elif call not in earlier:
            chosen.append((call, 1 + count // 2))
    return chosen


def play_with(engine: Any, scenario: Scenario, fault: Fault, name: str) -> bool:
    """One run with a fault, which is counted and logged, and a request after it; whether there was
    one."""
    held = engine.scheduler.parts.containment
    before, run = held.failures, scenario.run(engine, name)
    held._log._logged.clear()
    with fault.injected(), logged() as records:
        run.play()
    run.check()
    if fault.raised and fault.call not in UNCOUNTED:
        expected, seen = fault.raised + run.failed, held.failures - before
        # What always fails may make others fail.
        assert seen == expected or (fault.times == ALWAYS and seen > expected)
        kinds = [record.exc_info[0] for record in records]
        assert kinds.count(InjectedError) == 1 + bool(run.failed)
        assert fault.times == ALWAYS or len(kinds) == 1 + bool(run.failed), kinds
    if not held.begin_step():  # the last failed step of the run may have been one too many
        engine.clock.advance(LONGEST_ASIDE_S)
    last = Run(engine, f"{name} after")
    after = last.add("easy", 20, 5, EASY)
    turns = 0
    while last.turn():
        turns += 1
        assert turns < STEPS, "the next request does not end"
    last.check()
    report = engine.outcomes[after].report
    assert report is not None and report["promised"] is scenario.promises, report
    for outcome in [*run.tokens, after]:
        engine.forget(outcome)
    engine.history.clear()
    return fault.raised > 0


@contextmanager
def logged() -> Iterator[list[Any]]:
    """What is logged of faults meanwhile."""
    records: list[Any] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger(faults.__name__).addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger(faults.__name__).removeHandler(handler)


# --- at the start --------------------------------------------------------------------------------


def test_an_engine_does_not_start_with_a_fault(
    config_folder: Path, begun: dict[str, Counter[Call]]
) -> None:
    failed: set[Call] = set()
    for kind, calls in begun.items():
        for call in calls.keys() - failed:
            if isinstance(call, CoreCall) and call.place in call_tables.AT_START:
                with Fault(call).injected(), pytest.raises(InjectedError):
                    SCENARIOS[kind].engine(config_folder)
                failed.add(call)
    assert len(failed) > 20
