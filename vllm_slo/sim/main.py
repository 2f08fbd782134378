# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo simulate``: compare systems in virtual time, at given rates or at their capacity."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_slo.bench.style import write_json
from vllm_slo.sim.capacity import best_of_family, find_capacities, sweep
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.options import (
    add_setting_arguments,
    bar,
    check_drafts,
    listed,
    need_vllm,
    number,
    out_of,
    processes_of,
    say_left_out,
    seeds_of,
    settings_of,
    whole,
    wide_console,
)
from vllm_slo.sim.questions import Question
from vllm_slo.sim.report import Report, Row, render
from vllm_slo.sim.scenarios import SCENARIOS
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.systems import DRAFTS, System, families, parse_system
from vllm_slo.sim.workers import Processes, Workers, quiet

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_SYSTEMS: Final = "vllm-slo,fcfs-2048,fcfs-8192"
CURVE_POINTS: Final = 8
"""Rates in the picture of the attainment around a capacity."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vllm-slo simulate``."""
    add = parser.add_argument
    add("--systems", default=DEFAULT_SYSTEMS, metavar="NAME,...",
        help="vllm-slo, fcfs-N, priority-N, prefill-first-N, shed-edf-N (N: tokens per step), "
        "latency-budget-N (N: ms per step), disaggregated-P:D-N; the first three with -specK for "
        f"at most K drafts, such as vllm-slo-spec (K = {DRAFTS}) or fcfs-2048-spec3; "
        "vllm-slo-trees: with a draft model, as 'vllm-slo serve --draft-model' runs it; or "
        "'families': every baseline, tuned on separate windows "
        f"(default: {DEFAULT_SYSTEMS})")  # fmt: skip
    add("--rate", metavar="R,...", help="jobs/s per GPU; several rates draw a curve")
    add("--find-capacity", action="store_true",
        help="find the highest rate that keeps --attainment")  # fmt: skip
    add("--attainment", default="0.9", metavar="SHARE,...",
        help="share of jobs that must keep their objectives (default: 0.9)")  # fmt: skip
    add("--precision", default="0.03", help="relative precision of a capacity (default: 0.03)")
    add(
        "--replicas", default="1", metavar="N,...", help="replicas that share the load (default: 1)"
    )
    add_setting_arguments(parser)
    add("--out", metavar="DIR",
        help="write simulate.json and pictures here (with --find-capacity, also run the rates "
        "around the capacity)")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options of ``simulate``. ``systems``: None means all families."""

    settings: tuple[Setting, ...]
    systems: tuple[System, ...] | None
    rates: tuple[float, ...]
    targets: tuple[float, ...]
    precision: float
    replicas: tuple[int, ...]
    seeds: tuple[int, ...]
    processes: Processes
    out: Path | None


def options_of(args: argparse.Namespace) -> Options:
    """Check every option before the first simulation; SimulationError names a wrong one."""
    if (args.rate is None) is not args.find_capacity:
        raise SimulationError("--rate: give either a rate or --find-capacity")
    rates = () if args.rate is None else tuple(
        number("--rate", word, 0, above=True) for word in listed("--rate", args.rate)
    )  # fmt: skip
    targets = tuple(
        number("--attainment", word, 0, 1, above=True)
        for word in listed("--attainment", args.attainment)
    )
    systems = None
    if args.systems != "families":
        systems = tuple(parse_system(word) for word in listed("--systems", args.systems))
    settings = tuple(settings_of(args))
    check_drafts(systems or (), settings)
    return Options(
        settings=settings,
        systems=systems,
        rates=rates,
        targets=targets,
        precision=number("--precision", args.precision, 0.001, 1),
        replicas=tuple(
            whole("--replicas", word, 1) for word in listed("--replicas", args.replicas)
        ),
        seeds=seeds_of(args),
        processes=processes_of(args),
        out=out_of(args.out),
    )


def questions_of(targets: Sequence[float], setting: Setting) -> list[Question]:
    """Each target over all jobs and, if there are several applications, over each of them."""
    several = len(SCENARIOS[setting.scenario].applications) > 1
    kinds = (False, True) if several else (False,)
    return [Question(target, every) for target in targets for every in kinds]


def labelled(options: Options, setting: Setting, console: Console) -> list[tuple[str, System]]:
    """Systems with their labels; families are tuned for the setting, on separate seeds."""
    if options.systems is not None:
        return [(system.name, system) for system in options.systems]
    tightest_s = min(asked.tightest_tpot_s for job in setting.sample(500) for asked in job.rounds)
    tuned = []
    for family, candidates in families(setting.hardware.step_time, tightest_s).items():
        with bar(console, f"tuning {family} for {setting.scenario}") as progress:
            best = best_of_family(
                candidates,
                setting,
                Question(options.targets[0]),
                precision=max(options.precision, 0.1),
                processes=options.processes,
                progress=progress,
            )
        name = family if best.name == family else f"{family} [{best.name}]"
        tuned.append((name, best))
    return tuned


def groups_of(options: Options, console: Console) -> Iterator[list[Row]]:
    """A row without results for every system, in each setting on each number of replicas."""
    for setting in options.settings:
        systems = labelled(options, setting, console)
        for replicas in options.replicas:
            scaled = setting.with_replicas(replicas)
            yield [Row(label, scaled, system) for label, system in systems]


def run_rates(options: Options, console: Console) -> list[Row]:
    """Every system at every rate, run to the end."""
    load = options.out is not None
    rows: list[Row] = []
    for group in groups_of(options, console):
        title = f"{group[0].setting.scenario}, {group[0].replicas} replicas"
        rows += add_points(group, options.rates, options, console, title, with_load=load)
    return rows


def run_capacities(options: Options, console: Console) -> list[Row]:
    """The capacity of every system; with pictures, also the rates around it."""
    rows: list[Row] = []
    for group in groups_of(options, console):
        setting, replicas = group[0].setting, group[0].replicas
        with bar(console, f"{setting.scenario}, {replicas} replicas: capacity") as progress:
            searched = find_capacities(
                [Case(row.setting, row.system) for row in group],
                questions_of(options.targets, setting),
                options.seeds,
                precision=options.precision,
                processes=options.processes,
                progress=progress,
            )
        made = [
            replace(row, capacities=capacities)
            for row, capacities in zip(group, searched, strict=True)
        ]
        if options.out is not None and replicas == options.replicas[0]:
            made = add_curves(made, options, console)
        rows += made
    return rows


def add_curves(rows: list[Row], options: Options, console: Console) -> list[Row]:
    """Add points from below the lowest capacity to above the highest."""
    kept = [score for row in rows if (score := row.capacities[0].score) > 0]
    if not kept:
        return rows
    low, high = 0.6 * min(kept), 1.4 * max(kept)
    step = (high / low) ** (1 / (CURVE_POINTS - 1))
    rates = [low * step**place for place in range(CURVE_POINTS)]
    title = f"{rows[0].setting.scenario}: rates around the capacity"
    return add_points(rows, rates, options, console, title, with_load=True)


def add_points(
    rows: Sequence[Row],
    rates: Sequence[float],
    options: Options,
    console: Console,
    title: str,
    *,
    with_load: bool,
) -> list[Row]:
    """Run each row at each rate, under a progress bar with that title."""
    with bar(console, title) as progress:
        points = sweep(
            [Case(row.setting, row.system) for row in rows],
            rates,
            options.seeds,
            with_load=with_load,
            processes=options.processes,
            progress=progress,
        )
    return [replace(row, points=tuple(curve)) for row, curve in zip(rows, points, strict=True)]


def run(args: argparse.Namespace) -> int:
    """Run ``vllm-slo simulate``; bad input raises SimulationError before the first simulation."""
    from rich.console import Console

    options = options_of(args)
    bars, console = Console(stderr=True), wide_console()
    say_left_out(options.settings, bars)
    need_vllm()
    quiet()
    with Workers(processes_of(args)) as workers:
        options = replace(options, processes=workers)
        rows = (run_capacities if args.find_capacity else run_rates)(options, bars)
    command = shlex.join(["vllm-slo", *sys.argv[1:]])
    report = Report(tuple(rows), options.seeds, command)
    console.print(render(report))
    if options.out is not None:
        from vllm_slo.sim.plot import write_pictures

        path = options.out / "simulate.json"
        write_json(report.to_dict(), path, lambda text: SimulationError(f"--out: {text}"))
        for written in (path, *write_pictures(report, options.out, options.targets[0])):
            console.print(f"written: {written}", soft_wrap=True)
    return 0
