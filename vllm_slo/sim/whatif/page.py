# SPDX-License-Identifier: Apache-2.0
"""A what-if report as one page of HTML, which needs no server, no network and no script.

The template escapes every name. The page's policy forbids scripts and everything from elsewhere;
the style sheet is allowed by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from vllm_slo.sim import charts
from vllm_slo.sim.whatif import words
from vllm_slo.sim.whatif.explanations import assumptions, origin, reading
from vllm_slo.sim.whatif.numbers import Cell, ClassRow, Column, Numbers, Percentiles
from vllm_slo.sim.whatif.report import Report

_FOLDER: Final = Path(__file__).parent
_LOAD_BEYOND: Final = 1.25
"""The picture of the load ends at this multiple of the trace's length, if work goes on."""


@dataclass(frozen=True, slots=True)
class Styled:
    """A column's title, and the class of the style sheet that gives it its colour."""

    title: str
    style: str


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["attained"] = words.attained
    return environment.get_template("page.html")


def render(report: Report) -> str:
    """The whole page."""
    numbers = report.numbers
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    columns = [_styled(place, column) for place, column in enumerate(numbers.columns)]
    several = len(numbers.classes) > 1
    rows = [numbers.all, *numbers.classes] if several else list(numbers.classes)
    loads, end_s = _loads(numbers, columns)
    return _template().render(
        # The style sheet is a file of this package; everything else is escaped.
        style=Markup(style),  # nosec B704
        digest=_digest(style),
        trace=report.trace,
        summary=_summary(report),
        headline=words.headline(numbers),
        findings=words.findings(numbers),
        columns=columns,
        judged=[
            {"title": _title(row, numbers), "about": _about(row), "bars": _bars(row, columns)}
            for row in rows
            if row.objectives.any
        ],
        ranges=[
            chart
            for chart in (
                _ranges("TTFT", "ttft", numbers, columns),
                _ranges("TPOT", "tpot", numbers, columns),
            )
            if chart is not None
        ],
        promises=any(cell.promised is not None for cell in numbers.all.cells),
        loads=loads,
        load_end=words.stretch(end_s),
        tables=[
            {
                "title": _title(row, numbers),
                "about": _about(row),
                "lines": list(table_lines(row, numbers.columns)),
            }
            for row in rows
        ],
        reading=list(reading(report)),
        assumptions=list(assumptions(report)),
        origin=list(origin(report)),
        sources=list(report.setup.hardware.sources.items()),
    )


