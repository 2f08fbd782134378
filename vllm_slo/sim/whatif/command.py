# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo whatif``: a trace as it was served, as stock vLLM would, and as vllm-slo would."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, get_args

from vllm_slo import arguments
from vllm_slo.core.types import RoutingPolicy
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import Hardware, built_in, load_hardware
from vllm_slo.sim.report import versions
from vllm_slo.sim.systems import parse_system
from vllm_slo.sim.terminal import bar, need_vllm, put_json, wide_console
from vllm_slo.sim.traffic import Traffic
from vllm_slo.sim.whatif import page, terminal
from vllm_slo.sim.whatif.comparison import Comparison
from vllm_slo.sim.whatif.report import Origin, Report, Setup
from vllm_slo.sim.workers import Workers, quiet
from vllm_slo.traces.classes import add_class_arguments, classes_of
from vllm_slo.traces.selection import Selection, add_selection_arguments, load, selection_of

DEFAULT_SYSTEMS: Final = "fcfs-2048,vllm-slo"
DEFAULT_WARMUP: Final = 0.05
"""Share of the requests in which the queues of an engine that begins empty fill up. The recorded
engine was in use already."""


MANY: Final = 10_000
"""Requests whose simulation takes minutes: a system needs 10 to 20 ms for each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vllm-slo whatif``."""
    add = parser.add_argument
    add("trace", metavar="TRACE", type=Path, help="a file of recorded requests")
    add("--hardware", required=True, metavar="NAME|FILE",
        help=f"one of {', '.join(built_in())}, a YAML file, or a JSON profile of 'vllm-slo "
        "profile'")  # fmt: skip
    add_class_arguments(parser)
    add_selection_arguments(parser)
    group = parser.add_argument_group("what is simulated")
    add = group.add_argument
    add("--systems", metavar="NAME,...", default=DEFAULT_SYSTEMS,
        type=arguments.listed(str),
        help="systems to compare, as in 'simulate --systems'; fcfs-N is stock vLLM with N tokens "
        f"per step (default: {DEFAULT_SYSTEMS})")  # fmt: skip
    add("--replicas", metavar="N", type=arguments.whole(1), default=1,
        help="replicas that share the requests (default: 1)")  # fmt: skip
    add("--routing", metavar="POLICY", type=arguments.one_of(get_args(RoutingPolicy)),
        default="slo",
        help=f"how a replica is chosen: {', '.join(get_args(RoutingPolicy))} "
        "(default: slo)")  # fmt: skip
    add("--kv-tokens", metavar="N", type=arguments.whole(1),
        help="KV-cache size of one engine, tokens (default: the hardware's)")  # fmt: skip
    add("--max-num-seqs", metavar="N", type=arguments.whole(1),
        help="most requests in one step (default: the hardware's)")  # fmt: skip
    add("--bias", metavar="FACTOR", type=arguments.number(0, above=True), default=1.0,
        help="true step time divided by the one the scheduler believes (default: 1.0)")  # fmt: skip
    add("--noise", metavar="SHARE", type=arguments.number(0, 1), default=0.0,
        help="relative standard deviation of a step's time (default: 0.0)")  # fmt: skip
    add("--acceptance", metavar="SHARE", type=arguments.share(above_zero=False), default=0.7,
        help="for systems that speculate: probability that the next drafted token is accepted "
        "(default: 0.7, an assumption)")  # fmt: skip
    add("--draft-step-ms", metavar="MS", type=arguments.number(0, 60_000),
        help="time of one step of the draft model (default: the hardware's)")  # fmt: skip
    add("--warmup", metavar="SHARE", type=arguments.number(0, 0.95), default=DEFAULT_WARMUP,
        help="first share of the requests, simulated but not counted "
        f"(default: {DEFAULT_WARMUP})")  # fmt: skip
    add("--seed", metavar="N", type=arguments.whole(0), default=0,
        help="seed of all that is drawn (default: 0)")  # fmt: skip
    add("--processes", metavar="N", type=arguments.whole(1),
        help="systems simulated at the same time (default: one per core)")  # fmt: skip
    arguments.add_json(parser)
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write the page")


