# SPDX-License-Identifier: Apache-2.0
"""The process of the decision service: it tells HAProxy where requests go, and serves the pages.

`python -m vllm_slo.router.decision_service --folder F --config JSON`, started by the front:

- stdin: JSON lines: ``{"replicas": [...]}`` with all replicas; ``{"generation": n}`` after each
  start of HAProxy; it drains at the end of stdin.
- stdout: JSON lines: ``{"deciding": true}`` once, then ``{"wanted", "ready", "load"}`` on change.
- SIGTERM: running requests have `RoutingConfig.drain_s` to end.

The private folder holds the Unix sockets; see `haproxy_config.FrontFolder`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from vllm_slo.core.jit import compile_package
from vllm_slo.errors import ConfigError
from vllm_slo.router.child_process import heed_signals, read_stdin, report_line, run
from vllm_slo.router.cluster import Cluster
from vllm_slo.router.decisions import Decision, Decisions, Refusal
from vllm_slo.router.exchanges import Exchanges
from vllm_slo.router.front_config import FrontConfig
from vllm_slo.router.front_errors import SERVER_HEADER, ErrorResponse, busy_response
from vllm_slo.router.front_metrics import FrontMetrics
from vllm_slo.router.front_page import FrontPages
from vllm_slo.router.front_quote import answer_quote
from vllm_slo.router.front_rules import encoded, refused
from vllm_slo.router.haproxy_admin import Place, ProxyAdmin
from vllm_slo.router.haproxy_config import BUFFER_BYTES, MAX_HEADERS, RESERVED_BYTES, FrontFolder
from vllm_slo.router.replica_spec import ReplicaSpec
from vllm_slo.router.request_reader import Request
from vllm_slo.router.upstream import Upstream
from vllm_slo.slo.body import MAX_BODY_BYTES
from vllm_slo.slo.carriers import QUOTE_ROUTE
from vllm_slo.wire.front_protocol import OWN_PREFIX, TICKET_HEADER

logger = logging.getLogger("vllm_slo.front")

ADMISSION: Final = "vllm_slo.core.admission"
"""The policy of which routing calls compiled functions."""
TICK_S: Final = 0.1
FIRST_STATES_S: Final = 1.0
"""Time for replicas to send their first state before this service decides without them."""
FIRST_STATES_POLL_S: Final = 0.01
LAST_WORDS_S: Final = 0.3
"""Time after a drain in which the requests that were cut off are refused."""
REPORT_S: Final = 1.0
_EXCHANGE: Final = f"{OWN_PREFIX}exchange"
_GENERATION: Final = f"{OWN_PREFIX}generation"
_TOTAL: Final = f"{OWN_PREFIX}total"
_LAST: Final = {f"{OWN_PREFIX}last": "1"}


class DecisionService:
    """Answers HAProxy's questions, and clients' requests for pages.

    ``report``: called with each message for the parent.
    """

    def __init__(
        self, config: FrontConfig, folder: FrontFolder, report: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self.admin = ProxyAdmin(folder.admin)
        self.cluster = Cluster(config.slo.routing, lambda one: self.admin.is_placed(one.spec.url))
        self.metrics = FrontMetrics()
        self.stop = asyncio.Event()
        self._decisions = Decisions(self.cluster, self.metrics, config.slo, asks_again=True)
        self.exchanges = Exchanges(self._decisions, self._cut)
        self.cluster.observer = self.exchanges
        self._pages = FrontPages(self.cluster, self.metrics, lambda: not self._draining)
        self._folder = folder
        self._report = report
        self._draining = False
        self._is_told = False
        self._cuts: set[asyncio.Task[None]] = set()

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until `stop` is set, then drain.

        Raises:
            OSError: a socket cannot be bound.
        """
        if self.cluster.routing.policy == "slo":
            compiled = compile_package(ADMISSION)
            if compiled.folder is None:
                logger.warning(compiled.complaint())
        gc.freeze()
        servers = [
            (_server(self.decide, BUFFER_BYTES), self._folder.decide),
            (_server(self.page, MAX_BODY_BYTES), self._folder.pages),
        ]
        await self._hear_of_replicas()
        loop = asyncio.get_running_loop()
        listeners = []  # uvloop closes a listener that nobody refers to
        for server, path in servers:
            path.unlink(missing_ok=True)  # of a predecessor that was killed
            listeners.append(await loop.create_unix_server(server, str(path), backlog=4096))
        tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self.admin.run())]
        self._report({"deciding": True})
        try:
            await self.stop.wait()
            await self._drain()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for listener in listeners:
                listener.close()
            for server, _ in servers:
                await server.shutdown(1.0)
            await self.cluster.close()
            self._decisions.close()

    async def _hear_of_replicas(self) -> None:
        """Wait for the list of replicas and the first state of each, at most `FIRST_STATES_S`.

        Until this service listens, HAProxy sends requests to the replicas that it knows from a
        service that was killed. A service that knows no state would refuse them.
        """
        end_s = time.monotonic() + FIRST_STATES_S
        while time.monotonic() < end_s:
            if self._is_told and all(each.ready for each in self.cluster.listed.values()):
                break
            await asyncio.sleep(FIRST_STATES_POLL_S)
        self._place(set())

    async def _drain(self) -> None:
        self._draining = True
        drain_s, running = self.cluster.routing.drain_s, self._decisions.running
        logger.info("draining: %d requests run, at most %g s", running, drain_s)
        end_s = time.monotonic() + drain_s
        while self._decisions.running and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
        if self._decisions.running:
            # Those whose answer has not begun are asked for again, and refused.
            self.cluster.is_open = False
            await asyncio.gather(*(self.admin.cut(each.spec.url) for each in self.cluster.all()))
            await asyncio.sleep(LAST_WORDS_S)

    async def _tick(self) -> None:
        before_s = reported_s = time.monotonic()
        reported: dict[str, Any] = {}
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            late_s = now_s - before_s - TICK_S
            before_s = now_s
            left = {each.spec.url for each in self.cluster.leaving}
            await self.cluster.tick(now_s, late_s if late_s > TICK_S else 0.0)
            self.exchanges.sweep(now_s)
            self._place(left)
            names = sorted(each.name for each in self.cluster.ready())
            load = self.cluster.demand.load(now_s)
            wanted = load.replicas(len(names))
            self.metrics.wanted.set(wanted)
            rounded = [float(f"{number:.3g}") for number in (load.work, load.refused)]
            news = {"wanted": wanted, "ready": names, "load": [load.asked, *rounded]}
            is_urgent = news["ready"] != reported.get("ready")
            if news != reported and (is_urgent or now_s - reported_s >= REPORT_S):
                reported, reported_s = news, now_s
                self._report(news)

    def _place(self, left: set[str]) -> None:
        """Say which replica HAProxy is to have where. ``left``: URLs that were leaving before."""
        kept = {each.spec.url for each in self.cluster.all()}
        for url in left - kept:
            self.admin.forget(url)
        listed = list(self.cluster.listed.values())
        if listed:
            self.admin.set_token(listed[0].spec.token)
        for each in listed:
            if each.address is not None:
                host, port = each.address
                fallback = each.ready and each.spec.token == self.admin.token
                try:
                    self.admin.want(each.spec.url, Place(host, port, fallback))
                except ValueError as error:
                    logger.error("replica %s: %s", each.name, error)

    def _cut(self, upstream: Upstream) -> None:
        task = asyncio.create_task(self.admin.cut(upstream.spec.url))
        self._cuts.add(task)
        task.add_done_callback(self._cuts.discard)

    # --- questions of HAProxy --------------------------------------------------------------------

    async def decide(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one question: a slot, or what the client gets."""
        arrival_s = time.monotonic()
        body = await request.read()
        await self.admin.settled(int(request.headers.get(_GENERATION) or 0))
        exchange = request.headers.get(_EXCHANGE) or ""
        verdict = await self._again(exchange) if exchange else None
        if verdict is None:
            if (refusal := refused(request)) is not None:
                return refusal.put_for(request.path)
            if self._draining:
                return busy_response("the server is stopping").put_for(request.path)
            verdict = await self._decisions.decide(_asked(request, body, arrival_s))
        if isinstance(verdict, Refusal):
            headers = {**verdict.headers, "Server": SERVER_HEADER}
            return web.Response(status=verdict.status, headers=headers, body=verdict.body)
        upstream = self.cluster.listed[verdict.replica.name]
        ticket = verdict.headers[TICKET_HEADER]
        self.exchanges.sent(verdict.exchange, ticket, upstream, is_last=verdict.is_last)
        return web.Response(headers=self._choice(verdict))

    async def _again(self, exchange: str) -> Decision | Refusal | None:
        """The next try of a request; None: it is not known here, or none is taken any more."""
        if self._draining and not self.cluster.is_open:
            return None
        refusal = await self.exchanges.refusal(exchange)
        try:
            if refusal is not None:
                verdict = self._decisions.again(exchange, refusal[0], refusal[1])
            else:
                verdict = self._decisions.again(exchange)
        except KeyError:
            return None
        if isinstance(verdict, Refusal):
            self.exchanges.gave_up(exchange)
        return verdict

    def _choice(self, decision: Decision) -> dict[str, str]:
        to_set = {**decision.headers, _EXCHANGE: decision.exchange}
        return {
            f"{OWN_PREFIX}slot": self.admin.slot(decision.replica.url),
            f"{OWN_PREFIX}replica": decision.replica.name,
            **(_LAST if decision.is_last else {}),
            **{f"{OWN_PREFIX}set-{name}": value for name, value in to_set.items()},
        }

    # --- requests of clients ---------------------------------------------------------------------

    async def page(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request for a page or a quote."""
        path = request.rel_url.raw_path
        if path == QUOTE_ROUTE:
            asked = _asked(request, await request.read(), time.monotonic())
            answer: web.StreamResponse = await answer_quote(
                self.cluster, self._decisions.reader, request, asked
            )
        elif "%" in path:
            answer = encoded(path)
        else:
            answer = await self._pages.answer(request, path)
        return answer.put_for(path) if isinstance(answer, ErrorResponse) else answer

    def take(self, message: Mapping[str, Any]) -> None:
        """One line of stdin.

        Raises:
            ValueError, TypeError, KeyError: it cannot be read.
        """
        if "generation" in message:
            self.admin.started(int(message["generation"]))
            return
        specs = [ReplicaSpec.from_json(entry) for entry in message["replicas"]]
        self._is_told = True
        if self.cluster.is_open:
            self.cluster.replace(specs)


def _asked(request: web.BaseRequest, body: bytes, arrival_s: float) -> Request:
    """A question as the decisions take it."""
    headers = [(name.lower(), value) for name, value in request.raw_headers]
    given = request.headers.get(_TOTAL)
    total = None if given is None else int(given)
    path = request.rel_url.raw_path
    return Request(request.method, path, headers, body, arrival_s, total)


def _server(handler: Any, body_bytes: int) -> web.Server:
    """An HTTP server with the limits of HAProxy, and room for what `haproxy.lua` adds."""

    make: Any = web.BaseRequest

    def request(*parts: Any) -> web.BaseRequest:
        made: web.BaseRequest = make(
            *parts, asyncio.get_running_loop(), client_max_size=body_bytes + 1
        )
        return made

    return web.Server(
        handler,
        request_factory=request,
        access_log=None,
        auto_decompress=False,
        handler_cancellation=True,
        max_line_size=RESERVED_BYTES,
        max_field_size=RESERVED_BYTES,
        max_headers=2 * MAX_HEADERS,
    )


async def _serve(config: FrontConfig, folder: FrontFolder) -> None:
    service = DecisionService(config, folder, report_line)
    heed_signals(service.stop)
    read_stdin(service.take, service.stop)
    await service.run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vllm_slo.router.decision_service")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--config", default="{}")
    given = parser.parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        run(_serve(FrontConfig.from_json(given.config), FrontFolder(given.folder)))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"vllm-slo: error: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
