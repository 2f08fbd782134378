# SPDX-License-Identifier: Apache-2.0
"""The pages that the front answers itself: health, metrics, replicas and the live page.

The live page is that of one server, with the data of all replicas added up. Each replica keeps its
own history; the history of a replica that has left is not shown. A replica is asked at most every
`KEPT_S`, however many clients ask, and only for the new part of its history.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from aiohttp import ClientError, web
from prometheus_client import CONTENT_TYPE_LATEST

from vllm_slo.live.merge import MergedHistory
from vllm_slo.live.page import DATA_PATH, PAGE_PATH, page
from vllm_slo.router.cluster import Cluster
from vllm_slo.router.front_errors import SERVER_HEADER, error_response, json_response, not_found
from vllm_slo.router.front_metrics import FrontMetrics
from vllm_slo.router.upstream import KEPT_S, Once, Upstream

PATHS: Final = (PAGE_PATH, DATA_PATH)
PATIENCE_S: Final = 3.0
"""Time for a replica to answer; a slower one is left out. The page itself waits six seconds."""


class LivePage:
    """The live page of the replicas in ``listed``, which change."""

    def __init__(self, listed: Mapping[str, Upstream]) -> None:
        self._histories = {coarse: _Histories(listed, coarse=coarse) for coarse in (False, True)}

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """The answer to one of `PATHS`."""
        answer = page()
        headers = {**answer.headers, "Server": SERVER_HEADER}
        if request.path == PAGE_PATH:
            return web.Response(body=answer.body, headers=headers)
        since = request.query.get("since", "")
        since_ms = int(since) if since.isascii() and since.isdigit() and len(since) < 16 else 0
        histories = self._histories[request.query.get("minutes") == "1"]
        if not await histories.newest.get():
            text = "no replica answers; /replicas shows their state"
            return error_response(503, "ServiceUnavailableError", text)
        headers["content-type"] = "application/json"
        return web.Response(body=histories.merged.answer(since_ms), headers=headers)


class _Histories:
    """The histories of the replicas in one resolution.

    ``newest``: brings `merged` up to date; whether any replica answered.
    """

    def __init__(self, listed: Mapping[str, Upstream], *, coarse: bool) -> None:
        self.merged = MergedHistory(coarse=coarse)
        self.newest = Once(self._look, KEPT_S)
        self._listed = listed
        self._query = "&minutes=1" if coarse else ""

    async def _look(self) -> bool:
        upstreams = list(self._listed.values())
        bodies = await asyncio.gather(*map(self._ask, upstreams))
        # Keys are addresses, because a restarted replica may have the name of its predecessor.
        urls = [upstream.spec.url for upstream in upstreams]
        answered = {url: body for url, body in zip(urls, bodies, strict=True) if body}
        return await asyncio.to_thread(self._take, answered, urls)

    async def _ask(self, upstream: Upstream) -> bytes | None:
        since = f"{DATA_PATH}?since={self.merged.known_ms(upstream.spec.url)}"
        try:
            status, body, _ = await upstream.get(since + self._query, PATIENCE_S)
        except (ClientError, OSError):
            return None
        return body if status == 200 else None

    def _take(self, answered: Mapping[str, bytes], listed: list[str]) -> bool:
        answers = {url: json.loads(body) for url, body in answered.items()}
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


class FrontPages:
    """The pages that the front answers itself.

    ``accepts``: whether the front takes new requests.
    """

    def __init__(
        self, cluster: Cluster, metrics: FrontMetrics, accepts: Callable[[], bool]
    ) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._accepts = accepts
        self._live = LivePage(cluster.listed)

    async def answer(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        if path.startswith("/metrics/replicas/") and request.method == "GET":
            name = path.removeprefix("/metrics/replicas/")
            return await replica_metrics(self._cluster.listed.get(name))
        if path in PATHS and request.method in ("GET", "HEAD"):
            return await self._live.answer(request)
        page = {
            "/health": self._health,
            "/-/healthz": self._health,  # KubeRay asks this path on the port of clients
            "/metrics": self._metrics_page,
            "/metrics/targets": self._targets,
            "/replicas": self._replicas,
        }.get(path)
        if page is None:
            return not_found(path)
        if request.method not in ("GET", "HEAD"):
            return error_response(405, "BadRequestError", f"{request.method} is not allowed here")
        return page(request)

    def _health(self, request: web.BaseRequest) -> web.Response:
        healthy = bool(self._cluster.ready()) and self._accepts()
        return web.Response(status=200 if healthy else 503, headers={"Server": SERVER_HEADER})

    def _metrics_page(self, request: web.BaseRequest) -> web.Response:
        body = self._metrics.page(self._cluster.listed.values(), time.monotonic())
        headers = {"Content-Type": CONTENT_TYPE_LATEST, "Server": SERVER_HEADER}
        return web.Response(body=body, headers=headers)

    def _targets(self, request: web.BaseRequest) -> web.Response:
        """Prometheus's HTTP service discovery: the metrics page of each replica, through this port.

        All have the front's address, so each has its own ``instance``.
        """
        host = request.headers.get("Host", "")
        targets = [
            {
                "targets": [host],
                "labels": {
                    "__metrics_path__": f"/metrics/replicas/{name}",
                    "instance": f"{host}/{name}",
                    "replica": name,
                },
            }
            for name in self._cluster.listed
        ]
        return json_response(json.dumps(targets).encode())

    def _replicas(self, request: web.BaseRequest) -> web.Response:
        now_s = time.monotonic()
        return json_response(
            json.dumps([self._shown(upstream, now_s) for upstream in self._cluster.all()]).encode()
        )

    def _shown(self, upstream: Upstream, now_s: float) -> dict[str, Any]:
        state, age_s = upstream.virtual.state, upstream.age_s(now_s)
        return {
            "name": upstream.name,
            "status": self._cluster.status(upstream),
            "running": None if state is None else state.running,
            "waiting": None if state is None else state.waiting,
            "outstanding": upstream.virtual.outstanding,
            "promised": 0 if state is None else len(state.committed) + sum(state.decoding.values()),
            "load_tokens": upstream.virtual.load_tokens,
            "state_age_s": None if age_s is None else round(age_s, 3),
        }
