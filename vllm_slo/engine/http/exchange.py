# SPDX-License-Identifier: Apache-2.0
"""One HTTP request and its response, on their way through the middleware."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm_slo.engine.compat.api_server import fail_stored_response
from vllm_slo.engine.gate import CALLER
from vllm_slo.engine.http.messages import error_messages, json_messages, retry_headers
from vllm_slo.engine.http.outcome import Asked
from vllm_slo.engine.http.reading import Rules, read_request, sealed
from vllm_slo.engine.http.response import Response
from vllm_slo.engine.telemetry.faults import Held
from vllm_slo.errors import ConfigError, ForbiddenSLOError, InvalidSLOError
from vllm_slo.slo.body import is_json_type, peek, prompts_in
from vllm_slo.slo.carriers import FORWARDED, carriers_of, slo_headers
from vllm_slo.slo.keys import AGE_KEY, EACH_KEY, EXEMPT_KEY, GROUP_KEY, TICKET_KEY, slo_keys_of
from vllm_slo.slo.verdicts import DECLINED_HEADER, Declined, Invalid, Quoted, Verdict

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("vllm_slo.http")

_READING: Final = Held("The request is served without objectives, or refused if access is checked.")
_DISCONNECT: Final = {"type": "http.disconnect"}


class Exchange:
    """A request and its response; `receive` and `send` are what the application is given, and the
    gate to the engine calls the rest.

    Nothing happens before the application asks for the body, which it does only after it has
    admitted the client. On the routes that always generate, a mistake is answered then; on any
    other route, when the engine is called.

    Invariant: after `refused` is set the client has its whole answer; nothing more is sent to it,
    and the application is told that the client has left.

    Args:
        rules: returns how the request is read; called when needed.
        scope, receive, send: the client's.
        eager: whether mistakes are answered before the application reads the body.
        arrival_s: epoch seconds.
    """

    def __init__(
        self,
        rules: Callable[[], Rules],
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        eager: bool,
        arrival_s: float,
    ) -> None:
        self.refused = False
        self._rules = rules
        self._scope = scope
        self._receive = receive
        self._send = send
        self._eager = eager
        self._arrival_s = arrival_s
        self._body: bytes | None = None
        self._request: Mapping[str, Any] = {}
        self._flat: Mapping[str, Any] | None = None
        self._unread = False  # reading it has failed
        self._numbers = 0
        self._response = Response(send, eager=eager)
        self._answered: asyncio.Event | None = None

    async def run(self, app: ASGIApp) -> None:
        token = CALLER.set(self)
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:
            if not self.refused:
                raise
            # The client has its answer; the application was told that the client left.
            logger.debug("the application raised after a refusal", exc_info=True)
        finally:
            CALLER.reset(token)
            self._body = b""  # tasks that vLLM began here may keep the context for long

    @property
    def _asked(self) -> Asked | None:
        """What the request asks for; None: it was not read yet."""
        return self._response.asked

    # --- the request ------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """The body as one message at the first call; later calls wait for the real client."""
        if self.refused:
            return dict(_DISCONNECT)
        if self._body is not None:
            return await (self._receive() if self._is_plain() else self._client())
        self._body = b""
        if not self._is_json():
            return await self._receive()
        chunks: list[bytes] = []
        is_whole = False
        while not is_whole:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            chunks.append(message.get("body", b""))
            is_whole = not message.get("more_body", False)
        self._body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if self._eager and not await self._is_accepted():
            return dict(_DISCONNECT)
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _is_accepted(self) -> bool:
        """Whether the application gets the request. If not, its client has been answered."""
        with _READING:
            try:
                self._read(None)
                await self._check()
            except (InvalidSLOError, ConfigError) as error:
                await self._refuse_error(error)
            return not self.refused
        self._unread = True
        if self._must_be_read():
            text = "the server could not read the SLO; its log says why"
            await self._refuse(500, "InternalServerError", text, "slo")
        return not self.refused

    def _must_be_read(self) -> bool:
        """Whether a request that could not be read is refused: who may ask for what is checked, or
        that is not known."""
        with _READING:
            return self._rules().access is not None
        return True

    def _is_plain(self) -> bool:
        """Whether the request was read and has no SLO, so vLLM serves it unchanged."""
        return self._eager and self._asked is not None and self._asked.slo is None

    async def _client(self) -> Message:
        """The client's next message, or a disconnect once it has its answer."""
        if self._answered is None:
            self._answered = asyncio.Event()
        client = asyncio.ensure_future(self._receive())
        answered = asyncio.ensure_future(self._answered.wait())
        try:
            await asyncio.wait((client, answered), return_when=asyncio.FIRST_COMPLETED)
            return client.result() if client.done() and not answered.done() else dict(_DISCONNECT)
        finally:
            client.cancel()
            answered.cancel()

    def _is_json(self) -> bool:
        """Whether the body is JSON by its Content-Type; of several headers vLLM reads the first."""
        headers = dict(reversed(self._scope["headers"]))
        return is_json_type(headers.get(b"content-type", b"").decode("latin-1"))

    def _read(self, xargs: Mapping[str, Any] | None) -> None:
        """Read the SLO.

        ``xargs``: the SLO's keys that reached the engine; None: those of the body.

        Raises:
            InvalidSLOError, ConfigError: the request is to be refused.
        """
        if self._asked is None and self._body:
            self._request = peek(self._body) or {}
            self._response.in_background = self._request.get("background") is True
        headers, forwarded = self._scope["headers"], self._scope.get(FORWARDED)
        rules = self._rules()
        asked = read_request(self._request, headers, rules, self._arrival_s, forwarded, xargs)
        self._response.asked = asked

    async def _check(self) -> None:
        """Check more than the SLO; for subclasses."""

    # --- what the gate calls ----------------------------------------------------------------------

    def admit(self, extra_args: Mapping[str, Any] | None, n: int) -> Mapping[str, Any] | None:
        if not self._unread:
            with _READING:
                return self._admitted(extra_args, n)
            self._unread = True
        if self._must_be_read():
            raise InvalidSLOError("slo", "the server could not read it", "its log says why")
        return None

    def _admitted(self, extra_args: Mapping[str, Any] | None, n: int) -> Mapping[str, Any] | None:
        given = slo_keys_of(extra_args)
        if self._asked is None:
            self._read(None)
        xargs = self._request.get("vllm_xargs")
        if given and given != (slo_keys_of(xargs) if isinstance(xargs, Mapping) else {}):
            # They came in another part of the body, such as a form.
            self._read(given)
            self._flat = None
        if self._flat is None:
            self._flat = self._keys(n)
        return self._flat or None

    def _keys(self, n: int) -> dict[str, Any]:
        """Keys for the scheduler; empty: the request passes unchanged.

        ``n``: choices of each prompt.
        """
        assert self._asked is not None
        rules, slo = self._rules(), self._asked.slo
        if slo is None:
            beams = self._request.get("use_beam_search") is True
            exempt = beams and rules.policy.default is not None
            return sealed({EXEMPT_KEY: 1}, rules) if exempt else {}
        flat: dict[str, Any] = slo.to_extra_args(resolved=True)
        internal: dict[str, Any] = {}
        if (forwarded := self._scope.get(FORWARDED)) is not None:
            internal = {AGE_KEY: forwarded["age_ms"], TICKET_KEY: forwarded["ticket"]}
        if n > 1:
            internal[EACH_KEY] = 1
        if self._asked.may_be_declined and (n > 1 or prompts_in(self._request) > 1):
            internal[GROUP_KEY] = uuid.uuid4().hex
        sealing = internal or rules.access is not None
        return sealed({**flat, **internal}, rules) if sealing else flat

    def admit_pooling(self) -> None:
        fields = peek(self._body) if self._body else None
        if carriers_of(fields or {}, slo_headers(self._scope["headers"])).explicit:
            raise InvalidSLOError(
                "slo", "pooling takes no objectives", "leave it out of requests to this route"
            )

    def begin(self) -> int:
        self._numbers += 1
        return self._numbers - 1

    def has_output(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        self._response.has_output = True
        self._response.reports.update(reports)

    async def settle(self, verdict: Verdict | InvalidSLOError) -> bool:
        """As `gate.Caller`.

        Raises:
            asyncio.CancelledError: the request runs in the background, where nothing else ends it.
        """
        if not self.refused and self._response.started:
            if not fail_stored_response(self._scope.get("app"), self._response.stored_id):
                return False
        elif not self.refused:
            await self._tell(verdict)
        if self._response.in_background:
            raise asyncio.CancelledError
        return True

    async def _tell(self, verdict: Verdict | InvalidSLOError) -> None:
        """Answer that the request is not served."""
        if isinstance(verdict, Declined):
            await self._decline(verdict)
        elif isinstance(verdict, Quoted):
            await self._answer(json_messages(200, {"object": "slo.quote", **verdict.quote}))
        elif isinstance(verdict, Invalid):
            field = verdict.text.partition(":")[0]
            await self._refuse(400, "BadRequestError", verdict.text, field)
        else:
            await self._refuse_error(verdict)

    # --- the response -----------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """One message of the application's response; after a refusal it is dropped."""
        if not self.refused:
            await self._response.forward(message)

    # --- refusals ---------------------------------------------------------------------------------

    async def _decline(self, declined: Declined) -> None:
        wait_ms, status = declined.retry_after_ms, self._rules().policy.decline_status
        headers = retry_headers(wait_ms, declined.reason)
        if FORWARDED in self._scope:
            headers.append((DECLINED_HEADER.encode(), b"%d" % wait_ms))
        await self._refuse(status, "slo_unattainable", declined.text, "slo", headers)

    async def _refuse_error(self, error: InvalidSLOError | ConfigError) -> None:
        if isinstance(error, ConfigError):
            logger.error("the SLO configuration cannot be used: %s", error)
            text = "the SLO configuration is broken"
            await self._refuse(500, "InternalServerError", text, None)
        elif isinstance(error, ForbiddenSLOError):
            await self._refuse(403, "PermissionDeniedError", str(error), error.field)
        else:
            await self._refuse(400, "BadRequestError", str(error), error.field)

    async def _refuse(
        self,
        status: int,
        kind: str,
        text: str,
        param: str | None,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Answer in the error shape of the API that was called."""
        path: str = self._scope["path"]
        await self._answer(error_messages(path, status, kind, text, param, headers))

    async def _answer(self, messages: Iterable[Message]) -> None:
        """Send a whole answer and close the exchange."""
        self.refused = True
        self._response.discard()
        for message in messages:
            await self._send(message)
        if self._answered is not None:
            self._answered.set()