def _digest(style: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()


def _styled(place: int, column: Column) -> Styled:
    kind = column.kind if column.kind != "other" else f"other{3 + place % 4}"
    return Styled(column.title, kind)


def _summary(report: Report) -> str:
    numbers, setup = report.numbers, report.setup
    served = words.count(setup.replicas, "replica")
    return (
        f"{words.count(numbers.all.requests, 'request')} in "
        f"{words.stretch(numbers.measured.length_s)} "
        f"({words.rate(numbers.all.requests_per_s)} a second), simulated on {served} of "
        f"{setup.hardware.name}."
    )


def _title(row: ClassRow, numbers: Numbers) -> str:
    return "All classes" if row is numbers.all else row.name


def _about(row: ClassRow) -> str:
    """What a class asks for, and how much there is of it."""
    asks = words.objectives(row.objectives) if row.name or not row.objectives.any else ""
    size = (
        f"{words.count(row.requests, 'request')}, {words.rate(row.requests_per_s)} a second, "
        f"{row.prompt_tokens:,.0f} prompt and {row.output_tokens:,.0f} answer tokens (medians)"
    )
    return f"{asks} · {size}" if asks else size


def _bars(row: ClassRow, columns: Sequence[Styled]) -> list[tuple[Styled, Cell, Markup]]:
    bars = []
    for column, cell in zip(columns, row.cells, strict=True):
        found = cell.attained
        picture = charts.bar(found.share, found.low, found.high) if found else charts.bar(0.0)
        bars.append((column, cell, picture))
    return bars


def _ranges(
    name: str, field: str, numbers: Numbers, columns: Sequence[Styled]
) -> dict[str, Any] | None:
    """The picture of one time: a row for each class and system; None: nobody measured it."""
    rows = [row for row in numbers.classes if any(getattr(c, field) for c in row.cells)]
    bounds = {row.name: getattr(row.objectives, f"{field}_ms") for row in rows}
    times = [
        time_s
        for row in rows
        for cell in row.cells
        if (found := getattr(cell, field)) is not None
        for time_s in (found.p50_s, found.p95_s, found.p99_s)
    ]
    if not times:
        return None
    tightest = {key: bound[0] / 1e3 for key, bound in bounds.items() if bound}
    scale = charts.LogAxis.around([*times, *tightest.values()])
    made = []
    for row in rows:
        cells: list[Percentiles | None] = [getattr(cell, field) for cell in row.cells]
        objective_s = tightest.get(row.name)
        made.append(
            {
                "title": row.name,
                "objective": None if objective_s is None else words.duration(objective_s),
                "ranges": [
                    (
                        column,
                        charts.time_range(
                            scale, (p.p50_s, p.p95_s, p.p99_s) if p else None, objective_s
                        ),
                        words.duration(p.p99_s) if p else words.NONE,
                    )
                    for column, p in zip(columns, cells, strict=True)
                ],
            }
        )
    return {
        "title": {"TTFT": "Time to the first token", "TPOT": "Time per token"}[name],
        "note": f"{name}: the dot is the median, the thick line ends at p95, the thin one at p99 "
        "(the number). The dashed line is the objective; its axis is logarithmic.",
        "rows": made,
        "axis": charts.axis(scale, [words.duration(tick) for tick in scale.ticks()]),
    }


def _loads(
    numbers: Numbers, columns: Sequence[Styled]
) -> tuple[list[tuple[Styled, Markup, str]], float]:
    """A picture of the load of each system, on common axes, and where the axis of time ends."""
    last_s = max((end for column in numbers.columns for _, end, _ in column.spans), default=0.0)
    end_s = min(last_s, _LOAD_BEYOND * numbers.measured.to_s)
    shown = [
        (style, column.load(end_s))
        for style, column in zip(columns, numbers.columns, strict=True)
        if column.spans
    ]
    peaks = [
        max(a + b for a, b in zip(load.promised, load.best_effort, strict=True))
        for _, load in shown
    ]
    most = max(peaks, default=1)
    pictures = [
        (style, charts.load(load, most), f"{peak:,}")
        for (style, load), peak in zip(shown, peaks, strict=True)
    ]
    return pictures, end_s


# --- the table of a class ------------------------------------------------------------------------


def table_lines(row: ClassRow, columns: Sequence[Column]) -> Iterator[dict[str, Any]]:
    """The lines of a class's table; what no system has is left out."""
    cells = row.cells
    if row.objectives.any:
        shares = [(words.attained(cell), words.interval(cell)) for cell in cells]
        yield _line("kept objectives", shares, "strong")
    if row.gains:
        gains = {one.over: words.gain(one) for one in row.gains}
        yield _line("vllm-slo, points more", [gains.get(c.system, ("", "")) for c in columns])
    for name, field in (("TTFT", "ttft"), ("TPOT", "tpot"), ("End to end", "e2e")):
        for place, q in enumerate(("p50", "p95", "p99")):
            times = [
                words.duration(getattr(found, f"{q}_s")) if found else words.NONE
                for found in (getattr(cell, field) for cell in cells)
            ]
            if any(time != words.NONE for time in times):
                yield _line(f"{name} {q}", _plain(times), "" if place else "first")
    more = [
        ("promises kept", [_of(cell.promised_kept, cell.promised) for cell in cells]),
        ("late promises kept", [_of(cell.late_kept, cell.late) for cell in cells]),
        ("declined", [_some(cell.declined) for cell in cells]),
        ("failed", [_some(cell.failed) for cell in cells]),
    ]
    first = True
    for title, values in more:
        if any(value != words.NONE for value in values):
            yield _line(title, _plain(values), "first" if first else "")
            first = False
    tokens = [words.rate(cell.tokens_per_s) for cell in cells]
    yield _line("answer tokens a second", _plain(tokens), "first" if first else "")
    if row.objectives.any:
        kept = [words.rate(cell.attained_per_s) if cell.attained else words.NONE for cell in cells]
        yield _line("kept, requests a second", _plain(kept))


def _line(title: str, cells: Sequence[tuple[str, str]], style: str = "") -> dict[str, Any]:
    return {"title": title, "cells": cells, "style": style}


def _plain(values: Iterable[str]) -> list[tuple[str, str]]:
    return [(value, "") for value in values]


def _of(kept: int, made: int | None) -> str:
    return f"{kept:,} of {made:,}" if made else words.NONE


def _some(number: int) -> str:
    return f"{number:,}" if number else words.NONE
