# SPDX-License-Identifier: Apache-2.0
"""What each class got, from a client's run or from what a trace recorded, in one form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from vllm_slo.bench import style
from vllm_slo.bench.client import SentRequest, ServerRun
from vllm_slo.core.attainment import measure
from vllm_slo.traces.request import TraceRequest

if TYPE_CHECKING:
    from rich.table import Table

TOTAL: Final = "total"
RECORDED: Final = "recorded"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a latency, in seconds."""

    p50_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Percentiles | None:
        """Of the values that are not None; None if there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(*(float(p) for p in np.percentile(known, (50, 95, 99))))


@dataclass(frozen=True, slots=True)
class ServedClass:
    """What the requests of a class got.

    Attributes:
        with_objective: requests whose attainment counts.
        attainment: the share of them that attained; None: there are none.
        late: requests with a late promise.
        failed: errors, and answers that were cut off.
        ttft, tpot, e2e: of the requests that have them; TPOT of the worst window of ten tokens, or
            as the trace has it; the end to end latency of finished requests.
    """

    requests: int
    with_objective: int
    attainment: float | None
    finished: int
    late: int
    declined: int
    failed: int
    ttft: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def of_run(run: ServerRun) -> dict[str, ServedClass]:
    """By class, sorted by name, then in total: the requests of a run that count."""
    return _by_class(run.counted, lambda sent: sent.record.slo_class, _sent)


def of_trace(rows: Sequence[tuple[str, TraceRequest]]) -> dict[str, ServedClass]:
    """As `of_run`, of recorded requests and their classes; empty if nothing was recorded."""
    known = [(name, request) for name, request in rows if request.served is not None]
    if not known:
        return {}
    return _by_class(known, lambda row: row[0], lambda rows: _recorded([row[1] for row in rows]))


def _by_class(
    rows: Sequence[_T], name_of: Callable[[_T], str], served: Callable[[list[_T]], ServedClass]
) -> dict[str, ServedClass]:
    groups: dict[str, list[_T]] = {}
    for row in rows:
        groups.setdefault(name_of(row), []).append(row)
    return {name: served(groups[name]) for name in sorted(groups)} | {TOTAL: served(list(rows))}


def _sent(requests: list[SentRequest]) -> ServedClass:
    records = [sent.record for sent in requests]
    measured = [measure(record) for record in records]
    return ServedClass(
        requests=len(records),
        **_attainment([result.attained for result in measured]),
        finished=sum(record.finished for record in records),
        late=sum(sent.late for sent in requests),
        declined=sum(record.outcome == "declined" for record in records),
        failed=sum(record.outcome == "failed" for record in records),
        ttft=Percentiles.of(result.ttft_s for result in measured),
        tpot=Percentiles.of(result.worst_tpot_s for result in measured),
        e2e=Percentiles.of(record.e2e_s for record in records if record.finished),
    )


def _recorded(requests: list[TraceRequest]) -> ServedClass:
    served = [request.served for request in requests if request.served is not None]
    return ServedClass(
        requests=len(requests),
        **_attainment([_attained(request) for request in requests]),
        finished=sum(one.end == "completed" for one in served),
        late=sum(one.promise == "late" for one in served),
        declined=sum(one.end == "declined" for one in served),
        failed=sum(one.end in ("failed", "aborted") for one in served),
        ttft=Percentiles.of(one.ttft_s for one in served),
        tpot=Percentiles.of(one.tpot_s for one in served),
        e2e=Percentiles.of(one.e2e_s for one in served if one.end == "completed"),
    )


def _attained(request: TraceRequest) -> bool | None:
    """Whether a recorded request attained; one that was declined or failed did not."""
    assert request.served is not None
    objectives = (request.ttft_ms, request.tpot_ms, request.e2e_ms)
    asked = any(objective is not None for objective in objectives)
    if asked and request.served.end in ("declined", "failed"):
        return False
    return request.served.attained


def _attainment(attained: Sequence[bool | None]) -> dict[str, Any]:
    known = [value for value in attained if value is not None]
    share = sum(known) / len(known) if known else None
    return {"with_objective": len(known), "attainment": share}


def latency_table(served: Mapping[str, Mapping[str, ServedClass]]) -> Table:
    """A table of latencies, ``served`` by server (or `RECORDED`), then by class."""
    from rich.markup import escape

    table = style.table("p50 / p95 / p99 of the same requests; lower is better")
    table.add_column("class", no_wrap=True)
    table.add_column("served by", no_wrap=True)
    headings = ("SLO\nkept", "late/\ndecl./\nfailed", "TTFT\ns", "TPOT\nms", "end to\nend s")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    names = list(dict.fromkeys(name for classes in served.values() for name in classes))
    for name in sorted(names, key=lambda n: n == TOTAL):
        table.add_section()
        rows = [(by, classes[name]) for by, classes in served.items() if name in classes]
        for i, (by, one) in enumerate(rows):
            table.add_row(escape(name or "-") if i == 0 else "", escape(by), *_cells(one))
    return table


def _cells(one: ServedClass) -> list[str]:
    return [
        "-" if one.attainment is None else f"{one.attainment:.0%}",
        f"{one.late}/{one.declined}/{one.failed}",
        _shown(one.ttft, 1.0),
        _shown(one.tpot, 1e3),
        _shown(one.e2e, 1.0),
    ]


def _shown(percentiles: Percentiles | None, factor: float) -> str:
    if percentiles is None:
        return "-"
    seconds = (percentiles.p50_s, percentiles.p95_s, percentiles.p99_s)
    return "/".join(_number(value * factor) for value in seconds)


def _number(value: float) -> str:
    """Four characters at most, of numbers below 10,000."""
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"
