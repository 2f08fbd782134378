# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-slo endpoint-picker``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_slo.arguments import port, whole
from vllm_slo.config.model import SLOConfig
from vllm_slo.errors import ConfigError
from vllm_slo.router.replica_flags import add_arguments as add_replica_flags
from vllm_slo.router.replica_flags import source_of_arguments

if TYPE_CHECKING:
    from vllm_slo.router.endpoint_picker.server import PickerServer
    from vllm_slo.router.endpoint_picker.tls import Certificate

logger = logging.getLogger("vllm_slo.endpoint_picker")

MODULES = ("aiohttp", "cryptography", "google", "grpc", "grpc_health")
"""What the extra ``gateway`` brings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_replica_flags(parser)
    parser.add_argument("--slo-config", metavar="FILE", help="the replicas' SLO configuration")
    parser.add_argument(
        "--host", default="", metavar="ADDRESS", help="address to listen on; default: all"
    )
    for flag, default, text in (
        ("--port", 9002, "port for gateways"),
        ("--health-port", 9003, "gRPC health without TLS, for probes"),
        ("--metrics-port", 9090, "port of /metrics"),
    ):
        parser.add_argument(
            flag, type=port, default=default, metavar="N", help=f"{text} ({default})"
        )
    tls = parser.add_argument_group("TLS, by default with a self-signed certificate")
    tls.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    tls.add_argument("--tls-key", metavar="FILE", help="its key, PEM")
    tls.add_argument("--plaintext", action="store_true", help="no TLS towards gateways")
    parser.add_argument(
        "--fallbacks",
        type=whole(0),
        default=0,
        metavar="N",
        help="name up to N further replicas for the gateway to try if it cannot reach the first "
        "(0); not every gateway reads more than one",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Raises:
        ConfigError: an argument cannot be used.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    for name in ("vllm_slo.endpoint_picker", "vllm_slo.front"):
        logging.getLogger(name).setLevel(logging.INFO)
    asyncio.run(_serve(args))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    server = _server(args)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop.set)
    await server.run()


def _server(args: argparse.Namespace) -> PickerServer:
    """The server that the arguments describe.

    Raises:
        ConfigError: one of them cannot be used.
    """
    if bool(args.tls_cert) != bool(args.tls_key) or (args.plaintext and args.tls_cert):
        raise ConfigError("give --tls-cert and --tls-key together, or --plaintext, or none of them")
    config = SLOConfig.load(args.slo_config)
    source = source_of_arguments(args)
    try:
        from vllm_slo.router.endpoint_picker.server import PickerServer, Ports
        from vllm_slo.router.endpoint_picker.tls import Certificate
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in MODULES:
            raise
        raise ConfigError(
            f"{error.name} is not installed; run: pip install 'vllm-slo[gateway]'"
        ) from error
    certificate: Certificate | None = None
    if not args.plaintext:
        files = (Path(args.tls_cert), Path(args.tls_key)) if args.tls_cert else None
        certificate = Certificate(files)
    ports = Ports(args.host, args.port, args.health_port, args.metrics_port)
    return PickerServer(config, source, ports, certificate, args.fallbacks)
