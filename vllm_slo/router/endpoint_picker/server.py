# SPDX-License-Identifier: Apache-2.0
"""The picker's servers: external processing and health over gRPC, metrics over HTTP."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CONTENT_TYPE_LATEST

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.jit import compile_package
from vllm_slo.errors import ConfigError
from vllm_slo.router.cluster import Cluster
from vllm_slo.router.decisions import Decisions
from vllm_slo.router.endpoint_picker import ext_proc
from vllm_slo.router.endpoint_picker.exchange import Exchange, Picker, host_of
from vllm_slo.router.endpoint_picker.tls import Certificate
from vllm_slo.router.front_metrics import FrontMetrics
from vllm_slo.router.replica_list import Source, address_of, watch
from vllm_slo.router.replica_spec import ReplicaSpec

logger = logging.getLogger("vllm_slo.endpoint_picker")

ADMISSION: Final = "vllm_slo.core.admission"
"""The policy of which routing calls compiled functions."""
TICK_S: Final = 0.1
FIRST_STATES_S: Final = 5.0
"""Longest time in which the picker waits for the first state of a replica before it says that it is
ready, seconds. Without any state it refuses all requests."""
READINESS: Final = ("", ext_proc.SERVICE, "readiness", "inference-extension")
"""Health services that tell whether the picker takes requests, by the protocol and by the names
that gateways' manifests ask for."""
LIVENESS: Final = "liveness"
OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),  # the gateway bounds what it buffers
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # a port in use is an error
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the picker listens.

    Attributes:
        host: address; empty: all.
        picker: of external processing; 0: any free one, as for the others.
        health: of health without TLS, for probes; None: there is none.
        metrics: of ``/metrics``; None: there is none.
    """

    host: str = ""
    picker: int = 9002
    health: int | None = 9003
    metrics: int | None = 9090


@dataclass(frozen=True, slots=True)
class IpsOnly:
    """A source of replicas whose addresses must be IPs, because gateways take no names."""

    source: Source

    async def read(self) -> list[ReplicaSpec]:
        """The replicas.

        Raises:
            ConfigError: as the source does, or a replica's host is a name.
            OSError: as the source does.
        """
        specs = await self.source.read()
        for spec in specs:
            try:
                ipaddress.ip_address(host_of(spec))
            except ValueError:
                raise ConfigError(
                    f"replica {spec.url}: a gateway takes IP addresses alone; give one, or let "
                    "--replicas-from DNS:name:port look the name up"
                ) from None
        return specs


class Service:
    """External processing: one stream for each request of a client."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker

    def handler(self) -> grpc.GenericRpcHandler:
        """What a gRPC server is given."""
        process = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=ext_proc.ProcessingRequest.FromString,
            response_serializer=ext_proc.ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(ext_proc.SERVICE, {ext_proc.METHOD: process})

    async def process(self, request_iterator: Any, context: Any) -> None:
        """Answer the messages of one request until the gateway closes the stream."""
        exchange = Exchange(self._picker)
        try:
            async for message in request_iterator:
                for answer in await exchange.take(message):
                    await context.write(answer)
                if exchange.is_refused:
                    return
        finally:
            exchange.end()


