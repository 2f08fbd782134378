# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo replay``: recorded traffic to a live server, with its own prefixes and sessions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from vllm_slo import arguments
from vllm_slo.bench import command, served
from vllm_slo.bench.answers import Api
from vllm_slo.bench.client import ClientOptions
from vllm_slo.bench.credentials import shown_command
from vllm_slo.bench.endpoint import ServerTarget, describe_server
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.replay_plan import Replay, at_rate, planned_replay
from vllm_slo.bench.report import BenchReport
from vllm_slo.bench.traces import left_out_line
from vllm_slo.traces.classes import TrafficClasses, add_class_arguments, classes_of
from vllm_slo.traces.selection import Recording, add_selection_arguments, load, selection_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vllm-slo replay``."""
    add = parser.add_argument
    positive = arguments.number(0, above=True)
    add("trace", metavar="TRACE", type=Path, help="a file of recorded requests, in any format "
        "that is known")  # fmt: skip
    command.add_server_arguments(parser)
    add("--api", choices=get_args(Api), default="completions",
        help="completions take token ids, so that lengths are exact; the others take text "
        "(default: completions)")  # fmt: skip
    add("--rate", metavar="PER_S", type=positive,
        help="requests/s in total (default: the trace's own)")  # fmt: skip
    add("--concurrency", metavar="N", type=arguments.whole(1),
        help="closed loop: N requests are open at once, whatever their times (default: each "
        "is sent at its time)")  # fmt: skip
    add("--length-scale", metavar="FACTOR", type=positive, default=1.0,
        help="factor on all token counts (default: 1)")  # fmt: skip
    add("--max-context", metavar="TOKENS", type=arguments.whole(2),
        help="leave out requests with more tokens in prompt and answer (default: what the "
        "server takes)")  # fmt: skip
    add_selection_arguments(parser)
    add_class_arguments(parser)
    command.add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run ``vllm-slo replay``.

    Returns:
        0; 1 if no request finished, or fewer kept their objectives than ``--min-attainment``.

    Raises:
        VllmSLOError: an option, a file or a server cannot be used.
    """
    console = command.console_of(args)
    targets = command.targets_of(args)
    if args.send == "none":
        targets = [replace(target, send_slo=False) for target in targets]
    classes = classes_of(args)
    recording = _recording(args)
    replay = _replay(args, targets, recording, classes)
    _say_left_out(recording, replay)
    command.check_minimum(args, replay.workload)
    client = _client_options(args)
    runs = tuple(command.bench_server(t, replay.workload, client, console) for t in targets)
    report = BenchReport(
        replay.workload,
        None,
        runs,
        shown_command(["vllm-slo", *sys.argv[1:]], targets[0].credentials),
        recorded=served.of_trace(replay.recorded(runs[0].warmup)),
        concurrency=args.concurrency,
    )
    command.finish(report, console, args.json, args.out and args.out / "replay.png")
    return command.status_of(report, args.min_attainment, every_class=args.every_class)


def _recording(args: argparse.Namespace) -> Recording:
    """The selected part of the trace at its rate."""
    selection = replace(selection_of(args), seed=args.seed)
    if args.concurrency is not None and (args.rate is not None or selection.speed != 1):
        raise BenchError("--concurrency", "times do not count then; leave out --rate and --speed")
    if args.rate is not None and selection.speed != 1:
        raise BenchError("--rate", "leave it out, or --speed")
    recording = load(args.trace, selection)
    return recording if args.rate is None else at_rate(recording, args.rate)


def _replay(
    args: argparse.Namespace,
    targets: Sequence[ServerTarget],
    recording: Recording,
    classes: TrafficClasses,
) -> Replay:
    infos = [describe_server(target) for target in targets]
    limits = [args.max_context, *(info.max_model_len for info in infos)]
    return planned_replay(
        recording,
        classes,
        length_scale=args.length_scale,
        max_context=min((limit for limit in limits if limit is not None), default=None),
        seed=args.seed,
    )


def _say_left_out(recording: Recording, replay: Replay) -> None:
    if recording.left_out:
        command.note(left_out_line(recording.source, recording.left_out))
    if recording.estimated:
        command.note(
            f"{recording.source}: the lengths of {recording.estimated} answers were not recorded; "
            "lengths of others of their class are used"
        )
    if replay.too_long:
        command.note(
            f"{recording.source}: requests too long for the server, left out: {replay.too_long}; "
            "--length-scale makes all shorter"
        )


def _client_options(args: argparse.Namespace) -> ClientOptions:
    options = command.client_options(args)
    return replace(options, api=args.api, concurrency=args.concurrency)
