# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/slo/quote``: what a request would be promised if it was sent now.

The body is that of a completion or of a chat. It goes to vLLM's own route of that kind, so it is
authenticated, checked and cut into tokens as if it was to be served; marked with `QUOTE_KEY`, it
comes back from the scheduler with the answer instead of a text.

The engine works a quote out between two steps, so those that ask hold up those that are served. No
more than `MOST` are with the engine at once, and the others are refused rather than made to wait.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from vllm_slo.engine.http_messages import error_messages, json_messages
from vllm_slo.engine.http_outcome import Asked
from vllm_slo.errors import ForbiddenSLOError, InvalidSLOError
from vllm_slo.http_slo import MAX_BODY_BYTES, QUOTE_ROUTE
from vllm_slo.slo import QUOTE_KEY, unpack_quote

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["QUOTE_ROUTE", "answer_quote"]

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
MOST: Final = 8
"""Quotes of one API server that the engine has at once, so about the most it answers in a step."""
RETRY_MS: Final = 1_000

Plan = Callable[["Scope", bytes], tuple[bytes, Asked | None]]
"""The middleware's: the body with its SLO in ``vllm_xargs``."""


async def answer_quote(
    app: ASGIApp, plan: Plan, scope: Scope, receive: Receive, send: Send
) -> None:
    """Serve one request for a quote.

    vLLM lets clients in by the path and the headers, and the body is not read before it asks for
    it; only then it is known which route has to read it.
    """
    attempt = _Attempt(plan, scope, COMPLETIONS, receive)
    await attempt.run(app)
    if attempt.body is not None and attempt.is_chat:
        attempt = _Attempt(plan, scope, CHAT, receive, attempt.body)
        await attempt.run(app)
    for message in attempt.response():
        await send(message)


class _Attempt:
    """The request as it is sent to one route of vLLM, and what came back.

    Invariant: once `refusal` is set, or the body belongs to the other route, vLLM is told that the
    client has left, and what it says counts no more. It is among those `_asking` from when vLLM has
    let the client in and has the whole body, so slow bodies keep nobody out, until it has answered.
    """

    def __init__(
        self, plan: Plan, scope: Scope, route: str, receive: Receive, body: bytes | None = None
    ) -> None:
        root = scope.get("root_path", "").rstrip("/")
        prefix = root if scope["path"].startswith(f"{root}/") else ""
        path = f"{prefix}{route}"
        self.scope = {
            **scope,
            "path": path,
            "raw_path": path.encode(),
            "headers": list(scope["headers"]),
        }
        self.body = body
        self.is_chat = False
        self.refusal: tuple[Message, Message] | None = None
        self._plan = plan
        self._route = route
        self._receive = receive
        self._was_asked = False
        self._sent: list[Message] = []

    async def run(self, app: ASGIApp) -> None:
        """Let vLLM answer."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            if self.refusal is None and not self.is_chat:
                raise
        finally:
            _asking.discard(self)

    async def receive(self) -> Message:
        """What the application is given: the marked body, then what the client does."""
        if self._was_asked:
            return await self._receive()
        self._was_asked = True
        if self.body is None:
            self.body = await self._read()
        changed = None if self.body is None else self._marked(self.body)
        if changed is None or self._is_one_too_many():
            return {"type": "http.disconnect"}
        _asking.add(self)
        headers = self.scope["headers"]
        headers[:] = [(n, v) for n, v in headers if n.lower() != b"content-length"]
        headers.append((b"content-length", b"%d" % len(changed)))
        return {"type": "http.request", "body": changed, "more_body": False}

    async def send(self, message: Message) -> None:
        """Keep what the application answers."""
        self._sent.append(message)

    async def _read(self) -> bytes | None:
        """The whole body; None if the client left, or it is too long."""
        chunks: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            more = message.get("more_body", False)
            if size > MAX_BODY_BYTES:
                self._refuse(413, f"the body is longer than {MAX_BODY_BYTES} bytes", None)
                return None
        return b"".join(chunks)

    def _marked(self, body: bytes) -> bytes | None:
        """The body that vLLM is to read; None if it is refused, or of the other route."""
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict):
            self._refuse(400, "the body is not a JSON object", None)
            return None
        if "messages" in asked and self._route != CHAT:
            self.is_chat = True
            return None
        try:
            _check_single(asked)
            changed = json.loads(self._plan(self.scope, body)[0])
        except ForbiddenSLOError as error:
            self._refuse(403, str(error), error.field, "PermissionDeniedError")
            return None
        except InvalidSLOError as error:
            self._refuse(400, str(error), error.field)
            return None
        changed.pop("stream_options", None)
        changed |= {"stream": False, "n": 1}
        changed["vllm_xargs"] = {**(changed.get("vllm_xargs") or {}), QUOTE_KEY: 1}
        return json.dumps(changed, separators=(",", ":")).encode()

    def _is_one_too_many(self) -> bool:
        """Whether the engine has as many quotes as it may; the client is told then."""
        if len(_asking) < MOST:
            return False
        text = f"{MOST} quotes are being worked out; ask one after another, or in {RETRY_MS} ms"
        headers = [
            (b"retry-after", b"%d" % -(-RETRY_MS // 1000)),
            (b"retry-after-ms", b"%d" % RETRY_MS),
            (b"x-slo-reason", b"too_many_quotes"),
        ]
        self._refuse(429, text, None, "RateLimitError", headers)
        return True

    def _refuse(
        self,
        status: int,
        text: str,
        param: str | None,
        kind: str = "BadRequestError",
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        self.refusal = error_messages(status, kind, text, param, headers)

    def response(self) -> tuple[Message, ...]:
        """What the client is told: the quote, or the error as it came."""
        if self.refusal is not None:
            return self.refusal
        if not self._sent or self._sent[0].get("status") != 200:
            return tuple(self._sent)
        quote = _quote_in(b"".join(part.get("body", b"") for part in self._sent[1:]))
        if quote is None:
            text = "the scheduler of this server gives no quotes: use vllm_slo.Scheduler"
            return error_messages(501, "NotImplementedError", text, None)
        return json_messages(200, {"object": "slo.quote", **quote})


_asking: Final[set[_Attempt]] = set()
"""Those whose body vLLM has, in this process: one API server."""


def _check_single(asked: dict[str, Any]) -> None:
    """Refuse what the engine would serve as several requests, or what is none."""
    prompts = asked.get("prompt")
    listed = prompts if isinstance(prompts, list) else []
    if len(listed) > 1 and not isinstance(listed[0], int):
        raise InvalidSLOError("prompt", f"{len(listed)} prompts", "ask for one at a time")
    if "messages" not in asked and prompts is None and asked.get("prompt_embeds") is None:
        raise InvalidSLOError("prompt", "there is none", "give the body of a completion or a chat")


def _quote_in(body: bytes) -> dict[str, Any] | None:
    try:
        choices = json.loads(body)["choices"]
        return unpack_quote(choices[0].get("stop_reason"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
