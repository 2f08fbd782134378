# SPDX-License-Identifier: Apache-2.0
"""The HTTP middleware and the gate, response side: report, service tier, decline, first token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from depth import examples
from http_app import (
    CHAT,
    COMPLETIONS,
    CONFIG,
    DECLINED,
    DECLINING,
    FORM,
    MESSAGES,
    OTHER,
    REPORT,
    RESPONSES,
    ROUTES,
    Call,
    Script,
    Server,
    behind_a_front,
    choice,
    ending,
    events_of,
    output,
    refused,
    refused_in_any_shape,
    reported,
    saying,
    sse,
    talk,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import patience
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from vllm.sampling_params import SamplingParams

from vllm_slo.engine import gate
from vllm_slo.engine.http import response as http_response
from vllm_slo.engine.http.middleware import SLOMiddleware
from vllm_slo.engine.http.outcome import Asked, rewrite_event, rewrite_json, served_service_tier
from vllm_slo.slo.model import SLO
from vllm_slo.slo.verdicts import Declined, Invalid, pack_report, unpack

ASKING = {"prompt": "x", "slo": {"ttft_ms": 500}}
DECLINE = {"prompt": "x", "slo": {"ttft_ms": 1, "on_unattainable": "decline"}}
SERVED = saying(output(choice("a", "stop"), carried=reported()))
MISSED = {**REPORT, "promised": False}
ENDS = ("response.completed", "message_delta")
"""Events that end a choice, of APIs that name their events."""


def reports_in(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the events of a stream, or the responses in them, say of the SLO and the tier."""
    inner = [event.get("response", event) for event in events]
    return [{k: one[k] for k in ("slo", "service_tier") if k in one} for one in inner]


# --- report and service tier ---------------------------------------------------------------------


@pytest.mark.parametrize("path", [*ROUTES, OTHER])
def test_the_report_becomes_slo(path: str) -> None:
    server = Server(SERVED)
    response = server.post(path, json=ASKING)
    assert response.json() == {**Server().post(path, json={}).json(), "slo": REPORT}
    assert response.headers["content-length"] == str(len(response.content))


@pytest.mark.parametrize("path", [*ROUTES, OTHER])
@pytest.mark.parametrize("asked", [ASKING, DECLINE])
def test_the_report_stands_in_the_event_that_ends_a_stream(
    path: str, asked: dict[str, Any]
) -> None:
    script = saying(
        output(choice("say finish_reason")), output(choice("é", "stop"), carried=reported())
    )
    plain = Server(script).post(path, json={"stream": True}).text
    told = Server(script).post(path, json={**asked, "stream": True})
    assert told.headers["content-type"].startswith("text/event-stream")
    said = reports_in(events_of(told.text))
    assert sum("slo" in one for one in said) == 1
    ended = next(i for i, one in enumerate(said) if "slo" in one)
    before, after = events_of(plain), events_of(told.text)
    target = after[ended].get("response", after[ended])
    assert target.pop("slo") == REPORT
    assert after == before
    kind = after[ended].get("type")
    assert kind in ENDS if path in (RESPONSES, MESSAGES) else kind is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*ROUTES, OTHER])
@pytest.mark.parametrize(
    ("tier", "report", "served"),
    [("priority", REPORT, "priority"), ("flex", MISSED, "flex"), ("gold", REPORT, "default")],
)
def test_the_tier_served_is_told_where_one_was_named(
    path: str, stream: bool, tier: str, report: dict[str, Any], served: str
) -> None:
    server = Server(saying(output(choice("a", "stop"), carried=reported(report))))
    body = {**ASKING, "stream": stream, "service_tier": tier}
    said = server.post(path, json=body)
    told = reports_in(events_of(said.text) if stream else [said.json()])
    assert [one for one in told if "slo" in one] == [{"slo": report, "service_tier": served}]
    unnamed = server.post(path, json={**ASKING, "stream": stream}).text
    # vLLM's own field of a response is left as it is.
    assert unnamed.count("service_tier") == (path == RESPONSES)


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_tier_without_an_slo_is_told_and_nothing_else(stream: bool) -> None:
    body = {"prompt": "x", "service_tier": "auto", "stream": stream}
    said = Server().post(json=body)
    told = reports_in(events_of(said.text) if stream else [said.json()])
    assert told == [{"service_tier": "default"}]


