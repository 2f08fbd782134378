# SPDX-License-Identifier: Apache-2.0
"""One exchange: it sends a client's request to replicas in turn and relays the answer.

If a replica fails before the client has got a byte, the request goes to another replica. After that
a failure becomes an error event at the end of the stream. Bodies are not changed in either
direction.
"""

from __future__ import annotations

import io
import logging
import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from vllm_slo.core.routing.policy import Route
from vllm_slo.core.routing.virtual_replica import RoutedRequest
from vllm_slo.router.cluster import Choice, Cluster, Placement
from vllm_slo.router.event_stream import (
    CONNECTION_ERRORS,
    EventStream,
    ReplicaLostError,
    Stream,
    first_event,
    read_all,
    read_any,
)
from vllm_slo.router.front_errors import (
    REASON_HEADER,
    UNATTAINABLE,
    busy_response,
    decline_response,
    error_response,
    not_found,
)
from vllm_slo.router.front_headers import REPLICA_HEADER, REQUEST_ID, returned_headers
from vllm_slo.router.front_limits import Body
from vllm_slo.router.front_metrics import FrontMetrics
from vllm_slo.router.prompts import Prompt, TokenRatio
from vllm_slo.router.protocol import AGE_HEADER, TICKET_HEADER, TOKEN_HEADER, UNATTAINABLE_HEADER
from vllm_slo.router.upstream import Upstream
from vllm_slo.slo.verdicts import DECLINED_HEADER
from vllm_slo.wire.api_errors import is_anthropic

logger = logging.getLogger("vllm_slo.front")

LARGE_BODY_BYTES: Final = 1024 * 1024
RETRIED: Final = frozenset({500, 502, 503, 504})
_PROMPT_TOKENS: Final = re.compile(rb'"(?:prompt|input)_tokens": ?(\d{1,9})')


@dataclass(frozen=True, slots=True)
class Failed:
    """A try that failed before the answer began.

    ``reason``: a label value of ``vllm_slo:front_retries``.
    """

    reason: str
    response: web.Response | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica made no promise; it may be able to after ``retry_after_s``."""

    retry_after_s: float
    reason: str


@dataclass(slots=True)
class Relay:
    """The parts that all exchanges share."""

    cluster: Cluster
    metrics: FrontMetrics
    ratio: TokenRatio
    decline_status: int


@dataclass(frozen=True, slots=True)
class Wire:
    """A request as it is sent to replicas.

    Attributes:
        target: path and query.
        headers: to send, without the front's own.
        body: as received; released when no other replica can be tried.
        arrival_s: on the monotonic clock.
    """

    request: web.BaseRequest
    path: str
    target: str
    headers: CIMultiDict[str]
    body: Body
    request_id: str
    arrival_s: float


class Exchange:
    """One request and its answer.

    Args:
        routed: the request as routing sees it; None: no SLO routing (models, embeddings, ...).
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
        """Try replicas until there is an answer.

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
                # A replica that refused the request has counted it.
                self._metrics.declined.labels(self._routed.slo_class).inc()
            # The route has a prediction only if a shadow was asked.
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
        """Count the request once, with the first result that is certain."""
        if self._routed is None or self._counted:
            return
        self._counted = True
        self._metrics.requests.labels(result).inc()
        if route is None:
            return
        if self._routed.wants_promise:
            self._metrics.hops.observe(route.hops)
        # Other policies ask for no promise, so a missing promise means nothing.
        cluster = self._relay.cluster
        promised = result == "promised" or cluster.routing.policy != "slo"
        named = cluster.listed.get(route.target) if route.target else None
        shadows = [upstream.virtual for upstream in ([named] if named else cluster.listed.values())]
        work_s = next((shadow.work_s(self._routed) for shadow in shadows if shadow.state), None)
        if work_s is not None:
            final = replace(route, promised=promised)
            cluster.demand.routed(self._routed, final, time.monotonic(), work_s)

    # --- one try ---------------------------------------------------------------------------------

    async def _try(self, choice: Choice) -> web.StreamResponse | Failed | Refused:
        """Send the request to one replica and relay its answer to the end."""
        upstream = choice.upstream
        assert upstream is not None
        route, routed, now_s = choice.route, self._routed, time.monotonic()
        ticket = next(upstream.tickets)
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
            except (*CONNECTION_ERRORS, ReplicaLostError) as error:
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
        """Count the request when its answer is certain, before the client gets any of it."""
        self._wire.body.close()
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
            aiohttp.ClientError, OSError, ReplicaLostError: the connection failed.
        """
        status, declined = answer.status, answer.headers.get(DECLINED_HEADER)
        if status == 200 and answer.headers.get("Content-Type", "").startswith("text/event-stream"):
            head, error = await first_event(answer)
            return head if error is None else self._failed_event(upstream, error)
        body = await read_all(answer)
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

    def _failed_event(self, upstream: Upstream, error: Mapping[str, Any]) -> Failed:
        """A failed try for a stream that begins with an error; the client has got nothing yet."""
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
        """Pass a stream on; if the replica fails, the stream ends with an error event.

        Raises:
            ConnectionError: the client left.
        """
        headers = returned_headers(answer.headers, upstream, self._wire.request_id)
        response = Stream(status=200, reason=answer.reason, headers=headers)
        await response.prepare(self._wire.request)
        stream = EventStream(response, self._wire.path)
        try:
            async with upstream.exchange():
                await stream.take(head)
                while chunk := await read_any(answer):
                    await stream.take(chunk)
                await stream.end()
            self._learn(stream.last)
        except TimeoutError:
            await self._break_off(stream, upstream.abort_reason)
        except ReplicaLostError:
            await self._break_off(stream, "the replica that worked on this request failed")
        return response

    async def _break_off(self, stream: EventStream, reason: str) -> None:
        self._metrics.in_band_errors.inc()
        await stream.fail(f"{reason}; the answer ends here")

    def _learn(self, body: bytes) -> None:
        """Learn from the prompt's token count in an answer. Anthropic's count leaves out cached
        tokens, so it is not used."""
        if self._prompt is None or is_anthropic(self._wire.path):
            return
        count = _PROMPT_TOKENS.search(body, max(body.rfind(b'"usage"'), 0))
        if count:
            self._relay.ratio.learn(self._prompt, int(count[1]))


def _retry_after_s(declined: str) -> float:
    with suppress(ValueError):
        return float(declined) / 1000
    return 1.0
