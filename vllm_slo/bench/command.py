# SPDX-License-Identifier: Apache-2.0
"""What the commands that send workloads share: servers, results, progress, exit status."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from vllm_slo import arguments
from vllm_slo.bench.client import ClientOptions, ServerRun, Tally, run_server
from vllm_slo.bench.credentials import (
    NO_CREDENTIALS,
    Credentials,
    add_credential_arguments,
    credentials_of,
)
from vllm_slo.bench.endpoint import URL_VARIABLE, ServerTarget
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.planned import Send, Workload
from vllm_slo.bench.plot import write_png
from vllm_slo.bench.report import BenchReport, render
from vllm_slo.bench.served import TOTAL

if TYPE_CHECKING:
    from rich.console import Console


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """``--base-url``, the credentials, ``--model``."""
    parser.add_argument("--base-url", action="append", metavar="URL[=name]",
        help="OpenAI endpoint, with or without /v1; repeat to compare several (default: the "
        f"environment variable {URL_VARIABLE})")  # fmt: skip
    add_credential_arguments(parser)
    parser.add_argument("--model", metavar="NAME", help="model (default: the server's first)")


def base_urls(args: argparse.Namespace) -> list[str]:
    """The addresses of ``--base-url``, or that of the environment; BenchError without any."""
    named = args.base_url or [os.environ.get(URL_VARIABLE, "").strip()]
    if named == [""]:
        raise BenchError("--base-url", f"name a server, or set {URL_VARIABLE}")
    return list(named)


def targets_of(args: argparse.Namespace, no_slo: Sequence[str] = ()) -> list[ServerTarget]:
    """The servers of the options.

    ``no_slo``: names of servers that get no ``slo`` field.

    Raises:
        BenchError: an address or a key is not valid, or two servers have the same name.
    """
    credentials = credentials_of(args)
    targets = [parse_server(text, args.model, no_slo, credentials) for text in base_urls(args)]
    names = [target.name for target in targets]
    unknown = sorted(set(no_slo) - set(names))
    if unknown:
        raise BenchError("--no-slo", f"no server is named {unknown[0]!r}")
    check_names(targets)
    return targets


def check_names(targets: Sequence[ServerTarget]) -> None:
    """Raise BenchError for no servers, or two of the same name."""
    if not targets:
        raise BenchError("--base-url", "name at least one server")
    names = [target.name for target in targets]
    if len(set(names)) != len(names):
        raise BenchError("--base-url", f"two servers have the same name: {', '.join(names)}")


def parse_server(
    text: str, model: str | None, no_slo: Sequence[str], credentials: Credentials = NO_CREDENTIALS
) -> ServerTarget:
    """``URL[=name]``; without a name it is the host and port."""
    url, _, name = text.rpartition("=") if "=" in text else (text, "", "")
    if not url:
        raise BenchError("--base-url", f"{text!r} has no address; use URL[=name]")
    name = name or url.split("//")[-1].rstrip("/")
    target = ServerTarget(name, url, model, credentials=credentials)
    return replace(target, send_slo=target.name not in no_slo)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the client, and of the results."""
    add = parser.add_argument
    add("--send", choices=get_args(Send), default="objectives",
        help="what the slo field of a request holds: its objectives, the name of its class, or "
        "nothing (default: objectives)")  # fmt: skip
    add("--warmup", metavar="SHARE", type=arguments.share(above_zero=False), default=0.0,
        help="share of the requests, the first ones, that is sent and not counted "
        "(default: 0)")  # fmt: skip
    add("--drain", metavar="SECONDS", type=arguments.number(0, above=True), default=300.0,
        help="seconds to wait after the last arrival (default: 300)")  # fmt: skip
    add("--vocab-size", metavar="TOKENS", type=arguments.whole(2), default=512,
        help="prompt token ids are below this (default: 512)")  # fmt: skip
    add("--seed", metavar="N", type=arguments.whole(0), default=0, help="of all draws (default: 0)")
    add("--min-attainment", metavar="SHARE", type=arguments.share(),
        help="exit with status 1 if a smaller share of the requests with objectives kept "
        "them")  # fmt: skip
    add("--every-class", action="store_true",
        help="with --min-attainment: each class by itself, too")  # fmt: skip
    arguments.add_json(parser)
    arguments.add_out(parser, "a picture")


def client_options(args: argparse.Namespace) -> ClientOptions:
    """The client's options of `add_run_arguments`."""
    return ClientOptions(
        vocab_size=args.vocab_size,
        drain_s=args.drain,
        warmup=args.warmup,
        seed=args.seed,
        send=args.send,
    )


def console_of(args: argparse.Namespace) -> Console | None:
    """Where tables and progress go; None: only JSON is printed."""
    from rich.console import Console

    return None if arguments.standard_output(args.json) else Console()


def note(text: str) -> None:
    """Print a line to standard error."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)


def kept_so_far(tally: Tally) -> str:
    """The share of ended requests that kept their objectives, in total and by class."""
    asked = tally.asked.total()
    if not asked:
        return ""
    classes = [f"{name} {tally.kept[name] / n:.0%}" for name, n in sorted(tally.asked.items())]
    return f"{tally.kept.total() / asked:.0%} ({', '.join(classes)})"


def bench_server(
    target: ServerTarget,
    workload: Workload,
    options: ClientOptions | None = None,
    console: Console | None = None,
) -> ServerRun:
    """Send the workload to one server, with a progress bar on ``console`` (None: no bar)."""
    if console is None:
        return run_server(target, workload, options)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=8),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(target.name, total=len(workload.requests), state="getting ready")

        def show(tally: Tally) -> None:
            shares = kept_so_far(tally)
            state = f"kept {shares}" if shares else f"{tally.sent - tally.done} in flight"
            if tally.declined or tally.failed:
                state += f", {tally.declined} declined, {tally.failed} failed"
            progress.update(task, completed=tally.done, state=state)

        return run_server(target, workload, options, show)


def finish(
    report: BenchReport, console: Console | None, out_json: Path | None, out_png: Path | None
) -> None:
    """Print the tables and write the files; ``-`` prints the JSON."""
    if console is not None:
        console.print(render(report))
    if out_json is not None:
        report.write_json(out_json)
    if out_png is not None:
        write_png(report, out_png)
    if console is not None:
        for path in filter(None, (out_json, out_png)):
            console.print(f"written: {path}", soft_wrap=True)


def check_minimum(args: argparse.Namespace, workload: Workload) -> None:
    """Raise BenchError if ``--min-attainment`` or ``--every-class`` means nothing here."""
    if args.min_attainment is None:
        if args.every_class:
            raise BenchError("--every-class", "only with --min-attainment")
    elif not any(request.has_objective for request in workload.requests):
        raise BenchError("--min-attainment", "no request has an objective")


def status_of(report: BenchReport, minimum: float | None, *, every_class: bool) -> int:
    """The exit status: `NO` if nothing finished, or the attainment is below the minimum.

    Of several servers, those that get no ``slo`` field are there to be compared with and do not
    count. A line on standard error says what is below.
    """
    if not any(record.finished for run in report.runs for record in run.records):
        return arguments.NO
    counted = [run for run in report.runs if run.target.send_slo] or report.runs
    below = [
        f"{run.target.name}: {summary.attainment:.1%} of {name or 'no class'} kept their objectives"
        for run in counted
        for name, summary in report.summaries(run).items()
        if minimum is not None and (every_class or name == TOTAL)
        if summary.attainment is not None and summary.attainment < minimum
    ]
    for line in below:
        note(f"{line}, less than {minimum:.1%}")
    return arguments.NO if below else arguments.OK
