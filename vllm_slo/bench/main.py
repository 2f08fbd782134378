# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo bench``: one open-loop workload to each server in turn, then tables and a picture.

In-process use: ``run_bench`` if all servers are up; ``build_workload`` here, and ``bench_server``
and ``finish`` of ``command.py``, for servers that are started one after the other.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from vllm_slo import arguments
from vllm_slo.bench import command
from vllm_slo.bench.classes import configured, parse_classes
from vllm_slo.bench.client import ClientOptions
from vllm_slo.bench.credentials import shown_command
from vllm_slo.bench.endpoint import ServerTarget, describe_server
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.planned import Workload
from vllm_slo.bench.probes import measure_zero_load
from vllm_slo.bench.report import BenchReport
from vllm_slo.bench.traces import AzureKind, adaserve, azure, left_out_line
from vllm_slo.bench.workload import (
    BURST_SHARE,
    DEFAULT_CLASSES,
    DEFAULT_CONTEXT,
    Arrivals,
    WorkloadOptions,
    synthetic,
)
from vllm_slo.bench.zero_load import ZeroLoad, load_zero_load
from vllm_slo.traces.classes import TrafficClasses, add_class_arguments, classes_of

if TYPE_CHECKING:
    from rich.console import Console

WORKLOADS: Final = ("synthetic", "azure", "azure-code", "azure-conv", "adaserve")


