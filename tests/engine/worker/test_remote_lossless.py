# SPDX-License-Identifier: Apache-2.0
"""Draft servers change the speed of an answer and nothing else: a real engine in fp32, two real
draft servers, killed, stopped and far away while it serves.

Until the gates are opened no drafter reaches the engine: what it says then is plain decoding.
"""

from __future__ import annotations

import heapq
import itertools
import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from patience import patience
from support_folder import SUPPORT

pytest.importorskip("vllm")

from live_server import UNIPROC, command, environment

from vllm_slo.wire.draft_socket import TOKEN_VARIABLE
from vllm_slo.wire.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN = "a token of the tests' own"
REQUESTS = 100
SOME = 36
FEWER = 16
DRAFTERS = "a", "b"


class Gate:
    """A TCP proxy on loopback, shut at first, that may delay what passes.

    Attributes:
        delay_s: of every byte, each way.
    """

    def __init__(self, target: int) -> None:
        self.port, self.delay_s = free_port(), 0.0
        self._target = target
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        server = socket.create_server(("127.0.0.1", self.port))
        self._start(self._accept, server)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _start(self, run: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=run, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self, server: socket.socket) -> None:
        with server:
            while not self._stop.is_set():
                if select.select([server], [], [], 0.1)[0]:
                    near, _ = server.accept()
                    try:
                        far = socket.create_connection(("127.0.0.1", self._target))
                    except OSError:
                        near.close()
                        continue
                    for one in (near, far):
                        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._start(self._carry, near, far)

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        """Both ways of one connection, in order."""
        other, order = {near: far, far: near}, itertools.count()
        late: list[tuple[float, int, socket.socket, bytes]] = []
        with near, far, suppress(OSError):
            while not self._stop.is_set():
                wait_s = min(max(late[0][0] - time.monotonic(), 0.0), 0.1) if late else 0.1
                for one in select.select([near, far], [], [], wait_s)[0]:
                    if not (data := one.recv(1 << 16)):
                        return
                    due_s = time.monotonic() + self.delay_s
                    heapq.heappush(late, (due_s, next(order), other[one], data))
                while late and late[0][0] <= time.monotonic():
                    _, _, to, data = heapq.heappop(late)
                    to.sendall(data)