@pytest.mark.parametrize(
    "said", [{"age_ms": 1.0, "ticket": "1", "on_unattainable": w} for w in (None, "decline")]
)
def test_the_tier_served_is_told_behind_a_front_too(said: dict[str, Any]) -> None:
    for report, tier in ((REPORT, "priority"), (MISSED, "flex")):
        script = saying(output(choice("a", "stop"), carried=reported(report)))
        server = behind_a_front(Server(script), said)
        answer = server.post(json={"prompt": "x", "service_tier": "priority"}).json()
        assert (answer["slo"], answer["service_tier"]) == (report, tier)


def test_what_else_vllm_carries_stays() -> None:
    script = saying(output(choice("a", "stop"), carried=reported(peer="b")))
    answer = Server(script).post(json=ASKING).json()
    assert answer["kv_transfer_params"] == {"peer": "b"}
    nothing = Server(SERVED).post(json=ASKING).json()
    assert nothing["kv_transfer_params"] is None


def test_the_default_class_is_told_of_as_well() -> None:
    server = Server(SERVED, config={**CONFIG, "default_class": "chat"})
    assert server.post(json={"prompt": "x"}).json()["slo"] == REPORT


@pytest.mark.parametrize("stream", [False, True])
def test_a_plain_request_is_answered_byte_for_byte(stream: bool) -> None:
    body = {"prompt": "x", "stream": stream}
    script = saying(output(choice("a", "stop"), carried={"peer": "b"}))
    assert (
        Server(script).post(json=body).content
        == Server(script, scheduler=None).post(json=ASKING | body).content
    )


def test_another_scheduler_says_nothing_of_an_slo() -> None:
    answer = Server(scheduler=None).post(json=ASKING).json()
    assert "slo" not in answer


# --- several choices and prompts -----------------------------------------------------------------


def each(*stops: Any) -> Script:
    """An engine of which every choice ends with a report of its own, packed by the scheduler."""

    async def script(call: Call) -> AsyncIterator[Any]:
        for index in range(call.params.n):
            yield output(choice("a", index=index))
        for index in reversed(range(call.params.n)):
            report = {**REPORT, "ttft_ms": float(len(call.prompt) * 10 + index)}
            stop = pack_report(report, stops[index % len(stops)])
            # vLLM keeps these of the choice that ends last.
            yield output(choice("b", "stop", stop, index), carried=reported(report))

    return script


def test_every_choice_of_a_stream_has_its_own_report() -> None:
    body = {"prompt": ["x", "yy"], "n": 2, "slo": {"ttft_ms": 5}, "stream": True}
    for path in (COMPLETIONS, CHAT):
        server = Server(each(None, 17))
        told = events_of(server.post(path, json=body).text)
        ended = {
            event["choices"][0]["index"]: (
                event["slo"]["ttft_ms"],
                event["choices"][0]["stop_reason"],
            )
            for event in told
            if "slo" in event
        }
        assert ended == {0: (10.0, None), 1: (11.0, 17), 2: (20.0, None), 3: (21.0, 17)}
        assert "slo_report" not in json.dumps(told)


def test_a_whole_response_has_the_report_of_its_first_choice() -> None:
    body = {"prompt": ["x", "yy"], "n": 2, "slo": {"ttft_ms": 5}}
    answer = Server(each("END", None)).post(json=body).json()
    assert answer["slo"]["ttft_ms"] == 10.0
    assert [one["stop_reason"] for one in answer["choices"]] == ["END", None] * 2


