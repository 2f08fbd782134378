# SPDX-License-Identifier: Apache-2.0
"""The HTTP middleware, request side: carriers, identity, disconnect, fuzz."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from depth import examples
from http_app import CONFIG, REPORT, ROUTES, Server, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from vllm_slo.engine.http import FORWARDED, SLOMiddleware
from vllm_slo.http_slo import MAX_BODY_BYTES
from vllm_slo.slo import HEADER_FIELDS


def flat(**keys: Any) -> dict[str, Any]:
    return {"slo_value": 1.0, "slo_on_unattainable": "best_effort", **keys}


# --- request: carriers ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*ROUTES, "/proxy/v1/completions"])
def test_body_slo_becomes_xargs(path: str) -> None:
    server = Server(root_path="/proxy") if path.startswith("/proxy") else Server()
    server.post(path, json={"prompt": "x", "slo": {"ttft_ms": 500}, "vllm_xargs": {"seed": 3}})
    assert json.loads(server.bodies[0]) == {
        "prompt": "x",
        "vllm_xargs": {"seed": 3, **flat(slo_ttft_ms=500.0)},
    }


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"slo": {"ttft_ms": 500, "tpot_ms": 50}}, {}),
        ({"vllm_xargs": {"slo_ttft_ms": 500, "slo_tpot_ms": 50}}, {}),
        ({"vllm_xargs": {"prefill_ddl": 1000.5, "slo_tpot": 0.05}}, {}),
        ({}, {"x-llm-d-slo-ttft-ms": "500", "x-llm-d-slo-tpot-ms": "50"}),
        ({}, {"X-SLO-TTFT-MS": "500", "X-SLO-TPOT-MS": "5e1"}),
        ({"slo": {"ttft_ms": 500}}, {"x-slo-tpot-ms": "50", "x-slo-ttft-ms": "500.0"}),
    ],
)
def test_every_carrier_means_the_same(body: dict[str, Any], headers: dict[str, str]) -> None:
    seen = Server().forwarded({"prompt": "x", **body}, headers=headers)
    assert seen == {"prompt": "x", "vllm_xargs": flat(slo_ttft_ms=500.0, slo_tpot_ms=50.0)}


def test_classes_and_service_tiers() -> None:
    server = Server()
    chat = flat(slo_ttft_ms=500.0, slo_tpot_ms=50.0, slo_value=2.0, slo_class="chat")
    assert server.forwarded({"slo": {"class": "chat"}})["vllm_xargs"] == chat
    assert server.forwarded({}, headers={"x-slo-class": "chat"})["vllm_xargs"] == chat
    assert server.forwarded({"service_tier": "priority"})["vllm_xargs"] == chat
    assert server.forwarded({"service_tier": "flex"})["vllm_xargs"] == flat(slo_tier="best_effort")
    kept = server.forwarded({"service_tier": "flex", "slo": {"class": "chat", "value": 1}})
    assert kept["vllm_xargs"] == {**chat, "slo_value": 1.0, "slo_tier": "best_effort"}
    assert kept["service_tier"] == "flex"


def test_streams_are_marked_for_the_scheduler() -> None:
    server = Server()
    streamed = server.forwarded({"prompt": "x", "stream": True, "slo": {"ttft_ms": 500}})
    assert streamed["vllm_xargs"] == flat(slo_ttft_ms=500.0, slo_stream=1)
    tier = server.forwarded({"stream": True, "service_tier": "auto", "vllm_xargs": {"a": 1}})
    assert tier["vllm_xargs"] == {"a": 1, "slo_stream": 1}
    assert "vllm_xargs" not in server.forwarded({"stream": True})
    assert "vllm_xargs" not in server.forwarded({"stream": False, "service_tier": "auto"})
    # The stream of the Responses API ends with the whole response.
    last = {"input": "x", "stream": True, "slo": {"ttft_ms": 500}}
    response = server.post(ROUTES[2], json=last)
    assert response.json()["echo"]["vllm_xargs"] == flat(slo_ttft_ms=500.0)


def test_null_carriers_are_removed() -> None:
    assert Server().forwarded({"slo": None, "vllm_xargs": {"slo_ttft_ms": None, "a": 1}}) == {
        "vllm_xargs": {"a": 1}
    }


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"slo": {"ttft_ms": -1}}, {}, "ttft_ms"),
        ({"vllm_xargs": {"slo_ttft_ms": -1}}, {}, "ttft_ms"),
        ({}, {"x-slo-ttft-ms": "-1"}, "ttft_ms"),
        ({}, {"x-llm-d-slo-tpot-ms": "soon"}, "tpot_ms"),
        ({"slo": {"ttft_ms": 5}}, {"x-slo-ttft-ms": "6"}, "ttft_ms"),
        ({"slo": {"ttft": 5}}, {}, "ttft"),
        ({"vllm_xargs": {"slo_internal": 5}}, {}, "internal"),
        ({"vllm_xargs": {"slo_stream": 1}, "stream": True}, {}, "stream"),
        ({"slo": "chat"}, {}, "slo"),
        ({"slo": {}, "vllm_xargs": [1]}, {}, "vllm_xargs"),
        ({"slo": {"class": "nope"}}, {}, "class"),
        ({"service_tier": "gold"}, {}, "service_tier"),
        ({"service_tier": 5}, {}, "service_tier"),
        ({"slo": {"tier": "guaranteed"}}, {}, "tier"),
        ({"vllm_xargs": {"prefill_ddl": "x"}}, {}, "prefill_ddl"),
    ],
)
def test_mistakes_are_400_before_the_app(
    body: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    server = Server()
    response = server.post(json={"prompt": "x", **body}, headers=headers)
    assert refused(response, param).startswith(f"{param}: ")
    assert response.json()["error"]["type"] == "BadRequestError"
    assert server.bodies == []


def test_a_header_sent_twice_must_agree() -> None:
    server = Server()
    twice = [("x-slo-ttft-ms", "5"), ("x-slo-ttft-ms", "5")]
    assert server.post(json={}, headers=twice).status_code == 200
    twice[1] = ("x-slo-ttft-ms", "6")
    assert "'5, 6'" in refused(server.post(json={}, headers=twice), "ttft_ms")


# --- behind a front ------------------------------------------------------------------------------

SAID = {"age_ms": 250.0, "ticket": 7, "on_unattainable": None}
MARKS = {"slo_age_ms": 250.0, "slo_ticket": 7}
HOP = {**SAID, "on_unattainable": "decline"}


def behind_a_front(said: dict[str, Any], config: Any = CONFIG, **options: Any) -> Server:
    """A server whose middleware finds `said` in the scope, as the guard of a replica puts it."""
    server = Server(config=config, **options)
    inner: Any = server.app

    async def guard(scope: Any, receive: Any, send: Any) -> None:
        await inner({**scope, FORWARDED: said}, receive, send)

    server.app = guard  # type: ignore[assignment]
    return server


def test_the_scheduler_is_told_what_the_front_says() -> None:
    server = behind_a_front(SAID)
    seen = server.forwarded({"prompt": "x", "slo": {"ttft_ms": 500}})
    assert seen["vllm_xargs"] == flat(slo_ttft_ms=500.0, **MARKS)
    streamed = server.forwarded({"prompt": "x", "stream": True, "slo": {"ttft_ms": 500}})
    assert streamed["vllm_xargs"] == flat(slo_ttft_ms=500.0, slo_stream=1, **MARKS)


def test_a_deadline_counts_from_the_arrival_at_the_front() -> None:
    server = behind_a_front(SAID)
    xargs = {"prefill_ddl": 1000.5, "slo_tpot": 0.05}
    seen = server.forwarded({"prompt": "x", "vllm_xargs": xargs})
    # Due half a second after it came here, which is a quarter after it came to the front.
    assert seen["vllm_xargs"] == flat(slo_ttft_ms=750.0, slo_tpot_ms=50.0, **MARKS)


def test_a_hop_asks_for_a_refusal() -> None:
    server = behind_a_front(HOP)
    asked = flat(slo_ttft_ms=500.0, **MARKS) | {"slo_on_unattainable": "decline"}
    for prompt in ("x", [5, 6, 7], ["x"], [[5, 6]]):
        seen = server.forwarded({"prompt": prompt, "slo": {"ttft_ms": 500}})
        assert seen["vllm_xargs"] == asked


@pytest.mark.parametrize(
    "body",
    [{"n": 2}, {"prompt": ["x", "y"]}, {"prompt": [[5], [6]]}, {"slo": {"tier": "best_effort"}}],
)
def test_what_could_be_declined_in_part_or_asks_for_nothing_is_not(body: dict[str, Any]) -> None:
    seen = behind_a_front(HOP).forwarded({"prompt": "x", "slo": {"ttft_ms": 500}, **body})
    assert seen["vllm_xargs"]["slo_on_unattainable"] == "best_effort"
    declining = {"prompt": "x", **body, "slo": {"ttft_ms": 500, "on_unattainable": "decline"}}
    seen = behind_a_front(HOP).forwarded(declining)
    assert seen["vllm_xargs"]["slo_on_unattainable"] == "decline"


def declined(body: dict[str, Any]) -> Any:
    """What vLLM answers when the scheduler declines."""
    if not body.get("stream"):
        return {"choices": [{"finish_reason": "abort", "stop_reason": "slo_declined:2500"}]}

    async def events() -> AsyncIterator[bytes]:
        yield b"data: [DONE]\n\n"

    return events()


@pytest.mark.parametrize("stream", [False, True])
def test_a_declined_hop_is_429(stream: bool) -> None:
    body = {"prompt": "x", "slo": {"ttft_ms": 500}, "stream": stream}
    response = behind_a_front(HOP, reply=declined).post(json=body)
    refused(response, "slo", 429)
    assert response.json()["error"]["type"] == "slo_unattainable"
    assert response.headers["retry-after-ms"] == ("1000" if stream else "2500")
    assert behind_a_front(SAID, reply=declined).post(json=body).status_code == 200


def test_the_tier_served_is_said_behind_a_front_too() -> None:
    promised: dict[str, Any] = {"kv_transfer_params": {"vllm_slo": REPORT}}
    late = {"kv_transfer_params": {"vllm_slo": {**REPORT, "promised": False}}}
    for said in (SAID, HOP):
        for reply, tier in ((promised, "priority"), (late, "flex")):
            server = behind_a_front(
                said, reply=lambda _, reply=reply: json.loads(json.dumps(reply))
            )
            answer = server.post(json={"prompt": "x", "service_tier": "priority"}).json()
            assert answer["service_tier"] == tier


@pytest.mark.parametrize("said", [SAID, HOP])
@pytest.mark.parametrize(
    "body", [b'{"prompt": "x" ,  "n":1}', b'{"service_tier" : "auto"}', b"[1]", b'{"slo": ']
)
def test_without_an_slo_nothing_is_told(said: dict[str, Any], body: bytes) -> None:
    server = behind_a_front(said)
    server.post(content=body, headers={"content-type": "application/json"})
    assert server.bodies == [body]


def test_the_default_class_is_told_as_well() -> None:
    server = behind_a_front(HOP, {**CONFIG, "default_class": "chat"})
    chat = flat(slo_ttft_ms=500.0, slo_tpot_ms=50.0, slo_value=2.0, slo_class="chat", **MARKS)
    asked = {**chat, "slo_on_unattainable": "decline"}
    assert server.forwarded({"prompt": "x"})["vllm_xargs"] == asked
    # Only who asks for something is told of it in a stream.
    assert server.forwarded({"prompt": "x", "stream": True})["vllm_xargs"] == asked
    ordinary = behind_a_front(SAID, {**CONFIG, "default_class": "chat"})
    assert ordinary.forwarded({"prompt": "x", "vllm_xargs": {"a": 1}})["vllm_xargs"] == {
        "a": 1,
        **chat,
    }


def test_headers_of_the_front_mean_nothing_to_the_middleware() -> None:
    headers = {"x-vllm-slo-age-ms": "250", "x-vllm-slo-ticket": "7", "x-vllm-slo-hop": "1"}
    seen = Server().forwarded({"prompt": "x", "slo": {"ttft_ms": 500}}, headers=headers)
    assert seen["vllm_xargs"] == flat(slo_ttft_ms=500.0)


@pytest.mark.parametrize("key", ["slo_age_ms", "slo_ticket"])
@pytest.mark.parametrize("front", [False, True])
def test_clients_cannot_speak_for_the_front(key: str, front: bool) -> None:
    server = behind_a_front(SAID) if front else Server()
    response = server.post(json={"prompt": "x", "vllm_xargs": {key: 5}})
    refused(response, key.removeprefix("slo_"))


# --- request: what passes untouched --------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x" ,  "n":1}',
        b'{"prompt": "say \\"slo\\" and service_tier"}',
        b'{"service_tier" : "auto"}',
        b'{"service_tier" : null, "vllm_xargs": {"a": 1}}',
        b'{"\\u0073lo": {"ttft_ms": 5}}',
        b'["slo"]',
        b'{"slo": ',
        b'{"slo": "\xff"}',
        b'{"slo": ' + b"[" * 100_000,
        b'{"slo": 1' + b"0" * 5000 + b"}",
        b"",
        '{"slo": 1}'.encode("utf-16"),
    ],
)
def test_pass_through_is_byte_for_byte(body: bytes) -> None:
    server = Server(lambda _: {"echo": 1})
    server.post(content=body, headers={"content-type": "application/json"})
    assert server.bodies == [body]
    assert server.headers[0]["content-length"] == str(len(body))


def test_other_routes_methods_types_and_sizes_pass() -> None:
    server = Server()
    body = json.dumps({"slo": {"ttft_ms": -1}}).encode()
    json_type = {"content-type": "application/json"}
    assert server.post("/v1/embeddings", content=body, headers=json_type).status_code == 200
    assert server.post(content=body, headers={"content-type": "text/plain"}).status_code == 200
    large = body[:-1] + b" " * MAX_BODY_BYTES + b"}"
    assert server.post(content=large, headers=json_type).status_code == 200

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 1 << 22):
            yield large[start : start + (1 << 22)]

    assert server.post(content=chunks(), headers=json_type).status_code == 200
    assert server.bodies == [body, body, large, large]


def test_response_of_a_plain_request_is_untouched() -> None:
    server = Server(lambda _: {"kv_transfer_params": {"vllm_slo": REPORT}, "service_tier": None})
    assert server.post(json={}).json()["kv_transfer_params"] == {"vllm_slo": REPORT}


def test_nothing_is_read_before_the_app_lets_the_client_in() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    status, body = drive(SLOMiddleware(app), [b'{"slo": {"ttft_ms": -1}}'])
    assert (status, body) == (401, b"no")


def drive(app: Any, chunks: list[bytes]) -> tuple[int, bytes]:
    """Run an ASGI app on a request with the body `chunks`; the client then disconnects."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": ROUTES[0],
        "headers": [(b"content-type", b"application/json")],
    }
    incoming = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks] + [
        {"type": "http.disconnect"}
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return incoming.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"] if sent else 0, b"".join(part.get("body", b"") for part in sent)


# --- disconnects ---------------------------------------------------------------------------------


def test_disconnect_while_the_body_arrives() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["type"])

    drive(SLOMiddleware(app), [b'{"slo": '])
    assert seen == ["http.disconnect"]


