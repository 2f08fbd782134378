# SPDX-License-Identifier: Apache-2.0
"""How a server takes requests from a front: its access, its answers and its state stream."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from patience import patience

pytest.importorskip("vllm")
pytest.importorskip("httpx")

import httpx

from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_pace import BURST, EARNED_S
from vllm_slo.core.routing.state_stream import StateDecoder, StateLine
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand
from vllm_slo.engine.http import state_feed
from vllm_slo.engine.http.forwarded_answer import ForwardedAnswer
from vllm_slo.engine.http.front_access import FrontAccess
from vllm_slo.engine.http.state_feed import StateFeed
from vllm_slo.engine.telemetry.state import StatePublisher
from vllm_slo.slo.carriers import FORWARDED, Forwarded
from vllm_slo.wire.front_protocol import STATE_PATH, TRY_NEXT

MODEL = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), max_tokens=8192)

# --- access -------------------------------------------------------------------------------------


class App:
    """What is behind the guard: remembers scopes, answers at once."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"served"})


def ask(
    headers: list[tuple[str, str]],
    path: str = "/v1/models",
    *,
    only: bool = True,
    app: App | None = None,
) -> tuple[Any, App]:
    app = app or App()
    access = FrontAccess("secret", only=only, feed=StateFeed())

    async def run() -> Any:
        transport = httpx.ASGITransport(partial(access, app))
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            return await client.get(path, headers=headers)

    answer = asyncio.run(run())
    assert access.running == 0
    return answer, app


TOKEN = ("x-vllm-slo-token", "secret")


@pytest.mark.parametrize("path", ["/", "/v1/models", "/health", "/metrics", STATE_PATH])
@pytest.mark.parametrize(
    "headers",
    [[], [("x-vllm-slo-token", "secre")], [("x-vllm-slo-token", "sécret")], [TOKEN, TOKEN]],
)
def test_nobody_passes_without_the_token(path: str, headers: list[tuple[str, str]]) -> None:
    encoded: Any = [(name, value.encode()) for name, value in headers]
    answer, app = ask(encoded, path)
    assert answer.status_code == 401
    assert list(answer.json()["error"]) == ["message", "type", "param", "code"]
    assert app.scopes == []


def test_websockets_are_guarded_too() -> None:
    async def run() -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": "/", "headers": []}
        nothing: Any = None
        await FrontAccess("secret", only=True, feed=StateFeed())(App(), scope, nothing, send)
        return sent

    assert asyncio.run(run()) == [{"type": "websocket.close", "code": 1008}]


def test_what_the_front_says_is_in_the_scope_and_not_in_the_headers() -> None:
    said = [
        TOKEN,
        ("x-vllm-slo-age-ms", "12.5"),
        ("x-vllm-slo-ticket", "7"),
        ("x-vllm-slo-unattainable", "decline"),
        ("x-vllm-slo-later", "x"),
    ]
    answer, app = ask([*said, ("x-slo-class", "chat")])
    assert answer.text == "served"
    assert app.scopes[0][FORWARDED] == {"age_ms": 12.5, "ticket": "7", "on_unattainable": "decline"}
    names = [name for name, _ in app.scopes[0]["headers"]]
    assert b"x-slo-class" in names
    assert not any(name.startswith(b"x-vllm-slo-") for name in names)


def test_without_its_headers_there_is_no_front() -> None:
    _, app = ask([TOKEN])
    assert FORWARDED not in app.scopes[0]
    _, app = ask([TOKEN, ("x-vllm-slo-ticket", "7"), ("x-vllm-slo-unattainable", "best_effort")])
    assert app.scopes[0][FORWARDED] == {
        "age_ms": 0.0,
        "ticket": "7",
        "on_unattainable": "best_effort",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [("age-ms", "-1"), ("age-ms", "nan"), ("age-ms", "inf"), ("age-ms", "x"), ("ticket", "-1"),
     ("ticket", "1.5"), ("ticket", "9" * 30), ("ticket", "0"), ("ticket", "A:1"), ("ticket", "")],
)  # fmt: skip
def test_a_broken_header_of_the_front_is_400(name: str, value: str) -> None:
    answer, app = ask([TOKEN, (f"x-vllm-slo-{name}", value)])
    assert answer.status_code == 400
    assert app.scopes == []


def test_the_lifespan_is_the_apps() -> None:
    seen: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    nothing: Any = None
    access = FrontAccess("secret", only=True, feed=StateFeed())
    asyncio.run(access(inner, {"type": "lifespan"}, nothing, nothing))
    assert seen == [{"type": "lifespan"}]


# --- the feed ------------------------------------------------------------------------------------


