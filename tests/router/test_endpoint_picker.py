# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker: the protocol's own messages over gRPC, before replicas without engines."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc_health", reason="pip install 'vllm-slo[gateway]'")
pytest.importorskip("envoy.service", reason="pip install 'vllm-slo[gateway]'")

import grpc
from front_stack import LOADED, PATIENCE_S, Fake, eventually, http, processes
from gateway_client import (
    Replicas,
    Stream,
    destination,
    mutation,
    outstanding,
    picker,
    set_headers,
    streamed,
    until,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vllm_slo.errors import ConfigError
from vllm_slo.router.endpoint_picker import exchange
from vllm_slo.router.endpoint_picker.server import PickerServer, Ports
from vllm_slo.router.endpoint_picker.tls import Certificate
from vllm_slo.router.replica_list import Urls
from vllm_slo.router.upstream import ReplicaSpec

DUPLEX = ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED")
BUFFERED = ("BUFFERED", "BUFFERED")
SLO = {"ttft_ms": 5_000}
DECLINE = {**SLO, "on_unattainable": "decline"}


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


def source(fakes: list[Fake]) -> Replicas:
    """All with one token, as replicas of a gateway have; see `Fake.entry`."""
    return Replicas([ReplicaSpec.from_json(fake.entry) for fake in fakes])


def endpoint(fake: Fake) -> str:
    return str(fake.line("url")["url"]).removeprefix("http://")


def body(slo: Any = None, **fields: Any) -> bytes:
    given = {"prompt": "x", "max_tokens": 2, **fields}
    return json.dumps(given if slo is None else {**given, "slo": slo}).encode()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def total(server: PickerServer, series: str, **labels: str) -> float:
    text = http("GET", f"http://127.0.0.1:{server.bound['metrics']}/metrics").text
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    lines = [line for line in text.splitlines() if line.startswith(f"vllm_slo:front_{series}")]
    return sum(float(line.split()[-1]) for line in lines if all(one in line for one in wanted))


async def counted(server: PickerServer, series: str, **labels: str) -> float:
    return await asyncio.to_thread(total, server, series, **labels)


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


# --- what the replica gets ---------------------------------------------------------------------


def test_the_replica_is_told_what_it_needs_to_account_for_the_request(fakes: list[Fake]) -> None:
    fakes[1].knobs(state=LOADED)

    async def main() -> None:
        async with picker(source(fakes)) as server, Stream(server, DUPLEX) as stream:
            await until(lambda: server.cluster.listed["b"].virtual.load_tokens > 0)
            client = {
                "x-vllm-slo-token": "guessed",
                "x-vllm-slo-unattainable": "decline",
                "x-gateway-destination-endpoint": "10.9.9.9:80",
            }
            await stream.headers(headers=client)
            await stream.body(body(SLO))
            answer = await stream.read("request_headers")
            to_set = set_headers(answer)
            assert list(mutation(answer).remove_headers) == ["x-vllm-slo-unattainable"]
            assert to_set.keys() == {
                "x-gateway-destination-endpoint",
                *(f"x-vllm-slo-{name}" for name in ("token", "age-ms", "ticket")),
            }
            assert destination(answer) == [endpoint(fakes[0])]
            await stream.read("request_body")
            sent = {**to_set, "content-type": "application/json"}
            url = f"http://{endpoint(fakes[0])}/v1/completions"
            replied = await asyncio.to_thread(http, "POST", url, content=body(SLO), headers=sent)
            assert replied.status_code == 200
            (seen,) = [one for one in fakes[0].seen() if one["ticket"]]
            assert seen["ticket"] == int(to_set["x-vllm-slo-ticket"]) and not seen["hop"]
            await stream.response()
            await stream.read("response_headers")
            await stream.body(replied.content, kind="response_body")
            await stream.read("response_body")
            await stream.finish()

    run(main())


def test_answers_teach_prefixes_and_tokens(fakes: list[Fake]) -> None:
    async def main() -> None:
        data = body(prompt="word " * 400)
        async with picker(source(fakes)) as server:
            chosen, loads = [], []
            for _ in range(6):
                async with Stream(server, DUPLEX) as stream:
                    await stream.headers()
                    await stream.body(data)
                    chosen += destination(await stream.read("request_headers"))
                    await stream.read("request_body")
                    load = sum(one.virtual.load_tokens for one in server.cluster.listed.values())
                    loads.append(load)
                    await stream.response()
                    await stream.read("response_headers")
                    usage = b'{"choices":[],"usage":{"prompt_tokens":400}}'
                    await stream.body(usage[:20], end=False, kind="response_body")
                    await stream.read("response_body")
                    await stream.body(usage[20:], kind="response_body")
                    await stream.read("response_body")
                    await stream.finish()
                await until(lambda: outstanding(server) == 0)
            assert len(set(chosen)) == 1  # where the prompt is cached
            assert loads[1] < loads[0] / 2 and await counted(server, "requests_total") == 6
            assert server.picker.decisions.bytes_per_token > 3.5

    run(main())


def test_own_headers_of_replicas_stay_here(fakes: list[Fake]) -> None:
    async def main() -> None:
        async with picker(source(fakes)) as server, Stream(server, DUPLEX) as stream:
            await stream.headers()
            await stream.body(body(DECLINE))
            await stream.read("request_headers")
            await stream.read("request_body")
            await stream.response(429, x_vllm_slo_declined="1500", retry_after="2")
            answer = await stream.read("response_headers")
            assert list(mutation(answer).remove_headers) == ["x-vllm-slo-declined"]
            await stream.body(b"{}", kind="response_body")
            await stream.read("response_body")
            await stream.finish()
            assert await counted(server, "requests_total", result="declined") == 1
            assert await counted(server, "requests_total", result="promised") == 0

    run(main())


def test_a_replicas_error_counts_as_unavailable(fakes: list[Fake]) -> None:
    async def main() -> None:
        async with picker(source(fakes)) as server, Stream(server, DUPLEX) as stream:
            await stream.headers()
            await stream.body(body(SLO))
            await stream.read("request_headers")
            await stream.read("request_body")
            await stream.response(503)
            await stream.read("response_headers")
            await stream.body(b"{}", kind="response_body")
            await stream.read("response_body")
            await stream.finish()
            assert await counted(server, "requests_total", result="unavailable") == 1
            assert await counted(server, "requests_total", result="promised") == 0

    run(main())


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [DUPLEX, BUFFERED])
@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/completions", 429, "slo_unattainable"),
        ("/v1/messages", 429, "rate_limit_error"),
    ],
)
def test_a_decline_is_in_the_shape_of_the_api(
    fakes: list[Fake], modes: tuple[str, str], path: str, status: int, kind: str
) -> None:
    for fake in fakes:
        fake.knobs(state=LOADED)

    async def main() -> None:
        async with picker(source(fakes)) as server, Stream(server, modes) as stream:
            await until(lambda: all(one.virtual.load_tokens for one in server.cluster.all()))
            await stream.headers(path)
            if modes == BUFFERED:
                await stream.read("request_headers")
            await stream.body(body(DECLINE, messages=[]))
            answer = await stream.read("immediate_response")
            assert answer.immediate_response.status.code == status
            assert json.loads(answer.immediate_response.body)["error"]["type"] == kind
            headers = set_headers(answer)
            assert headers["content-type"] == "application/json"
            assert headers["x-slo-reason"] == "prefill" and int(headers["retry-after"]) >= 1
            assert await stream.call.read() is grpc.aio.EOF
            assert await counted(server, "declined_total", slo_class="custom") == 1

    run(main())


