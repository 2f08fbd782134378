# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks/soak.py`` saw, judged. Pure functions of samples, answers and counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Final, Literal, TypeAlias, get_args

Outcome: TypeAlias = Literal["finished", "declined", "refused", "left", "errored", "lost"]
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
"""``refused``: 4xx for what was no request. ``left``: the client went first. ``errored``: 5xx, or
an answer that was cut. ``lost``: neither an answer nor an end came in time."""

MEMORY_MIB: Final = 16.0
MEMORY_SHARE: Final = 0.03
"""Allowed growth of resident memory, the larger of both; allocators keep free memory."""
FEW: Final = 4
"""Allowed change of threads or open files."""
KEPT: Final = 0.95
"""Of the promises that ended by themselves: the share that attains."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment. ``files``: open files, sockets among them."""

    rss_mib: float
    threads: int
    files: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment.

    Attributes:
        at_s: since the load began.
        loaded: whether it was under load.
        processes: the server's, by role.
        kv_usage: share of KV blocks that are held.
        running, waiting: requests in the engine.
        scratch_files, scratch_mib: in the server's folder for temporary files.
        shared_files: of this user in ``/dev/shm``.
        healthy: whether ``/health`` said so.
    """

    at_s: float
    loaded: bool
    processes: Mapping[str, Process]
    kv_usage: float
    running: float
    waiting: float
    scratch_files: int
    scratch_mib: float
    shared_files: int
    healthy: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as its client saw it.

    Attributes:
        kind: of client.
        outcome: see ``OUTCOMES``.
        choices: answers that it asked for.
        has_slo: whether it carried one.
        may_decline: whether it would rather be declined than wait.
        promised, attained: of its finished answers, by the server's reports.
        ttft_s: until its first token, or None.
    """

    kind: str
    outcome: Outcome
    choices: int = 1
    has_slo: bool = False
    may_decline: bool = False
    promised: int = 0
    attained: int = 0
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """What the server counted from the start of the load to its end.

    Attributes:
        finished: answers that ended by themselves (``vllm:request_success_total``).
        slo_finished: those of requests with an SLO (``vllm_slo:requests_finished_total``).
        promised, attained: of them, promised ones, and promised ones that attained.
        declined: requests (``vllm_slo:admissions_total``).
        promises: promises made, those that came late too.
        broken: promises withdrawn (``vllm_slo:promises_broken_total``).
    """

    finished: float
    slo_finished: float
    promised: float
    attained: float
    declined: float
    promises: float
    broken: float


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what was measured, what is allowed, and the verdict."""

    name: str
    measured: str
    allowed: str
    holds: bool


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Change of ``values`` per unit of ``times``: the median of the slopes of all pairs (Theil and
    Sen), which single outliers do not move. 0 for fewer than two moments."""
    points = list(zip(times, values, strict=True))
    found = [(b - a) / (t - s) for (s, a), (t, b) in combinations(points, 2) if t > s]
    return median(found) if found else 0.0


