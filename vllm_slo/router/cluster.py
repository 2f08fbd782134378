# SPDX-License-Identifier: Apache-2.0
"""The replicas there are, and where one request goes among them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from vllm_slo.config.model import RoutingConfig
from vllm_slo.core.routing.demand_meter import DemandMeter
from vllm_slo.core.routing.policy import Route, route
from vllm_slo.core.routing.virtual_replica import RoutedRequest
from vllm_slo.router.upstream import ReplicaSpec, Upstream
from vllm_slo.slo.model import OnUnattainable

__all__ = ["Choice", "Cluster", "Placement"]

logger = logging.getLogger("vllm_slo.front")


class Cluster:
    """The replicas of the parent's list, and those that left it but still answer requests."""

    def __init__(self, routing: RoutingConfig) -> None:
        self.routing = routing
        self.listed: dict[str, Upstream] = {}
        self.leaving: list[Upstream] = []
        self.demand = DemandMeter()
        self.rng = Random()
        self.is_open = True
        self._turn = 0

    def replace(self, specs: Iterable[ReplicaSpec]) -> None:
        """Take over the parent's list; a name with another address is another replica."""
        wanted = {spec.name: spec for spec in specs}
        for name, upstream in list(self.listed.items()):
            if wanted.get(name) != upstream.spec:
                del self.listed[name]
                upstream.listed = False
                self.leaving.append(upstream)
                logger.info("replica %s leaves", name)
        for name, spec in wanted.items():
            if name not in self.listed:
                upstream = Upstream(spec, self.routing.stale_after_s, self.routing.dead_after_s)
                upstream.start()
                self.listed[name] = upstream
                logger.info("replica %s joins at %s", name, spec.url)

    def all(self) -> list[Upstream]:
        """Listed and leaving ones."""
        return [*self.listed.values(), *self.leaving]

    def ready(self) -> list[Upstream]:
        """Those that may get new requests."""
        if not self.is_open:
            return []
        return [one for one in self.listed.values() if one.ready]

    def in_order(self, routed: RoutedRequest, now_s: float) -> list[Upstream]:
        """The ready replicas as a request would try them if it came now, at most
        `RoutingConfig.max_hops`: first who would promise, as far as is known here."""
        ready = {one.name: one for one in self.ready()}
        found = route(
            routed,
            [one.virtual for one in ready.values()],
            now_s,
            policy=self.routing.policy,
            turn=self._turn + 1,
            max_hops=self.routing.max_hops,
            backup="best_effort",
            rng=self.rng,
        )
        first = [ready.pop(name) for name in (found.target, *found.left) if name in ready]
        return [*first, *ready.values()][: self.routing.max_hops]

    def next_turn(self) -> int:
        """Counts requests, for round robin."""
        self._turn += 1
        return self._turn

    async def tick(self, now_s: float, held_up_s: float) -> None:
        """Look for silent replicas, and close those that left and are done."""
        for upstream in self.all():
            upstream.tick(now_s, held_up_s)
        for upstream in [one for one in self.leaving if not one.running]:
            self.leaving.remove(upstream)
            await upstream.close()

    async def close(self, reason: str) -> None:
        """End every exchange and close every connection."""
        self.is_open = False
        self.abort(reason)
        await asyncio.gather(*(one.close() for one in self.all()))

    def abort(self, reason: str) -> None:
        """End every exchange; new ones find no replica."""
        self.is_open = False
        for upstream in self.all():
            upstream.abort(reason)


@dataclass(frozen=True, slots=True)
class Choice:
    """Where to try next.

    Attributes:
        upstream: None: nowhere; the request is declined if ``route.backup`` says so, else there
            is no replica.
        on_unattainable: what the replica is to do if it cannot promise after all; None: what the
            request asks for.
        route: what `route` said; None for requests that are not routed by their SLO.
    """

    upstream: Upstream | None
    on_unattainable: OnUnattainable | None
    route: Route | None


class Placement:
    """The way of one request from replica to replica.

    A replica that failed gets it no more; one that refused gets it again only from the backup.

    Args:
        routed: what it asks for; None: plain round robin.
    """

    def __init__(self, cluster: Cluster, routed: RoutedRequest | None) -> None:
        self.cluster = cluster
        self.routed = routed
        self.failures = 0
        self.refusals = 0
        self.retry_after_s = float("inf")
        self._turn = cluster.next_turn()
        self._failed: set[Upstream] = set()
        self._asked = 0
        self._order: tuple[str, ...] | None = None  # where to go on; None: anywhere
        self._last: Route | None = None

    def next(self, now_s: float) -> Choice:
        """Where to try now."""
        able = [one for one in self.cluster.ready() if one not in self._failed]
        if not able:
            return Choice(None, None, None)
        if self.routed is None:
            return Choice(able[self._turn % len(able)], None, None)
        found = self._route(self.routed, able, now_s)
        self._last = found
        if found.target is None:
            return Choice(None, None, found)
        backup = self.cluster.routing.backup
        wish: OnUnattainable | None = None if backup == "as_asked" else backup
        if found.promised and found.left:
            wish = "decline"
        return Choice(self.cluster.listed[found.target], wish, found)

    def _route(self, routed: RoutedRequest, able: list[Upstream], now_s: float) -> Route:
        routing = self.cluster.routing
        shadows = [one.virtual for one in able]
        asked, turn = self._asked, self._turn
        if self._order is not None:
            by_name = {one.name: one for one in shadows}
            going_on = [by_name[name] for name in self._order if name in by_name]
            # With nobody left to ask, the backup acts among all of them.
            shadows, turn = (going_on, 0) if going_on else (shadows, turn)
            asked = asked if going_on else routing.max_hops
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
        """The replica made no promise after all."""
        assert self._last is not None
        self.refusals += 1
        self.retry_after_s = min(self.retry_after_s, retry_after_s)
        self._asked = self._last.hops
        self._order = self._last.left

    def failed(self, upstream: Upstream) -> bool:
        """The replica failed before it answered; whether there may be another try."""
        self._failed.add(upstream)
        self.failures += 1
        if self._last is not None and self._last.promised:
            self._asked = max(self._last.hops - 1, 0)
            self._order = self._last.left
        return self.failures <= self.cluster.routing.retries
