# SPDX-License-Identifier: Apache-2.0
"""The least number of replicas, in seconds: what no schedule without drafts can undercut.

With objectives it is the linear program of ``ceiling``. Without objectives nothing is due, so only
the work counts: the engines have to do in a window what arrives in it. Both know all arrivals and
answers beforehand and queue for free, so a real scheduler needs more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_slo.sim.ceiling import may_keep
from vllm_slo.sim.ceiling_work import Work, least_step_time, works_of
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job
from vllm_slo.sim.questions import Question
from vllm_slo.sim.search import smallest
from vllm_slo.sim.setting import Case
from vllm_slo.sim.workers import Processes, run_tasks


@dataclass(frozen=True, slots=True)
class Fluid:
    """Bounds on the number of replicas of one engine each.

    Attributes:
        busy: engines that the work keeps busy on average over all windows, whatever is due.
        allowing: with fewer, no schedule keeps the attainment in every window, even if it drops
            all the others; None: nor with the most that were allowed.
    """

    busy: float
    allowing: int | None

    @property
    def without_objectives(self) -> int:
        """With fewer replicas the queue grows without end."""
        return max(1, math.ceil(self.busy - 1e-9))

    @property
    def replicas(self) -> int | None:
        """The least number that keeps the attainment and serves the others some time."""
        return self.allowing and max(self.allowing, self.without_objectives)


def least_work_s(jobs: Sequence[Job], hardware: Hardware) -> float:
    """Seconds of one engine that the jobs take at least, in steps as full as memory allows."""
    model = least_step_time(hardware.step_time)
    pieces = [
        Work.joined([work.first_prompts, work.later_prompts, work.answers])
        for job in jobs
        for work in works_of(job, hardware, model)
    ]
    work = Work.joined(pieces)
    tokens, read = float(work.tokens.sum()), float(work.context.sum())
    memory = hardware.kv_tokens // hardware.block_size * hardware.block_size
    # A step has room for so many tokens in memory, and each of its requests for one token.
    steps = max((tokens + read) / memory, float(len(work.tokens)) / hardware.max_num_seqs)
    compute_s = max(steps * base_s + token_s * tokens for token_s, _, base_s in model.terms)
    return compute_s + float(work.attention_s.sum())


def fewest(
    jobs: Sequence[Job], hardware: Hardware, question: Question, warmup: float, most: int
) -> int | None:
    """Smallest number of engines for which the bound allows the attainment; None above ``most``."""

    def allowed(engines: int) -> bool:
        return may_keep(jobs, hardware, question, engines=engines, warmup=warmup)

    return smallest(allowed, most)


def window_bound(
    case: Case, rate: float | None, seed: int, question: Question, most: int
) -> tuple[float, float, int | None]:
    """(engine seconds, seconds, fewest engines) of one window; a task for ``run_tasks``."""
    setting = case.setting
    hardware = replace(
        setting.hardware, step_time=setting.hardware.step_time.scaled(setting.conditions.bias)
    )
    jobs = case.window(rate, seed)
    return (
        least_work_s(jobs, hardware),
        setting.window_s(case.rate(rate), seed, len(jobs), jobs),
        fewest(jobs, hardware, question, setting.warmup, most),
    )


def find_fluid(
    case: Case,
    rate: float | None,
    question: Question,
    seeds: Sequence[int],
    most: int,
    processes: Processes = None,
) -> Fluid:
    """The bounds over all windows.

    Args:
        case: with one replica; its windows are those of the simulation.
        rate: jobs/s per GPU of that replica; None: a trace at its own pace.
        most: engines.

    Raises:
        SimulationError: SciPy is missing.
    """
    tasks = [(case, rate, seed, question, most) for seed in seeds]
    found = run_tasks(window_bound, tasks, processes)
    counts = [count for _, _, count in found]
    busy = sum(work_s for work_s, _, _ in found) / sum(seconds for _, seconds, _ in found)
    known = [count for count in counts if count is not None]
    return Fluid(busy, max(known) if len(known) == len(counts) else None)