MANY = ReplicaState(
    MODEL,
    committed=tuple(Demand(f"p{n}", 9.0 + n, 50, 0.1, 3) for n in range(50)),
    tickets={"": frozenset(range(1, 51))},
)


def test_a_feed_says_what_came_what_changed_and_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        feed, decoder = StateFeed(str(tmp_path / "state")), StateDecoder()
        feed.listen()
        publisher = StatePublisher(str(tmp_path / "state"))
        lines = feed.lines()
        first = decoder.read(await anext(lines))
        assert first == StateLine(None, True, 0.0, False, False, None, live=[])
        begun = time.monotonic()
        assert decoder.read(await anext(lines)) == first._replace(is_new=False, live=None)
        assert time.monotonic() - begun > 0.2

        monkeypatch.setattr(
            state_feed, "HEARTBEAT_S", 3_600.0
        )  # what follows does not wait for one
        one = replace(MANY, running=3)
        publisher.publish(one)
        whole = await anext(lines)
        line = decoder.read(whole)
        assert line.state is not None and line.state.running == 3
        assert len(line.state.committed) == 50
        assert 0 <= line.age_s < patience(10)

        # Of many only the newest is told, and of it only what changed.
        for running in range(4, 9):
            publisher.publish(replace(one, running=running))
        await asyncio.sleep(0.05)
        text = await anext(lines)
        line = decoder.read(text)
        assert line.state is not None and line.state.running == 8
        assert len(text) < 100 < len(whole)
        feed.drain()
        assert decoder.read(await anext(lines)).draining
        publisher.close()
        feed.close()

    asyncio.run(asyncio.wait_for(run(), patience(60)))


def test_every_stream_begins_whole_and_has_its_own_lines() -> None:
    async def run() -> None:
        feed = StateFeed()
        readers = [(feed.lines(), StateDecoder()) for _ in range(2)]
        for number, (lines, decoder) in enumerate(readers):
            feed.take(replace(MANY, running=number), time.monotonic())
            assert decoder.read(await anext(lines)).state == replace(
                MANY, running=number, committed=named(MANY.committed)
            )
        feed.take(replace(MANY, running=5), time.monotonic())
        told = [decoder.read(await anext(lines)) for lines, decoder in readers]
        assert [line.state.running for line in told if line.state is not None] == [5, 5]
        with pytest.raises(ValueError, match="does not follow"):
            readers[0][1].read(await anext(readers[1][0]))

    asyncio.run(asyncio.wait_for(run(), patience(60)))


def named(committed: tuple[Demand, ...]) -> tuple[Demand, ...]:
    """Promises with the keys that a new stream gives them."""
    return tuple(replace(d, request_id=str(n + 1)) for n, d in enumerate(committed))


def test_a_stalled_stream_gets_the_live_requests_in_place_of_many_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_feed, "MAX_EVENTS", 3)

    async def run() -> None:
        feed, decoder = StateFeed(), StateDecoder()
        lines = feed.lines()
        assert decoder.read(await anext(lines)).live == []
        for number in range(1, 6):
            feed.came(f"f:{number}")
        feed.ended("f:1", 0, client_left=False)
        line = decoder.read(await anext(lines))
        assert line.live == ["f:2", "f:3", "f:4", "f:5"]
        assert len(line.events) <= 3
        feed.ended("f:2", 0, client_left=False)
        after = decoder.read(await anext(lines))
        assert (after.live, after.events) == (None, [["ended", "f:2", 0, False]])

    asyncio.run(asyncio.wait_for(run(), patience(60)))


def test_states_do_not_crowd_and_a_drain_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_feed, "HEARTBEAT_S", 3_600.0)

    async def run() -> None:
        feed = StateFeed()
        lines, begun_s, told = feed.lines(), time.monotonic(), 0
        while told < 12:
            feed.take(replace(MANY, running=told), time.monotonic())
            await anext(lines)
            told += 1
        # The first is no wait, some that were saved up follow at once, and then they are earned.
        assert time.monotonic() - begun_s > (12 - 1 - BURST) * EARNED_S
        asked = asyncio.ensure_future(anext(lines))
        feed.take(replace(MANY, running=99), time.monotonic())
        await asyncio.sleep(0)
        begun_s = time.monotonic()
        feed.drain()
        assert b'"draining":true' in await asked
        assert time.monotonic() - begun_s < EARNED_S / 2

    asyncio.run(asyncio.wait_for(run(), patience(60)))


def test_a_feed_survives_nonsense(tmp_path: Path) -> None:
    async def run() -> None:
        feed = StateFeed(str(tmp_path / "state"))
        feed.listen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(b"nonsense", str(tmp_path / "state"))
            stranger.sendto(b"1.0\nnonsense", str(tmp_path / "state"))
        await asyncio.sleep(0.05)
        assert StateDecoder().read(await anext(feed.lines())).state is None
        feed.close()

    asyncio.run(run())


