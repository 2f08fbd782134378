# SPDX-License-Identifier: Apache-2.0
"""Arrival times of jobs: recorded traces, a Poisson process, a square wave.

Every kind gives ``count`` times in *mean gaps*: numbers in [0, count) that a rate turns into
seconds. So for one (kind, count, seed) the pattern is the same at every rate. The mean rate is
exact over a window of ``count`` gaps, which includes the gap after the last arrival.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from vllm_slo.bench import traces
from vllm_slo.sim.errors import SimulationError
from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.request import TraceRequest

ARRIVALS: Final = ("azure-code", "azure-conv", "poisson", "square")
TRACES: Final = ("azure-code", "azure-conv", "adaserve")
SQUARE_PERIOD: Final = 120
"""Requests per period of the square wave: 60 s at 2 requests/s."""
SQUARE_RATIO: Final = 3.0
"""Rate of its first half over the rate of its second: 1.5 and 0.5 times the mean."""

Fit = Literal["rescale", "thin"]
Floats = NDArray[np.float64]

_FILES: Final = {
    "azure-code": "azure_llm_2023_code.csv",
    "azure-conv": "azure_llm_2023_conv.csv",
    "adaserve": "adaserve/emission_fluctuating.json",
}


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded workload, ordered by time.

    Attributes:
        source: the file it was read from, or what it was made from.
        rows_left_out: rows of the file without prompt or output tokens.
    """

    source: str
    at_s: Floats
    rows: tuple[TraceRequest, ...]
    rows_left_out: int = 0

    @property
    def native_rate(self) -> float:
        """Requests per second of the recording."""
        return len(self.rows) / max(float(self.at_s[-1] - self.at_s[0]), 1e-9)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Arrivals: ``at`` in mean gaps, sorted, in [0, count).

    ``rows`` of a trace and their ``places`` in it, or ().
    """

    at: Floats
    rows: tuple[TraceRequest, ...] = ()
    places: tuple[int, ...] = ()


def draw(
    kind: str,
    *,
    count: int,
    seed: int,
    rate: float = 1.0,
    fit: Fit = "rescale",
) -> Stretch:
    """``count`` arrivals.

    Args:
        kind: one of ``ARRIVALS``, or ``adaserve``.
        seed: chooses the stretch of the trace, or the random times.
        rate: requests/s; only ``thin`` uses it.
        fit: ``rescale`` stretches a run of neighbouring rows to the rate. ``thin`` keeps the
            recorded pace and draws rows at random from ``count / rate`` seconds.

    Raises:
        SimulationError: an unknown kind, a broken file, a window that is empty or too small.
    """
    rng = np.random.default_rng([seed, *f"arrivals/{kind}".encode()])
    if kind not in TRACES:
        if kind not in ARRIVALS:
            raise SimulationError(
                f"arrivals: {kind!r} is unknown; use one of {', '.join(ARRIVALS)}"
            )
        if fit == "thin":
            raise SimulationError(f"fit: thin: {kind} arrivals come from no trace; do not set it")
        even = np.sort(rng.random(count)) * count
        return Stretch(even if kind == "poisson" else _square(even))
    trace = read_trace(kind)
    if kind == "adaserve" and fit == "rescale":
        return _whole(trace, count, rng)
    return _cut(trace, count, rate, fit, rng)


def stretch(trace: Trace, count: int, seed: int, rate: float, fit: Fit) -> Stretch:
    """``count`` arrivals of an operator's trace; arguments as ``draw``."""
    return _cut(trace, count, rate, fit, np.random.default_rng([seed, *b"arrivals/trace"]))


def _cut(trace: Trace, count: int, rate: float, fit: Fit, rng: np.random.Generator) -> Stretch:
    if fit == "thin":
        return _thinned(trace, count, rate, rng)
    return _neighbours(trace, count, rng)


def _square(even: Floats) -> Floats:
    """Bend even times so that the rate of a period's first half is ``SQUARE_RATIO`` times higher.

    A whole number of periods fills the window, each with about ``SQUARE_PERIOD`` requests.
    """
    count = len(even)
    period = count / max(1, round(count / SQUARE_PERIOD))
    share = SQUARE_RATIO / (SQUARE_RATIO + 1)
    whole, phase = np.divmod(even / period, 1.0)
    bent = np.where(phase < share, phase / share / 2, 0.5 + (phase - share) / (1 - share) / 2)
    return np.minimum((whole + bent) * period, np.nextafter(float(count), 0.0))


def _enough(trace: Trace, count: int) -> None:
    if count > len(trace.rows):
        raise SimulationError(
            f"count: {count} jobs are more than the {len(trace.rows)} rows of {trace.source}; "
            "use fewer, or poisson or square arrivals"
        )


