# SPDX-License-Identifier: Apache-2.0
"""The objectives that requests have had of late: how long a step may be that no promise limits."""

from __future__ import annotations

import math
from typing import Final

from vllm_slo.core.types import INFINITY

TTFT_SHARE: Final = 0.25
"""Longest step that no promise limits, as a share of the tightest TTFT. A request that arrives in
the midst of a step loses what is left of it: this share at most, and half of it on average. The
value is a choice. A smaller one leaves TTFTs more time and makes best effort slower."""
GRID: Final = 1.25
"""Ratio of neighbouring objectives that are told apart, so that few are remembered. An objective is
rounded down, so a step may be this much shorter than it had to be."""


class RecentObjectives:
    """Remembers the objectives of requests that arrived of late.

    A request that arrives in the midst of a step loses what is left of it. As long as best effort
    and drafts make short steps, that request can still be promised something; longer steps would
    process best effort a little faster.

    Args:
        memory_s: seconds for which an objective is remembered.
    """

    def __init__(self, memory_s: float = 60.0) -> None:
        self._memory_s = memory_s
        self._ttft: dict[int, float] = {}
        self._tpot: dict[int, float] = {}

    def add(self, ttft_s: float, tpot_s: float, now_s: float) -> None:
        """Note that a request with these objectives (infinite: none) arrived."""
        for last_seen_s, objective_s in ((self._ttft, ttft_s), (self._tpot, tpot_s)):
            if 0.0 < objective_s < INFINITY:
                last_seen_s[math.floor(math.log(objective_s, GRID))] = now_s

    def responsive_step_s(self, now_s: float, shortest_s: float) -> float:
        """Seconds of the longest step that best effort and drafts may make; infinite if no TTFT is
        remembered.

        A TPOT without a TTFT limits no step, as it counts from the first token on. A step as long
        as the tightest TPOT is always allowed, as running answers make such steps anyway.

        Args:
            now_s: the time.
            shortest_s: seconds of the shortest step; tighter objectives cannot be kept, and do not
                count.
        """
        ttft_s = self._tightest(self._ttft, now_s, shortest_s)
        tpot_s = self._tightest(self._tpot, now_s, shortest_s)
        return max(TTFT_SHARE * ttft_s, tpot_s if tpot_s < INFINITY else 0.0)

    def _tightest(self, last_seen_s: dict[int, float], now_s: float, shortest_s: float) -> float:
        for power in [p for p, at_s in last_seen_s.items() if at_s < now_s - self._memory_s]:
            del last_seen_s[power]
        return min((t for p in last_seen_s if (t := GRID**p) > shortest_s), default=INFINITY)
