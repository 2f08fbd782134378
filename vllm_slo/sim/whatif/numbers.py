# SPDX-License-Identifier: Apache-2.0
"""The numbers of ``vllm-slo whatif``: one row for each class, one column for each system.

Shares and percentiles are over the requests that count: neither warm-up, nor left by their client
in the recording. Times in seconds, rates per second of the measured part of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.measure import Load, load_of_spans, percentile
from vllm_slo.sim.statistics import Share
from vllm_slo.sim.whatif.outcomes import Asked, Measured, Outcome

STRETCHES: Final = 20
"""Parts of the trace, of equally many requests, whose differences make the intervals: enough for
Student's t to be close to the normal distribution, few enough for a burst to fit into one."""
FEWEST: Final = 2 * STRETCHES
"""Requests below which no interval is given."""

Kind = Literal["served", "stock", "ours", "other"]


@dataclass(frozen=True, slots=True)
class Column:
    """One system: what it is called, and what became of each request that counts, in their order.

    Attributes:
        system: its name in ``--systems``; ``served``: the recording.
        spans: of all requests, warm-up and those whose client left included: when each came, when
            it left, and whether it was promised.
    """

    system: str
    title: str
    kind: Kind
    outcomes: tuple[Outcome, ...]
    spans: tuple[tuple[float, float, bool | None], ...]

    def load(self, to_s: float) -> Load:
        """Requests in the system over time, from the trace's first request to ``to_s``."""
        return load_of_spans(self.spans, to_s=to_s)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one time over ``count`` requests, in seconds."""

    count: int
    p50_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def of(cls, times: Iterable[float | None]) -> Percentiles | None:
        known = [time_s for time_s in times if time_s is not None]
        if not known:
            return None
        p50, p95, p99 = (percentile(known, q) or 0.0 for q in (50, 95, 99))
        return cls(len(known), p50, p95, p99)


@dataclass(frozen=True, slots=True)
class Attained:
    """Requests that kept every objective. ``low``, ``high``: 95% interval; None: too few requests.

    Attributes:
        of: requests that have an objective and can be judged, at least one.
        unjudged: requests with an objective of which the recording does not say enough.
    """

    kept: int
    of: int
    low: float | None
    high: float | None
    unjudged: int

    @property
    def share(self) -> float:
        return self.kept / self.of


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much ours attains more than another system. ``half_width``: of the 95% interval."""

    over: str
    share: float
    half_width: float | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One class in one system.

    Attributes:
        attained: None: no request of it can be judged.
        promised, promised_kept: in time; None: the system promises nothing.
        late, late_kept: promises of a later time.
        attained_per_s: requests that kept every objective.
        tokens_per_s: answer tokens that came.
    """

    attained: Attained | None
    ttft: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None
    promised: int | None
    promised_kept: int
    late: int | None
    late_kept: int
    declined: int
    failed: int
    attained_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Objectives:
    """The range of each objective within a class, in ms; None: no request has it.

    ``tpot_ms`` is the tightest one where an answer has stages.
    """

    ttft_ms: tuple[float, float] | None
    tpot_ms: tuple[float, float] | None
    e2e_ms: tuple[float, float] | None

    @property
    def any(self) -> bool:
        return any((self.ttft_ms, self.tpot_ms, self.e2e_ms))


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One class, or all requests. ``cells``: one for each column. Tokens are medians.

    ``gains``: of vllm-slo over each other column that can be compared.
    """

    name: str
    objectives: Objectives
    requests: int
    requests_per_s: float
    prompt_tokens: float
    output_tokens: float
    cells: tuple[Cell, ...]
    gains: tuple[Gain, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests without an objective in one system."""

    tokens_per_s: float
    e2e: Percentiles | None


@dataclass(frozen=True, slots=True)
class Numbers:
    """All that is compared. ``batch``: of each column; None: all requests have an objective."""

    measured: Measured
    columns: tuple[Column, ...]
    all: ClassRow
    classes: tuple[ClassRow, ...]
    batch: tuple[Batch, ...] | None


def compare(
    asked: Sequence[Asked], columns: Sequence[Column], measured: Measured, order: Sequence[str]
) -> Numbers:
    """The numbers of every class in every column.

    Args:
        asked: the requests that count, by arrival; ``columns`` have an outcome for each.
        order: names of classes that come first, in this order; the others follow by name.

    Raises:
        SimulationError: no request counts.
    """
    if not asked:
        raise SimulationError("trace: no request is left that counts; select more of it")
    names = {each.slo_class for each in asked}
    known = [name for name in order if name in names]
    known += sorted(names - set(known))
    places = {name: [i for i, each in enumerate(asked) if each.slo_class == name] for name in known}
    every = range(len(asked))
    plain = [i for i in every if not asked[i].has_objective]
    return Numbers(
        measured,
        tuple(columns),
        _row("", every, asked, columns, measured),
        tuple(_row(name, places[name], asked, columns, measured) for name in known),
        tuple(_batch(column, plain, measured) for column in columns) if plain else None,
    )


def _row(
    name: str,
    places: Sequence[int],
    asked: Sequence[Asked],
    columns: Sequence[Column],
    measured: Measured,
) -> ClassRow:
    requests = [asked[i].request for i in places]
    shares = [_share(column, places, asked) for column in columns]
    return ClassRow(
        name,
        _objectives(asked[i] for i in places),
        len(places),
        len(places) / measured.length_s,
        percentile((r.prompt_tokens for r in requests), 50) or 0.0,
        percentile((r.output_tokens for r in requests), 50) or 0.0,
        tuple(
            _cell(column, share, places, asked, measured)
            for column, share in zip(columns, shares, strict=True)
        ),
        _gains(columns, shares),
    )


def _share(column: Column, places: Sequence[int], asked: Sequence[Asked]) -> Share | None:
    """The share that attained, over stretches of the whole trace."""
    kept, of = [0] * STRETCHES, [0] * STRETCHES
    for i in places:
        verdict = column.outcomes[i].attained
        if verdict is not None:
            stretch = i * STRETCHES // len(asked)
            kept[stretch] += verdict
            of[stretch] += 1
    return Share.over(kept, of) if any(of) else None


def _cell(
    column: Column,
    share: Share | None,
    places: Sequence[int],
    asked: Sequence[Asked],
    measured: Measured,
) -> Cell:
    outcomes = [column.outcomes[i] for i in places]
    judged = [asked[i].has_objective for i in places]
    promised = [o for o in outcomes if o.promised]
    late = [o for o in outcomes if o.late_kept is not None]
    promises = any(o.promised is not None for o in outcomes)
    attained = None
    if share is not None:
        enough = share.of >= FEWEST
        attained = Attained(
            share.kept,
            share.of,
            share.low if enough else None,
            share.high if enough else None,
            sum(judged) - share.of,
        )
    return Cell(
        attained,
        Percentiles.of(o.ttft_s for o in outcomes),
        Percentiles.of(o.tpot_s for o in outcomes),
        Percentiles.of(o.e2e_s for o in outcomes),
        len(promised) if promises else None,
        sum(o.attained is True for o in promised),
        len(late) if promises else None,
        sum(o.late_kept is True for o in late),
        sum(o.end == "declined" for o in outcomes),
        sum(o.end == "failed" for o in outcomes),
        (share.kept if share else 0) / measured.length_s,
        _tokens_per_s(column, places, measured),
    )


def _batch(column: Column, places: Sequence[int], measured: Measured) -> Batch:
    e2e = Percentiles.of(column.outcomes[i].e2e_s for i in places)
    return Batch(_tokens_per_s(column, places, measured), e2e)


def _tokens_per_s(column: Column, places: Iterable[int], measured: Measured) -> float:
    return sum(column.outcomes[i].tokens for i in places) / measured.length_s


def _gains(columns: Sequence[Column], shares: Sequence[Share | None]) -> tuple[Gain, ...]:
    ours = next((s for c, s in zip(columns, shares, strict=True) if c.kind == "ours"), None)
    if ours is None:
        return ()
    gains = []
    for column, share in zip(columns, shares, strict=True):
        if share is not None and share is not ours:
            more, half = ours.minus(share)
            enough = min(share.of, ours.of) >= FEWEST
            gains.append(Gain(column.system, more, half if enough else None))
    return tuple(gains)


def _objectives(asked: Iterable[Asked]) -> Objectives:
    slos = [each.slo for each in asked if each.slo is not None]
    return Objectives(
        _span(slo.ttft_ms for slo in slos),
        _span(slo.tightest_tpot_ms for slo in slos),
        _span(slo.e2e_ms for slo in slos),
    )


def _span(bounds: Iterable[float | None]) -> tuple[float, float] | None:
    known = [bound for bound in bounds if bound is not None]
    return (min(known), max(known)) if known else None
