# SPDX-License-Identifier: Apache-2.0
"""The workloads that are simulated: SLOs-Serve's six scenarios (tables 1 to 4) and AdaServe's.

Lengths are drawn so that mean, standard deviation and 99th percentile are table 4's. Objectives are
table 3's: TTFT as a slowdown against a lone request on the same hardware, TPOT in milliseconds;
table 1 says which application is tight where.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from vllm_slo.bench.traces import TraceRow
from vllm_slo.sim import arrivals as arrival_kinds
from vllm_slo.sim.arrivals import ARRIVALS, Fit, Stretch
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job, Round, Stage

__all__ = [
    "ARRIVALS",
    "SCENARIOS",
    "Application",
    "Lengths",
    "Loop",
    "Scenario",
    "applications_of",
    "make_jobs",
]

TIGHT_TTFT: Final = 3.0
LOOSE_TTFT: Final = 5.0
"""Most TTFT, in multiples of a lone request's (SLOs-Serve, table 3)."""
TIGHT_TPOT_S: Final = 0.050
LOOSE_TPOT_S: Final = 0.100
"""Most TPOT, seconds (SLOs-Serve, table 3)."""
TOOL_WAIT_S: Final = 1.0
"""Assumed mean seconds that a tool works between two rounds (exponential; the paper names none)."""

_TAIL_SHARE: Final = 0.02
_TAIL_SPREAD: Final = 0.10

