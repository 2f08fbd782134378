# SPDX-License-Identifier: Apache-2.0
"""The state of a replica's scheduler as a stream of JSON lines.

The stream also tells what became of the front's requests, as events in their order:

- ``["came", ticket]``: the request is here.
- ``["began", ticket]``: an answer begins that stands, whatever it says.
- ``["refused", ticket, retry_after_ms, reason]``: another replica is to be tried.
- ``["declined", ticket]``: the client gets the refusal.
- ``["ended", ticket, prompt_tokens]``: it was answered or its client left; 0: not known.

The first line of a stream has all requests that are here, as ``"live"``.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Final

from vllm_slo.engine.telemetry.state import MAX_MESSAGE_BYTES, unpack

if TYPE_CHECKING:
    from starlette.types import Receive, Send

HEARTBEAT_S: Final = 0.25
"""Longest pause between two lines, seconds."""


class _Reader:
    """One stream: whether it has something to tell, and the events that it has not told."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.events: list[list[Any]] = []


class StateFeed:
    """The newest state of the scheduler, and the streams of it.

    A line is ``{"state", "age_s", "draining", "dead", "events"}``: `ReplicaState` as JSON or null,
    seconds since the scheduler took it, whether this replica is about to leave, whether its engine
    is dead, and what became of requests since the line before. A stream that was busy gets only the
    newest state, and all events.

    ``path``: the Unix socket to which the scheduler sends; bound at the first stream. None: no
    scheduler publishes.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self.draining = False
        self._state = b"null"
        self._taken_s = 0.0
        self._readers: set[_Reader] = set()
        self._live: set[int] = set()

    def listen(self) -> None:
        """Receive from the engine's process, if that was not begun yet; needs a running loop.

        Raises:
            OSError: the socket cannot be bound.
        """
        if self._socket is not None or self._path is None:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self._path)
        asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()

    def tell(self, *event: Any) -> None:
        """Tell every stream of one event, at once."""
        for reader in self._readers:
            reader.events.append(list(event))
            reader.changed.set()

    def take(self, ticket: int) -> None:
        """A request of the front has come."""
        self._live.add(ticket)
        self.tell("came", ticket)

    def leave(self, ticket: int, prompt_tokens: int) -> None:
        """A request of the front has ended. ``prompt_tokens``: 0 if not known."""
        self._live.discard(ticket)
        self.tell("ended", ticket, prompt_tokens)

    def _receive(self) -> None:
        assert self._socket is not None
        with suppress(BlockingIOError):
            while True:
                message = self._socket.recv(MAX_MESSAGE_BYTES)
                with suppress(ValueError):
                    self._state, self._taken_s = unpack(message)
                    self.wake()

    def drain(self) -> None:
        """Tell every stream that this replica is about to leave."""
        self.draining = True
        self.wake()

    def wake(self) -> None:
        """Make every stream send a line now."""
        for reader in self._readers:
            reader.changed.set()

    def line(self, **more: Any) -> bytes:
        age_s = max(time.monotonic() - self._taken_s, 0.0) if self._taken_s else 0.0
        rest = json.dumps({"draining": self.draining, **more})[1:].encode()
        return b'{"state":%s,"age_s":%.6f,%s\n' % (self._state, age_s, rest)

    async def lines(self, is_dead: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield a line now, on each change and every `HEARTBEAT_S`."""
        reader = _Reader()
        self._readers.add(reader)
        first: dict[str, Any] = {"live": sorted(self._live)}
        try:
            while True:
                reader.changed.clear()
                events, reader.events = reader.events, []
                yield self.line(dead=is_dead(), events=events, **first)
                first = {}
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await reader.changed.wait()
        finally:
            self._readers.discard(reader)

    async def stream(self, receive: Receive, send: Send, is_dead: Callable[[], bool]) -> None:
        """Answer one request for the stream until its client leaves.

        Raises:
            OSError: the scheduler's socket cannot be bound.
        """
        self.listen()
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        leaves = asyncio.create_task(_client_leaves(receive))
        try:
            async with aclosing(self.lines(is_dead)) as lines:
                async for line in lines:
                    if leaves.done():
                        return
                    await send({"type": "http.response.body", "body": line, "more_body": True})
        finally:
            leaves.cancel()


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
