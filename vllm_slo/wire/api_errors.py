# SPDX-License-Identifier: Apache-2.0
"""Error bodies in the shape of the API that was called, for servers and for the front."""

from __future__ import annotations

from typing import Any, Final

_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's Messages API."""
    return path.rstrip("/").endswith("/v1/messages") or "/v1/messages/" in path


def error_body(path: str, status: int, kind: str, text: str, param: str | None) -> dict[str, Any]:
    """The JSON of an error.

    Args:
        path: of the request; it decides between the shapes of Anthropic, Cohere and OpenAI.
        status: HTTP status.
        kind: OpenAI's ``error.type``. Anthropic has a type of its own for each status.
        text: one line for the client.
        param: field at fault, or None.
    """
    if is_anthropic(path):
        fallback = "api_error" if status >= 500 else "invalid_request_error"
        error = {"type": _ANTHROPIC_TYPES.get(status, fallback), "message": text}
        return {"type": "error", "error": error}
    if "/cohere/" in path:
        return {"message": text}
    return {"error": {"message": text, "type": kind, "param": param, "code": status}}
