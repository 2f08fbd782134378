# SPDX-License-Identifier: Apache-2.0
"""Capacity: the highest rate, in jobs/s per GPU, at which a system keeps its attainment.

The first half is pure: a bisection over rates, and what several windows say together. The second
half runs simulations for it, in as many processes as asked; each (system, setting, window) is a
task of its own, so the outcome does not depend on their number or order.

Rates lie on one grid, ``start * 2 ** (i / n)``, whatever the question; so the searches for 90% and
for 98% share runs. A run stops as soon as every question about it is decided.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from vllm_slo.sim.cluster import Conditions, Run, simulate
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job, JobResult
from vllm_slo.sim.measure import (
    DEFAULT_WARMUP,
    JobMeasure,
    Load,
    Summary,
    counted,
    job_attained,
    load_over_time,
    measure_counted,
    summarise,
)
from vllm_slo.sim.scenarios import make_jobs
from vllm_slo.sim.systems import System

DEFAULT_PRECISION: Final = 0.03
OCTAVES: Final = 8
"""How often the first rate is doubled or halved before a search gives up."""
TUNING_SEEDS: Final = (100, 101)

_EPSILON: Final = 1e-9
# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom.
_STUDENT: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

# --- questions and evidence -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """Do ``target`` of the jobs attain (of ``every`` application: of each one's jobs)?"""

    target: float
    every: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.target <= 1:
            raise SimulationError(
                f"attainment: must be a share above 0 and at most 1, got {self.target:g}"
            )

    def __str__(self) -> str:
        return f"{self.target:.4g} of every application" if self.every else f"{self.target:.4g}"

    @property
    def percent(self) -> str:
        """In words: "90%", or "90% of every application"."""
        return f"{100 * self.target:.4g}%" + (" of every application" if self.every else "")


class Evidence:
    """How many jobs of each application count, and what is known of them so far."""

    def __init__(self, totals: Mapping[str, int]) -> None:
        if not sum(totals.values()):
            raise SimulationError("jobs: none is left to measure after the warm-up; use more")
        self.totals = dict(totals)
        self.attained: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()

    def add(self, application: str, attained: bool) -> None:
        """One more job has ended."""
        (self.attained if attained else self.missed)[application] += 1

    def answer(self, question: Question) -> bool | None:
        """Whether the target is kept whatever the jobs still open do; None: it depends on them."""
        parts = [[name] for name in self.totals] if question.every else [list(self.totals)]
        answers = [self._part(names, question.target) for names in parts]
        if False in answers:
            return False
        return None if None in answers else True

    def _part(self, names: Sequence[str], target: float) -> bool | None:
        total = sum(self.totals[name] for name in names)
        needed = target * total - _EPSILON
        if sum(self.attained[name] for name in names) >= needed:
            return True
        return False if total - sum(self.missed[name] for name in names) < needed else None


class Watcher:
    """For ``simulate``: collects evidence as jobs end, and stops when all is answered.

    Args:
        jobs: all jobs of the run.
        warmup: share of them that does not count.
        questions: what is asked; none: never stops.
    """

    def __init__(self, jobs: Sequence[Job], warmup: float, questions: Sequence[Question]) -> None:
        chosen = counted(jobs, warmup)
        self.evidence = Evidence(Counter(job.application for job in chosen))
        self._open = {job.job_id for job in chosen}
        self._questions = questions

    def __call__(self, result: JobResult) -> bool:
        if result.job.job_id not in self._open:
            return False
        self._open.discard(result.job.job_id)
        self.evidence.add(result.job.application, job_attained(result))
        return bool(self._questions) and all(
            self.evidence.answer(question) is not None for question in self._questions
        )


# --- one window -----------------------------------------------------------------------------------

Censored = Literal["", "never keeps", "never fails"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """Where one window stops keeping its attainment. Rates in jobs/s per GPU.

    Attributes:
        kept: highest rate found to keep it; None where not even the lowest rate tried does.
        missed: lowest rate found above ``kept`` to miss it; None where the highest rate keeps it.
        lowest, highest: rates tried.
    """

    kept: float | None
    missed: float | None
    lowest: float
    highest: float

    @property
    def censored(self) -> Censored:
        """Why there is no answer; empty where there is one."""
        if self.kept is None:
            return "never keeps"
        return "never fails" if self.missed is None else ""


def find_threshold(
    keeps: Callable[[float], bool],
    start: float,
    *,
    precision: float = DEFAULT_PRECISION,
    octaves: int = OCTAVES,
) -> Threshold:
    """Bracket by doubling or halving from ``start``, then bisect in log rate.

    ``keeps`` should be true below some rate and false above it; then the highest rate that keeps
    lies in [kept, missed) and ``missed <= (1 + precision) * kept``. Otherwise one of its crossings
    is found. Each rate is tried once.

    Args:
        keeps: whether a rate (jobs/s per GPU) keeps its attainment.
        start: first rate tried, above 0.
        precision: relative, above 0.
        octaves: most doublings and halvings; beyond them the result is censored.
    """
    if not 0 < start < math.inf:
        raise SimulationError(f"start: must be a rate above 0 jobs/s, got {start}")
    if not 0 < precision < math.inf:
        raise SimulationError(f"precision: must be above 0, got {precision}")
    parts = 1  # steps per octave, a power of two: the grid of a coarser search is part of a finer
    while 2 ** (1 / parts) > 1 + precision:
        parts *= 2
    tried: list[int] = []

    def at(place: int) -> bool:
        tried.append(place)
        return keeps(start * 2 ** (place / parts))

    most = octaves * parts
    low, high = _bracket(at, parts, most)
    while low is not None and high is not None and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) else (low, middle)
    rates = [None if place is None else start * 2 ** (place / parts) for place in (low, high)]
    lowest, highest = (start * 2 ** (place / parts) for place in (min(tried), max(tried)))
    return Threshold(rates[0], rates[1], lowest, highest)


def _bracket(keeps: Callable[[int], bool], octave: int, most: int) -> tuple[int | None, int | None]:
    """Neighbouring octaves of which the lower keeps and the upper misses; None beyond the end."""
    place = 0
    if keeps(0):
        while place < most:
            if not keeps(place + octave):
                return place, place + octave
            place += octave
        return place, None
    while place > -most:
        if keeps(place - octave):
            return place - octave, place
        place -= octave
    return None, place


# --- several windows ------------------------------------------------------------------------------


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half the width of its 95% interval (Student's t); None for a single value."""
    if not values:
        raise SimulationError("windows: there is none to take the mean of")
    mean, freedom = math.fsum(values) / len(values), len(values) - 1
    if freedom == 0:
        return mean, None
    quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.5 / freedom
    variance = math.fsum((value - mean) ** 2 for value in values) / freedom
    return mean, quantile * math.sqrt(variance / len(values))


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the windows of one system say to one question. Rates in jobs/s per GPU.

    Attributes:
        question: what was asked.
        windows: one threshold per window.
        rate: mean over the windows; None where any of them has no answer.
        half_width: of the 95% interval; None with ``rate``, and for a single window.
    """

    question: Question
    windows: tuple[Threshold, ...]
    rate: float | None
    half_width: float | None

    @classmethod
    def of(cls, question: Question, windows: Iterable[Threshold]) -> Capacity:
        """Sum up; never extrapolates beyond the rates that were tried."""
        found = tuple(windows)
        kept = [one.kept for one in found if one.kept is not None and not one.censored]
        if len(kept) < len(found) or not found:
            return cls(question, found, None, None)
        return cls(question, found, *mean_interval(kept))

    @property
    def text(self) -> str:
        """The capacity with its interval, or why there is none."""
        if self.rate is not None:
            width = "" if self.half_width is None else f" +- {_short(self.half_width, 2)}"
            return f"{_short(self.rate, 3)}{width}"
        asked, count = self.question.percent, len(self.windows)
        never = [one for one in self.windows if one.censored == "never keeps"]
        always = [one for one in self.windows if one.censored == "never fails"]
        part = never or always
        some = "" if len(part) == count else f" in {len(part)} of {count} windows"
        if never:
            lowest = min(one.lowest for one in never)
            return f"never reaches {asked}{some}, not even at {lowest:.3g}"
        highest = min(one.highest for one in always)
        return f"keeps {asked} up to {highest:.3g}, the highest rate tried{some}"

    @property
    def score(self) -> float:
        """For choosing among settings: mean of what was seen to be kept (0: nothing was)."""
        return math.fsum(one.kept or 0.0 for one in self.windows) / max(1, len(self.windows))


def _short(value: float, digits: int) -> str:
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def ratio(one: Capacity, base: Capacity) -> tuple[float, float, float] | None:
    """How many times the capacity of ``base``: geometric mean over the windows, low, high (95%).

    The windows of both are the same jobs, so they are compared pairwise. With a single window low
    and high are the mean. None where either has a window without an answer.
    """
    if one.rate is None or base.rate is None:
        return None
    pairs = zip(one.windows, base.windows, strict=True)
    mean, half = mean_interval([math.log((a.kept or 1.0) / (b.kept or 1.0)) for a, b in pairs])
    return math.exp(mean), math.exp(mean - (half or 0.0)), math.exp(mean + (half or 0.0))


# --- simulated windows ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """What a window depends on besides system, rate and seed.

    Attributes:
        scenario: one of ``scenarios.SCENARIOS``.
        hardware: one engine.
        conditions: replicas, wrong step times; its ``seed`` is replaced by the window's.
        jobs: per window and engine, so that windows of one rate per GPU last equally long.
        warmup: share of them, by arrival, that does not count.
        arrivals, fit, lengths, trace_file: as ``scenarios.make_jobs``.
    """

    scenario: str
    hardware: Hardware
    conditions: Conditions = field(default_factory=Conditions)
    jobs: int = 500
    warmup: float = DEFAULT_WARMUP
    arrivals: str | None = None
    fit: Literal["rescale", "thin"] = "rescale"
    lengths: Literal["table", "trace"] = "table"
    trace_file: Path | None = None

    def make(self, rate: float, count: int, seed: int) -> list[Job]:
        """``count`` jobs at ``rate`` jobs/s in all."""
        return make_jobs(
            self.scenario,
            self.hardware,
            rate=rate,
            count=count,
            seed=seed,
            arrivals=self.arrivals,
            fit=self.fit,
            lengths=self.lengths,
            trace_file=self.trace_file,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A system in a setting. ``count``: jobs per window; None: ``setting.jobs`` for each engine."""

    setting: Setting
    system: System
    count: int | None = None

    @property
    def engines(self) -> int:
        """Engines of all replicas."""
        return self.system.engines * self.setting.conditions.replicas

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return self.engines * self.setting.hardware.gpus

    def window(self, rate: float, seed: int) -> list[Job]:
        """Jobs of one window at ``rate`` jobs/s per GPU."""
        count = self.count or self.setting.jobs * self.engines
        return self.setting.make(rate * self.gpus, count, seed)


def run_jobs(
    case: Case, jobs: Sequence[Job], seed: int, questions: Sequence[Question] = ()
) -> tuple[Run, Evidence]:
    """Simulate ``jobs``; with ``questions`` only until these are answered."""
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
    """One window searched: a threshold per question, and the rates run in order of trial."""

    thresholds: tuple[Threshold, ...]
    rates: tuple[float, ...]
    wall_s: float


def search_window(
    case: Case, seed: int, questions: Sequence[Question], start: float, precision: float
) -> Search:
    """Thresholds of one window; every rate is simulated once at most."""
    evidence: dict[float, Evidence] = {}
    wall_s = 0.0

    def keeps(question: Question, rate: float) -> bool:
        nonlocal wall_s
        if rate not in evidence:
            run, evidence[rate] = run_jobs(case, case.window(rate, seed), seed, questions)
            wall_s += run.wall_s
        # A job that the run never ended has missed.
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


def measure_window(case: Case, rate: float, seed: int, with_load: bool = False) -> Window:
    """Run one window at ``rate`` jobs/s per GPU and measure it."""
    jobs = case.window(rate, seed)
    run, _ = run_jobs(case, jobs, seed)
    measures = tuple(measure_counted(run.results, case.setting.warmup))
    return Window(
        measures,
        len(measures) / (rate * case.gpus),
        load_over_time(run.results) if with_load else None,
        run.steps,
        run.end_s,
        run.wall_s,
        run.scheduler_s,
    )


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one rate (jobs/s per GPU), its windows pooled.

    ``half_width``: of the 95% interval of the attainment over windows; None for one window.
    ``load`` is that of the first window, where it was asked for.
    """

    rate: float
    summary: Summary
    attainments: tuple[float, ...]
    half_width: float | None
    load: Load | None
    wall_s: float

    @classmethod
    def of(cls, rate: float, windows: Sequence[Window]) -> Point:
        """Pool windows."""
        pooled = summarise(
            [m for one in windows for m in one.measures], sum(one.window_s for one in windows)
        )
        shares = tuple(summarise(one.measures, one.window_s).attainment for one in windows)
        return cls(
            rate,
            pooled,
            shares,
            mean_interval(shares)[1],
            windows[0].load,
            sum(one.wall_s for one in windows),
        )


# --- many of them at once -------------------------------------------------------------------------

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with (tasks done, tasks in all)."""


def _leave_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _start_worker() -> None:
    # A parent that is killed cannot tell its workers.
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    # One task per process: threads of their own would only stand in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    quiet()


def quiet() -> None:
    """Keep vLLM's talk about a model that is never run off the terminal."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)


class Workers:
    """Processes that outlive one call of ``run_tasks``, so that each imports vLLM once.

    Args:
        processes: None: as many as there are cores; 1: work in this process.
    """

    def __init__(self, processes: int | None = None) -> None:
        self.processes = processes or usable_cores()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def pool(self) -> ProcessPoolExecutor:
        """The processes, begun by the first call."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self.processes, mp_context=context, initializer=_start_worker
            )
        return self._pool


Processes = Workers | int | None


def run_tasks(
    function: Callable[..., T],
    arguments: Sequence[tuple[Any, ...]],
    processes: Processes = None,
    progress: Progress | None = None,
) -> list[T]:
    """``function(*a)`` for each of ``arguments``, in their order.

    Args:
        function: of a module's top level.
        arguments: picklable.
        processes: ``Workers``, or how many to begin for this call alone.
        progress: told after each task.
    """
    if not isinstance(processes, Workers):
        with Workers(processes) as workers:
            return run_tasks(function, arguments, workers, progress)
    total = len(arguments)
    show = progress or (lambda done, of: None)
    show(0, total)
    if processes.processes == 1 or total < 2:
        results = []
        for done, one in enumerate(arguments, 1):
            results.append(function(*one))
            show(done, total)
        return results
    pool = processes.pool()
    futures = [pool.submit(function, *one) for one in arguments]
    try:
        for done, finished in enumerate(as_completed(futures), 1):
            finished.result()
            show(done, total)
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise SimulationError(
            "processes: a worker died (out of memory?); use fewer --processes"
        ) from error
    finally:
        for future in futures:
            future.cancel()


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_capacities(
    cases: Sequence[Case],
    questions: Sequence[Question],
    seeds: Sequence[int],
    *,
    start: Callable[[Case], float] | None = None,
    precision: float = DEFAULT_PRECISION,
    processes: Processes = None,
    progress: Progress | None = None,
) -> list[tuple[Capacity, ...]]:
    """Capacities of each case, one per question.

    Args:
        cases: systems in settings.
        questions: asked of every window; their searches share runs.
        seeds: one window each.
        start: first rate of a case; None: half of what the hardware could do on average.
        precision: relative, of the rate.
        processes, progress: as ``run_tasks``.
    """
    from vllm_slo.sim.demand import start_rate

    starts: dict[str, float] = {}
    tasks = []
    for case in cases:
        key = repr(replace(case.setting, conditions=Conditions()))
        if start is None and key not in starts:
            starts[key] = start_rate(case.setting)
        first = start(case) if start else starts[key]
        tasks += [(case, seed, tuple(questions), first, precision) for seed in seeds]
    found = iter(run_tasks(search_window, tasks, processes, progress))
    per_case = [[next(found) for _ in seeds] for _ in cases]
    return [
        tuple(
            Capacity.of(question, (one.thresholds[place] for one in searches))
            for place, question in enumerate(questions)
        )
        for searches in per_case
    ]


def sweep(
    cases: Sequence[Case],
    rates: Sequence[float],
    seeds: Sequence[int],
    *,
    with_load: bool = False,
    processes: Processes = None,
    progress: Progress | None = None,
) -> list[list[Point]]:
    """Each case at each rate (jobs/s per GPU), run to the end.

    ``with_load`` also keeps the load over time of the first seed at the highest rate.
    """
    tasks = [
        (case, rate, seed, with_load and seed == seeds[0] and rate == max(rates))
        for case in cases
        for rate in rates
        for seed in seeds
    ]
    found = iter(run_tasks(measure_window, tasks, processes, progress))
    return [[Point.of(rate, [next(found) for _ in seeds]) for rate in rates] for _ in cases]


def best_of(candidates: Sequence[System], capacities: Sequence[Capacity]) -> System:
    """The candidate with the highest capacity; the earlier one of equals."""
    if not candidates:
        raise SimulationError("systems: a family has no candidate")
    pairs = zip(candidates, capacities, strict=True)
    return max(pairs, key=lambda pair: pair[1].score)[0]


def best_of_family(
    candidates: Sequence[System],
    setting: Setting,
    question: Question,
    *,
    seeds: Sequence[int] = TUNING_SEEDS,
    precision: float = DEFAULT_PRECISION,
    processes: Processes = None,
    progress: Progress | None = None,
) -> System:
    """The member of a family with the highest capacity on the tuning seeds.

    Report on other seeds: the winner is flattered by those that chose it.
    """
    if len(candidates) == 1:
        return candidates[0]
    found = find_capacities(
        [Case(setting, system) for system in candidates],
        [question],
        seeds,
        precision=precision,
        processes=processes,
        progress=progress,
    )
    return best_of(candidates, [one[0] for one in found])
