# SPDX-License-Identifier: Apache-2.0
"""One window of jobs: run at one rate, or search for its threshold.

``search_window`` and ``measure_window`` are tasks for ``workers.run_tasks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from vllm_slo.sim.cluster import Run, simulate
from vllm_slo.sim.jobs import Job
from vllm_slo.sim.measure import (
    JobMeasure,
    Load,
    Summary,
    counted,
    load_over_time,
    measure_counted,
    summarise,
)
from vllm_slo.sim.questions import Evidence, Question, Watcher
from vllm_slo.sim.search import Threshold, find_threshold
from vllm_slo.sim.setting import Case
from vllm_slo.sim.statistics import mean_interval


def run_jobs(
    case: Case, jobs: Sequence[Job], seed: int, questions: Sequence[Question] = ()
) -> tuple[Run, Evidence]:
    """Simulate ``jobs``; with ``questions`` only until all of them are answered."""
    watcher = Watcher(jobs, case.setting.warmup, questions)
    conditions = replace(case.setting.conditions, seed=seed)
    run = simulate(
        jobs, case.system, case.setting.hardware, conditions, watch=watcher if questions else None
    )
    if not questions:
        for result in run.results:
            watcher(result)
    return run, watcher.evidence


@dataclass(frozen=True, slots=True)
class Search:
    """One window searched: a threshold per question, and the rates in the order they were run."""

    thresholds: tuple[Threshold, ...]
    rates: tuple[float, ...]
    wall_s: float


def search_window(
    case: Case, seed: int, questions: Sequence[Question], start: float, precision: float
) -> Search:
    """Thresholds of one window; each rate is simulated at most once."""
    evidence: dict[float, Evidence] = {}
    wall_s = 0.0

    def keeps(question: Question, rate: float) -> bool:
        nonlocal wall_s
        if rate not in evidence:
            run, evidence[rate] = run_jobs(case, case.window(rate, seed), seed, questions)
            wall_s += run.wall_s
        # A job that never ended counts as missed.
        return evidence[rate].answer(question) is True

    thresholds = tuple(
        find_threshold(partial(keeps, question), start, precision=precision)
        for question in questions
    )
    return Search(thresholds, tuple(evidence), wall_s)


@dataclass(frozen=True, slots=True)
class Window:
    """One window run to its end at one rate."""

    measures: tuple[JobMeasure, ...]
    window_s: float
    load: Load | None
    steps: int
    end_s: float
    wall_s: float
    scheduler_s: float


def measure_window(case: Case, rate: float | None, seed: int, with_load: bool = False) -> Window:
    """Run one window at ``rate`` jobs/s per GPU, or None as recorded, and measure it."""
    jobs, warmup = case.window(rate, seed), case.setting.warmup
    run, _ = run_jobs(case, jobs, seed)
    measures = tuple(measure_counted(run.results, warmup))
    return Window(
        measures,
        case.setting.window_s(case.rate(rate), seed, len(jobs), counted(jobs, warmup)),
        load_over_time(run.results) if with_load else None,
        run.steps,
        run.end_s,
        run.wall_s,
        run.scheduler_s,
    )


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one rate (jobs/s per GPU), all windows together.

    Attributes:
        half_width: of the 95% interval of the attainment over windows; None for one window.
        load: of the first window; None if not measured.
        own_pace: whether the jobs arrived as they were recorded.
    """

    rate: float
    summary: Summary
    attainments: tuple[float, ...]
    half_width: float | None
    load: Load | None
    wall_s: float
    own_pace: bool = False

    @classmethod
    def of(cls, rate: float, windows: Sequence[Window], *, own_pace: bool = False) -> Point:
        pooled = summarise(
            [measure for window in windows for measure in window.measures],
            sum(window.window_s for window in windows),
        )
        shares = tuple(summarise(w.measures, w.window_s).attainment for w in windows)
        return cls(
            rate,
            pooled,
            shares,
            mean_interval(shares)[1],
            windows[0].load,
            sum(window.wall_s for window in windows),
            own_pace,
        )
