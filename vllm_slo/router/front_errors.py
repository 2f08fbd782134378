# SPDX-License-Identifier: Apache-2.0
"""The front's own errors: as answers, and at the end of a stream."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from aiohttp import web

from vllm_slo.wire.api_errors import error_body, is_anthropic

SERVER_HEADER: Final = "vllm-slo"
MAX_RETRY_AFTER_MS: Final = 86_400_000
BUSY_RETRY_MS: Final = 1_000
REASON_HEADER: Final = "x-slo-reason"
UNATTAINABLE: Final = "unattainable"
"""The reason if no replica could be asked for one."""


class ErrorResponse(web.Response):
    """An error in OpenAI's shape; `put_for` changes it to the shape of the API that was called."""

    def __init__(
        self,
        status: int,
        kind: str,
        text: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        body = json.dumps(error_body("", status, kind, text, param)).encode()
        super().__init__(status=status, body=body, headers={**_own_headers(), **(headers or {})})
        self._message = text

    def put_for(self, path: str) -> ErrorResponse:
        """Change the body to the shape of the API at ``path``."""
        if is_anthropic(path):
            self.body = json.dumps(error_body(path, self.status, "", self._message, None)).encode()
        return self


def error_response(
    status: int,
    kind: str,
    text: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ErrorResponse:
    """An answer that is an error."""
    return ErrorResponse(status, kind, text, param, headers)


def json_response(body: bytes) -> web.Response:
    """An answer of the front itself."""
    return web.Response(body=body, headers=_own_headers())


def not_found(path: str, why: str = "is not served here") -> ErrorResponse:
    """404."""
    return error_response(HTTPStatus.NOT_FOUND, "NotFoundError", f"{path[:200]} {why}")


def busy_response(text: str) -> ErrorResponse:
    """503 with a short time to retry after."""
    headers = retry_headers(BUSY_RETRY_MS)
    return error_response(503, "ServiceUnavailableError", text, headers=headers)


def retry_after_ms(retry_after_s: float) -> int:
    """Milliseconds for the headers, 1 ms to a day; a second if there is no prediction."""
    if not 0.0 < retry_after_s < math.inf:
        return 1_000
    return max(1, min(math.ceil(retry_after_s * 1000), MAX_RETRY_AFTER_MS))


def retry_headers(retry_ms: int) -> dict[str, str]:
    """The two headers that tell clients when to try again."""
    return {"Retry-After": str(max(1, -(-retry_ms // 1000))), "retry-after-ms": str(retry_ms)}


def _own_headers() -> dict[str, str]:
    return {"Content-Type": "application/json", "Server": SERVER_HEADER}
