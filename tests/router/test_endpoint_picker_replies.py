# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker: what replicas get, refusals, and the ends of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

pytest.importorskip("grpc_health", reason="pip install 'vllm-slo[gateway]'")

import grpc
from front_stack import LOADED, Fake, http, processes
from gateway_client import (
    BUFFERED,
    DECLINE,
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
            assert seen["ticket"] == to_set["x-vllm-slo-ticket"] and not seen["hop"]
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
