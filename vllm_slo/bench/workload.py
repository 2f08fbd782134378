# SPDX-License-Identifier: Apache-2.0
"""Workloads: which requests are sent and when. A seed gives every server the same requests.

``synthetic``: a mix of SLO classes like SLOs-Serve's (tables 1 and 3), Poisson or in bursts.
``azure-code``, ``azure-conv``, ``azure``: arrivals and lengths of the Azure Public Dataset 2023
traces. ``adaserve``: AdaServe's own evaluation workload. ``traces.py`` has the traces.

Objectives are multiples of a lone request's latency (``ZeroLoad``), so one description of a
workload fits any machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.planned import PlannedRequest, Workload
from vllm_slo.bench.zero_load import ZeroLoad

_Times = np.ndarray[tuple[int], np.dtype[np.float64]]

Arrivals = Literal["poisson", "square"]

TIGHT_TTFT: Final = 3.0
LOOSE_TTFT: Final = 5.0
"""TTFT objectives in multiples of the zero-load TTFT (SLOs-Serve, table 3)."""
TIGHT_TPOT: Final = 2.0
LOOSE_TPOT: Final = 4.0
"""TPOT objectives in multiples of the zero-load step; 50 and 100 ms of table 3 have this ratio."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts with this mean and deviation, clipped; ``std=0`` is constant."""

    mean: float
    std: float = 0.0
    minimum: int = 1
    maximum: int = 1_000_000

    def __post_init__(self) -> None:
        if not (self.mean >= 1 and 0 <= self.std < math.inf and 1 <= self.minimum <= self.maximum):
            raise BenchError("--classes", f"impossible token lengths: {self}")

    def sample(self, rng: np.random.Generator, count: int, scale: float = 1.0) -> list[int]:
        """``count`` whole lengths of at least 1, each times ``scale`` before clipping."""
        variance = math.log1p((self.std / self.mean) ** 2)
        raw = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        return [round(min(max(x * scale, self.minimum), self.maximum)) for x in raw]


@dataclass(frozen=True, slots=True)
class ClassSpec:
    """One SLO class: its share of the arrivals, its lengths and its objectives.

    ``ttft_slowdown`` and ``tpot_multiple`` are multiples of the zero-load latency; None means no
    objective.
    """

    name: str
    share: float
    prompt: Lengths
    output: Lengths
    ttft_slowdown: float | None = None
    tpot_multiple: float | None = None
    value: float = 1.0

    def __post_init__(self) -> None:
        numbers = {"share": self.share, "value": self.value}
        numbers |= {"ttft_slowdown": self.ttft_slowdown or 1.0}
        numbers |= {"tpot_multiple": self.tpot_multiple or 1.0}
        for field, number in numbers.items():
            if not 0 < number < math.inf:
                raise BenchError("--classes", f"{self.name}: {field} must be above 0, got {number}")
        if self.ttft_slowdown == 0 or self.tpot_multiple == 0:
            raise BenchError(
                "--classes", f"{self.name}: an objective must be above 0; leave it out for none"
            )


DEFAULT_CLASSES: Final[tuple[ClassSpec, ...]] = (
    ClassSpec("chat", 0.4, Lengths(380, 210), Lengths(130, 80, 2), LOOSE_TTFT, LOOSE_TPOT),
    ClassSpec("code", 0.3, Lengths(420, 300), Lengths(100, 60, 2), LOOSE_TTFT, TIGHT_TPOT),
    ClassSpec("summary", 0.2, Lengths(900, 220), Lengths(60, 30, 2), TIGHT_TTFT, LOOSE_TPOT),
    ClassSpec("batch", 0.1, Lengths(300, 150), Lengths(100, 50, 2)),
)
"""SLOs-Serve table 1's chat bot, coder and summariser plus work without objectives.

Token counts are for a context of 2,048; ``WorkloadOptions.length_scale`` adapts them.
"""


