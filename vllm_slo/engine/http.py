# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware: turns the SLO of an HTTP request into `vllm_xargs`, and the outcome back.

`vllm serve ... --middleware vllm_slo.engine.http.SLOMiddleware`

vLLM installs this middleware outside its own, authentication included. It therefore does nothing
before the application asks for the body, which it does only after it has let the client in.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypedDict

from vllm_slo.access import Access, Seal
from vllm_slo.config import SLOConfig
from vllm_slo.engine.http_messages import error_messages
from vllm_slo.engine.http_outcome import Asked, Declined, StreamGate, rewrite_event, rewrite_json
from vllm_slo.engine.http_quote import QUOTE_ROUTE, answer_quote
from vllm_slo.engine.live_page import LivePage
from vllm_slo.errors import ConfigError, ForbiddenSLOError, InvalidSLOError
from vllm_slo.http_slo import MAX_BODY_BYTES, ROUTES, Policy, carriers_of, slo_headers
from vllm_slo.slo import (
    AGE_KEY,
    SEAL_KEY,
    SLO,
    STREAM_KEY,
    TICKET_KEY,
    OnUnattainable,
    is_slo_key,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["FORWARDED", "Forwarded", "SLOMiddleware", "plan_request"]

logger = logging.getLogger("vllm_slo.http")

MAX_RESPONSE_BYTES: Final = 64 * 1024 * 1024
FORWARDED: Final = "vllm_slo.forwarded"
"""Key of the ASGI scope that holds what a trusted front says of the request it sends."""

_BODY_MARKS: Final = (b'"slo', b"service_tier", b"prefill_ddl")
_DISCONNECT: Final = {"type": "http.disconnect"}


class Forwarded(TypedDict):
    """What the front of several replicas says of one request.

    Attributes:
        age_ms: for how long the front has had it already.
        ticket: its mark at this replica, from 1.
        on_unattainable: what to do if it cannot be promised, whatever it says itself: refuse it
            (the front goes on elsewhere) or serve it; None: as it says.
    """

    age_ms: float
    ticket: int
    on_unattainable: OnUnattainable | None


class SLOMiddleware:
    """Pure ASGI middleware for the generation routes of vLLM's OpenAI server.

    Request: the body field ``slo``, the ``slo_*`` keys of ``vllm_xargs``, the SLO headers and
    ``service_tier`` are resolved into flat ``vllm_xargs`` keys; a mistake is answered with 400 in
    OpenAI's error shape before the engine sees the request, and what its API key may not ask for
    (section ``access`` of the configuration) with 403. A request with none of these carriers
    passes through unchanged, as does one whose body is above 32 MiB or is not JSON.

    Response (only of requests with a carrier, or if a default class is configured): the
    scheduler's report becomes the top-level field ``slo``, ``service_tier`` the tier served (rule:
    `served_service_tier`), and a declined request becomes 429 with ``Retry-After``. In a stream of
    completions or chat both are in the chunk that ends a choice; only requests with a carrier of
    their own get them there (they are marked with `STREAM_KEY` for the scheduler).

    Behind a front the scope holds `FORWARDED`, and whoever puts it there keeps clients from doing
    so. The scheduler is then told of it for every request that has an SLO, its own or the default.

    Args:
        app: the application behind this middleware.
        clock: epoch seconds, for `prefill_ddl`.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.time) -> None:
        self.app = app
        self._clock = clock
        self._policy: Policy | None = None
        self._access: Access | None = None
        self._seal = Seal.from_environment()
        self._page = LivePage()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; all but generation requests, quotes and the live page pass."""
        if await self._page.answered(scope, send):
            return
        if _is_post(scope, {QUOTE_ROUTE}):
            await answer_quote(self.app, self.plan, scope, receive, send)
            return
        if not _is_generation(scope):
            await self.app(scope, receive, send)
            return
        inner_scope = {**scope, "headers": list(scope["headers"])}
        exchange = _Exchange(self, inner_scope, receive, send)
        try:
            await self.app(inner_scope, exchange.receive, exchange.send)
        except Exception:
            if not exchange.refused:
                raise
            # The client has its answer; the application was told that the client left.
            logger.debug("the application raised after a refusal", exc_info=True)

    def plan(self, scope: Scope, body: bytes) -> tuple[bytes, Asked | None]:
        """`plan_request` with the server's configuration, which is read at the first call.

        Raises:
            InvalidSLOError: the request is to be refused.
            ConfigError: the server's configuration cannot be used.
        """
        if self._policy is None:
            state = getattr(scope.get("app"), "state", None)
            vllm_config = getattr(state, "vllm_config", None)
            additional = getattr(vllm_config, "additional_config", None)
            config = SLOConfig.from_additional_config(additional)
            self._access = None if config.access is None else Access(config.access)
            outputs = getattr(vllm_config, "structured_outputs_config", None)
            thinking = bool(getattr(outputs, "reasoning_parser", ""))
            self._policy = Policy.from_config(config, thinking=thinking)
        forwarded = scope.get(FORWARDED)
        headers, now_s = scope["headers"], self._clock()
        return plan_request(body, headers, self._policy, now_s, forwarded, self._access, self._seal)


def _is_generation(scope: Scope) -> bool:
    """Whether this is a JSON POST to one of `ROUTES` that is not too large to look into."""
    if not _is_post(scope, ROUTES):
        return False
    headers = dict(reversed(scope["headers"]))  # of several the first, which is the one vLLM reads
    if not headers.get(b"content-type", b"").lower().startswith(b"application/json"):
        return False
    length = headers.get(b"content-length", b"0")
    return not (length.isdigit() and int(length[:12]) > MAX_BODY_BYTES)


def _is_post(scope: Scope, routes: Collection[str]) -> bool:
    """Whether this is a POST to one of ``routes``."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path in routes or path.removeprefix(root) in routes


def plan_request(
    body: bytes,
    raw_headers: Sequence[tuple[bytes, bytes]],
    policy: Policy,
    arrival_s: float,
    forwarded: Forwarded | None = None,
    access: Access | None = None,
    seal: Seal | None = None,
) -> tuple[bytes, Asked | None]:
    """The body to forward, and what was asked; None when the response is none of our business.

    Args:
        body: the request body as received; returned as it is unless it must change.
        raw_headers: ASGI headers, names in lower case.
        policy: classes, service tiers and the default.
        arrival_s: arrival here, epoch seconds.
        forwarded: what the front says of the request, if it came through one.
        access: what its key may ask for; None: anything.
        seal: proves to the scheduler that this was checked; None: it does not ask for a proof.

    Raises:
        InvalidSLOError: a carrier holds a mistake, or two carriers disagree.
        ForbiddenSLOError: the key may not ask for that.
    """
    fallback = None if policy.default is None else Asked(policy.default, None)
    headers = slo_headers(raw_headers)
    telling = fallback is not None and (forwarded is not None or access is not None)
    if not headers and not telling and not any(mark in body for mark in _BODY_MARKS):
        return body, fallback
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return body, None  # the application has its own answer to malformed JSON
    if not isinstance(request, dict):
        return body, None
    carriers = carriers_of(request, headers)
    if carriers.empty and not telling:
        return body, fallback
    before_s = 0.0 if forwarded is None else forwarded["age_ms"] / 1e3
    slo = carriers.resolve(policy, arrival_s - before_s)
    asked = Asked(policy.default if slo is None else slo, carriers.service_tier)
    flat = {} if slo is None else slo.to_extra_args(resolved=True)
    if access is not None and asked.slo is not None:
        ruled = access.ruled(asked.slo, raw_headers, policy.classes, own=slo is not None)
        asked = replace(asked, slo=ruled)
        flat = ruled.to_extra_args(resolved=True)
    if forwarded is not None and asked.slo is not None:
        wish = _as_forwarded(asked.slo, request, forwarded)
        asked = replace(asked, slo=wish)
        flat = wish.to_extra_args(resolved=True)
        flat |= {AGE_KEY: forwarded["age_ms"], TICKET_KEY: forwarded["ticket"]}
    # A Responses request has `input`, and its stream ends with the whole response.
    if request.get("stream") and "input" not in request and not carriers.empty:
        flat[STREAM_KEY] = 1
    elif not flat and not carriers.in_body and not carriers.in_xargs:
        return body, asked
    if access is not None and seal is not None and flat:
        flat[SEAL_KEY] = seal.of(flat)
    return _with_xargs(request, flat), asked


def _as_forwarded(slo: SLO, request: Mapping[str, Any], forwarded: Forwarded) -> SLO:
    """`slo` with what the front wants if no promise can be made.

    A request of several choices or prompts is not refused for the front: some might be declined
    beside others that run, and the response could be neither.
    """
    wish = forwarded["on_unattainable"]
    if wish is None or slo.effective_tier != "guaranteed":
        return slo
    if wish == "decline" and _is_several(request):
        return slo
    return replace(slo, on_unattainable=wish)


def _is_several(request: Mapping[str, Any]) -> bool:
    """Whether the engine serves this as more than one request; a list of ints is one prompt."""
    prompts = [request.get(key) for key in ("prompt", "prompt_embeds")]
    listed = [p for p in prompts if isinstance(p, list) and not isinstance(next(iter(p), 0), int)]
    return request.get("n") not in (None, 1) or sum(map(len, listed)) > 1


def _with_xargs(request: dict[str, Any], flat: Mapping[str, Any]) -> bytes:
    """`request` as JSON, without ``slo`` and with `flat` as the only SLO keys of its xargs."""
    others = {k: v for k, v in (request.get("vllm_xargs") or {}).items() if not is_slo_key(k)}
    changed = {key: value for key, value in request.items() if key != "slo"}
    changed["vllm_xargs"] = {**others, **flat}
    try:
        return json.dumps(changed, separators=(",", ":")).encode()
    except RecursionError:
        raise InvalidSLOError("body", "the JSON is nested too deeply", "send flat JSON") from None


class _Exchange:
    """One request and its response. `receive` and `send` are what the application is given.

    Invariant: after `refused` is set the client has its whole answer; nothing more is sent to it,
    and the application is told that the client has left.
    """

    def __init__(
        self, middleware: SLOMiddleware, scope: dict[str, Any], receive: Receive, send: Send
    ) -> None:
        self.refused = False
        self._middleware = middleware
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body_was_read = False
        self._asked: Asked | None = None
        self._streams = False
        self._gate: StreamGate | None = None
        self._held: list[Message] = []

    async def receive(self) -> Message:
        """The body as one message at the first call; later calls wait for the real client."""
        if self.refused:
            return dict(_DISCONNECT)
        if self._body_was_read:
            return await self._receive()
        self._body_was_read = True
        chunks: list[bytes] = []
        size, more = 0, True
        while more and size <= MAX_BODY_BYTES:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            more = message.get("more_body", False)
        body = b"".join(chunks)
        if size <= MAX_BODY_BYTES:
            changed = await self._plan(body)
            if changed is None:
                return dict(_DISCONNECT)
            body = changed
        return {"type": "http.request", "body": body, "more_body": more}

    async def _plan(self, body: bytes) -> bytes | None:
        """The body to forward; None when the request was refused."""
        try:
            changed, self._asked = self._middleware.plan(self._scope, body)
        except ForbiddenSLOError as error:
            await self._refuse(403, "PermissionDeniedError", str(error), error.field)
            return None
        except InvalidSLOError as error:
            await self._refuse(400, "BadRequestError", str(error), error.field)
            return None
        except ConfigError as error:
            logger.error("the SLO configuration cannot be used: %s", error)
            await self._refuse(500, "InternalServerError", "the SLO configuration is broken", None)
            return None
        if changed is not body:
            self._scope["headers"][:] = _resized(self._scope["headers"], len(changed))
        return changed

    async def send(self, message: Message) -> None:
        """Forward, hold or rewrite one message of the response."""
        if self.refused:
            return
        if message["type"] == "http.response.start" and self._wants(message):
            self._held.append(message)
        elif not self._held:
            await self._pass(message)
        elif message["type"] != "http.response.body":
            self._held.append(message)
            await self._release()
        else:
            self._held.append(message)
            await (self._on_event(message) if self._gate else self._on_json(message))

    def _wants(self, start: Message) -> bool:
        """Whether the response has to be looked at before it goes out."""
        if self._asked is None or start["status"] != 200:
            return False
        kind = dict(start.get("headers", ())).get(b"content-type", b"").lower()
        if kind.startswith(b"text/event-stream"):
            self._streams = True
            self._gate = StreamGate() if self._asked.may_be_declined else None
            return self._gate is not None
        return bool(kind.startswith(b"application/json"))

    async def _on_event(self, message: Message) -> None:
        assert self._gate is not None
        more = message.get("more_body", False)
        verdict = self._gate.feed(message.get("body", b""), more)
        if isinstance(verdict, Declined):
            await self._decline(verdict)
        elif not verdict:
            await self._release()

    async def _on_json(self, message: Message) -> None:
        if message.get("more_body", False):
            if sum(len(held.get("body", b"")) for held in self._held) > MAX_RESPONSE_BYTES:
                await self._release()
            return
        assert self._asked is not None
        start, *parts = self._held
        outcome = rewrite_json(b"".join(part.get("body", b"") for part in parts), self._asked)
        if isinstance(outcome, Declined):
            await self._decline(outcome)
            return
        headers = _resized(start.get("headers", ()), len(outcome))
        self._held = [
            {**start, "headers": headers},
            {"type": "http.response.body", "body": outcome, "more_body": False},
        ]
        await self._release()

    async def _release(self) -> None:
        """Send what is held, in order; from here on everything passes."""
        held, self._held = self._held, []
        for message in held:
            await self._pass(message)

    async def _pass(self, message: Message) -> None:
        """Send one message; the report in an event of a stream is moved to its place."""
        if self._streams and message.get("body"):
            assert self._asked is not None
            message = {**message, "body": rewrite_event(message["body"], self._asked)}
        await self._send(message)

    async def _decline(self, declined: Declined) -> None:
        retry_ms = declined.retry_after_ms
        extra = [
            (b"retry-after", str(max(1, -(-retry_ms // 1000))).encode()),
            (b"retry-after-ms", str(retry_ms).encode()),
            (b"x-slo-reason", b"unattainable"),
        ]
        kept = [
            (name, value)
            for name, value in self._held[0].get("headers", ())
            if not name.lower().startswith(b"content-")
        ]
        self._held = []
        text = f"the SLO cannot be kept now; retry after {retry_ms} ms, or drop on_unattainable"
        await self._refuse(429, "slo_unattainable", text, "slo", [*kept, *extra])

    async def _refuse(
        self,
        status: int,
        kind: str,
        text: str,
        param: str | None,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Answer in OpenAI's error shape and close the exchange."""
        self.refused = True
        for message in error_messages(status, kind, text, param, [*headers]):
            await self._send(message)


def _resized(headers: Iterable[tuple[bytes, bytes]], size: int) -> list[tuple[bytes, bytes]]:
    """`headers` with the content-length, if there is one, set to `size`."""
    return [
        (name, b"%d" % size if name.lower() == b"content-length" else value)
        for name, value in headers
    ]
