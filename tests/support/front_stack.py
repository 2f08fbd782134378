# SPDX-License-Identifier: Apache-2.0
"""The front as its parent starts it, before replicas without engines: all in own processes."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from patience import patience
from prometheus_client.parser import text_string_to_metric_families

TESTS = Path(__file__).resolve().parent
PATIENCE_S = patience(20.0)
START_S = patience(180.0)
"""The first front on a machine compiles what later ones load."""
SETTLED_S = 1.0
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # certificates take long to load
LOADED = {"committed": [[1.0, 1_000_000]], "backlog_tokens": 100_000}
"""State of a replica that has promised more than it can do: nobody else gets a promise there."""


def eventually(holds: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Wait until ``holds`` says something true, and return that."""
    end_s = time.monotonic() + patience_s
    while not (said := holds()):
        assert time.monotonic() < end_s, f"{what}: not after {patience_s:g} s"
        time.sleep(0.01)
    return said


def http(method: str, url: str, **request: Any) -> httpx.Response:
    """One request on a connection of its own."""
    transport = httpx.HTTPTransport(verify=_NO_TLS)
    with httpx.Client(transport=transport, timeout=PATIENCE_S, trust_env=False) as client:
        return client.request(method, url, **request)


class _Process:
    """A child that speaks JSON lines."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=TESTS.parents[1],
        )
        self.lines: list[dict[str, Any]] = []
        self.log = b""
        self._threads = [threading.Thread(target=run) for run in (self._read, self._read_log)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def line(self, key: str) -> dict[str, Any]:
        """The newest line with ``key``; waits for the first."""

        def said() -> list[dict[str, Any]]:
            assert self.process.poll() is None, self.log.decode()
            return [line for line in self.lines if key in line]

        patience_s = PATIENCE_S if self.lines else START_S
        return dict(eventually(said, f"a line with {key}", patience_s)[-1])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self) -> int:
        """Stop it if it still runs; its return code."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
        code = self.process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code


class Fake(_Process):
    """A replica child; see `fake_replica.py`."""

    def __init__(self, name: str, **knobs: Any) -> None:
        super().__init__(
            *(str(TESTS / "fake_replica.py"), "--private-host", "127.0.0.1"),
            *("--name", name, "--knobs", json.dumps(knobs), "--", "model"),
        )
        self.name = name

    @property
    def entry(self) -> dict[str, str]:
        """As the front is told of it."""
        return {"name": self.name, **self.line("url")}

    def _ask(self, path: str, given: Any = None) -> Any:
        said = self.line("url")
        method = "GET" if given is None else "POST"
        token = {"x-vllm-slo-token": said["token"]}
        answer = http(method, said["url"] + path, json=given, headers=token)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def knobs(self, **changes: Any) -> None:
        self._ask("/fake/knobs", changes)

    def reset(self) -> None:
        self._ask("/fake/reset", {})

    def seen(self) -> list[dict[str, Any]]:
        """The requests it got, and how they ended."""
        return list(self._ask("/fake/seen"))


class FrontProcess(_Process):
    """The front child."""

    def __init__(self, routing: Mapping[str, Any] | None = None, **config: Any) -> None:
        slo = {"routing": dict(routing or {}), **config.pop("slo", {})}
        given = {"slo_config": slo, "api_key_sha256": [], **config}
        super().__init__(
            *("-m", "vllm_slo.router.front"),
            *("--host", "127.0.0.1", "--port", "0", "--config", json.dumps(given)),
        )

    @property
    def url(self) -> str:
        return str(self.line("listening")["listening"])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def tell(self, fakes: Sequence[Fake]) -> None:
        """Replace its set of replicas, without waiting."""
        assert self.process.stdin is not None
        line = json.dumps({"replicas": [fake.entry for fake in fakes]})
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def serve(self, *fakes: Fake) -> None:
        """Replace its set of replicas, and wait until all are ready and idle."""
        self.tell(fakes)
        names = {fake.name for fake in fakes}
        eventually(
            lambda: (
                {name for name, one in self.replicas().items() if one["status"] == "ready"} == names
                and self.quiet()
            ),
            f"{names} are ready",
        )

    def quiet(self) -> bool:
        """Whether nothing is under way."""
        return all(one["outstanding"] == 0 for one in self.replicas().values())

    def replicas(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in http("GET", f"{self.url}/replicas").json()}

    def post(self, path: str = "/v1/completions", **request: Any) -> httpx.Response:
        if "json" not in request and "content" not in request:
            request["json"] = {"prompt": "x", "max_tokens": 2}
        return http("POST", self.url + path, **request)

    def get(self, path: str, **request: Any) -> httpx.Response:
        return http("GET", self.url + path, **request)

    def total(self, series: str, **labels: str) -> float:
        """Sum over the samples of ``series`` (prefix ``vllm_slo:front_``) with these labels.

        Replicas tell the front a moment after the client has its answer, so this waits until
        nothing is under way, or for a second.
        """
        end_s = time.monotonic() + SETTLED_S
        while not self.quiet() and time.monotonic() < end_s:
            time.sleep(0.01)
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for sample in family.samples
            if sample.name == f"vllm_slo:front_{series}" and labels.items() <= sample.labels.items()
        )


def states_arrive(front: FrontProcess, fakes: Sequence[Fake], **state: Any) -> None:
    """Give all ``fakes`` this state, and wait until the front knows."""
    for fake in fakes:
        fake.knobs(state=state)
    tokens = state.get("backlog_tokens", 0)
    eventually(
        lambda: all(front.replicas()[fake.name]["load_tokens"] == tokens for fake in fakes),
        "the state arrives",
    )


@contextmanager
def processes() -> Iterator[Callable[[Any], Any]]:
    """Gives a function that takes a process over; all of them are ended at the end."""
    with ExitStack() as stack:

        def keep(process: Any) -> Any:
            stack.callback(process.end)
            return process

        yield keep


def events(text: str) -> list[Any]:
    """The data of a stream's events, parsed; the last one is the string "[DONE]"."""
    found = []
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found