DEFAULT_CONTEXT: Final = 2048
BURST_SHARE: Final = 0.25
"""Share of each period that a burst of the square wave lasts."""


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Options of a workload; each field is the command's option of the same name.

    Attributes:
        rate: requests/s; None: 1 for ``synthetic``, else the trace's own (AdaServe's is rescaled to
            this machine).
        arrivals: of ``synthetic``: ``poisson``, or ``square``: for `BURST_SHARE` of every
            ``burst_period_s`` the rate is ``burst_factor`` times the average.
        max_context: most tokens of a prompt and its answer; longer requests are clipped.
        length_scale: factor on all token counts; None: at most 1, so that the default lengths for a
            context of 2,048, or the 99th percentile of a trace, just fit ``max_context``.
        trace: a file that replaces the workload's own trace.
    """

    workload: str = "synthetic"
    rate: float | None = None
    duration_s: float = 60.0
    seed: int = 0
    classes: tuple[ClassSpec, ...] = DEFAULT_CLASSES
    arrivals: Arrivals = "poisson"
    burst_factor: float = 3.0
    burst_period_s: float = 20.0
    max_context: int = DEFAULT_CONTEXT
    length_scale: float | None = None
    slo_scale: float = 1.0
    trace: Path | None = None


def positive(option: str, value: float) -> float:
    """``value`` if it is positive and finite; else BenchError names ``option``."""
    if not 0 < value < math.inf:
        raise BenchError(option, f"must be above 0, got {value}")
    return value


def context_limit(max_context: int) -> int:
    """``max_context`` if it is large enough for a prompt and an answer; else BenchError."""
    if max_context < 8:
        raise BenchError("--max-context", f"must be at least 8 tokens, got {max_context}")
    return max_context


def fit_context(prompt: int, output: int, max_context: int) -> tuple[int, int]:
    """Clip both so that they fit the context; the output gets at most half of it."""
    output = max(1, min(output, max_context // 2))
    return max(1, min(prompt, max_context - output)), output


def objectives(
    spec: ClassSpec, prompt_tokens: int, zero_load: ZeroLoad
) -> tuple[float | None, float | None]:
    """(TTFT, TPOT) of a class on a machine in seconds; None if the class has no such objective."""
    ttft = (
        None if spec.ttft_slowdown is None else spec.ttft_slowdown * zero_load.ttft_s(prompt_tokens)
    )
    tpot = None if spec.tpot_multiple is None else spec.tpot_multiple * zero_load.tpot_s
    return ttft, tpot


def _arrival_times(options: WorkloadOptions, rate: float, rng: np.random.Generator) -> list[float]:
    """Sorted seconds in [0, duration), exactly ``round(rate * duration)`` of them.

    A Poisson process with a given count is a set of independent uniform draws. So the rate is
    exact and only the spacing is random.
    """
    count = max(1, round(rate * options.duration_s))
    draws = np.sort(rng.random(count))
    if options.arrivals == "poisson":
        return [float(x * options.duration_s) for x in draws]
    if options.arrivals != "square":
        raise BenchError("--arrivals", f"must be poisson or square, got {options.arrivals!r}")
    factor = options.burst_factor
    if not 1 <= factor <= 1 / BURST_SHARE:
        raise BenchError(
            "--burst-factor",
            f"must be 1 to {1 / BURST_SHARE:g} when bursts fill {BURST_SHARE} of the time, "
            f"got {factor}",
        )
    period_s = positive("--burst-period", options.burst_period_s)
    return [float(t) for t in _square_wave(draws * options.duration_s, period_s, factor)]


def _square_wave(uniform_s: _Times, period_s: float, factor: float) -> _Times:
    """Bend even times so that the first `BURST_SHARE` of a period has ``factor`` times the rate."""
    share = BURST_SHARE
    whole, phase = np.divmod(uniform_s / period_s, 1.0)
    in_burst = phase < share * factor
    quiet = (1 - share) / max(1 - share * factor, 1e-12)
    bent = np.where(in_burst, phase / factor, share + (phase - share * factor) * quiet)
    times: _Times = (whole + np.minimum(bent, np.nextafter(1.0, 0.0))) * period_s
    return times


def class_sequence(
    classes: Sequence[ClassSpec], count: int, rng: np.random.Generator
) -> list[ClassSpec]:
    """``count`` classes in random order; shares are exact up to whole requests."""
    if not classes:
        raise BenchError("--classes", "name at least one class")
    names = [c.name for c in classes]
    if len(set(names)) != len(names):
        raise BenchError("--classes", f"a class is named twice: {', '.join(names)}")
    total = sum(c.share for c in classes)
    exact = [c.share / total * count for c in classes]
    counts = [math.floor(x) for x in exact]
    by_remainder = sorted(range(len(classes)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: count - sum(counts)]:
        counts[i] += 1
    pool = [spec for spec, n in zip(classes, counts, strict=True) for _ in range(n)]
    return [pool[i] for i in rng.permutation(count)]


def synthetic(options: WorkloadOptions, zero_load: ZeroLoad) -> Workload:
    """The synthetic mix. Deterministic in ``options`` and ``zero_load``."""
    rate = positive("--rate", 1.0 if options.rate is None else options.rate)
    positive("--duration", options.duration_s)
    limit = context_limit(options.max_context)
    scale = options.length_scale
    scale = min(1.0, limit / 2048) if scale is None else positive("--length-scale", scale)
    # Separate random streams, so that another rate or mix does not change the other draws.
    time_rng, class_rng, length_rng = (
        np.random.default_rng([options.seed, stream]) for stream in range(3)
    )
    times = _arrival_times(options, rate, time_rng)
    specs = class_sequence(options.classes, len(times), class_rng)
    requests = []
    for i, (at_s, spec) in enumerate(zip(times, specs, strict=True)):
        (prompt,) = spec.prompt.sample(length_rng, 1, scale)
        (output,) = spec.output.sample(length_rng, 1, scale)
        requests.append(planned(f"{spec.name}-{i}", at_s, spec, (prompt, output), limit, zero_load))
    source = f"synthetic, {options.arrivals} arrivals"
    if options.arrivals == "square":
        source += (
            f" ({options.burst_factor:g}x the average for {BURST_SHARE:.0%} of every "
            f"{options.burst_period_s:g} s)"
        )
    return Workload("synthetic", options.seed, options.duration_s, source, tuple(requests))


def planned(
    request_id: str,
    at_s: float,
    spec: ClassSpec,
    lengths: tuple[int, int],
    max_context: int,
    zero_load: ZeroLoad,
) -> PlannedRequest:
    """One request of a class, clipped to the context, with that machine's objectives."""
    prompt, output = fit_context(*lengths, max_context)
    ttft_s, tpot_s = objectives(spec, prompt, zero_load)
    return PlannedRequest(request_id, at_s, spec.name, prompt, output, ttft_s, tpot_s, spec.value)


