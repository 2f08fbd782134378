# SPDX-License-Identifier: Apache-2.0
"""Capacity: the highest rate, in jobs/s per GPU, at which a system keeps its attainment.

Each (system, setting, window) is one task. The searches for all questions about a window use one
grid of rates, so they share runs. A run stops as soon as all questions about it are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.demand import start_rate
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.questions import Question
from vllm_slo.sim.search import DEFAULT_PRECISION
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.statistics import Capacity
from vllm_slo.sim.systems import System
from vllm_slo.sim.windows import Point, measure_window, search_window
from vllm_slo.sim.workers import Processes, Progress, run_tasks

TUNING_SEEDS: Final = (100, 101)
"""Windows that choose the best member of a family; results are reported on others."""


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
        seeds: one window each.
        start: first rate of a case; None: ``demand.start_rate``.
        precision: relative, of the rate.
        processes, progress: as ``run_tasks``.
    """
    starts: dict[str, float] = {}
    tasks = []
    for case in cases:
        key = repr(replace(case.setting, conditions=Conditions()))
        if start is None and key not in starts:
            starts[key] = start_rate(case.setting)
        first = start(case) if start else starts[key]
        tasks += [(case, seed, tuple(questions), first, precision) for seed in seeds]
    searched = iter(run_tasks(search_window, tasks, processes, progress))
    per_case = [[next(searched) for _ in seeds] for _ in cases]
    return [
        tuple(
            Capacity.of(question, (search.thresholds[place] for search in searches))
            for place, question in enumerate(questions)
        )
        for searches in per_case
    ]


def sweep(
    cases: Sequence[Case],
    rates: Sequence[float | None],
    seeds: Sequence[int],
    *,
    with_load: bool = False,
    total: bool = False,
    processes: Processes = None,
    progress: Progress | None = None,
) -> list[list[Point]]:
    """Each case at each rate, run to the end.

    Args:
        rates: jobs/s per GPU; None: a trace at its own pace.
        with_load: also keep the load over time of the first seed at the highest rate.
        total: the rates are those of all GPUs of a case.
    """
    highest = max((rate for rate in rates if rate is not None), default=None)

    def per_gpu(case: Case, rate: float | None) -> float | None:
        return rate / case.gpus if total and rate is not None else rate

    tasks = [
        (case, per_gpu(case, rate), seed, with_load and seed == seeds[0] and rate == highest)
        for case in cases
        for rate in rates
        for seed in seeds
    ]
    windows = iter(run_tasks(measure_window, tasks, processes, progress))
    return [
        [
            Point.of(
                case.shown_rate(per_gpu(case, rate)),
                [next(windows) for _ in seeds],
                own_pace=rate is None,
            )
            for rate in rates
        ]
        for case in cases
    ]


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

    Report results on other seeds: on the tuning seeds the winner looks better than it is.
    """
    if len(candidates) == 1:
        return candidates[0]
    capacities = find_capacities(
        [Case(setting, system) for system in candidates],
        [question],
        seeds,
        precision=precision,
        processes=processes,
        progress=progress,
    )
    return best_of(candidates, [capacity for (capacity,) in capacities])
