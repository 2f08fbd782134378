# SPDX-License-Identifier: Apache-2.0
"""The HTTP middleware, response side: report, service tier, decline, first token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from depth import examples
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from http_app import CONFIG, REPORT, ROUTES, Server, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from vllm_slo.engine.http import SLOMiddleware
from vllm_slo.engine.http_outcome import (
    Asked,
    Declined,
    StreamGate,
    pack_report,
    rewrite_json,
    served_service_tier,
)
from vllm_slo.slo import SLO

DECLINE = {"prompt": "x", "slo": {"ttft_ms": 1, "on_unattainable": "decline"}}


# --- response: report and service tier -----------------------------------------------------------


def test_report_moves_to_slo() -> None:
    server = Server(lambda _: {"id": "é", "kv_transfer_params": {"vllm_slo": REPORT}})
    response = server.post(json={"slo": {"ttft_ms": 500}})
    assert response.json() == {
        "id": "é",
        "kv_transfer_params": None,
        "slo": REPORT,
        "service_tier": "default",
    }
    assert response.headers["content-length"] == str(len(response.content))
    server.reply = lambda _: {"kv_transfer_params": {"vllm_slo": REPORT, "peer": 1}}
    both = server.post(json={"slo": {"ttft_ms": 500}}).json()
    assert both["kv_transfer_params"] == {"peer": 1}


@pytest.mark.parametrize(
    ("asked", "tier", "promised", "served"),
    [
        (SLO(ttft_ms=5), None, True, "default"),
        (SLO(ttft_ms=5), "priority", True, "priority"),
        (SLO(ttft_ms=5), "flex", True, "default"),
        (SLO(ttft_ms=5), None, False, "flex"),
        (SLO(ttft_ms=5), "priority", False, "flex"),
        (SLO(tier="best_effort"), None, False, "flex"),
        (SLO(tier="best_effort"), "flex", False, "flex"),
        (None, "auto", False, "default"),
        (None, "default", None, "default"),
        (None, "priority", None, "default"),
        (SLO(tier="best_effort"), "flex", None, "flex"),
        (SLO(ttft_ms=5), "priority", None, "default"),
    ],
)
def test_served_tier(asked: SLO | None, tier: str | None, promised: Any, served: str) -> None:
    report = None if promised is None else {"promised": promised}
    assert served_service_tier(Asked(asked, tier), report) == served


def test_errors_of_vllm_pass() -> None:
    server = Server(lambda _: JSONResponse({"error": {"code": 404}}, 404))
    response = server.post(json={"slo": {"ttft_ms": 500}})
    assert (response.status_code, response.json()) == (404, {"error": {"code": 404}})


def test_default_class_covers_plain_requests() -> None:
    answer = {"kv_transfer_params": {"vllm_slo": {**REPORT, "declined": True}}}
    server = Server(lambda _: answer, config={**CONFIG, "default_class": "strict"})
    body = b'{"prompt" : "x"}'
    response = server.post(content=body, headers={"content-type": "application/json"})
    assert server.bodies == [body]
    refused(response, "slo", 429)


def test_broken_configuration_is_a_clear_error() -> None:
    server = Server(config={"clases": {}})
    response = server.post(json={"slo": {"ttft_ms": 5}})
    assert response.status_code == 500
    assert "configuration" in response.json()["error"]["message"]


def test_inner_http_middleware_sees_the_same() -> None:
    server = Server(lambda _: {"kv_transfer_params": {"vllm_slo": REPORT}})
    inner = FastAPI()

    @inner.middleware("http")
    async def tag(request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-tag"] = "1"
        return response

    inner.post(ROUTES[0])(server.endpoint)
    inner.add_middleware(SLOMiddleware)
    server.app = inner
    response = server.post(json={"slo": {"ttft_ms": 500}})
    assert response.json()["slo"] == REPORT
    assert response.headers["x-tag"] == "1"
    refused(server.post(json={"slo": {"ttft_ms": 0}}), "ttft_ms")
    assert len(server.bodies) == 1


# --- response: decline ---------------------------------------------------------------------------


def choice(text: str = "", finish: str | None = None, stop: Any = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": finish, "stop_reason": stop}


def marked(retry: object = 1500) -> dict[str, Any]:
    return choice(finish="abort", stop=f"slo_declined:{retry}")


def check_declined(response: httpx.Response, seconds: str, millis: str) -> None:
    assert f"retry after {millis} ms" in refused(response, "slo", 429)
    assert response.json()["error"]["type"] == "slo_unattainable"
    assert response.headers["retry-after"] == seconds
    assert response.headers["retry-after-ms"] == millis
    assert response.headers["x-slo-reason"] == "unattainable"
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("retry", "seconds", "millis"),
    [
        (1500, "2", "1500"),
        (1, "1", "1"),
        ("?", "1", "1000"),
        (0, "1", "1000"),
        ("nan", "1", "1000"),
    ],
)
def test_declined_json(retry: object, seconds: str, millis: str) -> None:
    headers = {"x-request-id": "r1"}
    server = Server(lambda _: JSONResponse({"choices": [marked(retry)]}, headers=headers))
    response = server.post(json=DECLINE)
    check_declined(response, seconds, millis)
    assert response.headers["x-request-id"] == "r1"


def test_declined_by_report_alone() -> None:
    report = {"promised": False, "declined": True, "retry_after_ms": 2500}
    server = Server(lambda _: {"output": [], "kv_transfer_params": {"vllm_slo": report}})
    check_declined(server.post(ROUTES[2], json=DECLINE), "3", "2500")


def test_a_decline_nobody_asked_for_or_a_partial_one_passes() -> None:
    server = Server(lambda _: {"choices": [marked()]})
    assert server.post(json={"slo": {"ttft_ms": 1}}).status_code == 200
    server.reply = lambda _: {"choices": [marked(), choice("a", "stop")]}
    assert server.post(json=DECLINE).status_code == 200
    server.reply = lambda _: {"choices": [choice(finish="abort")]}
    assert server.post(json=DECLINE).status_code == 200


def event(data: dict[str, Any] | str) -> str:
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"


def completion(*choices: dict[str, Any]) -> str:
    return event({"object": "text_completion", "choices": list(choices)})


def chat(delta: dict[str, Any], finish: str | None = None, stop: str | None = None) -> str:
    return event({"choices": [{"delta": delta, "finish_reason": finish, "stop_reason": stop}]})


ROLE = chat({"role": "assistant", "content": ""})
DONE = event("[DONE]")
USAGE = event({"choices": [], "usage": {"total_tokens": 1}})
CREATED = "event: response.created\n" + event({"type": "response.created", "response": {}})
ENDED = event(
    {
        "type": "response.completed",
        "response": {
            "kv_transfer_params": {"vllm_slo": {"declined": True, "retry_after_ms": 1500}}
        },
    }
)
MARK = {"finish": "abort", "stop": "slo_declined:1500"}


def streaming(*chunks: str) -> Server:
    async def stream() -> AsyncIterator[str]:
        for chunk in chunks:
            yield chunk

    return Server(lambda _: stream())


@pytest.mark.parametrize(
    "chunks",
    [
        (completion(marked()), DONE),
        (completion(marked(7)), completion(marked()), USAGE, DONE),
        (completion(marked(), marked(3)), DONE),
        (completion({**marked(), "text": "echoed prompt"}), DONE),
        (ROLE, chat({}, **MARK), DONE),
        (ROLE, chat({"content": ""}, **MARK), USAGE, DONE),
        (ROLE[:9], ROLE[9:] + chat({}, **MARK)[:20], chat({}, **MARK)[20:], DONE),
        (ROLE, chat({}, **MARK)),
        (CREATED, ENDED),
    ],
)
def test_declined_stream(chunks: tuple[str, ...]) -> None:
    check_declined(streaming(*chunks).post(json=DECLINE), "2", "1500")


@pytest.mark.parametrize("chunks", [(DONE,), (ROLE, DONE), (ROLE, USAGE, DONE)])
def test_a_stream_without_any_token_is_declined(chunks: tuple[str, ...]) -> None:
    check_declined(streaming(*chunks).post(json=DECLINE), "1", "1000")
    plain = streaming(*chunks).post(json={"slo": {"ttft_ms": 1}})
    assert (plain.status_code, plain.text) == (200, "".join(chunks))


@pytest.mark.parametrize(
    "chunks",
    [
        (completion(choice("a")), completion(choice("b", "stop")), DONE),
        (completion(choice("")), completion(marked()), DONE),
        (completion(choice("", "stop")), DONE),
        (completion(marked(), choice("a")), DONE),
        (ROLE, chat({"content": "a"}), chat({}, "length"), DONE),
        (ROLE, chat({}, "stop"), DONE),
        (ROLE, chat({}), DONE),
        (ROLE, event({"error": {"code": 500}}), DONE),
        (CREATED, event({"type": "response.output_text.delta", "delta": "a"}), DONE),
        (CREATED, event({"type": "response.completed", "response": {}})),
        (": keep-alive\n\n", ROLE, DONE),
        (event("not json"), DONE),
        (event("[]"), DONE),
        (event({"choices": 5}), DONE),
        (event({"choices": [5]}), DONE),
        (ROLE,),
        (),
    ],
)
def test_other_streams_pass_unchanged(chunks: tuple[str, ...]) -> None:
    response = streaming(*chunks).post(json=DECLINE)
    assert (response.status_code, response.text) == (200, "".join(chunks))
    assert response.headers["content-type"].startswith("text/event-stream")


def test_report_of_a_responses_stream() -> None:
    response = {"id": "é", "kv_transfer_params": {"vllm_slo": REPORT}, "service_tier": "auto"}
    head = event({"type": "response.output_text.delta", "delta": 'say "vllm_slo"'})
    tail = "event: response.completed\n" + event({"response": response})
    answer = streaming(CREATED, head, tail).post(ROUTES[2], json={"slo": {"ttft_ms": 1}}).text
    assert answer.startswith(CREATED + head + "event: response.completed\ndata: {")
    last = json.loads(answer.strip().splitlines()[-1].removeprefix("data: "))["response"]
    assert last == {
        "id": "é",
        "kv_transfer_params": None,
        "service_tier": "default",
        "slo": REPORT,
    }
    assert streaming(tail).post(ROUTES[2], json={}).text == tail


def packed(report: Any = REPORT, stop_reason: Any = None) -> str:
    return pack_report(report, stop_reason)


@pytest.mark.parametrize("stop_reason", [None, 17, "repetition_detected", 'a "quoted" one'])
@pytest.mark.parametrize("slo", [{"ttft_ms": 1}, DECLINE["slo"]])
def test_report_of_a_stream(stop_reason: Any, slo: Any) -> None:
    head = completion(choice('say "slo_report:', None))
    tail = completion(choice("é", "stop", packed(stop_reason=stop_reason)))
    answer = streaming(head, tail, USAGE, DONE).post(json={"slo": slo}).text
    assert answer.startswith(head)
    assert answer.endswith(USAGE + DONE)
    last = json.loads(answer.removeprefix(head).split("\n\n")[0].removeprefix("data: "))
    assert last["slo"] == REPORT
    assert last["service_tier"] == "default"
    assert last["choices"] == [choice("é", "stop", stop_reason)]


def test_report_of_a_chat_stream_and_of_each_choice() -> None:
    missed = {**REPORT, "promised": False}
    chunks = [chat({"content": "a"}, "length", packed(one)) for one in (REPORT, missed)]
    body = {"slo": {"ttft_ms": 1}, "service_tier": "priority"}
    answer = streaming(ROLE, *chunks, DONE).post(ROUTES[1], json=body).text
    events = [json.loads(line[6:]) for line in answer.split("\n\n") if line.startswith("data: {")]
    assert [event.get("slo") for event in events] == [None, REPORT, missed]
    assert [event.get("service_tier") for event in events] == [None, "priority", "flex"]
    assert "slo_report" not in answer


CARRIED = {"kv_transfer_params": {"vllm_slo": REPORT}}


@pytest.mark.parametrize("connector", [{}, {"remote_host": "a"}])
def test_report_of_a_stream_that_carries_kv_transfer_params(connector: dict[str, str]) -> None:
    """As vLLM streams them with patches/0001; a stop string has taken the packed report's place."""
    ended = {"choices": [choice("a", "stop", "str")]}
    said = {"kv_transfer_params": {**connector, **CARRIED["kv_transfer_params"]}}
    answer = streaming(event({**ended, **said}), DONE).post(json={"slo": {"ttft_ms": 1}}).text
    last = json.loads(answer.split("\n\n")[0].removeprefix("data: "))
    left = {"kv_transfer_params": connector} if connector else {}
    assert last == {**ended, **left, "slo": REPORT, "service_tier": "default"}