def _neighbours(trace: Trace, count: int, rng: np.random.Generator) -> Stretch:
    """A run of ``count`` rows from a random start; after the last row comes the first.

    The trace is a ring whose ends are one mean gap apart, so seeds give different stretches even if
    ``count`` is the whole trace.
    """
    _enough(trace, count)
    total = len(trace.rows)
    first = int(rng.integers(total))
    places = (first + np.arange(count)) % total
    lap_s = float(trace.at_s[-1] - trace.at_s[0]) * total / max(1, total - 1)
    at_s = trace.at_s[places] + np.where(places < first, lap_s, 0.0)
    at_s -= at_s[0]
    return _taken(trace, _spread(trace, at_s, count), places)


def _taken(trace: Trace, at: Floats, places: NDArray[np.int64]) -> Stretch:
    chosen = tuple(places.tolist())
    return Stretch(at, tuple(trace.rows[place] for place in chosen), chosen)


def _spread(trace: Trace, at_s: Floats, count: int) -> Floats:
    """Seconds from 0 as mean gaps; the gap after the last arrival is one mean gap."""
    if count == 1:
        return np.zeros(1)
    span_s = float(at_s[-1])
    if span_s <= 0:
        raise SimulationError(
            f"arrivals: empty window: {count} rows of {trace.source} have the same time; "
            "use more jobs, another seed or another trace"
        )
    return np.asarray(at_s * ((count - 1) / span_s), dtype=np.float64)


def _whole(trace: Trace, count: int, rng: np.random.Generator) -> Stretch:
    """``count`` random rows of the whole trace, which keeps its shape."""
    _enough(trace, count)
    kept = np.sort(rng.choice(len(trace.rows), count, replace=False))
    span_s = float(trace.at_s[-1] - trace.at_s[0]) * (1 + 1e-9)
    if span_s <= 0:
        raise SimulationError(f"arrivals: empty window: all rows of {trace.source} have one time")
    at = (trace.at_s[kept] - trace.at_s[0]) * (count / span_s)
    return _taken(trace, at, kept)


def _thinned(trace: Trace, count: int, rate: float, rng: np.random.Generator) -> Stretch:
    """``count`` random rows from ``count / rate`` seconds of the trace at its own pace.

    Those seconds begin at a random row, among the rows with enough others after them.
    """
    times, window_s = trace.at_s, count / rate
    span_s = float(times[-1] - times[0])
    if window_s > span_s:
        raise SimulationError(
            f"fit: thin: {count} jobs at {rate:g}/s take {window_s:.0f} s, {trace.source} lasts "
            f"{span_s:.0f} s; use fewer jobs, a higher rate, or rescale"
        )
    starts = times[times <= max(times[0], times[-1] - window_s)]
    sizes = np.searchsorted(times, starts + window_s) - np.arange(len(starts))
    fitting = np.flatnonzero(sizes >= count)
    if not len(fitting):
        raise SimulationError(
            f"fit: thin: window too small: no {window_s:.0f} s of {trace.source} hold {count} "
            f"rows (it has {trace.native_rate:.2f}/s); use a lower rate, or rescale"
        )
    first = int(rng.choice(fitting))
    kept = first + np.sort(rng.choice(int(sizes[first]), count, replace=False))
    at = np.minimum((times[kept] - times[first]) * rate, np.nextafter(float(count), 0.0))
    return _taken(trace, at, kept)


def read_trace(kind: str) -> Trace:
    """The recording of a kind: the data folder's, or a seeded stand-in.

    ``traces.read_recording`` describes the formats: ``adaserve`` needs AdaServe's, the other kinds
    take those without objectives. A file is read again only after it has changed.

    Raises:
        TraceError: the file cannot be read or is broken; names file, line and field.
    """
    path = traces.data_file(_FILES[kind])
    if path is None:
        return _standin(kind)
    try:
        stat = path.stat()
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    return _read(kind, path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _read(kind: str, path: Path, _mtime_ns: int, _size: int) -> Trace:
    recording = traces.read_recording(path, None if kind == "adaserve" else kind)
    return _trace(recording.source, recording.rows, recording.left_out)


@lru_cache(maxsize=4)
def _standin(kind: str) -> Trace:
    source = f"synthetic stand-in for {_FILES[kind]}"
    if kind == "adaserve":
        return _trace(source, traces.standin_adaserve(0))
    return _trace(source, traces.standin_azure("code" if kind == "azure-code" else "conv", 0))


def _trace(source: str, rows: list[TraceRequest], left_out: int = 0) -> Trace:
    at_s = np.array([row.at_s for row in rows], dtype=np.float64)
    if not math.isfinite(float(at_s.sum())):
        raise TraceError(f"{source} has a time that is not finite")
    at_s.setflags(write=False)
    return Trace(source, at_s, tuple(rows), left_out)
