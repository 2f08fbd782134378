# SPDX-License-Identifier: Apache-2.0
"""The live page on the front: that of one server, with the data of all replicas added up.

Each replica keeps its own past; that of one that has left is no longer shown.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any, Final

from aiohttp import ClientError, web

from vllm_slo.live.merge import merged
from vllm_slo.live.page import DATA_PATH, PAGE_PATH, page
from vllm_slo.router.openai_errors import SERVER_HEADER, error_response
from vllm_slo.router.protocol import TOKEN_HEADER
from vllm_slo.router.upstream import Upstream

__all__ = ["PATHS", "live_page"]

PATHS: Final = (PAGE_PATH, DATA_PATH)
PATIENCE_S: Final = 3.0
"""A replica that takes longer is left out: the page itself waits for six seconds."""


async def live_page(request: web.BaseRequest, upstreams: Collection[Upstream]) -> web.Response:
    """The answer to one of `PATHS`."""
    answer = page()
    headers = {**answer.headers, "Server": SERVER_HEADER}
    if request.path == PAGE_PATH:
        return web.Response(body=answer.body, headers=headers)
    since, coarse = request.query.get("since", ""), request.query.get("minutes") == "1"
    since = since if since.isascii() and since.isdigit() else "0"
    answers = await _ask(upstreams, since, coarse=coarse)
    if any(one["reset"] for one in answers) and since != "0":
        answers = await _ask(upstreams, "0", coarse=coarse)
    if not answers:
        text = "no replica answers; /replicas says how they are"
        return error_response(503, "ServiceUnavailableError", text)
    headers["content-type"] = "application/json"
    body = json.dumps(merged(answers, coarse=coarse), separators=(",", ":"), allow_nan=False)
    return web.Response(body=body.encode(), headers=headers)


async def _ask(
    upstreams: Collection[Upstream], since: str, *, coarse: bool
) -> list[dict[str, Any]]:
    """What the replicas say that answer in time."""
    target = f"{DATA_PATH}?since={since}{'&minutes=1' if coarse else ''}"
    said = await asyncio.gather(*(_data(one, target) for one in upstreams))
    return [one for one in said if one is not None]


async def _data(upstream: Upstream, target: str) -> dict[str, Any] | None:
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            upstream.request("GET", target, {TOKEN_HEADER: upstream.spec.token}, None) as answer,
        ):
            given = await answer.json()
    except (ClientError, OSError, ValueError):
        return None
    return given if answer.status == 200 and isinstance(given, dict) else None