def test_the_report_of_the_choice_comes_before_the_one_of_the_request() -> None:
    missed = {**REPORT, "promised": False}
    chunk = event({"choices": [choice("a", "stop", packed(missed, 7))], **CARRIED})
    answer = streaming(chunk, DONE).post(json={"slo": {"ttft_ms": 1}}).text
    last = json.loads(answer.split("\n\n")[0].removeprefix("data: "))
    assert (last["slo"], last["choices"][0]["stop_reason"]) == (missed, 7)
    assert "kv_transfer_params" not in last


def test_a_stream_with_a_tier_and_no_slo() -> None:
    tail = completion(choice("a", "stop", packed(None)))
    answer = streaming(tail, DONE).post(json={"service_tier": "default", "stream": True}).text
    last = json.loads(answer.split("\n\n")[0].removeprefix("data: "))
    assert last["service_tier"] == "default"
    assert "slo" not in last
    assert last["choices"][0]["stop_reason"] is None


@pytest.mark.parametrize("stop", ["slo_report:", "slo_report:5", "slo_report:" + "[" * 9000])
def test_a_stop_string_that_looks_like_a_report_passes(stop: str) -> None:
    chunks = (completion(choice("a", "stop", stop)), DONE)
    assert streaming(*chunks).post(json={"slo": {"ttft_ms": 1}}).text == "".join(chunks)