def growth(values: Sequence[float]) -> float:
    """Median of the last quarter less that of the first."""
    quarter = max(len(values) // 4, 1)
    return median(values[-quarter:]) - median(values[:quarter])


def warm(samples: Sequence[Sample], warm_up_s: float) -> list[Sample]:
    """Samples under load, once what is made at first has been made.

    Raises:
        ValueError: fewer than four are left; such a run says nothing of leaks.
    """
    found = [sample for sample in samples if sample.loaded and sample.at_s >= warm_up_s]
    if len(found) < 4:
        raise ValueError(f"{len(found)} samples after the warm-up: run for longer")
    return found


def check_leaks(
    before: Sample, samples: Sequence[Sample], after: Sample, warm_up_s: float
) -> list[Check]:
    """Whether anything stays that should go.

    Args:
        before: idle, when the load had not begun.
        samples: under load.
        after: idle again.
        warm_up_s: seconds of load that do not count.
    """
    checks = []
    loaded = warm(samples, warm_up_s)
    hours = [sample.at_s / 3600 for sample in loaded]
    for role in sorted(before.processes):
        if any(role not in sample.processes for sample in (*loaded, after)):
            checks.append(Check(f"{role}: process", "gone", "lives", False))
            continue
        rss = [sample.processes[role].rss_mib for sample in loaded]
        allowed = max(MEMORY_MIB, MEMORY_SHARE * median(rss))
        grown = growth(rss)
        text = f"{grown:+.1f} MiB ({slope(hours, rss):+.1f} MiB/h at {median(rss):.0f})"
        checks.append(
            Check(f"{role}: memory under load", text, f"{allowed:.0f} MiB", grown <= allowed)
        )
        threads = [sample.processes[role].threads for sample in loaded]
        checks.append(_small(f"{role}: threads under load", growth(threads)))
        idle = before.processes[role], after.processes[role]
        checks.append(_small(f"{role}: threads, idle", idle[1].threads - idle[0].threads))
        checks.append(_small(f"{role}: open files, idle", idle[1].files - idle[0].files))
    checks.append(_none("KV blocks held, idle", after.kv_usage))
    checks.append(_none("requests in the engine, idle", after.running + after.waiting))
    files = [sample.scratch_files for sample in loaded]
    checks.append(_small("temporary files under load", growth(files)))
    checks.append(_small("temporary files, idle", after.scratch_files - before.scratch_files))
    space = after.scratch_mib - before.scratch_mib
    checks.append(Check("temporary files' space, idle", f"{space:+.2f} MiB", "1 MiB", space <= 1.0))
    checks.append(_small("shared memory files, idle", after.shared_files - before.shared_files))
    return checks


def _small(name: str, grown: float) -> Check:
    return Check(name, f"{grown:+.0f}", f"+{FEW}", grown <= FEW)


def _none(name: str, found: float) -> Check:
    return Check(name, f"{found:g}", "0", found == 0)


def check_requests(seen: Sequence[Seen], counters: Counters) -> list[Check]:
    """Whether every request is accounted for, by its client and by the server alike.

    A client that left does not know whether its request ended first: so far the two may differ.
    """
    kinds = Counter(one.outcome for one in seen)
    strange = sum(one.outcome not in ("refused", "left") for one in seen if one.kind == "garbage")
    strange += sum(one.outcome == "refused" for one in seen if one.kind != "garbage")
    ended, gone = _choices(seen, "finished"), _choices(seen, "left", "lost", "errored")
    slo = [one for one in seen if one.has_slo]
    slo_ended, slo_gone = _choices(slo, "finished"), _choices(slo, "left", "lost", "errored")
    shy = [one for one in slo if one.may_decline]
    declined, shy_gone = _choices(shy, "declined"), _choices(shy, "left", "lost", "errored")
    return [
        Check("requests lost", str(kinds["lost"]), "0", not kinds["lost"]),
        Check("requests errored", str(kinds["errored"]), "0", not kinds["errored"]),
        Check("garbage taken, or a request refused", str(strange), "0", not strange),
        _between("answers that the server finished", counters.finished, ended, gone),
        _between("those with an SLO", counters.slo_finished, slo_ended, slo_gone),
        _between("requests that it declined", counters.declined, declined, shy_gone),
    ]


def _choices(seen: Sequence[Seen], *outcomes: Outcome) -> int:
    return sum(one.choices for one in seen if one.outcome in outcomes)


def _between(name: str, counted: float, least: int, unsure: int) -> Check:
    holds = least <= counted <= least + unsure
    return Check(name, f"{counted:.0f}", f"{least} to {least + unsure}", holds)


def check_promises(seen: Sequence[Seen], counters: Counters) -> list[Check]:
    """Whether promises were made, and kept."""
    checks = [
        Check("promises made", f"{counters.promises:.0f}", "> 0", counters.promises > 0),
        _kept("promises kept, by the server's count", counters.attained, counters.promised),
    ]
    reported = sum(one.promised for one in seen), sum(one.attained for one in seen)
    checks.append(_kept("promises kept, by the clients' reports", reported[1], reported[0]))
    return checks


def _kept(name: str, attained: float, promised: float) -> Check:
    share = attained / promised if promised else 0.0
    text = f"{share:.1%} of {promised:.0f}"
    return Check(name, text, f">= {KEPT:.0%}", share >= KEPT)


def check_service(samples: Sequence[Sample], *, same_answer: bool, stopped: bool) -> list[Check]:
    """Whether the server was healthy throughout, still says what it said, and went quietly.

    Args:
        samples: of the whole run.
        same_answer: whether a greedy answer is after the load what it was before.
        stopped: whether it ended when told to, with nothing of it left.
    """
    ill = sum(not sample.healthy for sample in samples)
    return [
        Check("samples without health", f"{ill} of {len(samples)}", "0", not ill),
        Check("the same answer afterwards", "yes" if same_answer else "no", "yes", same_answer),
        Check("nothing left once stopped", "yes" if stopped else "no", "yes", stopped),
    ]


def check_rows(checks: Sequence[Check]) -> list[list[str]]:
    """Rows of a table: name, measured, allowed, verdict."""
    return [[c.name, c.measured, c.allowed, "holds" if c.holds else "**fails**"] for c in checks]


def outcome_rows(seen: Sequence[Seen]) -> list[list[str]]:
    """Rows of a table: kind of client, requests, how many of each outcome, TTFT."""
    rows = []
    for kind in [*sorted({one.kind for one in seen}), "all"]:
        mine = [one for one in seen if kind in (one.kind, "all")]
        counts = Counter(one.outcome for one in mine)
        times = [one.ttft_s for one in mine if one.ttft_s is not None]
        ttft = f"{median(times):.2f}" if times else "-"
        rows.append([kind, str(len(mine)), *(str(counts[name]) for name in OUTCOMES), ttft])
    return rows


def sample_rows(
    samples: Sequence[Sample], roles: Sequence[str], count: int = 16
) -> list[list[str]]:
    """Rows of a table: about ``count`` moments, evenly spread, the last among them."""
    chosen = samples[:: max(len(samples) // count, 1)]
    if samples and chosen[-1] is not samples[-1]:
        chosen = [*chosen, samples[-1]]
    rows = []
    for sample in chosen:
        found = [sample.processes.get(role) for role in roles]
        rows.append(
            [
                f"{sample.at_s:.0f}",
                *(f"{one.rss_mib:.0f}" if one else "-" for one in found),
                *(str(one.threads) if one else "-" for one in found),
                *(str(one.files) if one else "-" for one in found),
                f"{sample.kv_usage:.0%}",
                f"{sample.running:.0f}",
                f"{sample.waiting:.0f}",
                str(sample.scratch_files),
            ]
        )
    return rows
