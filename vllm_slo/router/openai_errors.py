# SPDX-License-Identifier: Apache-2.0
"""Errors in OpenAI's shape: as the body of an answer, and inside a stream that has begun."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Final

from aiohttp import web

__all__ = ["decline_response", "done_event", "error_event", "error_response", "retry_headers"]

SERVER_HEADER: Final = "vllm-slo"
MAX_RETRY_AFTER_MS: Final = 86_400_000
done_event: Final = b"data: [DONE]\n\n"


def error_body(status: int, kind: str, text: str, param: str | None = None) -> bytes:
    """The JSON that OpenAI's clients read an error from."""
    error = {"message": text, "type": kind, "param": param, "code": status}
    return json.dumps({"error": error}).encode()


def error_event(status: int, kind: str, text: str) -> bytes:
    """The same as one server-sent event."""
    return b"data: " + error_body(status, kind, text) + b"\n\n"


def error_response(
    status: int,
    kind: str,
    text: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """A whole answer that is an error."""
    return json_response(error_body(status, kind, text, param), status, headers)


def json_response(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A whole answer of the front's own."""
    base = {"Content-Type": "application/json", "Server": SERVER_HEADER}
    return web.Response(status=status, body=body, headers={**base, **(headers or {})})


def retry_after_ms(retry_after_s: float) -> int:
    """A prediction as clients are told it: 1 ms to a day; a second when there is none."""
    if not 0.0 < retry_after_s < math.inf:
        return 1_000
    return max(1, min(math.ceil(retry_after_s * 1000), MAX_RETRY_AFTER_MS))


def retry_headers(retry_ms: int) -> dict[str, str]:
    """Both headers by which clients are told when to come back."""
    return {"Retry-After": str(max(1, -(-retry_ms // 1000))), "retry-after-ms": str(retry_ms)}


def decline_response(retry_after_s: float) -> web.Response:
    """429: no promise can be made. As one server's own middleware words it."""
    retry_ms = retry_after_ms(retry_after_s)
    text = f"the SLO cannot be kept now; retry after {retry_ms} ms, or drop on_unattainable"
    headers = {**retry_headers(retry_ms), "x-slo-reason": "unattainable"}
    return error_response(429, "slo_unattainable", text, "slo", headers)