def test_mistakes_and_private_paths_are_refused(fakes: list[Fake]) -> None:
    async def main() -> None:
        async with picker(source(fakes)) as server:
            for path, data, status in (
                ("/v1/completions", body({"ttft_ms": -1}), 400),
                ("/vllm-slo/state", b"", 404),
                ("/vllm-slo%2fstate?x", b"", 404),
            ):
                async with Stream(server, DUPLEX) as stream:
                    await stream.headers(path, end=not data)
                    if data:
                        await stream.body(data)
                    answer = await stream.read("immediate_response")
                    assert answer.immediate_response.status.code == status
                    assert json.loads(answer.immediate_response.body)["error"]["code"] == status

    run(main())


def test_without_replicas_it_is_503() -> None:
    async def main() -> None:
        async with picker(Replicas([])) as server, Stream(server, DUPLEX) as stream:
            await stream.headers()
            await stream.body(body())
            answer = await stream.read("immediate_response")
            assert answer.immediate_response.status.code == 503
            assert set_headers(answer)["retry-after"] == "1"

    run(main())


# --- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["headers", "a part", "the decision", "the answer's beginning"])
def test_a_stream_that_breaks_off_leaves_nothing(fakes: list[Fake], after: str) -> None:
    async def main() -> None:
        async with picker(source(fakes)) as server:
            async with Stream(server, DUPLEX) as stream:
                await stream.headers()
                if after != "headers":
                    await stream.body(body(SLO), end=after != "a part")
                if after not in ("headers", "a part"):
                    await stream.read("request_headers")
                    await stream.read("request_body")
                    assert outstanding(server) == 4  # shadow, upstream, in flight, decisions
                if after == "the answer's beginning":
                    await stream.response()
                    await stream.read("response_headers")
                    await stream.body(b"data", end=False, kind="response_body")
                    await stream.read("response_body")
                await asyncio.sleep(0.02)
            await until(lambda: outstanding(server) == 0)
            decided = after not in ("headers", "a part")
            assert await counted(server, "client_gone_total") == decided

    run(main())


