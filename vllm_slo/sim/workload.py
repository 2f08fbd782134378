# SPDX-License-Identifier: Apache-2.0
"""Jobs of a scenario: arrivals, lengths and objectives, drawn from one seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from vllm_slo.sim.arrivals import ARRIVALS, Fit, Stretch, draw
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job, Round, Stage
from vllm_slo.sim.scenarios import Application, Scenario, scenario_of
from vllm_slo.traces.request import TraceRequest


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
    stretch: Stretch | None = None,
) -> list[Job]:
    """``count`` jobs of a scenario, by arrival, at a mean of ``rate`` jobs/s.

    For one (scenario, hardware, seed, count, arrivals) the jobs, their order and relative spacing
    are the same at every rate: the rate only scales time. With ``thin`` the jobs are the same too,
    but each rate takes its times from another stretch of the trace. A prompt is cut if prompt and
    answer would exceed the context.

    Args:
        scenario: a key of ``SCENARIOS``.
        hardware: the latency of a lone request on it is the unit of the TTFT objectives.
        seed: of lengths and arrivals, >= 0.
        arrivals: one of ``ARRIVALS`` for all applications; None: the scenario's own.
        fit: how a trace is fitted to the rate, see ``arrivals.draw``.
        lengths: ``trace`` takes prompt and answer of each row (Azure arrivals, single rounds).
        stretch: ``count`` arrivals of another trace, in place of the scenario's.

    Raises:
        SimulationError: an argument is out of range or a file is broken.
    """
    spec = scenario_of(scenario)
    _check(rate, count, seed, fit, lengths)
    if arrivals is not None and arrivals not in (*ARRIVALS, spec.trace):
        raise SimulationError(
            f"arrivals: {arrivals!r} is unknown; use one of {', '.join(ARRIVALS)}"
        )
    if spec.trace is not None:  # a recording has its own lengths, so ``lengths`` does not matter
        arrivals = None if arrivals == spec.trace else arrivals
        return _recorded(spec.trace, hardware, rate, count, seed, arrivals, fit, stretch)
    _check_context(spec, hardware)
    groups = _groups(spec, count, arrivals if stretch is None else "trace")
    arriving: list[tuple[float, Application, TraceRequest | None]] = []
    for kind, members in groups:
        share = len(members) / count
        drawn = stretch or draw(kind, count=len(members), seed=seed, rate=rate * share, fit=fit)
        rows = _rows(kind, drawn, members, lengths)
        order = np.random.default_rng([seed, *f"order/{kind}".encode()]).permutation(len(members))
        for at, place, row in zip(drawn.at / share, order, rows, strict=True):
            arriving.append((float(at), members[place], row))
    arriving.sort(key=lambda item: item[0])
    return _jobs(arriving, hardware, rate, seed)


# --- checks ---------------------------------------------------------------------------------------


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


def context_limit(hardware: Hardware) -> int:
    """Most tokens of one request."""
    return min(hardware.max_model_len, hardware.kv_tokens)


def _check_context(spec: Scenario, hardware: Hardware) -> None:
    limit = context_limit(hardware)
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
) -> Sequence[TraceRequest | None]:
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
                "which a trace row does not have; use table"
            )
    return stretch.rows


def _jobs(
    arriving: Sequence[tuple[float, Application, TraceRequest | None]],
    hardware: Hardware,
    rate: float,
    seed: int,
) -> list[Job]:
    """Jobs from their arrivals in mean gaps; each application has its own random stream."""
    makers: dict[str, _Maker] = {}
    for application in {a.name: a for _, a, _ in arriving}.values():
        count = sum(a is application for _, a, _ in arriving)
        makers[application.name] = _Maker(application, hardware, count, seed)
    return [
        Job(f"{a.name}-{i}", a.name, at / rate, makers[a.name].next_rounds(row))
        for i, (at, a, row) in enumerate(arriving)
    ]


class _Maker:
    """The rounds of one application; all lengths are drawn at once."""

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

    def next_rounds(self, row: TraceRequest | None) -> tuple[Round, ...]:
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
        """The rounds that fit the context: prompts are cut, rounds after a full context dropped."""
        limit, context = context_limit(self.hardware), 0
        fitting: list[tuple[int, tuple[int, ...], float]] = []
        for prompt, answer, wait_s in drawn:
            clipped = (prompt, answer) if fitting else fit_context(prompt, answer, limit)
            room = limit - context - sum(clipped[1])
            if room < 1:
                break
            kept = min(clipped[0], room)
            fitting.append((kept, clipped[1], wait_s))
            context += kept + sum(clipped[1])
        return fitting


def fit_context(prompt: int, answer: tuple[int, ...], limit: int) -> tuple[int, tuple[int, ...]]:
    """Cut the prompt to fit; an answer above 7/8 of the context is first scaled down to that."""
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
    times: Stretch | None,
) -> list[Job]:
    """AdaServe's workload: its lengths and TPOT objectives; it has no TTFT objective.

    A positive ``slo_ratio`` is a TPOT in multiples of the zero-load decode step; a negative one is
    an absolute TPOT in ms (AdaServe, 6.1). Other ``arrivals`` or ``times`` replace the times only.
    """
    own = arrivals is None and times is None
    stretch = draw(kind, count=count, seed=seed, rate=rate, fit=fit if own else "rescale")
    at = stretch.at if times is None else times.at
    if arrivals is not None:
        at = draw(arrivals, count=count, seed=seed, rate=rate, fit=fit).at
    step_s, limit = hardware.zero_load_tpot_s(), context_limit(hardware)
    jobs = []
    for i, (when, row) in enumerate(zip(at.tolist(), stretch.rows, strict=True)):
        ratio = row.slo_ratio or 0.0
        prompt, answer = fit_context(row.prompt_tokens, (row.output_tokens,), limit)
        stage = Stage(answer[0], ratio * step_s if ratio > 0 else -ratio / 1e3)
        rounds = (Round(prompt, (stage,), math.inf),)
        jobs.append(Job(f"{row.slo_class}-{i}", row.slo_class, when / rate, rounds))
    return jobs
