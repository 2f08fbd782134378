# SPDX-License-Identifier: Apache-2.0
"""How often a replica tells its fronts how it stands.

News are promises that are made, begun or ended: they are told at once while there are few of them.
A front takes in the states of many replicas, so the more there is to tell, the longer it is saved
up: a replica with ten news a second sends as many lines as one with a thousand.
"""

from __future__ import annotations

from typing import Final

AT_ONCE_S: Final = 0.02
"""Shortest time between two states, seconds: about a step of a model that serves many."""
EARNED_S: Final = 0.125
"""A state may be told for every so many seconds. What 64 replicas then cost a front is measured in
``benchmarks/results/routing_decision.md``."""
BURST: Final = 5.0
"""Most states that are saved up. The value is a choice: the events of one or two requests."""
SLOW_S: Final = 0.25
"""Longest time between two states of an engine that works. What changes with every step (tokens to
compute, KV that is read) is no news. What is learnt (step times, lengths of answers) is not told
more often."""
LONG_STEP_S: Final = 0.1
"""A state is told before a step that takes longer, since none is told while it runs."""


class StatePace:
    """Says when the next state may be told."""

    def __init__(self) -> None:
        self._saved = BURST
        self._told_s: float | None = None

    @property
    def next_s(self) -> float:
        """The earliest time for news; before the first state it is always."""
        if self._told_s is None:
            return float("-inf")
        return self._told_s + max(AT_ONCE_S, (1.0 - self._saved) * EARNED_S)

    def is_due(self, now_s: float, *, news: bool, step_s: float) -> bool:
        """Whether a state is to be told now.

        Args:
            news: whether promises changed since the last one.
            step_s: seconds until the next time at which one can be told.
        """
        if self._told_s is None or step_s > LONG_STEP_S:
            return True
        return (news and now_s >= self.next_s) or now_s >= self._told_s + SLOW_S

    def told(self, now_s: float) -> None:
        """A state was told."""
        if self._told_s is not None:
            self._saved = min(self._saved + (now_s - self._told_s) / EARNED_S, BURST)
        self._saved = max(self._saved - 1.0, 0.0)
        self._told_s = now_s
