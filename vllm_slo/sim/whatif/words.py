# SPDX-License-Identifier: Apache-2.0
"""Numbers and findings of a what-if report in words, for the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vllm_slo.sim.report import percent
from vllm_slo.sim.whatif.numbers import Cell, Column, Gain, Numbers, Objectives

NONE: Final = "\N{EN DASH}"
WORTH_SAYING: Final = 0.01
"""A loss of attainment that is named even if its interval holds 0."""
SAME_THROUGHPUT: Final = 0.01
"""Relative difference below which throughputs are called the same."""


def duration(seconds: float | None) -> str:
    """A time with its unit, three digits."""
    if seconds is None:
        return NONE
    if seconds < 0.9995:
        ms = seconds * 1e3
        return f"{ms:.0f} ms" if ms >= 9.95 else f"{ms:.1f} ms"
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    return f"{seconds:,.0f} s"


def stretch(seconds: float) -> str:
    """The length of a part of a trace, in two units at most."""
    whole = round(seconds)
    if whole < 120:
        return duration(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def objectives(row: Objectives) -> str:
    """What a class asks for."""
    parts = []
    for name, span in (("TTFT", row.ttft_ms), ("TPOT", row.tpot_ms), ("end to end", row.e2e_ms)):
        if span is not None:
            low, high = (duration(bound / 1e3) for bound in span)
            parts.append(f"{name} {low}" if low == high else f"{name} {low} to {high}")
    return ", ".join(parts) or "no objective"


def rate(per_s: float) -> str:
    """A rate, three digits."""
    return f"{per_s:,.0f}" if per_s >= 99.5 else f"{per_s:.3g}"


def attained(cell: Cell) -> str:
    """A share that attained."""
    return NONE if cell.attained is None else f"{percent(cell.attained.share)}%"


def interval(cell: Cell) -> str:
    """Its 95% interval; empty: there is none."""
    if cell.attained is None or cell.attained.low is None or cell.attained.high is None:
        return ""
    return f"{percent(cell.attained.low)} to {percent(cell.attained.high)}%"


def points(share: float) -> str:
    """A difference of shares, in percentage points."""
    return f"{100 * share:+.1f}".replace("-", "\N{MINUS SIGN}")


def gain(one: Gain) -> tuple[str, str]:
    """A difference in points, and its 95% interval; empty: there is none."""
    if one.half_width is None:
        return points(one.share), ""
    low, high = one.share - one.half_width, one.share + one.half_width
    return points(one.share), f"{points(low)} to {points(high)}"


def is_clear(one: Gain) -> bool:
    """Whether the interval of a difference leaves out 0."""
    return one.half_width is not None and abs(one.share) > one.half_width


def with_system(column: Column) -> str:
    """A system within a sentence."""
    name = column.title.replace("Stock ", "stock ")
    return "as served" if column.kind == "served" else f"with {name}"


def count(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def headline(numbers: Numbers) -> str:
    """What matters first, in one sentence."""
    ours = next((i for i, c in enumerate(numbers.columns) if c.kind == "ours"), None)
    row = numbers.all
    if not row.objectives.any:
        return "No request of this trace has an objective, so there is none to keep."
    if ours is None:
        return "vllm-slo is not among the systems that are compared."
    first = (
        f"With vllm-slo, {attained(row.cells[ours])} of the requests that have an objective would "
        "have kept it"
    )
    compared = [_against(numbers, one) for one in row.gains]
    return f"{first}: {_listed(compared)}." if compared else f"{first}."


def _against(numbers: Numbers, one: Gain) -> str:
    column = next(c for c in numbers.columns if c.system == one.over)
    return f"{_difference(one)} than {with_system(column)}{_unclear(one)}"


def _difference(one: Gain) -> str:
    return f"{abs(100 * one.share):.1f} points {'more' if one.share >= 0 else 'fewer'}"


def _unclear(one: Gain) -> str:
    return "" if one.half_width is None or is_clear(one) else " (no clear difference)"


def findings(numbers: Numbers) -> list[str]:
    """What else an operator asks first: which class loses, and what batch work gets."""
    names = {column.system: with_system(column) for column in numbers.columns}
    told = [
        f"{row.name} keeps its objectives less often: {_difference(one)} than {names[one.over]}"
        f"{_unclear(one)}."
        for row in numbers.classes
        for one in row.gains
        if one.share < 0 and (is_clear(one) or one.share <= -WORTH_SAYING)
    ]
    if not told and len(numbers.classes) > 1 and numbers.all.gains:
        told.append("No class keeps its objectives less often.")
    if numbers.batch is not None:
        systems = [names[column.system] for column in numbers.columns]
        tokens = [batch.tokens_per_s for batch in numbers.batch]
        medians = [duration(batch.e2e.p50_s) if batch.e2e else NONE for batch in numbers.batch]
        if max(tokens) - min(tokens) <= SAME_THROUGHPUT * max(tokens):
            got = f"{rate(max(tokens))} tokens a second everywhere"
        else:
            got = f"{_each([rate(each) for each in tokens], systems)}, in tokens a second"
        told.append(
            f"Requests without an objective get {got}. "
            f"Half of them are answered within {_each(medians, systems)}."
        )
    return told


def _each(values: Sequence[str], systems: Sequence[str]) -> str:
    return _listed([f"{value} {system}" for value, system in zip(values, systems, strict=True)])


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