def test_a_server_with_clients_of_its_own_takes_nothing_of_the_fronts_from_them() -> None:
    forged = [("x-vllm-slo-ticket", "7"), ("x-vllm-slo-token", "wrong"), ("x-kept", "1")]
    answer, app = ask(forged, only=False)
    assert answer.text == "served"
    assert FORWARDED not in app.scopes[0]
    names = [name for name, _ in app.scopes[0]["headers"]]
    assert b"x-kept" in names
    assert not any(name.startswith(b"x-vllm-slo-") for name in names)
    assert ask([], STATE_PATH, only=False)[0].status_code == 401


# --- answers -------------------------------------------------------------------------------------


def out_of(
    messages: Sequence[dict[str, Any]],
    path: str = "/v1/completions",
    wish: Any = None,
) -> tuple[list[dict[str, Any]], list[Any]]:
    """What leaves a server of an answer, and what its feed tells of it."""

    async def run() -> tuple[list[dict[str, Any]], list[Any]]:
        feed, sent, nothing = StateFeed(), [], None
        lines, decoder = feed.lines(), StateDecoder()
        decoder.read(await anext(lines))

        async def send(message: Any) -> None:
            sent.append(message)

        given = Forwarded(age_ms=1.0, ticket="f:1", on_unattainable=wish)
        receive: Any = nothing
        answer = ForwardedAnswer(path, given, feed, receive, send, "10.0.0.1:8000")
        for message in messages:
            await answer.send(message)
        answer.close()
        feed.wake()
        return sent, list(decoder.read(await anext(lines)).events)

    return asyncio.run(run())


def start(status: int = 200, **headers: str) -> dict[str, Any]:
    pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


STREAM = start(content_type="text/event-stream; charset=utf-8")
TOKEN_EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
CREATED = b'event: x\ndata: {"type": "response.created"}\n\n'
DEAD = b'data: {"error": {"message": "it is dead", "type": "InternalServerError", "code": 500}}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "total_tokens": 9}}\n\n'


def test_a_stream_leaves_once_the_model_has_produced_something() -> None:
    held, told = out_of([STREAM, body(b": alive\n\n", more=True), body(CREATED, more=True)])
    assert held == []
    assert told == [["came", "f:1"], ["ended", "f:1", 0, False]]
    parts = [STREAM, body(CREATED, more=True), body(TOKEN_EVENT, more=True), body(USAGE)]
    sent, told = out_of(parts)
    assert sent == parts
    assert told == [["came", "f:1"], ["began", "f:1"], ["ended", "f:1", 7, False]]


def test_a_stream_that_begins_with_an_error_is_an_answer_with_its_status() -> None:
    for first in ([], [body(CREATED, more=True)]):
        sent, told = out_of([STREAM, *first, body(DEAD, more=True), body(b"data: [DONE]\n\n")])
        assert [message["type"] for message in sent] == [
            *("http.response.start", "http.response.body")
        ]
        assert sent[0]["status"] == 500
        assert json.loads(sent[1]["body"])["error"]["message"] == "it is dead"
        assert told == [["came", "f:1"], ["ended", "f:1", 0, False]]
    anthropic, _ = out_of([STREAM, body(DEAD)], "/v1/messages")
    assert list(json.loads(anthropic[1]["body"])) == ["type", "error"]


def test_an_error_of_the_client_stands() -> None:
    wrong = DEAD.replace(b"500", b"400")
    sent, told = out_of([STREAM, body(wrong, more=True), body(b"")])
    assert sent[0]["status"] == 200
    assert ["began", "f:1"] in told
    for status, events in ((400, ["came", "began", "ended"]), (503, ["came", "ended"])):
        sent, told = out_of([start(status), body(b"{}")])
        assert sent[0]["status"] == status
        assert [event[0] for event in told] == events


def test_a_refusal_moves_on_only_where_the_front_wants_it() -> None:
    declined = start(429, x_vllm_slo_declined="900", x_slo_reason="prefill")
    sent, told = out_of([declined, body(b"{}")], wish="decline")
    assert sent[0]["status"] == TRY_NEXT
    assert ["refused", "f:1", 900, "prefill"] in told
    sent, told = out_of([declined, body(b"{}")])
    assert sent[0]["status"] == 429
    assert ["declined", "f:1"] in told


def test_the_address_of_the_server_is_not_told() -> None:
    link = start(link="<HTTP://10.0.0.1:8000/v1/next>", x_kept="10.0.0.1")
    sent, _ = out_of([link, body(b"")])
    assert sent[0]["headers"] == [(b"x-kept", b"10.0.0.1")]
