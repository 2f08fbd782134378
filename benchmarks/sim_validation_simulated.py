# SPDX-License-Identifier: Apache-2.0
"""The simulated half of ``sim_validation.py``: what the simulator is told, and its runs."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from sim_validation_conditions import Condition, Served
from sim_validation_engine import LiveStep, Profiled, Record

from vllm_slo.core.clock import Clock
from vllm_slo.core.step_time.fit import fit, nnls
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.sim.cluster import simulate
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import Draft, Hardware
from vllm_slo.sim.jobs import Job
from vllm_slo.sim.measure import JobMeasure, measure_job
from vllm_slo.sim.systems import System

SEEDS: Final = 3
"""Simulations of each live run; the table has their mean."""
BLOCK_STEPS: Final = 50
"""Steps whose errors are replayed together, because a slow moment lasts longer than a step."""

STRETCH_S: Final = 2.0
"""The speed of the machine is told as means over so long."""

APART_S: Final = 5.0
"""More time between two runs than on the real engine, for the first to end here, too."""

Line = tuple[float, float]
"""Seconds of a step, and for each request or token in it."""


@dataclass(frozen=True)
class Scheduled(System):
    """A system whose scheduling takes what it took on the real engine.

    Attributes:
        scheduling: beyond what is in the step times of the profile; by requests.
    """

    scheduling: Line = (0.0, 0.0)

    def overhead_s(self, requests: int) -> float:
        """Seconds to schedule a step of so many requests."""
        step_s, request_s = self.scheduling
        return max(step_s + request_s * requests, 0.0)


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Errors of steps, actual over expected time, in the order of the steps. A short step is
    disturbed by a larger share of its time than a long one, so they are told apart.

    Attributes:
        split_s: steps that are expected to take less are the short ones.
    """

    split_s: float = 0.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @classmethod
    def of(cls, steps: Sequence[tuple[float, float]]) -> StepErrors:
        """Of (expected, actual) times; the long steps hold half of the time."""
        if not steps:
            return cls()
        expected_s = np.sort([expected for expected, _ in steps])
        half = np.searchsorted(np.cumsum(expected_s), expected_s.sum() / 2)
        split_s = float(expected_s[half])
        parts: tuple[list[float], list[float]] = ([], [])
        for expected, actual in steps:
            parts[expected >= split_s].append(actual / expected)
        return cls(split_s, *map(tuple, parts))


@dataclass(frozen=True, slots=True)
class Drift:
    """How much longer the steps of an engine took than expected, over time.

    Attributes:
        times_s: middles of the stretches of `STRETCH_S` in which it worked, increasing.
        factors: actual over expected time in each.
    """

    times_s: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()

    @classmethod
    def of(cls, steps: Sequence[tuple[float, float, float]]) -> Drift:
        """Of (end, expected, actual) times."""
        if not steps:
            return cls()
        ends_s, expected_s, actual_s = np.array(steps).T
        middles = np.arange(ends_s[0], ends_s[-1] + STRETCH_S, STRETCH_S / 2)
        found = []
        for middle_s in middles:
            near = np.abs(ends_s - middle_s) < STRETCH_S / 2
            if (work_s := expected_s[near].sum()) > 0.1 * STRETCH_S:
                found.append((float(middle_s), float(actual_s[near].sum() / work_s)))
        return cls(*zip(*found, strict=True)) if found else cls()

    def at(self, now_s: float) -> float:
        """The factor at a time."""
        return float(np.interp(now_s, self.times_s, self.factors)) if self.times_s else 1.0


@dataclass(frozen=True)
class Scattered(Conditions):
    """Conditions whose step times scatter as others did.

    Attributes:
        profile: step times that the schedulers start with; None: those of the hardware.
        drifts: of each engine, in the simulation's time; empty: they are as fast all the time.
    """

    errors: StepErrors = StepErrors()
    profile: StepTimeModel | None = None
    drifts: tuple[Drift, ...] = ()

    def believed(self, hardware: Hardware, engine: int) -> StepTimeModel:
        """As the real scheduler was told."""
        return self.profile or super().believed(hardware, engine)

    def true_step_time(
        self, hardware: Hardware, engine: int, clock: Clock
    ) -> Callable[[BatchShape], float]:
        """The predicted time times an error; `BLOCK_STEPS` that followed each other are drawn
        together."""
        predict, errors = hardware.step_time.predict_shape_s, self.errors
        drift = self.drifts[engine] if self.drifts else Drift()
        rng = np.random.default_rng([self.seed, engine])
        pools = errors.short or (1.0,), errors.long or errors.short or (1.0,)
        left: tuple[list[float], list[float]] = ([], [])

        def taken(shape: BatchShape) -> float:
            expected_s = predict(shape)
            part = expected_s >= errors.split_s
            if not left[part]:
                first = int(rng.integers(len(pools[part])))
                left[part].extend(
                    pools[part][(first + n) % len(pools[part])]
                    for n in reversed(range(BLOCK_STEPS))
                )
            return expected_s * drift.at(clock.monotonic_s()) * left[part].pop()

        return taken

    def is_known(self, engine: int) -> bool:
        """Whether step times are the believed ones."""
        return not self.errors.short


