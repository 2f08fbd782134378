# SPDX-License-Identifier: Apache-2.0
"""One exchange: a client's request at one replica after another, and the answer on its way back.

Until the first byte has reached the client, a failure leads to another replica. Afterwards it leads
to one error inside the stream. Bodies pass byte for byte, in both directions.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from vllm_slo.core.routing.policy import Route
from vllm_slo.core.routing.virtual_replica import RoutedRequest
from vllm_slo.router.cluster import Choice, Cluster, Placement
from vllm_slo.router.front_errors import (
    REASON_HEADER,
    UNATTAINABLE,
    busy_response,
    decline_response,
    error_response,
    not_found,
    stream_end,
)
from vllm_slo.router.front_limits import Body
from vllm_slo.router.front_metrics import FrontMetrics
from vllm_slo.router.prompts import Prompt, TokenRatio
from vllm_slo.router.protocol import (
    AGE_HEADER,
    OWN_PREFIX,
    TICKET_HEADER,
    TOKEN_HEADER,
    UNATTAINABLE_HEADER,
)
from vllm_slo.router.upstream import Upstream
from vllm_slo.slo.verdicts import DECLINED_HEADER
from vllm_slo.wire.api_errors import is_anthropic

__all__ = ["Exchange", "Failed", "Refused", "Relay", "Wire"]

logger = logging.getLogger("vllm_slo.front")

REPLICA_HEADER: Final = "x-vllm-slo-replica"
REQUEST_ID: Final = "X-Request-Id"
MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
"""An answer that is not a stream is held as a whole up to here; more is a replica out of order."""
MAX_EVENT_BYTES: Final = 64 * 1024 * 1024
LARGE_BODY_BYTES: Final = 1024 * 1024
RETRIED: Final = frozenset({500, 502, 503, 504})
HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_SENT: Final = HOP_BY_HOP | {"host", "content-length", "expect"}
_NOT_RETURNED: Final = HOP_BY_HOP | {"content-length"}
_PREFACE: Final = re.compile(
    rb'"type": ?"(response\.(created|queued|in_progress)|message_start|ping)"'
)
"""Events that APIs begin a stream with, before the model has said anything."""
_PROMPT_TOKENS: Final = re.compile(rb'"(?:prompt|input)_tokens": ?(\d{1,9})')
_LOST: Final = (aiohttp.ClientError, OSError)


class _LostError(Exception):
    """The replica's connection failed while its answer was read."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A try that failed before the answer began; ``response`` is what the replica said, if it did.

    ``reason`` is one of the label values of ``vllm_slo:front_retries``.
    """

    reason: str
    response: web.Response | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica made no promise, for this reason; it may have room again after so long."""

    retry_after_s: float
    reason: str


@dataclass(slots=True)
class Relay:
    """What all exchanges share."""

    cluster: Cluster
    metrics: FrontMetrics
    ratio: TokenRatio
    decline_status: int


@dataclass(frozen=True, slots=True)
class Wire:
    """A request as it is to be sent.

    Attributes:
        request: the client's.
        path: of the request.
        target: path and query.
        headers: those to send, without the front's own.
        body: as received; released once no other replica can be tried.
        request_id: of the header, kept or made.
        arrival_s: when it came, on the monotonic clock.
    """

    request: web.BaseRequest
    path: str
    target: str
    headers: CIMultiDict[str]
    body: Body
    request_id: str
    arrival_s: float


def forwarded_headers(headers: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
    """The client's headers as replicas get them."""
    named = _connection_options(headers.get("Connection"))
    kept = CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if (low := name.lower()) not in _NOT_SENT
        and not low.startswith(OWN_PREFIX)
        and low not in named
    )
    kept[REQUEST_ID] = request_id
    return kept


def returned_headers(
    headers: Mapping[str, str], upstream: Upstream, request_id: str
) -> CIMultiDict[str]:
    """A replica's headers as the client gets them: none tells its private address."""
    named = _connection_options(headers.get("Connection"))
    address = upstream.spec.url.rpartition("://")[2].lower()
    kept = CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if (low := name.lower()) not in _NOT_RETURNED
        and not low.startswith(OWN_PREFIX)
        and low not in named
        and address not in value.lower()
    )
    kept[REPLICA_HEADER] = upstream.name
    kept[REQUEST_ID] = request_id
    return kept


