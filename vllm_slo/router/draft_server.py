# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo draft-server``: a small model that drafts for a verifier on another machine.

It connects to the verifier, says hello and then drafts what it is asked for (GoodSpeed, section
III-A), in the format of `vllm_slo.wire.draft_messages`. It waits for a verifier that is not there,
and looks for it again when it is gone, for ever. SIGTERM and SIGINT end it after the step at hand.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import Final, NoReturn, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_slo.core.clock import Clock, SystemClock
from vllm_slo.core.speculation.draft_sessions import DraftAsk, DraftTokens, HeldPrefixes
from vllm_slo.errors import ConfigError
from vllm_slo.router import draft_fleet
from vllm_slo.wire.draft_messages import (
    MAX_NAME,
    MAX_SESSIONS,
    NAME_PATTERN,
    RETRY_S,
    WIRE,
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
from vllm_slo.wire.draft_socket import (
    TOKEN_VARIABLE,
    check_address,
    derive_keys,
    drafter_socket,
    read_token,
)

__all__ = ["Drafter", "VerifierLink", "add_arguments", "run", "serve"]

logger = logging.getLogger("vllm_slo.draft_server")

LOOK_S: Final = 0.2
"""How often an idle server looks whether it should end."""
FRUITLESS_S: Final = 10.0
"""After so long without a connection the socket is opened anew: ZMQ gives up for good where
something else listens at the verifier's address."""
_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Drafter(Protocol):
    """What drafts: `engine.speculation.draft_engine.DraftEngine`, or what a test has in its
    place."""

    def draft(
        self, asks: Sequence[DraftAsk], deadline_s: float, interrupted: Callable[[], bool]
    ) -> list[DraftTokens]:
        """A draft for each ask, in order, none longer than granted; possibly empty.

        Args:
            asks: what to go on from.
            deadline_s: seconds from now after which nobody wants them; what there is by then.
            interrupted: asked now and then; when true, nobody wants them any more.
        """


@dataclass(frozen=True, slots=True)
class Round:
    """What the verifier waits for.

    Attributes:
        epoch, number: that the answer has to name.
        sessions: numbers of the sessions, one for each ask.
        asks: what to draft.
        taken_s: when it came.
        ends_s: when nobody wants the answer any more.
    """

    epoch: int
    number: int
    sessions: list[int]
    asks: list[DraftAsk]
    taken_s: float
    ends_s: float


class VerifierLink:
    """A drafter's end of the link: keeps it open, and what the verifier said of its sessions.

    Args:
        address: the verifier's.
        token: the cluster's secret.
        hello: how this drafter introduces itself.
        clock: None: the machine's.

    Raises:
        ConfigError: the token cannot be used, or ZMQ lacks CURVE.
    """

    def __init__(
        self, address: str, token: str, hello: Hello, *, clock: Clock | None = None
    ) -> None:
        self._address, self._hello = address, hello
        self._keys = derive_keys(token)
        self._clock = clock or SystemClock()
        self._held = HeldPrefixes(hello.max_sessions)
        self._said = ""
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
        """Leave; what was sent last still goes out."""
        self._close_socket()
        self._context.term()

    def _forget(self) -> None:
        """Nothing that the last verifier said holds any more."""
        self._epoch: int | None = None
        self._hello_due_s: float | None = None
        self._newest: Draft | None = None
        self._lost: list[int] = []
        self._taken_s = self._ends_s = 0.0
        self._held.clear()

    def _say(self, what: str, level: int = logging.WARNING) -> None:
        """Log what is new; ZMQ tries to connect several times a second."""
        if what != self._said:
            self._said = what
            logger.log(level, "the verifier at %s %s", self._address, what)

    # --- listening -------------------------------------------------------------------------------

    def listen(self, timeout_s: float) -> None:
        """Take in what the verifier says; waits up to ``timeout_s`` for the first of it."""
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
        """Follow how the connection comes and goes."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._forget()
                self._connected = True
                self._hello_due_s = self._clock.monotonic_s()
            elif event == zmq.EVENT_DISCONNECTED:
                if self._connected:
                    self._say("is gone; looking for it")
                    self._opened_s = self._clock.monotonic_s()
                self._forget()
                self._connected = False
            else:
                self._say("does not know the token, or is something else")

    def _take(self, frames: list[bytes]) -> None:
        try:
            message = from_verifier(frames[0] if len(frames) == 1 else b"")
        except WireError as error:
            self._say(f"sent nonsense: {error}")
            return
        self._handle(message)

    def _handle(self, message: FromVerifier) -> None:
        if self._hello_due_s is not None:
            return  # it was sent on a connection before this one, or to who was refused
        if isinstance(message, Welcome):
            self._forget()
            self._epoch = message.epoch
            self._say("is there", logging.INFO)
        elif isinstance(message, Refused):
            self._forget()
            self._hello_due_s = self._clock.monotonic_s() + RETRY_S
            self._say(f"refuses: {message.reason}")
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
    def has_round(self) -> bool:
        """Whether the verifier waits for drafts that `take_round` has not given yet."""
        return self._newest is not None

    def take_round(self) -> Round | None:
        """The newest round, once; None where there is none."""
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

    def answer(self, done: Round, drafts: Sequence[DraftTokens]) -> None:
        """Send a round's drafts, unless its verifier is gone by now."""
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
        """False if there is no connection, or it is stuck: then nothing is sent."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def serve(
    link: VerifierLink,
    drafter: Drafter,
    stopped: Callable[[], bool],
    *,
    clock: Clock | None = None,
) -> None:
    """Draft what the verifier asks for until ``stopped`` says so.

    A round ends early when a newer one has come, and then is not answered.
    """
    clock = clock or SystemClock()

    def interrupted() -> bool:
        link.listen(0.0)
        return link.has_round or stopped()

    while not stopped():
        link.listen(LOOK_S)
        wanted = link.take_round()
        if wanted is None:
            continue
        left_s = max(wanted.ends_s - clock.monotonic_s(), 0.0)
        drafts = drafter.draft(wanted.asks, left_s, interrupted)
        if not link.has_round:
            link.answer(wanted, drafts)


# --- the command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Our own flags; all others are those of vLLM's engine."""
    parser.add_argument(
        "--model", required=True, help="name or folder of a small model; 'tiny' is the built-in one"
    )
    parser.add_argument(
        "--connect", required=True, metavar="ADDRESS", help="the verifier's, tcp://HOST:PORT"
    )
    parser.add_argument(
        "--token-file",
        "--token_file",
        metavar="FILE",
        help=f"holds the secret of the cluster; without it ${TOKEN_VARIABLE}",
    )
    parser.add_argument(
        "--max-sessions",
        "--max_sessions",
        type=int,
        default=64,
        help="requests drafted for at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--name", help="a name that no other draft server of the verifier has (default: host-pid)"
    )
    ray = parser.add_argument_group("several, placed and watched by Ray (vllm-slo[ray])")
    ray.add_argument("--count", type=int, help="number of draft servers")
    ray.add_argument(
        "--ray-address",
        "--ray_address",
        help="Ray cluster to run on; default with --count: one of its own on this machine",
    )
    for unit, default in (("cpus", 1.0), ("gpus", 0.0)):
        ray.add_argument(
            f"--{unit}-per-server",
            f"--{unit}_per_server",
            type=float,
            default=default,
            help=f"{unit.upper()} that each sets aside (default: %(default)g)",
        )


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Draft until SIGTERM or SIGINT; then the process ends with status 0.

    Raises:
        VllmSLOError: a flag cannot be used, or the model cannot be loaded.
    """
    return draft_fleet.run(args, rest) if draft_fleet.asked_for(args) else _run_one(args, rest)


def _run_one(args: argparse.Namespace, rest: Sequence[str]) -> NoReturn:
    """Be a draft server until a signal comes."""
    check_address(args.connect, "--connect", connects=True)
    name = args.name or f"{socket.gethostname()}-{os.getpid()}"
    if len(name) > MAX_NAME or not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"--name {name}: use up to {MAX_NAME} letters, digits, and ._:@/-")
    if not 1 <= args.max_sessions <= MAX_SESSIONS:
        raise ConfigError(f"--max-sessions {args.max_sessions}: choose 1 to {MAX_SESSIONS}")
    token = read_token(args.token_file)
    derive_keys(token)  # refused before a model is loaded
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    logger.setLevel(logging.INFO)
    # Nothing else of this package needs vLLM, and `--help` should not wait for it.
    engine = import_module("vllm_slo.engine.speculation.draft_engine").DraftEngine(
        args.model, rest, max_sessions=args.max_sessions
    )
    hello = Hello(
        wire=WIRE,
        name=name,
        model=args.model,
        vocab_size=engine.vocab_size,
        vocabulary=engine.vocabulary,
        max_model_len=engine.max_model_len,
        max_sessions=args.max_sessions,
    )
    stop = _Stop()
    logger.info("%s drafts with %s; looking for a verifier at %s", name, args.model, args.connect)
    link = VerifierLink(args.connect, token, hello)
    try:
        serve(link, engine, stop)
    finally:
        link.close()
        engine.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing is left but to take torch down, which is seconds


class _Stop:
    """Whether a signal has asked for the end."""

    def __init__(self) -> None:
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def __call__(self) -> bool:
        return self._asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
