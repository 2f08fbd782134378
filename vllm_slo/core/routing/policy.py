# SPDX-License-Identifier: Apache-2.0
"""Which replica a request goes to: SLO-driven routing over virtual replicas.

Source: SLOs-Serve, section 4.2 and figure 7. A request goes to the replica whose turn it is. If
that one cannot keep its objectives, the next one is asked, and so on. When as many were asked as
may be, a backup policy declines the request or gives it best effort.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from vllm_slo.core.routing.virtual_replica import RoutedRequest, VirtualReplica
from vllm_slo.core.types import INFINITY, Backup, RoutingPolicy

Rank = Callable[[RoutedRequest, Sequence[VirtualReplica], int, Random], list[VirtualReplica]]
"""(request, replicas, turn, randomness) -> replicas in the order in which they are to be tried."""

SCORER_WEIGHTS: Final = (2.0, 2.0, 3.0)
"""Weights of queue, KV cache and prefix in `scorers`: those of ``default-plugins.yaml`` in
llm-d-router's chart (config/charts/routerlib/templates/_config.yaml)."""


def round_robin(
    request: RoutedRequest, replicas: Sequence[VirtualReplica], turn: int, rng: Random
) -> list[VirtualReplica]:
    """In order, from the replica whose turn it is."""
    first = turn % len(replicas)
    return [*replicas[first:], *replicas[:first]]


def prefix_first(
    request: RoutedRequest, replicas: Sequence[VirtualReplica], turn: int, rng: Random
) -> list[VirtualReplica]:
    """Replicas that hold more of the prompt in their prefix cache first; in turn among equals."""
    ranked = round_robin(request, replicas, turn, rng)
    if request.cached_tokens:
        ranked.sort(key=lambda replica: -request.cached_tokens.get(replica.name, 0))
    return ranked


def least_loaded(
    request: RoutedRequest, replicas: Sequence[VirtualReplica], turn: int, rng: Random
) -> list[VirtualReplica]:
    """By tokens to compute, less what the prefix cache saves; in turn among equals."""
    ranked = round_robin(request, replicas, turn, rng)
    ranked.sort(
        key=lambda replica: replica.load_tokens - request.cached_tokens.get(replica.name, 0)
    )
    return ranked


def shortest_wait(
    request: RoutedRequest, replicas: Sequence[VirtualReplica], turn: int, rng: Random
) -> list[VirtualReplica]:
    """As `least_loaded`, but in seconds by each replica's own step-time model, so that the same
    backlog counts twice on a replica of half the speed. By tokens while one has not spoken.
    """
    if any(replica.state is None for replica in replicas):
        return least_loaded(request, replicas, turn, rng)
    ranked = round_robin(request, replicas, turn, rng)
    cached = request.cached_tokens
    if cached:
        ranked.sort(key=lambda one: one.token_s * (one.load_tokens - cached.get(one.name, 0)))
    else:
        ranked.sort(key=lambda one: one.token_s * one.load_tokens)
    return ranked


def power_of_two(
    request: RoutedRequest, replicas: Sequence[VirtualReplica], turn: int, rng: Random
) -> list[VirtualReplica]:
    """First the less loaded of two replicas taken at random."""
    pair = rng.sample(range(len(replicas)), min(2, len(replicas)))
    best = min(pair, key=lambda place: replicas[place].load_tokens)
    return [replicas[best], *(r for place, r in enumerate(replicas) if place != best)]


def scorers(
    request: RoutedRequest, replicas: Sequence[VirtualReplica], turn: int, rng: Random
) -> list[VirtualReplica]:
    """llm-d's default mix of scores, highest first; equals in random order.

    Queue: (longest - own) / (longest - shortest) of the numbers of waiting requests, 1 if all are
    equal. KV cache: its free share. Prefix: the share of the prompt that is cached. Each is between
    0 and 1 and weighs as in `SCORER_WEIGHTS`. As in llm-d, load is what replicas said last: what
    was sent since does not count. A replica that has not spoken is scored for its prefix alone.

    Source: llm-d-router, `queue-scorer`, `kv-cache-utilization-scorer`, `prefix-cache-scorer`.
    """
    queue_weight, kv_weight, prefix_weight = SCORER_WEIGHTS
    waiting = [replica.state.waiting for replica in replicas if replica.state is not None]
    longest, spread = max(waiting, default=0), max(waiting, default=0) - min(waiting, default=0)

    def score(replica: VirtualReplica) -> float:
        cached = request.cached_tokens.get(replica.name, 0) / max(request.prompt_tokens, 1)
        points = prefix_weight * min(cached, 1.0)
        state = replica.state
        if state is None:
            return points
        queue = (longest - state.waiting) / spread if spread else 1.0
        return points + queue_weight * queue + kv_weight * (1.0 - state.kv_usage)

    ranked = rng.sample(replicas, len(replicas))
    ranked.sort(key=score, reverse=True)
    return ranked


RANKS: Final[Mapping[RoutingPolicy, Rank]] = {
    "slo": prefix_first,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "scorers": scorers,
}


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes.

    Attributes:
        target: a replica's name; None: it is declined, or there is no replica.
        promised: whether the target's shadow says that every objective can be kept.
        hops: replicas that were asked for a promise.
        backup: what acted when none of them gave one: ``best_effort``, ``decline``, or None.
        reason: what stood in the way at the replica asked first.
        retry_after_s: when one of those asked may have room again (prediction).
        left: replicas that were not asked, in order.
    """

    target: str | None
    promised: bool = False
    hops: int = 0
    backup: str | None = None
    reason: str | None = None
    retry_after_s: float = 1.0
    left: tuple[str, ...] = ()


def route(
    request: RoutedRequest,
    replicas: Sequence[VirtualReplica],
    now_s: float,
    *,
    policy: RoutingPolicy = "slo",
    turn: int = 0,
    max_hops: int = 8,
    backup: Backup = "as_asked",
    rng: Random,
    already_asked: int = 0,
) -> Route:
    """Choose a replica for a request; nothing is changed.

    Args:
        policy: only ``slo`` asks for promises; the others send to the first of their ranking.
        turn: counts requests, for round robin.
        max_hops: replicas asked before the backup acts.
        already_asked: hops that this request has made before.
    """
    if not replicas:
        return Route(None)
    asks = policy == "slo" and request.wants_promise
    if not asks:
        # No promise is asked for: the shortest queue that has the prompt cached serves best.
        rank = shortest_wait if policy == "slo" else RANKS[policy]
        ranked = rank(request, replicas, turn, rng)
        return Route(ranked[0].name, left=tuple(replica.name for replica in ranked[1:]))
    ranked = RANKS[policy](request, replicas, turn, rng)
    may_ask = max(max_hops - already_asked, 0)
    reason, retry_after_s = None, INFINITY
    for place, replica in enumerate(ranked[:may_ask]):
        verdict = replica.judge(request, now_s)
        if verdict.promised:
            left = tuple(other.name for other in ranked[place + 1 :])
            return Route(replica.name, True, already_asked + place + 1, left=left)
        reason = reason or verdict.reason
        retry_after_s = min(retry_after_s, verdict.retry_after_s)
    hops = already_asked + min(may_ask, len(ranked))
    retry_after_s = retry_after_s if math.isfinite(retry_after_s) else 1.0
    if backup == "decline" or (backup == "as_asked" and request.declines):
        return Route(None, False, hops, "decline", reason, retry_after_s)
    target = shortest_wait(request, replicas, turn, rng)[0].name
    return Route(target, False, hops, "best_effort", reason, retry_after_s)