@pytest.mark.parametrize("stop", [None, 17, "repetition_detected", 'a "quoted" one'])
@pytest.mark.parametrize("stream", [False, True])
def test_a_packed_stop_reason_is_restored(stop: Any, stream: bool) -> None:
    script = saying(output(choice("a", "stop", pack_report(MISSED, stop)), carried=reported()))
    answer = Server(script).post(json={**ASKING, "stream": stream})
    (last,) = events_of(answer.text) if stream else [answer.json()]
    # The report of the choice comes before the one of the request.
    assert last["slo"] == MISSED
    assert last["choices"][0]["stop_reason"] == stop


@pytest.mark.parametrize("stop", ["slo_report:", "slo_report:5", "slo_report:" + "[" * 9000])
def test_a_stop_string_that_looks_like_a_report_passes(stop: str) -> None:
    answer = Server(ending("a", stop)).post(json=ASKING).json()
    assert answer["choices"][0]["stop_reason"] == stop


def with_app(server: Server, endpoint: Any) -> Server:
    """The server with another app behind the middleware."""
    app: Any = Starlette(routes=[Route(COMPLETIONS, endpoint, methods=["POST"])])
    app.add_middleware(SLOMiddleware)
    server.app = app
    return server


# --- errors --------------------------------------------------------------------------------------


def test_errors_of_vllm_pass() -> None:
    async def app(request: Request) -> JSONResponse:
        await request.body()
        return JSONResponse({"error": {"code": 404}}, 404)

    server = with_app(Server(), app)
    response = server.post(json={**DECLINE, "service_tier": "flex"})
    assert (response.status_code, response.json()) == (404, {"error": {"code": 404}})


@pytest.mark.parametrize("path", ROUTES)
def test_broken_configuration_is_a_clear_error(path: str) -> None:
    server = Server(config={"clases": {}})
    text = refused_in_any_shape(server.post(path, json=ASKING), path, 500)
    assert "configuration" in text and "clases" not in text
    assert server.engine.calls == []


def test_inner_http_middleware_sees_the_same() -> None:
    class Tag(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: Any) -> Any:
            response = await call_next(request)
            response.headers["x-tag"] = "1"
            return response

    for body, script in ((ASKING, SERVED), (DECLINE, DECLINING)):
        server = Server(script)
        server.app.user_middleware.append(Middleware(Tag))  # within ours
        response = server.post(json=body)
        if script is SERVED:
            assert response.json()["slo"] == REPORT
            assert response.headers["x-tag"] == "1"
        else:
            check_declined(response, COMPLETIONS)
        refused(server.post(json={"slo": {"ttft_ms": 0}}), "ttft_ms")
        assert len(server.engine.calls) == 1


# --- decline -------------------------------------------------------------------------------------


def check_declined(
    response: httpx.Response, path: str, seconds: str = "2", millis: str = "1500", status: int = 429
) -> None:
    text = refused_in_any_shape(response, path, status)
    assert f"retry after {millis} ms" in text and "(prefill)" in text
    if not path.endswith(MESSAGES):
        assert refused(response, "slo", status) == text
        assert response.json()["error"]["type"] == "slo_unattainable"
    assert response.headers["retry-after"] == seconds
    assert response.headers["retry-after-ms"] == millis
    assert response.headers["x-slo-reason"] == "prefill"
    assert response.headers["content-type"] == "application/json"
    assert response.headers["content-length"] == str(len(response.content))
    assert "x-vllm-slo-declined" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("several", [{}, {"n": 2}, {"prompt": ["x", "y", "z"]}])
@pytest.mark.parametrize("path", [*ROUTES, OTHER])
def test_a_declined_request_is_429_on_every_route(
    path: str, several: dict[str, Any], stream: bool
) -> None:
    server = Server(DECLINING)
    response = server.post(path, json={**DECLINE, **several, "stream": stream})
    check_declined(response, path)
    assert all(call.closed for call in server.engine.calls)