def test_many_requests_on_one_connection(fakes: list[Fake]) -> None:
    async def main() -> None:
        async with picker(source(fakes)) as server:

            async def one(number: int) -> None:
                async with Stream(server, DUPLEX) as stream:
                    await stream.headers()
                    await stream.body(body(SLO, prompt=f"{number}"))
                    await stream.read("request_headers")
                    if number % 3 == 0:
                        return
                    await stream.read("request_body")
                    await stream.response(end=True)
                    await stream.read("response_headers")
                    await stream.finish()

            await asyncio.gather(*(one(number) for number in range(60)))
            await until(lambda: outstanding(server) == 0)
            assert await counted(server, "requests_total") == 40
            assert await counted(server, "client_gone_total") == 20

    run(main())


def test_a_body_beyond_the_limits_is_decided_by_its_beginning(
    fakes: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MAX_BODY_BYTES", 1_000)
    data = body(SLO, prompt="x" * 3_000)

    async def main() -> None:
        async with picker(source(fakes)) as server, Stream(server, DUPLEX) as stream:
            await stream.headers(headers={"content-length": str(len(data))})
            await stream.body(data[:600], end=False)
            await stream.body(data[600:1_100], end=False)
            destination(await stream.read("request_headers"))
            load = sum(one.virtual.load_tokens for one in server.cluster.all())
            assert load > 800  # by the stated length
            got = [streamed(await stream.read("request_body")) for _ in range(2)]
            await stream.body(data[1_100:])
            got.append(streamed(await stream.read("request_body")))
            assert b"".join(part for part, _ in got) == data and got[-1][1]

    run(main())


def test_a_drain_lets_streams_end(fakes: list[Fake]) -> None:
    async def main() -> None:
        async with picker(source(fakes)) as server, Stream(server, DUPLEX) as stream:
            await stream.headers()
            await stream.body(body(SLO))
            await stream.read("request_headers")
            await stream.read("request_body")
            server.stop.set()
            await asyncio.sleep(0.1)
            await stream.response(end=True)
            await stream.read("response_headers")
            await stream.finish()

    run(main())


# --- health, TLS, the command ------------------------------------------------------------------


async def health(port: int, service: str, credentials: Any = None) -> str:
    target = f"localhost:{port}"
    options = [("grpc.enable_http_proxy", 0)]
    channel = (
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)
        if credentials is None
        else grpc.aio.secure_channel(target, credentials, options)
    )
    async with channel:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_S)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def test_it_is_ready_when_it_knows_its_replicas(fakes: list[Fake]) -> None:
    async def main() -> None:
        async with picker(Replicas([])) as waiting:
            for port in (waiting.bound["health"], waiting.bound["picker"]):
                assert await health(port, "liveness") == "SERVING"
                for service in ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
                    assert await health(port, service) == "NOT_SERVING"
        async with picker(source(fakes)) as server:
            for _ in range(100):
                if await health(server.bound["health"], "inference-extension") == "SERVING":
                    break
                await asyncio.sleep(0.02)
            assert await health(server.bound["health"], "readiness") == "SERVING"

    run(main())