def build_workload(options: WorkloadOptions, zero_load: ZeroLoad) -> Workload:
    """The requests of a run. Deterministic; BenchError names the option at fault."""
    if options.seed < 0:
        raise BenchError("--seed", f"must be 0 or more, got {options.seed}")
    if options.workload not in WORKLOADS:
        near = difflib.get_close_matches(options.workload, WORKLOADS, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; choose from {', '.join(WORKLOADS)}"
        raise BenchError("--workload", f"unknown workload {options.workload!r}{hint}")
    return _made(options, zero_load).with_slo_scale(options.slo_scale)


def _made(options: WorkloadOptions, zero_load: ZeroLoad) -> Workload:
    if options.workload == "synthetic":
        if options.trace is not None:
            raise BenchError("--trace", "only with an azure-* or adaserve workload")
        return synthetic(options, zero_load)
    if options.workload == "adaserve":
        return adaserve(options, zero_load)
    kinds: dict[str, tuple[AzureKind, ...]] = {
        "azure": ("code", "conv"),
        "azure-code": ("code",),
        "azure-conv": ("conv",),
    }
    if options.workload == "azure" and options.trace is not None:
        raise BenchError("--trace", "needs --workload azure-code or azure-conv")
    return azure(kinds[options.workload], options, zero_load)


def run_bench(
    targets: Sequence[ServerTarget],
    options: WorkloadOptions,
    client: ClientOptions | None = None,
    zero_load: ZeroLoad | None = None,
    console: Console | None = None,
    command_line: str = "",
) -> BenchReport:
    """Measure zero load on the first server, then send the workload to each; all must be up."""
    command.check_names(targets)
    options = replace(options, max_context=_context(targets, options))
    # Shows mistakes in the options before the measurement, which takes minutes.
    _say_left_out(build_workload(options, zero_load or _ANY_ZERO_LOAD))
    if zero_load is None:
        if console is not None:
            console.print(f"measuring a lone request on {targets[0].name}")
        zero_load = measure_zero_load(targets[0], options.max_context, client)
    workload = build_workload(options, zero_load)
    return _sent(targets, workload, zero_load, client, console, command_line)


_ANY_ZERO_LOAD: Final = ZeroLoad(((1, 1.0),), 1.0)


def _context(targets: Sequence[ServerTarget], options: WorkloadOptions) -> int:
    infos = [describe_server(target) for target in targets]
    return min([options.max_context, *(i.max_model_len for i in infos if i.max_model_len)])


def _say_left_out(workload: Workload) -> None:
    if workload.rows_left_out:
        command.note(left_out_line(workload.source, workload.rows_left_out))


def _sent(
    targets: Sequence[ServerTarget],
    workload: Workload,
    zero_load: ZeroLoad | None,
    client: ClientOptions | None,
    console: Console | None,
    command_line: str,
) -> BenchReport:
    runs = tuple(command.bench_server(t, workload, client, console) for t in targets)
    return BenchReport(workload, zero_load, runs, command_line)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vllm-slo bench``."""
    add = parser.add_argument
    positive = arguments.number(0, above=True)
    command.add_server_arguments(parser)
    add("--workload", type=arguments.one_of(WORKLOADS), default="synthetic",
        help=f"one of {', '.join(WORKLOADS)}")  # fmt: skip
    add("--trace", metavar="FILE", type=Path,
        help="replaces the workload's trace: Azure or BurstGPT CSV, Mooncake JSON lines, or "
        "AdaServe JSON; may be compressed")  # fmt: skip
    add("--rate", metavar="PER_S", type=positive,
        help="requests/s in total (default: 1, or the trace's own)")  # fmt: skip
    add("--duration", metavar="SECONDS", type=positive, default=60.0,
        help="seconds of arrivals (default: 60)")  # fmt: skip
    add("--classes", metavar="NAMES", help="name[=share],... of the default classes or of "
        "--slo-config's, or a YAML file (default: all)")  # fmt: skip
    add_class_arguments(parser)
    add("--arrivals", default="poisson", choices=get_args(Arrivals), help="synthetic arrivals")
    add("--burst-factor", metavar="FACTOR", type=arguments.number(1, 1 / BURST_SHARE),
        default=3.0, help="rate in a burst over the average rate (default: 3)")  # fmt: skip
    add("--burst-period", metavar="SECONDS", type=positive, default=20.0,
        help="seconds from burst to burst (default: 20)")  # fmt: skip
    add("--max-context", metavar="TOKENS", type=arguments.whole(8), default=DEFAULT_CONTEXT,
        help=f"most tokens of a prompt and its answer (default: {DEFAULT_CONTEXT})")  # fmt: skip
    add("--length-scale", metavar="FACTOR", type=positive, help="factor on all token counts")
    add("--slo-scale", metavar="FACTOR", type=positive, default=1.0,
        help="factor on all objectives (default: 1)")  # fmt: skip
    add("--zero-load", metavar="FILE", type=Path,
        help="JSON with the latency of a lone request, or a report; otherwise it is "
        "measured")  # fmt: skip
    add("--no-slo", action="append", default=[], metavar="NAME",
        help="do not send the slo field to this server")  # fmt: skip
    command.add_run_arguments(parser)
    old = arguments.Renamed
    add("--workload-file", action=old, new="--trace", dest="trace", type=Path)
    add("--out-json", action=old, new="--json", dest="json", type=Path)
    add("--out-png", action=old, new="--out DIR", dest="out_png", type=Path)


def _workload_options(args: argparse.Namespace) -> WorkloadOptions:
    return WorkloadOptions(
        workload=args.workload,
        rate=args.rate,
        duration_s=args.duration,
        seed=args.seed,
        classes=_own_classes(args),
        arrivals=args.arrivals,
        burst_factor=args.burst_factor,
        burst_period_s=args.burst_period,
        max_context=args.max_context,
        length_scale=args.length_scale,
        slo_scale=args.slo_scale,
        trace=args.trace,
    )


def _own_classes(args: argparse.Namespace) -> Any:
    if args.slo_config is not None or args.classes is None:
        return DEFAULT_CLASSES
    return parse_classes(args.classes)


def _configured_report(
    args: argparse.Namespace,
    targets: Sequence[ServerTarget],
    classes: TrafficClasses,
    console: Console | None,
    command_line: str,
) -> BenchReport:
    """The report of a run with the classes of ``--slo-config``, which need no zero load."""
    if args.workload == "adaserve":
        raise BenchError("--slo-config", "the adaserve workload has objectives of its own")
    options = replace(_workload_options(args), max_context=args.max_context, slo_scale=1.0)
    options = replace(options, max_context=_context(targets, options))
    workload = build_workload(options, _ANY_ZERO_LOAD)
    workload = configured(workload, classes, args.classes).with_slo_scale(args.slo_scale)
    _say_left_out(workload)
    command.check_minimum(args, workload)
    client = command.client_options(args)
    return _sent(targets, workload, None, client, console, command_line)


def _own_report(
    args: argparse.Namespace,
    targets: Sequence[ServerTarget],
    console: Console | None,
    command_line: str,
) -> BenchReport:
    """The report of a run with the bench's classes."""
    if args.rules is not None:
        raise BenchError("--rules", "only with --slo-config")
    zero_load = load_zero_load(args.zero_load) if args.zero_load else None
    options, client = _workload_options(args), command.client_options(args)
    command.check_minimum(args, build_workload(options, _ANY_ZERO_LOAD))
    return run_bench(targets, options, client, zero_load, console, command_line)


def run(args: argparse.Namespace) -> int:
    """Run ``vllm-slo bench``.

    Returns:
        0; 1 if no request finished, or fewer kept their objectives than ``--min-attainment``.

    Raises:
        VllmSLOError: an option, a file or a server cannot be used.
    """
    console = command.console_of(args)
    targets = command.targets_of(args, args.no_slo)
    if args.send == "none":
        targets = [replace(target, send_slo=False) for target in targets]
    command_line = shown_command(["vllm-slo", *sys.argv[1:]], targets[0].credentials)
    if args.slo_config is None:
        report = _own_report(args, targets, console, command_line)
    else:
        classes = classes_of(args)
        report = _configured_report(args, targets, classes, console, command_line)
    picture = args.out_png or (args.out and args.out / "bench.png")
    command.finish(report, console, args.json, picture)
    return command.status_of(report, args.min_attainment, every_class=args.every_class)
