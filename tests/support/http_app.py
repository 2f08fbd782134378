# SPDX-License-Identifier: Apache-2.0
"""A small API server behind the SLO middleware: routes such as vLLM's, and a stand-in for its
engine behind the real gate."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.exceptions import VLLMError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.async_utils import merge_async_iterators

from vllm_slo.engine import gate
from vllm_slo.engine.http.middleware import SLOMiddleware
from vllm_slo.slo.carriers import FORWARDED
from vllm_slo.slo.verdicts import REPORT_KEY

CONFIG = {
    "classes": {
        "chat": {"ttft_ms": 500, "tpot_ms": 50, "value": 2},
        "strict": {"ttft_ms": 100, "on_unattainable": "decline"},
    },
    "service_tiers": {"priority": "chat"},
}
COMPLETIONS, CHAT, RESPONSES, MESSAGES = ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)
FORM, POOLING, OTHER = "/v1/audio/transcriptions", "/pooling", "/v1/other"
"""A route that reads a form, one that asks for no text, and one that generates from JSON although
the middleware does not know that."""

REPORT = {
    "tier": "guaranteed",
    "promised": True,
    "reason": None,
    "ttft_ms": 9.5,
    "tpot_ms": 4.0,
    "attained": True,
}
DECLINED = "slo_declined:1500:prefill"


# --- what an engine says -------------------------------------------------------------------------


def choice(
    text: str = "", finish: str | None = None, stop: int | str | None = None, index: int = 0
) -> CompletionOutput:
    """What one output says of one choice."""
    return CompletionOutput(index, text, [5] * bool(text), None, None, None, finish, stop)


def output(*choices: CompletionOutput, carried: Mapping[str, Any] | None = None) -> RequestOutput:
    """An output of the engine; ``carried``: its ``kv_transfer_params``."""
    ended = all(one.finish_reason is not None for one in choices)
    return RequestOutput(
        "r", None, [1], None, list(choices), ended, kv_transfer_params=carried and dict(carried)
    )


def reported(report: Any = REPORT, **more: Any) -> dict[str, Any]:
    """``kv_transfer_params`` with a report."""
    return {REPORT_KEY: report, **more}


@dataclass(eq=False)
class Call:
    """One request as it came to the engine."""

    prompt: Any
    params: Any
    request_id: str
    options: dict[str, Any]
    closed: bool = False

    @property
    def extra(self) -> dict[str, Any]:
        return dict(self.params.extra_args or {})


Script = Callable[[Call], AsyncIterator[RequestOutput]]


def saying(*outputs: RequestOutput) -> Script:
    """An engine that answers every request with these outputs."""

    async def script(call: Call) -> AsyncIterator[RequestOutput]:
        for one in copy.deepcopy(outputs):  # the gate takes reports out of them
            await asyncio.sleep(0)
            yield one

    return script


def ending(text: str, stop: int | str | None = None, *, finish: str = "stop") -> Script:
    """An engine that ends every choice of a request with this text, and no report."""

    async def script(call: Call) -> AsyncIterator[RequestOutput]:
        yield output(*(choice(text, finish, stop, index) for index in range(call.params.n)))

    return script


DECLINING = ending("", DECLINED, finish="abort")


class Engine:
    """In place of vLLM's ``AsyncLLM``, behind the real gate.

    Args:
        script: what is said to each request.
        scheduler: dotted name of the scheduler's class.
        ranks: engines among which vLLM's balancer chooses.
    """

    def __init__(
        self, script: Script, scheduler: Any = "vllm_slo.Scheduler", *, ranks: int = 1
    ) -> None:
        self.calls: list[Call] = []
        self.script = script
        scheduling = SimpleNamespace(scheduler_cls=scheduler)
        parallel = SimpleNamespace(data_parallel_size=ranks, local_engines_only=False)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduling, parallel_config=parallel)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        call = Call(prompt, sampling_params, request_id, options)
        self.calls.append(call)
        try:
            async for one in self.script(call):
                yield one
        finally:
            call.closed = True

    async def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str
    ) -> AsyncIterator[Any]:
        self.calls.append(Call(prompt, pooling_params, request_id, {}))
        yield SimpleNamespace(data=[0.5])


gate.install(SimpleNamespace(AsyncLLM=Engine))


# --- the server ----------------------------------------------------------------------------------

Body = dict[str, Any]
Events = AsyncIterator[tuple[int, CompletionOutput, RequestOutput]]


@dataclass
class Stored:
    """A response of the Responses API that can be asked for later."""

    id: str
    status: str = "queued"
    texts: list[str] = field(default_factory=list)


class Server:
    """An app with vLLM's routes in little; it keeps the bodies and headers that its routes got.

    Args:
        script: what the engine says; None: one word.
        config: the SLO configuration.
        scheduler: dotted name of the scheduler's class.
        asgi: of the transport.
    """

    def __init__(
        self,
        script: Script | None = None,
        config: Any = CONFIG,
        scheduler: Any = "vllm_slo.Scheduler",
        **asgi: Any,
    ) -> None:
        self.engine = Engine(script or ending("a"), scheduler)
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.store: dict[str, Stored] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.app = FastAPI()
        self.app.state.vllm_config = SimpleNamespace(additional_config={"slo_config": config})
        self.app.state.openai_serving_responses = SimpleNamespace(response_store=self.store)
        self.app.add_middleware(SLOMiddleware, clock=lambda: 1000.0)
        self.app.exception_handler(VLLMError)(self._failed)
        self.app.post(FORM)(self.form)
        self.app.get("/v1/models")(self.models)
        for route in (*ROUTES, POOLING, OTHER):
            self.app.post(route)(self.endpoint)
        self.asgi = asgi

    # Routes.

    async def endpoint(self, request: Request) -> Response:
        body = await request.body()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            return JSONResponse({"error": "not JSON"}, 400)
        if not isinstance(parsed, dict):
            return JSONResponse({"error": "no object"}, 400)
        return await self._cancelled_with(request, self._serve, parsed)

    async def form(self, request: Request) -> Response:
        async with request.form() as fields:
            body = {
                name: json.loads(value) if name == "vllm_xargs" else value
                for name, value in fields.items()
                if isinstance(value, str)
            }
        return await self._cancelled_with(request, self._serve, body)

    async def models(self) -> Any:
        return {"object": "list", "data": [{"id": "m"}]}

    async def _cancelled_with(self, request: Request, serve: Any, body: Body) -> Response:
        """As vLLM's routes: whoever leaves ends what was begun."""
        answer = await with_cancellation(serve)(body, request)
        return JSONResponse(None) if answer is None else answer

    async def _failed(self, request: Request, error: Exception) -> Response:
        said = create_error_response(error)
        return JSONResponse(said.model_dump(), said.error.code)

    async def _serve(self, body: Body, request: Request) -> Response:
        path = request.url.path
        if path.endswith(POOLING):
            pooled = [one async for one in self.engine.encode("x", PoolingParams(), "p")]
            return JSONResponse({"data": [one.data for one in pooled]})
        said = self._asked(body)
        if body.get("background"):
            return self._in_background(said)
        if body.get("stream"):
            events = STREAMS[next((r for r in STREAMS if path.endswith(r)), COMPLETIONS)](said)
            return StreamingResponse(_told(events), media_type="text/event-stream")
        return JSONResponse(await _whole(said, path))

    def _asked(self, body: Body) -> Events:
        """What the engine says: (number among the choices of all prompts, choice, output)."""
        prompts = body.get("prompt", "x")
        several = isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list)
        n = body["n"] if isinstance(body.get("n"), int) else 1
        xargs = body.get("vllm_xargs")
        extra = dict(xargs) if isinstance(xargs, dict) and xargs else None
        asked = [
            self.engine.generate(
                prompt, SamplingParams(n=n, extra_args=extra), request_id=f"r{number}"
            )
            for number, prompt in enumerate(prompts if several else [prompts])
        ]

        async def events() -> Events:
            async for number, one in merge_async_iterators(*asked):
                for told in one.outputs:
                    yield number * n + told.index, told, one

        return events()

    def _in_background(self, said: Events) -> Response:
        stored = Stored(f"resp_{len(self.store)}")
        self.store[stored.id] = stored

        async def serve() -> None:
            async for _, told, _ in said:
                stored.status = "in_progress"
                stored.texts.append(told.text)
            stored.status = "completed"

        self.tasks.append(asyncio.create_task(serve()))
        return JSONResponse({"id": stored.id, "object": "response", "status": stored.status})

    # Its clients.

    def run(self, talk: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        """Let a client talk to it."""

        async def run() -> Any:
            transport = httpx.ASGITransport(self.app, **self.asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://slo") as client:
                return await talk(client)

        return asyncio.run(run())

    def post(self, path: str = COMPLETIONS, **request: Any) -> httpx.Response:
        """Send one request."""
        answer: httpx.Response = self.run(lambda client: client.post(path, **request))
        return answer

    def reached(self, body: Body, path: str = COMPLETIONS, **request: Any) -> dict[str, Any]:
        """Send one request, which passes as it is; the extra arguments that the engine got."""
        content = json.dumps(body).encode()
        headers = httpx.Headers(request.pop("headers", None))
        headers["content-type"] = "application/json"
        response = self.post(path, content=content, headers=headers, **request)
        assert response.status_code == 200, response.text
        assert self.bodies[-1] == content
        assert self.headers[-1]["content-length"] == str(len(content))
        return self.engine.calls[-1].extra


async def _whole(said: Events, path: str) -> Body:
    """A whole response in the words of each API."""
    choices: dict[int, Body] = {}
    carried = None
    async for number, told, one in said:
        shown = choices.setdefault(number, {"index": number, "text": ""})
        shown["text"] += told.text
        shown |= {"finish_reason": told.finish_reason, "stop_reason": told.stop_reason}
        carried = one.kv_transfer_params
    if path.endswith(MESSAGES):
        return {"type": "message", "content": [{"type": "text", "text": choices[0]["text"]}]}
    if path.endswith(RESPONSES):
        said_so = {"output": [choices[0]["text"]], "service_tier": "auto"}
        return {"id": "resp", "object": "response", **said_so, "kv_transfer_params": carried}
    listed = [choices[number] for number in sorted(choices)]
    return {"id": "é", "choices": listed, "kv_transfer_params": carried}


async def _told(events: AsyncIterator[Body]) -> AsyncIterator[str]:
    """A stream as vLLM writes it; an error of the engine becomes its last event."""
    try:
        async with contextlib.aclosing(events):  # type: ignore[type-var]  # it is a generator
            async for event in events:
                yield sse(event)
    except VLLMError as error:
        yield sse(create_error_response(error).model_dump())
    yield "data: [DONE]\n\n"


def sse(event: Body) -> str:
    """An event of a stream."""
    kind = f"event: {event['type']}\n" if "type" in event else ""
    return f"{kind}data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _completions(said: Events) -> AsyncIterator[Body]:
    async for number, told, _ in said:
        ends = {"finish_reason": told.finish_reason, "stop_reason": told.stop_reason}
        yield {"choices": [{"index": number, "text": told.text, **ends}]}


async def _chat(said: Events) -> AsyncIterator[Body]:
    first = True
    async for number, told, _ in said:
        if first:
            role = {"role": "assistant", "content": ""}
            yield {"choices": [{"index": number, "delta": role, "finish_reason": None}]}
            first = False
        ends = {"finish_reason": told.finish_reason, "stop_reason": told.stop_reason}
        yield {"choices": [{"index": number, "delta": {"content": told.text}, **ends}]}


async def _responses(said: Events) -> AsyncIterator[Body]:
    yield {"type": "response.created", "response": {"id": "resp"}}
    text = ""
    async for _, told, _ in said:
        text += told.text
        yield {"type": "response.output_text.delta", "delta": told.text}
    ended = {"id": "resp", "output": [text], "service_tier": "auto"}
    yield {"type": "response.completed", "response": ended}


async def _messages(said: Events) -> AsyncIterator[Body]:
    first = True
    async for _, told, _ in said:
        if first:
            yield {"type": "message_start", "message": {"role": "assistant"}}
            first = False
        yield {"type": "content_block_delta", "delta": {"text": told.text}}
    yield {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}
    yield {"type": "message_stop"}


STREAMS: Mapping[str, Callable[[Events], AsyncIterator[Body]]] = {
    COMPLETIONS: _completions,
    CHAT: _chat,
    RESPONSES: _responses,
    MESSAGES: _messages,
}


def events_of(text: str) -> list[Body]:
    """The JSON events of a stream, in order."""
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line[:6] == "data: ")
    return [json.loads(line) for line in lines if line != "[DONE]"]


def behind_a_front(server: Server, said: Mapping[str, Any]) -> Server:
    """The server, with what a front says of each request in the scope, as a replica's guard puts
    it there."""
    inner: Any = server.app

    async def guard(scope: Any, receive: Any, send: Any) -> None:
        await inner({**scope, FORWARDED: said}, receive, send)

    server.app = guard  # type: ignore[assignment]
    return server


# --- requests, message by message ----------------------------------------------------------------


def scope_of(path: str = COMPLETIONS, headers: Sequence[tuple[bytes, bytes]] = ()) -> Body:
    """The ASGI scope of a POST of JSON."""
    listed = [(b"content-type", b"application/json"), *headers]
    about = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    return {**about, "headers": listed}


async def talk(
    app: Any,
    body: bytes | list[bytes],
    sent: list[Any],
    path: str = COMPLETIONS,
    left: asyncio.Event | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Send one request, in one part or several; what comes back is put into ``sent`` as it comes.
    The client stays until ``left`` is set."""
    parts = [body] if isinstance(body, bytes) else list(body)
    incoming = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts, 1)
    ]

    async def receive() -> Any:
        if incoming:
            return incoming.pop(0)
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope_of(path, headers), receive, send)


# --- answers -------------------------------------------------------------------------------------


def refused(response: httpx.Response, param: str | None, status: int = 400) -> str:
    """The text of a refusal in OpenAI's shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == status
    assert error["param"] == param
    return str(error["message"])


def refused_in_any_shape(response: httpx.Response, path: str, status: int = 400) -> str:
    """The text of a refusal in the shape of the API that was called."""
    if not path.endswith(MESSAGES):
        assert response.status_code == status, response.text
        return str(response.json()["error"]["message"])
    assert response.status_code == status, response.text
    said = response.json()
    assert list(said) == ["type", "error"] and said["type"] == "error"
    assert list(said["error"]) == ["type", "message"]
    return str(said["error"]["message"])
