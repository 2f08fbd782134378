# SPDX-License-Identifier: Apache-2.0
"""What clients can take of the front: connections, memory, time, and its one event loop."""

from __future__ import annotations

import gc
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from front_stack import PATIENCE_S, Fake, FrontProcess, eventually, processes, states_arrive
from patience import patience

from vllm_slo.errors import InvalidSLOError
from vllm_slo.router.body_reader import read
from vllm_slo.router.haproxy_config import BUFFER_BYTES
from vllm_slo.slo.body import MAX_BODY_BYTES
from vllm_slo.slo.carriers import Policy

ROUTING = {"stale_after_s": patience(5.0), "dead_after_s": patience(10.0)}


@pytest.fixture(scope="module")
def stack() -> Iterator[dict[str, Any]]:
    with processes() as keep:
        front, fakes = keep(FrontProcess(ROUTING)), [keep(Fake("a")), keep(Fake("b"))]
        front.serve(*fakes)
        yield {"front": front, "fakes": fakes}


@pytest.fixture
def fakes(stack: dict[str, Any]) -> list[Fake]:
    for fake in stack["fakes"]:
        fake.reset()
    return list(stack["fakes"])


@pytest.fixture
def front(stack: dict[str, Any], fakes: list[Fake]) -> FrontProcess:
    states_arrive(stack["front"], fakes)
    return stack["front"]


def connect(front: FrontProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", front.port), PATIENCE_S)


def large(size: int, **more: Any) -> bytes:
    return json.dumps({"prompt": "x" * size, "max_tokens": 2, **more}).encode()


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
    with ThreadPoolExecutor(1) as pool:
        for fake in fakes:
            fake.knobs(status=422, status_times=1)  # without reading it
        answer = pool.submit(front.post, content=SLOW, headers=JSON)
        longest_s = longest_wait_s(front, answer.done)
        assert answer.result().status_code == 422
    assert longest_s < alone_s


@pytest.mark.parametrize("size", [10, 150_000])
def test_an_slo_is_read_in_bodies_that_the_buffer_holds(
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


def test_of_a_larger_body_the_beginning_and_the_headers_count(
    front: FrontProcess, fakes: list[Fake]
) -> None:
    """The replica reads the rest, and answers its mistakes."""
    body = large(2 * BUFFER_BYTES, slo={"ttft_ms": -1})
    assert front.post(content=body, headers=JSON).status_code == 200
    wrong = front.post(content=body, headers={**JSON, "x-slo-class": "nosuch"})
    assert wrong.status_code == 400
    text = f"{time.time()} a conversation that goes on and on. " * 2_000
    assert len(text) < BUFFER_BYTES < 5 * len(text)
    first = front.post(json={"prompt": text}).headers["x-vllm-slo-replica"]
    for _ in range(3):
        eventually(front.quiet, "the front has heard of the answer before")
        answer = front.post(content=json.dumps({"prompt": text * 5}).encode(), headers=JSON)
        assert answer.headers["x-vllm-slo-replica"] == first


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
