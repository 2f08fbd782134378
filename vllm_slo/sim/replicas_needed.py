# SPDX-License-Identifier: Apache-2.0
"""The search of ``vllm-slo plan``: how many replicas traffic needs, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_slo.sim.demand import Resource, binding, demand
from vllm_slo.sim.fluid import Fluid, find_fluid
from vllm_slo.sim.questions import Question
from vllm_slo.sim.search import smallest
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.systems import System
from vllm_slo.sim.windows import Point, measure_window, run_jobs
from vllm_slo.sim.workers import Processes, Progress, run_tasks


@dataclass(frozen=True, slots=True)
class Cost:
    """What so many GPUs cost.

    Attributes:
        gpu_hours_per_mtok: GPU-hours for a million answer tokens; None: no token came.
        dollars_per_hour: of all GPUs; None: no price is known.
        dollars_per_mtok: per million answer tokens; ``dollars_per_mtok_total``: per million tokens
            of prompts and answers.
    """

    gpu_hours_per_mtok: float | None
    dollars_per_hour: float | None
    dollars_per_mtok: float | None
    dollars_per_mtok_total: float | None

    @classmethod
    def of(cls, gpus: int, price: float | None, output_per_s: float, per_s: float) -> Cost:
        """``price``: US dollars per GPU and hour; rates: answer tokens and all tokens per s."""
        hour = None if price is None else gpus * price

        def per_million(hourly: float | None, rate: float) -> float | None:
            return None if hourly is None or rate <= 0 else hourly / (rate * 3600) * 1e6

        return cls(
            per_million(float(gpus), output_per_s),
            hour,
            per_million(hour, output_per_s),
            per_million(hour, per_s),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """How many replicas traffic needs.

    Attributes:
        setting: of one replica.
        rate: jobs/s of all replicas (of recorded traffic requests/s); None: as recorded.
        question: the attainment to keep.
        enough: the smallest number found to keep it in every window; None if ``max_replicas`` do
            not. A number below ``Search.floor`` is never enough.
        on_average: the smallest number found to keep it over all windows together.
        jobs: per window; None: as recorded.
        points: replicas -> measures: ``on_average``, ``enough``, one fewer and one more than each.
        shares: replicas -> shares of an engine that the traffic needs on average.
    """

    setting: Setting
    system: System
    rate: float | None
    question: Question
    enough: int | None
    on_average: int | None
    max_replicas: int
    jobs: int | None
    points: Mapping[int, Point]
    shares: Mapping[int, dict[Resource, float]]

    @property
    def short(self) -> int | None:
        """The largest number of replicas known not to keep it; None if one replica does."""
        if self.enough is None:
            return self.max_replicas
        return self.enough - 1 or None

    @property
    def binding(self) -> Resource | None:
        """What is used most with one replica fewer than needed; None: one replica is enough."""
        return None if self.short is None else binding(self.shares[self.short])

    def gpus(self, replicas: int) -> int:
        return replicas * self.system.engines * self.setting.hardware.gpus

    def cost(self, replicas: int) -> Cost:
        summary = self.points[replicas].summary
        return Cost.of(
            self.gpus(replicas),
            self.setting.hardware.price_per_gpu_hour,
            summary.output_tokens_per_s,
            summary.tokens_per_s,
        )


def window_keeps(case: Case, rate: float | None, seed: int, question: Question) -> bool:
    """Whether one window at ``rate`` jobs/s per GPU keeps the attainment."""
    _, evidence = run_jobs(case, case.window(rate, seed), seed, (question,))
    return evidence.answer(question) is True


class Search:
    """Numbers of replicas of one system for one traffic; every number gets the same windows.

    At a rate a window has ``setting.jobs`` jobs for each of the engines that the rate would keep
    half busy, so that it is long enough to build a queue.
    """

    def __init__(
        self,
        setting: Setting,
        system: System,
        rate: float | None,
        question: Question,
        seeds: Sequence[int],
        most: int,
        processes: Processes = None,
        progress: Progress | None = None,
    ) -> None:
        self.setting, self.system, self.rate = setting, system, rate
        self.question, self.seeds, self.most = question, tuple(seeds), most
        self._processes, self._progress = processes, progress
        self._tried = 0
        self._points: dict[int, Point] = {}
        hardware = setting.hardware
        sample = [job for seed in self.seeds for job in setting.make(None, 0, seed)] if (
            rate is None
        ) else replace(setting, fit="rescale").make(rate, setting.jobs, 0)  # fmt: skip
        self._need = demand(sample, hardware)
        seconds = sum(t.duration_s for t in setting.traffic) if rate is None else (
            setting.window_s(rate, 0, len(sample), sample)
        )  # fmt: skip
        self._jobs_per_s = len(sample) / seconds
        self._limit = self._need.limit(hardware)
        busy = min(max(1, math.ceil(2 * self._jobs_per_s / self._limit)), most * system.engines)
        self.jobs = None if rate is None else setting.jobs * busy

    def case(self, replicas: int) -> Case:
        return Case(self.setting.with_replicas(replicas), self.system, self.jobs)

    def _per_gpu(self, case: Case) -> float | None:
        return None if self.rate is None else self.rate / case.gpus

    @property
    def floor(self) -> int:
        """With fewer replicas the work takes more than all time, and the queue grows without end.

        A short window may keep its share all the same.
        """
        busy = self._jobs_per_s * (self._need.prefill_s + self._need.decode_s)
        return max(1, math.ceil(busy / self.system.engines - 1e-9))

    def _keeps(self, replicas: int) -> bool:
        """Whether every window keeps the attainment."""
        if replicas < self.floor:
            return False
        self._tried += 1
        if self._progress is not None:
            self._progress(self._tried, 2 * math.ceil(math.log2(self.most)) + 2)
        case = self.case(replicas)
        tasks = [(case, self._per_gpu(case), seed, self.question) for seed in self.seeds]
        return all(run_tasks(window_keeps, tasks, self._processes))

    def point(self, replicas: int) -> Point:
        """All windows run to their end."""
        if replicas not in self._points:
            case = self.case(replicas)
            tasks = [(case, self._per_gpu(case), seed) for seed in self.seeds]
            windows = run_tasks(measure_window, tasks, self._processes)
            rate = case.shown_rate(self._per_gpu(case))
            self._points[replicas] = Point.of(rate, windows, own_pace=self.rate is None)
        return self._points[replicas]

    def _keeps_on_average(self, replicas: int) -> bool:
        if replicas < self.floor:
            return False
        summary = self.point(replicas).summary
        share = summary.smallest if self.question.every else summary.attainment
        return share >= self.question.target - 1e-9

    def fluid(self) -> Fluid:
        """The bounds; SimulationError if SciPy is missing."""
        case = self.case(1)
        most = self.most * self.system.engines
        rate = self._per_gpu(case)
        return find_fluid(case, rate, self.question, self.seeds, most, self._processes)

    def plan(self) -> Plan:
        """Search the numbers of replicas."""
        least = math.ceil(self._jobs_per_s / self._limit / self.system.engines)
        enough = smallest(self._keeps, self.most, least)
        on_average = smallest(self._keeps_on_average, enough or self.most, enough or self.most)
        shown = {self.most, self.most - 1} if enough is None else {enough, enough - 1, enough + 1}
        if on_average is not None:
            shown |= {on_average, on_average - 1}
        counts = sorted(shown - {0})
        return Plan(
            self.setting,
            self.system,
            self.rate,
            self.question,
            enough,
            on_average,
            self.most,
            self.jobs,
            {count: self.point(count) for count in counts},
            {count: self._shares(count) for count in counts},
        )

    def _shares(self, replicas: int) -> dict[Resource, float]:
        engines = replicas * self.system.engines
        return self._need.shares(self._jobs_per_s / engines, self.setting.hardware)