Ints = NDArray[np.int64]
Family = Literal["beta", "lognormal", "tailed"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """One column of table 4: a seeded distribution of whole token counts, at least 1.

    ``family`` is what meets all three numbers. ``beta`` on [1, ``most``]: columns cut off by a
    context limit, whose 99th percentile lies less than some 2.3 deviations above the mean.
    ``lognormal``: up to some 3.7 deviations. ``tailed``: beyond; 2% of the draws come from a narrow
    log-normal around the 99th percentile, the others from one that restores mean and deviation.
    """

    mean: float
    std: float
    p99: float
    family: Family = "lognormal"
    most: float = math.inf

    def sample(self, rng: np.random.Generator, count: int) -> Ints:
        """``count`` token counts."""
        if self.family == "beta":
            raw = self._beta(rng, count)
        elif self.family == "lognormal":
            raw = _lognormal(rng, count, self.mean, self.std)
        else:
            raw = self._tailed(rng, count)
        return np.maximum(np.rint(raw), 1.0).astype(np.int64)

    def _beta(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        width = self.most - 1
        place = (self.mean - 1) / width
        weight = place * (1 - place) / (self.std / width) ** 2 - 1
        return 1 + width * rng.beta(place * weight, (1 - place) * weight, count)

    def _tailed(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        tail_square = self.p99**2 * (1 + _TAIL_SPREAD**2)
        mean = (self.mean - _TAIL_SHARE * self.p99) / (1 - _TAIL_SHARE)
        square = self.std**2 + self.mean**2 - _TAIL_SHARE * tail_square
        std = math.sqrt(square / (1 - _TAIL_SHARE) - mean**2)
        body = _lognormal(rng, count, mean, std)
        tail = _lognormal(rng, count, self.p99, self.p99 * _TAIL_SPREAD)
        return np.where(rng.random(count) < _TAIL_SHARE, tail, body)


def _lognormal(
    rng: np.random.Generator, count: int, mean: float, std: float
) -> NDArray[np.float64]:
    variance = math.log1p((std / mean) ** 2)
    return rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)


@dataclass(frozen=True, slots=True)
class Loop:
    """A tool loop: 1 + binomial(``trials``) rounds of mean ``rounds``; all but the last ask
    ``tpot_s``, and a tool works ``wait_s`` on average (exponential) between two of them."""

    rounds: float
    trials: int
    tpot_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class Application:
    """One SLO class.

    Attributes:
        name: of the class.
        arrivals: default arrivals (SLOs-Serve, table 2).
        prompt: tokens of each round's prompt.
        stages: (tokens, TPOT in seconds) of each stage of the (last) answer.
        ttft_slowdown: TTFT objective of every round, in multiples of a lone request's.
        loop: rounds of a tool loop; None for one request.
    """

    name: str
    arrivals: str
    prompt: Lengths
    stages: tuple[tuple[Lengths, float], ...]
    ttft_slowdown: float
    loop: Loop | None = None

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a whole job."""
        rounds = self.loop.rounds if self.loop else 1.0
        return rounds * (self.prompt.mean + sum(lengths.mean for lengths, _ in self.stages))


@dataclass(frozen=True, slots=True)
class Scenario:
    """Applications in equal shares. ``trace`` names a recording that brings its own lengths and
    objectives; then there are no applications."""

    name: str
    applications: tuple[Application, ...] = ()
    trace: str | None = None

    @property
    def arrivals(self) -> tuple[str, ...]:
        """Default arrivals; more than one when its applications arrive each in its own way."""
        if self.trace:
            return (self.trace,)
        return tuple(dict.fromkeys(a.arrivals for a in self.applications))


_CHATBOT: Final = Application(
    "chatbot",
    "azure-conv",
    Lengths(763, 424, 1591, "beta", 1648),
    ((Lengths(266, 160, 619, "beta", 669), LOOSE_TPOT_S),),
    LOOSE_TTFT,
)
_CODER: Final = Application(
    "coder",
    "azure-code",
    Lengths(847, 617, 2010, "beta", 2036),
    ((Lengths(26, 47, 232, "tailed"), TIGHT_TPOT_S),),
    LOOSE_TTFT,
)
_SUMMARIZER: Final = Application(
    "summarizer",
    "azure-conv",
    Lengths(1333, 444, 1946, "beta", 1957),
    ((Lengths(202, 234, 1508, "tailed"), LOOSE_TPOT_S),),
    TIGHT_TTFT,
)
# Table 4's row is read as one prefill-decode pair, 2.7 +- 1.1 of which make a job.
_TOOLLLM: Final = Application(
    "toolllm",
    "azure-code",
    Lengths(690, 356, 2131, "tailed"),
    ((Lengths(116, 66, 363), LOOSE_TPOT_S),),
    TIGHT_TTFT,
    Loop(2.7, 6, TIGHT_TPOT_S, TOOL_WAIT_S),
)
_REASONING: Final = Application(
    "reasoning",
    "azure-conv",
    Lengths(127, 83, 421),
    (
        (Lengths(4693, 1442, 7297, "beta", 7665), TIGHT_TPOT_S),
        (Lengths(803, 280, 1650), LOOSE_TPOT_S),
    ),
    TIGHT_TTFT,
)

SCENARIOS: Final[Mapping[str, Scenario]] = MappingProxyType(
    {
        scenario.name: scenario
        for scenario in (
            Scenario("chatbot", (_CHATBOT,)),
            Scenario("coder", (_CODER,)),
            Scenario("summarizer", (_SUMMARIZER,)),
            # Table 2 leaves its arrivals blank: each application keeps its own.
            Scenario("mixed", (_CHATBOT, _CODER, _SUMMARIZER)),
            Scenario("toolllm", (_TOOLLLM,)),
            Scenario("reasoning", (_REASONING,)),
            Scenario("adaserve", trace="adaserve"),
        )
    }
)


def applications_of(scenario: str, trace_file: Path | None = None) -> list[str]:
    """Names of the applications of a scenario, in alphabetical order; see ``make_jobs``.

    Raises:
        SimulationError: the scenario is unknown, or its trace cannot be read.
    """
    spec = _scenario(scenario)
    if spec.trace is None:
        return sorted(one.name for one in spec.applications)
    return sorted({row.slo_class for row in arrival_kinds.read_trace(spec.trace, trace_file).rows})


def make_jobs(
    scenario: str,
    hardware: Hardware,
    *,
    rate: float,
    count: int,
    seed: int,
    arrivals: str | None = None,
    fit: Fit = "rescale",
    lengths: Literal["table", "trace"] = "table",
    trace_file: Path | None = None,
) -> list[Job]:
    """``count`` jobs of a scenario by arrival, at a mean of ``rate`` jobs/s.

    For one (scenario, hardware, seed, count, arrivals) the jobs, their order and relative spacing
    are the same whatever the rate; the rate only scales time. ``thin`` keeps the jobs but takes
    its times from another stretch for each rate. Prompts are clipped where prompt and answer would
    exceed the context.

    Args:
        scenario: a key of ``SCENARIOS``.
        hardware: its lone-request latency is the unit of the TTFT objectives.
        rate: jobs/s.
        count: how many jobs.
        seed: of lengths and arrivals, >= 0.
        arrivals: one of ``ARRIVALS`` for all of them; None: the scenario's own.
        fit: how a trace meets the rate, see ``arrivals.draw``.
        lengths: ``trace`` takes each row's own prompt and answer (Azure arrivals, single rounds).
        trace_file: a trace instead of the arrival kind's own.

    Raises:
        SimulationError: an argument is out of range or a file is broken.
    """
    spec = _scenario(scenario)
    _check(rate, count, seed, fit, lengths)
    if arrivals is not None and arrivals not in (*ARRIVALS, spec.trace):
        raise SimulationError(
            f"arrivals: {arrivals!r} is unknown; use one of {', '.join(ARRIVALS)}"
        )
    if spec.trace is not None:  # a recording brings its own lengths, whatever ``lengths`` says
        arrivals = None if arrivals == spec.trace else arrivals
        return _recorded(spec.trace, hardware, rate, count, seed, arrivals, fit, trace_file)
    _check_context(spec, hardware)
    groups = _groups(spec, count, arrivals)
    if trace_file is not None and len(groups) > 1:
        raise SimulationError(
            f"trace_file: {scenario} arrives by {' and '.join(k for k, _ in groups)}; "
            "name one kind with arrivals"
        )
    arriving: list[tuple[float, Application, TraceRow | None]] = []
    for kind, members in groups:
        share = len(members) / count
        stretch = arrival_kinds.draw(
            kind, count=len(members), seed=seed, rate=rate * share, fit=fit, trace_file=trace_file
        )
        rows = _rows(kind, stretch, members, lengths)
        order = np.random.default_rng([seed, *f"order/{kind}".encode()]).permutation(len(members))
        for at, place, row in zip(stretch.at / share, order, rows, strict=True):
            arriving.append((float(at), members[place], row))
    arriving.sort(key=lambda item: item[0])
    return _jobs(arriving, hardware, rate, seed)


# --- checks ---------------------------------------------------------------------------------------


def _scenario(name: str) -> Scenario:
    if name in SCENARIOS:
        return SCENARIOS[name]
    near = difflib.get_close_matches(str(name), SCENARIOS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(SCENARIOS)
    raise SimulationError(f"scenario: {str(name)[:80]!r} is unknown; {hint}")


def _check(rate: float, count: int, seed: int, fit: str, lengths: str) -> None:
    if not 1e-6 <= rate <= 1e6:
        raise SimulationError(f"rate: must be 1e-6 to 1e6 jobs/s, got {rate}")
    for name, value, least in (("count", count, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise SimulationError(
                f"{name}: must be a whole number of at least {least}, got {value!r}"
            )
    for name, text, known in (
        ("fit", fit, ("rescale", "thin")),
        ("lengths", lengths, ("table", "trace")),
    ):
        if text not in known:
            raise SimulationError(f"{name}: must be {' or '.join(known)}, got {text!r}")


def _context_limit(hardware: Hardware) -> int:
    return min(hardware.max_model_len, hardware.kv_tokens)


def _check_context(spec: Scenario, hardware: Hardware) -> None:
    limit = _context_limit(hardware)
    for application in spec.applications:
        if application.mean_tokens > limit:
            raise SimulationError(
                f"hardware {hardware.name}: max_model_len: {limit} tokens cannot hold a mean job "
                f"of {application.name} ({application.mean_tokens:.0f}); use another hardware"
            )


# --- assembly -------------------------------------------------------------------------------------


def _groups(
    spec: Scenario, count: int, arrivals: str | None
) -> list[tuple[str, list[Application]]]:
    """Arrival kind -> the applications of its jobs, in shares as equal as whole jobs allow."""
    share, rest = divmod(count, len(spec.applications))
    groups: dict[str, list[Application]] = {}
    for place, application in enumerate(spec.applications):
        members = [application] * (share + (place < rest))
        if members:
            groups.setdefault(arrivals or application.arrivals, []).extend(members)
    return list(groups.items())


def _rows(
    kind: str, stretch: Stretch, members: Sequence[Application], lengths: str
) -> Sequence[TraceRow | None]:
    if lengths == "table":
        return [None] * len(members)
    if not stretch.rows:
        raise SimulationError(
            f"lengths: trace: {kind} arrivals have no lengths; use azure-code or azure-conv"
        )
    for application in members:
        if application.loop or len(application.stages) > 1:
            raise SimulationError(
                f"lengths: trace: {application.name} has more than one prompt and one answer, "
                "which a trace row does not tell; use table"
            )
    return stretch.rows


def _jobs(
    arriving: Sequence[tuple[float, Application, TraceRow | None]],
    hardware: Hardware,
    rate: float,
    seed: int,
) -> list[Job]:
    """Jobs from their arrivals in mean gaps; each application draws from a stream of its own."""
    makers: dict[str, _Maker] = {}
    for application in {a.name: a for _, a, _ in arriving}.values():
        count = sum(a is application for _, a, _ in arriving)
        makers[application.name] = _Maker(application, hardware, count, seed)
    return [
        Job(f"{a.name}-{i}", a.name, at / rate, makers[a.name].next_rounds(row))
        for i, (at, a, row) in enumerate(arriving)
    ]


class _Maker:
    """Hands out one application's rounds, all drawn at once."""

    def __init__(self, application: Application, hardware: Hardware, count: int, seed: int) -> None:
        rng = np.random.default_rng([seed, *f"lengths/{application.name}".encode()])
        self.application, self.hardware = application, hardware
        loop = application.loop
        rounds = np.ones(count, dtype=np.int64)
        if loop:
            rounds += rng.binomial(loop.trials, (loop.rounds - 1) / loop.trials, count)
        total = int(rounds.sum())
        prompts = application.prompt.sample(rng, total).tolist()
        answers = [stage.sample(rng, total).tolist() for stage, _ in application.stages]
        waits = rng.exponential(loop.wait_s if loop else 0.0, total).tolist()
        self._rounds = iter(rounds.tolist())
        self._drawn = iter(zip(prompts, zip(*answers, strict=True), waits, strict=True))

    def next_rounds(self, row: TraceRow | None) -> tuple[Round, ...]:
        """The rounds of the next job; ``row`` overrides the lengths of a single round."""
        drawn = [next(self._drawn) for _ in range(next(self._rounds))]
        if row is not None:
            drawn = [(row.prompt_tokens, (row.output_tokens,), 0.0)]
        fitting = self._fitting(drawn)
        application, made, context = self.application, [], 0
        for place, (prompt, answer, wait_s) in enumerate(fitting):
            tpots = [tpot_s for _, tpot_s in application.stages]
            if application.loop and place < len(fitting) - 1:
                tpots = [application.loop.tpot_s] * len(tpots)
            stages = tuple(Stage(n, tpot_s) for n, tpot_s in zip(answer, tpots, strict=True))
            ttft_s = application.ttft_slowdown * self.hardware.zero_load_ttft_s(prompt, context)
            made.append(Round(prompt, stages, ttft_s, wait_s if place else 0.0))
            context += prompt + sum(answer)
        return tuple(made)

    def _fitting(
        self, drawn: Sequence[tuple[int, tuple[int, ...], float]]
    ) -> list[tuple[int, tuple[int, ...], float]]:
        """The rounds that fit the context: prompts clipped, rounds dropped once it is full."""
        limit, context = _context_limit(self.hardware), 0
        fitting: list[tuple[int, tuple[int, ...], float]] = []
        for prompt, answer, wait_s in drawn:
            clipped = (prompt, answer) if fitting else _fit(prompt, answer, limit)
            room = limit - context - sum(clipped[1])
            if room < 1:
                break
            kept = min(clipped[0], room)
            fitting.append((kept, clipped[1], wait_s))
            context += kept + sum(clipped[1])
        return fitting


def _fit(prompt: int, answer: tuple[int, ...], limit: int) -> tuple[int, tuple[int, ...]]:
    """Clip the prompt; an answer beyond 7/8 of the context is scaled down to that first."""
    total = sum(answer)
    if prompt + total <= limit:
        return prompt, answer
    most = max(limit * 7 // 8, len(answer))
    if total > most:
        answer = tuple(max(1, n * most // total) for n in answer)
        total = sum(answer)
    return max(1, min(prompt, limit - total)), answer


def _recorded(
    kind: str,
    hardware: Hardware,
    rate: float,
    count: int,
    seed: int,
    arrivals: str | None,
    fit: Fit,
    trace_file: Path | None,
) -> list[Job]:
    """AdaServe's workload: its lengths and TPOT objectives; it has no TTFT objective.

    A positive ``slo_ratio`` is a TPOT in multiples of the zero-load decode step, a negative one an
    absolute TPOT in ms (AdaServe, 6.1). Other ``arrivals`` replace the times alone.
    """
    stretch = arrival_kinds.draw(
        kind, count=count, seed=seed, rate=rate, fit=fit if arrivals is None else "rescale",
        trace_file=trace_file,
    )  # fmt: skip
    at = stretch.at
    if arrivals is not None:
        at = arrival_kinds.draw(arrivals, count=count, seed=seed, rate=rate, fit=fit).at
    step_s, limit = hardware.zero_load_tpot_s(), _context_limit(hardware)
    jobs = []
    for i, (when, row) in enumerate(zip(at.tolist(), stretch.rows, strict=True)):
        ratio = row.slo_ratio or 0.0
        prompt, answer = _fit(row.prompt_tokens, (row.output_tokens,), limit)
        stage = Stage(answer[0], ratio * step_s if ratio > 0 else -ratio / 1e3)
        rounds = (Round(prompt, (stage,), math.inf),)
        jobs.append(Job(f"{row.slo_class}-{i}", row.slo_class, when / rate, rounds))
    return jobs
