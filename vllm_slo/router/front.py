# SPDX-License-Identifier: Apache-2.0
"""The front: the one public port before several replicas.

`python -m vllm_slo.router.front --host H --port P --config JSON`, started and fed by a parent:

- stdin: JSON lines, each the whole set of replicas; its end means that the parent is gone.
- stdout: JSON lines: ``{"listening": url}`` once, then ``{"wanted": n, "ready": m}`` on change.
- SIGTERM, or the end of stdin: requests that run are given `RoutingConfig.drain_s` to end.

Exit status: 0 after a drain, 2 when it cannot start.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import logging
import math
import os
import secrets
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from vllm_slo.config.model import CONFIG_KEY, SLOConfig
from vllm_slo.core.routing.policy import route
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.virtual_replica import RoutedRequest, VirtualReplica
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand
from vllm_slo.errors import ConfigError, InvalidSLOError
from vllm_slo.router.body_reader import Asked, BodyReader, UnreadError
from vllm_slo.router.cluster import Cluster
from vllm_slo.router.front_errors import (
    SERVER_HEADER,
    ErrorResponse,
    busy_response,
    error_response,
    json_response,
    not_found,
    unauthorized,
)
from vllm_slo.router.front_limits import Body, HeldBytes, Refusal, Server, allow_files, too_large
from vllm_slo.router.front_metrics import FrontMetrics
from vllm_slo.router.front_page import PATHS, LivePage, replica_metrics
from vllm_slo.router.front_quote import answer_quote
from vllm_slo.router.prompts import Prompt, TokenRatio
from vllm_slo.router.relay import REQUEST_ID, Exchange, Relay, Wire, forwarded_headers
from vllm_slo.router.upstream import ReplicaSpec, Upstream
from vllm_slo.slo.carriers import (
    MAX_BODY_BYTES,
    QUOTE_ROUTE,
    ROUTES,
    is_json_type,
    slo_headers,
)

__all__ = ["Front", "FrontConfig", "main"]

logger = logging.getLogger("vllm_slo.front")

TICK_S: Final = 0.1
REPORT_S: Final = 1.0
LAST_WORDS_S: Final = 2.0
"""How long clients are given to take the error that ends their stream when a drain is over."""
MAX_STDIN_LINE_BYTES: Final = 16 * 1024 * 1024
PROXIED: Final = frozenset({"/tokenize", "/detokenize", "/version"})
PROXIED_METHODS: Final = frozenset({"GET", "POST", "OPTIONS", "DELETE"})
_NOT_HERE: Final[Mapping[str, str]] = {
    "/v1/load_lora_adapter": "start the replicas with --lora-modules",
    "/v1/unload_lora_adapter": "restart the replicas without the adapter",
}


@dataclass(frozen=True, slots=True)
class FrontConfig:
    """What the front is told on its command line.

    Attributes:
        slo: the operator's configuration.
        served_model_names: for operators; vLLM checks the names itself.
        api_keys: SHA-256 of each accepted key; empty: no key is asked for.
    """

    slo: SLOConfig
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[bytes, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> FrontConfig:
        """Read the argument of ``--config``.

        Raises:
            ConfigError: it cannot be used; one line that says why.
        """
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--config is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise ConfigError('--config: expected an object such as {"slo_config": null}')
        slo = SLOConfig.from_additional_config({CONFIG_KEY: given.get("slo_config")})
        try:
            names = tuple(str(name) for name in given.get("served_model_names") or ())
            keys = tuple(bytes.fromhex(key) for key in given.get("api_key_sha256") or ())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--config: {error}") from error
        if any(len(key) != hashlib.sha256().digest_size for key in keys):
            raise ConfigError("--config: api_key_sha256 holds something that is no SHA-256")
        return cls(slo, names, keys)


class Front:
    """Routes and drains; see the module's docstring for the protocol around it.

    Args:
        report: called with each line for the parent.
        epoch: epoch seconds, for `prefill_ddl`.
    """

    def __init__(
        self,
        config: FrontConfig,
        report: Callable[[Mapping[str, Any]], None],
        epoch: Callable[[], float] = time.time,
    ) -> None:
        self.cluster = Cluster(config.slo.routing)
        self.metrics = FrontMetrics()
        self.draining = False
        self.stop = asyncio.Event()
        self._config = config
        self._policy = config.slo.http_policy()
        self._epoch = epoch
        self._report = report
        self._relay = Relay(self.cluster, self.metrics, TokenRatio(), config.slo.decline_status)
        self._reader = BodyReader(self._policy)
        self._page = LivePage(self.cluster.listed)
        self._held = HeldBytes()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # --- life ------------------------------------------------------------------------------------

    async def run(self, host: str, port: int) -> None:
        """Serve until `stop` is set, then drain.

        Raises:
            OSError: the port cannot be had.
        """
        server = Server(self.handle, allow_files())
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            server, host or None, port, backlog=1024, start_serving=False
        )
        if self.cluster.routing.policy == "slo":
            warm_up()
        gc.freeze()
        await listener.start_serving()
        bound = listener.sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host or "0.0.0.0"
        self._report({"listening": f"http://{shown}:{bound}"})
        ticking = asyncio.create_task(self._tick())
        try:
            await self.stop.wait()
            self.draining = True
            listener.close()
            await self._drain()
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
            server.pre_shutdown()  # idle connections have nothing to wait for
            await server.shutdown(LAST_WORDS_S)
            await self.cluster.close("the server is stopping")
            self._reader.close()

    async def _drain(self) -> None:
        drain_s = self.cluster.routing.drain_s
        logger.info("draining: %d requests run, at most %g s", self._in_flight, drain_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
            return
        self.cluster.abort("the server is stopping")
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._idle.wait()

    async def _tick(self) -> None:
        before_s = reported_s = time.monotonic()
        said: dict[str, int] = {}
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            late_s = now_s - before_s - TICK_S
            before_s = now_s
            await self.cluster.tick(now_s, late_s if late_s > TICK_S else 0.0)
            ready = len(self.cluster.ready())
            wanted = self.cluster.demand.wanted(ready, now_s)
            self.metrics.wanted.set(wanted)
            news = {"wanted": wanted, "ready": ready}
            if news != said and (not said or now_s - reported_s >= REPORT_S):
                said, reported_s = news, now_s
                self._report(news)

    # --- requests --------------------------------------------------------------------------------

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request.

        Raises:
            ConnectionError: the client left.
        """
        arrival_s = time.monotonic()
        self._in_flight += 1
        self._idle.clear()
        try:
            response = await self._answer(request, arrival_s)
            if self.draining and not response.prepared:
                response.force_close()
            # Written here, so that a drain does not end before the answer is out.
            await response.prepare(request)
            await response.write_eof()
            return response
        except (ConnectionError, asyncio.CancelledError):
            self.metrics.client_gone.inc()
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _answer(self, request: web.BaseRequest, arrival_s: float) -> web.StreamResponse:
        path = request.rel_url.raw_path
        response: web.StreamResponse
        try:
            if "%" in path:  # it could name what is matched below by another name
                response = not_found(path, "is not served here; send the path unencoded")
            elif path.startswith("/v1/") or path in PROXIED:
                with self.metrics.in_flight.track_inprogress(), Body(self._held) as body:
                    response = await self._forward(request, path, body, arrival_s)
            else:
                response = await self._own_page(request, path)
        except Refusal as refusal:
            response = refusal.response
        return response.put_for(path) if isinstance(response, ErrorResponse) else response

    async def _forward(
        self, request: web.BaseRequest, path: str, body: Body, arrival_s: float
    ) -> web.StreamResponse:
        self._check(request, path)
        is_quote = path == QUOTE_ROUTE and request.method == "POST"
        is_generation = path in ROUTES and request.method == "POST"
        await body.read(request)
        request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
        query = request.rel_url.raw_query_string
        wire = Wire(
            request,
            path,
            f"{path}?{query}" if query else path,
            forwarded_headers(request.headers, request_id),
            body,
            request_id,
            arrival_s,
        )
        if not is_generation and not is_quote:
            return await Exchange(self._relay, wire).answer()
        try:
            routed, prompt, label = await self._read(request, body, arrival_s)
        except InvalidSLOError as error:
            if is_generation:
                self.metrics.requests.labels("invalid").inc()
            return error_response(400, "BadRequestError", str(error), error.field)
        if is_quote:
            return await answer_quote(self.cluster, wire, routed)
        return await Exchange(self._relay, wire, routed, prompt, label).answer()

    def _check(self, request: web.BaseRequest, path: str) -> None:
        """Refuse what needs no look at the body.

        Raises:
            Refusal: the request is answered.
        """
        method = request.method
        if method not in PROXIED_METHODS:
            text = f"{method} is not allowed here"
            raise Refusal(error_response(405, "BadRequestError", text))
        if path.startswith("/v1/") and method != "OPTIONS" and not self._lets_in(request):
            raise Refusal(unauthorized())
        query = request.rel_url.raw_query_string
        if not (path.isascii() and query.isascii() and _is_text(request.headers)):
            text = "the path is not ASCII, or a header is not UTF-8"
            raise Refusal(error_response(400, "BadRequestError", text))
        # Replicas would lead a path with another slash at its end to their own address.
        if any(odd in f"{path}/" for odd in ("/../", "/./", "//")):
            raise Refusal(not_found(path))
        if path in _NOT_HERE:
            text = f"{path} would reach one replica only: {_NOT_HERE[path]}"
            raise Refusal(error_response(501, "NotImplementedError", text))
        if path.startswith("/v1/responses/"):
            text = "the replicas do not share stored responses: send the whole conversation instead"
            raise Refusal(error_response(501, "NotImplementedError", text))
        if self.draining:
            raise Refusal(busy_response("the server is stopping"))
        if (length := request.content_length) is not None and length > MAX_BODY_BYTES:
            raise too_large()

    def _lets_in(self, request: web.BaseRequest) -> bool:
        """Whether the key is one of those configured; as vLLM reads it, in constant time."""
        if not self._config.api_keys:
            return True
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        given = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        # All are compared: the time must not tell which one it was.
        matches = [secrets.compare_digest(given, known) for known in self._config.api_keys]
        return any(matches)

    async def _read(
        self, request: web.BaseRequest, body: Body, arrival_s: float
    ) -> tuple[RoutedRequest, Prompt, str]:
        """What a generation request asks for, and how it counts if it gets no promise.

        Raises:
            InvalidSLOError: a carrier holds a mistake, or two carriers disagree.
            Refusal: the body could not be read now.
        """
        asked = None
        if is_json_type(request.headers.get("Content-Type", "")):
            headers = slo_headers(request.raw_headers)
            try:
                asked = await self._reader.read(body.data, headers, self._epoch())
            except UnreadError as error:
                raise Refusal(busy_response(f"{error}; try again shortly")) from error
        if asked is None:
            return RoutedRequest(1), Prompt(), "no_slo"
        label = "no_slo" if asked.slo is None else "best_effort"
        return self._routed(asked, arrival_s), asked.prompt, label

    def _routed(self, asked: Asked, arrival_s: float) -> RoutedRequest:
        ratio, prompt, slo = self._relay.ratio, asked.prompt, asked.slo
        cached = _cached_tokens(self.cluster.ready(), prompt, ratio) if prompt.chunks else {}
        tokens, most = ratio.tokens(prompt), asked.max_tokens
        if slo is None:
            return RoutedRequest(tokens, most, cached_tokens=cached)
        guaranteed = slo.effective_tier == "guaranteed" and slo.has_objective
        return RoutedRequest(
            tokens,
            most,
            math.inf if slo.ttft_ms is None else arrival_s + slo.ttft_ms / 1000,
            math.inf if slo.tightest_tpot_ms is None else slo.tightest_tpot_ms / 1000,
            guaranteed,
            slo.on_unattainable == "decline",
            slo.slo_class or "custom",
            slo.expected_output_tokens,
            cached,
        )

    # --- pages of the front's own ----------------------------------------------------------------

    async def _own_page(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        if path.startswith("/metrics/replicas/") and request.method == "GET":
            name = path.removeprefix("/metrics/replicas/")
            return await replica_metrics(self.cluster.listed.get(name))
        if path in PATHS and request.method in ("GET", "HEAD"):
            return await self._page.answer(request)
        page = {
            "/health": self._health,
            "/-/healthz": self._health,  # what KubeRay asks the port that clients use
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
        healthy = bool(self.cluster.ready()) and not self.draining
        return web.Response(status=200 if healthy else 503, headers={"Server": SERVER_HEADER})

    def _metrics_page(self, request: web.BaseRequest) -> web.Response:
        body = self.metrics.page(self.cluster.listed.values(), time.monotonic())
        headers = {"Content-Type": CONTENT_TYPE_LATEST, "Server": SERVER_HEADER}
        return web.Response(body=body, headers=headers)

    def _targets(self, request: web.BaseRequest) -> web.Response:
        """Prometheus's HTTP service discovery: each replica's page, through this port.

        The address of all is the front's, so that without an ``instance`` they would be one.
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
            for name in self.cluster.listed
        ]
        return json_response(json.dumps(targets).encode())

    def _replicas(self, request: web.BaseRequest) -> web.Response:
        now_s = time.monotonic()
        return json_response(
            json.dumps([_shown(one, now_s) for one in self.cluster.all()]).encode()
        )


def _shown(one: Upstream, now_s: float) -> dict[str, Any]:
    """A replica as operators see it."""
    state, age_s = one.virtual.state, one.age_s(now_s)
    return {
        "name": one.name,
        "status": one.status,
        "running": None if state is None else state.running,
        "waiting": None if state is None else state.waiting,
        "outstanding": one.virtual.outstanding,
        "promised": 0 if state is None else len(state.committed) + sum(state.decoding.values()),
        "load_tokens": one.virtual.load_tokens,
        "state_age_s": None if age_s is None else round(age_s, 3),
    }


def _cached_tokens(
    upstreams: Sequence[Upstream], prompt: Prompt, ratio: TokenRatio
) -> dict[str, int]:
    """Replica -> prompt tokens that its prefix cache is believed to hold; without zeros."""
    each = ratio.chunk_tokens(prompt)
    matched = ((one.name, one.prefixes.matched(prompt.chunks)) for one in upstreams)
    return {name: int(count * each) for name, count in matched if count}


def _is_text(headers: Mapping[str, str]) -> bool:
    """Whether no header holds bytes that are not UTF-8: they could not be passed on."""
    return not any(
        "\udc80" <= char <= "\udcff"
        for value in headers.values()
        if not value.isascii()
        for char in value
    )


def warm_up() -> None:
    """Load what judges promises (compiled code, about a second) before anybody waits for it."""
    demand = Demand("", math.inf, 1, 0.1, 1)
    state = ReplicaState(
        StepTimeModel.prior(),
        committed=(demand,),
        decoding={0.1: 1},
        free_blocks=100.0,
        total_blocks=100,
        block_sizes=(16,),
        seats=8,
        max_step_tokens=512,
        max_model_len=1024,
    )
    shadow = VirtualReplica("")
    shadow.update(state, 0.0)
    for ttft_s in (1e-6, 10.0):
        asked = RoutedRequest(64, 16, ttft_s, 0.1, wants_promise=True)
        route(asked, [shadow], 0.0, rng=Random(0))


def _report_line(message: Mapping[str, Any]) -> None:
    """One line on stdout; lost rather than waited for when the parent does not read."""
    with suppress(OSError):
        os.write(1, json.dumps(message).encode() + b"\n")


def _read_stdin(loop: asyncio.AbstractEventLoop, front: Front) -> None:
    """Thread: hand every line of stdin to the loop; its end stops the front."""
    held = b""
    with suppress(OSError):
        while chunk := os.read(0, 65_536):
            *lines, held = (held + chunk).split(b"\n")
            if len(held) > MAX_STDIN_LINE_BYTES:
                break
            for line in lines:
                loop.call_soon_threadsafe(_take_replicas, front, line)
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(front.stop.set)


def _take_replicas(front: Front, line: bytes) -> None:
    try:
        given = json.loads(line)["replicas"]
        specs = [ReplicaSpec.from_json(one) for one in given]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        logger.error("a line on stdin is not understood: %s", type(error).__name__)
        return
    if front.cluster.is_open:
        front.cluster.replace(specs)


async def _serve(config: FrontConfig, host: str, port: int) -> None:
    front = Front(config, _report_line)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, front.stop.set)
    threading.Thread(target=_read_stdin, args=(loop, front), daemon=True).start()
    await front.run(host, port)


def _run(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where it can be imported."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the front."""
    parser = argparse.ArgumentParser(prog="python -m vllm_slo.router.front")
    parser.add_argument("--host", default="")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--config", default="{}")
    given = parser.parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        config = FrontConfig.from_json(given.config)
        with suppress(OSError):
            os.set_blocking(1, False)
        _run(_serve(config, given.host, given.port))
    except (ConfigError, OSError, OverflowError) as error:
        sys.stderr.write(f"vllm-slo: error: {_one_line(error, given)}\n")
        return 2
    return 0


def _one_line(error: BaseException, given: argparse.Namespace) -> str:
    if isinstance(error, OSError | OverflowError):
        reason = getattr(error, "strerror", None) or error
        return f"cannot listen on {given.host or '*'}:{given.port}: {reason}; choose another --port"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
