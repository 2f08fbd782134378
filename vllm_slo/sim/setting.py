# SPDX-License-Identifier: Apache-2.0
"""The setting of a simulation: scenario, hardware, conditions; a case adds the system."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job
from vllm_slo.sim.measure import DEFAULT_WARMUP
from vllm_slo.sim.systems import System
from vllm_slo.sim.workload import make_jobs


@dataclass(frozen=True, slots=True)
class Setting:
    """All that a window depends on besides system, rate and seed.

    Attributes:
        scenario: one of ``scenarios.SCENARIOS``.
        conditions: replicas, errors of the step times; the window's seed replaces its ``seed``.
        jobs: per window and engine, so that windows of one rate per GPU last equally long.
        warmup: share of them, by arrival, that does not count.
        arrivals, fit, lengths, trace_file: as ``workload.make_jobs``.
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

    def window(self, rate: float, seed: int) -> list[Job]:
        """Jobs of one window at ``rate`` jobs/s per GPU."""
        count = self.count or self.setting.jobs * self.engines
        return self.setting.make(rate * self.gpus, count, seed)
