# SPDX-License-Identifier: Apache-2.0
"""The headers that the front passes on, to replicas and back to clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from multidict import CIMultiDict

from vllm_slo.router.upstream import Upstream
from vllm_slo.wire.front_protocol import OWN_PREFIX

REPLICA_HEADER: Final = "x-vllm-slo-replica"
REQUEST_ID: Final = "X-Request-Id"
HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_SENT: Final = HOP_BY_HOP | {"host", "content-length", "expect"}
_NOT_RETURNED: Final = HOP_BY_HOP | {"content-length"}


def forwarded_headers(headers: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
    """A client's headers as a replica gets them."""
    kept = _kept(headers, _NOT_SENT)
    kept[REQUEST_ID] = request_id
    return kept


def returned_headers(
    headers: Mapping[str, str], upstream: Upstream, request_id: str
) -> CIMultiDict[str]:
    """A replica's headers as the client gets them, without those that hold its private address."""
    address = upstream.spec.url.rpartition("://")[2].lower()
    kept = _kept(headers, _NOT_RETURNED, without=address)
    kept[REPLICA_HEADER] = upstream.name
    kept[REQUEST_ID] = request_id
    return kept


def _kept(
    headers: Mapping[str, str], dropped: frozenset[str], *, without: str = ""
) -> CIMultiDict[str]:
    """All headers but ``dropped``, the front's own, those of one connection, and values that have
    ``without``."""
    options = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if (low := name.lower()) not in dropped
        and not low.startswith(OWN_PREFIX)
        and low not in options
        and not (without and without in value.lower())
    )
