# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks/soak.py`` makes of what it saw: every check can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from benchmark_script import load

report = load("soak_report")
Process, Sample, Seen = report.Process, report.Sample, report.Seen

MINUTES = 30
WARM_UP_S = 360.0


def sample(minute: float, **said: Any) -> Any:
    """A server that is well."""
    process = Process(700.0 + 3 * (minute % 2), 13, 30)
    well = {
        "at_s": 60 * minute,
        "loaded": True,
        "processes": {"api": process, "engine": process},
        "kv_usage": 0.3,
        "running": 16.0,
        "waiting": 20.0,
        "scratch_files": 2,
        "scratch_mib": 0.1,
        "shared_files": 1,
        "healthy": True,
    }
    return Sample(**{**well, **said})


IDLE = {"loaded": False, "kv_usage": 0.0, "running": 0.0, "waiting": 0.0}


def leaks(
    change: Callable[[Any, float], Any] = lambda one, _: one,
    after: Callable[[Any], Any] = lambda one: one,
) -> set[str]:
    """The checks that fail when samples and the last one are changed like that."""
    loaded = [change(sample(m / 4), m / 4) for m in range(4 * MINUTES)]
    last = after(sample(MINUTES + 1, **IDLE))
    checks = report.check_leaks(sample(0, **IDLE), loaded, last, WARM_UP_S)
    assert len(checks) == 14
    return {check.name for check in checks if not check.holds}


def grown(one: Any, role: str, **by: float) -> Any:
    process = one.processes[role]
    more = {name: getattr(process, name) + value for name, value in by.items()}
    return replace(one, processes={**one.processes, role: replace(process, **more)})


def test_a_server_that_is_well() -> None:
    assert leaks() == set()


def test_what_is_made_at_first_is_no_leak() -> None:
    assert leaks(lambda one, at: grown(one, "api", rss_mib=min(200.0, 100 * at))) == set()


def test_memory_that_grows_slowly() -> None:
    found = leaks(lambda one, at: grown(one, "engine", rss_mib=2.0 * at))
    assert found == {"engine: memory under load"}


def test_threads_that_stay() -> None:
    found = leaks(lambda one, at: grown(one, "api", threads=int(at)))
    assert found == {"api: threads under load"}
    found = leaks(after=lambda one: grown(one, "api", threads=5))
    assert found == {"api: threads, idle"}


def test_sockets_that_stay() -> None:
    assert leaks(after=lambda one: grown(one, "engine", files=5)) == {"engine: open files, idle"}


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"kv_usage": 0.001}, "KV blocks held, idle"),
        ({"waiting": 1.0}, "requests in the engine, idle"),
        ({"running": 1.0}, "requests in the engine, idle"),
        ({"scratch_files": 7}, "temporary files, idle"),
        ({"scratch_mib": 1.2}, "temporary files' space, idle"),
        ({"shared_files": 6}, "shared memory files, idle"),
    ],
)
def test_what_stays_when_idle(said: dict[str, Any], name: str) -> None:
    assert leaks(after=lambda one: replace(one, **said)) == {name}


def test_temporary_files_that_become_more() -> None:
    found = leaks(lambda one, at: replace(one, scratch_files=int(2 + at)))
    assert found == {"temporary files under load"}


def test_a_process_that_is_gone() -> None:
    def without_engine(one: Any, at: float) -> Any:
        return replace(one, processes={"api": one.processes["api"]}) if at > 20 else one

    loaded = [without_engine(sample(m), m) for m in range(MINUTES)]
    checks = report.check_leaks(sample(0, **IDLE), loaded, sample(31, **IDLE), WARM_UP_S)
    assert [c.name for c in checks if not c.holds] == ["engine: process"]


def test_a_run_that_is_too_short_says_nothing() -> None:
    with pytest.raises(ValueError, match="run for longer"):
        report.check_leaks(sample(0, **IDLE), [sample(1)], sample(2, **IDLE), WARM_UP_S)


