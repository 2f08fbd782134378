# SPDX-License-Identifier: Apache-2.0
"""Requests that a front refuses without asking a replica, whatever their body says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiohttp import web

from vllm_slo.router.front_errors import ErrorResponse, error_response, not_found
from vllm_slo.router.haproxy_config import ROUTED_PATHS

PROXIED: Final = frozenset(ROUTED_PATHS)
PROXIED_METHODS: Final = frozenset({"GET", "POST", "OPTIONS", "DELETE"})
ONE_REPLICA_ONLY: Final[Mapping[str, str]] = {
    "/v1/load_lora_adapter": "start the replicas with --lora-modules",
    "/v1/unload_lora_adapter": "restart the replicas without the adapter",
}


def refused(request: web.BaseRequest) -> ErrorResponse | None:
    """The answer to a request that goes to no replica; None: it may go."""
    path, method = request.rel_url.raw_path, request.method
    if method not in PROXIED_METHODS:
        return error_response(405, "BadRequestError", f"{method} is not allowed here")
    if "%" in path:  # an encoded path could bypass the comparisons below
        return encoded(path)
    if not (path.startswith("/v1/") or path in PROXIED):
        return not_found(path)
    if not _is_text(request.headers):
        return error_response(400, "BadRequestError", "a header is not UTF-8")
    # Replicas would redirect a path with another slash at its end to their own address.
    if any(odd in f"{path}/" for odd in ("/../", "/./", "//")):
        return not_found(path)
    if path in ONE_REPLICA_ONLY:
        text = f"{path} would only reach one replica: {ONE_REPLICA_ONLY[path]}"
        return error_response(501, "NotImplementedError", text)
    if path.startswith("/v1/responses/"):
        text = "the replicas do not share stored responses: send the whole conversation instead"
        return error_response(501, "NotImplementedError", text)
    return None


def encoded(path: str) -> ErrorResponse:
    """The answer to a request whose path has percent signs."""
    return not_found(path, "is not served here; send the path unencoded")


def _is_text(headers: Mapping[str, str]) -> bool:
    """Whether all headers are UTF-8; other bytes could not be passed on."""
    return not any(
        "\udc80" <= char <= "\udcff"
        for value in headers.values()
        if not value.isascii()
        for char in value
    )
