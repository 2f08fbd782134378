# SPDX-License-Identifier: Apache-2.0
"""The share of expected tokens that drafts were measured to yield."""

from __future__ import annotations

from collections import deque

import numpy as np


class MeasuredTrees:
    """A low quantile of the tokens that drafts yielded over those that were expected.

    A TPOT is judged over a window of tokens, so the ratio is that of windows, not of steps: a
    single step may accept nothing.

    Args:
        window: tokens over which a TPOT is judged.
        quantile: share of the windows that yield at least the ratio.
    """

    ENOUGH = 16
    """Windows before which the ratio is unknown. A convention, not measured."""
    REMEMBERED = 256
    """Windows after which the oldest is forgotten. A convention, not measured."""

    def __init__(self, window: int, quantile: float) -> None:
        self._window = window
        self._quantile = quantile
        self._open: dict[str, tuple[float, int]] = {}
        self._spread: float | None = None
        self._shares: deque[float] = deque(maxlen=self.REMEMBERED)

    def observe(self, request_id: str, expected: float, tokens: int) -> None:
        """Learn that a step yielded ``tokens`` tokens of a request, and that ``expected`` were
        expected, both with the root's own."""
        due, had = self._open.get(request_id, (0.0, 0))
        due, had = due + expected, had + tokens
        if due >= self._window:
            self._shares.append(had / due)
            self._spread = None
            due, had = 0.0, 0
        self._open[request_id] = due, had

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._open.pop(request_id, None)

    def spread(self) -> float:
        """The standard deviation of the ratio; 0 before `ENOUGH` windows."""
        if len(self._shares) < self.ENOUGH:
            return 0.0
        if self._spread is None:
            self._spread = float(np.std(np.fromiter(self._shares, np.float64)))
        return self._spread

    def share(self) -> float:
        """The share of expected tokens to count on; 0 before `ENOUGH` windows."""
        if len(self._shares) < self.ENOUGH:
            return 0.0
        ranked = sorted(self._shares)
        return ranked[int((1.0 - self._quantile) * len(ranked))]
