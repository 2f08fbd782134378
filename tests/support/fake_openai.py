# SPDX-License-Identifier: Apache-2.0
"""A server in a thread that streams answers as vLLM does, for tests of its clients."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from patience import patience


@dataclass
class Fake:
    """Streams answers as vLLM does; ``behave`` picks what goes wrong by prompt length.

    Completions, chat completions and responses. Words of more than four letters have two tokens,
    and a chat has `TEMPLATE_TOKENS` more.

    Attributes:
        spares: so many requests, the first ones, are answered as they should be.
        is_vllm: otherwise it refuses vLLM's fields, as OpenAI's servers refuse unknown ones.
        declines, declined: which requests are declined as they come, and which were.
        has_tokenizer: whether it has ``/tokenize``.
        began, ended: (time, body) of each request as it came, and of each answer as it ended.
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
    spares: int = 0
    is_vllm: bool = True
    has_tokenizer: bool = True
    declines: Callable[[dict[str, Any]], bool] = lambda _: False
    declined: list[dict[str, Any]] = field(default_factory=list)
    began: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    ended: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
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
            owner = "vllm" if self.is_vllm else "somebody"
            card = {"id": "tiny", "object": "model", "created": 0, "owned_by": owner}
            return JSONResponse({"object": "list", "data": [card | {"max_model_len": 512}]})

        async def version(_: Request) -> Response:
            if not self.is_vllm:
                return JSONResponse({"detail": "Not Found"}, 404)
            return JSONResponse({"version": "0.0.test"})

        async def tokenize(request: Request) -> Response:
            if not self.has_tokenizer:
                return JSONResponse({"detail": "Not Found"}, 404)
            return JSONResponse({"count": prompt_tokens(await request.json()), "tokens": []})

        async def metrics(_: Request) -> Response:
            return Response(self.metrics, media_type="text/plain")

        async def answer(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            self.began.append((time.monotonic(), body))
            spared = len(self.bodies) <= self.spares
            trouble = "" if spared else self.behave.get(prompt_tokens(body), "")
            foreign = sorted({"ignore_eos", "cache_salt", "slo", "min_tokens"} & set(body))
            if not self.is_vllm and foreign:
                return JSONResponse({"error": {"message": f"Unknown parameter: {foreign[0]}"}}, 400)
            if trouble == "decline" or (not spared and self.declines(body)):
                self.declined.append(body)
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
                Route("/tokenize", tokenize, methods=["POST"]),
                Route("/v1/completions", answer, methods=["POST"]),
                Route("/v1/chat/completions", answer, methods=["POST"]),
                Route("/v1/responses", answer, methods=["POST"]),
            ],
        )
        return _Door(self, routes)

    async def stream(self, body: dict[str, Any], trouble: str) -> AsyncIterator[str]:
        self._running += 1
        self.at_once = max(self.at_once, self._running)
        try:
            async for event in self.events(body, trouble):
                yield event
            self.ended.append((time.monotonic(), body))
        finally:
            self._running -= 1

    async def events(self, body: dict[str, Any], trouble: str) -> AsyncIterator[str]:
        write = _WRITERS[_api_of(body)]
        total = body.get("max_tokens") or body["max_output_tokens"]
        while len(self.bodies) < self.holds:
            await asyncio.sleep(0.01)
        sent = 0
        while sent < total:
            await asyncio.sleep(3600 if trouble == "hang" else self.step_s)
            count = min(self.tokens_per_chunk, total - sent)
            sent += count
            ids = list(range(count)) if self.say_token_ids else None
            yield write.part("x" * count, ids, "length" if sent == total else None, trouble)
            if trouble == "cut" and sent >= 2:
                return
            if trouble == "error" and sent >= 2:
                yield _event({"error": {"message": "engine died", "code": 500}})
                return
        yield write.end(prompt_tokens(body), total, trouble)
        yield "data: [DONE]\n\n"


REPORTS: dict[str, dict[str, Any]] = {
    "promise": {"slo": {"promised": True}},
    "late": {"slo": {"promised": True, "late": True}},
    "flex": {"service_tier": "flex"},
}
"""Behaviour -> what the report of the answer says."""
TEMPLATE_TOKENS = 7


def prompt_tokens(body: dict[str, Any]) -> int:
    """Tokens of a request's prompt."""
    if _api_of(body) == "completions":
        return len(body["prompt"][0])
    text = body["input"] if "input" in body else body["messages"][0]["content"]
    return TEMPLATE_TOKENS + sum(1 + (len(word) > 4) for word in text.split())


def _api_of(body: dict[str, Any]) -> str:
    return "responses" if "input" in body else "chat" if "messages" in body else "completions"


def _event(part: dict[str, Any]) -> str:
    return f"data: {json.dumps(part)}\n\n"


class _Completion:
    """Events of a completion, or of a chat."""

    def __init__(self, kind: str) -> None:
        self.head = {"id": "c", "object": kind, "created": 0, "model": "tiny"}
        self.is_chat = kind.startswith("chat")

    def part(self, text: str, ids: list[int] | None, finish: str | None, trouble: str) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        choice |= {} if ids is None else {"token_ids": ids}
        return _event({**self.head, "choices": [choice], **REPORTS.get(trouble, {})})

    def end(self, prompt: int, total: int, _: str) -> str:
        usage = {"prompt_tokens": prompt, "completion_tokens": total}
        usage["total_tokens"] = prompt + total
        return _event({**self.head, "choices": [], "usage": usage})


class _Response:
    """Events of a response."""

    def part(self, text: str, _: list[int] | None, __: str | None, ___: str) -> str:
        place = {"item_id": "m", "output_index": 0, "content_index": 0, "logprobs": []}
        kind = "response.output_text.delta"
        return _event({"type": kind, "delta": text, "sequence_number": 1, **place})

    def end(self, prompt: int, total: int, trouble: str) -> str:
        usage = {"input_tokens": prompt, "output_tokens": total, "total_tokens": prompt + total}
        response = {"id": "r", "object": "response", "created_at": 0, "model": "tiny"}
        response |= {"output": [], "usage": usage, "status": "completed"}
        response |= REPORTS.get(trouble, {})
        return _event({"type": "response.completed", "sequence_number": 2, "response": response})


_WRITERS: dict[str, Any] = {
    "completions": _Completion("text_completion"),
    "chat": _Completion("chat.completion.chunk"),
    "responses": _Response(),
}


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
