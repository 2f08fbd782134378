# SPDX-License-Identifier: Apache-2.0
"""Whose drafts are verified: shares of the tenants of one server, by GoodSpeed's gradient.

Promises come first: drafts that an objective needs are chosen before and without this. What is left
of a step's verification budget goes to the tenants so that the sum of the logarithms of their
goodputs grows fastest (`core.speculation.proportional_fairness`): to who got little so far before
who got much, but not to whose drafts are hardly ever accepted. How many tokens a step verifies is
not changed by it, only whose.

Under exact match a draft is accepted with the probability that the served model gives it, p(x);
what happened to the drafts that were looked at is a sample of that, and is what acceptance is
learnt from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_slo.core.arrays import Floats
from vllm_slo.core.speculation.proportional_fairness import GradientScheduler, grant_tokens
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.telemetry.speculation_metrics import SpeculationMetrics

NOBODY = "none"
"""The tenant of requests that name none."""
MOST_TENANTS = 1024
"""Tenants that are remembered; then the one that was away the longest is forgotten."""
MOST_SHOWN = 32
"""Tenants on ``/metrics``, the first to come: a label must not grow without end."""
SHOWN_EVERY = 32
"""Rounds after which the metrics are brought up to date."""


class Verified(NamedTuple):
    """What became of one request's drafts in a round.

    Attributes:
        request_id: whose.
        offered: drafts that were verified.
        accepted: how many of them were.
    """

    request_id: str
    offered: int
    accepted: int


class TenantShares:
    """The tenants of one engine."""

    def __init__(self, tracker: RequestTracker, metrics: SpeculationMetrics) -> None:
        self._tracker = tracker
        self._metrics = metrics
        self._gradient = GradientScheduler()
        self._tenants: dict[str, None] = {}  # by when they were last seen
        self._shown: set[str] = set()
        self._rounds = 0
        grant_tokens(np.ones(1), np.full(1, 0.5), 1)  # compiles it now instead of in the first step

    def _tenants_of(self, request_ids: Iterable[str]) -> list[str]:
        """The tenant of each request. Of too many tenants the one that was last seen longest ago is
        forgotten, but none of these."""
        found = [self._tenant_of(name) for name in request_ids]
        for tenant in dict.fromkeys(found):
            if tenant in self._tenants:
                del self._tenants[tenant]
            else:
                self._gradient.add(tenant)
            self._tenants[tenant] = None
        for _ in range(len(self._tenants) - max(MOST_TENANTS, len(set(found)))):
            oldest = next(iter(self._tenants))
            del self._tenants[oldest]
            self._gradient.forget(oldest)
        return found

    def _tenant_of(self, request_id: str) -> str:
        tracked = self._tracker.get(request_id)
        return NOBODY if tracked is None else tracked.slo.tenant or NOBODY

    def weights(self, request_ids: Iterable[str]) -> Floats:
        """(n,) what a token of each request counts for, 1 on average."""
        tenants = self._tenants_of(request_ids)
        found = self._gradient.gradient(tenants)
        return found / found.mean() if tenants else found

    def divide(
        self, request_ids: Sequence[str], budget: int, least: Sequence[int], most: Sequence[int]
    ) -> list[int]:
        """Drafts of each request, ``budget`` altogether.

        Args:
            request_ids: who could verify some.
            budget: that the step verifies.
            least: that objectives need, of each; they come first.
            most: that each has.
        """
        tenants = self._tenants_of(request_ids)
        grants = self._gradient.grants(tenants, budget, least=least, most=most)
        return [int(grant) for grant in grants]

    def observe(self, round_: Iterable[Verified]) -> None:
        """Take in a round of everybody who decoded in it."""
        ratios: dict[str, list[float]] = {}
        tokens: dict[str, int] = {}
        seen = list(round_)
        tenants = self._tenants_of(name for name, _, _ in seen)
        for tenant, (_, offered, accepted) in zip(tenants, seen, strict=True):
            hits = ratios.setdefault(tenant, [])
            hits += [1.0] * accepted + [0.0] * (accepted < offered)
            tokens[tenant] = tokens.get(tenant, 0) + accepted + 1
        for tenant, hits in ratios.items():
            self._gradient.observe(tenant, hits, tokens[tenant])
        self._rounds += 1
        if self._rounds % SHOWN_EVERY == 0:
            self._show()

    def _show(self) -> None:
        for tenant, view in self._gradient.views().items():
            if len(self._shown) < MOST_SHOWN:
                self._shown.add(tenant)
            if tenant in self._shown:
                self._metrics.tenant(tenant, view)
