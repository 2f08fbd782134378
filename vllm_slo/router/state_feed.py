# SPDX-License-Identifier: Apache-2.0
"""The state of a replica's scheduler as a stream of JSON lines."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_slo.engine.telemetry.state import MAX_MESSAGE_BYTES, unpack

if TYPE_CHECKING:
    from starlette.types import Receive, Send

HEARTBEAT_S: Final = 0.25
"""Longest pause between two lines, seconds."""


class StateFeed:
    """The newest state of the scheduler, and the streams of it.

    A line is ``{"state", "age_s", "draining", "dead"}``: `ReplicaState` as JSON or null, seconds
    since the scheduler took it, whether this replica is about to leave, and whether its engine is
    dead. A stream that was busy gets only the newest state.
    """

    def __init__(self) -> None:
        self.draining = False
        self.dead = False
        self.closed = False
        self._state = b"null"
        self._taken_s = 0.0
        self._readers: set[asyncio.Event] = set()

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
        with suppress(BlockingIOError):
            while True:
                message = self._socket.recv(MAX_MESSAGE_BYTES)
                with suppress(ValueError):
                    self._state, self._taken_s = unpack(message)
                    self.wake()

    def change(self, **flags: bool) -> None:
        """Set ``draining``, ``dead`` or ``closed``, and send a line at once."""
        for name, value in flags.items():
            setattr(self, name, value)
        self.wake()

    def wake(self) -> None:
        """Make every stream send a line now."""
        for reader in self._readers:
            reader.set()

    def line(self) -> bytes:
        age_s = max(time.monotonic() - self._taken_s, 0.0) if self._taken_s else 0.0
        flags = (json.dumps(self.draining).encode(), json.dumps(self.dead).encode())
        return b'{"state":%s,"age_s":%.6f,"draining":%s,"dead":%s}\n' % (
            *(self._state, age_s),
            *flags,
        )

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yield a line now, on each change and every `HEARTBEAT_S`, until the feed closes."""
        changed = asyncio.Event()
        self._readers.add(changed)
        try:
            while True:
                changed.clear()
                last = self.closed
                yield self.line()
                if last:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await changed.wait()
        finally:
            self._readers.discard(changed)

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
