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

from vllm_slo import arguments
from vllm_slo.arguments import listed, number, share, whole
from vllm_slo.sim.capacity import best_of_family, find_capacities, sweep
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.options import (
    SYSTEMS_HELP,
    add_setting_arguments,
    check_drafts,
    seeds_of,
    settings_of,
    system,
)
from vllm_slo.sim.questions import Question
from vllm_slo.sim.report import Report, Row, render
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.systems import System, families
from vllm_slo.sim.terminal import (
    bar,
    make_folder,
    need_vllm,
    put_json,
    say_notes,
    wide_console,
)
from vllm_slo.sim.workers import Processes, Workers, quiet

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_SYSTEMS: Final = "vllm-slo,fcfs-2048,fcfs-8192"
DEFAULT_TARGET: Final = 0.9
FAMILIES: Final = "families"
CURVE_POINTS: Final = 8
"""Rates in the picture of the attainment around a capacity."""


def _systems(text: str) -> tuple[System, ...] | None:
    return None if text == FAMILIES else listed(system)(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vllm-slo simulate``."""
    add = parser.add_argument
    add("--systems", type=_systems, default=DEFAULT_SYSTEMS, metavar="NAME,...",
        help=f"{SYSTEMS_HELP}; or '{FAMILIES}': every baseline, tuned on separate windows "
        f"(default: {DEFAULT_SYSTEMS})")  # fmt: skip
    add("--rate", type=listed(number(0, above=True)), metavar="R,...",
        help="jobs/s (of a trace requests/s) of all replicas; several draw a curve")  # fmt: skip
    add("--per-gpu", action="store_true", help="--rate counts for each GPU")
    add("--find-capacity", action="store_true",
        help="find the highest rate, in jobs/s per GPU, that keeps --min-attainment")  # fmt: skip
    shares = listed(share())
    add("--min-attainment", type=shares, metavar="SHARE,...",
        help="share of jobs that must keep their objectives; with --find-capacity several may be "
        f"given (default there: {DEFAULT_TARGET}); at a rate the exit status is 1 if a system "
        "keeps less")  # fmt: skip
    add("--attainment", type=shares, action=arguments.Renamed, new="--min-attainment",
        dest="min_attainment")  # fmt: skip
    add("--precision", type=number(0.001, 1), default=0.03, metavar="SHARE",
        help="relative precision of a capacity (default: 0.03)")  # fmt: skip
    add("--replicas", type=listed(whole(1)), default="1", metavar="N,...",
        help="replicas that share the load (default: 1)")  # fmt: skip
    add_setting_arguments(parser)
    arguments.add_json(parser)
    arguments.add_out(
        parser,
        "simulate.json and pictures (with --find-capacity, also of the rates around the capacity)",
    )


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options of ``simulate``.

    Attributes:
        systems: None means all families.
        rates: None: each trace at its own pace.
        per_gpu: whether the rates count for each GPU.
        least: share of jobs below which the answer is no; None: there is none.
    """

    settings: tuple[Setting, ...]
    systems: tuple[System, ...] | None
    rates: tuple[float | None, ...]
    per_gpu: bool
    targets: tuple[float, ...]
    least: float | None
    precision: float
    replicas: tuple[int, ...]
    seeds: tuple[int, ...]
    processes: Processes
    out: Path | None


def options_of(args: argparse.Namespace) -> Options:
    """Check every option before the first simulation; SimulationError names a wrong one."""
    if args.find_capacity and args.rate is not None:
        raise SimulationError("--rate: give either a rate or --find-capacity")
    if args.rate is None and not args.find_capacity and args.trace is None:
        raise SimulationError("--rate: give a rate, --find-capacity or --trace FILE")
    targets = args.min_attainment
    if not args.find_capacity and targets is not None and len(targets) > 1:
        raise SimulationError("--min-attainment: give one share; --find-capacity takes several")
    own_pace = args.rate is None and not args.find_capacity
    settings = tuple(settings_of(args, own_pace=own_pace))
    check_drafts(args.systems or (), settings)
    make_folder(args.out)
    return Options(
        settings=settings,
        systems=args.systems,
        rates=(None,) if own_pace else args.rate or (),
        per_gpu=args.per_gpu,
        targets=targets or (DEFAULT_TARGET,),
        least=None if targets is None or args.find_capacity else targets[0],
        precision=args.precision,
        replicas=args.replicas,
        seeds=seeds_of(args, settings[0], own_pace=own_pace),
        processes=args.processes,
        out=args.out,
    )


def questions_of(targets: Sequence[float], setting: Setting) -> list[Question]:
    """Each target over all jobs and, if there are several applications, over each of them.

    Of AdaServe's recording only all jobs count, as in its paper.
    """
    several = len(setting.conditions.acceptance) > 1 and setting.scenario != "adaserve"
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
        rows += add_points(
            group, options.rates, options, console, title, with_load=load, total=not options.per_gpu
        )
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
    rates: Sequence[float | None],
    options: Options,
    console: Console,
    title: str,
    *,
    with_load: bool,
    total: bool = False,
) -> list[Row]:
    """Run each row at each rate, under a progress bar with that title; see ``capacity.sweep``."""
    with bar(console, title) as progress:
        points = sweep(
            [Case(row.setting, row.system) for row in rows],
            rates,
            options.seeds,
            with_load=with_load,
            total=total,
            processes=options.processes,
            progress=progress,
        )
    return [replace(row, points=tuple(curve)) for row, curve in zip(rows, points, strict=True)]


def run(args: argparse.Namespace) -> int:
    """Run ``vllm-slo simulate``; bad input raises SimulationError before the first simulation.

    Returns 1 if a system attains less than ``--min-attainment`` at a rate.
    """
    from rich.console import Console

    options = options_of(args)
    bars, console = Console(stderr=True), wide_console()
    say_notes(options.settings, bars)
    need_vllm()
    quiet()
    with Workers(args.processes) as workers:
        options = replace(options, processes=workers)
        rows = (run_capacities if args.find_capacity else run_rates)(options, bars)
    command = shlex.join(["vllm-slo", *sys.argv[1:]])
    report = Report(tuple(rows), options.seeds, command)
    if not arguments.standard_output(args.json):
        console.print(render(report))
    if args.json is not None:
        put_json(report.to_dict(), args.json)
    if options.out is not None:
        from vllm_slo.sim.plot import write_pictures

        path = options.out / "simulate.json"
        notes = bars if arguments.standard_output(args.json) else console
        arguments.put_json(report.to_dict(), path, lambda text: SimulationError(f"--out: {text}"))
        for written in (path, *write_pictures(report, options.out, options.targets[0])):
            notes.print(f"written: {written}", soft_wrap=True)
    points = [point for row in rows for point in row.points]
    too_few = options.least is not None and any(
        point.summary.attainment < options.least for point in points
    )
    return arguments.NO if too_few else arguments.OK
