# SPDX-License-Identifier: Apache-2.0
"""The setting of a simulation: jobs, hardware, conditions; a case adds the system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from vllm_slo.sim.arrivals import Fit, Stretch
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job
from vllm_slo.sim.measure import DEFAULT_WARMUP
from vllm_slo.sim.systems import System
from vllm_slo.sim.traffic import Traffic, with_classes
from vllm_slo.sim.workload import make_jobs
from vllm_slo.traces.classes import TrafficClasses


@dataclass(frozen=True, slots=True)
class Setting:
    """All that a window depends on besides system, rate and seed.

    Attributes:
        scenario: one of ``scenarios.SCENARIOS``. With traffic of its own lengths it is only a name.
        conditions: replicas, errors of the step times; the window's seed replaces its ``seed``.
        jobs: per window and engine, so that windows of one rate per GPU last equally long.
        warmup: share of them, by arrival, that does not count.
        arrivals, fit: as ``workload.make_jobs``.
        lengths: with ``trace`` each row of a trace brings its own.
        traffic: recorded requests in place of the scenario's arrivals, and with ``lengths`` of
            ``trace`` of all that the scenario has. Windows at a rate are made of the first. At its
            own pace (rate None) a window is one of them, and the seed is its number.
        classes: the operator's, for the jobs of the scenario; None: it has its own objectives.
    """

    scenario: str
    hardware: Hardware
    conditions: Conditions = field(default_factory=Conditions)
    jobs: int = 500
    warmup: float = DEFAULT_WARMUP
    arrivals: str | None = None
    fit: Fit = "rescale"
    lengths: Literal["table", "trace"] = "table"
    traffic: tuple[Traffic, ...] = ()
    classes: TrafficClasses | None = None

    @property
    def recorded(self) -> bool:
        """Whether its jobs are recorded requests."""
        return bool(self.traffic) and self.lengths == "trace"

    @property
    def unit(self) -> str:
        """What is counted: a job, or a request where each has a class of the operator."""
        return "request" if self.recorded else "job"

    @property
    def own_rate(self) -> float:
        """Requests per second of all its traffic."""
        requests = sum(len(traffic.recording.requests) for traffic in self.traffic)
        return requests / sum(traffic.duration_s for traffic in self.traffic)

    def make(self, rate: float | None, count: int, seed: int) -> list[Job]:
        """Jobs at ``rate`` jobs/s in all, of recorded traffic requests/s; None: as recorded.

        ``count``: how many; of a recording at most all, and all of them at its own pace.
        """
        if rate is None:
            traffic = self.traffic[seed]
            if self.recorded:
                return traffic.jobs(self.hardware)
            rate, count = traffic.rate, len(traffic.recording.requests)
            return self._scenario(rate, count, seed, traffic.whole())
        if not self.traffic:
            return self._scenario(rate, count, seed)
        traffic = self.traffic[0]
        count = min(count, len(traffic.recording.requests))
        stretch = traffic.stretch(rate, count, seed, self.fit)
        if self.recorded:
            return traffic.jobs_of(stretch, rate, self.hardware)
        return self._scenario(rate, count, seed, stretch)

    def _scenario(
        self, rate: float, count: int, seed: int, stretch: Stretch | None = None
    ) -> list[Job]:
        jobs = make_jobs(
            self.scenario,
            self.hardware,
            rate=rate,
            count=count,
            seed=seed,
            arrivals=self.arrivals,
            fit=self.fit,
            lengths=self.lengths,
            stretch=stretch,
        )
        return jobs if self.classes is None else with_classes(jobs, self.classes)

    def window_s(self, rate: float | None, seed: int, every: int, counted: Sequence[Job]) -> float:
        """Seconds in which the counted ones of ``every`` jobs of a window arrive."""
        if rate is None:
            return self.traffic[seed].duration_s * len(counted) / every
        units = sum(len(job.rounds) for job in counted) if self.recorded else len(counted)
        return units / rate

    def with_replicas(self, replicas: int) -> Setting:
        return replace(self, conditions=replace(self.conditions, replicas=replicas))

    def sample(self, most: int) -> list[Job]:
        """Jobs at 1 job/s, at most ``most``, to look at lengths and objectives.

        Neither depends on how a trace is fitted to a rate, and thinning may refuse this rate.
        """
        return replace(self, fit="rescale").make(1.0, min(self.jobs, most), 0)


@dataclass(frozen=True, slots=True)
class Case:
    """A system in a setting. ``count``: jobs per window; None: ``setting.jobs`` for each engine."""

    setting: Setting
    system: System
    count: int | None = None

    @property
    def engines(self) -> int:
        return self.system.engines * self.setting.conditions.replicas

    @property
    def gpus(self) -> int:
        return self.engines * self.setting.hardware.gpus

    def rate(self, per_gpu: float | None) -> float | None:
        """The rate of all GPUs."""
        return None if per_gpu is None else per_gpu * self.gpus

    def shown_rate(self, per_gpu: float | None) -> float:
        """Jobs/s per GPU, those of traffic at its own pace included."""
        return self.setting.own_rate / self.gpus if per_gpu is None else per_gpu

    def window(self, rate: float | None, seed: int) -> list[Job]:
        """Jobs of one window at ``rate`` jobs/s per GPU; None: as recorded."""
        count = self.count or self.setting.jobs * self.engines
        return self.setting.make(self.rate(rate), count, seed)
