# SPDX-License-Identifier: Apache-2.0
"""One picture of a report: attainment, goodput, latency against objective, load over time.

Needs matplotlib (extra ``bench``). The background is opaque and light, so that the picture looks
the same on dark and light pages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.planned import PlannedRequest
from vllm_slo.bench.report import BenchReport, batch_tokens_per_s, in_flight
from vllm_slo.bench.served import TOTAL
from vllm_slo.bench.style import INK, MUTED, PICTURE
from vllm_slo.core.attainment import Attainment, ClassSummary, RequestRecord, measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# Okabe-Ito: distinct for people with colour blindness, and in greyscale.
_SERVERS: Final = ("#7a7a7a", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
_GOOD: Final = "#e7f5ec"


def _colour(i: int) -> str:
    return _SERVERS[i % len(_SERVERS)]


def _asking_classes(report: BenchReport) -> list[str]:
    """Names of the classes with an objective; requests of the others cannot attain or miss."""
    asking = {r.slo_class for r in report.workload.requests if r.has_objective}
    return sorted(asking)


def _bars(
    axes: Axes, names: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]], form: str
) -> None:
    """Grouped bars: a group per name, a bar with its number per server."""
    width = 0.8 / max(1, len(rows))
    for i, (server, heights) in enumerate(rows):
        at = [x + (i - (len(rows) - 1) / 2) * width for x in range(len(names))]
        bars = axes.bar(at, heights, width * 0.92, color=_colour(i), label=server)
        labels = [format(h, form) for h in heights]
        axes.bar_label(bars, labels, fontsize=8.5, padding=2, color=INK)
    axes.set_xticks(range(len(names)), names)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.16)


def _draw_by_class(
    axes: Axes,
    report: BenchReport,
    classes: Sequence[str],
    height: Callable[[ClassSummary], float],
    form: str,
) -> None:
    """Bars by class and in total; a server without requests of a class has 0."""
    names = [*classes, TOTAL]
    rows = []
    for run in report.runs:
        summaries = report.summaries(run)
        heights = [height(summaries[name]) if name in summaries else 0.0 for name in names]
        rows.append((run.target.name, heights))
    _bars(axes, names, rows, form)


def _draw_attainment(axes: Axes, report: BenchReport, classes: Sequence[str]) -> None:
    _draw_by_class(axes, report, classes, lambda s: 100 * (s.attainment or 0.0), ".0f")
    axes.set_ylim(0, 112)
    axes.set_ylabel("requests that kept their SLO (%)")
    axes.set_title("SLO attainment per class (higher is better)")


def _draw_goodput(axes: Axes, report: BenchReport, classes: Sequence[str]) -> None:
    _draw_by_class(axes, report, classes, lambda s: s.goodput_tokens_per_s, ".3g")
    axes.set_ylabel("tokens/s of attaining requests")
    axes.set_title("Goodput per class (higher is better)")


def _draw_everybody(figure: SubFigure, report: BenchReport) -> None:
    """Latency of all requests, with or without an objective, and the speed of batch work."""
    names = [run.target.name for run in report.runs]
    totals = [report.summaries(run)[TOTAL] for run in report.runs]
    panels: list[tuple[str, list[str], list[list[float | None]], str]] = [
        (
            "TTFT of everybody (s)",
            ["p50", "p99"],
            [[total.ttft_p50_s, total.ttft_p99_s] for total in totals],
            ".2g",
        ),
        (
            "TPOT of everybody (ms)",
            ["p50", "p99"],
            [[_thousand(total.tpot_p50_s), _thousand(total.tpot_p99_s)] for total in totals],
            ".0f",
        ),
        ("until all was done (s)", [""], [[run.elapsed_s] for run in report.runs], ".0f"),
    ]
    batch = [batch_tokens_per_s(run) for run in report.runs]
    if any(rate is not None for rate in batch):
        panels.insert(2, ("batch work (tokens/s)", [""], [[rate] for rate in batch], ".0f"))
    for axes, (title, groups, rows, form) in zip(
        np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True
    ):
        heights = [[0.0 if value is None else value for value in row] for row in rows]
        _bars(axes, groups, list(zip(names, heights, strict=True)), form)
        axes.set_title(title)
    figure.suptitle(
        "Everybody, with an objective or without (lower is better, but for tokens/s)",
        fontsize=11.5,
        x=0.01,
        ha="left",
    )


def _thousand(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _ratio(record: RequestRecord, result: Attainment, which: str) -> float | None:
    """Measured over objective: infinite if it never came, None without an objective."""
    got_s = {"TTFT": result.ttft_s, "TPOT": result.worst_tpot_s, "E2E": record.e2e_s}[which]
    objective_s = _objective_s(record, which)
    if objective_s is None:
        return None
    if got_s is None or (which == "E2E" and not record.finished):
        missing = not record.finished or which != "TPOT"
        return math.inf if missing else None
    return got_s / objective_s


def _objective_s(request: PlannedRequest | RequestRecord, which: str) -> float | None:
    if which == "E2E":
        return request.e2e_slo_s
    return request.ttft_slo_s if which == "TTFT" else request.tpot_slo_s


def _draw_cdf(axes: Axes, report: BenchReport, slo_class: str, which: str) -> bool:
    """Share of a class's requests within each multiple of the objective; False without any."""
    lines: list[tuple[str, list[float], int]] = []
    for i, run in enumerate(report.runs):
        members = [r for r in run.records if r.slo_class == slo_class]
        ratios = [x for r in members if (x := _ratio(r, measure(r), which)) is not None]
        if ratios:
            lines.append((_colour(i), sorted(filter(math.isfinite, ratios)), len(ratios)))
    if not lines:
        axes.set_axis_off()
        return False
    highest = max([2.0, *(x for _, finite, _ in lines for x in finite)])
    for colour, finite, count in lines:
        share = [100 * k / count for k in range(len(finite) + 1)]
        # Because of requests without a value, the line may end below 100 % at the right edge.
        at, height = [0.0, *finite, highest * 1.15], [*share, share[-1]]
        axes.step(at, height, where="post", color=colour, linewidth=2.0)
    axes.set_xscale("symlog", linthresh=1.0, linscale=1.0)
    axes.set_xlim(0, highest * 1.15)
    ticks = [t for t in (0, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000, 10_000) if t <= highest * 1.15]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 104)
    axes.axvspan(0, 1, color=_GOOD, zorder=0)
    axes.axvline(1, color=INK, linewidth=1.0, linestyle="--")
    axes.set_title(f"{slo_class}: {which} {_objective(report, slo_class, which)}")
    axes.set_xlabel(f"{which} / objective")
    return True


