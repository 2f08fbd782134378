# SPDX-License-Identifier: Apache-2.0
"""A draft server's end of the link to one of its verifiers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_slo.core.clock import Clock, SystemClock
from vllm_slo.core.speculation.draft_sessions import DraftAsk, DraftTokens, HeldPrefixes
from vllm_slo.wire.draft_messages import (
    MAX_SESSIONS,
    RETRY_S,
    Answer,
    Draft,
    Drafted,
    FromDrafter,
    FromVerifier,
    Hello,
    Pong,
    Refused,
    Welcome,
    WireError,
    encode,
    from_verifier,
)
from vllm_slo.wire.draft_socket import Socket, derive_keys, drafter_socket

logger = logging.getLogger("vllm_slo.draft_server")

FRUITLESS_S: Final = 10.0
"""Time without a connection after which the socket is opened again: ZMQ stops trying for good if
something else listens at the verifier's address."""
_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True, slots=True)
class Round:
    """A request of the verifier for drafts.

    Attributes:
        epoch, number: the answer names them.
        sessions: numbers of the sessions, one for each ask.
        ends_s: when the verifier stops waiting.
    """

    epoch: int
    number: int
    sessions: list[int]
    asks: list[DraftAsk]
    taken_s: float
    ends_s: float


class VerifierLink:
    """A drafter's end of the link; it keeps the connection and the prefixes of all sessions.

    Raises:
        ConfigError: the token cannot be used, or ZMQ has no CURVE.
    """

    def __init__(
        self, address: str, token: str, hello: Hello, *, clock: Clock | None = None
    ) -> None:
        self._address, self._hello = address, hello
        self._keys = derive_keys(token)
        self._clock = clock or SystemClock()
        self._held = HeldPrefixes(hello.max_sessions)
        self._logged = ""
        self._context = zmq.Context()
        self._forget()
        self._open()

    # --- the socket ------------------------------------------------------------------------------

    def _open(self) -> None:
        self._socket = drafter_socket(self._context, self._keys, self._address)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(self._address)
        self._connected = False
        self._opened_s = self._clock.monotonic_s()

    def _close_socket(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def close(self) -> None:
        """Close the link; messages that were sent still go out."""
        self._close_socket()
        self._context.term()

    def _forget(self) -> None:
        """Drop everything that the last verifier sent."""
        self._epoch: int | None = None
        self._hello_due_s: float | None = None
        self._newest: Draft | None = None
        self._lost: list[int] = []
        self._taken_s = self._ends_s = 0.0
        self._held.clear()

    def _log(self, event: str, level: int = logging.WARNING) -> None:
        """Log a change once, because ZMQ tries to connect several times a second."""
        if event != self._logged:
            self._logged = event
            logger.log(level, "the verifier at %s %s", self._address, event)

    # --- listening -------------------------------------------------------------------------------

    def listen(self, timeout_s: float) -> None:
        """Process the verifier's messages; wait up to ``timeout_s`` for the first."""
        now_s = self._clock.monotonic_s()
        if self._hello_due_s is not None and now_s >= self._hello_due_s:
            self._hello_due_s = None if self._send(self._hello) else now_s
        elif not self._connected and now_s - self._opened_s > FRUITLESS_S:
            self._close_socket()
            self._open()
        self._poller.poll(round(timeout_s * 1e3))
        self._watch()
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)

    def _watch(self) -> None:
        """Process connects and disconnects."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._forget()
                self._connected = True
                self._hello_due_s = self._clock.monotonic_s()
            elif event == zmq.EVENT_DISCONNECTED:
                if self._connected:
                    self._log("has disconnected; trying to reconnect")
                    self._opened_s = self._clock.monotonic_s()
                self._forget()
                self._connected = False
            else:
                self._log("has another token, or is not a verifier")

    def _take(self, frames: list[bytes]) -> None:
        try:
            message = from_verifier(frames[0] if len(frames) == 1 else b"")
        except WireError as error:
            self._log(f"sent a broken message: {error}")
            return
        self._handle(message)

    def _handle(self, message: FromVerifier) -> None:
        if self._hello_due_s is not None:
            return  # it was sent on an earlier connection, or after a refusal
        if isinstance(message, Welcome):
            self._forget()
            self._epoch = message.epoch
            self._log("is connected", logging.INFO)
        elif isinstance(message, Refused):
            self._forget()
            self._hello_due_s = self._clock.monotonic_s() + RETRY_S
            self._log(f"refuses: {message.reason}")
        elif not isinstance(message, Draft):
            self._send(Pong())
        elif message.epoch == self._epoch:
            self._apply(message)
        else:
            self._hello_due_s = self._clock.monotonic_s()

    def _apply(self, draft: Draft) -> None:
        self._held.end(draft.ended)
        self._lost += [
            ask.session
            for ask in draft.asks
            if not self._held.change(ask.session, ask.keep, ask.tokens)
        ]
        if draft.asks:
            self._newest = draft
            self._taken_s = self._clock.monotonic_s()
            self._ends_s = self._taken_s + draft.deadline_s

    # --- drafting --------------------------------------------------------------------------------

    @property
    def sockets(self) -> tuple[Socket, Socket]:
        """What becomes readable when `listen` has something to do. They may be others after it."""
        return self._socket, self._monitor

    @property
    def has_round(self) -> bool:
        """Whether the verifier waits for drafts that `take_round` has not returned yet."""
        return self._newest is not None

    def take_round(self) -> Round | None:
        """The newest round, once; None if there is none."""
        draft, self._newest = self._newest, None
        if draft is None:
            return None
        wire_asks = [ask for ask in draft.asks if ask.session in self._held]
        asks = [
            DraftAsk(self._held.prefix(ask.session), ask.grant, ask.temperature)
            for ask in wire_asks
        ]
        sessions = [ask.session for ask in wire_asks]
        return Round(draft.epoch, draft.round, sessions, asks, self._taken_s, self._ends_s)

    def awaits(self, taken: Round) -> bool:
        """Whether the drafts of a round are still of use: its verifier is connected, and has not
        sent a newer one."""
        return taken.epoch == self._epoch and self._newest is None

    def answer(self, done: Round, drafts: Sequence[DraftTokens]) -> None:
        """Send a round's drafts, unless its verifier has disconnected."""
        if done.epoch != self._epoch:
            return
        answers = [
            Answer(
                session=session,
                at=len(ask.prefix),
                tokens=list(draft.tokens),
                probabilities=list(draft.probabilities),
            )
            for session, ask, draft in zip(done.sessions, done.asks, drafts, strict=True)
        ]
        lost, self._lost = self._lost[:MAX_SESSIONS], self._lost[MAX_SESSIONS:]
        self._send(
            Drafted(
                epoch=done.epoch,
                round=done.number,
                answers=answers,
                lost=lost,
                draft_s=self._clock.monotonic_s() - done.taken_s,
            )
        )

    def _send(self, message: FromDrafter) -> bool:
        """Send a message; false, and nothing sent, if there is no connection or it is stuck."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def listen_to(links: Sequence[VerifierLink], timeout_s: float) -> None:
    """Process the messages of several verifiers; wait up to ``timeout_s`` for the first."""
    poller = zmq.Poller()
    for link in links:
        for socket in link.sockets:
            poller.register(socket, zmq.POLLIN)
    poller.poll(round(timeout_s * 1e3))
    for link in links:
        link.listen(0.0)
