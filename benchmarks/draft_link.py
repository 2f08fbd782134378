# SPDX-License-Identifier: Apache-2.0
"""What a round with draft servers costs beyond drafting: the link alone, over loopback TCP.

The drafters are processes without a model that answer at once, through the loop of ``vllm-slo
draft-server``. Each session is granted five tokens and grows by four a round, from 500 to 900.
An exchange encrypts, sends what is new, waits for all, and checks every answer. Below it the same
messages go back and forth between two sockets, unchecked, with CURVE and without.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import zmq
from common import markdown, write_result

from vllm_slo.core.speculation.draft_sessions import DraftAsk, DraftTokens
from vllm_slo.engine.speculation.draft_link import DraftLink
from vllm_slo.router.draft_server import serve
from vllm_slo.router.verifier_link import VerifierLink
from vllm_slo.wire.draft_messages import (
    WIRE,
    Answer,
    Ask,
    Draft,
    Drafted,
    Hello,
    encode,
    from_drafter,
    from_verifier,
)
from vllm_slo.wire.draft_socket import derive_keys, drafter_socket, verifier_socket

VOCAB, PROMPT, GRANT, GROWS = 32_000, 500, 5, 4
SHAPES = ((1, 1), (1, 8), (1, 64), (4, 2), (4, 16))
"""(drafters, sessions of each)."""
ROUNDS = 100
"""Tokens after which a session is rolled back to its prompt."""
WARM = 200
TOKEN = "the benchmark's own token"
START_S = 30.0


class Parrot:
    """A drafter that answers at once."""

    def draft(
        self, asks: Sequence[DraftAsk], deadline_s: float, interrupted: Callable[[], bool]
    ) -> list[DraftTokens]:
        return [DraftTokens([7] * ask.grant, [0.5] * ask.grant) for ask in asks]


def be_drafter(address: str, name: str) -> None:
    """A drafter on the whole link."""
    hello = Hello(
        wire=WIRE,
        name=name,
        model="parrot",
        vocab_size=VOCAB,
        vocabulary="",
        max_model_len=1 << 20,
        max_sessions=64,
    )
    serve([VerifierLink(address, TOKEN, hello)], Parrot(), lambda: False)


def be_relay(address: str, kind: str) -> None:
    """Answers on a bare socket, ciphered or plain."""
    context = zmq.Context()
    if kind == "curve":
        socket = drafter_socket(context, derive_keys(TOKEN), address)
        socket.setsockopt(zmq.IMMEDIATE, 0)
    else:
        socket = context.socket(zmq.DEALER)
    socket.connect(address)
    socket.send(b"")
    while True:
        draft = from_verifier(socket.recv())
        assert isinstance(draft, Draft)
        answers = [
            Answer(session=ask.session, at=0, tokens=[7] * GRANT, probabilities=[0.5] * GRANT)
            for ask in draft.asks
        ]
        drafted = Drafted(epoch=draft.epoch, round=draft.round, answers=answers, lost=[], draft_s=0)
        socket.send(encode(drafted))


@contextmanager
def process(role: str, *words: str) -> Iterator[None]:
    """This script in another process."""
    started = subprocess.Popen([sys.executable, __file__, "--be", role, *words])
    try:
        yield
    finally:
        started.kill()
        started.wait()


def timed(work: Callable[[], object], repeats: int) -> np.ndarray:
    """(repeats,) milliseconds."""
    for _ in range(WARM):
        work()
    took_s = np.empty(repeats)
    gc.disable()
    for place in range(repeats):
        begun = time.perf_counter()
        work()
        took_s[place] = time.perf_counter() - begun
    gc.enable()
    return took_s * 1e3


def exchanges(drafters: int, sessions: int, repeats: int) -> np.ndarray:
    """Milliseconds of whole exchanges."""
    names = [f"d{n}" for n in range(drafters)]
    text = np.random.default_rng(0).integers(0, VOCAB, PROMPT + GROWS * ROUNDS, dtype=np.int32)
    with ExitStack() as stack:
        link = stack.enter_context(DraftLink("tcp://127.0.0.1:*", TOKEN, vocab_size=VOCAB))
        for name in names:
            stack.enter_context(process("drafter", link.address, name))
        end = time.monotonic() + START_S
        while sum(drafter.ready for drafter in link.drafters) < drafters:
            if time.monotonic() > end:
                raise SystemExit("the drafters did not come")
            link.poll()
            time.sleep(0.01)
        lengths = itertools.cycle(range(PROMPT, len(text) + 1, GROWS))

        def work() -> None:
            length = next(lengths)
            asks = {
                name: {f"{name}.{n}": DraftAsk(text[:length], GRANT) for n in range(sessions)}
                for name in names
            }
            done = link.exchange(asks, deadline_s=5.0)
            if len(done.answers) != drafters * sessions:
                raise SystemExit(f"drafts are missing: {link.faults}")

        return timed(work, repeats)


def round_trips(kind: str, sessions: int, repeats: int) -> np.ndarray:
    """Milliseconds of the same messages on bare sockets."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        address = "tcp://127.0.0.1:*"
        if kind == "curve":
            socket = stack.enter_context(verifier_socket(context, derive_keys(TOKEN), address))
        else:
            socket = stack.enter_context(context.socket(zmq.ROUTER))
        socket.bind(address)
        stack.enter_context(process("relay", socket.getsockopt_string(zmq.LAST_ENDPOINT), kind))
        identity = socket.recv_multipart()[0]
        asks = [
            Ask(session=n, keep=PROMPT, tokens=[VOCAB - 1] * GROWS, grant=GRANT, temperature=0.0)
            for n in range(sessions)
        ]
        draft = Draft(epoch=secrets.randbits(62), round=1, deadline_s=5.0, asks=asks, ended=[])

        def work() -> None:
            socket.send_multipart([identity, encode(draft)])
            from_drafter(socket.recv_multipart()[1])

        return timed(work, repeats)


def row(name: str, took_ms: np.ndarray) -> list[str]:
    """A name, the median, the 99th percentile."""
    return [name, f"{np.median(took_ms):.3f}", f"{np.percentile(took_ms, 99):.3f}"]


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3_000)
    parser.add_argument("--be", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be:
        role, address, name = args.be
        (be_drafter if role == "drafter" else be_relay)(address, name)
    rows = []
    for drafters, sessions in SHAPES:
        many = f"{drafters} drafter{'s' * (drafters > 1)}, {sessions} session{'s' * (sessions > 1)}"
        rows.append(row(f"exchange: {many}", exchanges(drafters, sessions, args.repeats)))
    for kind, text in (("curve", "bare sockets with CURVE"), ("plain", "bare sockets without")):
        for sessions in (1, 8, 64):
            took_ms = round_trips(kind, sessions, args.repeats)
            rows.append(row(f"{text}: {sessions} session{'s' * (sessions > 1)}", took_ms))
    write_result("draft_link", __doc__, markdown(["what", "median ms", "p99 ms"], rows))


if __name__ == "__main__":
    main()
