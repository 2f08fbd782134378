# SPDX-License-Identifier: Apache-2.0
"""Which simulated jobs kept their objectives, and the summary of a window.

A job attains if every round finished, the first token of every round came within ``ttft_s`` after
its client sent it, and the worst window of ten tokens of every stage kept ``tpot_s`` (SLOs-Serve,
section 6, "SLOs"). The gap before a stage's first token belongs to that stage, so each gap after
the first token counts once; a stage without a gap cannot miss. A request that was recorded or has a
class of the operator is a unit of its own; its class may also limit the time to its last token and
say over how many tokens TPOT is judged. Jobs without an objective are measured, but no share of
jobs that attain counts them. Times are seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_slo.core.attainment import worst_window_tpot_s
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.jobs import Job, JobResult, Round, RoundResult

TOLERANCE_S: Final = 1e-9
"""Most that rounding adds to a latency when step times are summed."""
DEFAULT_WARMUP: Final = 0.2
"""First share of a window's jobs that is not counted, because the system is not yet full."""


@dataclass(frozen=True, slots=True)
class JobMeasure:
    """One job measured.

    Attributes:
        has_objective: whether it has an objective to keep.
        tokens: prompt and answer tokens that it has to compute.
        promised: whether any round was promised; None if the system promises nothing.
        broken: whether a promised round missed its objectives.
        late_kept: whether every late promise of its rounds was kept; None: it has none.
        reason: why the first round that missed was not promised, or None.
        latency_s: arrival to last token, tools included; None if unfinished.
        ttfts_s: of each round that got a first token.
        tpots_s: worst window per stage that has a gap.
    """

    application: str
    has_objective: bool
    tokens: int
    output_tokens: int
    attained: bool
    finished: bool
    promised: bool | None
    broken: bool
    late_kept: bool | None
    reason: str | None
    latency_s: float | None
    ttfts_s: tuple[float, ...]
    tpots_s: tuple[float, ...]


def stage_tpots_s(asked: Round, token_times_s: Sequence[float]) -> list[float | None]:
    """Worst window of each stage in seconds per token; None for a stage without a gap.

    Only tokens that came are measured, so an unfinished answer is measured up to its last token.
    """
    worst: list[float | None] = []
    start = 0
    for stage in asked.stages:
        end = start + stage.tokens
        times_s = token_times_s[max(start - 1, 0) : end]
        worst.append(worst_window_tpot_s(times_s, asked.window_tokens))
        start = end
    return worst


def round_kept(asked: Round, got: RoundResult) -> bool:
    """Whether one round finished and kept its TTFT, every stage's TPOT, and its e2e time."""
    if not got.finished:
        return False
    times_s = got.token_times_s
    if len(times_s) != asked.output_tokens:
        raise SimulationError(
            f"round: {len(times_s)} tokens came of a finished answer of {asked.output_tokens}"
        )
    if times_s[0] - got.sent_s > asked.ttft_s + TOLERANCE_S:
        return False
    if times_s[-1] - got.sent_s > asked.e2e_s + TOLERANCE_S:
        return False
    worst = zip(asked.stages, stage_tpots_s(asked, times_s), strict=True)
    return all(tpot is None or tpot <= stage.tpot_s + TOLERANCE_S for stage, tpot in worst)


def job_finished(result: JobResult) -> bool:
    """Whether every round of the job finished."""
    every = len(result.rounds) == len(result.job.rounds)
    return every and all(got.finished for got in result.rounds)


def job_attained(result: JobResult) -> bool:
    """Whether the job kept all its objectives."""
    pairs = zip(result.job.rounds, result.rounds, strict=False)
    return job_finished(result) and all(round_kept(asked, got) for asked, got in pairs)


