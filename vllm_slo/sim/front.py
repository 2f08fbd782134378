# SPDX-License-Identifier: Apache-2.0
"""The front of simulated replicas: ``core.routing.policy``, driven as the real front drives it.

Doubles learn a replica's state when it has done a step, at most every ``STATE_INTERVAL_S``. What
they promise is confirmed by the replica itself while there are others to turn to.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Final

from vllm_slo.core.routing.policy import prefix_first, route
from vllm_slo.core.routing.virtual_replica import RoutedRequest, VirtualReplica
from vllm_slo.core.types import INFINITY, RoutingPolicy

if TYPE_CHECKING:
    from vllm_slo.sim.cluster import Offer, Replica

STATE_INTERVAL_S: Final = 0.02


class Front:
    """Sends offers to replicas.

    Args:
        replicas: all of them.
        policy: as ``core.routing.policy`` names it. Replicas that promise nothing are not asked
        under
            ``slo``: they take turns, where a prefix is cached first.
        max_hops: replicas asked for a promise before a request goes best effort.
        seed: of the policies that draw.

    Attributes:
        asked: promises asked for, of shadows; ``wrong``: those that the replica then refused.
    """

    def __init__(
        self, replicas: Sequence[Replica], policy: RoutingPolicy, max_hops: int, seed: int
    ) -> None:
        self.replicas = replicas
        self.asked = self.wrong = 0
        self._policy = policy
        self._max_hops = max_hops
        self._rng = Random(seed)
        self._shadows = [VirtualReplica(str(number)) for number in range(len(replicas))]
        self._turn = 0
        self._tickets = 0
        self._sent: dict[str, tuple[int, int]] = {}
        self._told_s = [-INFINITY] * len(replicas)
        for number in range(len(replicas)):
            self.stepped(number)

    def stepped(self, number: int) -> None:
        """A replica may have news."""
        if len(self.replicas) == 1:
            return
        replica = self.replicas[number]
        if replica.busy and replica.now_s < self._told_s[number] + STATE_INTERVAL_S:
            return
        state = replica.state()
        if state is not None:
            self._told_s[number] = replica.now_s
            self._shadows[number].update(state, replica.now_s)

    def send(self, offer: Offer, cached: dict[str, int]) -> None:
        """Route one offer; ``cached`` are the tokens of its prompt by replica that holds them."""
        turn, self._turn = self._turn, self._turn + 1
        if len(self.replicas) == 1:
            self.replicas[0].accept(offer, 0)
            return
        request = routed(offer, cached)
        shadows = self._shadows
        if self._policy == "slo" and all(shadow.state is None for shadow in shadows):
            first = prefix_first(request, shadows, turn, self._rng)[0]
            self._accept(int(first.name), offer, request)
            return
        hops = 0
        while True:
            found = route(
                request,
                shadows,
                offer.seen_s,
                policy=self._policy,
                turn=turn,
                max_hops=self._max_hops,
                rng=self._rng,
                already_asked=hops,
            )
            assert found.target is not None
            number = int(found.target)
            self.asked += found.hops - hops
            if not (found.promised and found.left) or self._promise(number, offer, request):
                if not found.promised or not found.left:
                    self._accept(number, offer, request, promised=found.promised)
                return
            self.wrong += 1
            shadows = [self._shadows[int(name)] for name in found.left]
            hops, turn = found.hops, 0

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _promise(self, number: int, offer: Offer, request: RoutedRequest) -> bool:
        ticket = self._ticket()
        if not self.replicas[number].promise(offer, ticket):
            return False
        self._note(number, ticket, offer, request, promised=True)
        return True

    def _accept(
        self, number: int, offer: Offer, request: RoutedRequest, *, promised: bool = False
    ) -> None:
        ticket = self._ticket()
        self.replicas[number].accept(offer, ticket)
        self._note(number, ticket, offer, request, promised=promised)

    def _note(
        self, number: int, ticket: int, offer: Offer, request: RoutedRequest, *, promised: bool
    ) -> None:
        self._sent[offer.name] = number, ticket
        self._shadows[number].sent(ticket, request, offer.seen_s, promised=promised)

    def ended(self, name: str) -> None:
        """A request was answered, or dropped."""
        number, ticket = self._sent.pop(name, (0, 0))
        self._shadows[number].ended(ticket)


def routed(offer: Offer, cached: dict[str, int]) -> RoutedRequest:
    """An offer as routing sees it: nobody is told how long its answer will be."""
    slo = offer.slo
    return RoutedRequest(
        len(offer.prompt),
        None,
        deadline_s=INFINITY if slo.ttft_ms is None else offer.sent_s + slo.ttft_ms / 1e3,
        tpot_s=INFINITY if slo.tightest_tpot_ms is None else slo.tightest_tpot_ms / 1e3,
        wants_promise=slo.effective_tier == "guaranteed",
        slo_class=slo.slo_class or "custom",
        cached_tokens=cached,
    )
