# SPDX-License-Identifier: Apache-2.0
"""Drafters without a model: well-behaved ones in threads and processes, and one that sends what it
is told to.

``python echo_drafter.py ADDRESS NAME`` runs one until SIGTERM; the token is in the environment.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq
from patience import patience

from vllm_slo.core.speculation.draft_sessions import DraftAsk, DraftTokens
from vllm_slo.router.draft_server import StopSignal, serve
from vllm_slo.router.verifier_link import VerifierLink
from vllm_slo.wire.draft_messages import (
    WIRE,
    Answer,
    Draft,
    Drafted,
    FromVerifier,
    Hello,
    Welcome,
    encode,
    from_verifier,
)
from vllm_slo.wire.draft_socket import derive_keys, drafter_socket, read_token

TOKEN = "a token of the tests' own"
VOCAB = 1000


def hello(name: str, **changed: Any) -> Hello:
    """Of a drafter with `VOCAB` tokens."""
    fields = {
        "wire": WIRE,
        "name": name,
        "model": "echo",
        "vocab_size": VOCAB,
        "vocabulary": "",
        "max_model_len": 4096,
        "max_sessions": 8,
    }
    return Hello(**{**fields, **changed})


def echo(prefix: Sequence[int], grant: int) -> list[int]:
    """What these drafters draft: a function of the whole prefix."""
    return [(sum(prefix) + 7 * len(prefix) + place) % VOCAB for place in range(grant)]


class EchoDrafter:
    """Drafts `echo`.

    Attributes:
        delay_s: to take for each round, whatever the deadline.
        prefixes: all that it was asked to go on from.
        interruptions: whether each round was wanted no more after that time.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.prefixes: list[list[int]] = []
        self.interruptions: list[bool] = []

    def draft(
        self, asks: Sequence[DraftAsk], deadline_s: float, interrupted: Callable[[], bool]
    ) -> list[DraftTokens]:
        time.sleep(self.delay_s)
        self.interruptions.append(interrupted())
        self.prefixes += [list(ask.prefix) for ask in asks]
        return [DraftTokens(echo(list(a.prefix), a.grant), [0.5] * a.grant) for a in asks]


class HeldDrafter(EchoDrafter):
    """Drafts nothing until it may.

    Attributes:
        begun: set once a round has come.
        may: to be set by the test, whatever becomes of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may = threading.Event(), threading.Event()

    def draft(
        self, asks: Sequence[DraftAsk], deadline_s: float, interrupted: Callable[[], bool]
    ) -> list[DraftTokens]:
        self.begun.set()
        self.may.wait(patience(60.0))
        return super().draft(asks, deadline_s, interrupted)


@contextmanager
def drafting(
    address: str | Sequence[str],
    name: str,
    *,
    token: str = TOKEN,
    drafter: EchoDrafter | None = None,
    **said: Any,
) -> Iterator[EchoDrafter]:
    """A drafter in a thread, until the block ends; of one verifier, or of several."""
    drafter = drafter or EchoDrafter()
    stop = threading.Event()
    addresses = [address] if isinstance(address, str) else address
    links = [VerifierLink(one, token, hello(name, **said)) for one in addresses]

    def run() -> None:
        serve(links, drafter, stop.is_set)
        for link in links:
            link.close()

    thread = threading.Thread(target=run, name=f"drafter {name}")
    thread.start()
    try:
        yield drafter
    finally:
        stop.set()
        thread.join()


class RawDrafter:
    """A drafter that knows the token and says what it is told to, used by the test's own thread."""

    def __init__(self, address: str, token: str = TOKEN) -> None:
        self._context = zmq.Context()
        self._socket = drafter_socket(self._context, derive_keys(token), address)
        self._socket.setsockopt(zmq.IMMEDIATE, 0)
        self._socket.connect(address)
        self.epoch = 0

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def say(self, message: Any) -> None:
        self.send(encode(message))

    def hear(self, timeout_s: float = 5.0) -> FromVerifier:
        """The next message; fails where none comes."""
        assert self._socket.poll(round(patience(timeout_s) * 1e3)), "the verifier says nothing"
        message = from_verifier(self._socket.recv())
        if isinstance(message, Welcome):
            self.epoch = message.epoch
        return message

    def hears_nothing(self, timeout_s: float = 0.2) -> bool:
        return not self._socket.poll(round(timeout_s * 1e3))

    def drafted(self, draft: Draft, *answers: Answer, **changed: Any) -> Drafted:
        """A valid answer to a round, unless told otherwise."""
        fields = {"epoch": draft.epoch, "round": draft.round, "lost": [], "draft_s": 0.0}
        return Drafted(**{**fields, "answers": list(answers), **changed})

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


def main(address: str, name: str) -> None:
    link = VerifierLink(address, read_token(None), hello(name))
    serve([link], EchoDrafter(), StopSignal())
    link.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