def measure_job(result: JobResult) -> JobMeasure:
    """The measures of one job."""
    job = result.job
    pairs = list(zip(job.rounds, result.rounds, strict=False))
    kept = [round_kept(asked, got) for asked, got in pairs]
    finished = job_finished(result)
    promises = [got.promised for _, got in pairs if got.promised is not None]
    late = [got.late_kept for _, got in pairs if got.late_kept is not None]
    tpots = (tpot for asked, got in pairs for tpot in stage_tpots_s(asked, got.token_times_s))
    return JobMeasure(
        application=job.application,
        has_objective=job.has_objective,
        tokens=job.tokens,
        output_tokens=sum(len(got.token_times_s) for _, got in pairs),
        attained=finished and all(kept),
        finished=finished,
        promised=any(promises) if promises else None,
        broken=any(
            got.promised is True and not ok for (_, got), ok in zip(pairs, kept, strict=True)
        ),
        late_kept=all(late) if late else None,
        reason=next((got.reason for (_, got), ok in zip(pairs, kept, strict=True) if not ok), None),
        latency_s=pairs[-1][1].token_times_s[-1] - job.arrival_s if finished else None,
        ttfts_s=tuple(got.token_times_s[0] - got.sent_s for _, got in pairs if got.token_times_s),
        tpots_s=tuple(tpot for tpot in tpots if tpot is not None),
    )


def counted(jobs: Sequence[Job], warmup: float = DEFAULT_WARMUP) -> list[Job]:
    """The jobs that count, by arrival: all but the first ``warmup`` share of their number."""
    if not 0 <= warmup < 1:
        raise SimulationError(f"warmup: must be a share from 0 to below 1, got {warmup}")
    ordered = sorted(jobs, key=lambda job: job.arrival_s)
    return ordered[int(warmup * len(ordered) + 1e-9) :]


def measure_counted(
    results: Sequence[JobResult], warmup: float = DEFAULT_WARMUP
) -> list[JobMeasure]:
    """Measures of the jobs that count, by arrival; ``results`` holds every job of the window.

    Recorded jobs are measured request by request.
    """
    by_id = {result.job.job_id: result for result in results}
    if len(by_id) != len(results):
        raise SimulationError("job_id: two jobs of one window have the same")
    chosen = counted([result.job for result in results], warmup)
    return [measure_job(part) for job in chosen for part in by_id[job.job_id].by_request()]


def judged(jobs: Sequence[Job]) -> list[Job]:
    """The jobs of which a share has to attain: those with an objective, or all if none has one."""
    return [job for job in jobs if job.has_objective] or list(jobs)


@dataclass(frozen=True, slots=True)
class Summary:
    """Jobs of one or more windows. Seconds; rates per second of arrivals.

    Attributes:
        attainment: share of those with an objective that attained; if none has one, of all that
            finished.
        by_application: the same per application, by name.
        token_attainment: share of their tokens (prompt and answer) that belong to attaining jobs.
        ttft_p50_s, ttft_p99_s: over rounds that got a token; None without one.
        tpot_p50_s, tpot_p99_s: worst window, over stages that have a gap; None without one.
        missed_latency_p99_s: arrival to last token of finished jobs that missed; None without one.
        promised: jobs with a promised round; None if the system promises nothing.
        promised_missed: jobs in which a promised round missed.
        late: jobs with a late promise.
        late_missed: jobs in which a late promise was not kept.
        reasons: why no promise was made -> number of jobs that missed, most frequent first.
        unfinished: jobs that did not end; only systems that drop requests have them.
        goodput_jobs_per_s: attaining jobs over ``window_s``.
        goodput_tokens_per_s: answer tokens of attaining jobs over ``window_s``.
        output_tokens_per_s: answer tokens of all jobs over ``window_s``.
        tokens_per_s: prompt and answer tokens of all jobs over ``window_s``.
    """

    jobs: int
    attainment: float
    by_application: dict[str, float]
    token_attainment: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    missed_latency_p99_s: float | None
    promised: int | None
    promised_missed: int
    late: int
    late_missed: int
    reasons: dict[str, int]
    unfinished: int
    goodput_jobs_per_s: float
    goodput_tokens_per_s: float
    output_tokens_per_s: float
    tokens_per_s: float

    @property
    def smallest(self) -> float:
        """The lowest attainment of an application."""
        return min(self.by_application.values())


