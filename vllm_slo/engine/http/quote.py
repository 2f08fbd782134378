# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/slo/quote``: what a request would be promised if it was sent now.

The body is that of a completion or of a chat. It goes to vLLM's own route of that kind, which
authenticates, checks and tokenises it as if it was to be served. Marked with `QUOTE_KEY`, it comes
back from the scheduler with the quote instead of a text.

The engine works out quotes between two steps, so they delay the requests that are served. At most
`MAX_QUOTES` are in the engine at once; others are refused rather than made to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm_slo.engine.http.exchange import Exchange
from vllm_slo.engine.http.messages import error_messages, retry_headers
from vllm_slo.engine.http.reading import Rules, sealed
from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo.body import MAX_BODY_BYTES, prompts_in
from vllm_slo.slo.keys import QUOTE_KEY

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
MAX_QUOTES: Final = 8
"""Quotes of one API server in the engine at once, about as many as it answers in a step."""
RETRY_MS: Final = 1_000


async def answer_quote(
    app: ASGIApp,
    rules: Callable[[], Rules],
    scope: Scope,
    receive: Receive,
    send: Send,
    arrival_s: float,
) -> None:
    """Serve one request for a quote.

    vLLM admits clients by the path and the headers, and asks for the body only then. The body says
    which of its routes has to read it.
    """
    quote = _QuoteExchange(rules, scope, COMPLETIONS, receive, send, arrival_s)
    await quote.run(app)
    if quote.chat_body is not None:
        body, is_read = quote.chat_body, False

        async def again() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        quote = _QuoteExchange(rules, scope, CHAT, again, send, arrival_s)
        await quote.run(app)
    await quote.finish()


class _QuoteExchange(Exchange):
    """A request for a quote, as it is sent to one route of vLLM.

    Invariant: it is in `_in_engine` from when vLLM has admitted the client and has the whole body,
    so that slow bodies take no place, until vLLM has answered.
    """

    def __init__(
        self,
        rules: Callable[[], Rules],
        scope: Scope,
        route: str,
        receive: Receive,
        send: Send,
        arrival_s: float,
    ) -> None:
        root = scope.get("root_path", "").rstrip("/")
        prefix = root if scope["path"].startswith(f"{root}/") else ""
        path = f"{prefix}{route}"
        self.chat_body: bytes | None = None
        self._route = route
        self._sent: list[Message] = []
        inner = {**scope, "path": path, "raw_path": path.encode()}
        super().__init__(rules, inner, receive, send, eager=True, arrival_s=arrival_s)

    async def run(self, app: ASGIApp) -> None:
        try:
            await super().run(app)
        finally:
            _in_engine.discard(self)

    async def _check(self) -> None:
        """Refuse the request, or let the engine have it."""
        body = self._body or b""
        if "messages" in self._request and self._route != CHAT:
            self.chat_body, self.refused = body, True  # for the other route to read
            return
        if not self._request:
            await self._refuse(400, "BadRequestError", "the body is not a JSON object", None)
        elif len(body) > MAX_BODY_BYTES:
            text = f"the body is longer than {MAX_BODY_BYTES} bytes"
            await self._refuse(413, "BadRequestError", text, None)
        elif len(_in_engine) >= MAX_QUOTES:
            await self._refuse_too_many()
        else:
            _check_single(self._request)
            _in_engine.add(self)

    def _must_be_read(self) -> bool:
        """True: what is not marked as a quote would be served."""
        return True

    async def _refuse_too_many(self) -> None:
        text = (
            f"{MAX_QUOTES} quotes are being worked out; ask one after another, or in {RETRY_MS} ms"
        )
        headers = retry_headers(RETRY_MS, "too_many_quotes")
        await self._refuse(429, "RateLimitError", text, None, headers)

    def _keys(self, n: int) -> dict[str, Any]:
        slo = self._asked.slo if self._asked is not None else None
        flat = {} if slo is None else slo.to_extra_args(resolved=True)
        return sealed({**flat, QUOTE_KEY: 1}, self._rules())

    async def send(self, message: Message) -> None:
        """Keep the application's answer; the quote itself does not come this way."""
        if not self.refused:
            self._sent.append(message)

    async def finish(self) -> None:
        """Pass on the error of vLLM if it has answered without a quote."""
        if self.refused:
            return
        if self._sent and self._sent[0].get("status") != 200:
            await self._answer(self._sent)
            return
        text = "the scheduler of this server gives no quotes: use vllm_slo.Scheduler"
        path = self._scope["path"]
        await self._answer(error_messages(path, 501, "NotImplementedError", text, None))


_in_engine: Final[set[_QuoteExchange]] = set()
"""The requests for a quote whose body vLLM has, of this API server."""


def _check_single(asked: Mapping[str, Any]) -> None:
    """Refuse a body with several prompts, or with none."""
    if (prompts := prompts_in(asked)) > 1:
        raise InvalidSLOError("prompt", f"{prompts} prompts", "ask for one at a time")
    if not any(asked.get(key) is not None for key in ("messages", "prompt", "prompt_embeds")):
        raise InvalidSLOError("prompt", "there is none", "give the body of a completion or a chat")
