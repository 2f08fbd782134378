# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo demo``: the same arrivals to stock vLLM and to vllm-slo, one server after the other.

With ``--speculate`` also to vllm-slo with the built-in draft model, whose token trees it verifies.
With ``--replicas N`` instead to N replicas of vllm-slo, once for each way of routing.

The model is the built-in one as a costlier twin: the same answers at the price of a larger model,
so that steps take as long as they do where it matters, and not a few milliseconds of Python.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_slo import profiles, tiny
from vllm_slo.bench.client import ClientOptions, ServerRun, measure_zero_load
from vllm_slo.bench.drafts import DraftCounts, read_draft_counts
from vllm_slo.bench.endpoint import ServerTarget, opener
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.main import WorkloadOptions, bench_server, build_workload, finish
from vllm_slo.bench.report import BenchReport
from vllm_slo.bench.workload import DEFAULT_CLASSES, Workload
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.core.types import RoutingPolicy
from vllm_slo.serve_args import runs_on_cpu

if TYPE_CHECKING:
    from rich.console import Console

MAX_CONTEXT = 1024
MAX_SEQS = 64
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 40.0
VOCABULARY = 2048
SERVER_ARGS = (
    "--host=127.0.0.1",
    f"--max-model-len={MAX_CONTEXT}",
    f"--max-num-seqs={MAX_SEQS}",
    "--enforce-eager",
    "--no-enable-prefix-caching",
    "--stream-interval=5",  # client and server share the cores that the engine leaves
    "--gpu-memory-utilization=0.3",  # vLLM demands that share of the memory to be free
)
SERVER_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "2",
}


CLASSES = tuple(
    replace(spec, tpot_multiple={"chat": 6.0, "code": 3.0, "summary": 6.0}.get(spec.name))
    for spec in DEFAULT_CLASSES
)
"""The bench's classes with TPOTs of three and six lone steps, as SLOs-Serve's 50 and 100 ms are."""