@dataclass(frozen=True, slots=True)
class Told:
    """What the simulator is told of an engine.

    Attributes:
        hardware: with its draft, if it has one.
        profile: that vllm-slo's scheduler is given.
        scheduling: as `Scheduled.scheduling`.
        gap_s: between two steps.
        errors: of its steps.
        drifts: of each engine; empty: not told.
    """

    hardware: Hardware
    profile: StepTimeModel
    scheduling: Line
    gap_s: float
    errors: StepErrors
    drifts: tuple[Drift, ...] = ()


def line(points: Sequence[tuple[float, float]], weights: Sequence[float] = ()) -> Line:
    """The line through (x, seconds), by least squares; neither of its numbers is negative.

    ``weights``: of the points; empty: all alike.
    """
    x, y = np.array(points, dtype=np.float64).T
    w = np.sqrt(np.array(weights)) if len(weights) else np.ones_like(x)
    fixed_s, each_s = np.linalg.lstsq(np.stack([w, w * x], axis=1), w * y, rcond=None)[0]
    if each_s < 0.0:
        return max(float(np.average(y, weights=w**2)), 0.0), 0.0
    if fixed_s < 0.0:
        return 0.0, max(float((w * w * x * y).sum() / (w * w * x * x).sum()), 0.0)
    return float(fixed_s), float(each_s)


def scheduling_line(steps: Sequence[LiveStep]) -> Line:
    """What the scheduler took, by the requests of a step: through the medians of each number."""
    groups = defaultdict(list)
    for step in steps:
        groups[step.shape.requests].append(step.scheduling_s)
    points = [(float(n), statistics.median(times)) for n, times in groups.items()]
    return line(points, [len(times) for times in groups.values()])


def gap_s(steps: Sequence[LiveStep]) -> float:
    """Typical time between two steps that follow each other at once."""
    gaps_s = [step.gap_s for step in steps if step.gap_s > 0.0]
    return statistics.median(gaps_s) if gaps_s else 0.0


def less(a: Line, b: Line) -> Line:
    """The difference of two lines."""
    return a[0] - b[0], a[1] - b[1]


def misfit(
    records: Sequence[Record], hardware: Hardware, scheduling: Line, drifts: Sequence[Drift] = ()
) -> StepErrors:
    """Errors of live steps, against what the simulator would charge for them; what it charges for
    scheduling is left out of both.

    Args:
        records: of each engine.
        drifts: of each engine; they explain a part of the errors.
    """
    return StepErrors.of([
        (expected_s * drift.at(ended_s), actual_s)
        for record, drift in zip(records, drifts or [Drift()] * len(records), strict=True)
        for ended_s, expected_s, actual_s in compared(record.steps, hardware, scheduling)
    ])  # fmt: skip


def compared(
    steps: Sequence[LiveStep], hardware: Hardware, scheduling: Line
) -> list[tuple[float, float, float]]:
    """(end, expected, actual time) of each step, both without scheduling."""
    return [
        (step.ended_s, charged_s(step, hardware), step.sample[1] - scheduling_s(step, scheduling))
        for step in steps
    ]


def charged_s(step: LiveStep, hardware: Hardware) -> float:
    """Seconds of a step with the draft's part, without scheduling and the passes of trees."""
    shape, draft = step.shape, hardware.draft
    token_s = draft.token_s if draft is not None and shape.spec_steps else 0.0
    return hardware.step_time.predict_shape_s(shape) + token_s * shape.tokens


def scheduling_s(step: LiveStep, scheduling: Line) -> float:
    """Seconds of scheduling beyond the profile."""
    return max(scheduling[0] + scheduling[1] * step.shape.requests, 0.0)


def draft_of_trees(steps: Sequence[LiveStep]) -> Line:
    """Seconds of a pass of the draft, and of each of its tokens."""
    passes = [(float(tokens), seconds) for step in steps for tokens, seconds in step.drafting]
    return line(passes) if len(passes) > 1 else (0.0, 0.0)