class PickerServer:
    """Serves a gateway until `stop` is set.

    ``certificate``: None: without TLS.
    """

    def __init__(
        self,
        config: SLOConfig,
        source: Source,
        ports: Ports,
        certificate: Certificate | None,
        fallbacks: int = 0,
    ) -> None:
        self.stop = asyncio.Event()
        self.cluster = Cluster(config.routing)
        self.metrics = FrontMetrics()
        decisions = Decisions(self.cluster, self.metrics, config, asks_again=False)
        self.picker = Picker(decisions, fallbacks)
        self.bound: dict[str, int] = {}
        """Name of a server -> its port."""
        self._source = IpsOnly(source)
        self._ports = ports
        self._certificate = certificate
        self._health = health.aio.HealthServicer()
        self._servers: list[Any] = []
        self._pages: web.AppRunner | None = None

    async def run(self) -> None:
        """Serve until `stop` is set, then drain.

        Raises:
            ConfigError: a port cannot be used, or the first list of replicas has a mistake.
        """
        if self.cluster.routing.policy == "slo":
            compiled = compile_package(ADMISSION)
            if compiled.folder is None:
                logger.warning(compiled.complaint())
        gc.freeze()
        watching = asyncio.create_task(watch(self._source, self.cluster.replace))
        others = [asyncio.create_task(self._tick()), asyncio.create_task(self._become_ready())]
        stopping = asyncio.create_task(self.stop.wait())
        try:
            await self._start()
            await asyncio.wait((watching, stopping), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                await watching  # it only ends with an error
            await self._drain()
        finally:
            for task in (watching, stopping, *others):
                task.cancel()
            await asyncio.gather(watching, stopping, *others, return_exceptions=True)
            await self._close()

    async def _start(self) -> None:
        ports = self._ports
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._set_ready(health_pb2.HealthCheckResponse.NOT_SERVING)
        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((Service(self.picker).handler(),))
        await self._listen(server, "picker", ports.picker, self._certificate)
        if ports.health is not None:
            await self._listen(grpc.aio.server(options=OPTIONS), "health", ports.health, None)
        if ports.metrics is not None:
            await self._serve_pages(ports.metrics)
        names = ", ".join(f"{name} on port {port}" for name, port in self.bound.items())
        logger.info("listens: %s; TLS: %s", names, self._certificate or "none")

    async def _listen(
        self, server: Any, name: str, port: int, certificate: Certificate | None
    ) -> None:
        address = address_of(self._ports.host or "::", port)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._servers.append(server)
        try:
            if certificate is None:
                self.bound[name] = server.add_insecure_port(address)
            else:
                self.bound[name] = server.add_secure_port(address, certificate.credentials())
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}; choose another port") from error
        await server.start()

    async def _serve_pages(self, port: int) -> None:
        async def page(_: web.Request) -> web.Response:
            text = self.metrics.page(self.cluster.all(), time.monotonic())
            return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

        app = web.Application()
        app.router.add_get("/metrics", page)
        self._pages = web.AppRunner(app, access_log=None)
        await self._pages.setup()
        site = web.TCPSite(self._pages, self._ports.host or None, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on port {port}: {error.strerror}; choose another --metrics-port"
            ) from error
        self.bound["metrics"] = self._pages.addresses[0][1]

    # --- while it runs ---------------------------------------------------------------------------

    async def _tick(self) -> None:
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            late_s = now_s - before_s - TICK_S
            before_s = now_s
            await self.cluster.tick(now_s, late_s if late_s > TICK_S else 0.0)
            load = self.cluster.demand.load(now_s)
            self.metrics.wanted.set(load.replicas(len(self.cluster.ready())))

    async def _become_ready(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_STATES_S):
                while not self._knows_all():
                    await asyncio.sleep(TICK_S / 2)
        await self._set_ready(health_pb2.HealthCheckResponse.SERVING)

    def _knows_all(self) -> bool:
        replicas: Sequence[Any] = list(self.cluster.listed.values())
        return bool(replicas) and all(each.virtual.state is not None for each in replicas)

    async def _set_ready(self, status: Any) -> None:
        for name in READINESS:
            await self._health.set(name, status)

    # --- the end ---------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Take no new streams, and let the running ones end."""
        drain_s = self.cluster.routing.drain_s
        running = self.picker.decisions.running
        logger.info("draining: %d requests run, at most %g s", running, drain_s)
        await self._set_ready(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._servers[0].stop(drain_s)

    async def _close(self) -> None:
        for server in self._servers:
            await server.stop(None)
        if self._pages is not None:
            await self._pages.cleanup()
        self.picker.decisions.close()
        await self.cluster.close()
