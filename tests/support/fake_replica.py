# SPDX-License-Identifier: Apache-2.0
"""A replica child without an engine: the same protocol, and knobs to make it fail.

`python fake_replica.py --private-host H [--name N] [--knobs JSON] [-- ...]`; environment variable
``FAKE_REPLICA_KNOBS`` instead of ``--knobs``. Like the real child it binds a free port, prints
``{"url", "token"}``, ends at once when stdin does, and drains on SIGTERM (``--drain-s``).

Its answers are as `engine.http.forwarded_answer` lets them out, and its state stream tells of
requests as `engine.http.state_feed` does.

Behind the token, beside what vLLM serves (answers carry the name in ``system_fingerprint``):

- ``GET /fake/seen``: what it was asked so far, and how each request ended.
- ``POST /fake/knobs``: change some `Knobs`; ``POST /fake/reset``: all back, and nothing seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from aiohttp import web

from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_stream import StateEncoder
from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand
from vllm_slo.wire.api_errors import error_body
from vllm_slo.wire.front_protocol import DRAIN_PATH, RETRIED, STATE_PATH, TRY_NEXT

HEARTBEAT_S = 0.25
MESSAGES = "/v1/messages"
BATCH = "/v1/chat/completions/batch"
GENERATION = ("/v1/completions", "/v1/chat/completions", "/v1/responses", MESSAGES, BATCH)


@dataclass(frozen=True)
class Knobs:
    """How it behaves. Counts (``*_times``) go down with each use.

    Attributes:
        ttft_s, token_s: delays before the first token and before each further one.
        hold_at: answers stand before this token, counted from 0, for as long as this is not None.
        error_event_times: streams that begin with an error event (status 200).
        status, status_times: answer with this status.
        die_after_tokens: SIGKILL to itself once so many tokens of one answer are out; 0: before
            the first one.
        cut_after_tokens: close that connection, in the middle of an event.
        cut_at_end: close the connection after "[DONE]", where the body should end.
        error_after_tokens: vLLM's own error event and the end of the stream.
        heartbeats: whether the state stream speaks.
        greet_s: how long a new state stream says nothing.
        close_streams: whether state streams are closed at once.
        refuse_hops: `decline_status` when the front wants refusals (x-vllm-slo-unattainable).
        declines: `decline_status` in any case.
        retry_after_ms: what refusals say.
        state: fields of the state that differ; see `state`. ``null_state``: none at all.
        split: write each event in two parts.
        usage_ratio: bytes per token of the prompt tokens it reports.
        page: what it answers to /slo/data; None: it has no such page.
        quote: fields of its quotes that differ from a "no" without an offer.
        headers: of answers on plain routes; ``{address}`` stands for its own host and port.
        token: its token from the start; empty: a random one.
    """

    ttft_s: float = 0.0
    token_s: float = 0.0
    hold_at: int | None = None
    error_event_times: int = 0
    status: int = 500
    status_times: int = 0
    die_after_tokens: int | None = None
    cut_after_tokens: int | None = None
    cut_at_end: bool = False
    error_after_tokens: int | None = None
    heartbeats: bool = True
    greet_s: float = 0.0
    close_streams: bool = False
    refuse_hops: bool = False
    declines: bool = False
    decline_status: int = 429
    retry_after_ms: int = 1500
    state: dict[str, Any] = field(default_factory=dict)
    null_state: bool = False
    split: bool = False
    usage_ratio: float = 4.0
    page: dict[str, Any] | None = None
    quote: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    token: str = ""


def state(changes: dict[str, Any]) -> ReplicaState:
    """An idle replica: 1 ms and 10 us per token a step; ``committed``: [deadline, tokens] pairs."""
    base = ReplicaState(
        model=StepTimeModel(((1e-5, 0.0, 1e-3), (1e-5, 0.0, 1e-3))),
        free_blocks=10_000.0,
        total_blocks=10_000,
        block_sizes=(16,),
        seats=64,
        max_step_tokens=2048,
        max_model_len=8192,
    )
    given = dict(changes)
    committed = tuple(
        Demand(f"r{n}", due_s, tokens, 0.1, 8)
        for n, (due_s, tokens) in enumerate(given.pop("committed", ()))
    )
    if "block_sizes" in given:
        given["block_sizes"] = tuple(given["block_sizes"])
    return replace(base, committed=committed, **given)


class CutError(Exception):
    """Close the connection."""


class FakeReplica:
    """The server; `token` guards every path."""

    def __init__(self, name: str, knobs: Knobs, drain_s: float) -> None:
        self.name = name
        self.token = knobs.token or secrets.token_urlsafe(16)
        self.first_knobs = self.knobs = knobs
        self.drain_s = drain_s
        self.draining = asyncio.Event()
        self.dead = asyncio.Event()
        self.seen: list[dict[str, Any]] = []
        self.running = 0
        self.highest: dict[str, int] = {}
        self.streams: list[list[list[Any]]] = []

    # --- state -----------------------------------------------------------------------------------

    def tell(self, record: dict[str, Any], event: str, *more: Any) -> None:
        """Tell all state streams of an event, if the front knows the request by a ticket."""
        if record["ticket"] is not None:
            for events in self.streams:
                events.append([event, record["ticket"], *more])

    def state(self) -> ReplicaState | None:
        if self.knobs.null_state:
            return None
        live = [one["ticket"] for one in self.seen if one["ended"] is None and one["ticket"]]
        numbers: dict[str, set[int]] = {}
        for front, number in map(Ticket.parse, live):
            numbers.setdefault(front, set()).add(number)
        tickets = {front: frozenset(of_it) for front, of_it in numbers.items()}
        changes = {"running": self.running, "tickets": tickets, "seen": dict(self.highest)}
        return state({**changes, **self.knobs.state})

    async def state_stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await response.prepare(request)
        await asyncio.sleep(self.knobs.greet_s)
        encoder, before, told_s = StateEncoder(), None, 0.0
        live = [one["ticket"] for one in self.seen if one["ended"] is None and one["ticket"]]
        first: list[str] | None = live
        events: list[list[Any]] = []
        self.streams.append(events)
        try:
            while not self.knobs.close_streams:
                now_s = time.monotonic()
                told = self.state(), self.draining.is_set(), self.dead.is_set()
                due = told != before or events or now_s - told_s >= HEARTBEAT_S
                if self.knobs.heartbeats and due:
                    flags = {"draining": told[1], "dead": told[2]}
                    line = encoder.line(told[0], age_s=0.001, events=events, live=first, **flags)
                    first = None
                    events.clear()
                    await response.write(line)
                    before, told_s = told, now_s
                await asyncio.sleep(0.005)
        finally:
            self.streams = [each for each in self.streams if each is not events]
        return response

    # --- generation ------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        ticket = headers.get("x-vllm-slo-ticket")
        record = {
            "path": request.path_qs,
            "method": request.method,
            "headers": headers,
            "header_names": [name.decode("latin-1") for name, _ in request.raw_headers],
            "body": body.decode("utf-8", "surrogateescape") if len(body) < 100_000 else None,
            "size": len(body),
            "port": request.transport and request.transport.get_extra_info("peername")[1],
            "ticket": ticket,
            "age_ms": float(headers.get("x-vllm-slo-age-ms", "nan")),
            "hop": headers.get("x-vllm-slo-unattainable") == "decline",
            "unattainable": headers.get("x-vllm-slo-unattainable"),
            "tokens": 0,
            "prompt_tokens": 0,
            "ended": None,
        }
        self.seen.append(record)
        if ticket is not None:
            front, number = Ticket.parse(ticket)
            self.highest[front] = max(self.highest.get(front, 0), number)
        self.running += 1
        self.tell(record, "came")
        try:
            response = await self.reply(request, body, record)
            if not response.prepared and response.status not in RETRIED:
                self.begin(record)
            record["ended"] = "answered"
            return response
        except (asyncio.CancelledError, ConnectionError):
            record["ended"] = "aborted"
            raise
        except CutError:
            record["ended"] = "cut"
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        finally:
            self.running -= 1
            self.tell(record, "ended", record["prompt_tokens"], record["ended"] == "aborted")

    def begin(self, record: dict[str, Any]) -> None:
        """An answer begins that stands."""
        self.tell(record, "began")

    async def reply(
        self, request: web.Request, body: bytes, record: dict[str, Any]
    ) -> web.StreamResponse:
        knobs = self.knobs
        if knobs.status_times > 0:
            self.knobs = replace(knobs, status_times=knobs.status_times - 1)
            return self.error(knobs.status, "InternalServerError", f"{self.name} is told to fail")
        if knobs.declines or (knobs.refuse_hops and record["hop"]):
            retry_ms = knobs.retry_after_ms
            retry = {"retry-after": str(-(-retry_ms // 1000)), "retry-after-ms": str(retry_ms)}
            text = f"{self.name} cannot keep it"
            retry |= {"x-slo-reason": "prefill", "x-vllm-slo-declined": str(retry_ms)}
            status = TRY_NEXT if record["hop"] else knobs.decline_status
            told = ("refused", retry_ms, "prefill") if record["hop"] else ("declined",)
            self.tell(record, *told)
            return self.error(status, "slo_unattainable", text, retry)
        try:
            asked = json.loads(body)
            assert isinstance(asked, dict)
        except (ValueError, RecursionError, AssertionError):
            return self.error(400, "BadRequestError", "not a JSON object")
        count = asked.get("max_tokens") or asked.get("max_completion_tokens") or 4
        if asked.get("stream") and knobs.error_event_times > 0:
            self.knobs = replace(knobs, error_event_times=knobs.error_event_times - 1)
            text = f"the engine of {self.name} is dead"
            body = error_body(request.path, 500, "InternalServerError", text, None)
            return web.json_response(body, status=500)
        await asyncio.sleep(knobs.ttft_s)
        await self.held(0)
        if asked.get("stream"):
            return await self.stream(request, asked, count, record)
        for number in range(count):
            await self.held(number)
            self.mishap(number)
            await asyncio.sleep(knobs.token_s)
            record["tokens"] += 1
        whole = self.whole(request.path, asked, count, len(body))
        record["prompt_tokens"] = whole["usage"].get("prompt_tokens", 0)
        return web.json_response(whole)

    async def held(self, number: int) -> None:
        """Wait before token ``number`` where the knobs say so."""
        while (hold_at := self.knobs.hold_at) is not None and number >= hold_at:
            await asyncio.sleep(0.01)

    def mishap(self, number: int) -> None:
        if self.knobs.die_after_tokens == number:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.knobs.cut_after_tokens == number:
            raise CutError

    async def stream(
        self, request: web.Request, asked: dict[str, Any], count: int, record: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        if self.knobs.die_after_tokens == 0 or self.knobs.cut_after_tokens == 0:
            self.mishap(0)
        if request.version < (1, 1):
            response.force_close()  # the end of the answer is the end of the connection
        await response.prepare(request)
        self.begin(record)
        await response.write(self.preface(request.path))
        if request.path == MESSAGES:
            return await self.messages(response, count, record)
        chat = request.path == GENERATION[1]
        if chat:
            delta = {"role": "assistant", "content": ""}
            await response.write(_event(self.chunk(asked, {"delta": delta})))
        for number in range(count):
            await self.held(number)
            if self.knobs.error_after_tokens == number:
                await response.write(_error_event(self.name) + b"data: [DONE]\n\n")
                return response
            last = "length" if number == count - 1 else None
            said = {"delta": {"content": f" t{number}"}} if chat else {"text": f" t{number}"}
            event = _event(self.chunk(asked, {**said, "finish_reason": last}, chat))
            if number and self.knobs.cut_after_tokens == number:
                await response.write(event[: len(event) // 2])
                await asyncio.sleep(0.05)
            self.mishap(number)
            if self.knobs.split:
                await response.write(event[:20])
                await asyncio.sleep(0.01)
                event = event[20:]
            await response.write(event)
            record["tokens"] += 1
            await asyncio.sleep(self.knobs.token_s)
        if (asked.get("stream_options") or {}).get("include_usage"):
            usage = self.usage(len(json.dumps(asked)), count)
            record["prompt_tokens"] = usage["prompt_tokens"]
            await response.write(
                _event({**self.chunk(asked, {}, chat), "choices": [], "usage": usage})
            )
        await response.write(b"data: [DONE]\n\n")
        if self.knobs.cut_at_end:
            await asyncio.sleep(0.05)
            raise CutError
        return response

    def preface(self, path: str) -> bytes:
        """What a stream begins with before the model has said anything."""
        if path == MESSAGES:
            usage = {"input_tokens": 5, "output_tokens": 0}
            started = {"type": "message_start", "message": {"type": "message", "usage": usage}}
            return _named_event(started) + _named_event({"type": "ping"})
        if path == GENERATION[2]:
            return _event({"type": "response.created", "response": {}})
        return b""

    async def messages(
        self, response: web.StreamResponse, count: int, record: dict[str, Any]
    ) -> web.StreamResponse:
        """The rest of a stream in Anthropic's words."""
        block = {"type": "text", "text": ""}
        await response.write(
            _named_event({"type": "content_block_start", "index": 0, "content_block": block})
        )
        for number in range(count):
            await self.held(number)
            self.mishap(number)
            delta = {"type": "text_delta", "text": f" t{number}"}
            await response.write(
                _named_event({"type": "content_block_delta", "index": 0, "delta": delta})
            )
            record["tokens"] += 1
            await asyncio.sleep(self.knobs.token_s)
        await response.write(_named_event({"type": "message_stop"}))
        if self.knobs.cut_at_end:
            await asyncio.sleep(0.05)
            raise CutError
        return response

    def chunk(self, asked: dict[str, Any], choice: dict[str, Any], chat: bool = True) -> Any:
        kind = "chat.completion.chunk" if chat else "text_completion"
        choice = {"index": 0, "logprobs": None, "finish_reason": None, **choice}
        return self.base(asked, kind, choice)

    def base(self, asked: dict[str, Any], kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": "fake-1",
            "object": kind,
            "created": 1_700_000_000,
            "model": asked.get("model", "fake"),
            "choices": [choice],
            "system_fingerprint": self.name,
        }

    def whole(self, path: str, asked: dict[str, Any], count: int, size: int) -> dict[str, Any]:
        text = "".join(f" t{number}" for number in range(count))
        if path == MESSAGES:
            parts = [{"type": "text", "text": text}]
            usage = {"input_tokens": 1, "output_tokens": count}
            return {"type": "message", "role": "assistant", "content": parts, "usage": usage}
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
        if path == GENERATION[1]:
            choice["message"] = {"role": "assistant", "content": text}
            kind = "chat.completion"
        else:
            choice["text"] = text
            kind = "text_completion"
        return {**self.base(asked, kind, choice), "usage": self.usage(size, count)}

    def usage(self, size: int, count: int) -> dict[str, int]:
        prompt = max(round(size / self.knobs.usage_ratio), 1)
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}

    def error(
        self, status: int, kind: str, text: str, headers: dict[str, str] | None = None
    ) -> web.Response:
        body = {"error": {"message": text, "type": kind, "param": None, "code": status}}
        return web.json_response(body, status=status, headers=headers)

    # --- the rest of vLLM, and introspection -----------------------------------------------------

    async def other(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path.endswith("/"):  # as vLLM's own router answers it
            raise web.HTTPTemporaryRedirect(f"http://{request.host}{path.rstrip('/')}")
        if path == STATE_PATH:
            return await self.state_stream(request)
        if path == DRAIN_PATH:
            self.draining.set()
            while self.running:
                await asyncio.sleep(0.02)
            return web.json_response({"running": 0})
        if path in GENERATION and request.method == "POST":
            return await self.generate(request)
        if path == "/v1/slo/quote" and request.method == "POST":
            return await self.quote(request)
        if path.startswith("/fake/"):
            return await self.told(request, path)
        if path == "/metrics":
            self.seen.append({"path": path, "ticket": None, "ended": "answered"})
            return web.Response(text=f'fake_replica{{name="{self.name}"}} 1\n')
        if path == "/slo/data" and self.knobs.page is not None:
            self.seen.append({"path": request.path_qs, "ticket": None, "ended": "answered"})
            return web.json_response(self.knobs.page)
        if path in ("/v1/models", "/version", "/tokenize", "/v1/embeddings"):
            return await self.plain(request)
        self.seen.append({"path": request.path_qs, "ticket": None, "ended": "answered"})
        return self.error(404, "NotFoundError", path)

    async def told(self, request: web.Request, path: str) -> web.Response:
        """What it was asked, or new knobs."""
        if path == "/fake/seen":
            return web.json_response(self.seen)
        if path == "/fake/knobs":
            self.knobs = replace(self.knobs, **await request.json())
            return web.json_response(asdict(self.knobs))
        self.knobs = self.first_knobs
        self.seen.clear()
        return web.json_response({})

    async def quote(self, request: web.Request) -> web.StreamResponse:
        """What `Knobs.quote` says, with the name of this replica as its class."""
        await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = {"path": request.path_qs, "headers": headers, "ticket": None, "ended": "answered"}
        self.seen.append(seen)
        if self.knobs.status_times > 0:
            self.knobs = replace(self.knobs, status_times=self.knobs.status_times - 1)
            busy = {"x-slo-reason": "too_many_quotes"} if self.knobs.status == 429 else {}
            return self.error(self.knobs.status, "InternalServerError", "told to fail", busy)
        if self.knobs.cut_after_tokens == 0:
            assert request.transport is not None
            request.transport.abort()
        no = {"promised": False, "reason": "prefill", "retry_after_ms": 900, "cheapest": None}
        said = {"object": "slo.quote", **no, **self.knobs.quote}
        return web.json_response({**said, "class": self.name})

    async def plain(self, request: web.Request) -> web.Response:
        body = (await request.read()).decode()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(
            {
                "path": request.path_qs,
                "headers": headers,
                "body": body,
                "ticket": None,
                "ended": "answered",
            }
        )
        if self.knobs.status_times > 0:
            self.knobs = replace(self.knobs, status_times=self.knobs.status_times - 1)
            return self.error(
                self.knobs.status, "InternalServerError", "told to fail", self.headers(request)
            )
        said = {"object": "list", "data": [], "from": self.name}
        return web.json_response(said, headers=self.headers(request))

    def headers(self, request: web.Request) -> dict[str, str]:
        """`Knobs.headers`, filled in."""
        given = self.knobs.headers.items()
        return {name: value.replace("{address}", request.host) for name, value in given}

    async def guarded(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("x-vllm-slo-token", "")
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await self.other(request)

    async def run(self, host: str) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self.guarded)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2
        )
        await runner.setup()
        site = web.TCPSite(runner, host, 0)
        await site.start()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.draining.set)
        port = runner.addresses[0][1]
        ready = {"url": f"http://{host}:{port}", "token": self.token}
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        await self.draining.wait()
        await asyncio.sleep(0.05)  # the state stream says so first
        end_s = time.monotonic() + self.drain_s
        while self.running and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
        await runner.cleanup()


def _event(said: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"


def _named_event(said: dict[str, Any]) -> bytes:
    return f"event: {said['type']}\n".encode() + _event(said)


def _error_event(name: str) -> bytes:
    error = {"message": f"the engine of {name} is dead", "type": "InternalServerError"}
    return _event({"error": {**error, "param": None, "code": 500}})


def _end_with_parent() -> None:
    while os.read(0, 65_536):
        pass
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--private-host", default="127.0.0.1")
    parser.add_argument("--drain-s", type=float, default=30.0)
    parser.add_argument("--name", default=f"fake-{os.getpid()}")
    parser.add_argument("--knobs", default=os.environ.get("FAKE_REPLICA_KNOBS", "{}"))
    given, _ = parser.parse_known_args()
    known = {spec.name for spec in fields(Knobs)}
    knobs = {name: value for name, value in json.loads(given.knobs).items() if name in known}
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(FakeReplica(given.name, Knobs(**knobs), given.drain_s).run(given.private_host))


if __name__ == "__main__":
    main()