def test_a_packed_stop_reason_is_restored_in_whole_answers_too() -> None:
    answer = {"choices": [choice("a", "stop", packed(stop_reason=3))]}
    given = {**answer, "kv_transfer_params": {"vllm_slo": REPORT}}
    seen = Server(lambda _: given).post(json={"slo": {"ttft_ms": 1}, "stream": "no"}).json()
    assert seen["choices"][0]["stop_reason"] == 3
    assert seen["slo"] == REPORT


def test_the_first_token_is_not_held() -> None:
    async def run() -> list[bytes]:
        sent: list[bytes] = []
        at_token: list[bytes] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            start = {"type": "http.response.start", "status": 200}
            await send({**start, "headers": [(b"content-type", b"text/event-stream")]})
            for chunk in (ROLE, chat({"content": "a"})):
                body = {"type": "http.response.body", "body": chunk.encode(), "more_body": True}
                await send(body)
            at_token.extend(sent)
            await send({"type": "http.response.body", "body": DONE.encode()})

        async def receive() -> Message:
            body = json.dumps(DECLINE).encode()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message.get("body", b"start"))

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": ROUTES[1], "headers": headers}
        await SLOMiddleware(app)(scope, receive, send)
        return at_token

    assert asyncio.run(run()) == [b"start", ROLE.encode(), chat({"content": "a"}).encode()]


def test_holding_is_bounded() -> None:
    gate = StreamGate()
    verdicts = [gate.feed(USAGE.encode(), True) for _ in range(40)]
    assert verdicts[0] is True
    assert verdicts[-1] is False
    assert StreamGate().feed(b"x" * 70_000, True) is False
    assert StreamGate().feed(DONE.encode(), True) == Declined(1000)


# --- fuzz ----------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


@given(values | st.dictionaries(st.sampled_from(["choices", "kv_transfer_params"]), values))
@settings(max_examples=examples(300))
def test_fuzz_responses(response: Any) -> None:
    asked = Asked(SLO(ttft_ms=1, on_unattainable="decline"), None)
    body = json.dumps(response).encode()
    assert isinstance(rewrite_json(body, asked), bytes | Declined)
    assert StreamGate().feed(b"data: " + body + b"\n\n", True) is not None
