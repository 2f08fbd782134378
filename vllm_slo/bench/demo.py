# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo demo``: the same requests to stock vLLM and to vllm-slo, one server after the other.

``--speculate`` adds vllm-slo with the built-in draft model, whose token trees it verifies.
``--replicas N`` instead compares policies of routing over N replicas of vllm-slo.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from vllm_slo.arguments import number, whole
from vllm_slo.bench.client import ClientOptions, ServerRun
from vllm_slo.bench.command import bench_server, finish
from vllm_slo.bench.demo_load import (
    CLASSES,
    LOAD,
    VOCABULARY,
    StepTimes,
    choose_load,
    choose_model,
    measure_steps,
    rate_at,
)
from vllm_slo.bench.demo_servers import MAX_CONTEXT, candidates, own_core, server, servers
from vllm_slo.bench.disturbance import Disturbance, DisturbanceWatch
from vllm_slo.bench.drafts import DraftCounts, read_draft_counts
from vllm_slo.bench.endpoint import ServerTarget
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.main import build_workload
from vllm_slo.bench.planned import Workload
from vllm_slo.bench.probes import measure_step, measure_zero_load
from vllm_slo.bench.report import BenchReport, batch_tokens_per_s
from vllm_slo.bench.workload import WorkloadOptions
from vllm_slo.bench.zero_load import ZeroLoad

if TYPE_CHECKING:
    from rich.console import Console

_Server = TypeVar("_Server")

REPLICAS_PARAMETERS: Final = 200e6
REPLICAS_LOAD: Final = 0.3
"""Offered tokens per second, as a share of what the machine can process."""
REPLICAS_DURATION_S: Final = 45.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``vllm-slo demo``."""
    positive = number(0.0, above=True)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-output"),
        metavar="DIR",
        help="write the results into this folder (default: demo-output)",
    )
    parser.add_argument(
        "--parameters",
        type=positive,
        metavar="N",
        help="size of the model (default: chosen for this machine)",
    )
    parser.add_argument(
        "--load",
        type=positive,
        metavar="FACTOR",
        help="load as a multiple of what stock vLLM can serve "
        f"(default: {LOAD}; not with --replicas)",
    )
    parser.add_argument(
        "--duration",
        type=positive,
        metavar="SECONDS",
        help="seconds of arrivals (default: 45 to 75, for 100 requests)",
    )
    parser.add_argument(
        "--seed", type=whole(0), default=0, metavar="N", help="of the arrivals and lengths (0)"
    )
    parser.add_argument(
        "--replicas",
        type=whole(1),
        default=1,
        metavar="N",
        help="2 or more: compare policies of routing over so many replicas (vllm-slo[ray])",
    )
    parser.add_argument(
        "--speculate",
        action="store_true",
        help="add a third server: vllm-slo with a draft model, whose token trees it verifies",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if all servers finished every request, else 1.

    Raises:
        BenchError: as `demo`.
    """
    from rich.console import Console

    console = Console()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the servers, too
    report = demo(args, console)
    console.print(verdict(report))
    console.print(f"picture: {args.out / 'demo.png'}", soft_wrap=True)
    return 0 if all(finished(run) for run in report.runs) else 1


def check(args: argparse.Namespace) -> None:
    """Raise BenchError for options that exclude each other, before any server is started."""
    if args.replicas > 1:
        for name in ("speculate", "load"):
            if getattr(args, name):
                raise BenchError(f"--{name}", "is for single servers; leave out --replicas")


def demo(args: argparse.Namespace, console: Console) -> BenchReport:
    """Start each server in turn, send it the workload, write table, JSON and picture.

    Raises:
        BenchError: a bad argument, a server does not start, or nothing could be measured.
    """
    check(args)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError("--out", f"cannot write {args.out}: {error.strerror}") from error
    report = (compare_routing if args.replicas > 1 else compare_servers)(args, console)
    finish(report, console, args.out / "demo.json", args.out / "demo.png")
    return report


