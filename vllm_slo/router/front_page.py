# SPDX-License-Identifier: Apache-2.0
"""What the front shows of its replicas to anybody: the live page, and each one's own metrics.

The page is that of one server, with the data of all replicas added up. Each replica keeps its own
past; that of one that has left is no longer shown. However many ask, a replica is asked at most
every `KEPT_S`, and of its past only for what is new.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Final

from aiohttp import ClientError, web

from vllm_slo.live.merge import MergedHistory
from vllm_slo.live.page import DATA_PATH, PAGE_PATH, page
from vllm_slo.router.front_errors import SERVER_HEADER, error_response
from vllm_slo.router.once import KEPT_S, Once
from vllm_slo.router.upstream import Upstream

__all__ = ["PATHS", "LivePage", "replica_metrics"]

PATHS: Final = (PAGE_PATH, DATA_PATH)
PATIENCE_S: Final = 3.0
"""A replica that takes longer is left out: the page itself waits for six seconds."""


class LivePage:
    """The live page of the replicas in ``listed``, which change."""

    def __init__(self, listed: Mapping[str, Upstream]) -> None:
        self._pasts = {coarse: _Past(listed, coarse=coarse) for coarse in (False, True)}

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """The answer to one of `PATHS`."""
        answer = page()
        headers = {**answer.headers, "Server": SERVER_HEADER}
        if request.path == PAGE_PATH:
            return web.Response(body=answer.body, headers=headers)
        since = request.query.get("since", "")
        since_ms = int(since) if since.isascii() and since.isdigit() and len(since) < 16 else 0
        past = self._pasts[request.query.get("minutes") == "1"]
        if not await past.newest.get():
            text = "no replica answers; /replicas says how they are"
            return error_response(503, "ServiceUnavailableError", text)
        headers["content-type"] = "application/json"
        return web.Response(body=past.merged.answer(since_ms), headers=headers)


class _Past:
    """What the replicas say of their past, in one resolution.

    Attributes:
        merged: all of it.
        newest: brings `merged` up to date; whether any replica answered.
    """

    def __init__(self, listed: Mapping[str, Upstream], *, coarse: bool) -> None:
        self.merged = MergedHistory(coarse=coarse)
        self.newest = Once(self._look, KEPT_S)
        self._listed = listed
        self._query = "&minutes=1" if coarse else ""

    async def _look(self) -> bool:
        upstreams = list(self._listed.values())
        bodies = await asyncio.gather(*map(self._ask, upstreams))
        # By their addresses: a replica that was started anew may have the name of the one before.
        names = [one.spec.url for one in upstreams]
        said = {name: body for name, body in zip(names, bodies, strict=True) if body}
        return await asyncio.to_thread(self._take, said, names)

    async def _ask(self, upstream: Upstream) -> bytes | None:
        since = f"{DATA_PATH}?since={self.merged.known_ms(upstream.spec.url)}"
        try:
            status, body, _ = await upstream.get(since + self._query, PATIENCE_S)
        except (ClientError, OSError):
            return None
        return body if status == 200 else None

    def _take(self, said: Mapping[str, bytes], listed: list[str]) -> bool:
        answers = {name: json.loads(body) for name, body in said.items()}
        if answers:
            self.merged.take(answers, listed)
        return bool(answers)


async def replica_metrics(upstream: Upstream | None) -> web.Response:
    """The ``/metrics`` of one replica, if there is one."""
    if upstream is None:
        return error_response(404, "NotFoundError", "there is no replica of that name")
    try:
        status, body, kind = await upstream.metrics.get()
    except (ClientError, OSError) as error:
        text = f"the replica does not answer ({type(error).__name__})"
        return error_response(503, "ServiceUnavailableError", text)
    headers = {"Content-Type": kind, "Server": SERVER_HEADER}
    return web.Response(status=status, body=body, headers=headers)
