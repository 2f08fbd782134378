# SPDX-License-Identifier: Apache-2.0
"""Whether enough jobs attain: the question, and the evidence for its answer.

Of recorded jobs each request counts (``jobs.Job.by_request``), of others the job. Only those with
an objective do (``measure.judged``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.jobs import Job, JobResult
from vllm_slo.sim.measure import counted, job_attained, judged

_EPSILON: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Question:
    """Does the share ``target`` of the jobs attain? With ``every``: of each application's jobs?"""

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
    """How many jobs of each application count, and how many attained or missed so far."""

    def __init__(self, totals: Mapping[str, int]) -> None:
        if not sum(totals.values()):
            raise SimulationError("jobs: none are left to measure after the warm-up; use more")
        self.totals = dict(totals)
        self.attained: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()

    def add(self, application: str, attained: bool) -> None:
        (self.attained if attained else self.missed)[application] += 1

    def answer(self, question: Question) -> bool | None:
        """Whether the target is kept; None while that depends on jobs that have not ended."""
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
    """A ``cluster.Watch``: it collects evidence as jobs end and stops when all is answered.

    Args:
        warmup: share of them that does not count.
        questions: to answer; without any it never stops.
    """

    def __init__(self, jobs: Sequence[Job], warmup: float, questions: Sequence[Question]) -> None:
        chosen = counted(jobs, warmup)
        units = judged([part for job in chosen for part in job.by_request()])
        self._judged = {unit.job_id for unit in units}
        self.evidence = Evidence(Counter(unit.application for unit in units))
        self._open = {job.job_id for job in chosen}
        self._questions = questions

    def __call__(self, result: JobResult) -> bool:
        if result.job.job_id not in self._open:
            return False
        self._open.discard(result.job.job_id)
        for part in result.by_request():
            if part.job.job_id in self._judged:
                self.evidence.add(part.job.application, job_attained(part))
        return bool(self._questions) and all(
            self.evidence.answer(question) is not None for question in self._questions
        )
