# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of the front: it checks requests, routes them and relays the answers.

`vllm_slo.router.front` runs it as a process.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import math
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from vllm_slo.config.model import CONFIG_KEY, SLOConfig
from vllm_slo.core.jit import compile_package
from vllm_slo.core.routing.virtual_replica import RoutedRequest
from vllm_slo.errors import ConfigError, InvalidSLOError
from vllm_slo.router.body_reader import Asked, BodyReader, UnreadError
from vllm_slo.router.cluster import Cluster
from vllm_slo.router.front_errors import (
    ErrorResponse,
    busy_response,
    error_response,
    not_found,
    unauthorized,
)
from vllm_slo.router.front_headers import REQUEST_ID, forwarded_headers
from vllm_slo.router.front_limits import Body, HeldBytes, Refusal, Server, allow_files, too_large
from vllm_slo.router.front_metrics import FrontMetrics
from vllm_slo.router.front_page import FrontPages
from vllm_slo.router.front_quote import answer_quote
from vllm_slo.router.prompts import Prompt, TokenRatio
from vllm_slo.router.relay import Exchange, Relay, Wire
from vllm_slo.router.upstream import Upstream
from vllm_slo.slo.body import MAX_BODY_BYTES, is_json_type
from vllm_slo.slo.carriers import QUOTE_ROUTE, ROUTES, slo_headers

logger = logging.getLogger("vllm_slo.front")

ADMISSION: Final = "vllm_slo.core.admission"
"""The policy of which routing calls compiled functions."""

TICK_S: Final = 0.1
REPORT_S: Final = 1.0
LAST_WORDS_S: Final = 2.0
"""Time after a drain for clients to receive the error that ends their stream."""
PROXIED: Final = frozenset({"/tokenize", "/detokenize", "/version"})
PROXIED_METHODS: Final = frozenset({"GET", "POST", "OPTIONS", "DELETE"})
ONE_REPLICA_ONLY: Final[Mapping[str, str]] = {
    "/v1/load_lora_adapter": "start the replicas with --lora-modules",
    "/v1/unload_lora_adapter": "restart the replicas without the adapter",
}


@dataclass(frozen=True, slots=True)
class FrontConfig:
    """The configuration of a front, from its command line.

    Attributes:
        served_model_names: for operators; vLLM checks the names itself.
        api_keys: SHA-256 of each accepted key; empty: no key is needed.
    """

    slo: SLOConfig
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[bytes, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> FrontConfig:
        """Read the argument of ``--config``.

        Raises:
            ConfigError: it cannot be used; one line with the reason.
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
            raise ConfigError("--config: an entry of api_key_sha256 is not a SHA-256")
        return cls(slo, names, keys)


class Front:
    """Serves clients until `stop` is set.

    Args:
        report: called with each message for the parent.
        epoch: returns epoch seconds, for `prefill_ddl`.
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
        self._pages = FrontPages(self.cluster, self.metrics, lambda: not self.draining)
        self._held = HeldBytes()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # --- life ------------------------------------------------------------------------------------

    async def run(self, host: str, port: int) -> None:
        """Serve until `stop` is set, then drain.

        Raises:
            OSError: the port cannot be used.
        """
        server = Server(self.handle, allow_files())
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            server, host or None, port, backlog=1024, start_serving=False
        )
        if self.cluster.routing.policy == "slo":
            compiled = compile_package(ADMISSION)
            if compiled.folder is None:
                logger.warning(compiled.complaint())
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
            server.pre_shutdown()  # closes idle connections
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
        reported: dict[str, int] = {}
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
            if news != reported and (not reported or now_s - reported_s >= REPORT_S):
                reported, reported_s = news, now_s
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
            # Written here, so that a drain does not end before the answer is written.
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
            if "%" in path:  # an encoded path could bypass the comparisons below
                response = not_found(path, "is not served here; send the path unencoded")
            elif path.startswith("/v1/") or path in PROXIED:
                with self.metrics.in_flight.track_inprogress(), closing(Body(self._held)) as body:
                    response = await self._forward(request, path, body, arrival_s)
            else:
                response = await self._pages.answer(request, path)
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
        """Refuse requests that can be refused without their body.

        Raises:
            Refusal: the answer to the request.
        """
        method = request.method
        if method not in PROXIED_METHODS:
            text = f"{method} is not allowed here"
            raise Refusal(error_response(405, "BadRequestError", text))
        if path.startswith("/v1/") and method != "OPTIONS" and not self._has_key(request):
            raise Refusal(unauthorized())
        query = request.rel_url.raw_query_string
        if not (path.isascii() and query.isascii() and _is_text(request.headers)):
            text = "the path is not ASCII, or a header is not UTF-8"
            raise Refusal(error_response(400, "BadRequestError", text))
        # Replicas would redirect a path with another slash at its end to their own address.
        if any(odd in f"{path}/" for odd in ("/../", "/./", "//")):
            raise Refusal(not_found(path))
        if path in ONE_REPLICA_ONLY:
            text = f"{path} would only reach one replica: {ONE_REPLICA_ONLY[path]}"
            raise Refusal(error_response(501, "NotImplementedError", text))
        if path.startswith("/v1/responses/"):
            text = "the replicas do not share stored responses: send the whole conversation instead"
            raise Refusal(error_response(501, "NotImplementedError", text))
        if self.draining:
            raise Refusal(busy_response("the server is stopping"))
        if (length := request.content_length) is not None and length > MAX_BODY_BYTES:
            raise too_large()

    def _has_key(self, request: web.BaseRequest) -> bool:
        """Whether a request has a configured API key, read as vLLM does, in constant time."""
        if not self._config.api_keys:
            return True
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        given = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        # All keys are compared, so that the time does not show which one it was.
        matches = [secrets.compare_digest(given, known) for known in self._config.api_keys]
        return any(matches)

    async def _read(
        self, request: web.BaseRequest, body: Body, arrival_s: float
    ) -> tuple[RoutedRequest, Prompt, str]:
        """A generation request as routing sees it, its prompt, and its result without a promise.

        Raises:
            InvalidSLOError: a carrier has a mistake, or two carriers disagree.
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


def _cached_tokens(
    upstreams: Sequence[Upstream], prompt: Prompt, ratio: TokenRatio
) -> dict[str, int]:
    """Replica -> prompt tokens that its prefix cache probably holds; without zeros."""
    each = ratio.chunk_tokens(prompt)
    matched = ((upstream.name, upstream.prefixes.matched(prompt.chunks)) for upstream in upstreams)
    return {name: int(count * each) for name, count in matched if count}


def _is_text(headers: Mapping[str, str]) -> bool:
    """Whether all headers are UTF-8; other bytes could not be passed on."""
    return not any(
        "\udc80" <= char <= "\udcff"
        for value in headers.values()
        if not value.isascii()
        for char in value
    )