def run(args: argparse.Namespace) -> int:
    """Run ``vllm-slo whatif``; bad input raises a VllmSLOError before the first simulation."""
    from rich.console import Console

    systems = [parse_system(word) for word in args.systems]
    hardware = _hardware(args)
    if any(system.speculates for system in systems):
        hardware.speculating()
    classes = classes_of(args)
    selection = replace(selection_of(args), seed=args.seed)
    _make_folders(args)
    traffic = Traffic(load(args.trace, selection), classes)
    conditions = Conditions(
        replicas=args.replicas,
        routing=args.routing,
        bias=args.bias,
        noise=args.noise,
        seed=args.seed,
        config=classes.config,
        acceptance=dict.fromkeys(traffic.applications, args.acceptance),
    )
    comparison = Comparison(traffic, hardware, conditions, args.warmup)
    need_vllm()
    quiet()
    bars = Console(stderr=True)
    if len(traffic.recording.requests) > MANY:
        bars.print(
            f"vllm-slo: note: {len(traffic.recording.requests):,} requests are simulated with each "
            "system, which takes minutes; --from, --to and --rows select a part",
            soft_wrap=True,
            highlight=False,
        )
    with Workers(args.processes) as workers, bar(bars, "systems simulated") as progress:
        numbers = comparison.run(systems, workers, progress)
    report = Report(
        numbers,
        replace(comparison.trace, selection=_in_words(selection)),
        Setup(
            args.slo_config and args.slo_config.name,
            args.rules and args.rules.name,
            classes.config.tpot_window_tokens,
            tuple(n for n, s in classes.config.slo_classes().items() if len(s.answer_stages) > 1),
            hardware,
            args.replicas,
            args.routing,
            args.bias,
            args.noise,
            args.seed,
        ),
        Origin(
            shlex.join(["vllm-slo", *sys.argv[1:]]),
            datetime.now(UTC).isoformat(timespec="seconds"),
            versions(),
        ),
    )
    _write(report, args)
    return arguments.OK


def _hardware(args: argparse.Namespace) -> Hardware:
    hardware = load_hardware(
        args.hardware, kv_tokens=args.kv_tokens, max_num_seqs=args.max_num_seqs
    )
    if args.draft_step_ms is None:
        return hardware
    return hardware.with_draft_step(args.draft_step_ms / 1e3)


def _make_folders(args: argparse.Namespace) -> None:
    """Make the folders of ``--json`` and ``--html``, so that a wrong path shows before the
    simulation."""
    for option, path in (("--json", args.json), ("--html", args.html)):
        if path is None or arguments.standard_output(path):
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SimulationError(
                f"{option}: cannot make {path.parent}: {error.strerror}"
            ) from error


def _in_words(selection: Selection) -> str:
    """A selection as the page says it."""
    parts = []
    for word, moment in (("from", selection.from_s), ("to", selection.to_s)):
        if moment is not None:
            text = f"{moment:g} s" if isinstance(moment, float) else moment.isoformat(sep=" ")
            parts.append(f"{word} {text}")
    if selection.rows is not None:
        parts.append(f"at most {selection.rows:,} requests")
    if selection.thin != 1.0:
        parts.append(f"{selection.thin:.4g} of the requests, drawn at random")
    if selection.speed != 1.0:
        parts.append(f"{selection.speed:g} times as fast")
    return ", ".join(parts)


def _write(report: Report, args: argparse.Namespace) -> None:
    """Write the files, and print the table or only the JSON text."""
    if args.json is not None:
        put_json(report.to_dict(), args.json)
    if args.html is not None:
        try:
            args.html.write_text(page.render(report), encoding="utf-8")
        except OSError as error:
            raise SimulationError(f"--html: cannot write {args.html}: {error.strerror}") from error
    if arguments.standard_output(args.json):
        return
    console = wide_console()
    console.print(terminal.render(report))
    for path in filter(None, (args.json, args.html)):
        console.print(f"written: {path}", soft_wrap=True, markup=False, highlight=False)