def _objective(report: BenchReport, slo_class: str, which: str) -> str:
    """The objective's range over a class's requests, in ms."""
    members = [r for r in report.workload.requests if r.slo_class == slo_class]
    objectives = [_objective_s(r, which) for r in members]
    found_ms = [1e3 * s for s in objectives if s is not None]
    low, high = (f"{ms:,.0f}" if ms >= 10 else f"{ms:.2g}" for ms in (min(found_ms), max(found_ms)))
    return f"{low} ms" if low == high else f"{low} to {high} ms"


def _draw_load(axes: Axes, report: BenchReport) -> None:
    from matplotlib.ticker import MaxNLocator

    end_s = max(run.elapsed_s for run in report.runs)
    times = np.linspace(0, end_s, 600)
    for i, run in enumerate(report.runs):
        counts = in_flight(run, list(times))
        axes.plot(times, counts, color=_colour(i), linewidth=1.8)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, end_s)
    axes.set_xlabel("time since the start of the run (s)")
    axes.set_ylabel("requests in flight")
    axes.set_title("Requests over time: in flight (lines, lower is better) and arriving (grey)")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    rate_axes = axes.twinx()
    arrivals = _spread_arrivals_s(report)
    bins = np.linspace(0, report.workload.duration_s, 41)
    counts_per_bin, _ = np.histogram(arrivals, bins)
    rate = counts_per_bin / (bins[1] - bins[0])
    rate_axes.fill_between(bins[:-1], rate, step="post", color=MUTED, alpha=0.22, linewidth=0)
    rate_axes.set_ylim(0, max(1.0, float(rate.max())) * 2.2)
    rate_axes.set_ylabel("arrivals (requests/s)", color=MUTED)
    rate_axes.spines["right"].set_visible(False)
    rate_axes.grid(visible=False)
    rate_axes.set_zorder(axes.get_zorder() - 1)
    axes.patch.set_visible(False)