def test_a_declined_form_is_429() -> None:
    headers = {"x-llm-d-inference-ttl": "5s"}
    response = Server(DECLINING).post(FORM, files={"file": b"abc"}, headers=headers)
    check_declined(response, FORM)


@pytest.mark.parametrize(
    ("retry", "seconds", "millis"), [("1500", "2", "1500"), ("1", "1", "1"), ("0", "1", "1")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_schedulers_time_is_told(retry: str, seconds: str, millis: str, stream: bool) -> None:
    script = ending("", f"slo_declined:{retry}:prefill", finish="abort")
    response = Server(script).post(json={**DECLINE, "stream": stream})
    check_declined(response, COMPLETIONS, seconds, millis)


@pytest.mark.parametrize("status", [503, 529])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_the_status_is_the_operators(path: str, status: int) -> None:
    server = Server(DECLINING, config={**CONFIG, "decline_status": status})
    response = server.post(path, json=DECLINE)
    check_declined(response, path, status=status)
    if path == MESSAGES:
        assert response.json()["error"]["type"] == "overloaded_error"


def test_anthropic_calls_it_a_rate_limit() -> None:
    error = Server(DECLINING).post(MESSAGES, json=DECLINE).json()["error"]
    assert error["type"] == "rate_limit_error"


def test_the_default_class_declines_plain_requests() -> None:
    server = Server(DECLINING, config={**CONFIG, "default_class": "strict"})
    body = b'{"prompt" : "x"}'
    response = server.post(content=body, headers={"content-type": "application/json"})
    assert server.bodies == [body]
    check_declined(response, COMPLETIONS)


@pytest.mark.parametrize("stream", [False, True])
def test_a_hop_that_is_declined_tells_the_front(stream: bool) -> None:
    said = {"age_ms": 1.0, "ticket": "1", "on_unattainable": "decline"}
    response = behind_a_front(Server(DECLINING), said).post(json={**ASKING, "stream": stream})
    refused(response, "slo", 429)
    assert response.headers["x-vllm-slo-declined"] == "1500"


@pytest.mark.parametrize(
    "stop", [None, "slo_declined", "slo_declined:", "slo_declined:?:x", "slo_x:1"]
)
def test_other_ends_pass(stop: Any) -> None:
    answer = Server(ending("", stop, finish="abort")).post(json=DECLINE).json()
    assert answer["choices"][0]["stop_reason"] == stop
    spoken = Server(ending("a", DECLINED)).post(json=DECLINE).json()
    assert spoken["choices"][0]["stop_reason"] == DECLINED  # a stop string of the client's own


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*ROUTES, OTHER])
def test_what_the_scheduler_finds_wrong_is_400(path: str, stream: bool) -> None:
    script = ending("", Invalid("stages: 'x' is not valid: y").pack(), finish="abort")
    response = Server(script).post(path, json={**DECLINE, "stream": stream})
    assert refused_in_any_shape(response, path) == "stages: 'x' is not valid: y"
    if path != MESSAGES:
        refused(response, "stages")


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices_that_are_declined_at_once_answer_once(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the route ends at once, although its client stays."""
    monkeypatch.setattr(gate, "CANCEL_S", 3600.0)
    server, sent = Server(DECLINING), list[Any]()
    body = json.dumps({**DECLINE, "prompt": ["x"] * 9, "n": 3, "stream": stream}).encode()
    asyncio.run(asyncio.wait_for(talk(server.app, body, sent), patience(10)))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 429


def test_a_decline_after_the_first_token_ends_the_stream_in_the_words_of_its_route() -> None:
    """That cannot be for the choices of one request; but what is out is out."""

    async def script(call: Call) -> AsyncIterator[Any]:
        yield output(choice("a"))
        yield output(choice("", "abort", DECLINED))

    server = Server(script)
    response = server.post(json={**DECLINE, "stream": True})
    assert response.status_code == 200
    events = events_of(response.text)
    assert events[0]["choices"][0]["text"] == "a"
    assert (events[1]["error"]["code"], events[1]["error"]["type"]) == (429, "Too Many Requests")
    assert "retry after 1500 ms" in events[1]["error"]["message"]
    whole = server.post(json=DECLINE)
    check_declined(whole, COMPLETIONS)


def test_a_route_that_does_not_see_that_its_client_left_is_told_by_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "CANCEL_S", 0.01)
    server = Server(DECLINING)

    async def deaf(request: Request) -> JSONResponse:
        await request.body()
        said = [one async for one in server.engine.generate("x", SamplingParams(), "r")]
        return JSONResponse(len(said))

    with_app(server, deaf)
    check_declined(server.post(json=DECLINE), COMPLETIONS)
    assert server.engine.calls[0].closed


# --- what is held --------------------------------------------------------------------------------


def streamed(script: Script, path: str, body: dict[str, Any], *, upto: int) -> list[bytes]:
    """The first so many messages of a stream of which the rest does not come."""

    async def run() -> list[bytes]:
        sent: list[Any] = []
        server = Server(script)
        asked = talk(server.app, json.dumps({**body, "stream": True}).encode(), sent, path)
        task = asyncio.ensure_future(asked)
        while len(sent) < upto:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
        return [message.get("body", b"start") for message in sent]

    return asyncio.run(asyncio.wait_for(run(), patience(20)))


async def for_ever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("body", [ASKING, DECLINE])
def test_the_first_token_is_not_held(path: str, body: dict[str, Any]) -> None:
    async def script(call: Call) -> AsyncIterator[Any]:
        yield output(choice("token"))
        await for_ever()

    upto = 2 if path == COMPLETIONS else 3
    sent = streamed(script, path, body, upto=upto)
    assert sent[0] == b"start"
    assert b"token" in sent[-1]


@pytest.mark.parametrize(("body", "goes_out"), [(ASKING, True), (DECLINE, False)])
def test_what_comes_before_the_first_token_is_held_if_a_refusal_may_come(
    body: dict[str, Any], goes_out: bool
) -> None:
    async def script(call: Call) -> AsyncIterator[Any]:
        await for_ever()
        yield  # never reached; it makes this a generator

    sent = streamed(script, RESPONSES, body, upto=2 if goes_out else 0)
    created = sse({"type": "response.created", "response": {"id": "resp"}}).encode()
    assert sent == ([b"start", created] if goes_out else [])


def custom(events: Any, server: Server) -> Server:
    """The server with an app that streams what ``events`` yields."""

    async def app(request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(events(), media_type="text/event-stream")

    return with_app(server, app)


def test_a_comment_that_keeps_the_connection_alive_opens_a_held_stream() -> None:
    server = Server(DECLINING)

    async def events() -> AsyncIterator[str]:
        yield "event: ping\n\n"
        yield ": keep-alive\n\n"
        async for one in server.engine.generate("x", SamplingParams(), "r"):
            yield f"data: {one}\n\n"

    custom(events, server)
    # From there on a refusal is an error of the route.
    with pytest.raises(Exception, match="retry after 1500 ms"):
        server.post(json=DECLINE)

    async def calm() -> AsyncIterator[str]:
        yield ": keep-alive\n\n"
        yield "data: [DONE]\n\n"

    response = custom(calm, server).post(json=DECLINE)
    assert (response.status_code, response.text) == (200, ": keep-alive\n\ndata: [DONE]\n\n")


def test_a_held_stream_that_ends_without_output_goes_out() -> None:
    async def events() -> AsyncIterator[str]:
        yield "data: {}\n\n"
        yield "data: [DONE]\n\n"

    response = custom(events, Server()).post(json=DECLINE)
    assert (response.status_code, response.text) == (200, "data: {}\n\ndata: [DONE]\n\n")


def test_a_response_too_long_to_be_held_goes_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "slo" in Server(SERVED).post(json=ASKING).json()
    monkeypatch.setattr(http_response, "MAX_HELD_BYTES", 10)

    async def parts() -> AsyncIterator[bytes]:
        yield b'{"text": "'
        yield b"x" * 90
        yield b'"}'

    async def app(request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(parts(), media_type="application/json")

    server = with_app(Server(), app)
    assert server.post(json={**ASKING, "service_tier": "flex"}).json() == {"text": "x" * 90}


# --- in the background ---------------------------------------------------------------------------

BACKGROUND = {**DECLINE, "background": True}


def in_background(script: Script, path: str = RESPONSES) -> tuple[Server, dict[str, Any]]:
    """Ask for a response in the background, and wait until it has come or failed."""
    server = Server(script)

    async def ask(client: httpx.AsyncClient) -> dict[str, Any]:
        response = await client.post(path, json=BACKGROUND)
        assert response.status_code == 200, response.text
        await asyncio.wait(server.tasks)
        return dict(response.json())

    return server, server.run(ask)


def after_a_while(*outputs: Any) -> Script:
    async def script(call: Call) -> AsyncIterator[Any]:
        await asyncio.sleep(0.02)
        for one in outputs:
            yield one

    return script


def test_a_declined_response_in_the_background_has_failed() -> None:
    script = after_a_while(output(choice("", "abort", DECLINED)))
    server, answer = in_background(script)
    assert server.store[answer["id"]].status == "failed"
    assert server.tasks[0].cancelled()
    assert server.engine.calls[0].closed


def test_one_that_has_ended_is_left_alone() -> None:
    server = Server(after_a_while(output(choice("", "abort", DECLINED))))

    async def ask(client: httpx.AsyncClient) -> None:
        await client.post(RESPONSES, json=BACKGROUND)
        (stored,) = server.store.values()
        stored.status = "cancelled"
        await asyncio.wait(server.tasks)
        assert stored.status == "cancelled"
        assert "retry after" in str(server.tasks[0].exception())

    server.run(ask)


def test_others_in_the_background_are_completed() -> None:
    server, answer = in_background(after_a_while(output(choice("a", "stop"), carried=reported())))
    assert answer["status"] == "queued"
    assert server.store[answer["id"]].status == "completed"


# --- verdicts ------------------------------------------------------------------------------------

reasons = st.sampled_from(["prefill", "seats", "quota"]) | st.text(max_size=9)


@given(st.builds(Declined, st.integers(1, 10**12), reasons) | st.builds(Invalid, st.text()))
def test_verdicts_come_back(verdict: Declined | Invalid) -> None:
    assert unpack(verdict.pack()) == verdict


@given(st.none() | st.integers() | st.text() | st.text().map(lambda tail: "slo_declined:" + tail))
def test_any_stop_reason_is_read(stop: Any) -> None:
    verdict = unpack(stop)
    assert verdict is None or isinstance(stop, str)


# --- fuzz ----------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
shaped = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.lists(
            st.fixed_dictionaries({}, optional={"index": values, "finish_reason": values}) | values,
            max_size=3,
        ),
        "type": st.sampled_from(["message_delta", "response.completed", "response.failed"])
        | values,
        "response": values,
        "slo": values,
    },
)


@pytest.mark.slow
@given(values | shaped, st.booleans())
@settings(max_examples=examples(500))
def test_fuzz_responses(response: Any, escaped: bool) -> None:
    asked = Asked(SLO(ttft_ms=1, on_unattainable="decline"), "flex")
    body = json.dumps(response, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    told = rewrite_json(body, asked, REPORT)
    if isinstance(response, dict):
        assert json.loads(told)["slo"] == REPORT
    else:
        assert told == body
    event = b"event: x\ndata: " + body + b"\n\ndata: [DONE]\n\n"
    changed = rewrite_event(event, asked, {0: REPORT})
    assert changed.startswith(b"event: x\ndata: ") and changed.endswith(b"\n\ndata: [DONE]\n\n")
    assert rewrite_event(event[:-9], asked, {0: REPORT}) is not None
    assert rewrite_json(body, Asked(), None) is body
