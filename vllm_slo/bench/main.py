# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo bench``: one open-loop workload to each server in turn, then tables and a picture.

In-process use: ``run_bench`` if all servers are up; ``build_workload``, ``bench_server`` and
``finish`` for servers that are started one after the other.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from vllm_slo.bench.client import ClientOptions, ServerRun, Tally, measure_zero_load, run_server
from vllm_slo.bench.credentials import (
    NO_CREDENTIALS,
    Credentials,
    add_credential_arguments,
    credentials_of,
    shown_command,
)
from vllm_slo.bench.endpoint import ServerTarget, describe_server
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.plot import write_png
from vllm_slo.bench.report import BenchReport, render
from vllm_slo.bench.traces import AzureKind, adaserve, azure, left_out_line
from vllm_slo.bench.workload import (
    DEFAULT_CLASSES,
    DEFAULT_CONTEXT,
    Arrivals,
    ClassSpec,
    Workload,
    WorkloadOptions,
    class_from_mapping,
    positive,
    synthetic,
)
from vllm_slo.bench.zero_load import ZeroLoad, load_zero_load
from vllm_slo.traces.errors import TraceError

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
        if options.workload_file is not None:
            raise BenchError("--workload-file", "only with an azure-* or adaserve workload")
        return synthetic(options, zero_load)
    if options.workload == "adaserve":
        return adaserve(options, zero_load)
    kinds: dict[str, tuple[AzureKind, ...]] = {
        "azure": ("code", "conv"),
        "azure-code": ("code",),
        "azure-conv": ("conv",),
    }
    if options.workload == "azure" and options.workload_file is not None:
        raise BenchError("--workload-file", "needs --workload azure-code or azure-conv")
    return azure(kinds[options.workload], options, zero_load)


def parse_classes(text: str) -> tuple[ClassSpec, ...]:
    """``name[=share],...`` of the default classes, or a YAML/JSON file: name -> class."""
    if Path(text).suffix in (".yaml", ".yml", ".json"):
        return _classes_from_file(Path(text))
    known = {c.name: c for c in DEFAULT_CLASSES}
    chosen = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, share = item.partition("=")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            raise BenchError("--classes", f"unknown class {name!r}; {hint} (or give a file)")
        chosen.append(replace(known[name], share=_share(name, share, known[name].share)))
    if not chosen:
        raise BenchError("--classes", f"name at least one class of {', '.join(known)}")
    return tuple(chosen)


