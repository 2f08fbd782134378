# SPDX-License-Identifier: Apache-2.0
"""The tables and the picture of ``sim_validation.py``: real against simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vllm_slo.core.step_time.model import Sample, StepTimeModel
from vllm_slo.sim.measure import JobMeasure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUANTILES: Final = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class StepError:
    """Live steps against the profile.

    Attributes:
        bias: time of all steps over the time predicted for them.
        noise: standard deviation of actual over predicted, relative to its mean.
        steps: how many.
    """

    bias: float
    noise: float
    steps: int


def step_error(steps: Sequence[Sample], model: StepTimeModel) -> StepError:
    """The error of the profile's predictions of ``steps``."""
    actual = np.array([took_s for _, took_s in steps])
    predicted = np.array([model.predict_shape_s(shape) for shape, _ in steps])
    ratio = actual / predicted
    return StepError(
        float(actual.sum() / predicted.sum()), float(ratio.std() / ratio.mean()), len(steps)
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: ``runs`` are the measures of each run, all over the same jobs."""

    system: str
    kind: str
    runs: tuple[tuple[JobMeasure, ...], ...]

    @property
    def measures(self) -> list[JobMeasure]:
        """Measures of all runs."""
        return [measure for run in self.runs for measure in run]


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a row says. Shares, seconds; counts are means over the runs of the row.

    Attributes:
        attainment: share of the jobs that kept their objectives.
        by_class: the same per class.
        ttft_s, tpot_s: percentiles (``QUANTILES``); TPOT is each request's worst window.
        finished: jobs that finished.
        promised: jobs that were promised their objectives; None where nothing is promised.
        kept: those of them that kept them.
    """

    attainment: float
    by_class: dict[str, float]
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    finished: float
    promised: float | None
    kept: float | None


def numbers(row: Row) -> Numbers:
    """The numbers of a row over all its runs."""
    every = row.measures
    names = sorted({m.application for m in every})
    promises = [m for m in every if m.promised]
    promising = any(m.promised is not None for m in every)
    runs = len(row.runs)

    def share(members: Sequence[JobMeasure]) -> float:
        return sum(m.attained for m in members) / len(members)

    def percentiles(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(float(x) for x in np.percentile(values, QUANTILES))

    return Numbers(
        share(every),
        {name: share([m for m in every if m.application == name]) for name in names},
        percentiles([t for m in every for t in m.ttfts_s]),
        percentiles([t for m in every for t in m.tpots_s]),
        sum(m.finished for m in every) / runs,
        len(promises) / runs if promising else None,
        sum(not m.broken for m in promises) / runs if promising else None,
    )


def agreement(one: Row, other: Row) -> float:
    """Share of the jobs on which two rows agree (kept or missed), over all pairs of runs."""
    pairs = [
        a.attained == b.attained
        for left in one.runs
        for right in other.runs
        for a, b in zip(left, right, strict=True)
    ]
    return sum(pairs) / len(pairs)


@dataclass(frozen=True, slots=True)
class Difference:
    """One row against another, the reference.

    Attributes:
        points: difference in attainment, percentage points.
        class_points: the same per class.
        ttft, tpot: relative differences of the percentiles.
        same: share of the jobs on which both agree.
    """

    points: float
    class_points: dict[str, float]
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    same: float


def difference(row: Row, reference: Row) -> Difference:
    """How far ``row`` is from ``reference``."""
    ours, theirs = numbers(row), numbers(reference)

    def relative(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
        return tuple(x / y - 1.0 for x, y in zip(a, b, strict=True))

    return Difference(
        100 * (ours.attainment - theirs.attainment),
        {n: 100 * (s - theirs.by_class[n]) for n, s in ours.by_class.items()},
        relative(ours.ttft_s, theirs.ttft_s),
        relative(ours.tpot_s, theirs.tpot_s),
        agreement(row, reference),
    )


def _ms(seconds: Sequence[float]) -> str:
    return " / ".join(f"{1e3 * s:,.0f}" for s in seconds)


def _count(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"


def main_table(rows: Sequence[Row]) -> list[list[str]]:
    """Head and lines of the table of all rows."""
    names = sorted({m.application for row in rows for m in row.measures})
    lines = [
        ["system", "run", "attained", *names, "TTFT ms p50 / p90 / p99",
         "TPOT ms p50 / p90 / p99", "finished", "promised", "promises kept"]
    ]  # fmt: skip
    for row in rows:
        n = numbers(row)
        lines.append(
            [row.system, row.kind, f"{n.attainment:.1%}",
             *(f"{n.by_class[name]:.0%}" for name in names), _ms(n.ttft_s), _ms(n.tpot_s),
             _count(n.finished), _count(n.promised), _count(n.kept)]
        )  # fmt: skip
    return lines


def error_table(pairs: Sequence[tuple[str, str, Difference]]) -> list[list[str]]:
    """Head and lines of the table of differences: (system, what against what, difference)."""
    names = sorted({name for _, _, one in pairs for name in one.class_points})
    lines = [
        ["system", "compared", "attained, points", *(f"{name}, points" for name in names),
         "TTFT p50 / p90 / p99", "TPOT p50 / p90 / p99", "same verdict"]
    ]  # fmt: skip

    def relative(values: Sequence[float]) -> str:
        return " / ".join(f"{100 * x:+.0f}%" for x in values)

    for name, what, one in pairs:
        lines.append(
            [name, what, f"{one.points:+.1f}",
             *(f"{one.class_points[n]:+.1f}" for n in names), relative(one.ttft),
             relative(one.tpot), f"{one.same:.0%}"]
        )  # fmt: skip
    return lines


def pooled(rows: Sequence[Row], kind: str) -> Row:
    """Rows of one system as one."""
    return Row(rows[0].system, kind, tuple(run for row in rows for run in row.runs))


def compare(rows: Sequence[Row]) -> list[tuple[str, str, Difference]]:
    """Each simulated row against all real runs of its system; then real runs among themselves."""
    found = []
    for name in dict.fromkeys(row.system for row in rows):
        mine = [row for row in rows if row.system == name]
        real = [row for row in mine if row.kind.startswith("real")]
        reference = pooled(real, "real")
        found += [
            (name, f"{row.kind}, against real", difference(row, reference))
            for row in mine
            if row not in real
        ]
        found += [
            (name, f"{row.kind}, against {real[0].kind}", difference(row, real[0]))
            for row in real[1:]
        ]
    return found


INK: Final = "#1b1f24"
COLOURS: Final = {"stock vLLM": "#d55e00", "vllm-slo": "#0072b2"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """CDFs of TTFT and TPOT, real against simulated, one line of panels per system."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.system for row in rows))
    figure = Figure(figsize=(10, 3.2 * len(names) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(names), 2, squeeze=False, sharex="col", sharey=True)
    for line, name in zip(panels, names, strict=True):
        for axes, what in zip(line, ("TTFT", "TPOT"), strict=True):
            _draw_cdfs(axes, [row for row in rows if row.system == name], what)
            axes.set_title(f"{name}: {what}", loc="left", fontsize=11)
        line[0].set_ylabel("requests (%)")
        line[1].legend(loc="lower right", frameon=False, fontsize=9)
    panels[-1][0].set_xlabel("TTFT (ms, from 1 s on in s; log scale)")
    panels[-1][1].set_xlabel("TPOT, each request's worst 10 tokens (ms, log scale)")
    figure.suptitle(
        "The same requests on the real engine and in the simulator", fontsize=12, x=0.01, ha="left"
    )
    figure.savefig(path, dpi=120)


def _draw_cdfs(axes: Axes, rows: Sequence[Row], what: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    looks: list[dict[str, Any]] = [
        {"color": INK, "linewidth": 1.1, "linestyle": "-"},
        {"color": "#7a7a7a", "linewidth": 1.1, "linestyle": "-"},
    ]
    styles = iter([(0, (1, 1.2)), "-", (0, (5, 1.5))])
    real = 0
    for row in rows:
        values = [
            1e3 * t for m in row.measures for t in (m.ttfts_s if what == "TTFT" else m.tpots_s)
        ]
        if row.kind.startswith("real"):
            look = looks[real % len(looks)]
            real += 1
        else:
            style = next(styles)
            look = {
                "color": COLOURS[row.system], "linestyle": style,
                "linewidth": 2.0 if style == "-" else 1.3,
            }  # fmt: skip
        shares = 100 * np.arange(1, len(values) + 1) / len(values)
        axes.step(np.sort(values), shares, where="post", label=row.kind, **look)
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
