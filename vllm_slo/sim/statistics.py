# SPDX-License-Identifier: Apache-2.0
"""Means, intervals and ratios of capacities over several windows, and shares of bursty requests."""

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
    variance = math.fsum((value - mean) ** 2 for value in values) / freedom
    return mean, _student(freedom) * math.sqrt(variance / len(values))


def _student(freedom: int) -> float:
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.5 / freedom


@dataclass(frozen=True, slots=True)
class Share:
    """``kept`` of ``of`` requests (at least one), and the 95% interval of that share.

    Requests that arrive together are kept or missed together, so they are not as many observations
    as they are requests. The requests are divided into stretches, in the order in which they came,
    and what the stretches differ by says how many independent requests there are. For that number
    the interval is Wilson's (Korn and Graubard, Survey Methodology 24, 1998; Franco et al., Journal
    of Survey Statistics and Methodology 7, 2019).
    """

    kept: int
    of: int
    low: float
    high: float
    residuals: tuple[float, ...]
    """Of each stretch: what it adds to the error of the share."""

    @property
    def value(self) -> float:
        return self.kept / self.of

    @classmethod
    def over(cls, kept: Sequence[int], of: Sequence[int]) -> Share:
        """Of so many kept, and so many requests, in each of at least two stretches."""
        count = sum(of)
        if len(kept) != len(of) or len(of) < 2 or count < 1:
            raise SimulationError("share: needs two stretches and one request at least")
        share = sum(kept) / count
        residuals = tuple((k - share * n) / count for k, n in zip(kept, of, strict=True))
        variance, spread = _variance(residuals), share * (1 - share)
        independent = float(count) if variance * count <= spread else spread / variance
        low, high = _wilson(share, independent, _student(len(of) - 1))
        return cls(sum(kept), count, low, high, residuals)

    def minus(self, other: Share) -> tuple[float, float]:
        """How much larger this share is, and half of the 95% interval of that difference.

        Both are of the same requests in the same stretches, so they are compared in pairs.
        """
        pairs = zip(self.residuals, other.residuals, strict=True)
        variance = _variance([mine - theirs for mine, theirs in pairs])
        half = _student(len(self.residuals) - 1) * math.sqrt(variance)
        return self.value - other.value, half


def _variance(residuals: Sequence[float]) -> float:
    """Of a share, from what each stretch adds to its error (they sum to 0)."""
    stretches = len(residuals)
    return stretches / (stretches - 1) * math.fsum(part**2 for part in residuals)


def _wilson(share: float, count: float, quantile: float) -> tuple[float, float]:
    square = quantile**2 / count
    middle = (share + square / 2) / (1 + square)
    half = math.sqrt(square * (share * (1 - share) + square / 4)) / (1 + square)
    return min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share)


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
