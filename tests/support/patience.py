# SPDX-License-Identifier: Apache-2.0
"""How patient tests are: their time-outs are as much longer as this machine is slower.

A time-out says that something hangs. How long is too long depends on the machine, so each time-out
is written for a machine of the speed of `REFERENCE_S` and multiplied by `slowness()`, which is
measured once in a session and handed to all processes of it.
"""

from __future__ import annotations

import os
import time
from typing import Final

VARIABLE: Final = "VLLMSLO_TEST_SLOWNESS"
"""Set by the first process for those that it starts, or by a user, who then decides."""
REFERENCE_S: Final = 0.01
"""Seconds of `probe_s` on an undisturbed core of an AMD EPYC (Zen 4), some reserve included."""
PROBES: Final = 9
MOST: Final = 8.0
"""Beyond it a hang would hold the session for hours."""


def probe_s() -> float:
    """Seconds of a fixed piece of Python, as most of what tests wait for is Python."""
    begun_s = time.perf_counter()
    table: dict[int, int] = {}
    for i in range(100_000):
        table[i & 1023] = table.get(i & 511, 0) + i
    return time.perf_counter() - begun_s


def measure() -> float:
    """How many times slower than the reference this machine is now; 1 at least.

    The median of several probes, so that what others compute here counts. One core has to do what
    two do elsewhere.
    """
    found_s = sorted(probe_s() for _ in range(PROBES))[PROBES // 2]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    alone = 2.0 if cores == 1 else 1.0
    return min(MOST, max(1.0, alone * found_s / REFERENCE_S))


def slowness() -> float:
    """`measure()`, once in a session."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{measure():.2f}"
    return float(os.environ[VARIABLE])


def patience(seconds: float) -> float:
    """A time-out for this machine, from one for the reference machine."""
    return seconds * slowness()