def percentile(values: Iterable[float], q: float) -> float | None:
    """The ``q``-th percentile, 0 to 100; None without a value."""
    known = list(values)
    return float(np.percentile(known, q)) if known else None


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def summarise(measures: Sequence[JobMeasure], window_s: float) -> Summary:
    """Summarise jobs that arrived within ``window_s`` seconds, the sum over their windows.

    Raises:
        SimulationError: there is no job, or ``window_s`` is not above 0.
    """
    if not measures:
        raise SimulationError("jobs: none are left to measure after the warm-up")
    if not window_s > 0:
        raise SimulationError(f"window_s: must be above 0 s, got {window_s}")
    asking = [m for m in measures if m.has_objective] or list(measures)
    names = sorted({m.application for m in asking})
    good = [m for m in asking if m.attained]
    ttfts = [t for m in measures for t in m.ttfts_s]
    tpots = [t for m in measures for t in m.tpots_s]
    late = (m.latency_s for m in measures if not m.attained and m.latency_s is not None)
    promises = [m.promised for m in measures if m.promised is not None]
    return Summary(
        jobs=len(measures),
        attainment=_share([m.attained for m in asking]),
        by_application={
            name: _share([m.attained for m in asking if m.application == name]) for name in names
        },
        token_attainment=sum(m.tokens for m in good) / max(1, sum(m.tokens for m in asking)),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        tpot_p50_s=percentile(tpots, 50),
        tpot_p99_s=percentile(tpots, 99),
        missed_latency_p99_s=percentile(late, 99),
        promised=sum(promises) if promises else None,
        promised_missed=sum(m.broken for m in measures),
        late=sum(m.late_kept is not None for m in measures),
        late_missed=sum(m.late_kept is False for m in measures),
        reasons=dict(Counter(m.reason for m in measures if m.reason is not None).most_common()),
        unfinished=sum(not m.finished for m in measures),
        goodput_jobs_per_s=len(good) / window_s,
        goodput_tokens_per_s=sum(m.output_tokens for m in good) / window_s,
        output_tokens_per_s=sum(m.output_tokens for m in measures) / window_s,
        tokens_per_s=sum(m.tokens for m in measures) / window_s,
    )


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in the system over time: each from when it was sent until its last token.

    Attributes:
        times_s: rising.
        promised, best_effort: how many at each time. Without promises all are ``best_effort``.
        promises: whether the system promises anything.
    """

    times_s: tuple[float, ...]
    promised: tuple[int, ...]
    best_effort: tuple[int, ...]
    promises: bool


def load_over_time(results: Iterable[JobResult], points: int = 400) -> Load:
    """The load of simulated jobs, from 0 to the last token."""
    spans = [
        (got.sent_s, got.token_times_s[-1] if got.token_times_s else got.sent_s, got.promised)
        for result in results
        for got in result.rounds
    ]
    return load_of_spans(spans, points)


def load_of_spans(
    spans: Iterable[tuple[float, float, bool | None]], points: int = 400, to_s: float | None = None
) -> Load:
    """The load at ``points`` even times from 0 to ``to_s``; None: the end of the last request.

    ``spans``: of each request when it came, when it left, and whether it was promised; None: the
    system promises nothing.
    """
    parts: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    promises = False
    for begin_s, end_s, promised in spans:
        promises = promises or promised is not None
        parts[promised is True].append((begin_s, end_s))
    last_s = max((end for part in parts for _, end in part), default=0.0)
    times = np.linspace(0.0, last_s if to_s is None else to_s, points)
    plain, promised_ones = (_present(part, times) for part in parts)
    return Load(tuple(times.tolist()), promised_ones, plain, promises)


def _present(spans: Sequence[tuple[float, float]], times: np.ndarray) -> tuple[int, ...]:
    begun = np.searchsorted(np.sort([s for s, _ in spans]), times, "right")
    ended = np.searchsorted(np.sort([e for _, e in spans]), times, "right")
    return tuple((begun - ended).tolist())
