# SPDX-License-Identifier: Apache-2.0
"""Means, intervals and ratios of capacities over several windows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.questions import Question
from vllm_slo.sim.search import Threshold

# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom.
_STUDENT: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half the width of its 95% interval (Student's t); None for a single value."""
    if not values:
        raise SimulationError("windows: there are none to take the mean of")
    mean, freedom = math.fsum(values) / len(values), len(values) - 1
    if freedom == 0:
        return mean, None
    quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.5 / freedom
    variance = math.fsum((value - mean) ** 2 for value in values) / freedom
    return mean, quantile * math.sqrt(variance / len(values))


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of one system for one question. Rates in jobs/s per GPU.

    Attributes:
        rate: mean over the windows; None if any window has no threshold.
        half_width: of the 95% interval; None without ``rate`` and for a single window.
    """

    question: Question
    windows: tuple[Threshold, ...]
    rate: float | None
    half_width: float | None

    @classmethod
    def of(cls, question: Question, windows: Iterable[Threshold]) -> Capacity:
        """The mean of thresholds; never extrapolates beyond the rates that were tried."""
        every = tuple(windows)
        kept = [window.kept for window in every if window.kept and not window.censored]
        if len(kept) < len(every) or not every:
            return cls(question, every, None, None)
        return cls(question, every, *mean_interval(kept))

    @property
    def text(self) -> str:
        """The capacity with its interval, or why there is none."""
        if self.rate is not None:
            width = "" if self.half_width is None else f" +- {_short(self.half_width, 2)}"
            return f"{_short(self.rate, 3)}{width}"
        asked, count = self.question.percent, len(self.windows)
        never = [window for window in self.windows if window.censored == "never keeps"]
        always = [window for window in self.windows if window.censored == "never fails"]
        part = never or always
        some = "" if len(part) == count else f" in {len(part)} of {count} windows"
        if never:
            lowest = min(window.lowest for window in never)
            return f"never reaches {asked}{some}, not even at {lowest:.3g}"
        highest = min(window.highest for window in always)
        return f"keeps {asked} up to {highest:.3g}, the highest rate tried{some}"

    @property
    def score(self) -> float:
        """Mean of the rates that were kept, 0 where none was: compares settings."""
        kept = math.fsum(window.kept or 0.0 for window in self.windows)
        return kept / max(1, len(self.windows))


def _short(value: float, digits: int) -> str:
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def ratio(capacity: Capacity, base: Capacity) -> tuple[float, float, float] | None:
    """``capacity`` over ``base``: geometric mean over the windows, low, high (95% interval).

    Both have the same jobs in each window, so windows are compared in pairs. With a single window
    low and high equal the mean. None if either has a window without a threshold.
    """
    if capacity.rate is None or base.rate is None:
        return None
    pairs = zip(capacity.windows, base.windows, strict=True)
    mean, half = mean_interval([math.log((a.kept or 1.0) / (b.kept or 1.0)) for a, b in pairs])
    return math.exp(mean), math.exp(mean - (half or 0.0)), math.exp(mean + (half or 0.0))
