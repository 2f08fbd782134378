# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo plan``: how many replicas a rate needs, and what is too little with one fewer."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from vllm_slo.sim.demand import Resource, binding, demand
from vllm_slo.sim.options import (
    add_setting_arguments,
    bar,
    check_drafts,
    need_vllm,
    number,
    processes_of,
    say_left_out,
    seeds_of,
    settings_of,
    whole,
    wide_console,
)
from vllm_slo.sim.questions import Question
from vllm_slo.sim.report import hardware_dict, machine, percent, versions
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.systems import System, parse_system
from vllm_slo.sim.windows import Point, measure_window, run_jobs
from vllm_slo.sim.workers import Processes, Progress, Workers, quiet, run_tasks

SCHEMA: Final = "vllm-slo-plan/1"


def smallest(keeps: Callable[[int], bool], most: int, guess: int = 1) -> int | None:
    """Smallest n in 1..``most`` that keeps; None if none does.

    The search goes from ``guess`` in steps that double and then bisects, so it rarely tries numbers
    far from the answer. ``keeps`` should be false below some n and true from there on. Each n is
    tried once.
    """
    low, high = 0, most + 1  # the largest n that misses, the smallest n that keeps
    place, stride = min(max(guess, 1), most), 1
    while high - low > 1:
        if keeps(place):
            high = place
        else:
            low = place
        if low == 0:
            place = max(high - stride, 1)
        elif high > most:
            place = min(low + stride, most)
        else:
            place = (low + high) // 2
        stride *= 2
    return high if high <= most else None


def window_keeps(case: Case, rate: float, seed: int, question: Question) -> bool:
    """Whether one window at ``rate`` jobs/s per GPU keeps the attainment."""
    _, evidence = run_jobs(case, case.window(rate, seed), seed, (question,))
    return evidence.answer(question) is True


@dataclass(frozen=True, slots=True)
class Plan:
    """How many replicas a rate needs.

    Attributes:
        setting: of one replica.
        rate: jobs/s of all replicas.
        question: the attainment to keep in every window.
        replicas: the smallest number found to keep it; None if ``max_replicas`` do not.
        jobs: per window.
        points: replicas -> measures, for ``replicas`` (or the most) and one fewer.
        shares: replicas -> shares of an engine that the rate needs on average.
    """

    setting: Setting
    system: System
    rate: float
    question: Question
    replicas: int | None
    max_replicas: int
    jobs: int
    points: dict[int, Point]
    shares: dict[int, dict[Resource, float]]

    @property
    def short(self) -> int | None:
        """The largest number of replicas known not to keep it; None if one replica does."""
        if self.replicas is None:
            return self.max_replicas
        return self.replicas - 1 or None

    def text(self) -> str:
        setting = self.setting
        asked = self.question.percent
        head = f"{setting.scenario}, {self.rate:g} jobs/s on {setting.hardware.name}"
        lines = []
        if self.replicas is None:
            lines.append(
                f"{head}: {_count(self.max_replicas)} of {self.system.name} cannot keep {asked} "
                "in every window, and no more were allowed; raise --max-replicas"
            )
        else:
            gpus = self.replicas * self.system.engines * setting.hardware.gpus
            lines.append(
                f"{head}: {_count(self.replicas)} of {self.system.name} "
                f"({gpus} {'GPU' if gpus == 1 else 'GPUs'}) keep {asked} in every window"
            )
        for replicas, point in sorted(self.points.items(), reverse=True):
            windows = ", ".join(percent(share) for share in point.attainments)
            lines.append(
                f"  with {_count(replicas)}: {windows} % of jobs kept their SLO (per window); "
                f"on average {_shares_text(self.shares[replicas])}"
            )
        lines.append("  " + self.why())
        return "\n".join(lines)

    def why(self) -> str:
        """What binds with one replica fewer, in words."""
        if self.short is None:
            return "one replica is enough, so nothing binds"
        shares = self.shares[self.short]
        what = binding(shares)
        used = shares["memory"] if what == "memory" else shares["prefill"] + shares["decode"]
        name = "memory (KV cache)" if what == "memory" else f"{what} time"
        if used >= 1:
            return f"what binds with {_count(self.short)}: {name}, {used:.0%} of it is needed"
        return (
            f"what binds with {_count(self.short)}: {name} is closest to its limit, at {used:.0%} "
            "on average; bursts and deadlines need the rest"
        )

    def to_dict(self, command: str) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "command": command,
            "versions": versions(),
            "machine": machine(),
            "scenario": self.setting.scenario,
            "hardware": hardware_dict(self.setting.hardware),
            "system": self.system.name,
            "rate_jobs_per_s": self.rate,
            "attainment": self.question.target,
            "every": self.question.every,
            "jobs_per_window": self.jobs,
            "replicas": self.replicas,
            "max_replicas": self.max_replicas,
            "binding": None if self.short is None else binding(self.shares[self.short]),
            "text": self.why(),
            "tried": [
                {
                    "replicas": replicas,
                    "attainment_by_window": list(point.attainments),
                    "by_application": point.summary.by_application,
                    "share_of_time_prefill": self.shares[replicas]["prefill"],
                    "share_of_time_decode": self.shares[replicas]["decode"],
                    "share_of_memory": self.shares[replicas]["memory"],
                }
                for replicas, point in sorted(self.points.items())
            ],
        }


