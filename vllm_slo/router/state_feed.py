# SPDX-License-Identifier: Apache-2.0
"""The state of a replica's scheduler as a stream of JSON lines."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_pace import StatePace
from vllm_slo.core.routing.state_stream import StateDecoder, StateEncoder
from vllm_slo.engine.telemetry.state import MAX_MESSAGE_BYTES, unpack

if TYPE_CHECKING:
    from starlette.types import Receive, Send

HEARTBEAT_S: Final = 0.25
"""Longest pause between two lines, seconds."""
STREAM_BITS: Final = 40
"""Streams begin at random numbers of so many bits: lines of two streams are never mistaken."""


class _Reader:
    """One stream of lines.

    Attributes:
        woken: there is something new.
        hurried: the next line is not to wait for its turn.
    """

    def __init__(self) -> None:
        self.encoder = StateEncoder(secrets.randbits(STREAM_BITS))
        self.pace = StatePace()
        self.woken = asyncio.Event()
        self.hurried = asyncio.Event()

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
    (`core.routing.state_pace`); that this replica leaves, or that its engine is dead, is told at
    once.
    """

    def __init__(self) -> None:
        self.draining = False
        self.dead = False
        self.closed = False
        self._decoder = StateDecoder()
        self._state: ReplicaState | None = None
        self._taken_s = 0.0
        self._readers: set[_Reader] = set()

    def listen(self, path: Path) -> None:
        """Receive at the Unix socket ``path`` from the engine's process; needs a running loop."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _receive(self) -> None:
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

    def change(self, **flags: bool) -> None:
        """Set ``draining``, ``dead`` or ``closed``, and send a line at once."""
        for name, value in flags.items():
            setattr(self, name, value)
        self.wake()

    def wake(self) -> None:
        """Make every stream send a line now."""
        for reader in self._readers:
            reader.woken.set()
            reader.hurried.set()

    def _line(self, encoder: StateEncoder) -> bytes:
        age_s = max(time.monotonic() - self._taken_s, 0.0) if self._state is not None else 0.0
        return encoder.line(self._state, age_s=age_s, draining=self.draining, dead=self.dead)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yield a line now, after each change and every `HEARTBEAT_S`, until the feed closes."""
        reader = _Reader()
        self._readers.add(reader)
        try:
            while True:
                reader.woken.clear()
                reader.hurried.clear()
                last = self.closed
                reader.pace.told(time.monotonic())
                yield self._line(reader.encoder)
                if last:
                    return
                await reader.turn()
        finally:
            self._readers.discard(reader)

    async def stream(self, receive: Receive, send: Send) -> None:
        """Answer one request for the stream until its client leaves or the feed is closed."""
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        leaves = asyncio.create_task(_client_leaves(receive))
        try:
            async with aclosing(self.lines()) as lines:
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