def _connection_options(value: str | None) -> frozenset[str] | set[str]:
    """Further headers that concern one connection only."""
    return {one.strip().lower() for one in value.split(",")} if value else frozenset()


class Exchange:
    """One request and its answer.

    Args:
        routed: what it asks for; None: no SLO routing (models, embeddings, ...).
        label: the result that is counted if it is served without a promise.
    """

    def __init__(
        self,
        relay: Relay,
        wire: Wire,
        routed: RoutedRequest | None = None,
        prompt: Prompt | None = None,
        label: str = "no_slo",
    ) -> None:
        self._relay = relay
        self._wire = wire
        self._routed = routed
        self._prompt = prompt
        self._label = label
        self._placement = Placement(relay.cluster, routed)
        self._metrics = relay.metrics
        self._counted = False

    async def answer(self) -> web.StreamResponse:
        """Try until there is an answer.

        Raises:
            ConnectionError: the client left.
        """
        last: Failed | None = None
        reason: str | None = None
        while True:
            before_s = time.monotonic()
            choice = self._placement.next(before_s)
            if choice.route is not None:
                self._metrics.decision.observe(time.monotonic() - before_s)
            if choice.upstream is None:
                return self._unplaced(choice.route, last, reason)
            outcome = await self._try(choice)
            if isinstance(outcome, Refused):
                self._metrics.refused_after_promise.inc()
                self._placement.refused(outcome.retry_after_s)
                reason = reason or outcome.reason
            elif isinstance(outcome, Failed):
                last = outcome
                logger.warning("replica %s failed: %s", choice.upstream.name, outcome.reason)
                if not self._placement.failed(choice.upstream):
                    self._count("unavailable", choice.route)
                    return self._given_up(last)
                self._metrics.retries.labels(outcome.reason).inc()
            else:
                return outcome

    # --- answers of the front's own --------------------------------------------------------------

    def _unplaced(
        self, route: Route | None, last: Failed | None, reason: str | None
    ) -> web.Response:
        if route is not None and route.backup == "decline":
            self._count("declined", route)
            if self._routed is not None and not self._placement.refusals:
                # A replica that refused it has counted it.
                self._metrics.declined.labels(self._routed.slo_class).inc()
            # A prediction is one only where a shadow was asked.
            predicted_s = math.inf if route.reason is None else route.retry_after_s
            retry_after_s = min(predicted_s, self._placement.retry_after_s)
            reason = reason or route.reason or UNATTAINABLE
            return decline_response(retry_after_s, self._relay.decline_status, reason)
        self._count("unavailable", route)
        if last is not None and last.response is not None:
            return last.response
        return busy_response("no replica is ready; try again shortly")

    def _given_up(self, last: Failed) -> web.Response:
        if last.response is not None:
            return last.response
        text = f"{self._placement.failures} replicas failed before they answered; try again"
        return error_response(502, "BadGatewayError", text)

    def _count(self, result: str, route: Route | None) -> None:
        """Count the request once, with the result that is known first for certain."""
        if self._routed is None or self._counted:
            return
        self._counted = True
        self._metrics.requests.labels(result).inc()
        if route is None:
            return
        if self._routed.wants_promise:
            self._metrics.hops.observe(route.hops)
        # Other policies ask for no promise: whether one is missing is not known.
        cluster = self._relay.cluster
        promised = result == "promised" or cluster.routing.policy != "slo"
        named = cluster.listed.get(route.target) if route.target else None
        shadows = [one.virtual for one in ([named] if named else cluster.listed.values())]
        work_s = next((shadow.work_s(self._routed) for shadow in shadows if shadow.state), None)
        if work_s is not None:
            final = replace(route, promised=promised)
            cluster.demand.routed(self._routed, final, time.monotonic(), work_s)

    # --- one try ---------------------------------------------------------------------------------

    async def _try(self, choice: Choice) -> web.StreamResponse | Failed | Refused:
        """The request at one replica, from sending it to the end of the answer."""
        upstream = choice.upstream
        assert upstream is not None
        route, routed, now_s = choice.route, self._routed, time.monotonic()
        ticket = upstream.next_ticket()
        headers = self._wire.headers.copy()
        headers[TOKEN_HEADER] = upstream.spec.token
        headers[AGE_HEADER] = f"{(now_s - self._wire.arrival_s) * 1000:.3f}"
        if routed is not None and route is not None:
            headers[TICKET_HEADER] = str(ticket)
            upstream.virtual.sent(ticket, routed, now_s, promised=route.promised)
        if choice.on_unattainable is not None:
            headers[UNATTAINABLE_HEADER] = choice.on_unattainable
        upstream.running += 1
        answer: aiohttp.ClientResponse | None = None
        try:
            try:
                async with upstream.exchange():
                    answer = await self._send(upstream, headers)
                    head = await self._head(upstream, answer, choice)
            except TimeoutError:
                return Failed("silence")
            except (*_LOST, _LostError) as error:
                logger.debug("replica %s: %r", upstream.name, error)
                return Failed("connection")
            if isinstance(head, Failed | Refused):
                return head
            upstream.virtual.began(ticket)
            self._began(upstream, choice)
            if isinstance(head, web.Response):
                return head
            return await self._stream(upstream, answer, head)
        finally:
            if answer is not None:
                answer.close()
            upstream.virtual.ended(ticket)
            upstream.running -= 1

    async def _send(self, upstream: Upstream, headers: CIMultiDict[str]) -> aiohttp.ClientResponse:
        wire = self._wire
        body: Any = wire.body.data or None
        if len(wire.body.data) > LARGE_BODY_BYTES:
            body = io.BytesIO(wire.body.data)  # sent piece by piece
        return await upstream.request(wire.request.method, wire.target, headers, body)

    def _began(self, upstream: Upstream, choice: Choice) -> None:
        """The answer is certain, and none of it has been sent to the client."""
        self._wire.body.release()
        promised = choice.route is not None and choice.route.promised
        self._count("promised" if promised else self._label, choice.route)
        if self._prompt is not None:
            upstream.prefixes.add(self._prompt.chunks)
        if self._routed is not None:
            self._metrics.first_byte.observe(time.monotonic() - self._wire.arrival_s)

    async def _head(
        self, upstream: Upstream, answer: aiohttp.ClientResponse, choice: Choice
    ) -> web.Response | bytes | Failed | Refused:
        """The whole answer, or the beginning of a stream up to its first event.

        Raises:
            aiohttp.ClientError, OSError, _LostError: the connection failed.
        """
        status, declined = answer.status, answer.headers.get(DECLINED_HEADER)
        if status == 200 and answer.headers.get("Content-Type", "").startswith("text/event-stream"):
            return await self._first_event(upstream, answer)
        body = await _read_all(answer)
        if declined is not None:
            if choice.on_unattainable == "decline":
                reason = answer.headers.get(REASON_HEADER, UNATTAINABLE)
                return Refused(_retry_after_s(declined), reason)
            self._count("declined", choice.route)
        if 300 <= status < 400:  # it leads to the replica's own address
            return not_found(self._wire.path)
        headers = returned_headers(answer.headers, upstream, self._wire.request_id)
        response = web.Response(status=status, reason=answer.reason, headers=headers, body=body)
        if status in RETRIED and declined is None:
            return Failed("status", response)
        if status == 200:
            self._learn(body)
        return response

    async def _first_event(
        self, upstream: Upstream, answer: aiohttp.ClientResponse
    ) -> bytes | Failed:
        """What came up to the end of the first event that shows whether the request has begun."""
        held = b""
        while True:
            chunk = await answer.content.readany()
            held += chunk
            end = _whole_events(held)
            for event in _events(held[:end]):
                if (error := _server_error(event)) is not None:
                    return self._failed_event(upstream, answer, error)
                if event and not _PREFACE.search(event):
                    return held
            if not chunk:
                return held
            if len(held) > MAX_EVENT_BYTES:
                raise _LostError("an event does not end")

    def _failed_event(
        self, upstream: Upstream, answer: aiohttp.ClientResponse, error: Mapping[str, Any]
    ) -> Failed:
        """A stream that begins with an error is an error: nobody has seen a stream yet."""
        code = error.get("code")
        status = code if isinstance(code, int) and 500 <= code <= 599 else 500
        response = error_response(
            status,
            str(error.get("type") or "InternalServerError"),
            str(error.get("message") or "the engine failed"),
            headers={REPLICA_HEADER: upstream.name, REQUEST_ID: self._wire.request_id},
        )
        return Failed("error_event", response)

    # --- streams ---------------------------------------------------------------------------------

    async def _stream(
        self, upstream: Upstream, answer: aiohttp.ClientResponse, head: bytes
    ) -> web.StreamResponse:
        """Pass a stream on; whatever happens to the replica, it ends as a stream should.

        Raises:
            ConnectionError: the client left.
        """
        headers = returned_headers(answer.headers, upstream, self._wire.request_id)
        response = _Stream(status=200, reason=answer.reason, headers=headers)
        await response.prepare(self._wire.request)
        stream = _EventStream(response, self._wire.path)
        try:
            async with upstream.exchange():
                await stream.take(head)
                while chunk := await _read_any(answer):
                    await stream.take(chunk)
                await stream.end()
            self._learn(stream.last)
        except TimeoutError:
            await self._break_off(stream, upstream.abort_reason)
        except _LostError:
            await self._break_off(stream, "the replica that worked on this request failed")
        return response

    async def _break_off(self, stream: _EventStream, reason: str) -> None:
        self._metrics.in_band_errors.inc()
        await stream.fail(f"{reason}; what came before is all there is")

    def _learn(self, body: bytes) -> None:
        """Correct the estimate of prompt lengths by the count in an answer. Anthropic's leaves out
        what was cached."""
        if self._prompt is None or is_anthropic(self._wire.path):
            return
        found = _PROMPT_TOKENS.search(body, max(body.rfind(b'"usage"'), 0))
        if found:
            self._relay.ratio.learn(self._prompt, int(found[1]))


