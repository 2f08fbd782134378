# SPDX-License-Identifier: Apache-2.0
"""The front of simulated replicas: it routes by ``core.routing.policy`` as the real front does.

The front keeps a shadow of each replica's state. A shadow learns the true state after a step of its
replica, at most every ``interval_s``. A replica confirms what its shadow promised, unless no
other replica is left to ask. If it refuses, which takes it until its next step, the front routes
the request among the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, Protocol

from vllm_slo.core.routing.policy import prefix_first, route
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.core.routing.virtual_replica import RoutedRequest, VirtualReplica
from vllm_slo.core.types import INFINITY, RoutingPolicy
from vllm_slo.sim.jobs import RoundRequest, RoundResult
from vllm_slo.slo.model import SLO

_NO_SLO: Final = SLO()


class Replica(Protocol):
    """Serves requests on its own clock."""

    steps: int

    @property
    def computed_tokens(self) -> int:
        """Tokens of all steps so far."""

    @property
    def scheduler_s(self) -> float:
        """Wall-clock seconds that its schedulers have taken so far."""

    @property
    def busy(self) -> bool:
        """Whether it has anything to do."""

    @property
    def now_s(self) -> float:
        """Virtual time of its next step."""

    def state(self) -> ReplicaState | None:
        """The state that a front may see; None if the replica promises nothing."""

    def promise(self, request: RoundRequest, ticket: Ticket) -> float | None:
        """Take the request if its objectives can be promised.

        Returns:
            When the replica says that it does not take it: before its next step. None: it took it,
            or will tell.
        """

    def accept(self, request: RoundRequest, ticket: Ticket | None) -> None:
        """Take the request. Without a ticket no front plans with this replica."""

    def step(self) -> list[str]:
        """Do one step; names of the requests that ended."""

    def take(self, name: str) -> tuple[RoundResult, list[int]]:
        """Remove a request that ended; its result, and its prompt with the answer."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request on its way through the replicas.

    Attributes:
        shadows: of the replicas that are left to ask.
        turn: of these.
        hops: replicas that were asked.
    """

    request: RoundRequest
    seen: RoutedRequest
    shadows: Sequence[VirtualReplica]
    turn: int
    hops: int


class Front:
    """Sends requests to replicas.

    Args:
        interval_s: shortest time between two states of a busy replica.
        name: its own, in tickets: several fronts may send to the same replicas. The number of the
            front is enough.
        policy: as ``core.routing.policy`` names it. Under ``slo``, replicas that promise nothing
            are not asked: they take turns, and a replica that caches the prefix goes first.
        max_hops: replicas asked for a promise before a request becomes best effort.
        seed: of the policies that draw.

    Attributes:
        asked: promises asked of shadows.
        wrong: promises of shadows that the replica then refused.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        policy: RoutingPolicy,
        max_hops: int,
        seed: int,
        interval_s: float,
        name: str = "",
    ) -> None:
        self._interval_s = interval_s
        self._name = name
        self.replicas = replicas
        self.asked = self.wrong = 0
        self._policy = policy
        self._max_hops = max_hops
        self._rng = Random(seed)
        self._shadows = [VirtualReplica(str(number), front=name) for number in range(len(replicas))]
        self._turn = 0
        self._tickets = itertools.count(1)
        self._sent: dict[str, tuple[int, int]] = {}
        self._asked: dict[str, _Asked] = {}
        self._told_s = [-INFINITY] * len(replicas)
        for number in range(len(replicas)):
            self.stepped(number)

    def stepped(self, number: int) -> None:
        """Update the shadow of replica ``number`` after a step, if an update is due."""
        if len(self.replicas) == 1:
            return
        replica = self.replicas[number]
        if replica.busy and replica.now_s < self._told_s[number] + self._interval_s:
            return
        state = replica.state()
        if state is not None:
            self._told_s[number] = replica.now_s
            self._shadows[number].update(state, replica.now_s)

    def send(self, request: RoundRequest, cached: dict[str, int]) -> float | None:
        """Route one request.

        Args:
            cached: replica -> tokens of the prompt that it caches.

        Returns:
            When its replica refuses it: then call `refused`. None: it has its replica.
        """
        turn, self._turn = self._turn, self._turn + 1
        if len(self.replicas) == 1:
            self.replicas[0].accept(request, None)
            return None
        seen = routed(request, cached)
        if self._policy == "slo" and all(shadow.state is None for shadow in self._shadows):
            first = prefix_first(seen, self._shadows, turn, self._rng)[0]
            self._accept(int(first.name), request, seen)
            return None
        return self._place(_Asked(request, seen, self._shadows, turn, 0))

    def refused(self, name: str, now_s: float) -> float | None:
        """A replica has refused a request that its shadow had promised: route it among the others.

        Returns:
            As `send`.

        Raises:
            KeyError: the request was not asked of a replica.
        """
        asked = self._asked.pop(name)
        self.wrong += 1
        self.ended(name)
        return self._place(replace(asked, request=replace(asked.request, seen_s=now_s)))

    def _place(self, asked: _Asked) -> float | None:
        """Give a request to one of the replicas that are left to ask."""
        request, seen = asked.request, asked.seen
        choice = route(
            seen,
            asked.shadows,
            request.seen_s,
            policy=self._policy,
            turn=asked.turn,
            max_hops=self._max_hops,
            rng=self._rng,
            already_asked=asked.hops,
        )
        assert choice.target is not None
        number = int(choice.target)
        self.asked += choice.hops - asked.hops
        if not (choice.promised and choice.left):
            self._accept(number, request, seen, promised=choice.promised)
            return None
        left = [self._shadows[int(name)] for name in choice.left]
        self._asked[request.name] = _Asked(request, seen, left, 0, choice.hops)
        ticket = self._ticket()
        refused_s = self.replicas[number].promise(request, ticket)
        self._note(number, ticket, request, seen, promised=True)
        return refused_s

    def _ticket(self) -> Ticket:
        return Ticket(self._name, next(self._tickets))

    def _accept(
        self, number: int, request: RoundRequest, seen: RoutedRequest, *, promised: bool = False
    ) -> None:
        ticket = self._ticket()
        self.replicas[number].accept(request, ticket)
        self._note(number, ticket, request, seen, promised=promised)

    def _note(
        self,
        number: int,
        ticket: Ticket,
        request: RoundRequest,
        seen: RoutedRequest,
        *,
        promised: bool,
    ) -> None:
        self._sent[request.name] = number, ticket.number
        self._shadows[number].sent(ticket.number, seen, request.seen_s, promised=promised)

    def ended(self, name: str) -> None:
        """A request was answered, or dropped."""
        self._asked.pop(name, None)
        number, ticket = self._sent.pop(name, (0, 0))
        self._shadows[number].ended(ticket)


def routed(request: RoundRequest, cached: dict[str, int]) -> RoutedRequest:
    """A request as routing sees it, without the length of its answer."""
    slo = request.slo or _NO_SLO
    return RoutedRequest(
        len(request.prompt),
        None,
        deadline_s=INFINITY if slo.ttft_ms is None else request.sent_s + slo.ttft_ms / 1e3,
        tpot_s=INFINITY if slo.tightest_tpot_ms is None else slo.tightest_tpot_ms / 1e3,
        wants_promise=slo.effective_tier == "guaranteed",
        slo_class=slo.slo_class or "custom",
        cached_tokens=cached,
    )