def _spread_arrivals_s(report: BenchReport) -> list[float]:
    """Arrival times without those of a backlog, which arrives all at once and would hide them."""
    at_once = Counter(r.at_s for r in report.workload.requests)
    return [r.at_s for r in report.workload.requests if at_once[r.at_s] == 1]


def _asked_measures(report: BenchReport) -> list[str]:
    """Which of TTFT, TPOT and E2E (end to end) any request has an objective for."""
    requests = report.workload.requests
    measures = ("TTFT", "TPOT", "E2E")
    return [w for w in measures if any(_objective_s(r, w) is not None for r in requests)]


def _draw_cdfs(figure: SubFigure, report: BenchReport, classes: Sequence[str]) -> None:
    """One panel per measure (rows) and class (columns)."""
    measures = _asked_measures(report)
    grid = figure.add_gridspec(len(measures), len(classes))
    for row, which in enumerate(measures):
        labelled = False
        for column, name in enumerate(classes):
            axes = figure.add_subplot(grid[row, column])
            if _draw_cdf(axes, report, name, which) and not labelled:
                axes.set_ylabel("requests (%)")
                labelled = True
    figure.suptitle(
        "Latency against the objective: share of requests within it "
        "(further left and higher is better; green = kept)",
        fontsize=11.5,
        x=0.01,
        ha="left",
    )


def _title(report: BenchReport) -> str:
    workload = report.workload
    kept = []
    for run in report.runs:
        share = report.summaries(run)[TOTAL].attainment
        kept.append(f"{run.target.name} {'-' if share is None else format(share, '.0%')}")
    return (
        "Requests that kept their SLO (higher is better)\n"
        f"{', '.join(kept)}\n"
        f"{workload.name} workload, the same {len(workload.requests)} requests "
        f"({workload.rate:.2g}/s) to each server"
    )


def draw(report: BenchReport) -> Figure:
    """The figure of a report; BenchError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError("--out", "needs matplotlib: install vllm-slo[bench]") from error
    with matplotlib.rc_context(PICTURE):
        classes = _asking_classes(report)
        heights = (4.0, 3.0, max(0.4, 3.3 * len(_asked_measures(report))), 3.2)
        width = max(11.0, 3.7 * len(classes))
        figure = Figure(figsize=(width, sum(heights) + 1.0), layout="constrained")
        FigureCanvasAgg(figure)
        parts: Any = figure.subfigures(4, 1, height_ratios=heights)
        top, everybody, middle, bottom = parts
        _draw_everybody(everybody, report)
        left, right = (top.add_subplot(1, 2, i) for i in (1, 2))
        _draw_attainment(left, report, classes)
        _draw_goodput(right, report, classes)
        if classes:
            _draw_cdfs(middle, report, classes)
        _draw_load(bottom.subplots(), report)
        handles, labels = left.get_legend_handles_labels()
        figure.suptitle(_title(report), fontsize=14, fontweight="bold")
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=11.5)
        return figure


def write_png(report: BenchReport, path: Path) -> None:
    """Draw and save a report; BenchError if the file cannot be written."""
    figure = draw(report)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise BenchError("--out", f"cannot write {path}: {error.strerror}") from error