def test_disconnect_after_the_body_reaches_the_app() -> None:
    async def run() -> list[str]:
        gone, seen = asyncio.Event(), []
        asked = False

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append((await receive())["type"])
            waiting = asyncio.create_task(receive())
            await asyncio.sleep(0.01)
            seen.append("pending" if not waiting.done() else "early")
            gone.set()
            seen.append((await waiting)["type"])

        async def receive() -> Message:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": b'{"slo": {"ttft_ms": 5}}'}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None: ...

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": ROUTES[0], "headers": headers}
        await SLOMiddleware(app)(scope, receive, send)
        return seen

    assert asyncio.run(run()) == ["http.request", "pending", "http.disconnect"]


def test_an_app_that_raises_after_a_refusal_changes_nothing() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 500, "headers": []})
        raise RuntimeError("client is gone")

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        async def once() -> Message:
            return {"type": "http.request", "body": b'{"slo": 5}', "more_body": False}

        await SLOMiddleware(app)(scope, once, send)

    status, body = drive(whole, [])
    assert status == 400
    assert b"is not an object" in body


def test_errors_of_the_app_are_not_swallowed() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("bug")

    with pytest.raises(RuntimeError, match="bug"):
        drive(SLOMiddleware(app), [])


# --- fuzz ----------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["flex", "priority", "chat", "decline", "guaranteed", 500, -1, 10**30])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
slo_keys = st.sampled_from(["ttft_ms", "tpot_ms", "value", "tier", "class", "tenant"])
bodies = st.dictionaries(
    st.sampled_from(["slo", "vllm_xargs", "service_tier", "prompt", "stream"]),
    values
    | st.dictionaries(slo_keys, values, max_size=3)
    | st.dictionaries(slo_keys.map(lambda key: "slo_" + key) | st.text(max_size=5), values),
)
raw_bodies = (
    bodies.map(lambda body: json.dumps(body).encode())
    | bodies.map(lambda body: json.dumps(body).encode()[:-3])
    | st.binary(max_size=40).map(lambda tail: b'{"slo": ' + tail)
)
raw_headers = st.dictionaries(
    st.sampled_from(sorted(HEADER_FIELDS)).map(str.encode),
    st.binary(max_size=30) | st.sampled_from([b"5", b"chat", b"flex"]),
    max_size=2,
)


@pytest.mark.slow
@given(raw_bodies, raw_headers)
@settings(max_examples=examples(1000))
def test_fuzz_never_500(body: bytes, headers: dict[bytes, bytes]) -> None:
    answers: list[Message] = []
    reached: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        reached.append(message["body"])
        assert (b"content-length", b"%d" % len(message["body"])) in scope["headers"]
        start = {"type": "http.response.start", "status": 200}
        await send({**start, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b'{"kv_transfer_params":{}}'})

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        answers.append(message)

    base = {b"content-type": b"application/json", b"content-length": b"%d" % len(body)}
    items = list({**base, **headers}.items())
    scope = {"type": "http", "method": "POST", "path": ROUTES[0], "headers": items}
    asyncio.run(SLOMiddleware(app)(scope, receive, send))
    assert answers[0]["status"] == (200 if reached else 400)
    if not reached:
        error = json.loads(answers[1]["body"])["error"]
        assert error["message"].startswith(error["param"])
    elif reached[0] != body:
        assert "slo" not in json.loads(reached[0])