class _Stream(web.StreamResponse):
    """Head and first event leave in one packet (were the attribute unknown: in two)."""

    _send_headers_immediately = False


class _EventStream:
    """Server-sent events on their way to the client, whole ones only.

    Invariant: what the client got ends with an event, so that an error event can follow.
    """

    def __init__(self, response: web.StreamResponse, path: str) -> None:
        self.last = b""
        self._before_last = b""
        self._response = response
        self._path = path
        self._held = b""

    async def take(self, chunk: bytes) -> None:
        """Pass on what is complete."""
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        if not chunk.endswith(b"\n\n"):
            end = _whole_events(chunk)
            self._held = chunk[end:]
            if len(self._held) > MAX_EVENT_BYTES:
                raise _LostError("an event does not end")
            chunk = chunk[:end]
        if chunk:
            self._before_last, self.last = self.last, chunk
            await self._response.write(chunk)

    async def end(self) -> None:
        """The stream is complete, whatever its last bytes are."""
        if self._held:
            await self._response.write(self._held)
        if b'"usage"' not in self.last:
            self.last = self._before_last

    async def fail(self, text: str) -> None:
        """End with an error event, unless the end, or an error, has been passed on."""
        if end := stream_end(self._path, self.last, text):
            await self._response.write(end)


async def _read_any(answer: aiohttp.ClientResponse) -> bytes:
    """What has come of a stream; empty at its end.

    Raises:
        _LostError: the connection failed, or ended early.
    """
    try:
        return await answer.content.readany()
    except _LOST as error:
        raise _LostError(repr(error)) from error


async def _read_all(answer: aiohttp.ClientResponse) -> bytes:
    """The whole body.

    Raises:
        aiohttp.ClientError, OSError, _LostError: the connection failed, or there is no end to it.
    """
    first = await answer.content.readany()
    if answer.content.at_eof():
        return first
    parts, size = [first], len(first)
    while part := await answer.content.readany():
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise _LostError("the answer is too large to be held")
    return b"".join(parts)


def _whole_events(data: bytes) -> int:
    """Where the last complete event ends."""
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
    """The error in an event, if it is one that another replica might not make."""
    if b'"error"' not in event:
        return None
    with suppress(ValueError, RecursionError):
        said = json.loads(event)
        error = said.get("error") if isinstance(said, dict) else None
        if isinstance(error, dict):
            code = error.get("code")
            return error if not isinstance(code, int) or code >= 500 else None
    return None


def _retry_after_s(declined: str) -> float:
    with suppress(ValueError):
        return float(declined) / 1000
    return 1.0