def _share(name: str, text: str, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        raise BenchError("--classes", f"{name}: share {text!r} is not a number") from None


def _classes_from_file(path: Path) -> tuple[ClassSpec, ...]:
    import yaml

    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError("--classes", f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BenchError("--classes", f"{path} is not YAML: {error}") from error
    if not isinstance(data, dict) or not data:
        raise BenchError("--classes", f"{path} must map at least one class name to its fields")
    for name, fields in data.items():
        if not isinstance(fields, dict):
            raise BenchError("--classes", f"{path}: class {name!r} must be a mapping")
    return tuple(class_from_mapping(str(name), fields) for name, fields in data.items())


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
        task = progress.add_task(target.name, total=len(workload.requests), state="warming up")

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
    """Print the tables and write the files."""
    if console is not None:
        console.print(render(report))
    if out_json is not None:
        report.write_json(out_json)
    if out_png is not None:
        write_png(report, out_png)
    if console is not None:
        for path in filter(None, (out_json, out_png)):
            console.print(f"written: {path}", soft_wrap=True)


def run_bench(
    targets: Sequence[ServerTarget],
    options: WorkloadOptions,
    client: ClientOptions | None = None,
    zero_load: ZeroLoad | None = None,
    console: Console | None = None,
    command: str = "",
) -> BenchReport:
    """Measure zero load on the first server, then send the workload to each; all must be up."""
    if not targets:
        raise BenchError("--base-url", "name at least one server")
    names = [t.name for t in targets]
    if len(set(names)) != len(names):
        raise BenchError("--base-url", f"two servers have the same name: {', '.join(names)}")
    infos = [describe_server(t) for t in targets]
    limit = min([options.max_context, *(i.max_model_len for i in infos if i.max_model_len)])
    options = replace(options, max_context=limit)
    # Shows mistakes in the options before the measurement, which takes minutes.
    tried = build_workload(options, zero_load or ZeroLoad(((1, 1.0),), 1.0))
    if console is not None and tried.rows_left_out:
        _say(left_out_line(tried.source, tried.rows_left_out))
    if zero_load is None:
        if console is not None:
            console.print(f"measuring a lone request on {targets[0].name}")
        zero_load = measure_zero_load(targets[0], limit, client)
    workload = build_workload(options, zero_load)
    runs = tuple(bench_server(t, workload, client, console) for t in targets)
    return BenchReport(workload, zero_load, runs, command)


def _say(text: str, style: str | None = None) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False).print(text, style=style, markup=False, soft_wrap=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vllm-slo bench``."""
    add = parser.add_argument
    add("--base-url", action="append", required=True, metavar="URL[=name]",
        help="OpenAI endpoint, with or without /v1; repeat to compare several")  # fmt: skip
    add_credential_arguments(parser)
    add("--model", help="model name (default: the server's first)")
    add("--workload", default="synthetic", help=f"one of {', '.join(WORKLOADS)}")
    add("--workload-file", type=Path,
        help="replaces the workload's trace: Azure or BurstGPT CSV, Mooncake JSON lines, or "
        "AdaServe JSON; may be compressed with gzip")  # fmt: skip
    add("--rate", type=float, help="requests/s (default: 1, or the trace's own)")
    add("--duration", type=float, default=60.0, help="seconds of arrivals (default: 60)")
    add("--classes", default=",".join(c.name for c in DEFAULT_CLASSES),
        help="name[=share],... of the default classes, or a YAML file")  # fmt: skip
    add("--arrivals", default="poisson", choices=get_args(Arrivals), help="synthetic arrivals")
    add("--burst-factor", type=float, default=3.0, help="rate in a burst over the average rate")
    add("--burst-period", type=float, default=20.0, help="seconds from burst to burst")
    add("--max-context", type=int, default=DEFAULT_CONTEXT,
        help="most tokens of a prompt and its answer")  # fmt: skip
    add("--length-scale", type=float, help="factor on all token counts")
    add("--slo-scale", type=float, default=1.0, help="factor on all objectives")
    add("--zero-load", type=Path, help="JSON with the latency of a lone request, or a report")
    add("--no-slo", action="append", default=[], metavar="NAME",
        help="do not send the slo field to this server")  # fmt: skip
    add("--vocab-size", type=int, default=512, help="prompt token ids are below this")
    add("--warmup", type=int, default=4, help="requests sent first and not counted")
    add("--drain", type=float, default=300.0, help="seconds to wait after the last arrival")
    add("--seed", type=int, default=0)
    add("--out-json", type=Path, help="write the report here")
    add("--out-png", type=Path, help="write the picture here")


def _client_options(args: argparse.Namespace) -> ClientOptions:
    if args.vocab_size < 2:
        raise BenchError("--vocab-size", f"must be at least 2, got {args.vocab_size}")
    if args.warmup < 0:
        raise BenchError("--warmup", f"must be 0 or more, got {args.warmup}")
    return ClientOptions(
        vocab_size=args.vocab_size,
        drain_s=positive("--drain", args.drain),
        warmup_requests=args.warmup,
        seed=args.seed,
    )


def _workload_options(args: argparse.Namespace) -> WorkloadOptions:
    return WorkloadOptions(
        workload=args.workload,
        rate=None if args.rate is None else positive("--rate", args.rate),
        duration_s=positive("--duration", args.duration),
        seed=args.seed,
        classes=parse_classes(args.classes),
        arrivals=args.arrivals,
        burst_factor=args.burst_factor,
        burst_period_s=args.burst_period,
        max_context=args.max_context,
        length_scale=args.length_scale,
        slo_scale=args.slo_scale,
        workload_file=args.workload_file,
    )


def run(args: argparse.Namespace) -> int:
    """Run ``vllm-slo bench``; returns 0, 1 if no request finished, or 2 for bad input."""
    from rich.console import Console

    console = Console()
    try:
        credentials = credentials_of(args)
        targets = [
            parse_server(text, args.model, args.no_slo, credentials) for text in args.base_url
        ]
        unknown = sorted(set(args.no_slo) - {t.name for t in targets})
        if unknown:
            raise BenchError("--no-slo", f"no server is named {unknown[0]!r}")
        zero_load = load_zero_load(args.zero_load) if args.zero_load else None
        command = shown_command(["vllm-slo", *sys.argv[1:]], credentials)
        report = run_bench(
            targets, _workload_options(args), _client_options(args), zero_load, console, command
        )
        finish(report, console, args.out_json, args.out_png)
    except (BenchError, TraceError) as error:
        _say(f"error: {error}", style="red")
        return 2
    return 0 if any(r.finished for server_run in report.runs for r in server_run.records) else 1
