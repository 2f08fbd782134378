# SPDX-License-Identifier: Apache-2.0
"""How many replicas the demand of late would have needed."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from vllm_slo.core.routing.policy import Route
from vllm_slo.core.routing.virtual_replica import RoutedRequest


@dataclass(frozen=True, slots=True)
class Load:
    """What the requests of late would have needed. Loads of several fronts can be added.

    Attributes:
        asked: whether any request came.
        work: replicas that the work would fill, as far as they are to be filled.
        refused: replicas that the work without a promise would occupy.
    """

    asked: bool = False
    work: float = 0.0
    refused: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(self.asked or other.asked, self.work + other.work, self.refused + other.refused)

    def replicas(self, ready: int) -> int:
        """Replicas wanted; 0 if no request came.

        While promises are refused it is at least one more than are ``ready``. It is fewer only if
        none was refused and the rest would not be too full.
        """
        if not self.asked:
            return 0
        needed = max(math.ceil(self.work), 1)
        if self.refused > 0.0:
            return max(needed, ready + math.ceil(self.refused))
        return needed if self.work > 0.0 and needed < ready else max(ready, 1)


class DemandMeter:
    """How many replicas the demand of late would have needed, refused promises included.

    Autoscaling follows this and not the number of requests: what counts is the work that could not
    be promised. A request's work is the time for which it occupies an otherwise idle replica. Work
    is to fill ``target`` of a replica's time.

    Args:
        window_s: seconds of demand that are looked at.
        target: share of a replica's time that is to be filled, 0 < target <= 1.
    """

    def __init__(self, window_s: float, target: float) -> None:
        self.window_s = window_s
        self.target = target
        self._seen: deque[tuple[float, float, bool]] = deque()
        self._since_s: float | None = None
        self._last_s = -math.inf

    def came(self, now_s: float) -> None:
        """Record a request of any kind, with or without a decision."""
        self._last_s = now_s

    def routed(self, request: RoutedRequest, route: Route, now_s: float, work_s: float) -> None:
        """Record a decision about a request that takes ``work_s`` of a replica's time."""
        self._since_s = now_s if self._since_s is None else self._since_s
        self._seen.append((now_s, work_s, request.wants_promise and not route.promised))
        self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        while self._seen and self._seen[0][0] <= now_s - self.window_s:
            self._seen.popleft()

    def load(self, now_s: float) -> Load:
        """The demand of the last ``window_s``."""
        self._forget(now_s)
        if self._last_s <= now_s - self.window_s:
            return Load()
        if self._since_s is None:
            return Load(asked=True)
        span_s = min(max(now_s - self._since_s, 1.0), self.window_s)
        total_s = sum(work_s for _, work_s, _ in self._seen)
        refused_s = sum(work_s for _, work_s, refused in self._seen if refused)
        return Load(True, total_s / span_s / self.target, refused_s / span_s)
