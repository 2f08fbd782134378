# SPDX-License-Identifier: Apache-2.0
"""The answer to a request of the front, on its way out.

The front's data plane sends a request to another replica only if nothing of the answer has left
this one. So a stream is held until the model has produced something, and a failure before that
becomes an answer with the status of a failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from vllm_slo.engine.http.messages import error_messages
from vllm_slo.engine.http.state_feed import StateFeed
from vllm_slo.slo.carriers import Forwarded
from vllm_slo.slo.verdicts import DECLINED_HEADER
from vllm_slo.wire.api_errors import is_anthropic
from vllm_slo.wire.front_protocol import RETRIED, TRY_NEXT

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Send

MAX_HELD_BYTES: Final = 1024 * 1024
"""Of the beginning of a stream; a longer one goes out as it comes."""
_PREFACE: Final = re.compile(
    rb'"type": ?"(response\.(created|queued|in_progress)|message_start|ping)"'
)
"""Events with which a stream begins before the model has produced a token."""
_PROMPT_TOKENS: Final = re.compile(rb'"(?:prompt|input)_tokens": ?(\d{1,9})')
_REASON_HEADER: Final = b"x-slo-reason"


class ForwardedAnswer:
    """Passes an answer on, and tells the state feed when it begins, is refused and ends.

    Args:
        path: of the request; it decides the shape of errors.
        feed: is told of the request by its ticket.
        receive, send: the server's.
        address: ``host:port`` of this server, which clients of the front do not get to know.
    """

    def __init__(
        self,
        path: str,
        forwarded: Forwarded,
        feed: StateFeed,
        receive: Receive,
        send: Send,
        address: str,
    ) -> None:
        self._path = path
        self._address = address.lower().encode()
        self._ticket = forwarded["ticket"]
        self._may_move_on = forwarded["on_unattainable"] == "decline"
        self._feed = feed
        self._feed.came(forwarded["ticket"])
        self._receive = receive
        self._send = send
        self._complete = self._left = False
        self._held: list[Message] | None = None
        self._replaced = False
        self._begun = False
        self._last = b""
        self._before_last = b""

    async def receive(self) -> Message:
        """The client's next message, for the application."""
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._complete:
            self._left = True
        return message

    async def send(self, message: Message) -> None:
        """One message of the application."""
        if self._replaced:
            return
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True
        if message["type"] == "http.response.start":
            await self._start(message)
        elif self._held is not None:
            await self._hold(message)
        else:
            await self._pass(message)

    def close(self) -> None:
        """The application has ended the request, or its client has left."""
        tokens = 0
        if self._begun and not is_anthropic(self._path):  # whose count leaves out cached tokens
            last = self._last if b'"usage"' in self._last else self._before_last
            found = _PROMPT_TOKENS.search(last, max(last.rfind(b'"usage"'), 0))
            tokens = int(found[1]) if found else 0
        self._feed.ended(self._ticket, tokens, client_left=self._left)

    async def _start(self, message: Message) -> None:
        headers = {name.lower(): value for name, value in message.get("headers", ())}
        declined = headers.get(DECLINED_HEADER.encode())
        if declined is not None and self._may_move_on:
            reason = headers.get(_REASON_HEADER, b"").decode("latin-1")
            self._feed.refused(self._ticket, int(declined), reason)
            message = {**message, "status": TRY_NEXT}
        elif declined is not None:
            self._feed.declined(self._ticket)
        kept = [(n, v) for n, v in message.get("headers", ()) if self._address not in v.lower()]
        message = {**message, "headers": kept}
        streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if message["status"] == 200 and streams:
            self._held = [message]
            return
        if message["status"] not in RETRIED:
            self._begin()
        elif message["status"] != TRY_NEXT:
            self._feed.wake()  # the engine may have died
        await self._send(message)

    def _begin(self) -> None:
        self._begun = True
        self._feed.began(self._ticket)

    async def _hold(self, message: Message) -> None:
        """Keep the beginning of a stream until its first event that is no preface."""
        assert self._held is not None
        self._held.append(message)
        body = b"".join(held.get("body", b"") for held in self._held[1:])
        for event in _events(body[: body.rfind(b"\n\n") + 2]):
            if (error := _server_error(event)) is not None:
                await self._fail(error)
                return
            if event and not _PREFACE.search(event):
                await self._release()
                return
        if not message.get("more_body", False) or len(body) > MAX_HELD_BYTES:
            await self._release()

    async def _release(self) -> None:
        held, self._held = self._held or [], None
        self._begin()
        for message in held:
            await self._pass(message)

    async def _fail(self, error: Mapping[str, Any]) -> None:
        """Answer with an error of which the stream would have been the only content."""
        self._replaced, self._held = True, None
        self._feed.wake()
        code = error.get("code")
        status = code if isinstance(code, int) and 500 <= code <= 599 else 500
        kind = str(error.get("type") or "InternalServerError")
        text = str(error.get("message") or "the engine failed")
        for message in error_messages(self._path, status, kind, text, None, ()):
            await self._send(message)

    async def _pass(self, message: Message) -> None:
        if body := message.get("body"):
            self._before_last, self._last = self._last, body
        await self._send(message)


def _events(data: bytes) -> Iterable[bytes]:
    """The data of each event; empty for comments."""
    for block in data.replace(b"\r\n", b"\n").split(b"\n\n"):
        lines = [line[5:].lstrip() for line in block.split(b"\n") if line.startswith(b"data:")]
        yield b"\n".join(lines)


def _server_error(event: bytes) -> Mapping[str, Any] | None:
    """The error in an event, if another replica might not send it."""
    if b'"error"' not in event:
        return None
    with suppress(ValueError, RecursionError):
        content = json.loads(event)
        error = content.get("error") if isinstance(content, dict) else None
        if isinstance(error, dict):
            code = error.get("code")
            return error if not isinstance(code, int) or code >= 500 else None
    return None
