# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker: where requests go, by the protocol's own messages over gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("grpc_health", reason="pip install 'vllm-slo[gateway]'")

from front_stack import LOADED, Fake, processes
from gateway_client import (
    BUFFERED,
    DUPLEX,
    SLO,
    Replicas,
    Stream,
    body,
    counted,
    destination,
    endpoint,
    mutation,
    outstanding,
    picker,
    run,
    set_headers,
    source,
    streamed,
    until,
)

from vllm_slo.router.endpoint_picker import exchange
from vllm_slo.router.replica_spec import ReplicaSpec


@pytest.fixture(scope="module")
def started() -> Iterator[list[Fake]]:
    with processes() as keep:
        fakes = [keep(Fake("a")), keep(Fake("b"))]
        for fake in fakes:
            fake.line("url")
        yield fakes


@pytest.fixture
def fakes(started: list[Fake]) -> list[Fake]:
    for fake in started:
        fake.reset()
    return started


# --- where a request goes ----------------------------------------------------------------------


@pytest.mark.parametrize("modes", [DUPLEX, None])
def test_a_streamed_body_goes_back_after_the_headers(
    fakes: list[Fake], modes: tuple[str, str] | None
) -> None:
    fakes[0].knobs(state=LOADED)

    async def main() -> None:
        data = body(SLO, prompt="x" * 100)
        async with picker(source(fakes)) as server, Stream(server, modes) as stream:
            await until(lambda: server.cluster.listed["a"].virtual.load_tokens > 0)
            await stream.headers()
            for part in (data[:40], b"", data[40:90]):
                await stream.body(part, end=False)
            await asyncio.sleep(0.05)
            assert outstanding(server) == 90  # bytes; nothing is decided before the end
            await stream.body(data[90:])
            answer = await stream.read("request_headers")
            assert destination(answer) == [endpoint(fakes[1])]
            parts = [streamed(await stream.read("request_body")) for _ in range(4)]
            assert b"".join(part for part, _ in parts) == data
            assert [last for _, last in parts] == [False, False, False, True]
            assert server.picker.held_bytes == 0
            assert server.cluster.listed["b"].virtual.outstanding == 1
            await stream.response(content_type="text/event-stream")
            assert not set_headers(await stream.read("response_headers"))
            assert await counted(server, "requests_total", result="promised") == 0
            await stream.body(b"data: 1\n\n", end=False, kind="response_body")
            assert streamed(await stream.read("response_body")) == (b"data: 1\n\n", False)
            assert await counted(server, "requests_total", result="promised") == 1
            await stream.body(b"", kind="response_body")
            assert streamed(await stream.read("response_body")) == (b"", True)
            assert server.cluster.listed["b"].virtual.outstanding == 1
            await stream.finish()
            await until(lambda: outstanding(server) == 0)
            assert await counted(server, "client_gone_total") == 0

    run(main())


@pytest.mark.parametrize("mode", ["BUFFERED", "BUFFERED_PARTIAL"])
def test_a_whole_body_is_answered_with_the_destination(fakes: list[Fake], mode: str) -> None:
    fakes[0].knobs(state=LOADED)

    async def main() -> None:
        async with picker(source(fakes)) as server, Stream(server, (mode, "NONE")) as stream:
            await until(lambda: server.cluster.listed["a"].virtual.load_tokens > 0)
            await stream.headers(headers={"x-vllm-slo-made-up": "1"})
            first = await stream.read("request_headers")
            assert not set_headers(first)  # the gateway sends the body after this answer
            assert list(mutation(first).remove_headers) == ["x-vllm-slo-made-up"]
            await stream.body(body(SLO))
            answer = await stream.read("request_body")
            assert destination(answer) == [endpoint(fakes[1])]
            assert not answer.request_body.response.HasField("body_mutation")
            await stream.response()
            await stream.read("response_headers")
            await stream.finish()
            assert await counted(server, "requests_total", result="promised") == 1

    run(main())


@pytest.mark.parametrize("mode", ["NONE", "STREAMED"])
def test_without_a_body_the_headers_decide(fakes: list[Fake], mode: str) -> None:
    fakes[0].knobs(state=LOADED)

    async def main() -> None:
        async with picker(source(fakes)) as server, Stream(server, (mode, mode)) as stream:
            await until(lambda: server.cluster.listed["a"].virtual.load_tokens > 0)
            carriers = {"x-llm-d-slo-ttft-ms": "5000", "content-length": "3500"}
            await stream.headers(headers=carriers)
            assert destination(await stream.read("request_headers")) == [endpoint(fakes[1])]
            tokens = server.cluster.listed["b"].virtual.load_tokens
            assert 900 < tokens < 1_200  # by the length of the body
            if mode == "STREAMED":
                await stream.body(body(), end=True)
                answer = await stream.read("request_body")
                assert not answer.request_body.response.HasField("body_mutation")
            await stream.response(end=True)
            await stream.read("response_headers")
            await stream.finish()
            assert await counted(server, "requests_total", result="promised") == 1

    run(main())


