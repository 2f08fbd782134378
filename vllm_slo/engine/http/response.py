# SPDX-License-Identifier: Apache-2.0
"""Holds the response to one HTTP request as long as needed, and puts the report into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm_slo.engine.http.messages import resized
from vllm_slo.engine.http.outcome import Asked, rewrite_event, rewrite_json
from vllm_slo.engine.telemetry.faults import Held
from vllm_slo.slo.body import read_body

if TYPE_CHECKING:
    from starlette.types import Message, Send

_REPORTS: Final = Held("The answer goes out without its report.")
MAX_HELD_BYTES: Final = 64 * 1024 * 1024
"""Of a response that is to get a report; a longer one goes out as it comes."""


class Response:
    """A response on its way to the client.

    ``eager``: whether the request is read before the application has it.

    Attributes:
        asked: what the request asks for; None: it was not read yet.
        in_background: whether the answer names a stored response that is made later.
        reports: choice -> its report, as far as they are there.
        has_output: whether the engine has had output.
        started: whether the client has a part of the response.
    """

    def __init__(self, send: Send, *, eager: bool) -> None:
        self.asked: Asked | None = None
        self.in_background = False
        self.reports: dict[int, Mapping[str, Any]] = {}
        self.has_output = False
        self.started = False
        self.stored_id: str | None = None
        self._send = send
        self._eager = eager
        self._held: list[Message] | None = None
        self._streams = False

    def discard(self) -> None:
        """Forget what is held: the client gets another answer."""
        self._held = None

    async def forward(self, message: Message) -> None:
        """Forward, hold or rewrite one message of the application."""
        if self._held is not None:
            await self._hold(message)
        elif message["type"] == "http.response.start" and self._must_hold(message):
            self._held = [message]
        else:
            await self._pass(message)

    def _must_hold(self, start: Message) -> bool:
        """Whether the response is held before it goes out."""
        if start["status"] != 200:
            return False
        kinds = [v for name, v in start.get("headers", ()) if name.lower() == b"content-type"]
        kind = kinds[0] if kinds else b""
        self._streams = kind.startswith(b"text/event-stream")
        asked = self.asked
        if asked is None:
            # A stream may begin before its route calls the engine, which is when it is read.
            return self._streams and not self._eager
        if asked.slo is None and asked.service_tier is None:
            return False
        if self._streams:
            return asked.may_be_declined and not self.has_output
        return bool(kind.startswith(b"application/json"))

    async def _hold(self, message: Message) -> None:
        """Keep a message until the response may go out.

        A stream goes out once the engine has output, so that a refusal can still be the whole
        answer. A comment that keeps the connection alive opens it, too.
        """
        assert self._held is not None
        self._held.append(message)
        if message["type"] != "http.response.body":
            await self._release()
            return
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        if self._streams:
            decided = self.has_output or self.asked is None or not self.asked.may_be_declined
            if decided or is_last or body.startswith(b":"):
                await self._release()
        elif is_last:
            with _REPORTS:
                self._rewrite()
            await self._release()
        elif sum(len(held.get("body", b"")) for held in self._held) > MAX_HELD_BYTES:
            await self._release()

    def _rewrite(self) -> None:
        """Put the report into the whole response that is held."""
        assert self.asked is not None and self._held is not None
        start, *parts = self._held
        body = b"".join(part.get("body", b"") for part in parts)
        if self.in_background:
            self.stored_id = _id_of(body)
        changed = rewrite_json(body, self.asked, self.reports.get(0))
        self._held = [
            {**start, "headers": resized(start.get("headers", ()), len(changed))},
            {"type": "http.response.body", "body": changed, "more_body": False},
        ]

    async def _release(self) -> None:
        """Send the held messages, in order; all later ones pass."""
        held, self._held = self._held or [], None
        for message in held:
            await self._pass(message)

    async def _pass(self, message: Message) -> None:
        """Send one message; an event of a stream that ends a choice gets its report."""
        self.started = True
        if self._streams and self.asked is not None and message.get("body"):
            with _REPORTS:
                changed = rewrite_event(message["body"], self.asked, self.reports)
                message = {**message, "body": changed}
        await self._send(message)


def _id_of(body: bytes) -> str | None:
    response_id = (read_body(body) or {}).get("id")
    return response_id if isinstance(response_id, str) else None
