# SPDX-License-Identifier: Apache-2.0
"""The outermost ASGI layer of a replica: only the front gets in."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.router.protocol import (
    AGE_HEADER,
    OWN_PREFIX,
    STATE_PATH,
    TICKET_HEADER,
    TOKEN_HEADER,
    UNATTAINABLE_HEADER,
)
from vllm_slo.router.state_feed import StateFeed
from vllm_slo.slo.carriers import FORWARDED, Forwarded
from vllm_slo.slo.model import OnUnattainable

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OURS: Final = OWN_PREFIX.encode()
_TOKEN: Final = TOKEN_HEADER.encode()
_WISHES: Final[Mapping[bytes, OnUnattainable | None]] = {
    b"": None,
    b"best_effort": "best_effort",
    b"decline": "decline",
}


class TokenGuard:
    """The outermost ASGI layer of a replica: it refuses requests without the token.

    It moves the content of the front's headers to `FORWARDED` in the scope. The front drops such
    headers of clients, so clients cannot set it.

    ``feed``: served under `STATE_PATH`.
    """

    def __init__(self, app: ASGIApp, token: str, feed: StateFeed) -> None:
        self._app = app
        self._token = token.encode()
        self._feed = feed
        self.running = 0
        """Requests in progress, without streams of the state."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        ours = [(n, v) for n, v in scope["headers"] if n.startswith(_OURS)]
        tokens = [value for name, value in ours if name == _TOKEN]
        if len(tokens) != 1 or not secrets.compare_digest(tokens[0], self._token):
            await _refuse(scope, send, 401, "this port is only for the front")
            return
        try:
            forwarded = _forwarded({name: value for name, value in ours if name != _TOKEN})
        except (ValueError, KeyError) as error:
            await _refuse(scope, send, 400, f"a header of the front is broken: {error}")
            return
        if scope["type"] == "http" and scope["path"] == STATE_PATH:
            await self._feed.stream(receive, send)
            return
        others = [(n, v) for n, v in scope["headers"] if not n.startswith(_OURS)]
        inner = {**scope, "headers": others}
        if forwarded is not None:
            inner[FORWARDED] = forwarded
        self.running += 1
        try:
            await self._app(inner, receive, send)
        finally:
            self.running -= 1


def _forwarded(headers: dict[bytes, bytes]) -> Forwarded | None:
    """The content of the front's headers; None if there are none.

    Raises:
        ValueError, KeyError: a header has no value that the front writes.
    """
    if not headers:
        return None
    age_ms = float(headers.get(AGE_HEADER.encode(), b"0"))
    if not (math.isfinite(age_ms) and age_ms >= 0.0):
        raise ValueError(f"age {age_ms} ms")
    mark = headers.get(TICKET_HEADER.encode())
    ticket = "" if mark is None else str(Ticket.parse(mark.decode("latin-1")))
    wish = _WISHES[headers.get(UNATTAINABLE_HEADER.encode(), b"")]
    return Forwarded(age_ms=age_ms, ticket=ticket, on_unattainable=wish)


async def _refuse(scope: Scope, send: Send, status: int, text: str) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    kind = "AuthenticationError" if status == 401 else "BadRequestError"
    error = {"message": text, "type": kind, "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})
