# SPDX-License-Identifier: Apache-2.0
"""Time as a dependency: policies and the scheduler ask a clock, never the operating system."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings of the same instant."""

    def monotonic_s(self) -> float:
        """Seconds that never run backwards; the clock of every deadline."""

    def epoch_s(self) -> float:
        """Seconds since 1970, the clock that requests are stamped with on arrival."""


class SystemClock:
    """The machine's own clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def epoch_s(self) -> float:
        return time.time()


class VirtualClock:
    """A clock that moves only when told to; both readings are the same number.

    Args:
        now_s: the first reading, in seconds.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def monotonic_s(self) -> float:
        return self.now_s

    def epoch_s(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move on by ``seconds`` (not negative)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self.now_s += seconds
