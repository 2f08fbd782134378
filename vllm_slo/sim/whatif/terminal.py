# SPDX-License-Identifier: Apache-2.0
"""The short table of a what-if report for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_slo.bench.style import milliseconds
from vllm_slo.sim.report import percent, table
from vllm_slo.sim.whatif import words
from vllm_slo.sim.whatif.numbers import Cell, Percentiles
from vllm_slo.sim.whatif.report import Report

if TYPE_CHECKING:
    from rich.console import RenderableType


def render(report: Report) -> RenderableType:
    """The finding, and a row for each class and system."""
    from rich.console import Group
    from rich.markup import escape

    numbers, setup = report.numbers, report.setup
    made = table(
        escape(
            f"{report.trace.name}: {words.count(numbers.all.requests, 'request')} in "
            f"{words.stretch(numbers.measured.length_s)}, "
            f"{words.count(setup.replicas, 'replica')} of {setup.hardware.name}"
        ),
        "class",
        (
            "system",
            "kept\n%",
            "95%\ninterval",
            "TTFT ms\np50 / p95 / p99",
            "TPOT ms\np50 / p95 / p99",
            "end to end s\np50 / p95 / p99",
            "late promises\nkept",
            "declined",
            "answer\ntokens/s",
        ),
    )
    made.columns[1].justify = "left"
    rows = [numbers.all, *numbers.classes] if len(numbers.classes) > 1 else [*numbers.classes]
    for row in rows:
        name = escape(row.name or "all")
        for place, (column, cell) in enumerate(zip(numbers.columns, row.cells, strict=True)):
            made.add_row(
                "" if place else name,
                escape(column.title),
                *_cells(cell),
                end_section=column is numbers.columns[-1],
            )
    lines = [words.headline(numbers), *words.findings(numbers)]
    return Group(made, "", *(escape(line) for line in lines))


def _cells(cell: Cell) -> list[str]:
    share = cell.attained
    return [
        "-" if share is None else percent(share.share),
        words.interval(cell).rstrip("%") or "-",
        _times(cell.ttft),
        _times(cell.tpot),
        "-" if cell.e2e is None else " / ".join(f"{t:.1f}" for t in _three(cell.e2e)),
        f"{cell.late_kept} of {cell.late}" if cell.late else "-",
        f"{cell.declined:,}" if cell.declined else "-",
        words.rate(cell.tokens_per_s),
    ]


def _three(times: Percentiles) -> tuple[float, float, float]:
    return times.p50_s, times.p95_s, times.p99_s


def _times(times: Percentiles | None) -> str:
    return "-" if times is None else " / ".join(_short(t) for t in _three(times))


def _short(time_s: float) -> str:
    """Milliseconds; from 10 s on seconds with their unit."""
    return milliseconds(time_s) if time_s < 9.9995 else f"{time_s:,.0f} s"
