# SPDX-License-Identifier: Apache-2.0
"""How much of the tokens that drafts promise they are seen to yield."""

from __future__ import annotations

from collections import deque


class MeasuredTrees:
    """How much of what trees were expected to yield they did yield, on the safe side.

    A TPOT is judged over a window of tokens, so it is windows that are looked at: a single step may
    accept nothing.

    Args:
        window: tokens over which a TPOT is judged.
        quantile: share of the windows that yield at least that much.
    """

    ENOUGH = 16
    """Windows before anything is known."""
    REMEMBERED = 256

    def __init__(self, window: int, quantile: float) -> None:
        self._window = window
        self._quantile = quantile
        self._open: dict[str, tuple[float, int]] = {}
        self._shares: deque[float] = deque(maxlen=self.REMEMBERED)

    def observe(self, request_id: str, hoped: float, tokens: int) -> None:
        """A step yielded ``tokens`` tokens of a request where ``hoped`` were expected, its root's
        included."""
        expected, had = self._open.get(request_id, (0.0, 0))
        expected, had = expected + hoped, had + tokens
        if expected >= self._window:
            self._shares.append(had / expected)
            expected, had = 0.0, 0
        self._open[request_id] = expected, had

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._open.pop(request_id, None)

    def share(self) -> float:
        """What to count on, of expected tokens; nothing until enough was seen."""
        if len(self._shares) < self.ENOUGH:
            return 0.0
        ranked = sorted(self._shares)
        return ranked[int((1.0 - self._quantile) * len(ranked))]
