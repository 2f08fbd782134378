# SPDX-License-Identifier: Apache-2.0
"""The shadow states of a Ray Serve deployment's replicas, in one process that routes to them.

There is no ticket that a replica would know a request by, and several processes may route at once.
So a request that was sent counts in the shadow until a state that was taken `ACCOUNTED_AFTER_S`
later arrives, which has it among the replica's own. Requests of other processes are in that state,
too, and unknown until then.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from vllm_slo.config.sections import RoutingConfig
from vllm_slo.core.routing.policy import route
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_stream import StateDecoder
from vllm_slo.core.routing.virtual_replica import RoutedRequest, VirtualReplica
from vllm_slo.router.body_reader import Asked
from vllm_slo.router.prompts import PrefixIndex, TokenRatio
from vllm_slo.router.routed import routed_request
from vllm_slo.wire.serve_stats import ServeStats

logger = logging.getLogger("vllm_slo.serve")

ACCOUNTED_AFTER_S: Final = 0.1
"""Seconds from the moment a replica takes a request until its scheduler's states account for it.
The value is a choice: longer than a prompt should take to be tokenized and handed to the engine.
Within it a request may count twice, which can cost a promise. One that takes longer does not count
for a while, and can break one."""

Call = tuple[str, int]
"""The id that Serve gives a call, and a number of its own: calls from within one request share the
id of that request."""


@dataclass(slots=True)
class _Shadow:
    """One replica as this process sees it.

    Attributes:
        asked_s: when Serve asked it last; None: it has told nothing.
        taken_s: when its last state was taken; None: it has none.
        is_readable: whether that state could be read.
    """

    virtual: VirtualReplica
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    asked_s: float | None = None
    taken_s: float | None = None
    is_readable: bool = True


@dataclass(slots=True)
class _Sent:
    """A request that counts in the shadow of a replica, by a ticket that only the shadow knows."""

    name: str
    ticket: int
    sent_s: float
    request: RoutedRequest
    promised: bool
    chunks: tuple[bytes, ...]


class ServeShadows:
    """Ranks replicas for requests. All times are epoch seconds."""

    def __init__(self, routing: RoutingConfig, rng: Random) -> None:
        self._routing = routing
        self._rng = rng
        self._shadows: dict[str, _Shadow] = {}
        self._sent: dict[Call, _Sent] = {}
        self._tickets = itertools.count(1)
        self._turn = rng.randrange(1 << 20)  # processes that route do not begin at one replica
        self._ratio = TokenRatio()

    # --- replicas --------------------------------------------------------------------------------

    def keep(self, names: Collection[str]) -> None:
        """Forget all replicas but these."""
        for name in self._shadows.keys() - set(names):
            del self._shadows[name]
        gone = [call for call, sent in self._sent.items() if sent.name not in self._shadows]
        for call in gone:
            del self._sent[call]

    def hear(self, name: str, stats: Mapping[str, Any]) -> None:
        """Take in the routing stats that Serve has of a replica, new or not."""
        shadow = self._shadows.setdefault(name, _Shadow(VirtualReplica(name)))
        told = ServeStats.from_stats(stats)
        if told is None or told.asked_s == shadow.asked_s:
            return
        shadow.asked_s = told.asked_s
        if told.line is None:
            return
        if told.taken_s == shadow.taken_s:
            shadow.virtual.confirm(told.asked_s)
            return
        shadow.taken_s = told.taken_s
        state, problem = _state_in(told.line)
        if state is None:
            if shadow.is_readable:
                logger.warning("replica %s: its state cannot be read: %s", name, problem)
            shadow.is_readable = False
            return
        shadow.is_readable = True
        self._account(name, told.taken_s - ACCOUNTED_AFTER_S)
        shadow.virtual.update(state, told.taken_s)

    def _account(self, name: str, until_s: float) -> None:
        """Drop the requests that a replica's own state accounts for."""
        known = [
            call for call, sent in self._sent.items() if sent.name == name and sent.sent_s < until_s
        ]
        for call in known:
            self.ended(call)

    def is_fresh(self, name: str, now_s: float) -> bool:
        """Whether a replica has told lately how it stands."""
        shadow = self._shadows.get(name)
        if shadow is None or shadow.asked_s is None or not shadow.is_readable:
            return False
        return now_s - shadow.asked_s <= self._routing.stale_after_s

    # --- requests --------------------------------------------------------------------------------

    def ranks(
        self, call: Call, asked: Asked, arrival_s: float, names: Sequence[str], now_s: float
    ) -> list[list[str]]:
        """The replicas in groups, best first; the request counts at the first one from now on.

        First comes the replica that `route` chooses: one that can promise, or where the queue is
        shortest. Then come all others that are fresh, then those that are not. If none is fresh,
        two replicas come first that are taken at random.

        Args:
            call: the request in later calls.
            names: of the replicas that may get it.
        """
        self.ended(call)
        fresh = [name for name in names if self.is_fresh(name, now_s)]
        silent = [name for name in names if name not in fresh]
        if not fresh:
            return random_pair(names, self._rng)
        self._turn += 1
        shadows = [self._shadows[name] for name in fresh]
        known = [(name, self._shadows[name].prefixes) for name in fresh]
        routed = routed_request(asked, known, self._ratio, arrival_s)
        choice = route(
            routed,
            [shadow.virtual for shadow in shadows],
            now_s,
            policy=self._routing.policy,
            turn=self._turn,
            max_hops=self._routing.max_hops,
            backup="best_effort",
            rng=self._rng,
        )
        first = choice.target
        assert first is not None  # there is a replica, and the backup serves
        self._send(call, first, now_s, routed, choice.promised, asked.prompt.chunks)
        return [[first], [name for name in fresh if name != first], silent]

    def accepted(self, call: Call, name: str, now_s: float) -> None:
        """A replica has taken a request, perhaps another one than the first."""
        sent = self._sent.get(call)
        if sent is None or name not in self._shadows:
            return
        self.ended(call)
        promised = sent.promised and name == sent.name
        self._send(call, name, now_s, sent.request, promised, sent.chunks)
        self._shadows[name].prefixes.add(sent.chunks)

    def completed(self, call_id: str, name: str) -> None:
        """One of the calls with this id has ended at a replica."""
        for call, sent in self._sent.items():
            if call[0] == call_id and sent.name == name:
                self.ended(call)
                return

    def ended(self, call: Call) -> None:
        """A request counts at no replica any more."""
        sent = self._sent.pop(call, None)
        if sent is not None and sent.name in self._shadows:
            self._shadows[sent.name].virtual.ended(sent.ticket)

    def _send(
        self,
        call: Call,
        name: str,
        now_s: float,
        request: RoutedRequest,
        promised: bool,
        chunks: tuple[bytes, ...],
    ) -> None:
        ticket = next(self._tickets)
        self._sent[call] = _Sent(name, ticket, now_s, request, promised, chunks)
        self._shadows[name].virtual.sent(ticket, request, now_s, promised=promised)


def _state_in(line: str) -> tuple[ReplicaState | None, str | None]:
    """(the state of a whole line, why it cannot be read)."""
    try:
        read = StateDecoder().read(line)
    except ValueError as error:
        return None, str(error)
    return read.state, read.problem


def random_pair(names: Sequence[str], rng: Random) -> list[list[str]]:
    """Two replicas at random, then the others: Serve takes the one with the shorter queue."""
    mixed = rng.sample(names, len(names))
    return [mixed[:2], mixed[2:]]