def compare_servers(args: argparse.Namespace, console: Console) -> BenchReport:
    """Compare stock vLLM and vllm-slo, one after the other; the other servers are idle."""
    model = choose_model(args.parameters, console)
    client = ClientOptions(vocab_size=VOCABULARY, drain_s=120.0, ready_requests=8)
    steps: StepTimes | None = None
    workload: Workload | None = None
    runs: dict[str, ServerRun] = {}
    drafts: dict[str, DraftCounts] = {}
    disturbances: dict[str, Disturbance] = {}
    compared = candidates(1, speculate=args.speculate)
    with servers(compared, model.folder, args.out, console, model.options) as urls, own_core():
        for candidate, url in in_turn(list(zip(compared, urls, strict=True)), args.seed):
            target = ServerTarget(candidate.name, url, send_slo=candidate.send_slo)
            ratio = 1.0
            if steps is None or workload is None:
                console.print("measuring lone requests and what stock vLLM can serve ...")
                steps = measure_steps(target, client)
                chosen = choose_load(steps, args.seed, args.load or LOAD, args.duration)
                workload = chosen.workload
                console.print(str(chosen))
            else:
                ratio = measure_step(target, 1, client) / steps.lone_s
            watch = DisturbanceWatch()
            runs[candidate.name] = bench_server(target, workload, client, console)
            disturbances[candidate.name] = watch.result(ratio)
            if candidate.draft and (counts := read_draft_counts(url)) is not None:
                drafts[candidate.name] = counts
    assert steps is not None
    assert workload is not None
    return BenchReport(
        workload,
        steps.zero,
        tuple(runs[candidate.name] for candidate in compared),
        command=command_line(args),
        drafts=drafts,
        disturbances=disturbances,
    )


def in_turn(asked: Sequence[_Server], seed: int) -> list[_Server]:
    """The servers in the order in which they run.

    Stock vLLM is first, as the load follows from its steps. An odd seed turns the order of the
    others round, so that over several seeds a machine that slows down harms all alike.
    """
    stock, *others = asked
    return [stock, *(reversed(others) if seed % 2 else others)]


def compare_routing(args: argparse.Namespace, console: Console) -> BenchReport:
    """Compare policies of routing over replicas of vllm-slo that share the cores."""
    parameters = REPLICAS_PARAMETERS if args.parameters is None else args.parameters
    model = choose_model(parameters, console)
    client = ClientOptions(vocab_size=VOCABULARY, drain_s=120.0, ready_requests=8)
    zero: ZeroLoad | None = None
    workload: Workload | None = None
    runs: list[ServerRun] = []
    for candidate in candidates(args.replicas):
        with server(candidate, model.folder, args.out, console, model.options) as url:
            target = ServerTarget(candidate.name, url)
            if zero is None or workload is None:
                console.print("measuring the latency of a lone request ...")
                zero = measure_zero_load(target, MAX_CONTEXT, client)
                workload = build_workload(bursts(args, zero), zero)
                count = len(workload.requests)
                console.print(f"{count} requests, {workload.rate:.2f} a second")
            runs.append(bench_server(target, workload, client, console))
    assert zero is not None
    assert workload is not None
    return BenchReport(workload, zero, tuple(runs), command=command_line(args))


def bursts(
    args: argparse.Namespace, zero: ZeroLoad, load: float = REPLICAS_LOAD
) -> WorkloadOptions:
    """The requests to replicas, the same for each policy of routing.

    ``load``: offered tokens per second, as a share of what the machine can process.
    """
    return WorkloadOptions(
        rate=args.replicas * rate_at(load, zero),
        duration_s=args.duration or REPLICAS_DURATION_S,
        seed=args.seed,
        arrivals="square",
        burst_period_s=15.0,
        burst_factor=3.0,
        max_context=MAX_CONTEXT,
        classes=CLASSES,
        slo_scale=float(args.replicas),  # a lone request has the cores of all replicas
    )


def command_line(args: argparse.Namespace) -> str:
    """The command that repeats a run, without its folder."""
    names = ("parameters", "load", "duration", "seed", "replicas")
    given = [f"--{name} {getattr(args, name)}" for name in names if getattr(args, name) is not None]
    return " ".join(["vllm-slo demo", *given, *(["--speculate"] if args.speculate else [])])


def finished(server_run: ServerRun) -> bool:
    """Whether the server finished every request."""
    return all(record.finished for record in server_run.records)


def verdict(report: BenchReport) -> str:
    """One line per server: objectives kept, goodput, batch work, time until all was done.

    A server that speculates has another line with its accepted tokens.
    """
    lines: list[str] = []
    for server_run in report.runs:
        total = report.summaries(server_run)["total"]
        state = "all finished" if finished(server_run) else "NOT all finished"
        batch = batch_tokens_per_s(server_run)
        lines.append(
            f"{server_run.target.name}: {total.attainment or 0.0:.0%} of objectives kept, "
            f"goodput {total.goodput_requests_per_s:.2f} requests/s, "
            + ("" if batch is None else f"batch work {batch:.0f} tokens/s, ")
            + f"{state} after {server_run.elapsed_s:.1f} s"
        )
    lines += [f"{name}: {counts}" for name, counts in report.drafts.items()]
    return "\n".join(lines)
