# SPDX-License-Identifier: Apache-2.0
"""Whole answers as ASGI messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_slo.wire.api_errors import error_body

if TYPE_CHECKING:
    from starlette.types import Message

Headers = Iterable[tuple[bytes, bytes]]


def json_messages(
    status: int, content: Mapping[str, Any], headers: Headers = ()
) -> tuple[Message, Message]:
    """A whole JSON response as ASGI messages."""
    body = json.dumps(content).encode()
    base = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    return (
        {"type": "http.response.start", "status": status, "headers": [*base, *headers]},
        {"type": "http.response.body", "body": body, "more_body": False},
    )


def error_messages(
    path: str, status: int, kind: str, text: str, param: str | None, headers: Headers = ()
) -> tuple[Message, Message]:
    """A refusal in the error shape of the API that was called, as ASGI messages."""
    return json_messages(status, error_body(path, status, kind, text, param), headers)


def retry_headers(wait_ms: int, reason: str) -> list[tuple[bytes, bytes]]:
    """The headers that say why a request is refused now, and when to try again."""
    return [
        (b"retry-after", b"%d" % max(1, -(-wait_ms // 1000))),
        (b"retry-after-ms", b"%d" % wait_ms),
        (b"x-slo-reason", reason.encode()),
    ]


def resized(headers: Headers, size: int) -> list[tuple[bytes, bytes]]:
    """`headers` with the content-length, if there is one, set to `size`."""
    return [
        (name, b"%d" % size if name.lower() == b"content-length" else value)
        for name, value in headers
    ]
