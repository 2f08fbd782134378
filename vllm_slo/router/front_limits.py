# SPDX-License-Identifier: Apache-2.0
"""Limits of the front: connections, memory, and the time of a request to arrive."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from vllm_slo.router.front_errors import ErrorResponse, busy_response, error_response
from vllm_slo.slo.body import MAX_BODY_BYTES

logger = logging.getLogger("vllm_slo.front")

MAX_CONNECTIONS: Final = 16_384
"""Most connections of clients, idle ones included; one takes 5 KB, and 9 KB after a request."""
REFUSED_S: Final = 1.0
"""Time for a client beyond `MAX_CONNECTIONS` to read the refusal. If the connection closed at once,
data that the client still sends would make its system drop the answer."""
SPARE_FILES: Final = 1_024
"""Open files besides two per connection (one to the client, one to a replica)."""
MAX_LINE_BYTES: Final = 8_190
MAX_FIELD_BYTES: Final = 16_384
MAX_HEADERS: Final = 128
IDLE_S: Final = 75.0
"""Longest time of a connection without a whole request head, seconds."""
BODY_PATIENCE_S: Final = 30.0
"""Longest pause between two pieces of a body, seconds."""
BODY_S: Final = 300.0
"""Longest time for a whole body, seconds: the largest body takes this long at 1 Mbit/s."""
MAX_HELD_BYTES: Final = 512 * 1024 * 1024
"""Most bytes of bodies in memory; a body counts from its arrival to the start of its answer."""


class Refusal(Exception):  # noqa: N818  # an answer, not an error
    """The front answers the request itself, with ``response``."""

    def __init__(self, response: ErrorResponse) -> None:
        self.response = response


def allow_files() -> int:
    """Raise this process's limit of open files for `MAX_CONNECTIONS`, if the system allows it.

    Returns how many connections the limit is enough for.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max((soft - SPARE_FILES) // 2, soft // 4)
    return MAX_CONNECTIONS


class Server(web.Server):
    """aiohttp's low-level server with limits. ``most``: connections at the same time."""

    def __init__(self, handler: Any, most: int) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=IDLE_S,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_FIELD_BYTES,
            max_headers=MAX_HEADERS,
        )
        self._most = most

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._connections) > self._most:
            handler.close()  # so that it reads no request
            transport.write(_TOO_MANY)
            transport.write_eof()
            self._loop.call_later(REFUSED_S, transport.abort)


def _too_many() -> bytes:
    response = busy_response("the front has too many connections; try again shortly")
    head = [f"{name}: {value}" for name, value in response.headers.items()]
    body = response.body
    assert isinstance(body, bytes)
    head += [f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join(["HTTP/1.1 503 Service Unavailable", *head, "", ""]).encode() + body


_TOO_MANY: Final = _too_many()


class _Connection(web.RequestHandler):
    """One client connection; errors of the HTTP parser are answered in OpenAI's shape."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        if isinstance(exc, LineTooLong):
            text = f"the request line or a header is longer than {MAX_FIELD_BYTES} bytes"
            response = error_response(431, "BadRequestError", text)
        elif status < 500:
            response = error_response(400, "BadRequestError", "this is not a valid HTTP request")
        else:
            logger.error("a request failed in the front", exc_info=exc)
            response = error_response(500, "InternalServerError", "the front failed")
        response.force_close()
        return response.put_for(request.rel_url.raw_path)


class HeldBytes:
    """Bytes of all bodies that the front holds now."""

    def __init__(self) -> None:
        self.total = 0


class Body:
    """The body of one request; it counts until it is closed.

    ``data``: as received; empty after its release.
    """

    def __init__(self, held: HeldBytes) -> None:
        self.data = b""
        self._held = held
        self._counted = 0

    def close(self) -> None:
        """Stop counting, and drop the data."""
        self._held.total -= self._counted
        self._counted = 0
        self.data = b""

    async def read(self, request: web.BaseRequest) -> None:
        """Receive the body.

        Raises:
            Refusal: it is too large, too slow or broken, or the front holds too much already.
        """
        content = request.content
        if content.at_eof():
            return
        if content.is_eof():
            self.data = content.read_nowait(-1)
            self._count(len(self.data))
            return
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        loop, data = asyncio.get_running_loop(), bytearray()
        end_s = loop.time() + BODY_S
        try:
            async with asyncio.timeout(min(BODY_PATIENCE_S, BODY_S)) as patience:
                while part := await content.readany():
                    patience.reschedule(min(loop.time() + BODY_PATIENCE_S, end_s))
                    self._count(len(part))
                    data += part
        except TimeoutError:
            text = f"the body took {BODY_S:g} s, or paused for {BODY_PATIENCE_S:g} s"
            raise _closing(error_response(408, "BadRequestError", text)) from None
        except (web.RequestPayloadError, HttpProcessingError):
            text = "the body does not match its headers"
            raise _closing(error_response(400, "BadRequestError", text)) from None
        self.data = bytes(data)

    def _count(self, size: int) -> None:
        self._counted += size
        self._held.total += size
        if self._counted > MAX_BODY_BYTES:
            raise too_large()
        if self._held.total > MAX_HELD_BYTES:
            text = "the front holds too many bytes of other requests; try again shortly"
            raise _closing(busy_response(text))


def too_large() -> Refusal:
    """413; the rest of the body is not read."""
    text = f"the body is larger than {MAX_BODY_BYTES} bytes"
    return _closing(error_response(413, "BadRequestError", text))


def _closing(response: ErrorResponse) -> Refusal:
    response.force_close()
    return Refusal(response)
