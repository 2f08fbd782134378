# SPDX-License-Identifier: Apache-2.0
"""Pictures as SVG inside a page: as wide as the page lets them, in the page's own colours.

Horizontal places are percentages of the width and heights are pixels, so lines and text keep their
size on a phone. Colours are classes of the page's style sheet: ``fill``, ``track``, ``range`` and
so on. Every number and name is escaped by ``Markup.format``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from vllm_slo.sim.measure import Load

_LABEL_ROOM: Final = 22.0
"""Percentage of the width that the label of an axis takes on a phone: 40 of 180 pixels."""


def _joined(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def _svg(height: int, kind: str, parts: Iterable[Markup]) -> Markup:
    """One picture; what it shows is written beside it, so it is hidden from screen readers."""
    return Markup('<svg class="{}" width="100%" height="{}" aria-hidden="true">{}</svg>').format(
        kind, height, _joined(parts)
    )


def bar(share: float, low: float | None = None, high: float | None = None) -> Markup:
    """A share of 1 as a horizontal bar, with the ends of its interval as a whisker."""
    parts = [
        Markup('<rect class="track" y="2" width="100%" height="12" rx="2"/>'),
        Markup('<rect class="fill" y="2" width="{:.2f}%" height="12" rx="2"/>').format(100 * share),
    ]
    if low is not None and high is not None:
        ends = (100 * low, 100 * high)
        parts += [
            Markup('<line class="{}" x1="{:.2f}%" x2="{:.2f}%" y1="8" y2="8"/>').format(kind, *ends)
            for kind in ("halo", "whisker")
        ]
        parts += [
            Markup('<line class="whisker" x1="{:.2f}%" x2="{:.2f}%" y1="5" y2="11"/>').format(x, x)
            for x in ends
        ]
    return _svg(16, "bar", parts)


@dataclass(frozen=True, slots=True)
class LogAxis:
    """A logarithmic axis of times. Seconds, 0 < ``low_s`` < ``high_s``."""

    low_s: float
    high_s: float

    @classmethod
    def around(cls, times_s: Iterable[float]) -> LogAxis:
        """The axis that holds all times and at least one power of ten, with a little room."""
        known = [max(time_s, 1e-4) for time_s in times_s] or [1.0]
        low, high = min(known) / 1.25, max(known) * 1.25
        if high < 10 * low:
            middle = math.sqrt(low * high)
            low, high = middle / math.sqrt(10), middle * math.sqrt(10)
        return cls(low, high)

    def place(self, time_s: float) -> float:
        """Percentage of the width, 0 to 100."""
        share = math.log(max(time_s, 1e-9) / self.low_s) / math.log(self.high_s / self.low_s)
        return 100 * min(max(share, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Round times within the axis, as many as have room for their labels on a phone."""
        low, high = math.floor(math.log10(self.low_s)), math.ceil(math.log10(self.high_s))
        powers = [10.0**n for n in range(low, high + 1)]
        for factors in ((1, 2, 5), (1, 3), (1,)):
            times_s = (factor * power for power in powers for factor in factors)
            inside = [time_s for time_s in times_s if 3 <= self.place(time_s) <= 97]
            apart: list[float] = []
            for time_s in inside:
                if not apart or self.place(time_s) - self.place(apart[-1]) >= _LABEL_ROOM:
                    apart.append(time_s)
            if apart == inside:
                break
        return apart


def axis(scale: LogAxis, labels: Sequence[str]) -> Markup:
    """The labels below rows of ranges. ``labels``: of ``scale.ticks()``."""
    return _svg(
        18,
        "axis",
        (
            Markup('<text x="{:.2f}%" y="13" text-anchor="middle">{}</text>').format(
                scale.place(tick), label
            )
            for tick, label in zip(scale.ticks(), labels, strict=True)
        ),
    )


def time_range(
    scale: LogAxis, percentiles: tuple[float, float, float] | None, objective_s: float | None
) -> Markup:
    """The median as a dot, a thick line to p95, a thin one to p99, and the objective.

    Rows that touch make one line of the objective. ``percentiles``: p50, p95, p99 in seconds.
    """
    parts = [
        Markup('<line class="grid" x1="{:.2f}%" x2="{:.2f}%" y1="0" y2="22"/>').format(
            scale.place(tick), scale.place(tick)
        )
        for tick in scale.ticks()
    ]
    if objective_s is not None:
        x = scale.place(objective_s)
        parts.append(
            Markup('<line class="objective" x1="{:.2f}%" x2="{:.2f}%" y1="0" y2="22"/>').format(
                x, x
            )
        )
    if percentiles is not None:
        p50, p95, p99 = map(scale.place, percentiles)
        parts += [
            Markup('<line class="thin" x1="{:.2f}%" x2="{:.2f}%" y1="11" y2="11"/>').format(
                p95, p99
            ),
            Markup('<line class="thin" x1="{:.2f}%" x2="{:.2f}%" y1="7" y2="15"/>').format(
                p99, p99
            ),
            Markup('<line class="thick" x1="{:.2f}%" x2="{:.2f}%" y1="11" y2="11"/>').format(
                p50, p95
            ),
            Markup('<circle class="dot" cx="{:.2f}%" cy="11" r="4.5"/>').format(p50),
        ]
    return _svg(22, "range", parts)


def load(measured: Load, most: float, height: int = 84) -> Markup:
    """Requests in a system over time, promised ones below the others. ``most``: top of the axis."""
    top = max(most, 1.0)
    promised = list(measured.promised)
    every = [a + b for a, b in zip(promised, measured.best_effort, strict=True)]
    areas = [_area(every, top, height, "best-effort" if measured.promises else "plain")]
    if measured.promises:
        areas.append(_area(promised, top, height, "promised"))
    inner = Markup(
        '<svg width="100%" height="{0}" viewBox="0 0 {1} {0}" preserveAspectRatio="none">{2}</svg>'
    ).format(height, max(len(every) - 1, 1), _joined(areas))
    base = Markup('<line class="base" x1="0" x2="100%" y1="{0}" y2="{0}"/>').format(height - 0.5)
    return _svg(height, "load", [inner, base])


def _area(values: Sequence[int], top: float, height: int, kind: str) -> Markup:
    """The area below a line; places along it are numbers of the values."""
    points = " ".join(f"{i},{height - height * v / top:.1f}" for i, v in enumerate(values))
    return Markup('<polygon class="{}" points="0,{} {} {},{}"/>').format(
        kind, height, points, max(len(values) - 1, 1), height
    )
