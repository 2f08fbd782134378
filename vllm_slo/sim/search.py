# SPDX-License-Identifier: Apache-2.0
"""Searches for the highest rate, or the fewest replicas, that keep an attainment.

Rates lie on one grid, ``start * 2 ** (i / n)``, so searches from one start share their rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from vllm_slo.sim.errors import SimulationError

DEFAULT_PRECISION: Final = 0.03
OCTAVES: Final = 8
"""How often the first rate is doubled or halved before a search gives up."""

Censored = Literal["", "never keeps", "never fails"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """The rate at which one window stops keeping its attainment. Rates in jobs/s per GPU.

    Attributes:
        kept: highest rate found to keep it; None if every rate tried misses it.
        missed: lowest rate above ``kept`` found to miss it; None if the highest rate keeps it.
        lowest, highest: rates tried.
    """

    kept: float | None
    missed: float | None
    lowest: float
    highest: float

    @property
    def censored(self) -> Censored:
        """Why there is no threshold; empty if there is one."""
        if self.kept is None:
            return "never keeps"
        return "never fails" if self.missed is None else ""


def find_threshold(
    keeps: Callable[[float], bool],
    start: float,
    *,
    precision: float = DEFAULT_PRECISION,
    octaves: int = OCTAVES,
) -> Threshold:
    """Bracket by doubling or halving from ``start``, then bisect in log rate.

    ``keeps`` should be true below some rate and false above it. Then the highest rate that keeps
    is in [kept, missed), and ``missed <= (1 + precision) * kept``. Otherwise the search finds one
    of the crossings. Each rate is tried once.

    Args:
        start: first rate tried, above 0.
        precision: relative, above 0.
        octaves: most doublings or halvings; beyond them the result is censored.

    Raises:
        SimulationError: ``start`` or ``precision`` is out of range.
    """
    if not 0 < start < math.inf:
        raise SimulationError(f"start: must be a rate above 0 jobs/s, got {start}")
    if not 0 < precision < math.inf:
        raise SimulationError(f"precision: must be above 0, got {precision}")
    parts = 1  # steps per octave; a power of two, so a finer grid contains every coarser one
    while 2 ** (1 / parts) > 1 + precision:
        parts *= 2
    tried: list[int] = []

    def at(place: int) -> bool:
        tried.append(place)
        return keeps(start * 2 ** (place / parts))

    most = octaves * parts
    low, high = _bracket(at, parts, most)
    while low is not None and high is not None and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) else (low, middle)
    rates = [None if place is None else start * 2 ** (place / parts) for place in (low, high)]
    lowest, highest = (start * 2 ** (place / parts) for place in (min(tried), max(tried)))
    return Threshold(rates[0], rates[1], lowest, highest)


def _bracket(keeps: Callable[[int], bool], octave: int, most: int) -> tuple[int | None, int | None]:
    """Neighbouring octaves of which the lower keeps and the upper misses; None beyond the end."""
    place = 0
    if keeps(0):
        while place < most:
            if not keeps(place + octave):
                return place, place + octave
            place += octave
        return place, None
    while place > -most:
        if keeps(place - octave):
            return place - octave, place
        place -= octave
    return None, place


def smallest(keeps: Callable[[int], bool], most: int, guess: int = 1) -> int | None:
    """Smallest n in 1..``most`` that keeps; None if none does.

    The search goes from ``guess`` in steps that double and then bisects, so it rarely tries numbers
    far from the answer. ``keeps`` should be false below some n and true from there on. Each n is
    tried once.
    """
    low, high = 0, most + 1  # the largest n that misses, the smallest n that keeps
    place, stride = min(max(guess, 1), most), 1
    while high - low > 1:
        if keeps(place):
            high = place
        else:
            low = place
        if low == 0:
            place = max(high - stride, 1)
        elif high > most:
            place = min(low + stride, most)
        else:
            place = (low + high) // 2
        stride *= 2
    return high if high <= most else None
