# SPDX-License-Identifier: Apache-2.0
"""A server in a thread that streams completions as vLLM does, for tests of its clients."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from patience import patience


@dataclass
class Fake:
    """Streams completions as vLLM does; ``behave`` picks what goes wrong by prompt length.

    Attributes:
        holds: nothing is answered until so many requests have come.
        at_once: requests that were being answered at a time, at most.
        api_key: what every request below ``/v1`` must bring, as with vLLM's ``--api-key``.
        asked: path and headers of every request.
        redirects_to: where every request below ``/v1`` is sent instead.
    """

    step_s: float = 0.002
    holds: int = 0
    at_once: int = 0
    tokens_per_chunk: int = 1
    say_token_ids: bool = True
    behave: dict[int, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    metrics: str = ""
    port: int = 0
    api_key: str | None = None
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    redirects_to: str | None = None
    _running: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route

        async def models(_: Request) -> Response:
            card = {"id": "tiny", "object": "model", "created": 0, "owned_by": "vllm"}
            return JSONResponse({"object": "list", "data": [card | {"max_model_len": 512}]})

        async def version(_: Request) -> Response:
            return JSONResponse({"version": "0.0.test"})

        async def metrics(_: Request) -> Response:
            return Response(self.metrics, media_type="text/plain")

        async def completions(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            trouble = self.behave.get(len(body["prompt"][0]), "")
            if trouble == "decline":
                error = {"message": "cannot be kept", "type": "x", "code": 429}
                return JSONResponse({"error": error}, 429, {"Retry-After": "3"})
            if trouble == "crash":
                return JSONResponse({"error": {"message": "broken"}}, 500)
            return StreamingResponse(self.stream(body, trouble), media_type="text/event-stream")

        async def quote(_: Request) -> Response:
            quote = {"promised": True, "reason": None, "ttft_ms": 5.0, "tpot_ms": 2.0}
            return JSONResponse({"object": "slo.quote", **quote})

        routes = Starlette(
            routes=[
                Route("/v1/slo/quote", quote, methods=["POST"]),
                Route("/v1/models", models),
                Route("/version", version),
                Route("/metrics", metrics),
                Route("/v1/completions", completions, methods=["POST"]),
            ],
        )
        return _Door(self, routes)

    async def stream(self, body: dict[str, Any], trouble: str) -> AsyncIterator[str]:
        total = body["max_tokens"]
        self._running += 1
        self.at_once = max(self.at_once, self._running)
        try:
            async for event in self.events(total, trouble):
                yield event
        finally:
            self._running -= 1

    async def events(self, total: int, trouble: str) -> AsyncIterator[str]:
        while len(self.bodies) < self.holds:
            await asyncio.sleep(0.01)
        sent = 0
        while sent < total:
            await asyncio.sleep(3600 if trouble == "hang" else self.step_s)
            count = min(self.tokens_per_chunk, total - sent)
            sent += count
            choice: dict[str, Any] = {"index": 0, "text": "x" * count, "finish_reason": None}
            choice["finish_reason"] = "length" if sent == total else None
            if self.say_token_ids:
                choice["token_ids"] = list(range(count))
            report = {"promise": {"slo": {"promised": True}}, "flex": {"service_tier": "flex"}}
            yield self.event({"choices": [choice], **report.get(trouble, {})})
            if trouble == "cut" and sent >= 2:
                return
            if trouble == "error" and sent >= 2:
                yield f"data: {json.dumps({'error': {'message': 'engine died', 'code': 500}})}\n\n"
                return
        usage = {"prompt_tokens": 1, "completion_tokens": total, "total_tokens": total + 1}
        yield self.event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def event(self, part: dict[str, Any]) -> str:
        head = {"id": "c", "object": "text_completion", "created": 0, "model": "tiny"}
        return f"data: {json.dumps(head | part)}\n\n"


@dataclass
class _Door:
    """Notes every request, and turns some away before they come to ``app``."""

    server: Fake
    app: Any

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            self.server.asked.append((scope["path"], headers))
            refusal = self.refusal(scope["path"], headers)
            if refusal is not None:
                return await refusal(scope, receive, send)
        return await self.app(scope, receive, send)

    def refusal(self, path: str, headers: dict[str, str]) -> Any:
        from starlette.responses import JSONResponse, RedirectResponse

        if not path.startswith("/v1"):
            return None
        if self.server.redirects_to is not None:
            return RedirectResponse(f"{self.server.redirects_to}{path}", 307)
        given = headers.get("authorization")
        if self.server.api_key is None or given == f"Bearer {self.server.api_key}":
            return None
        # Some servers repeat the key that they were given.
        return JSONResponse({"error": {"message": f"Incorrect API key provided: {given}"}}, 401)


@contextmanager
def serving(server_side: Fake | None = None) -> Iterator[Fake]:
    """A `Fake` that listens, at a port of its own."""
    uvicorn = pytest.importorskip("uvicorn")
    server_side = server_side or Fake()
    config = uvicorn.Config(
        server_side.app(),
        host="127.0.0.1",
        port=0,
        log_level="error",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + patience(20)
    while not server.started and time.monotonic() < deadline_s:
        time.sleep(0.01)
    server_side.port = server.servers[0].sockets[0].getsockname()[1]
    yield server_side
    server.should_exit = True
    thread.join(patience(10))
    assert not thread.is_alive()