OURS = ("-m", "vllm_slo.cli", "serve")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One server of the demo: its name, the arguments after ``python``, how it is configured.

    ``routing``: the policy of the front of ``replicas``; None for a single server.
    ``draft``: whether it has the built-in draft model.
    """

    name: str
    command: tuple[str, ...]
    send_slo: bool = True
    replicas: int = 1
    routing: RoutingPolicy | None = None
    draft: bool = False

    def arguments(self, out: Path) -> list[str]:
        """Further arguments; what they name is written into ``out``."""
        if self.draft:
            return ["--draft-model=tiny"]
        if self.routing is None:
            return []
        path = out / f"{self.routing}.yaml"
        path.write_text(f"routing:\n  policy: {self.routing}\n", encoding="utf-8")
        return [f"--replicas={self.replicas}", f"--slo-config={path}"]


CANDIDATES = (
    Candidate("stock vLLM", ("-m", "vllm.entrypoints.cli.main", "serve"), send_slo=False),
    Candidate("vllm-slo", OURS),
)
WITH_TREES = Candidate("with trees", OURS, draft=True)


def candidates(replicas: int, *, speculate: bool = False) -> tuple[Candidate, ...]:
    """What is compared on so many replicas: the ways of routing, the engines being the same.

    On one, the servers; ``speculate`` adds ours with a draft model.
    """
    if replicas == 1:
        return (*CANDIDATES, WITH_TREES) if speculate else CANDIDATES
    ways: tuple[RoutingPolicy, ...] = ("round_robin", "least_loaded", "slo")
    return tuple(
        Candidate(way.replace("_", " "), OURS, replicas=replicas, routing=way) for way in ways
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``vllm-slo demo``."""
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for results")
    parser.add_argument(
        "--parameters", type=float, help="size of the twin (default: 100e6; with replicas 200e6)"
    )
    parser.add_argument(
        "--load", type=float, help="offered tokens over capacity (default: 0.4; with replicas 0.3)"
    )
    parser.add_argument("--duration", type=float, default=45.0, help="seconds of arrivals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        help="2 or more: compare ways of routing over so many replicas (vllm-slo[ray])",
    )
    parser.add_argument(
        "--speculate",
        action="store_true",
        help="a third server: vllm-slo with a draft model, whose token trees it verifies",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when both servers finished every request."""
    from rich.console import Console

    console = Console()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers end with us
    try:
        report = demo(args, console)
    except BenchError as error:
        Console(stderr=True).print(f"vllm-slo demo: {error}", style="red", markup=False)
        return 2
    console.print(verdict(report))
    console.print(f"picture: {args.out / 'demo.png'}", soft_wrap=True)
    return 0 if all(finished(run) for run in report.runs) else 1


def check(args: argparse.Namespace) -> None:
    """BenchError for what is wrong with the arguments, before any server is started."""
    if args.replicas < 1:
        raise BenchError("--replicas", f"{args.replicas} is out of range; give 1 or more")
    if args.speculate and args.replicas > 1:
        raise BenchError("--speculate", "compares single servers; leave out --replicas")
    if args.seed < 0:
        raise BenchError("--seed", f"{args.seed} is out of range; give 0 or more")
    for name in ("parameters", "load", "duration"):
        number = getattr(args, name)
        if number is not None and not 0.0 < number < math.inf:
            raise BenchError(f"--{name}", f"{number:g} is out of range; give a number above 0")


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
    several = args.replicas > 1
    parameters = (200e6 if several else 100e6) if args.parameters is None else args.parameters
    load = (0.3 if several else 0.4) if args.load is None else args.load
    model = twin(parameters, console)
    if dtype_arguments():
        console.print("this CPU has no AVX-512: bfloat16 would be slow, so they serve in float32")
    client = ClientOptions(vocab_size=VOCABULARY, drain_s=120.0, warmup_requests=8)
    zero: ZeroLoad | None = None
    workload: Workload | None = None
    runs: list[ServerRun] = []
    drafts: dict[str, DraftCounts] = {}
    for candidate in candidates(args.replicas, speculate=args.speculate):
        with server(candidate, model, args.out, console) as url:
            target = ServerTarget(candidate.name, url, send_slo=candidate.send_slo)
            if zero is None or workload is None:
                console.print("measuring the latency of a lone request ...")
                zero = measure_zero_load(target, MAX_CONTEXT, client)
                workload = build_workload(arrivals(args, load, zero), zero)
                count = len(workload.requests)
                console.print(f"{count} requests, {workload.rate:.2f} a second")
            with nullcontext() if several else own_core():
                runs.append(bench_server(target, workload, client, console))
            if candidate.draft and (counts := read_draft_counts(url)) is not None:
                drafts[candidate.name] = counts
    assert zero is not None
    assert workload is not None
    report = BenchReport(workload, zero, tuple(runs), command=command_line(args), drafts=drafts)
    finish(report, console, args.out / "demo.json", args.out / "demo.png")
    return report


def arrivals(args: argparse.Namespace, load: float, zero: ZeroLoad) -> WorkloadOptions:
    """What every server is sent: bursts that offer ``load`` times what the machine can process."""
    return WorkloadOptions(
        rate=args.replicas * rate_at(load, zero),
        duration_s=args.duration,
        seed=args.seed,
        arrivals="square",
        burst_period_s=15.0,
        burst_factor=3.0,
        max_context=MAX_CONTEXT,
        classes=CLASSES,
        slo_scale=float(args.replicas),  # a lone request had their cores to itself
    )


def command_line(args: argparse.Namespace) -> str:
    """The command that repeats a run, whatever its folder was."""
    names = ("parameters", "load", "duration", "seed", "replicas")
    given = [f"--{name} {getattr(args, name)}" for name in names if getattr(args, name) is not None]
    return " ".join(["vllm-slo demo", *given, *(["--speculate"] if args.speculate else [])])


def rate_at(load: float, zero: ZeroLoad) -> float:
    """Requests a second that offer ``load`` times the tokens this machine can process.

    A token costs what one more prompt token adds to a lone request's TTFT. On a fast device that
    may be nothing; then a request costs its share of the steps in which it decodes.
    """
    low, high = MAX_CONTEXT // 8, MAX_CONTEXT - 64
    token_s = (zero.ttft_s(high) - zero.ttft_s(low)) / (high - low)
    scale = MAX_CONTEXT / 2048
    prompt = sum(spec.share * spec.prompt.mean * scale for spec in DEFAULT_CLASSES)
    output = sum(spec.share * spec.output.mean * scale for spec in DEFAULT_CLASSES)
    return load / max(token_s * (prompt + output), output * zero.tpot_s / MAX_SEQS)


def twin(parameters: float, console: Console) -> Path:
    """The built-in target at ``parameters`` parameters, written once into the cache folder."""
    folder = profiles.cache_dir() / "models" / f"tiny-{parameters / 1e6:.0f}m"
    if not (folder / "model.safetensors").is_file():
        console.print(
            f"writing a twin of the built-in model with {parameters / 1e6:.0f}M parameters"
        )
        command = [sys.executable, "-m", "vllm_slo.tiny.twin", str(tiny.path("target"))]
        done = subprocess.run(
            [*command, str(folder), "--parameters", str(parameters)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip() or f"exit status {done.returncode}"
            raise BenchError("--parameters", said.splitlines()[-1])
    return folder


def dtype_arguments(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """float32 where vLLM runs on an x86 CPU without AVX-512; else the model's own bfloat16.

    Without those instructions a product of bfloat16 matrices takes several times as long.
    """
    try:
        flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return []
    slow = flags is not None and "avx512f" not in flags[1].split()
    return ["--dtype=float32"] if slow and runs_on_cpu() else []


@contextmanager
def server(candidate: Candidate, model: Path, out: Path, console: Console) -> Iterator[str]:
    """Run one server; yields its address once it answers, and stops it at the end."""
    port = _free_port()
    log = out / f"{candidate.name.replace(' ', '-')}.log"
    command = [
        sys.executable,
        *candidate.command,
        str(model),
        *SERVER_ARGS,
        *dtype_arguments(),
        *candidate.arguments(out),
        f"--port={port}",
        "--served-model-name=tiny",
    ]
    console.print(f"starting {candidate.name} (log: {log})", soft_wrap=True)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **SERVER_ENV},
            process_group=0,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, candidate.replicas, process, log)
            yield url
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(url: str, replicas: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            break
        try:
            if replicas == 1:
                opener(url).open(f"{url}/health", timeout=2).close()
                return
            with opener(url).open(f"{url}/replicas", timeout=2) as page:
                if sum(one["status"] == "ready" for one in json.load(page)) >= replicas:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise BenchError("demo", f"the server did not start; the end of {log}:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server, which ends what it started; if it does not, end them all."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def own_core() -> Iterator[None]:
    """Keep the client off the engine's cores: vLLM on CPU binds its threads to the first ones."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def finished(one: ServerRun) -> bool:
    """Whether the server finished every request."""
    return all(record.finished for record in one.records)


def verdict(report: BenchReport) -> str:
    """One line per server: objectives kept, goodput, whether every request finished; one more of
    what was accepted where it speculates."""
    lines: list[str] = []
    totals: Sequence[tuple[ServerRun, float, float]] = [
        (one, total.attainment or 0.0, total.goodput_requests_per_s)
        for one in report.runs
        for total in [report.summaries(one)["total"]]
    ]
    for one, attainment, goodput in totals:
        state = "all finished" if finished(one) else "NOT all finished"
        lines.append(
            f"{one.target.name}: {attainment:.0%} of objectives kept, "
            f"goodput {goodput:.2f} requests/s, {state}"
        )
    lines += [f"{name}: {counts}" for name, counts in report.drafts.items()]
    return "\n".join(lines)
