# SPDX-License-Identifier: Apache-2.0
"""A small app behind the SLO middleware, for the tests of the middleware."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from vllm_slo.engine.http import SLOMiddleware

CONFIG = {
    "classes": {
        "chat": {"ttft_ms": 500, "tpot_ms": 50, "value": 2},
        "strict": {"ttft_ms": 100, "on_unattainable": "decline"},
    },
    "service_tiers": {"priority": "chat"},
}
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
Reply = Callable[[dict[str, Any]], Any]


REPORT = {
    "tier": "guaranteed",
    "promised": True,
    "reason": None,
    "ttft_ms": 9.5,
    "tpot_ms": 4.0,
    "attained": True,
}


class Server:
    """An app with the three routes; it keeps the body and headers it got and answers `reply`."""

    def __init__(self, reply: Reply | None = None, config: Any = CONFIG, **asgi: Any) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.reply: Reply = reply or (lambda body: {"echo": body, "kv_transfer_params": None})
        self.app = FastAPI()
        self.app.state.vllm_config = SimpleNamespace(additional_config={"slo_config": config})
        self.app.add_middleware(SLOMiddleware, clock=lambda: 1000.0)
        self.asgi = asgi
        for route in (*ROUTES, "/v1/embeddings"):
            self.app.post(route)(self.endpoint)

    async def endpoint(self, request: Request) -> Any:
        body = await request.body()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            return JSONResponse({"error": "not JSON"}, 400)
        answer = self.reply(parsed)
        if isinstance(answer, AsyncIterator):
            return StreamingResponse(answer, media_type="text/event-stream")
        return answer if isinstance(answer, JSONResponse) else JSONResponse(answer)

    def post(self, path: str = ROUTES[0], **request: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, **self.asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://slo") as client:
                return await client.post(path, **request)

        return asyncio.run(run())

    def forwarded(self, body: dict[str, Any], **request: Any) -> dict[str, Any]:
        """The body that reached the app."""
        response = self.post(json=body, **request)
        assert response.status_code == 200, response.text
        assert self.headers[-1]["content-length"] == str(len(self.bodies[-1]))
        return dict(json.loads(self.bodies[-1]))


def refused(response: httpx.Response, param: str, status: int = 400) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == status
    assert error["param"] == param
    return str(error["message"])
