# SPDX-License-Identifier: Apache-2.0
"""Answers of our own as ASGI messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Message


def json_messages(
    status: int, said: dict[str, Any], headers: list[tuple[bytes, bytes]] | None = None
) -> tuple[Message, Message]:
    """A whole JSON response as ASGI messages."""
    body = json.dumps(said).encode()
    base = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    return (
        {"type": "http.response.start", "status": status, "headers": [*base, *(headers or [])]},
        {"type": "http.response.body", "body": body, "more_body": False},
    )


def error_messages(
    status: int,
    kind: str,
    text: str,
    param: str | None,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> tuple[Message, Message]:
    """A refusal in OpenAI's error shape as ASGI messages."""
    error = {"message": text, "type": kind, "param": param, "code": status}
    return json_messages(status, {"error": error}, headers)
