# SPDX-License-Identifier: Apache-2.0
"""All replicas of a front, and the placement of one request among them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from random import Random

from vllm_slo.config.sections import RoutingConfig
from vllm_slo.core.routing.demand_meter import DemandMeter
from vllm_slo.core.routing.policy import Route, route
from vllm_slo.core.routing.virtual_replica import RoutedRequest
from vllm_slo.router.replica_spec import ReplicaSpec
from vllm_slo.router.upstream import Observer, Upstream
from vllm_slo.slo.model import OnUnattainable

logger = logging.getLogger("vllm_slo.front")


class Cluster:
    """The replicas of the parent's list, and removed ones that still answer requests.

    ``is_reachable``: whether requests can be sent to a replica now, as far as the data plane knows.

    Attributes:
        observer: told of the events of the state streams of replicas that join; None: nobody.
        front: name of this front in its tickets: several fronts may send to the same replicas.
    """

    def __init__(
        self,
        routing: RoutingConfig,
        is_reachable: Callable[[Upstream], bool] = lambda _: True,
    ) -> None:
        self.routing = routing
        self.listed: dict[str, Upstream] = {}
        self.leaving: list[Upstream] = []
        self.demand = DemandMeter(routing.demand_window_s, routing.demand_target)
        self.rng = Random()
        self.observer: Observer | None = None
        self.front = secrets.token_hex(4)
        self.is_open = True
        self._turn = 0
        self._is_reachable = is_reachable

    def replace(self, specs: Iterable[ReplicaSpec]) -> None:
        """Replace the list of replicas; a name with a new address is a new replica."""
        wanted = {spec.name: spec for spec in specs}
        for name, upstream in list(self.listed.items()):
            if wanted.get(name) != upstream.spec:
                del self.listed[name]
                upstream.listed = False
                self.leaving.append(upstream)
                logger.info("replica %s leaves", name)
        for name, spec in wanted.items():
            if name not in self.listed:
                routing = self.routing
                upstream = Upstream(
                    spec,
                    routing.stale_after_s,
                    routing.dead_after_s,
                    self.observer,
                    self.front,
                )
                upstream.start()
                self.listed[name] = upstream
                logger.info("replica %s joins at %s", name, spec.url)

    def all(self) -> list[Upstream]:
        """Listed and leaving replicas."""
        return [*self.listed.values(), *self.leaving]

    def ready(self) -> list[Upstream]:
        """The replicas that may get new requests."""
        if not self.is_open:
            return []
        return [upstream for upstream in self.listed.values() if self._is_ready(upstream)]

    def _is_ready(self, upstream: Upstream) -> bool:
        return upstream.ready and self._is_reachable(upstream)

    def status(self, upstream: Upstream) -> str:
        """The status of a replica in one word, for operators."""
        status = upstream.status
        return status if status != "ready" or self._is_ready(upstream) else "starting"

    def in_order(self, routed: RoutedRequest, now_s: float) -> list[Upstream]:
        """The ready replicas in the order in which a request would try them now.

        Replicas whose shadow would promise come first; there are at most `RoutingConfig.max_hops`.
        """
        ready = {upstream.name: upstream for upstream in self.ready()}
        choice = route(
            routed,
            [upstream.virtual for upstream in ready.values()],
            now_s,
            policy=self.routing.policy,
            turn=self._turn + 1,
            max_hops=self.routing.max_hops,
            backup="best_effort",
            rng=self.rng,
        )
        first = [ready.pop(name) for name in (choice.target, *choice.left) if name in ready]
        return [*first, *ready.values()][: self.routing.max_hops]

    def next_turn(self) -> int:
        self._turn += 1
        return self._turn

    async def tick(self, now_s: float, held_up_s: float) -> None:
        """Detect silent replicas; close removed ones whose requests have ended."""
        for upstream in self.all():
            upstream.tick(now_s, held_up_s)
        for upstream in [leaving for leaving in self.leaving if not leaving.running]:
            self.leaving.remove(upstream)
            await upstream.close()

    async def close(self) -> None:
        """Close every connection; new requests find no replica."""
        self.is_open = False
        await asyncio.gather(*(upstream.close() for upstream in self.all()))


@dataclass(frozen=True, slots=True)
class Choice:
    """The next replica to try.

    Attributes:
        upstream: the replica; None: the request is declined if ``route.backup`` says so, else no
            replica is ready.
        on_unattainable: what the replica does if it cannot promise; None: as the request asks.
        route: the result of `route`; None for requests that are not routed by their SLO.
    """

    upstream: Upstream | None
    on_unattainable: OnUnattainable | None
    route: Route | None


class Placement:
    """The replicas that one request tries, in order.

    A replica that failed is not tried again. A replica that refused is tried again only as backup.

    Args:
        routed: the request as routing sees it; None: plain round robin.
        among: names of the replicas that may be tried; None: all.
    """

    def __init__(
        self,
        cluster: Cluster,
        routed: RoutedRequest | None,
        among: Collection[str] | None = None,
    ) -> None:
        self.cluster = cluster
        self.routed = routed
        self.among = among
        self.failures = 0
        self.refusals = 0
        self.retry_after_s = float("inf")
        self._turn = cluster.next_turn()
        self._failed: set[Upstream] = set()
        self._asked = 0
        self._order: tuple[str, ...] | None = None  # replicas left to ask; None: all
        self._last: Route | None = None

    def next(self, now_s: float) -> Choice:
        able = self._able()
        if not able:
            return Choice(None, None, None)
        if self.routed is None:
            return Choice(able[self._turn % len(able)], None, None)
        choice = self._route(self.routed, able, now_s)
        self._last = choice
        if choice.target is None:
            return Choice(None, None, choice)
        backup = self.cluster.routing.backup
        on_unattainable: OnUnattainable | None = None if backup == "as_asked" else backup
        if choice.promised and choice.left:
            on_unattainable = "decline"
        return Choice(self.cluster.listed[choice.target], on_unattainable, choice)

    def _able(self) -> list[Upstream]:
        return [
            each
            for each in self.cluster.ready()
            if each not in self._failed and (self.among is None or each.name in self.among)
        ]

    def fallbacks(self, choice: Choice) -> list[Upstream]:
        """The replicas to try in turn if that of the last choice fails; at most
        `RoutingConfig.retries`."""
        able = {each.name: each for each in self._able() if each is not choice.upstream}
        left = () if choice.route is None else choice.route.left
        first = [able.pop(name) for name in left if name in able]
        return [*first, *able.values()][: self.cluster.routing.retries]

    def _route(self, routed: RoutedRequest, able: list[Upstream], now_s: float) -> Route:
        routing = self.cluster.routing
        shadows = [upstream.virtual for upstream in able]
        asked, turn = self._asked, self._turn
        if self._order is not None:
            by_name = {shadow.name: shadow for shadow in shadows}
            left = [by_name[name] for name in self._order if name in by_name]
            # If no replica is left to ask, the backup chooses among all of them.
            shadows, turn = (left, 0) if left else (shadows, turn)
            asked = asked if left else routing.max_hops
        return route(
            routed,
            shadows,
            now_s,
            policy=routing.policy,
            turn=turn,
            max_hops=routing.max_hops,
            backup=routing.backup,
            rng=self.cluster.rng,
            already_asked=asked,
        )

    def refused(self, retry_after_s: float) -> None:
        """Note that the replica of the last choice made no promise."""
        assert self._last is not None
        self.refusals += 1
        self.retry_after_s = min(self.retry_after_s, retry_after_s)
        self._asked = self._last.hops
        self._order = self._last.left

    def failed(self, upstream: Upstream) -> bool:
        """Note that the replica failed before it answered; whether another try is allowed."""
        self._failed.add(upstream)
        self.failures += 1
        if self._last is not None and self._last.promised:
            self._asked = max(self._last.hops - 1, 0)
            self._order = self._last.left
        return self.failures <= self.cluster.routing.retries
