# SPDX-License-Identifier: Apache-2.0
"""A quote from several replicas: what the front would promise a request if it was sent now.

The front asks the replicas in the order in which it would try the request. The first "yes" is the
answer. Without one it is the "no" whose offer is nearest to what was asked. A quote does not count
as a request, as a turn of round robin or as demand.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp import web

from vllm_slo.core.routing.virtual_replica import RoutedRequest
from vllm_slo.errors import InvalidSLOError
from vllm_slo.router.body_reader import UnreadError
from vllm_slo.router.cluster import Cluster
from vllm_slo.router.front_errors import busy_response, error_response
from vllm_slo.router.front_headers import REQUEST_ID, forwarded_headers, returned_headers
from vllm_slo.router.request_reader import Request, RequestReader
from vllm_slo.router.upstream import Upstream
from vllm_slo.wire.front_protocol import RETRIED, TOKEN_HEADER

logger = logging.getLogger("vllm_slo.front")

PATIENCE_S: Final = 5.0
"""Time for a replica to answer."""


class _Answer(NamedTuple):
    """A replica's answer, and the quote in it; None if the answer is an error."""

    response: web.Response
    quote: dict[str, Any] | None

    @property
    def is_busy(self) -> bool:
        """Whether the replica works on too many quotes already."""
        return self.response.headers.get("x-slo-reason") == "too_many_quotes"


async def answer_quote(
    cluster: Cluster, reader: RequestReader, request: web.BaseRequest, asked: Request
) -> web.Response:
    """Ask replicas until one says "yes"; returns that answer or the best other one.

    ``asked``: the request as routing reads it.
    """
    try:
        routed, _, _ = await reader.read(asked)
    except InvalidSLOError as error:
        return error_response(400, "BadRequestError", str(error), error.field)
    except UnreadError as error:
        return busy_response(f"{error}; try again shortly")
    refusals: list[_Answer] = []
    failure: web.Response | None = None
    for upstream in cluster.in_order(routed, time.monotonic()):
        answer = await _ask(upstream, request, asked.body)
        if answer is None or answer.response.status in RETRIED or answer.is_busy:
            failure = failure if answer is None else answer.response
        elif answer.quote is None or answer.quote["promised"]:
            return answer.response
        else:
            refusals.append(answer)
    if refusals:
        arrival_s = asked.arrival_s
        nearest = min(refusals, key=lambda one: _stretch(one.quote or {}, routed, arrival_s))
        return nearest.response
    return failure or busy_response("no replica is ready, or none answers; try again shortly")


async def _ask(upstream: Upstream, request: web.BaseRequest, body: bytes) -> _Answer | None:
    """One replica's answer; None if it does not answer."""
    request_id = request.headers.get(REQUEST_ID, "")
    headers = forwarded_headers(request.headers, request_id)
    headers[TOKEN_HEADER] = upstream.spec.token
    upstream.running += 1  # a replica that leaves waits for this
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            upstream.request("POST", request.rel_url.raw_path_qs, headers, body or None) as answer,
        ):
            said = await answer.read()
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError, too
        logger.warning("replica %s gives no quote: %r", upstream.name, error)
        return None
    finally:
        upstream.running -= 1
    kept = returned_headers(answer.headers, upstream, request_id)
    response = web.Response(status=answer.status, reason=answer.reason, headers=kept, body=said)
    return _Answer(response, json.loads(said) if answer.status == 200 else None)


def _stretch(quote: dict[str, Any], routed: RoutedRequest, arrival_s: float) -> tuple[float, float]:
    """Largest ratio of an offered to an asked objective, and when to ask again."""
    asked = {"ttft_ms": routed.deadline_s - arrival_s, "tpot_ms": routed.tpot_s}
    offer = quote["cheapest"] or {}
    times = [ms / 1e3 / asked[name] for name, ms in offer.items() if ms is not None]
    return max(times, default=math.inf), quote["retry_after_ms"] or math.inf
