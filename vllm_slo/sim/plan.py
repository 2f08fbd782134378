# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo plan``: how many replicas traffic needs, what they cost, and what binds."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from vllm_slo import arguments
from vllm_slo.arguments import listed, number, share, whole
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.options import (
    DEFAULT_WINDOWS,
    SYSTEMS_HELP,
    add_setting_arguments,
    check_drafts,
    seeds_of,
    settings_of,
    system,
)
from vllm_slo.sim.plan_report import Answer, fluid_text, render, to_dict
from vllm_slo.sim.questions import Question
from vllm_slo.sim.replicas_needed import Search
from vllm_slo.sim.setting import Setting
from vllm_slo.sim.stretches import chosen
from vllm_slo.sim.systems import OURS, System
from vllm_slo.sim.terminal import bar, need_vllm, put_json, say_notes, wide_console
from vllm_slo.sim.traffic import Traffic
from vllm_slo.sim.workers import Processes, Progress, Workers, quiet

if TYPE_CHECKING:
    from rich.console import Console

LONGEST_WINDOW: Final = 4
"""Times ``--jobs`` that a stretch of a long trace holds: enough for several engines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vllm-slo plan``."""
    add = parser.add_argument
    add("--rate", type=number(0, above=True), metavar="R",
        help="jobs/s (of a trace requests/s) that all replicas serve together; without it a "
        "--trace keeps its own pace")  # fmt: skip
    add("--min-attainment", type=share(), default=0.9, metavar="SHARE",
        help="share of jobs that must keep their objectives (default: 0.9)")  # fmt: skip
    add("--attainment", type=share(), action=arguments.Renamed, new="--min-attainment",
        dest="min_attainment")  # fmt: skip
    add("--every-application", action="store_true",
        help="the jobs of each application or class must keep that share")  # fmt: skip
    add("--systems", type=listed(system), default=OURS.name, metavar="NAME,...",
        help=f"{SYSTEMS_HELP} (default: {OURS.name})")  # fmt: skip
    add("--system", type=listed(system), action=arguments.Renamed, new="--systems",
        dest="systems")  # fmt: skip
    add("--fluid", action="store_true",
        help="only what no schedule can undercut: seconds instead of minutes, too few in "
        "practice")  # fmt: skip
    add("--max-replicas", type=whole(1), default=16, metavar="N",
        help="the most to try (default: 16)")  # fmt: skip
    add("--gpu-price", type=number(0, above=True), metavar="USD",
        help="US dollars per GPU and hour (default: the hardware's, if its file has "
        "one)")  # fmt: skip
    add_setting_arguments(parser)
    arguments.add_json(parser)


def _settings(args: argparse.Namespace) -> list[Setting]:
    if args.rate is None and args.trace is None:
        raise SimulationError("--rate: give jobs/s, or --trace FILE at its own pace")

    def windows_of(traffic: Traffic, setting: Setting) -> tuple[Traffic, ...]:
        windows = args.windows or DEFAULT_WINDOWS
        return chosen(traffic, setting.hardware, windows, LONGEST_WINDOW * args.jobs, args.seed)

    settings = settings_of(args, own_pace=args.rate is None, windows_of=windows_of)
    if args.gpu_price is None:
        return settings
    return [
        replace(each, hardware=replace(each.hardware, price_per_gpu_hour=args.gpu_price))
        for each in settings
    ]


def run(args: argparse.Namespace) -> int:
    """Run ``vllm-slo plan``: 0 with a plan, 1 if ``--max-replicas`` are not enough."""
    from rich.console import Console

    question = Question(args.min_attainment, args.every_application)
    settings = _settings(args)
    check_drafts(args.systems, settings)
    bars = Console(stderr=True)
    say_notes(settings, bars)
    if not args.fluid:
        need_vllm()
        quiet()
    with Workers(args.processes) as workers:
        answers = [_answer(args, setting, question, workers, bars) for setting in settings]
    if args.json is not None:
        command = shlex.join(["vllm-slo", *sys.argv[1:]])
        put_json(to_dict(answers, command), args.json)
    if not arguments.standard_output(args.json):
        console = wide_console()
        for answer in answers:
            console.print(render(answer))
    return arguments.OK if all(answer.found for answer in answers) else arguments.NO


def _answer(
    args: argparse.Namespace,
    setting: Setting,
    question: Question,
    processes: Processes,
    bars: Console,
) -> Answer:
    seeds = seeds_of(args, setting, own_pace=args.rate is None)
    most = args.max_replicas

    def search(system: System, progress: Progress | None = None) -> Search:
        return Search(setting, system, args.rate, question, seeds, most, processes, progress)

    fluid, missing = None, ""
    try:
        fluid = search(OURS).fluid()
    except SimulationError as error:
        if args.fluid:
            raise
        missing = str(error)
    if fluid is not None and bars.is_terminal:  # it comes minutes before the rest
        bars.print(f"{setting.scenario}: {fluid_text(fluid, question, most)}", soft_wrap=True)
    plans = []
    for each in () if args.fluid else args.systems:
        with bar(bars, f"{setting.scenario}, {each.name}: replicas tried") as progress:
            plans.append(search(each, progress).plan())
    return Answer(setting, args.rate, question, most, fluid, missing, tuple(plans))
