# SPDX-License-Identifier: Apache-2.0
"""How a server takes requests from the front of several replicas.

A server that knows the front's token (`TOKEN_VARIABLE`) serves the front beside its own clients, or
the front alone (`PRIVATE_VARIABLE`). What the front adds to a request comes in headers, which count
only together with the token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.engine.compat.api_server import engine_is_dead, server_is_stopping
from vllm_slo.engine.http.forwarded_answer import ForwardedAnswer
from vllm_slo.engine.http.state_feed import Server, StateFeed
from vllm_slo.engine.telemetry.state import SOCKET_VARIABLE
from vllm_slo.slo.carriers import FORWARDED, Forwarded
from vllm_slo.slo.model import OnUnattainable
from vllm_slo.wire.front_protocol import (
    AGE_HEADER,
    DRAIN_PATH,
    OWN_PREFIX,
    PRIVATE_VARIABLE,
    STATE_PATH,
    TICKET_HEADER,
    TOKEN_HEADER,
    UNATTAINABLE_HEADER,
    token_in,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("vllm_slo.http")

LOOK_S: Final = 0.1
"""How often a drain looks whether requests still run."""
GOODBYE_S: Final = 0.3
"""Shortest drain, so that the front learns of it before the port closes."""
_OURS: Final = OWN_PREFIX.encode()
_TOKEN: Final = TOKEN_HEADER.encode()
_WISHES: Final[Mapping[bytes, OnUnattainable | None]] = {
    b"": None,
    b"best_effort": "best_effort",
    b"decline": "decline",
}


class FrontAccess:
    """Tells the front's requests from those of clients, and serves the front's private paths.

    Args:
        token: shared with the front.
        only: whether requests without the token are refused.
        feed: of the scheduler's state; it also tells what became of the front's requests.

    Attributes:
        running: requests in progress, without streams of the state.
    """

    def __init__(self, token: str, *, only: bool, feed: StateFeed) -> None:
        self.running = 0
        self._token = token.encode()
        self._only = only
        self._feed = feed

    @classmethod
    def from_environment(cls) -> FrontAccess | None:
        """The access that the environment asks for; None: this server has no front.

        Raises:
            ConfigError: the token cannot be used.
        """
        token = token_in(os.environ)
        if token is None:
            return None
        only = os.environ.get(PRIVATE_VARIABLE) == "1"
        return cls(token, only=only, feed=StateFeed(os.environ.get(SOCKET_VARIABLE)))

    async def __call__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or pass it to ``app``."""
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        ours = {name: value for name, value in scope["headers"] if name.startswith(_OURS)}
        others = [(name, value) for name, value in scope["headers"] if not name.startswith(_OURS)]
        inner = {**scope, "headers": others}
        if not self._is_front(scope):
            if self._only or (
                scope["type"] == "http" and scope["path"] in (STATE_PATH, DRAIN_PATH)
            ):
                await _refuse(scope, send, 401, "this is only for the front")
            else:
                await self._run(app, inner, receive, send)
            return
        if scope["type"] == "http" and scope["path"] == STATE_PATH:
            dead = partial(engine_is_dead, scope.get("app"))
            stopping = partial(server_is_stopping, scope.get("app"))
            await self._feed.stream(receive, send, Server(dead, stopping))
            return
        if scope["type"] == "http" and scope["path"] == DRAIN_PATH:
            await self._drain(scope, send)
            return
        ours.pop(_TOKEN)
        try:
            forwarded = _forwarded(ours)
        except (ValueError, KeyError) as error:
            await _refuse(scope, send, 400, f"a header of the front is broken: {error}")
            return
        if forwarded is not None:
            inner[FORWARDED] = forwarded
        if forwarded is None or not forwarded["ticket"] or scope["type"] != "http":
            await self._run(app, inner, receive, send)
            return
        host, port = scope.get("server") or ("", None)
        address = f"{host}:{port}"
        answer = ForwardedAnswer(scope["path"], forwarded, self._feed, receive, send, address)
        try:
            await self._run(app, inner, answer.receive, answer.send)
        finally:
            answer.close()

    def _is_front(self, scope: Scope) -> bool:
        tokens = [value for name, value in scope["headers"] if name == _TOKEN]
        return len(tokens) == 1 and secrets.compare_digest(tokens[0], self._token)

    async def _run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self.running += 1
        try:
            await app(scope, receive, send)
        finally:
            self.running -= 1

    async def _drain(self, scope: Scope, send: Send) -> None:
        """Tell the front to send nothing new, and wait until nothing runs, as long as it says."""
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        try:
            seconds = float(query.get("seconds", ["30"])[0])
            if not 0.0 <= seconds < math.inf:
                raise ValueError
        except ValueError:
            await _refuse(scope, send, 400, "seconds: not a number of seconds, 0 or more")
            return
        self._feed.drain()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + max(seconds, GOODBYE_S)
        await asyncio.sleep(GOODBYE_S)
        while self.running and loop.time() < end_s:
            await asyncio.sleep(LOOK_S)
        await _answer(send, 200, {"running": self.running})


def _forwarded(headers: Mapping[bytes, bytes]) -> Forwarded | None:
    """The content of the front's headers; None if there are none.

    Raises:
        ValueError, KeyError: a header has no value that the front writes.
    """
    known = {AGE_HEADER.encode(), TICKET_HEADER.encode(), UNATTAINABLE_HEADER.encode()}
    given = {name: value for name, value in headers.items() if name in known}
    if not given:
        return None
    age_ms = float(given.get(AGE_HEADER.encode(), b"0"))
    if not (math.isfinite(age_ms) and age_ms >= 0.0):
        raise ValueError(f"age {age_ms} ms")
    mark = given.get(TICKET_HEADER.encode())
    ticket = "" if mark is None else str(Ticket.parse(mark.decode("latin-1")))
    wish = _WISHES[given.get(UNATTAINABLE_HEADER.encode(), b"")]
    return Forwarded(age_ms=age_ms, ticket=ticket, on_unattainable=wish)


async def _refuse(scope: Scope, send: Send, status: int, text: str) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    kind = "AuthenticationError" if status == 401 else "BadRequestError"
    error = {"message": text, "type": kind, "param": None, "code": status}
    await _answer(send, status, {"error": error})


async def _answer(send: Send, status: int, content: object) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})
