# SPDX-License-Identifier: Apache-2.0
"""One replica as the front sees it: its state stream, its shadow state, its pages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

import aiohttp
from yarl import URL

from vllm_slo.core.routing.state_stream import StateDecoder, StateLine
from vllm_slo.core.routing.virtual_replica import VirtualReplica
from vllm_slo.router.prompts import PrefixIndex
from vllm_slo.router.replica_spec import ReplicaSpec
from vllm_slo.wire.front_protocol import STATE_PATH, TOKEN_HEADER, TOKEN_VARIABLE

logger = logging.getLogger("vllm_slo.front")

CONNECT_S: Final = 2.0
KEEPALIVE_S: Final = 3.0
"""Idle connections are closed long before the replica's server closes them (after 75 s), so that no
request is sent on a connection that is just being closed."""
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
MAX_LINE_BYTES: Final = 64 * 1024 * 1024
MAX_URLS: Final = 256
METRICS_PATIENCE_S: Final = 10.0
KEPT_S: Final = 2.0
"""Largest age of a replica's page, seconds: the period of the live page and of servers' samples."""
_SKIPPED: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


T = TypeVar("T")


class Once(Generic[T]):
    """The result of a call that is made once for all who ask meanwhile, and kept for a while.

    The call goes on if those who wait for it are cancelled.

    ``kept_s``: largest age of the result, seconds from the end of the call.
    """

    def __init__(self, call: Callable[[], Awaitable[T]], kept_s: float) -> None:
        self._call = call
        self._kept_s = kept_s
        self._task: asyncio.Task[T] | None = None
        self._ended_s = 0.0

    async def get(self) -> T:
        """The result.

        Raises:
            Exception: whatever the call raised.
        """
        task = self._task
        if task is None or (task.done() and time.monotonic() - self._ended_s >= self._kept_s):
            task = self._task = asyncio.create_task(self._run())
        return await asyncio.shield(task)

    async def _run(self) -> T:
        try:
            return await self._call()
        finally:
            self._ended_s = time.monotonic()


class Observer(Protocol):
    """Is told what the state streams of replicas say beside the state."""

    def connected(self, upstream: Upstream, live: Collection[str]) -> None:
        """A state stream has begun. ``live``: tickets of the requests that are at the replica."""

    def told(self, upstream: Upstream, event: str, ticket: str, *more: Any) -> None:
        """An event of a request; see `engine.http.state_feed`."""

    def lost(self, upstream: Upstream) -> None:
        """The replica counts as dead: nothing of what it still does is of use."""


class Upstream:
    """One replica: reader of its state stream, and HTTP client for its pages and quotes.

    Invariant: `ready` is true only if the state stream is connected, its last line is younger than
    ``stale_after_s``, and the replica neither drains nor is dead. `tick` detects silence;
    time in which this process itself was held up does not count.

    Args:
        stale_after_s, dead_after_s: as in `RoutingConfig`.
        observer: told of the events of its stream; None: nobody.
        front: name of this front in its tickets.

    Attributes:
        address: IP address and port of the state stream's connection; None before the first.
        running: requests and quotes that are at the replica.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        stale_after_s: float,
        dead_after_s: float,
        observer: Observer | None = None,
        front: str = "",
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.virtual = VirtualReplica(spec.name, front)
        self.prefixes = PrefixIndex()
        self.metrics = Once(partial(self.get, "/metrics", METRICS_PATIENCE_S), KEPT_S)
        self.listed = True
        self.draining = False
        self.engine_dead = False
        self.connected = False
        self.running = 0
        self.address: tuple[str, int] | None = None
        self._observer = observer
        self._stale_after_s = stale_after_s
        self._dead_after_s = dead_after_s
        self._heard_s: float | None = None
        self._silent = True
        self._aborted = False
        self._urls: dict[str, URL] = {}
        self._unreadable = False
        self._decoder = StateDecoder()
        self._listening: asyncio.Timeout | None = None
        self._session: aiohttp.ClientSession | None = None
        self._watcher: asyncio.Task[None] | None = None

    # --- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the HTTP client and follow the state stream."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_SKIPPED,
            max_line_size=65_536,
            max_field_size=65_536,
        )
        self._watcher = asyncio.create_task(self._watch(), name=f"state of {self.name}")

    async def close(self) -> None:
        """Stop following the state stream and close every connection."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # --- what is known ---------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.connected and self.listed and not self._silent and self.is_serving

    @property
    def is_heard(self) -> bool:
        """Whether its state stream is open and not silent."""
        return self.connected and not self._silent

    @property
    def is_serving(self) -> bool:
        """Whether the replica takes requests by its last line."""
        return not (self.draining or self.engine_dead)

    @property
    def status(self) -> str:
        """The status in one word, for operators."""
        if self.engine_dead or self._aborted:
            return "dead"
        if self._heard_s is None:
            return "starting"
        if self.draining or not self.listed:
            return "draining"
        return "ready" if self.ready else "stale"

    def age_s(self, now_s: float) -> float | None:
        """Seconds since the last line; None before the first."""
        return None if self._heard_s is None else max(now_s - self._heard_s, 0.0)

    def tick(self, now_s: float, held_up_s: float) -> None:
        """Detect silence. ``held_up_s``: seconds in which this process itself could not read."""
        if self._heard_s is None:
            return
        self._heard_s += held_up_s
        silence_s = now_s - self._heard_s
        self._silent = silence_s > self._stale_after_s
        if silence_s > self._dead_after_s and not self._aborted:
            self._aborted = True
            logger.warning("replica %s: silent for %.1f s, treated as dead", self.name, silence_s)
            self.prefixes.clear()
            if self._observer is not None:
                self._observer.lost(self)
            if self._listening is not None:
                self._listening.reschedule(0.0)  # a new connection may work

    # --- requests --------------------------------------------------------------------------------

    def request(
        self, method: str, target: str, headers: Any, body: Any
    ) -> Any:  # aiohttp's awaitable context manager
        """Send a request; ``target`` is path and query as sent, already encoded."""
        assert self._session is not None
        url = self._urls.get(target)
        if url is None:
            url = URL(self.spec.url + target, encoded=True)
            if len(self._urls) < MAX_URLS and "?" not in target:
                self._urls[target] = url
        return self._session.request(method, url, data=body, headers=headers, allow_redirects=False)

    async def get(self, target: str, patience_s: float) -> tuple[int, bytes, str]:
        """Get a page of the replica: status, body and content type.

        Raises:
            aiohttp.ClientError, OSError: it does not answer, or not in time.
        """
        headers = {TOKEN_HEADER: self.spec.token}
        async with (
            asyncio.timeout(patience_s),
            self.request("GET", target, headers, None) as answer,
        ):
            body = await answer.read()
            return answer.status, body, answer.headers.get("Content-Type", "text/plain")

    # --- state stream ----------------------------------------------------------------------------

    async def _watch(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            before = self._heard_s
            try:
                await self._follow()
                reason = "it ended"
            except (aiohttp.ClientError, OSError, ValueError, TypeError, LookupError) as error:
                reason = f"{type(error).__name__}: {error}"
            if self.connected:
                logger.warning("replica %s: state stream lost: %s", self.name, reason)
            self.connected = False
            pause_s = (
                min(pause_s * 2, LONGEST_PAUSE_S) if self._heard_s == before else FIRST_PAUSE_S
            )
            await asyncio.sleep(pause_s)

    async def _follow(self) -> None:
        """Read the state stream until it ends.

        Raises:
            aiohttp.ClientError, OSError, ValueError: it broke, stopped, or is no state stream.
        """
        headers = {TOKEN_HEADER: self.spec.token}
        async with (
            asyncio.timeout(self._dead_after_s) as listening,
            self.request("GET", STATE_PATH, headers, None) as answer,
        ):
            if answer.status != 200:
                raise ValueError(_why_no_stream(answer.status))
            self.address = _peer(answer)
            try:
                await self._listen(answer.content, listening)
            finally:
                self._listening = None

    async def _listen(self, content: aiohttp.StreamReader, listening: asyncio.Timeout) -> None:
        held = b""
        async for chunk in content.iter_any():
            lines, newline, held = (held + chunk).rpartition(b"\n")
            if len(held) > MAX_LINE_BYTES:
                raise ValueError("a line of the state stream does not end")
            if newline:
                self.hear(lines, time.monotonic())
                if self._listening is None:
                    # From now on `tick` detects silence.
                    listening.reschedule(None)
                    self._listening = listening

    def hear(self, lines: bytes, now_s: float) -> None:
        """Process the next lines of the state stream.

        Raises:
            ValueError: they are no such lines, or one before them is missing.
        """
        read = [self._decoder.read(line) for line in lines.split(b"\n")]
        newest = read[-1]
        self._heard_s, self._silent, self._aborted = now_s, False, False
        self.connected = True
        self.draining, self.engine_dead = newest.draining, newest.dead
        if newest.problem is not None and not self._unreadable:
            self._unreadable = True
            logger.warning("replica %s: its state cannot be read: %s", self.name, newest.problem)
        if newest.state is not None:
            if any(line.is_new for line in read):
                self.virtual.update(newest.state, now_s - newest.age_s)
            else:
                self.virtual.confirm(now_s)
        self._tell_observer(read)

    def _tell_observer(self, read: list[StateLine]) -> None:
        if self._observer is None:
            return
        for line in read:
            if line.live is not None:
                self._observer.connected(self, line.live)
            for event, ticket, *more in line.events:
                self._observer.told(self, event, ticket, *more)


def _peer(answer: aiohttp.ClientResponse) -> tuple[str, int] | None:
    """IP address and port at the other end of an answer's connection."""
    transport = None if answer.connection is None else answer.connection.transport
    if transport is None:
        return None
    host, port = transport.get_extra_info("peername")[:2]
    return str(host), int(port)


def _why_no_stream(status: int) -> str:
    if status == 401:
        return "it refuses the front's token (401)"
    if status == 404:
        return (
            "it has no state stream (404): start it with --scheduler-cls vllm_slo.Scheduler and "
            f"the front's token in {TOKEN_VARIABLE}"
        )
    return f"its state stream answers {status}"
