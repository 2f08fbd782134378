# SPDX-License-Identifier: Apache-2.0
"""The servers of ``vllm-slo demo``: which are compared, and how they are started and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_slo.bench.endpoint import opener
from vllm_slo.bench.errors import BenchError
from vllm_slo.core.types import RoutingPolicy
from vllm_slo.wire.ports import free_port

if TYPE_CHECKING:
    from rich.console import Console

MAX_CONTEXT: Final = 1024
MAX_SEQS: Final = 64
STEP_TOKENS: Final = 2048
KV_BYTES: Final = 2 << 30
START_TIMEOUT_S = 600.0
"""Slow machines that are busy take minutes. A server that has ended is noticed at once."""
STOP_TIMEOUT_S = 40.0
SERVER_ARGS: Final = (
    "--host=127.0.0.1",
    f"--max-model-len={MAX_CONTEXT}",
    f"--max-num-seqs={MAX_SEQS}",
    f"--max-num-batched-tokens={STEP_TOKENS}",
    "--enforce-eager",
    "--no-enable-prefix-caching",
    "--stream-interval=5",  # client and server share the cores that the engine leaves
    "--gpu-memory-utilization=0.3",  # vLLM needs that share of the memory to be free
)
SERVER_ENV: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30),
}
KEYS: Final = ("OPENAI_API_KEY", "VLLM_API_KEY")
"""Variables that the demo's servers do not get; with the second they would refuse the demo."""
OURS: Final = ("-m", "vllm_slo.cli", "serve")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One server of the demo.

    Attributes:
        command: the arguments after ``python``.
        send_slo: whether requests have the ``slo`` field.
        routing: policy of the front of several replicas; None for a single server.
        draft: whether it has the built-in draft model.
    """

    name: str
    command: tuple[str, ...]
    send_slo: bool = True
    replicas: int = 1
    routing: RoutingPolicy | None = None
    draft: bool = False

    def arguments(self, out: Path) -> list[str]:
        """Further arguments; files that they name are written into ``out``."""
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
    """The servers to compare: with several replicas, policies of routing over the same engines.

    With one replica it is stock vLLM and vllm-slo; ``speculate`` adds vllm-slo with a draft model.
    """
    if replicas == 1:
        return (*CANDIDATES, WITH_TREES) if speculate else CANDIDATES
    ways: tuple[RoutingPolicy, ...] = ("round_robin", "least_loaded", "scorers", "slo")
    return tuple(
        Candidate(way.replace("_", " "), OURS, replicas=replicas, routing=way) for way in ways
    )


@contextmanager
def server(
    candidate: Candidate, model: Path, out: Path, console: Console, options: Sequence[str] = ()
) -> Iterator[str]:
    """Run one server; yields its address when it answers, and stops it at the end."""
    with servers([candidate], model, out, console, options) as (url,):
        yield url


@contextmanager
def servers(
    asked: Sequence[Candidate],
    model: Path,
    out: Path,
    console: Console,
    options: Sequence[str] = (),
) -> Iterator[list[str]]:
    """Start servers at the same time; yields their addresses when all answer.

    A start is mostly one process that loads Python modules, so two take as long as one. An idle
    server takes a hundredth of a core.
    """
    with ExitStack() as stack:
        started = [
            stack.enter_context(_process(candidate, model, out, console, options))
            for candidate in asked
        ]
        for candidate, (url, process, log) in zip(asked, started, strict=True):
            wait_until_ready(url, candidate.replicas, process, log)
        yield [url for url, _, _ in started]


@contextmanager
def _process(
    candidate: Candidate, model: Path, out: Path, console: Console, options: Sequence[str]
) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """Start a server; yields its address, its process and its log."""
    port = free_port()
    log = out / f"{candidate.name.replace(' ', '-')}.log"
    command = [
        sys.executable,
        *candidate.command,
        str(model),
        *SERVER_ARGS,
        *options,
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
            env=_environment(),
            process_group=0,
        )
    try:
        yield f"http://127.0.0.1:{port}", process, log
    finally:
        _stop(process)


def _environment() -> dict[str, str]:
    """This process's environment, without a key that the server would ask the demo for."""
    kept = {name: value for name, value in os.environ.items() if name not in KEYS}
    return kept | SERVER_ENV


def wait_until_ready(url: str, replicas: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a server, or for a front until so many of its replicas are ready.

    Raises:
        BenchError: it has ended, or takes too long; the end of its log.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            break
        try:
            if replicas == 1:
                opener(url).open(f"{url}/health", timeout=2).close()
                return
            with opener(url).open(f"{url}/replicas", timeout=2) as page:
                if sum(replica["status"] == "ready" for replica in json.load(page)) >= replicas:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise BenchError("demo", f"the server did not start; the end of {log}:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server, and then every process of its group that is left."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def own_core() -> Iterator[None]:
    """Keep the client off the engine's cores: vLLM on CPU binds its threads to the first cores."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