def test_an_objective_names_a_class(fakes: list[Fake]) -> None:
    fakes[0].knobs(state=LOADED)

    async def main() -> None:
        classes = {"chat": SLO}
        async with picker(source(fakes), classes=classes) as server:
            await until(lambda: server.cluster.listed["a"].virtual.load_tokens > 0)
            for name in ("x-gateway-inference-objective", "x-llm-d-inference-objective"):
                async with Stream(server, BUFFERED) as stream:
                    await stream.headers(headers={name: "chat"})
                    await stream.read("request_headers")
                    await stream.body(body())
                    answer = await stream.read("request_body")
                    assert destination(answer) == [endpoint(fakes[1])]
                    await stream.body(b"{}", kind="response_body")
                    await stream.read("response_body")
                    await stream.finish()
            assert await counted(server, "requests_total", result="promised") == 2

    run(main())


def test_what_has_no_body_or_generates_nothing_is_decided_at_once(fakes: list[Fake]) -> None:
    async def main() -> None:
        async with picker(source(fakes)) as server:
            seen = []
            for _ in range(4):
                async with Stream(server, DUPLEX) as stream:
                    await stream.headers("/v1/models?x=1", "GET", end=True)
                    seen += destination(await stream.read("request_headers"))
                    await stream.finish()
            assert sorted(seen) == sorted([endpoint(fake) for fake in fakes] * 2)
            async with Stream(server, DUPLEX) as stream:
                await stream.headers("/v1/embeddings")
                await stream.read("request_headers")
                await stream.body(b"{", end=False)
                assert streamed(await stream.read("request_body")) == (b"{", False)
                await stream.trailers()
                await stream.read("request_trailers")
                await stream.finish()
            async with Stream(server, DUPLEX) as stream:
                await stream.headers(end=True)  # a generation without a body
                assert len(destination(await stream.read("request_headers"))) == 1
                await stream.finish()

    run(main())


def test_trailers_end_a_body(fakes: list[Fake]) -> None:
    async def main() -> None:
        async with picker(source(fakes)) as server, Stream(server, DUPLEX) as stream:
            await stream.headers()
            await stream.body(body(SLO), end=False)
            await stream.trailers()
            destination(await stream.read("request_headers"))
            assert streamed(await stream.read("request_body")) == (body(SLO), False)
            await stream.read("request_trailers")
            await stream.response()
            await stream.read("response_headers")
            await stream.body(b"{}", end=False, kind="response_body")
            await stream.read("response_body")
            await stream.trailers("response_trailers")
            await stream.read("response_trailers")
            await stream.finish()
            assert await counted(server, "requests_total", result="promised") == 1
            assert await counted(server, "client_gone_total") == 0

    run(main())


@pytest.mark.parametrize(
    "given",
    [
        ["{b}"],
        ["10.1.2.3:8000", "{b}"],
        "10.1.2.3:8000, {b}",  # as Envoy's own filters write it
    ],
)
def test_only_the_subset_is_chosen_from(fakes: list[Fake], given: Any) -> None:
    async def main() -> None:
        b = endpoint(fakes[1])
        written = json.loads(json.dumps(given).replace("{b}", b))
        async with picker(source(fakes), fallbacks=2) as server:
            for _ in range(3):
                async with Stream(server, DUPLEX) as stream:
                    await stream.headers(subset=written)
                    await stream.body(body())
                    assert destination(await stream.read("request_headers")) == [b]

    run(main())


@pytest.mark.parametrize("given", [[], ["10.1.2.3:8000"], ["127.0.0.1:1"], ""])
def test_a_subset_without_a_ready_replica_is_503(fakes: list[Fake], given: Any) -> None:
    async def main() -> None:
        async with picker(source(fakes)) as server, Stream(server, DUPLEX) as stream:
            await stream.headers(subset=given)
            await stream.body(body())
            answer = await stream.read("immediate_response")
            assert answer.immediate_response.status.code == 503

    run(main())


def test_a_subset_of_ips_has_all_their_ports(fakes: list[Fake]) -> None:
    async def main() -> None:
        async with picker(source(fakes)) as server, Stream(server, DUPLEX) as stream:
            await stream.headers("/v1/models", "GET", end=True, subset=["127.0.0.1"])
            assert len(destination(await stream.read("request_headers"))) == 1

    run(main())


def test_fallbacks_follow_in_the_order_of_routing(fakes: list[Fake]) -> None:
    async def main() -> None:
        same = Replicas(
            [ReplicaSpec(fake.name, fake.entry["url"], fake.entry["token"]) for fake in fakes]
        )
        async with picker(same, fallbacks=1) as server:
            for upstream in server.cluster.listed.values():
                upstream.spec = ReplicaSpec(upstream.name, upstream.spec.url, "one for all")
            async with Stream(server, DUPLEX) as stream:
                await stream.headers()
                await stream.body(body(SLO))
                chosen, other = destination(await stream.read("request_headers"))
                assert sorted((chosen, other)) == sorted(endpoint(fake) for fake in fakes)
                await stream.read("request_body")
                await stream.response(served=other)
                await stream.read("response_headers")
                by_endpoint = {
                    exchange.endpoint_of(one.spec): one.virtual.outstanding
                    for one in server.cluster.listed.values()
                }
                assert by_endpoint == {chosen: 0, other: 1}
                await stream.body(b"{}", kind="response_body")
                await stream.read("response_body")
                await stream.finish()
            assert await counted(server, "retries_total", reason="connection") == 1
            assert await counted(server, "requests_total", result="best_effort") == 1

    run(main())
