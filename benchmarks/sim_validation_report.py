# SPDX-License-Identifier: Apache-2.0
"""The tables and the picture of ``sim_validation.py``: real against simulated runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vllm_slo.sim.measure import JobMeasure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS_TARGET: Final = 3.0
"""Attainment may be off by so many percentage points."""
P50_TARGET: Final = 0.10
P99_TARGET: Final = 0.25
"""Percentiles of TTFT and TPOT may be off by such a share."""
FORECAST: Final = "forecast"
DRIFT: Final = "step times"

Measures = tuple[JobMeasure, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One system under one condition.

    Attributes:
        kind: what the simulator was told: `FORECAST` or `DRIFT`.
        real: measures of each run.
        simulated: measures of each simulation of each run, over the same jobs in the same order.
    """

    condition: str
    system: str
    kind: str
    real: tuple[Measures, ...]
    simulated: tuple[tuple[Measures, ...], ...]


@dataclass(frozen=True, slots=True)
class Numbers:
    """What is compared: attainment as a share, percentiles in seconds; of TPOT, each request's
    worst window."""

    attained: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float


def numbers(runs: Sequence[Measures]) -> Numbers:
    """The numbers of all jobs of some runs together."""
    jobs = [job for run in runs for job in run]
    ttfts_s = np.percentile([t for job in jobs for t in job.ttfts_s], (50, 99))
    tpots_s = np.percentile([t for job in jobs for t in job.tpots_s], (50, 99))
    attained = sum(job.attained for job in jobs) / len(jobs)
    return Numbers(attained, *map(float, ttfts_s), *map(float, tpots_s))


def expected(simulated: Sequence[Sequence[Measures]]) -> Numbers:
    """The mean of the numbers of each repetition: each has as many jobs as the real runs, so that
    percentiles are of as many values.

    ``simulated``: for each run its simulations.
    """
    each = [numbers(runs) for runs in zip(*simulated, strict=True)]
    return Numbers(
        *(statistics.fmean(getattr(one, f.name) for one in each) for f in fields(Numbers))
    )


@dataclass(frozen=True, slots=True)
class Errors:
    """Simulated against real.

    Attributes:
        points: of attainment, percentage points.
        by_run: the same of each run.
        ttft_p50, ttft_p99, tpot_p50, tpot_p99: relative.
        same: share of the jobs that kept their objectives in both or missed them in both.
    """

    points: float
    by_run: tuple[float, ...]
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    same: float

    @property
    def misses(self) -> list[str]:
        """What is off by more than the targets."""
        bounds = {
            "attained": (self.points, POINTS_TARGET),
            "TTFT p50": (self.ttft_p50, P50_TARGET),
            "TTFT p99": (self.ttft_p99, P99_TARGET),
            "TPOT p50": (self.tpot_p50, P50_TARGET),
            "TPOT p99": (self.tpot_p99, P99_TARGET),
        }
        return [name for name, (error, bound) in bounds.items() if abs(error) > bound]


def errors(real: Sequence[Measures], simulated: Sequence[Sequence[Measures]]) -> Errors:
    """How far simulations are from the runs that they repeat.

    ``simulated``: for each run its simulations.
    """
    pooled = expected(simulated)
    true = numbers(real)
    by_run = tuple(
        100 * (numbers(runs).attained - numbers([run]).attained)
        for run, runs in zip(real, simulated, strict=True)
    )
    same = [
        a.attained == b.attained
        for run, runs in zip(real, simulated, strict=True)
        for one in runs
        for a, b in zip(run, one, strict=True)
    ]
    return Errors(
        100 * (pooled.attained - true.attained),
        by_run,
        pooled.ttft_p50_s / true.ttft_p50_s - 1.0,
        pooled.ttft_p99_s / true.ttft_p99_s - 1.0,
        pooled.tpot_p50_s / true.tpot_p50_s - 1.0,
        pooled.tpot_p99_s / true.tpot_p99_s - 1.0,
        sum(same) / len(same),
    )


HEAD: Final = (
    "condition", "system", "told", "jobs", "attained: real", "simulated", "error, points (by run)",
    "TTFT p50 / p99, ms: real", "simulated", "error",
    "TPOT p50 / p99, ms: real", "simulated", "error", "same verdict", "within target",
)  # fmt: skip


def _ms(p50_s: float, p99_s: float) -> str:
    return f"{1e3 * p50_s:,.0f} / {1e3 * p99_s:,.0f}"


def _shares(p50: float, p99: float) -> str:
    return f"{100 * p50:+.0f}% / {100 * p99:+.0f}%"


