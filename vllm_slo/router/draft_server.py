# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo draft-server``: a small model that drafts for verifiers, on any machine.

It connects to each verifier, introduces itself and answers requests for drafts (GoodSpeed, section
III-A), in the format of `vllm_slo.wire.draft_messages`. It waits for a verifier that is not there
yet, and reconnects for ever to one that has gone. SIGTERM and SIGINT end it after the current step.

Several verifiers share one model: each has a link of its own, with sessions of its own, and takes
it for a draft server like any other. Their rounds are drafted in turns, one round at a time. So a
verifier waits for at most one round of each other verifier, and the model never has more than
``--max-sessions`` requests.
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
from importlib import import_module
from types import FrameType
from typing import Final, NoReturn, Protocol

from vllm_slo.arguments import number, whole
from vllm_slo.core.clock import Clock, SystemClock
from vllm_slo.core.speculation.draft_sessions import DraftAsk, DraftTokens
from vllm_slo.errors import ConfigError
from vllm_slo.router import draft_fleet
from vllm_slo.router.verifier_link import VerifierLink, listen_to
from vllm_slo.wire.draft_messages import MAX_NAME, MAX_SESSIONS, NAME_PATTERN, WIRE, Hello
from vllm_slo.wire.draft_socket import (
    TOKEN_VARIABLE,
    connected_addresses,
    derive_keys,
    read_token,
)

logger = logging.getLogger("vllm_slo.draft_server")

LOOK_S: Final = 0.2
"""Period in which an idle server checks whether it should end."""


class Drafter(Protocol):
    """Makes drafts; `engine.speculation.draft_engine.DraftEngine` outside of tests."""

    def draft(
        self, asks: Sequence[DraftAsk], deadline_s: float, interrupted: Callable[[], bool]
    ) -> list[DraftTokens]:
        """A draft for each ask, in order; at most as long as granted, possibly empty.

        Args:
            deadline_s: seconds from now at which drafts are returned, finished or not.
            interrupted: called now and then; if true, the drafts are no longer needed.
        """


def serve(
    links: Sequence[VerifierLink],
    drafter: Drafter,
    stopped: Callable[[], bool],
    *,
    clock: Clock | None = None,
) -> None:
    """Draft what the verifiers ask for until ``stopped`` returns true.

    Of the verifiers that wait, the one whose last round is longest ago is next. A round ends early
    and is not answered if its verifier has sent a newer one, or has disconnected.
    """
    clock = clock or SystemClock()
    turns = list(links)
    while not stopped():
        listen_to(turns, LOOK_S)
        link = next((link for link in turns if link.has_round), None)
        if link is None:
            continue
        turns.remove(link)
        turns.append(link)
        _draft_round(link, drafter, stopped, turns, clock)


def _draft_round(
    link: VerifierLink,
    drafter: Drafter,
    stopped: Callable[[], bool],
    links: Sequence[VerifierLink],
    clock: Clock,
) -> None:
    """Draft and answer the round of one verifier; meanwhile listen to all of them."""
    wanted = link.take_round()
    if wanted is None:
        return

    def interrupted() -> bool:
        listen_to(links, 0.0)
        return not link.awaits(wanted) or stopped()

    left_s = max(wanted.ends_s - clock.monotonic_s(), 0.0)
    drafts = drafter.draft(wanted.asks, left_s, interrupted)
    if link.awaits(wanted):
        link.answer(wanted, drafts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a draft server; all others are those of vLLM's engine."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="name or folder of a small model; 'tiny' is the built-in one",
    )
    parser.add_argument(
        "--connect",
        required=True,
        action="append",
        metavar="ADDRESS",
        help="address of the verifier, tcp://HOST:PORT; several verifiers share the model if it is "
        "given several times, or with a range of ports, tcp://HOST:FIRST-LAST",
    )
    parser.add_argument(
        "--token-file",
        "--token_file",
        metavar="FILE",
        help=f"file with the cluster's secret (default: the variable {TOKEN_VARIABLE})",
    )
    parser.add_argument(
        "--max-sessions",
        "--max_sessions",
        type=whole(1, MAX_SESSIONS),
        default=64,
        metavar="N",
        help="most requests to draft for at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "--name",
        metavar="NAME",
        help="name, unique among the verifier's draft servers (default: host-pid)",
    )
    ray = parser.add_argument_group("several draft servers, placed and watched by Ray")
    ray.add_argument(
        "--count", type=whole(1, draft_fleet.MOST), metavar="N", help="number of draft servers"
    )
    ray.add_argument(
        "--ray-address",
        "--ray_address",
        metavar="ADDRESS",
        help="Ray cluster to run on; default with --count: a new one on this machine",
    )
    for unit, default in (("cpus", 1.0), ("gpus", 0.0)):
        ray.add_argument(
            f"--{unit}-per-server",
            f"--{unit}_per_server",
            type=number(0.0),
            default=default,
            metavar="N",
            help=f"{unit.upper()} reserved for each draft server (default: %(default)g)",
        )


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Draft until SIGTERM or SIGINT, which end the process with status 0.

    Raises:
        VllmSLOError: a flag cannot be used, or the model cannot be loaded.
    """
    return draft_fleet.run(args, rest) if draft_fleet.asked_for(args) else _run_one(args, rest)


def _run_one(args: argparse.Namespace, rest: Sequence[str]) -> NoReturn:
    """Run one draft server until a signal comes."""
    addresses = connected_addresses(args.connect, "--connect")
    name = args.name or f"{socket.gethostname()}-{os.getpid()}"
    if len(name) > MAX_NAME or not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"--name {name}: use up to {MAX_NAME} letters, digits, and ._:@/-")
    token = read_token(args.token_file)
    derive_keys(token)  # checks the token before a model is loaded
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    logger.setLevel(logging.INFO)
    # Imported late: it is the only part that needs vLLM, and `--help` should not wait for it.
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
    stop = StopSignal()
    where = ", ".join(args.connect)
    logger.info("%s drafts with %s; looking for a verifier at %s", name, args.model, where)
    links = [VerifierLink(address, token, hello) for address in addresses]
    try:
        serve(links, engine, stop)
    finally:
        for link in links:
            link.close()
        engine.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a normal exit takes seconds in torch


class StopSignal:
    """Calls return whether SIGTERM or SIGINT has come."""

    def __init__(self) -> None:
        self._asked = False
        for stop in (signal.SIGTERM, signal.SIGINT):
            signal.signal(stop, self._ask)

    def __call__(self) -> bool:
        return self._asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