class Kitchen:
    """The engine, its drafters and the gates between them."""

    def __init__(self, folder: Path) -> None:
        self.folder, port = folder, free_port()
        self.environment = {
            **environment(),
            TOKEN_VARIABLE: TOKEN,
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        self.gates = {name: Gate(port) for name in DRAFTERS}
        self.drafters = {name: self._draft_server(name) for name in DRAFTERS}
        script = str(SUPPORT / "remote_engine.py")
        with (folder / "engine.log").open("wb") as log:
            self.engine = subprocess.Popen(
                [sys.executable, script, f"tcp://127.0.0.1:{port}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment | UNIPROC,
            )

    def _draft_server(self, name: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [
                    *(command("vllm-slo"), "draft-server", "--model", "tiny", "--name", name),
                    *("--connect", f"tcp://127.0.0.1:{self.gates[name].port}"),
                    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "384"),
                    *("--max-sessions", "8"),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
            )

    def ask(self, at: dict[int, Callable[[], None]] | None = None, /, **said: Any) -> Any:
        """Have the engine do something; do what there is to do once so many requests ended."""
        assert self.engine.stdin
        self.engine.stdin.write(json.dumps(said).encode() + b"\n")
        self.engine.stdin.flush()
        return self.answer(at)

    def answer(self, at: dict[int, Callable[[], None]] | None = None) -> Any:
        """The engine's next answer."""
        assert self.engine.stdout
        todo = sorted((at or {}).items())
        for line in self.engine.stdout:
            if not line.startswith(b"{"):
                continue
            told = json.loads(line)
            if "done" in told:
                assert not todo, "the engine was done before"
                return told["done"]
            while todo and told["ended"] >= todo[0][0]:
                todo.pop(0)[1]()
        raise AssertionError((self.folder / "engine.log").read_text()[-6000:])

    def close(self) -> None:
        for gate in self.gates.values():
            gate.close()
        for process in (self.engine, *self.drafters.values()):
            process.kill()
            process.wait()
        for pipe in (self.engine.stdin, self.engine.stdout):
            if pipe:
                with suppress(OSError):
                    pipe.close()


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    found = Kitchen(tmp_path_factory.mktemp("remote"))
    try:
        found.answer()
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def plain(kitchen: Kitchen) -> dict[str, Any]:
    """What the engine says without drafts, of each kind of requests."""
    found = {
        "greedy": kitchen.ask(count=REQUESTS),
        "mixed": kitchen.ask(count=SOME, kinds="mixed"),
    }
    for one in found.values():
        assert not one["offered"]
    return found


@pytest.fixture(scope="module")
def drafted(kitchen: Kitchen, plain: dict[str, Any]) -> Kitchen:
    """The same engine with both drafters there."""
    for gate in kitchen.gates.values():
        gate.open()
    assert kitchen.ask(ready=DRAFTERS) == {"ready": [*DRAFTERS]}
    return kitchen


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[int]:
    """Requests that did not get the same."""
    pairs = zip(one["said"], other["said"], strict=False)
    return [place for place, (a, b) in enumerate(pairs) if a != b]


def test_two_draft_servers_change_nothing_but_the_speed(
    drafted: Kitchen, plain: dict[str, Any]
) -> None:
    found = drafted.ask(count=REQUESTS)
    assert len(found["said"]) == REQUESTS
    assert differing(found, plain["greedy"]) == []
    for name in DRAFTERS:
        assert found["offered"][name] > 100
        assert found["accepted"][name] > 0.3 * found["offered"][name]


def test_requests_of_every_kind_get_the_same(drafted: Kitchen, plain: dict[str, Any]) -> None:
    """Penalties, logprobs, grammars, stops, forbidden words."""
    found = drafted.ask(count=SOME, kinds="mixed")
    assert differing(found, plain["mixed"]) == []
    assert sum(found["accepted"].values()) > 100


@pytest.mark.parametrize("what", ["walk", "positions"])
def test_wrong_verification_is_noticed(drafted: Kitchen, plain: dict[str, Any], what: str) -> None:
    found = drafted.ask(count=FEWER, **{"break": what})
    assert differing(found, plain["greedy"])


def test_drafts_of_another_place_cost_acceptance_and_no_answer(
    drafted: Kitchen, plain: dict[str, Any]
) -> None:
    found = drafted.ask(count=FEWER, **{"break": "prefix"})
    assert differing(found, plain["greedy"]) == []
    assert sum(found["accepted"].values()) < 0.2 * sum(found["offered"].values())


def test_a_drafter_that_stops_and_one_that_is_killed_fail_no_request(
    drafted: Kitchen, plain: dict[str, Any]
) -> None:
    """One hangs for a while and is found again; then the other one dies, and the link is slow."""
    drafters, gate = drafted.drafters, drafted.gates["b"]

    def slow() -> None:
        gate.delay_s = 0.02

    found = drafted.ask(
        {
            10: lambda: drafters["b"].send_signal(signal.SIGSTOP),
            30: lambda: drafters["b"].send_signal(signal.SIGCONT),
            50: drafters["a"].kill,
            70: slow,
        },
        count=REQUESTS,
    )
    assert differing(found, plain["greedy"]) == []
    assert min(found["accepted"][name] for name in DRAFTERS) > 0
    assert drafters["a"].wait(patience(10)) == -signal.SIGKILL
    alone = drafted.ask(count=FEWER)
    assert differing(alone, plain["greedy"]) == []
    assert "a" not in alone["offered"]
    assert alone["accepted"]["b"] > 0