def told(
    served: Served, hardware: Hardware, profiles: Sequence[Profiled], records: Sequence[Record]
) -> Told:
    """What is known by profiles, and by how live steps differed from them.

    Args:
        hardware: with the step times that the real scheduler was told.
        profiles: from before and after the runs.
        records: of the live steps; their errors are told, too.
    """
    live = [step for record in records for step in record.steps]
    samples = [sample for profile in profiles for sample in profile.report.samples]
    profiled = [step for profile in profiles for step in profile.steps]
    scheduling = less(scheduling_line(live), scheduling_line(profiled))
    model = fit(samples).model
    found = replace(hardware, step_time=model)

    def beyond_s(step: LiveStep) -> float:
        """Seconds of a step that neither the profile nor the scheduler explains."""
        shape, took_s = step.sample
        plain_s = model.predict_shape_s(replace(shape, spec_steps=0))
        return took_s - scheduling_s(step, scheduling) - plain_s

    if served.system.trees:
        fixed_s, token_s = line([(step.shape.tokens, beyond_s(step)) for step in live])
        found = replace(found, step_time=model.besides(fixed_s, token_s))
        found = _with_draft(found, *draft_of_trees(live))
    elif served.system.drafts:
        steps = [step for step in live if step.shape.spec_steps]
        causes = np.array([(step.shape.spec_steps, step.shape.tokens, 1.0) for step in steps])
        pass_s, token_s, fixed_s = map(float, nnls(causes, np.array([*map(beyond_s, steps)])))
        found = replace(found, step_time=model.besides(fixed_s))
        found = _with_draft(found, pass_s, token_s)
    else:
        # A profile has few shapes; live steps have those of the traffic. Their level is left out.
        for record in records:
            steps_s = compared(record.steps, found, scheduling)
            drift = Drift.of(steps_s)
            samples += [
                (step.shape, actual_s / drift.at(ended_s))
                for step, (ended_s, _, actual_s) in zip(record.steps, steps_s, strict=True)
            ]
        found = replace(found, step_time=fit(samples).model)
    errors = misfit(records, found, scheduling)
    return Told(found, hardware.step_time, scheduling, gap_s(live), errors)


def delivered_s(records: Sequence[Record]) -> float:
    """Typical time that a request takes from the client to an engine."""
    found = [seconds for record in records for seconds in record.deliveries_s]
    return statistics.median(found) if found else 0.0


def with_drift(told: Told, runs: Sequence[Sequence[Record]], later_s: Sequence[float]) -> Told:
    """The same, and how fast the machine was while the runs lasted.

    Args:
        runs: records of each engine of each run.
        later_s: what to add to the machine's time in a run, for the simulation's time.
    """
    expected = told.hardware, told.scheduling
    engines = [
        Record([
            step._replace(ended_s=step.ended_s + add_s)
            for run, add_s in zip(runs, later_s, strict=True)
            for step in run[number].steps
        ])
        for number in range(len(runs[0]))
    ]  # fmt: skip
    drifts = tuple(Drift.of(compared(engine.steps, *expected)) for engine in engines)
    return replace(told, errors=misfit(engines, *expected, drifts), drifts=drifts)


def _with_draft(hardware: Hardware, pass_s: float, token_s: float) -> Hardware:
    hardware = hardware.with_draft_step(pass_s)
    return replace(hardware, draft=Draft("the built-in draft", token_s))


def bias(steps: Sequence[LiveStep], told: Told) -> float:
    """The time of live steps over what the simulator would charge for them, errors left out."""
    charges_s = [charged_s(s, told.hardware) + scheduling_s(s, told.scheduling) for s in steps]
    return sum(step.sample[1] for step in steps) / sum(charges_s)


def acceptance(records: Sequence[Record]) -> dict[str, float]:
    """Application -> share of the drafted tokens that were right, of those that were looked at."""
    tried, accepted = defaultdict[str, int](int), defaultdict[str, int](int)
    for record in records:
        for name, count in record.tried.items():
            tried[name] += count
            accepted[name] += record.accepted[name]
    return {name: accepted[name] / count for name, count in tried.items() if count}


@dataclass(frozen=True)
class Task:
    """One simulation of all runs of a system, one after the other, as the engine served them.

    Attributes:
        jobs: of each run.
        begins_s: when each run begins in the simulation.
        accepted: application -> share of the drafted tokens that is accepted.
    """

    condition: Condition
    served: Served
    jobs: Sequence[Sequence[Job]]
    begins_s: Sequence[float]
    accepted: Mapping[str, float]
    told: Told
    seed: int


def simulated(task: Task) -> list[tuple[JobMeasure, ...]]:
    """Measures of the jobs of each run but the first, which warms the scheduler up: what it has
    learnt by then about answers and step times is a part of the condition."""
    plain, told = task.served.system, task.told
    fields = {name: getattr(plain, name) for name in System.__dataclass_fields__}
    step_s, request_s = told.scheduling
    charged = Scheduled(**fields, scheduling=(step_s + told.gap_s, request_s))
    hardware = replace(
        told.hardware,
        kv_tokens=task.condition.kv_tokens,
        max_model_len=task.condition.max_model_len,
        scheduled=False,
    )
    conditions = Scattered(
        replicas=task.condition.replicas,
        acceptance=dict(task.accepted),
        seed=task.seed,
        errors=told.errors,
        profile=told.profile,
        drifts=told.drifts,
    )
    jobs = [
        replace(job, arrival_s=job.arrival_s + begin_s)
        for run, begin_s in zip(task.jobs, task.begins_s, strict=True)
        for job in run
    ]
    measures = iter(map(measure_job, simulate(jobs, charged, hardware, conditions).results))
    return [tuple(itertools.islice(measures, len(run))) for run in task.jobs][1:]


def begins_s(begun_s: Sequence[float]) -> list[float]:
    """When runs begin in a simulation that began on the machine's clock at these times."""
    return [at_s - begun_s[0] + APART_S * number for number, at_s in enumerate(begun_s)]
