# SPDX-License-Identifier: Apache-2.0
"""What would be promised to a request if it came now. Admission is asked again and again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from vllm_slo.core.admission.incremental import Verdict
from vllm_slo.core.types import INFINITY

Ask: TypeAlias = Callable[[float, float], Verdict]
"""(TTFT, TPOT) in seconds, infinite where there is none -> whether both can be promised now."""

PRECISION: Final = 1.04
"""An objective that is found is at most so many times as long as the shortest. The value is a
choice: each further bit of precision asks admission once more."""
WIDEST: Final = 1e5
"""Objectives are looked for up to so many times a lone request's. The value is a choice: a promise
of a day for an answer of a second is none."""
MEMORY_S: Final = 10.0
"""Seconds after which a promised prompt counts for 1/e. The value is a choice: it should span a few
arrivals, and be shorter than load takes to change."""


class Competition:
    """How many more prompt tokens than usual are likely to be promised in the next moment.

    It is one standard deviation if prompts like those promised of late come as a Poisson process.
    The usual number is left out, since the engine does that work meanwhile.
    """

    def __init__(self) -> None:
        self._at_s = 0.0
        self._squares = 0.0

    def promised(self, tokens: int, now_s: float) -> None:
        """Note that a prompt with so many tokens to compute was promised."""
        self._squares = self._squares * self._faded(now_s) + tokens * tokens
        self._at_s = max(now_s, self._at_s)

    def tokens(self, within_s: float, now_s: float) -> float:
        """Tokens within ``within_s`` seconds."""
        return math.sqrt(within_s / MEMORY_S * self._faded(now_s) * self._squares)

    def _faded(self, now_s: float) -> float:
        return math.exp(min(self._at_s - now_s, 0.0) / MEMORY_S)


class Quote(NamedTuple):
    """What a request would be promised. Times are in seconds.

    Attributes:
        promised: whether the request would be promised what it asks for.
        reason: the resource that binds, as in `AdmissionPlan.refused`; None if it is promised.
        retry_after_s: when the same might be promised.
        ttft_s: shortest TTFT that would be promised beside the TPOT asked for; None: none at all.
        tpot_s: shortest TPOT that would be promised beside the TTFT asked for; None: none at all.
        cheapest: (TTFT, TPOT) that would be promised, infinite where none was asked for: those
            asked for, or these with the objective that binds made longer; None: there are none.
    """

    promised: bool
    reason: str | None
    retry_after_s: float
    ttft_s: float | None
    tpot_s: float | None
    cheapest: tuple[float, float] | None


def quote(ttft_s: float, tpot_s: float, ask: Ask, lone_ttft_s: float, lone_tpot_s: float) -> Quote:
    """What a request would be promised.

    Args:
        ttft_s, tpot_s: what it asks for, infinite where it asks for none; at least one is finite.
        ask: admission. A longer objective is never harder to promise.
        lone_ttft_s, lone_tpot_s: what an engine without other work takes, above 0.
    """
    asked = ask(ttft_s, tpot_s)
    if asked.reason in ("memory", "seats"):  # a longer objective would not help
        return Quote(False, asked.reason, asked.retry_after_s, None, None, None)
    first_s = _shortest(lambda time_s: ask(time_s, tpot_s).promised, lone_ttft_s, ttft_s, asked)
    each_s = _shortest(lambda time_s: ask(ttft_s, time_s).promised, lone_tpot_s, tpot_s, asked)
    cheapest: tuple[float, float] | None
    if asked.promised:
        cheapest = ttft_s, tpot_s
    elif asked.reason == "decode" and each_s is not None:
        cheapest = ttft_s, each_s
    elif first_s is not None:
        cheapest = first_s, tpot_s
    elif each_s is not None:
        cheapest = ttft_s, each_s
    else:
        times = _shortest(lambda n: ask(ttft_s * n, tpot_s * n).promised, 1.0, INFINITY, asked)
        cheapest = None if times is None else (ttft_s * times, tpot_s * times)
    return Quote(asked.promised, asked.reason, asked.retry_after_s, first_s, each_s, cheapest)


def shortest_s(promised: Callable[[float], bool], lone_s: float) -> float | None:
    """The shortest time that is promised, to within `PRECISION`; None: none is.

    Args:
        promised: whether a time is. A longer one is never harder to promise.
        lone_s: the shortest that can be.
    """
    return _shortest(promised, lone_s, INFINITY, Verdict(False))


def _shortest(
    promised: Callable[[float], bool], lone_s: float, asked_s: float, asked: Verdict
) -> float | None:
    """The shortest time that is promised, to within `PRECISION`; None: none is.

    The verdict on the time that was asked for narrows the search.
    """
    low, high = lone_s, lone_s * WIDEST
    if asked.promised and asked_s < INFINITY:
        if asked_s <= low:
            return asked_s
        high = asked_s
    else:
        if not asked.promised and low < asked_s < high:
            low = asked_s
        if not promised(high):
            return None
    if promised(low):
        return low
    while high > low * PRECISION:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if promised(middle) else (middle, high)
    return high
