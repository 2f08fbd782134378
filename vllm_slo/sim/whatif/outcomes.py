# SPDX-License-Identifier: Apache-2.0
"""What became of each request of a trace: as it was served, or in a simulation.

Both are judged by the same objectives, those of the configuration that is asked about. A TTFT
counts from arrival, a TPOT is the worst window of ten tokens (``core.attainment``). Seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_slo.sim.jobs import JobResult
from vllm_slo.sim.measure import TOLERANCE_S, measure_job
from vllm_slo.slo.model import SLO
from vllm_slo.traces.request import Served, TraceRequest

End = Literal["completed", "declined", "failed"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that counts, the name of its class, and what it asks for (None: nothing)."""

    request: TraceRequest
    slo_class: str
    slo: SLO | None

    @property
    def has_objective(self) -> bool:
        """Whether it can be judged on its own: session objectives are not, for example."""
        slo = self.slo
        return slo is not None and any(
            bound is not None for bound in (slo.ttft_ms, slo.tightest_tpot_ms, slo.e2e_ms)
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """The part of a trace that is measured, seconds since its first request."""

    from_s: float
    to_s: float

    @property
    def length_s(self) -> float:
        return self.to_s - self.from_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request.

    Attributes:
        attained: whether it kept its objectives; None: it has none, or nobody recorded that.
        ttft_s, tpot_s, e2e_s: None: there is no such time, or nobody recorded it.
        promised: whether its objectives were promised; None: the system promises nothing.
        late_kept: whether its late promise was kept; None: it had none.
        tokens: of its answer that came within the measured part of the trace.
    """

    end: End
    attained: bool | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    promised: bool | None
    late_kept: bool | None
    tokens: float


# --- as it was served ----------------------------------------------------------------------------


def as_served(asked: Asked, measured: Measured) -> Outcome:
    """The recorded outcome of a request whose client stayed."""
    request, served = asked.request, asked.request.served
    if served is None:
        return Outcome("completed", None, None, None, None, None, None, 0.0)
    end: End = "completed" if served.end == "completed" else "failed"
    if served.end == "declined":
        end = "declined"
    late_kept = served.late_kept
    if served.promise == "late" and end != "completed":
        late_kept = False
    return Outcome(
        end,
        _kept(asked, served) if asked.has_objective else None,
        served.ttft_s,
        served.tpot_s,
        served.e2e_s,
        None if served.promise is None else served.promise == "in_time",
        late_kept,
        _tokens_within(request, served, measured),
    )


def _kept(asked: Asked, served: Served) -> bool | None:
    """Whether a recorded request kept its objectives; None: the recording does not tell."""
    slo, request = asked.slo, asked.request
    assert slo is not None
    if served.end != "completed":
        return False
    held = (request.ttft_ms, request.tpot_ms, request.e2e_ms)
    if served.attained is not None and held == (slo.ttft_ms, slo.tpot_ms, slo.e2e_ms):
        return served.attained
    verdicts = (
        _within(served.ttft_s, slo.ttft_ms),
        _within(served.tpot_s, None if request.output_tokens < 2 else slo.tightest_tpot_ms),
        _within(served.e2e_s, slo.e2e_ms),
    )
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _within(time_s: float | None, bound_ms: float | None) -> bool | None:
    if bound_ms is None:
        return True
    return None if time_s is None else time_s <= bound_ms / 1e3 + TOLERANCE_S


def _tokens_within(request: TraceRequest, served: Served, measured: Measured) -> float:
    """Tokens that came in the measured part: evenly from the first one to the end.

    An answer of which no token came may have an estimated length.
    """
    if served.e2e_s is None or (served.end != "completed" and served.ttft_s is None):
        return 0.0
    end_s = request.at_s + served.e2e_s
    first_s = request.at_s + (served.ttft_s or 0.0)
    if end_s <= first_s:
        return float(request.output_tokens) if measured.from_s < end_s <= measured.to_s else 0.0
    inside_s = min(end_s, measured.to_s) - max(first_s, measured.from_s)
    return request.output_tokens * max(inside_s, 0.0) / (end_s - first_s)


# --- simulated -----------------------------------------------------------------------------------


def as_simulated(result: JobResult, measured: Measured) -> Outcome:
    """What a simulation made of a request, which is a job of one round (``by_request``)."""
    job = measure_job(result)
    times_s = [time_s for got in result.rounds for time_s in got.token_times_s]
    unanswered: End = "failed" if times_s else "declined"
    return Outcome(
        "completed" if job.finished else unanswered,
        job.attained if job.has_objective else None,
        job.ttfts_s[0] if job.ttfts_s else None,
        max(job.tpots_s, default=None),
        job.latency_s,
        job.promised,
        job.late_kept,
        _count(times_s, measured),
    )


def _count(times_s: Sequence[float], measured: Measured) -> int:
    return bisect_right(times_s, measured.to_s) - bisect_right(times_s, measured.from_s)
