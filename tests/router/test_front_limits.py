# SPDX-License-Identifier: Apache-2.0
"""What clients can take of the front: connections, memory, time, and its one event loop."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psutil
import pytest
from front_stack import PATIENCE_S, Fake, FrontProcess, eventually, processes, states_arrive
from patience import patience

from vllm_slo.errors import InvalidSLOError
from vllm_slo.router.body_reader import LARGE_BYTES, read
from vllm_slo.slo.body import MAX_BODY_BYTES
from vllm_slo.slo.carriers import Policy

ROUTING = {"stale_after_s": patience(5.0), "dead_after_s": patience(10.0)}
MOST, HELD = 6, 1_000_000
BODY_S, PAUSE_S, IDLE_S = 3.0, 1.0, 2.0
LIMITS = {
    "front_limits.MAX_CONNECTIONS": MOST,
    "front_limits.MAX_HELD_BYTES": HELD,
    "front_limits.BODY_S": BODY_S,
    "front_limits.BODY_PATIENCE_S": PAUSE_S,
    "front_limits.IDLE_S": IDLE_S,
}


@pytest.fixture(scope="module")
def stack() -> Iterator[dict[str, Any]]:
    with processes() as keep:
        front, fakes = keep(FrontProcess(ROUTING)), [keep(Fake("a")), keep(Fake("b"))]
        front.line("listening")  # it has compiled what the other loads
        strict = keep(FrontProcess(ROUTING, LIMITS))
        for one in (front, strict):
            one.serve(*fakes)
        yield {"front": front, "strict": strict, "fakes": fakes}


@pytest.fixture
def fakes(stack: dict[str, Any]) -> list[Fake]:
    for fake in stack["fakes"]:
        fake.reset()
    return list(stack["fakes"])


@pytest.fixture
def front(stack: dict[str, Any], fakes: list[Fake]) -> FrontProcess:
    states_arrive(stack["front"], fakes)
    return stack["front"]


@pytest.fixture
def strict(stack: dict[str, Any], fakes: list[Fake]) -> FrontProcess:
    """A front whose limits are close."""
    return stack["strict"]


def connect(front: FrontProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", front.port), PATIENCE_S)


def head(length: int, path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def to_the_end(connection: socket.socket) -> bytes:
    """All that the front says until it closes."""
    said = b""
    while part := connection.recv(65_536):
        said += part
    return said


def said_while_sending(connection: socket.socket, data: bytes) -> bytes:
    """What the front says first to a client that sends ``data`` again and again."""
    end_s = time.monotonic() + patience(20.0)
    connection.settimeout(0.2)
    while time.monotonic() < end_s:
        try:
            return connection.recv(65_536)
        except TimeoutError:
            connection.sendall(data)
        except ConnectionError:
            return b""
    raise AssertionError("it is neither answered nor closed")


def refused(said: bytes, status: int) -> str:
    """Check an error in OpenAI's shape after which the front closes; its message."""
    top, _, body = said.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 %d " % status), said
    error = json.loads(body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == status
    if status == 503:
        assert b"retry-after: 1\r\n" in top.lower() + b"\r\n"
    return str(error["message"])


# --- connections ---------------------------------------------------------------------------------


def test_connections_beyond_the_most_are_refused(strict: FrontProcess) -> None:
    eventually(lambda: strict.get("/health").status_code == 200, "others have left")
    with ExitStack() as opened:
        idle = [opened.enter_context(connect(strict)) for _ in range(MOST)]
        for _ in range(2):
            with connect(strict) as late:
                late.sendall(head(0))
                assert "connections" in refused(to_the_end(late), 503)
        idle[0].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle[0].recv(12) == b"HTTP/1.1 200"  # those that are there are served
    eventually(lambda: strict.get("/health").status_code == 200, "there is room again")


@pytest.mark.parametrize("begun", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: "])
def test_a_connection_without_a_request_is_closed(strict: FrontProcess, begun: bytes) -> None:
    """Also one whose head never ends."""
    eventually(lambda: strict.get("/health").status_code == 200, "others have left")
    begun_s = time.monotonic()
    with connect(strict) as slow:
        slow.sendall(begun)
        assert said_while_sending(slow, b"x" if begun else b"") == b""
    assert IDLE_S * 0.9 <= time.monotonic() - begun_s < IDLE_S + patience(2.0)


# --- bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [True, False])
def test_a_slow_body_is_cut_off(strict: FrontProcess, fakes: list[Fake], again: bool) -> None:
    """Whether pieces of it come again and again, or none."""
    begun_s = time.monotonic()
    with connect(strict) as slow:
        slow.sendall(head(1_000) + b"{")
        refused(said_while_sending(slow, b" " if again else b""), 408)
    took_s = time.monotonic() - begun_s
    limit_s = BODY_S if again else PAUSE_S
    assert limit_s * 0.9 <= took_s < limit_s + patience(2.0)
    assert [fake.seen() for fake in fakes] == [[], []]


def large(size: int, **more: Any) -> bytes:
    return json.dumps({"prompt": "x" * size, "max_tokens": 2, **more}).encode()


@contextmanager
def holding(front: FrontProcess, size: int) -> Iterator[socket.socket]:
    """A client most of whose body has come."""
    with connect(front) as client:
        client.sendall(head(size) + b" " * (size - 1))
        time.sleep(0.3)
        yield client


def test_bodies_are_bounded_together(strict: FrontProcess, fakes: list[Fake]) -> None:
    body = large(HELD // 2)
    with holding(strict, HELD * 2 // 3) as client:
        answer = strict.post(content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "holds too many" in answer.json()["error"]["message"]
        assert strict.post().status_code == 200  # a small one
        client.close()
    eventually(
        lambda: (
            strict.post(content=body, headers={"content-type": "application/json"}).status_code
            == 200
        ),
        "there is room again",
    )


def test_a_body_counts_until_its_answer_begins(strict: FrontProcess, fakes: list[Fake]) -> None:
    body = large(HELD * 2 // 3, stream=True, max_tokens=4)
    headers = {"content-type": "application/json"}
    for fake in fakes:
        fake.knobs(hold_at=0)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(strict.post, content=body, headers=headers)
        eventually(lambda: any(fake.seen() for fake in fakes), "it is sent")
        # Another replica may have to get it.
        assert strict.post(content=body, headers=headers).status_code == 503
        for fake in fakes:
            fake.knobs(hold_at=2)
        eventually(lambda: any(o["tokens"] for f in fakes for o in f.seen()), "it has begun")
        second = pool.submit(strict.post, content=body, headers=headers)
        eventually(lambda: sum(len(fake.seen()) for fake in fakes) == 2, "the other is sent")
        for fake in fakes:
            fake.knobs(hold_at=None)
        assert [one.result(PATIENCE_S).status_code for one in (first, second)] == [200, 200]


# --- large bodies --------------------------------------------------------------------------------

JSON = {"content-type": "application/json"}
SLOW = b'{"prompt": "x", "max_tokens": 1, "a": [' + b"[]," * (3 * 1024 * 1024) + b"0]}"
"""9 MiB that take half a second or more to be read."""


def longest_wait_s(front: FrontProcess, done: Callable[[], bool]) -> float:
    """How long another client waits for its answer at most, meanwhile."""
    longest_s = 0.0
    with connect(front) as client:
        while not done():
            begun_s = time.monotonic()
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(65_536).startswith(b"HTTP/1.1 200")
            longest_s = max(longest_s, time.monotonic() - begun_s)
            time.sleep(0.005)
    return longest_s


def test_a_large_body_holds_up_nobody(front: FrontProcess, fakes: list[Fake]) -> None:
    assert len(SLOW) < MAX_BODY_BYTES
    gc.disable()  # with it, it takes several times as long
    begun_s = time.monotonic()
    json.loads(SLOW)
    alone_s = time.monotonic() - begun_s
    gc.enable()
    assert front.post(content=large(LARGE_BYTES), headers=JSON).status_code == 200  # it has begun
    with ThreadPoolExecutor(1) as pool:
        for fake in fakes:
            fake.knobs(status=422, status_times=1)  # without reading it
        answer = pool.submit(front.post, content=SLOW, headers=JSON)
        longest_s = longest_wait_s(front, answer.done)
        assert answer.result().status_code == 422
    assert longest_s < alone_s


@pytest.mark.parametrize("size", [10, LARGE_BYTES + 1])
def test_an_slo_is_read_in_bodies_of_any_size(
    front: FrontProcess, fakes: list[Fake], size: int
) -> None:
    wrong = front.post(content=large(size, slo={"ttft_ms": -1}), headers=JSON)
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "ttft_ms"
    never = {"ttft_ms": 0.001, "on_unattainable": "decline"}
    assert front.post(content=large(size, slo=never), headers=JSON).status_code == 429
    assert [fake.seen() for fake in fakes] == [[], []]
    quoted = front.post("/v1/slo/quote", content=large(size, slo={"ttft_ms": -1}), headers=JSON)
    assert quoted.status_code == 400


def test_a_prompt_that_outgrows_the_loop_finds_its_prefix(front: FrontProcess) -> None:
    text = f"{time.time()} a conversation that goes on and on. " * 2_000
    assert len(text) < LARGE_BYTES < 5 * len(text)
    first = front.post(json={"prompt": text}).headers["x-vllm-slo-replica"]
    for _ in range(3):
        answer = front.post(content=json.dumps({"prompt": text * 5}).encode(), headers=JSON)
        assert answer.headers["x-vllm-slo-replica"] == first


def readers(front: FrontProcess) -> list[psutil.Process]:
    children = psutil.Process(front.process.pid).children()
    return [one for one in children if any("spawn_main" in word for word in one.cmdline())]


def test_the_reader_is_started_anew_when_it_died(front: FrontProcess) -> None:
    body = large(LARGE_BYTES)
    assert front.post(content=body, headers=JSON).status_code == 200
    (reader,) = readers(front)
    reader.kill()
    reader.wait(PATIENCE_S)
    answer = front.post(content=body, headers=JSON)
    assert answer.status_code in (200, 503)
    if answer.status_code == 503:
        assert answer.headers["retry-after"] == "1"
    assert front.post(content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_reader_ends_with_the_front(fakes: list[Fake], how: int) -> None:
    with processes() as keep:
        front = keep(FrontProcess(ROUTING))
        front.serve(*fakes)
        assert readers(front) == []  # none before there is a large body
        assert front.post(content=large(LARGE_BYTES), headers=JSON).status_code == 200
        left = psutil.Process(front.process.pid).children(recursive=True)
        (reader,) = readers(front)
        os.kill(reader.pid, signal.SIGINT)  # a terminal sends it to all; the front says what ends
        assert front.post(content=large(LARGE_BYTES), headers=JSON).status_code == 200
        assert readers(front) == [reader]
        front.signal(how)
        assert front.process.wait(PATIENCE_S) == (0 if how == signal.SIGTERM else -how)
        _, alive = psutil.wait_procs(left, PATIENCE_S)
        assert alive == []


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_bodies_are_read_as_vllm_reads_them(coding: str) -> None:
    text = json.dumps({"prompt": "\u00fc", "top_p": float("nan")}, ensure_ascii=False)
    asked = read(text.encode(coding), {}, Policy({}, {}, None), 0.0)
    assert asked is not None
    assert asked.prompt.size == len("\u00fc".encode())


@pytest.mark.parametrize("name", ["slo", "vllm_xargs", "model", "prompt", "messages", "tools"])
@pytest.mark.parametrize("depth", [100, 400, 700, 100_000])
def test_deep_nesting_breaks_nothing(name: str, depth: int) -> None:
    body = b'{"%b": %b%b}' % (name.encode(), b"[" * depth, b"]" * depth)
    with suppress(InvalidSLOError):
        asked = read(body, {}, Policy({}, {}, None), 0.0)
        assert depth < 100_000 or asked is None