def cells(row: Row) -> list[str]:
    """One line of the table."""
    real = numbers(row.real)
    told = expected(row.simulated)
    off = errors(row.real, row.simulated)
    by_run = ", ".join(f"{points:+.1f}" for points in off.by_run)
    return [
        row.condition, row.system, row.kind, str(sum(map(len, row.real))),
        f"{real.attained:.1%}", f"{told.attained:.1%}", f"{off.points:+.1f} ({by_run})",
        _ms(real.ttft_p50_s, real.ttft_p99_s), _ms(told.ttft_p50_s, told.ttft_p99_s),
        _shares(off.ttft_p50, off.ttft_p99),
        _ms(real.tpot_p50_s, real.tpot_p99_s), _ms(told.tpot_p50_s, told.tpot_p99_s),
        _shares(off.tpot_p50, off.tpot_p99),
        f"{off.same:.0%}", "no: " + ", ".join(off.misses) if off.misses else "yes",
    ]  # fmt: skip


def bounds(rows: Sequence[Row]) -> str:
    """How many rows of each kind are within the target, and the largest errors of those that are
    judged, in sentences for the documentation."""
    judged = [(row, errors(row.real, row.simulated)) for row in rows if row.kind == DRIFT]
    forecasts = [errors(row.real, row.simulated) for row in rows if row.kind == FORECAST]
    within = sum(not off.misses for _, off in judged)

    def worst(name: str) -> tuple[float, str]:
        row, off = max(judged, key=lambda pair: abs(getattr(pair[1], name)))
        return getattr(off, name), f"{row.condition}, {row.system}"

    points, where = worst("points")
    largest = [f"attainment {points:+.1f} points ({where})"]
    for name, words in (
        ("ttft_p50", "TTFT p50"), ("tpot_p50", "TPOT p50"),
        ("ttft_p99", "TTFT p99"), ("tpot_p99", "TPOT p99"),
    ):  # fmt: skip
        share, where = worst(name)
        largest.append(f"{words} {100 * share:+.0f}% ({where})")
    farthest = max((off.points for off in forecasts), key=abs)
    return (
        f"Within the target ({POINTS_TARGET:g} points of attainment, {P50_TARGET:.0%} at p50, "
        f"{P99_TARGET:.0%} at p99): {within} of {len(judged)} rows that know the step times, "
        f"and {sum(not off.misses for off in forecasts)} of {len(forecasts)} forecasts. Largest "
        f"errors of the former: {', '.join(largest)}. Largest error of a forecast: attainment "
        f"{farthest:+.1f} points."
    )


def again(condition: str, system: str, one: Measures, other: Measures) -> str:
    """How far two real runs of the same requests are from each other, in a sentence."""
    off = errors([one], [[other]])
    return (
        f"{condition}, {system}: attainment {off.points:+.1f} points, TTFT p50 "
        f"{100 * off.ttft_p50:+.0f}%, p99 {100 * off.ttft_p99:+.0f}%, TPOT p50 "
        f"{100 * off.tpot_p50:+.0f}%, p99 {100 * off.tpot_p99:+.0f}%, same verdict {off.same:.0%}"
    )


INK: Final = "#1b1f24"
COLOURS: Final = {"stock vLLM": "#d55e00", "vllm-slo": "#0072b2"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """CDFs of TTFT and TPOT, real against simulated with the step times: a line of two
    panels for each condition."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.condition for row in rows))
    figure = Figure(figsize=(10, 2.5 * len(names) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(names), 2, squeeze=False, sharex="col", sharey=True)
    for line, name in zip(panels, names, strict=True):
        for axes, what in zip(line, ("TTFT", "TPOT"), strict=True):
            for row in rows:
                if row.condition == name and row.kind == DRIFT:
                    _draw_row(axes, row, what)
            _finish(axes)
            axes.set_title(f"{name}: {what}", loc="left", fontsize=10)
        line[0].set_ylabel("requests (%)")
        line[1].legend(loc="lower right", frameon=False, fontsize=8)
    panels[-1][0].set_xlabel("TTFT (ms, from 1 s on in s; log scale)")
    panels[-1][1].set_xlabel("TPOT, each request's worst 10 tokens (ms, log scale)")
    figure.suptitle(
        "The same requests on the real engine and in the simulator", fontsize=12, x=0.01, ha="left"
    )
    figure.savefig(path, dpi=110)


def _draw_row(axes: Axes, row: Row, what: str) -> None:
    colour = COLOURS[row.system]
    simulated = [run for runs in row.simulated for run in runs]
    for runs, look, words in (
        (row.real, {"color": colour, "linewidth": 1.6}, "real"),
        (simulated, {"color": INK, "linewidth": 1.1, "linestyle": (0, (4, 2))}, "simulated"),
    ):
        values = sorted(_values(runs, what))
        shares = 100 * np.arange(1, len(values) + 1) / len(values)
        style: dict[str, Any] = {**look}
        axes.step(values, shares, where="post", label=f"{row.system}, {words}", **style)


def _values(runs: Sequence[Measures], what: str) -> Iterator[float]:
    """Milliseconds of every request."""
    for run in runs:
        for job in run:
            for seconds in job.ttfts_s if what == "TTFT" else job.tpots_s:
                yield 1e3 * seconds


def _finish(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda ms, _: f"{ms:g}" if ms < 1e3 else f"{ms / 1e3:g} s")
    )
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="#d8dee4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_ylim(0, 101)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