def class_from_mapping(name: str, data: Mapping[str, Any]) -> ClassSpec:
    """A class from a file.

    Its keys are ``share``, ``prompt`` and ``output`` (a number, or ``mean``, ``std``, ``minimum``
    and ``maximum``), ``ttft_slowdown``, ``tpot_multiple`` and ``value``.
    """
    known = {"share", "prompt", "output", "ttft_slowdown", "tpot_multiple", "value"}
    unknown = sorted(set(data) - known)
    if unknown:
        raise BenchError("--classes", f"{name}: unknown {unknown[0]!r}; use {sorted(known)}")
    try:
        return ClassSpec(
            name=name,
            share=float(data.get("share", 1.0)),
            prompt=_lengths(data["prompt"]),
            output=_lengths(data["output"]),
            ttft_slowdown=_optional(data.get("ttft_slowdown")),
            tpot_multiple=_optional(data.get("tpot_multiple")),
            value=float(data.get("value", 1.0)),
        )
    except KeyError as error:
        raise BenchError("--classes", f"{name}: {error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise BenchError("--classes", f"{name}: {error}") from error


def _optional(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _lengths(value: object) -> Lengths:
    if isinstance(value, Mapping):
        return Lengths(**{str(k): v for k, v in value.items()})
    mean = _optional(value)
    if mean is None:
        raise TypeError("a length must be a number of tokens or a mapping")
    return Lengths(mean)


def scaled_lengths(
    lengths: Sequence[tuple[int, int]], max_context: int, factor: float
) -> list[tuple[int, int]]:
    """A trace's (prompt, output) pairs times ``factor``, clipped to the context."""
    limit = context_limit(max_context)
    positive("--length-scale", factor)
    return [
        fit_context(max(1, round(p * factor)), max(1, round(o * factor)), limit) for p, o in lengths
    ]