SEEN = [
    *[Seen("stream", "finished", 1, True, False, 1, 1)] * 19,
    Seen("stream", "finished", 1, True, False, 1, 0),
    Seen("choices", "finished", 3),
    *[Seen("whole", "declined", 1, True, True)] * 3,
    Seen("leaver", "left", 1, True, True),
    Seen("garbage", "refused", 0),
]
COUNTED = report.Counters(
    finished=24, slo_finished=20, promised=20, attained=19, declined=4, promises=21, broken=1
)


def fails(seen: Any = SEEN, **counted: float) -> set[str]:
    counters = replace(COUNTED, **counted)
    checks = [*report.check_requests(seen, counters), *report.check_promises(seen, counters)]
    assert len(checks) == 9
    return {check.name for check in checks if not check.holds}


def test_everything_is_accounted_for() -> None:
    assert fails() == set()


@pytest.mark.parametrize("kind", ["lost", "errored"])
def test_a_request_that_is_lost(kind: Any) -> None:
    assert fails([*SEEN, Seen("stream", kind)]) == {f"requests {kind}"}


def test_garbage_that_is_taken() -> None:
    name = "garbage taken, or a request refused"
    assert fails([*SEEN, Seen("garbage", "finished", 0)]) == {name}
    assert fails([*SEEN, Seen("chat", "refused")]) == {name}


@pytest.mark.parametrize(
    ("counted", "name"),
    [
        ({"finished": 22}, "answers that the server finished"),
        ({"finished": 25}, "answers that the server finished"),
        ({"slo_finished": 19}, "those with an SLO"),
        ({"declined": 2}, "requests that it declined"),
        ({"declined": 5}, "requests that it declined"),
        ({"promises": 0}, "promises made"),
        ({"attained": 18}, "promises kept, by the server's count"),
        ({"promised": 0, "attained": 0}, "promises kept, by the server's count"),
    ],
)
def test_counts_that_disagree(counted: dict[str, float], name: str) -> None:
    assert fails(**counted) == {name}


def test_promises_that_clients_saw_broken() -> None:
    broken = [Seen("stream", "finished", 1, True, False, 1, 0)]
    found = fails([*SEEN, *broken], finished=25, slo_finished=21)
    assert found == {"promises kept, by the clients' reports"}


def test_a_server_that_is_ill() -> None:
    def ill(healthy: bool, **said: bool) -> list[str]:
        checks = report.check_service([sample(1, healthy=healthy)], **said)
        return [check.name for check in checks if not check.holds]

    assert ill(True, same_answer=True, stopped=True) == []
    assert ill(False, same_answer=True, stopped=True) == ["samples without health"]
    assert ill(True, same_answer=False, stopped=True) == ["the same answer afterwards"]
    assert ill(True, same_answer=True, stopped=False) == ["nothing left once stopped"]


def test_the_slope_is_not_moved_by_an_outlier() -> None:
    values = [2.0 * at for at in range(20)]
    values[7] = 1e6
    assert report.slope(range(20), values) == pytest.approx(2.0, abs=0.1)
    assert report.slope([1.0], [1.0]) == 0.0


def test_tables() -> None:
    rows = report.outcome_rows(SEEN)
    assert [row[0] for row in rows] == ["choices", "garbage", "leaver", "stream", "whole", "all"]
    assert rows[-1][:5] == ["all", "26", "21", "3", "1"]
    assert all(len(row) == 9 for row in rows)
    samples = [sample(m) for m in range(100)]
    table = report.sample_rows(samples, ["api", "engine"])
    assert [table[0][0], table[-1][0]] == ["0", "5940"]
    assert all(len(row) == 11 for row in table)
    checks = [report.Check("a", "1", "0", False), report.Check("b", "0", "0", True)]
    assert [row[3] for row in report.check_rows(checks)] == ["**fails**", "holds"]
