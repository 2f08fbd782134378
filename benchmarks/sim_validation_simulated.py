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

from vllm_slo.core.step_time.fit import fit
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


@dataclass(frozen=True)
class Scattered(Conditions):
    """Conditions whose step times scatter as others did."""

    errors: StepErrors = StepErrors()

    def true_step_time(self, hardware: Hardware, engine: int) -> Callable[[BatchShape], float]:
        """The predicted time times an error; `BLOCK_STEPS` that followed each other are drawn
        together."""
        predict, errors = self.believed(hardware, engine).predict_shape_s, self.errors
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
            return expected_s * left[part].pop()

        return taken

    def is_known(self, engine: int) -> bool:
        """Whether step times are the believed ones."""
        return not self.errors.short


@dataclass(frozen=True, slots=True)
class Told:
    """What the simulator is told of an engine.

    Attributes:
        hardware: with its draft, if it has one.
        scheduling: as `Scheduled.scheduling`, with the time between two steps.
        errors: of its steps.
    """

    hardware: Hardware
    scheduling: Line
    errors: StepErrors


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


def scatter(profiles: Sequence[Profiled]) -> StepErrors:
    """Errors of profiles' steps, against the median of their shape."""
    found = []
    for profile in profiles:
        groups = defaultdict(list)
        keys = []
        for shape, took_s in (step.sample for step in profile.steps):
            context = round(4 * np.log2(128 * shape.requests + shape.context_tokens))
            keys.append((shape.tokens, shape.requests, context))
            groups[keys[-1]].append(took_s)
        typical = {key: statistics.median(times) for key, times in groups.items()}
        found += [
            (typical[key], step.sample[1])
            for key, step in zip(keys, profile.steps, strict=True)
            if len(groups[key]) > 2
        ]
    return StepErrors.of(found)


def misfit(steps: Sequence[LiveStep], model: StepTimeModel) -> StepErrors:
    """Errors of live steps, against their predictions."""
    return StepErrors.of(
        [(model.predict_shape_s(shape), took_s) for shape, took_s in (s.sample for s in steps)]
    )


def draft_of_trees(steps: Sequence[LiveStep]) -> Line:
    """Seconds of a pass of the draft, and of each of its tokens."""
    passes = [(float(tokens), seconds) for step in steps for tokens, seconds in step.drafting]
    return line(passes) if len(passes) > 1 else (0.0, 0.0)


def told(served: Served, hardware: Hardware, profiles: Sequence[Profiled], record: Record) -> Told:
    """What an operator knows: the profile, and what a short run on the engine took beyond it.

    Args:
        hardware: all but the step times.
        profiles: from before and after the runs.
        record: of the short run.
    """
    samples = [sample for profile in profiles for sample in profile.report.samples]
    hardware = replace(hardware, step_time=fit(samples).model)
    profiled = [step for profile in profiles for step in profile.steps]
    errors = scatter(profiles)
    scheduling = less(scheduling_line(record.steps), scheduling_line(profiled))
    model = hardware.step_time

    def beyond(step: LiveStep) -> float:
        """Seconds of a step that neither the profile nor the scheduler explains."""
        own_s = max(scheduling[0] + scheduling[1] * step.shape.requests, 0.0)
        shape, took_s = step.sample
        return took_s - own_s - model.predict_shape_s(replace(shape, spec_steps=0))

    charged = scheduling[0] + gap_s(record.steps), scheduling[1]
    if served.system.trees:
        pass_s, token_s = draft_of_trees(record.steps)
        verifies = line([(step.shape.tokens, beyond(step)) for step in record.steps])
        hardware = replace(hardware, step_time=model.besides(*verifies))
        return Told(_with_draft(hardware, pass_s, token_s), charged, errors)
    if served.system.drafts:
        steps = [step for step in record.steps if step.shape.spec_steps]
        fixed_s, token_s = line([(step.shape.tokens, beyond(step)) for step in steps])
        passes = statistics.fmean(step.shape.spec_steps for step in steps)
        return Told(_with_draft(hardware, fixed_s / passes, token_s), charged, errors)
    return Told(hardware, charged, errors)


def _with_draft(hardware: Hardware, pass_s: float, token_s: float) -> Hardware:
    hardware = hardware.with_draft_step(pass_s)
    return replace(hardware, draft=Draft("the built-in draft", token_s))


def told_live(told: Told, served: Served, records: Sequence[Record]) -> Told:
    """The same with step times that were measured live, in other runs. They hold everything."""
    steps = [step for record in records for step in record.steps]
    model = fit([step.sample for step in steps]).model
    hardware = replace(told.hardware, step_time=model)
    if served.system.trees:
        hardware = _with_draft(hardware, *draft_of_trees(steps))
    elif hardware.draft is not None:
        hardware = replace(hardware, draft=replace(hardware.draft, token_s=0.0))
    return Told(hardware, (gap_s(steps), 0.0), misfit(steps, model))


def bias(steps: Sequence[LiveStep], told: Told) -> float:
    """The time of live steps over what the simulator would have charged for them."""
    step_s, request_s = told.scheduling
    chains = told.hardware.draft is not None and not any(step.drafting for step in steps)
    token_s = told.hardware.draft.token_s if chains and told.hardware.draft else 0.0
    charged_s = sum(
        told.hardware.step_time.predict_shape_s(step.shape)
        + token_s * step.shape.tokens
        + max(step_s + request_s * step.shape.requests, 0.0)
        for step in steps
    )
    return sum(step.sample[1] + step.gap_s for step in steps) / charged_s


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
        begun_s: when each run began on the real engine.
        accepted: application -> share of the drafted tokens that is accepted.
    """

    condition: Condition
    served: Served
    jobs: Sequence[Sequence[Job]]
    begun_s: Sequence[float]
    accepted: Mapping[str, float]
    told: Told
    seed: int


def simulated(task: Task) -> list[tuple[JobMeasure, ...]]:
    """Measures of the jobs of each run but the first, which warms the scheduler up: what it has
    learnt by then about answers and step times is a part of the condition."""
    plain, told = task.served.system, task.told
    fields = {name: getattr(plain, name) for name in System.__dataclass_fields__}
    charged = Scheduled(**fields, scheduling=told.scheduling)
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
    )
    jobs = [
        replace(job, arrival_s=job.arrival_s + began_s - task.begun_s[0] + APART_S * number)
        for number, (run, began_s) in enumerate(zip(task.jobs, task.begun_s, strict=True))
        for job in run
    ]
    measures = iter(map(measure_job, simulate(jobs, charged, hardware, conditions).results))
    return [tuple(itertools.islice(measures, len(run))) for run in task.jobs][1:]
