# SPDX-License-Identifier: Apache-2.0
"""Where a request goes, for a data plane that carries the bytes itself.

The data plane (a proxy) describes a request and gets the address of a replica and the headers to
set, or an answer that refuses the request. It says when the answer begins and when the exchange
ends, and it asks again if the replica refused or failed.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import unquote

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.routing.policy import Route
from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.core.routing.virtual_replica import RoutedRequest
from vllm_slo.errors import InvalidSLOError
from vllm_slo.router.body_reader import UnreadError
from vllm_slo.router.cluster import Choice, Cluster, Placement
from vllm_slo.router.front_errors import (
    BUSY_RETRY_MS,
    REASON_HEADER,
    UNATTAINABLE,
    retry_after_ms,
    retry_headers,
)
from vllm_slo.router.front_metrics import FrontMetrics
from vllm_slo.router.prompts import Prompt
from vllm_slo.router.replica_spec import ReplicaSpec
from vllm_slo.router.request_reader import Request, RequestReader
from vllm_slo.router.upstream import Upstream
from vllm_slo.slo.verdicts import Declined
from vllm_slo.wire.api_errors import error_body
from vllm_slo.wire.front_protocol import (
    AGE_HEADER,
    TICKET_HEADER,
    TOKEN_HEADER,
    UNATTAINABLE_HEADER,
)

OWN_PATHS: Final = "/vllm-slo/"
"""Paths of replicas that the token opens. Clients do not get them."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The replica that gets a request.

    Attributes:
        exchange: names the request in later calls.
        headers: to set towards the replica, in place of all values that a client sent.
        removed: names of a client's headers that the replica must not get.
        fallbacks: replicas to try in turn if this one cannot be reached; they take the same
            ``headers``.
        promised: whether the shadow of the replica promises the objectives.
        is_last: whether the answer goes to the client, whatever it is: no other replica is tried.
    """

    exchange: str
    replica: ReplicaSpec
    headers: Mapping[str, str]
    removed: tuple[str, ...]
    fallbacks: tuple[ReplicaSpec, ...]
    promised: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer in place of a replica's. The request has ended."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class _Exchange:
    """A request that is under way.

    Attributes:
        routed: the request as routing sees it; None: it does not count as one.
        label: the result that is counted if it is served without a promise.
        route: of the last choice.
        reason: of the first replica that refused it.
    """

    name: str
    request: Request
    routed: RoutedRequest | None
    prompt: Prompt | None
    label: str
    placement: Placement
    route: Route | None = None
    upstream: Upstream | None = None
    ticket: int = 0
    reason: str | None = None
    counted: bool = False
    began: bool = False


class Decisions:
    """Decides for all requests of one data plane.

    Invariant: for each `Decision`, one request is outstanding at its replica's shadow until
    `ended`, or until `again` gives it to another replica or refuses it.

    Args:
        asks_again: whether the data plane calls `again` when a replica refuses. If not, the
            replica's refusal goes to the client, so replicas are told to refuse only requests
            that ask for it.
    """

    def __init__(
        self, cluster: Cluster, metrics: FrontMetrics, config: SLOConfig, *, asks_again: bool
    ) -> None:
        self.cluster = cluster
        self._metrics = metrics
        self._decline_status = config.decline_status
        self.reader = RequestReader(cluster, config.http_policy())
        self._asks_again = asks_again
        self._running: dict[str, _Exchange] = {}
        # One counter for all replicas, so that a fallback takes the ticket of the replica before
        # it. It grows over restarts, because a replica keeps the highest ticket it saw.
        self._tickets: Iterator[int] = itertools.count(time.time_ns() // 1_000 + 1)
        self._names: Iterator[int] = itertools.count(1)

    @property
    def running(self) -> int:
        """Requests that have been decided and have not ended."""
        return len(self._running)

    @property
    def bytes_per_token(self) -> float:
        """What answers taught about the length of prompts."""
        return self.reader.ratio.bytes_per_token

    def close(self) -> None:
        """End the process that reads large bodies."""
        self.reader.close()

    # --- the calls of the data plane -------------------------------------------------------------

    async def decide(
        self, request: Request, among: Collection[str] | None = None
    ) -> Decision | Refusal:
        """Choose a replica for a new request.

        ``among``: names of the replicas that may get it; None: all.
        """
        if OWN_PATHS in unquote(unquote(request.path)).lower():
            text = f"{request.path[:200]} is not served here"
            return _refusal(request.path, 404, "NotFoundError", text)
        routed, prompt, label = None, None, "no_slo"
        if request.needs_body:
            try:
                routed, prompt, label = await self.reader.read(request)
            except InvalidSLOError as error:
                if request.is_generation:
                    self._metrics.requests.labels("invalid").inc()
                return _refusal(request.path, 400, "BadRequestError", str(error), error.field)
            except UnreadError as error:
                return _busy(request.path, f"{error}; try again shortly")
        counted = None if request.is_quote else routed
        placement = Placement(self.cluster, counted, among)
        name = f"{next(self._names):x}"
        bodiless = replace(request, body=b"")  # a body may be large, and an answer takes long
        state = _Exchange(name, bodiless, counted, prompt, label, placement)
        if request.is_quote and routed is not None:
            return self._place_quote(state, routed, among)
        if request.needs_body:
            self.cluster.demand.came(time.monotonic())
        return self._place(state)

    def again(
        self, exchange: str, refused_retry_after_s: float | None = None, reason: str = "connection"
    ) -> Decision | Refusal:
        """Choose another replica for a request whose answer has not begun.

        Args:
            refused_retry_after_s: when the replica may be able to promise, if it refused; None:
                it failed.
            reason: the replica's reason for the refusal, or how it failed: a label of
                ``vllm_slo:front_retries``.

        Raises:
            KeyError: the exchange has ended.
        """
        state = self._running.pop(exchange)
        upstream = state.upstream
        assert upstream is not None and not state.began
        self._release(state)
        if refused_retry_after_s is not None and state.route is not None:
            self._metrics.refused_after_promise.inc()
            state.placement.refused(refused_retry_after_s)
            state.reason = state.reason or reason
        elif state.placement.failed(upstream):
            self._metrics.retries.labels(reason).inc()
        else:
            self._count(state, "unavailable")
            text = f"{state.placement.failures} replicas failed before they answered; try again"
            return _refusal(state.request.path, 502, "BadGatewayError", text)
        return self._place(state)

    def served(self, exchange: str, replica: str) -> None:
        """Note that a fallback has the request in place of the decided replica.

        Unknown exchanges and replicas are ignored.
        """
        state, other = self._running.get(exchange), self.cluster.listed.get(replica)
        if state is None or other is None or other is state.upstream:
            return
        self._release(state)
        self._metrics.retries.labels("connection").inc()
        self._take(state, other, state.ticket, promised=False)
        if state.route is not None:
            state.route = replace(state.route, target=replica, promised=False)

    def began(self, exchange: str, prompt_tokens: int | None = None) -> None:
        """Note that a replica's answer has begun; it is counted now.

        ``prompt_tokens``: as the replica counted them, if that is known already.
        """
        state = self._running.get(exchange)
        if state is None:
            return
        self.reader.learn(state.request, state.prompt, prompt_tokens)
        if state.began or state.upstream is None:
            return
        state.began = True
        upstream, promised = state.upstream, state.route is not None and state.route.promised
        upstream.virtual.began(state.ticket)
        if state.counted:  # it is a refusal or a failure
            return
        self._count(state, "promised" if promised else state.label)
        if state.prompt is not None:
            upstream.prefixes.add(state.prompt.chunks)
        if state.routed is not None:
            self._metrics.first_byte.observe(time.monotonic() - state.request.arrival_s)

    def declined(self, exchange: str) -> None:
        """Note that a replica's refusal goes to the client."""
        if (state := self._running.get(exchange)) is not None:
            self._count(state, "declined")

    def failed(self, exchange: str) -> None:
        """Note that a replica's error goes to the client."""
        if (state := self._running.get(exchange)) is not None:
            self._count(state, "unavailable")

    def ended(
        self, exchange: str, prompt_tokens: int | None = None, *, client_left: bool = False
    ) -> None:
        """Note that an exchange has ended in any way; unknown ones are ignored.

        Args:
            prompt_tokens: as the replica counted them.
            client_left: whether the client left before the end.
        """
        state = self._running.pop(exchange, None)
        if state is None:
            return
        self.reader.learn(state.request, state.prompt, prompt_tokens)
        if client_left:
            self._metrics.client_gone.inc()
        self._release(state)

    # --- placing ---------------------------------------------------------------------------------

    def _place(self, state: _Exchange) -> Decision | Refusal:
        before_s = time.monotonic()
        choice = state.placement.next(before_s)
        state.route = choice.route
        if choice.route is not None:
            self._metrics.decision.observe(time.monotonic() - before_s)
        if choice.upstream is None:
            return self._unplaced(state)
        return self._accept(state, choice, choice.upstream)

    def _place_quote(
        self, state: _Exchange, routed: RoutedRequest, among: Collection[str] | None
    ) -> Decision | Refusal:
        """Send a quote to the replica that would be asked first for the request itself.

        A quote counts neither as a request nor as demand.
        """
        for upstream in self.cluster.in_order(routed, time.monotonic()):
            if among is None or upstream.name in among:
                return self._accept(state, Choice(upstream, None, None), upstream)
        return self._unplaced(state)

    def _accept(self, state: _Exchange, choice: Choice, upstream: Upstream) -> Decision:
        promised = choice.route is not None and choice.route.promised
        self._running[state.name] = state
        self._take(state, upstream, next(self._tickets), promised=promised)
        age_ms = (time.monotonic() - state.request.arrival_s) * 1000
        headers = {TOKEN_HEADER: upstream.spec.token, AGE_HEADER: f"{max(age_ms, 0.0):.3f}"}
        headers[TICKET_HEADER] = str(Ticket(self.cluster.front, state.ticket))
        wish = None if state.routed is None else self._wish(choice)
        if wish is not None:
            headers[UNATTAINABLE_HEADER] = wish
        others = [other.spec for other in state.placement.fallbacks(choice)]
        fallbacks = tuple(spec for spec in others if spec.token == upstream.spec.token)
        return Decision(
            state.name,
            upstream.spec,
            headers,
            tuple(sorted(state.request.own_headers - headers.keys())),
            fallbacks,
            promised,
            wish != "decline" and (not others or self._is_last(state)),
        )

    def _is_last(self, state: _Exchange) -> bool:
        """Whether a failure of this try is the client's, though other replicas are there."""
        # A refusal that stands may have the status of a failure; the data plane sees no difference.
        may_be_declined = state.routed is not None and state.routed.declines
        return may_be_declined or state.placement.failures >= self.cluster.routing.retries

    def _wish(self, choice: Choice) -> str | None:
        """What the replica does if it cannot promise; None: as the request asks."""
        if self._asks_again:
            return choice.on_unattainable
        backup = self.cluster.routing.backup
        return None if backup == "as_asked" else backup

    def _take(self, state: _Exchange, upstream: Upstream, ticket: int, *, promised: bool) -> None:
        """Note at a replica that it gets the request."""
        state.upstream, state.ticket = upstream, ticket
        upstream.running += 1
        self._metrics.in_flight.inc()
        if state.routed is not None:
            upstream.virtual.sent(ticket, state.routed, time.monotonic(), promised=promised)

    def _release(self, state: _Exchange) -> None:
        """Note at its replica that the request has ended there."""
        assert state.upstream is not None
        state.upstream.virtual.ended(state.ticket)
        state.upstream.running -= 1
        self._metrics.in_flight.dec()
        state.upstream = None

    def _unplaced(self, state: _Exchange) -> Refusal:
        path, route, placement = state.request.path, state.route, state.placement
        if route is None or route.backup != "decline":
            self._count(state, "unavailable")
            return _busy(path, "no replica is ready; try again shortly")
        self._count(state, "declined")
        if state.routed is not None and not placement.refusals:
            # A replica that refused the request has counted it.
            self._metrics.declined.labels(state.routed.slo_class).inc()
        # The route has a prediction only if a shadow was asked.
        predicted_s = math.inf if route.reason is None else route.retry_after_s
        retry_ms = retry_after_ms(min(predicted_s, placement.retry_after_s))
        reason = state.reason or route.reason or UNATTAINABLE
        headers = {**retry_headers(retry_ms), REASON_HEADER: reason}
        text = Declined(retry_ms, reason).text
        return _refusal(path, self._decline_status, "slo_unattainable", text, "slo", headers)

    def _count(self, state: _Exchange, result: str) -> None:
        """Count the request once, with the first result that is certain."""
        routed, route = state.routed, state.route
        if routed is None or state.counted:
            return
        state.counted = True
        self._metrics.requests.labels(result).inc()
        if route is None:
            return
        if routed.wants_promise:
            self._metrics.hops.observe(route.hops)
        # Other policies ask for no promise, so a missing promise means nothing.
        cluster = self.cluster
        promised = result == "promised" or cluster.routing.policy != "slo"
        named = cluster.listed.get(route.target) if route.target else None
        shadows = [upstream.virtual for upstream in ([named] if named else cluster.listed.values())]
        work_s = next((shadow.work_s(routed) for shadow in shadows if shadow.state), None)
        if work_s is not None:
            final = replace(route, promised=promised)
            cluster.demand.routed(routed, final, time.monotonic(), work_s)


def _busy(path: str, text: str) -> Refusal:
    headers = retry_headers(BUSY_RETRY_MS)
    return _refusal(path, 503, "ServiceUnavailableError", text, headers=headers)


def _refusal(
    path: str,
    status: int,
    kind: str,
    text: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Refusal:
    body = json.dumps(error_body(path, status, kind, text, param)).encode()
    return Refusal(status, {"Content-Type": "application/json", **(headers or {})}, body)