def test_tls_with_a_certificate_of_its_own_and_with_the_operators(
    fakes: list[Fake], tmp_path: Path
) -> None:
    from vllm_slo.router.endpoint_picker.tls import _self_signed

    key, certificate = _self_signed()
    files = (tmp_path / "tls.crt", tmp_path / "tls.key")
    files[0].write_bytes(certificate)
    files[1].write_bytes(key)

    async def main() -> None:
        async with picker(source(fakes), Certificate(files)) as server:
            trusted = grpc.ssl_channel_credentials(certificate)
            assert await health(server.bound["picker"], "liveness", trusted) == "SERVING"
            new_key, new_certificate = _self_signed()
            files[1].write_bytes(new_key)  # for a moment they do not belong together
            assert await health(server.bound["picker"], "liveness", trusted) == "SERVING"
            files[0].write_bytes(new_certificate)
            trusted = grpc.ssl_channel_credentials(new_certificate)
            assert await health(server.bound["picker"], "liveness", trusted) == "SERVING"
        async with picker(source(fakes), Certificate(None)) as server:
            with pytest.raises(grpc.aio.AioRpcError):
                await health(server.bound["picker"], "liveness", trusted)

    run(main())


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    from vllm_slo.router.endpoint_picker.tls import _self_signed

    (key, certificate), (other, _) = _self_signed(), _self_signed()
    paths = {"key": tmp_path / "key", "cert": tmp_path / "cert"}
    for contents, error in (
        ({}, "--tls-key .*No such file"),
        ({"key": key}, "--tls-cert .*No such file"),
        ({"key": b"x", "cert": certificate}, "no private key"),
        ({"key": key, "cert": b"x"}, "no certificate"),
        ({"key": other, "cert": certificate}, "does not belong"),
    ):
        for name, data in contents.items():
            paths[name].write_bytes(data)
        with pytest.raises(ConfigError, match=error):
            Certificate((paths["cert"], paths["key"])).credentials()


def test_a_replica_needs_an_ip_address() -> None:
    async def main() -> None:
        from vllm_slo.config.model import SLOConfig

        named = Urls(("http://vllm-0:8000",), "t")
        ports = Ports("127.0.0.1", 0, None, None)
        with pytest.raises(ConfigError, match="IP addresses"):
            await PickerServer(SLOConfig(), named, ports, None).run()

    run(main())


def test_a_port_in_use_is_told(fakes: list[Fake]) -> None:
    async def main() -> None:
        from vllm_slo.config.model import SLOConfig

        async with picker(source(fakes)) as server:
            for name in ("picker", "health", "metrics"):
                given = {"picker": 0, "health": 0, "metrics": 0, name: server.bound[name]}
                ports = Ports("127.0.0.1", *given.values())
                with pytest.raises(ConfigError, match="choose another"):
                    await PickerServer(SLOConfig(), source(fakes), ports, None).run()

    run(main())


def test_the_command(fakes: list[Fake], tmp_path: Path) -> None:
    listed = [{key: fake.entry[key] for key in ("name", "url", "token")} for fake in fakes]
    (tmp_path / "replicas.yaml").write_text(json.dumps(listed))
    command = [sys.executable, "-m", "vllm_slo.cli", "endpoint-picker", "--host", "127.0.0.1"]
    command += ["--replicas-from", str(tmp_path / "replicas.yaml")]
    command += ["--port", "0", "--health-port", "0", "--metrics-port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = []
            while not lines or "listens" not in lines[-1]:
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            assert "self-signed" in lines[-1]
            port = int(lines[-1].partition("metrics on port ")[2].split(";")[0])
            url = f"http://127.0.0.1:{port}/metrics"
            ready = 'vllm_slo:front_replica_ready{replica="b"} 1.0'
            eventually(lambda: ready in http("GET", url).text, "b is ready")
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.stderr.read()


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ([], "--replica URL"),
        (["--replica", "http://10.0.0.1:1"], "no token"),
        (["--replica", "x", "--fallbacks", "-1"], "--fallbacks"),
        (["--replica", "x", "--tls-key", "k"], "--tls-cert and --tls-key"),
        (["--replica", "x", "--plaintext", "--tls-key", "k", "--tls-cert", "c"], "--plaintext"),
        (["--replica", "x", "--token-file", "/nowhere/t"], "--token-file"),
        (["--replica", "x", "--slo-config", "/nowhere/t"], "/nowhere/t"),
    ],
)
def test_mistakes_on_the_command_line(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_slo.cli import main

    assert main(["endpoint-picker", *flags]) == 2
    printed = capsys.readouterr().err
    assert error in printed and printed.count("\n") == 1
