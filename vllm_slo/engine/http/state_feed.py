# SPDX-License-Identifier: Apache-2.0
"""The state of a replica's scheduler as a stream of JSON lines.

The stream also tells what became of the front's requests, as events in their order:

- ``["came", ticket]``: the request is here.
- ``["began", ticket]``: an answer begins that stands, whatever it says.
- ``["refused", ticket, retry_after_ms, reason]``: another replica is to be tried.
- ``["declined", ticket]``: the client gets the refusal.
- ``["ended", ticket, prompt_tokens, client_left]``: it was answered, or its client left before
  that. 0 prompt tokens: not known.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_pace import StatePace
from vllm_slo.core.routing.state_stream import Event, StateDecoder, StateEncoder
from vllm_slo.engine.telemetry.state import MAX_MESSAGE_BYTES, unpack

if TYPE_CHECKING:
    from starlette.types import Receive, Send

HEARTBEAT_S: Final = 0.25
"""Longest pause between two lines, seconds."""
MAX_EVENTS: Final = 65_536
"""Events that are kept for one stream: some megabytes."""
STREAM_BITS: Final = 40
"""Streams begin at random numbers of so many bits: lines of two streams are never mistaken."""


class Server(NamedTuple):
    """What a stream tells of the server.

    Attributes:
        is_dead: whether the engine has failed for good.
        is_stopping: whether the server waits for its connections to end.
    """

    is_dead: Callable[[], bool]
    is_stopping: Callable[[], bool]


_RUNNING: Final = Server(lambda: False, lambda: False)


class _Reader:
    """One stream of lines.

    Attributes:
        woken: there is something new.
        hurried: the next line is not to wait for its turn.
        events: to be told with the next line; at most `MAX_EVENTS`.
        live_is_due: the next line says which requests are here.
    """

    def __init__(self) -> None:
        self.encoder = StateEncoder(secrets.randbits(STREAM_BITS))
        self.pace = StatePace()
        self.woken = asyncio.Event()
        self.hurried = asyncio.Event()
        self.events: list[Event] = []
        self.live_is_due = True

    def tell(self, event: Event) -> None:
        """Add an event. If a stalled front has left too many, it gets the live requests instead."""
        if len(self.events) >= MAX_EVENTS:
            self.events.clear()
            self.live_is_due = True
        self.events.append(event)
        self.woken.set()

    async def turn(self) -> None:
        """Wait for the time of the next line."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await self.woken.wait()
        pause_s = self.pace.next_s - time.monotonic()
        if pause_s > 0.0 and not self.hurried.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.hurried.wait()


class StateFeed:
    """The newest state of the scheduler, and the streams of it.

    `core.routing.state_stream` says what a line holds. Every stream has its own lines, so one that
    was busy gets what changed since its own last line. New states wait for their turn
    (`core.routing.state_pace`), and so do events; a refusal, or that this replica leaves, is told
    at once.

    ``path``: the Unix socket to which the scheduler sends; bound at the first stream. None: no
    scheduler publishes.
    """

    def __init__(self, path: str | None = None) -> None:
        self.draining = False
        self._path = path
        self._socket: socket.socket | None = None
        self._live: set[str] = set()
        self._decoder = StateDecoder()
        self._state: ReplicaState | None = None
        self._taken_s = 0.0
        self._readers: set[_Reader] = set()

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

    def came(self, ticket: str) -> None:
        """A request of the front is here."""
        self._live.add(ticket)
        self._tell("came", ticket)

    def began(self, ticket: str) -> None:
        """An answer begins that stands."""
        self._tell("began", ticket)

    def declined(self, ticket: str) -> None:
        """The client gets a refusal."""
        self._tell("declined", ticket)

    def refused(self, ticket: str, retry_after_ms: int, reason: str) -> None:
        """Another replica is to be tried; the front hears of it before it sees the answer."""
        self._tell("refused", ticket, retry_after_ms, reason)
        self.wake()

    def ended(self, ticket: str, prompt_tokens: int, *, client_left: bool) -> None:
        """A request was answered, or its client left. ``prompt_tokens``: 0 if not known."""
        self._live.discard(ticket)
        self._tell("ended", ticket, prompt_tokens, client_left)

    def _tell(self, *event: Any) -> None:
        for reader in self._readers:
            reader.tell(event)

    def _receive(self) -> None:
        assert self._socket is not None
        message = b""
        with suppress(BlockingIOError):
            while True:
                message = self._socket.recv(MAX_MESSAGE_BYTES)
        with suppress(ValueError):
            line, taken_s = unpack(message)
            if (state := self._decoder.read(line).state) is not None:
                self.take(state, taken_s)

    def take(self, state: ReplicaState, taken_s: float) -> None:
        """Take in a state that the scheduler took at ``taken_s`` on the monotonic clock."""
        self._state, self._taken_s = state, taken_s
        for reader in self._readers:
            reader.woken.set()

    def drain(self) -> None:
        """Tell every stream that this replica is about to leave."""
        self.draining = True
        self.wake()

    def wake(self) -> None:
        """Make every stream send a line now."""
        for reader in self._readers:
            reader.woken.set()
            reader.hurried.set()

    def _line(self, reader: _Reader, *, dead: bool) -> bytes:
        age_s = max(time.monotonic() - self._taken_s, 0.0) if self._state is not None else 0.0
        events, reader.events = reader.events, []
        live = tuple(self._live) if reader.live_is_due else None
        reader.live_is_due = False
        return reader.encoder.line(
            self._state,
            age_s=age_s,
            draining=self.draining,
            dead=dead,
            events=events,
            live=live,
        )

    async def lines(self, server: Server = _RUNNING) -> AsyncGenerator[bytes, None]:
        """Yield a line now, after each change and every `HEARTBEAT_S`, until the server stops."""
        reader = _Reader()
        self._readers.add(reader)
        try:
            while True:
                reader.woken.clear()
                reader.hurried.clear()
                reader.pace.told(time.monotonic())
                is_last = server.is_stopping()
                dead = server.is_dead() and not self.draining  # an engine that was shut down
                yield self._line(reader, dead=dead)
                if is_last:
                    return
                await reader.turn()
        finally:
            self._readers.discard(reader)

    async def stream(self, receive: Receive, send: Send, server: Server) -> None:
        """Answer one request for the stream until its client leaves or the server stops.

        Raises:
            OSError: the scheduler's socket cannot be bound.
        """
        self.listen()
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        leaves = asyncio.create_task(_client_leaves(receive))
        try:
            async with aclosing(self.lines(server)) as lines:
                async for line in lines:
                    if leaves.done():
                        return
                    await send({"type": "http.response.body", "body": line, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            leaves.cancel()


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
