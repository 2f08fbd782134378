# SPDX-License-Identifier: Apache-2.0
"""A server as users start it, in processes of its own, and two clients for it: openai, curl."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from patience import patience
from prometheus_client.parser import text_string_to_metric_families

from vllm_slo.wire.ports import free_port

START_S = patience(240.0)
STOP_S = patience(60.0)
# vLLM's UniProcExecutor: the worker is in the engine's process, as it is on CUDA with one GPU.
# Otherwise vLLM on CPU gives it a process of its own, which takes a third of a server's start.
UNIPROC = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# The share is of all memory, taken or not, and vLLM's default refuses a machine in use.
SMALL = [
    *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16"),
    *("--dtype", "float32", "--gpu-memory-utilization", "0.2", "--host", "127.0.0.1"),
]


def command(name: str) -> str:
    """A console script of the environment that runs the tests."""
    return str(Path(sys.executable).with_name(name))


def environment() -> dict[str, str]:
    """The environment of a server; conftest's choices for in-process engines are left out."""
    ours = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    dropped = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_PLUGINS")
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, **ours}


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A running server: ``url`` without a path, ``model`` as requests name it."""

    url: str
    model: str
    log: Path
    process: subprocess.Popen[bytes]

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """A scrape: (series, labels) -> value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=patience(60)) as answer:
            text = answer.read().decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def total(self, series: str, **labels: str) -> float:
        """Sum over the samples of ``series`` that have these labels."""
        wanted = set(labels.items())
        return sum(v for (n, have), v in self.metrics().items() if n == series and wanted <= have)

    def settled_total(self, series: str, **labels: str) -> float:
        """The sum, once it has stood still for longer than it takes to be written."""
        seen = self.total(series, **labels)
        while True:
            time.sleep(patience(1.5))
            before, seen = seen, self.total(series, **labels)
            if seen == before:
                return seen

    def await_total(self, expected: float, series: str, **labels: str) -> None:
        """Poll until the sum is the expected one; metrics are written with a delay."""
        seen, end = None, time.monotonic() + patience(60)
        while time.monotonic() < end:
            if (seen := self.total(series, **labels)) == expected:
                return
            time.sleep(0.2)
        raise AssertionError(f"{series} {labels}: {seen}, not {expected}")


@contextmanager
def running(
    arguments: list[str], model: str, folder: Path, *, uniproc: bool = True
) -> Iterator[LiveServer]:
    """Start a server, wait until it is healthy, stop it at the end; its log is shown on failure.

    Args:
        uniproc: whether the engine's process has the worker, or a further one.
    """
    port, log = free_port(), folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*arguments, "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment() | (UNIPROC if uniproc else {}),
            process_group=0,
        )
    server = LiveServer(f"http://127.0.0.1:{port}", model, log, process)
    try:
        _await_health(server)
        yield server
        assert "The same fault is not logged again" not in log.read_text(errors="replace")
    except BaseException:
        sys.stdout.write(log.read_text(errors="replace")[-8000:])  # pytest shows it on failure
        raise
    finally:
        _stop(process)


def _await_health(server: LiveServer) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise AssertionError(f"the server ended with status {server.process.returncode}")
        with (
            suppress(OSError),
            urllib.request.urlopen(f"{server.url}/health", timeout=patience(10)) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"the server was not healthy after {START_S} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@dataclass(slots=True)
class Answer:
    """One answer, streamed or not, as a client sees it.

    Of a stream: ``reports`` are those of its chunks, in order, and ``stop_reasons`` those of the
    chunks that end a choice.
    """

    status: int
    text: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list)
    service_tiers: list[str] = field(default_factory=list)
    stop_reasons: list[Any] = field(default_factory=list)
    headers: Mapping[str, str] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    def take(self, part: Mapping[str, Any]) -> None:
        """Add a whole response, or one chunk of a stream, as JSON."""
        if part.get("slo"):
            self.reports.append(part["slo"])
        if part.get("service_tier"):
            self.service_tiers.append(part["service_tier"])
        for choice in part.get("choices", ()):
            message = choice.get("message") or choice.get("delta") or {}
            self.text += choice.get("text") or message.get("content") or ""
            if choice.get("finish_reason"):
                self.stop_reasons.append(choice.get("stop_reason"))


PROMPT = "def read(path):\n"


def request_body(server: LiveServer, api: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """A small greedy request to ``api``: "completions" or "chat"."""
    asked: dict[str, Any] = {"model": server.model, "max_tokens": 6, "temperature": 0}
    if api == "chat":
        asked["messages"] = [{"role": "user", "content": PROMPT}]
    else:
        asked["prompt"] = PROMPT
    return {**asked, **extra}


def ask_openai(
    server: LiveServer,
    api: str,
    stream: bool,
    extra: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Ask with the openai client; what it has no argument for travels in ``extra_body``."""
    body = request_body(server, api, extra)
    known = ("model", "max_tokens", "temperature", "messages", "prompt", "n", "stop")
    known += ("service_tier",) if api == "chat" else ()
    arguments = {key: body.pop(key) for key in known if key in body}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        create = client.chat.completions.create if api == "chat" else client.completions.create
        try:
            given: Any = create(  # type: ignore[call-overload]
                **arguments, stream=stream, extra_body=body, extra_headers=dict(headers or {})
            )
            answer = Answer(200)
            for part in given if stream else [given]:
                answer.take(part.model_dump())
        except openai.APIStatusError as refusal:
            error = dict(refusal.body) if isinstance(refusal.body, dict) else None
            answer = Answer(refusal.status_code, error=error)
            answer.headers = dict(refusal.response.headers)
        return answer


def ask_curl(
    server: LiveServer,
    api: str,
    stream: bool,
    extra: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Ask with the curl command."""
    path = "chat/completions" if api == "chat" else "completions"
    sent = {"content-type": "application/json", **(headers or {})}
    done = subprocess.run(
        [
            *("curl", "-sS", "-i", "-N", "--max-time", f"{patience(120):.0f}"),
            f"{server.url}/v1/{path}",
            *(word for name, value in sent.items() for word in ("-H", f"{name}: {value}")),
            *("--data-binary", "@-"),
        ],
        input=json.dumps({**request_body(server, api, extra), "stream": stream}).encode(),
        capture_output=True,
        check=True,
    )
    head, _, body = done.stdout.decode().partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    named = (line.partition(": ") for line in lines)
    answer = Answer(int(status.split()[1]), headers={n.lower(): v for n, _, v in named})
    if answer.status != 200:
        answer.error = json.loads(body)["error"]
    elif stream:
        events = [line.removeprefix("data: ") for line in body.splitlines() if line]
        assert events.pop() == "[DONE]"
        for event in events:
            answer.take(json.loads(event))
    else:
        answer.take(json.loads(body))
    return answer