def _count(replicas: int) -> str:
    return f"{replicas} replica" if replicas == 1 else f"{replicas} replicas"


def _shares_text(shares: Mapping[Resource, float]) -> str:
    return (
        f"prefill takes {shares['prefill']:.0%} and decode {shares['decode']:.0%} of the time, "
        f"KV {shares['memory']:.0%} of the memory"
    )


def make_plan(
    setting: Setting,
    system: System,
    rate: float,
    question: Question,
    seeds: tuple[int, ...],
    max_replicas: int,
    processes: Processes = None,
    progress: Progress | None = None,
) -> Plan:
    """Search the smallest number of replicas.

    Every number of replicas gets the same windows: ``setting.jobs`` jobs for each of the engines
    that the rate would keep half busy, so that a window is long enough to build a queue.

    ``progress``: called with how many numbers were tried, and the most that a search can try.
    """
    hardware = setting.hardware
    need = demand(replace(setting, fit="rescale").make(rate, setting.jobs, 0), hardware)
    busy = min(max(1, math.ceil(2 * rate / need.limit(hardware))), max_replicas * system.engines)
    jobs = setting.jobs * busy
    tried = 0

    def case(replicas: int) -> Case:
        return Case(setting.with_replicas(replicas), system, jobs)

    def keeps(replicas: int) -> bool:
        nonlocal tried
        tried += 1
        if progress is not None:
            progress(tried, 2 * math.ceil(math.log2(max_replicas)) + 2)
        scaled = case(replicas)
        tasks = [(scaled, rate / scaled.gpus, seed, question) for seed in seeds]
        return all(run_tasks(window_keeps, tasks, processes))

    least = math.ceil(rate / need.limit(hardware) / system.engines)
    least_kept = smallest(keeps, max_replicas, least)
    shown = sorted({least_kept or max_replicas, (least_kept or max_replicas) - 1} - {0})
    tasks = [(case(n), rate / case(n).gpus, seed) for n in shown for seed in seeds]
    windows = iter(run_tasks(measure_window, tasks, processes))
    points = {n: Point.of(rate / case(n).gpus, [next(windows) for _ in seeds]) for n in shown}
    shares = {n: need.shares(rate / (n * system.engines), hardware) for n in shown}
    return Plan(
        setting, system, rate, question, least_kept, max_replicas, jobs, points, shares
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vllm-slo plan``."""
    add = parser.add_argument
    add("--rate", required=True, help="jobs/s that all replicas serve together")
    add("--attainment", default="0.9",
        help="share of jobs that must keep their objectives, in every window "
        "(default: 0.9)")  # fmt: skip
    add("--every-application", action="store_true",
        help="the jobs of each application must keep that share")  # fmt: skip
    add("--system", default="vllm-slo",
        help="a system as in 'simulate --systems' (default: vllm-slo)")  # fmt: skip
    add("--max-replicas", default="16", help="the most to try (default: 16)")
    add_setting_arguments(parser)
    add("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Run ``vllm-slo plan``: 0 with a plan, 1 if ``--max-replicas`` are not enough."""
    from rich.console import Console

    rate = number("--rate", args.rate, 0, above=True)
    question = Question(
        number("--attainment", args.attainment, 0, 1, above=True), args.every_application
    )
    system = parse_system(args.system)
    most = whole("--max-replicas", args.max_replicas, 1)
    seeds, processes = seeds_of(args), processes_of(args)
    settings = settings_of(args)
    check_drafts([system], settings)
    say_left_out(settings, Console(stderr=True))
    need_vllm()
    quiet()
    plans = []
    with Workers(processes) as workers:
        for setting in settings:
            with bar(Console(stderr=True), f"{setting.scenario}: replicas tried") as progress:
                plans.append(
                    make_plan(setting, system, rate, question, seeds, most, workers, progress)
                )
    console = wide_console()
    if args.json:
        command = shlex.join(["vllm-slo", *sys.argv[1:]])
        reports = [plan.to_dict(command) for plan in plans]
        text = json.dumps(reports[0] if len(reports) == 1 else reports, indent=1, allow_nan=False)
        sys.stdout.write(text + "\n")
    else:
        for plan in plans:
            console.print(plan.text(), soft_wrap=True, markup=False, highlight=False)
    return 0 if all(plan.replicas is not None for plan in plans) else 1
