# SPDX-License-Identifier: Apache-2.0
"""The share of expected tokens that drafts were measured to yield."""

from __future__ import annotations

from collections import deque

import numpy as np

from vllm_slo.core.speculation.window_pace import SHORT_WINDOW

LONGEST_WINDOW = 128
"""Most tokens of a window, so that enough windows are known before long. In windows of 16 luck
counts for more than in AdaServe's of 128, so fewer answers began together. At 9 requests/s 366 +-
29 tokens/s came in time, in place of 380 +- 13 (`benchmarks/adaserve_virtual.py`, seeds 0 to 2)."""
ENOUGH = 16
"""Windows before which the ratio is unknown. A convention, not measured."""
REMEMBERED = 256
"""Windows after which the oldest is forgotten. A convention, not measured."""


class MeasuredTrees:
    """A low quantile of the tokens that drafts yielded over those that were expected.

    A TPOT is judged over a window of tokens, so the ratio is that of windows, not of steps: a
    single step may accept nothing. Until enough long windows are known, short ones stand for them.

    Args:
        window: tokens over which a TPOT is judged; `LONGEST_WINDOW` of them count at most.
        quantile: share of the windows that yield at least the ratio.
    """

    def __init__(self, window: int, quantile: float) -> None:
        self._quantile = quantile
        sizes = {min(window, LONGEST_WINDOW), min(window, SHORT_WINDOW)}
        self._windows = [_Windows(size) for size in sorted(sizes, reverse=True)]
        self._spread: float | None = None

    def observe(self, request_id: str, expected: float, tokens: int) -> None:
        """Learn that a step yielded ``tokens`` tokens of a request, and that ``expected`` were
        expected, both with the root's own."""
        for windows in self._windows:
            if windows.observe(request_id, expected, tokens):
                self._spread = None

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        for windows in self._windows:
            if windows.forget(request_id):
                self._spread = None

    def spread(self) -> float:
        """The standard deviation of the ratio; 0 before `ENOUGH` windows."""
        if self._spread is None:
            shares = self._known()
            self._spread = float(np.std(np.fromiter(shares, np.float64))) if shares else 0.0
        return self._spread

    def share(self) -> float:
        """The share of expected tokens to count on; 0 before `ENOUGH` windows."""
        ranked = sorted(self._known())
        return ranked[int((1.0 - self._quantile) * len(ranked))] if ranked else 0.0

    def _known(self) -> deque[float]:
        """The ratios of the longest windows of which there are enough."""
        known = (each.shares for each in self._windows if len(each.shares) >= ENOUGH)
        return next(known, deque())


class _Windows:
    """The ratios of windows of one size.

    Args:
        size: tokens that are expected of a window. What is left of an answer that ends is a window,
            too, unless it is shorter than a `SHORT_WINDOW`.
    """

    def __init__(self, size: int) -> None:
        self.shares: deque[float] = deque(maxlen=REMEMBERED)
        self._size = size
        self._open: dict[str, tuple[float, int]] = {}

    def observe(self, request_id: str, expected: float, tokens: int) -> bool:
        """As in `MeasuredTrees`; whether a window is full."""
        due, had = self._open.pop(request_id, (0.0, 0))
        due, had = due + expected, had + tokens
        if due < self._size:
            self._open[request_id] = due, had
            return False
        self.shares.append(had / due)
        return True

    def forget(self, request_id: str) -> bool:
        """As in `MeasuredTrees`; whether what was left is a window."""
        due, had = self._open.pop(request_id, (0.0, 0))
        if due < min(self._size, SHORT_WINDOW):
            return False
        self.shares.append(had / due)
        return True
