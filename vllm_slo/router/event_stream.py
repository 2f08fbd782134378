# SPDX-License-Identifier: Apache-2.0
"""Reading a replica's answer: whole bodies, and server-sent events that are passed on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import aiohttp
from aiohttp import web

from vllm_slo.router.front_errors import stream_end

MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
"""Largest answer that is not a stream, because it is held as a whole; more is an error."""
MAX_EVENT_BYTES: Final = 64 * 1024 * 1024
"""Largest event of a stream; more is an error."""
CONNECTION_ERRORS: Final = (aiohttp.ClientError, OSError)
_PREFACE: Final = re.compile(
    rb'"type": ?"(response\.(created|queued|in_progress)|message_start|ping)"'
)
"""Events with which a stream begins before the model has produced a token."""


class ReplicaLostError(Exception):
    """The connection to the replica failed while its answer was read."""


class Stream(web.StreamResponse):
    """A stream whose head leaves in one packet with its first event."""

    _send_headers_immediately = False  # aiohttp's name; without it there are two packets


class EventStream:
    """Passes server-sent events on to the client, whole events only.

    Invariant: what the client got ends with a whole event, so an error event can follow.
    """

    def __init__(self, response: web.StreamResponse, path: str) -> None:
        self.last = b""
        self._before_last = b""
        self._response = response
        self._path = path
        self._held = b""

    async def take(self, chunk: bytes) -> None:
        """Pass on the events that are complete."""
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        if not chunk.endswith(b"\n\n"):
            end = _whole_events(chunk)
            self._held = chunk[end:]
            if len(self._held) > MAX_EVENT_BYTES:
                raise ReplicaLostError("an event does not end")
            chunk = chunk[:end]
        if chunk:
            self._before_last, self.last = self.last, chunk
            await self._response.write(chunk)

    async def end(self) -> None:
        """Pass on the rest of a stream that is complete."""
        if self._held:
            await self._response.write(self._held)
        if b'"usage"' not in self.last:
            self.last = self._before_last

    async def fail(self, text: str) -> None:
        """Send an error event, unless the end of the stream or an error was passed on already."""
        if end := stream_end(self._path, self.last, text):
            await self._response.write(end)


async def first_event(answer: aiohttp.ClientResponse) -> tuple[bytes, Mapping[str, Any] | None]:
    """A stream up to the first event that shows that the request has begun, and its error.

    The error is None unless that event is one that another replica might not send.

    Raises:
        aiohttp.ClientError, OSError, ReplicaLostError: the connection failed.
    """
    held = b""
    while True:
        chunk = await answer.content.readany()
        held += chunk
        for event in _events(held[: _whole_events(held)]):
            if (error := _server_error(event)) is not None:
                return held, error
            if event and not _PREFACE.search(event):
                return held, None
        if not chunk:
            return held, None
        if len(held) > MAX_EVENT_BYTES:
            raise ReplicaLostError("an event does not end")


async def read_any(answer: aiohttp.ClientResponse) -> bytes:
    """The bytes of a stream that have come; empty at its end.

    Raises:
        ReplicaLostError: the connection failed, or ended early.
    """
    try:
        return await answer.content.readany()
    except CONNECTION_ERRORS as error:
        raise ReplicaLostError(repr(error)) from error


async def read_all(answer: aiohttp.ClientResponse) -> bytes:
    """The whole body.

    Raises:
        aiohttp.ClientError, OSError, ReplicaLostError: the connection failed, or the body is too
            large.
    """
    first = await answer.content.readany()
    if answer.content.at_eof():
        return first
    parts, size = [first], len(first)
    while part := await answer.content.readany():
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise ReplicaLostError("the answer is too large")
    return b"".join(parts)


def _whole_events(data: bytes) -> int:
    """Number of bytes up to the end of the last complete event."""
    if data.endswith(b"\n\n"):
        return len(data)
    plain, dos = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    return max(plain + 2 if plain >= 0 else 0, dos + 4 if dos >= 0 else 0)


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
