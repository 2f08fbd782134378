# SPDX-License-Identifier: Apache-2.0
"""A quote from several replicas: what a request would be promised if it was sent to the front.

The replicas are asked in the order in which routing would try the request. The first "yes" is the
answer; where there is none, the "no" whose offer is nearest to what was asked. Nothing is counted:
neither a request, nor a turn of round robin, nor demand.
"""

from __future__ import annotations

import json
import logging
import math
import time
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from vllm_slo.core.routing.virtual_replica import RoutedRequest
from vllm_slo.router.cluster import Cluster
from vllm_slo.router.front_errors import busy_response
from vllm_slo.router.protocol import TOKEN_HEADER
from vllm_slo.router.relay import RETRIED, Wire, returned_headers
from vllm_slo.router.upstream import Upstream

__all__ = ["answer_quote"]

logger = logging.getLogger("vllm_slo.front")


class _Answer(NamedTuple):
    """What a replica said: to be passed on, and the quote in it; None: it is an error."""

    response: web.Response
    quote: dict[str, Any] | None

    @property
    def is_busy(self) -> bool:
        """Whether the replica has too many quotes to work out already."""
        return self.response.headers.get("x-slo-reason") == "too_many_quotes"


async def answer_quote(cluster: Cluster, wire: Wire, routed: RoutedRequest) -> web.Response:
    """Ask until it is "yes"."""
    refusals: list[_Answer] = []
    failure: web.Response | None = None
    for upstream in cluster.in_order(routed, time.monotonic()):
        said = await _ask(upstream, wire)
        if said is None or said.response.status in RETRIED or said.is_busy:
            failure = failure if said is None else said.response
        elif said.quote is None or said.quote["promised"]:
            return said.response
        else:
            refusals.append(said)
    if refusals:
        return min(refusals, key=lambda one: _stretch(one.quote or {}, wire, routed)).response
    return failure or busy_response("no replica is ready, or none answers; try again shortly")


async def _ask(upstream: Upstream, wire: Wire) -> _Answer | None:
    """What one replica says; None: it does not answer."""
    headers = wire.headers.copy()
    headers[TOKEN_HEADER] = upstream.spec.token
    upstream.running += 1  # one that leaves waits for us
    try:
        async with (
            upstream.exchange(),
            upstream.request("POST", wire.target, headers, wire.body.data or None) as answer,
        ):
            body = await answer.read()
    except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is one: the replica is gone
        logger.warning("replica %s gives no quote: %r", upstream.name, error)
        return None
    finally:
        upstream.running -= 1
    kept = returned_headers(answer.headers, upstream, wire.request_id)
    response = web.Response(status=answer.status, reason=answer.reason, headers=kept, body=body)
    return _Answer(response, json.loads(body) if answer.status == 200 else None)


def _stretch(quote: dict[str, Any], wire: Wire, routed: RoutedRequest) -> tuple[float, float]:
    """(how many times as long as asked the objectives of the offer are, when to ask again)."""
    asked = {"ttft_ms": routed.deadline_s - wire.arrival_s, "tpot_ms": routed.tpot_s}
    offer = quote["cheapest"] or {}
    times = [ms / 1e3 / asked[name] for name, ms in offer.items() if ms is not None]
    return max(times, default=math.inf), quote["retry_after_ms"] or math.inf
