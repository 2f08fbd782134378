# SPDX-License-Identifier: Apache-2.0
"""How many requests admission refuses although some schedule would keep every objective.

The oracle knows nothing of budgets, tiers or rates: it tries the steps that an engine could make,
one after the other, on small cases. So it finds what the program loses by being careful.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from vllm_slo.core.admission.program import Capacity, plan_admission
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand

STEP, TOKEN, MOST = 2, 1, 6
"""Time units of a step, and of each of its tokens, of which there are so many at the most."""
WINDOW = 3
"""Tokens over which a TPOT is judged."""
MOST_STATES = 3000
"""Of one search; beyond it a case is left out."""
ENGINE = StepTimeModel(((0.0, 0.0, 0.0), (float(TOKEN), 0.0, float(STEP))), max_tokens=MOST)
CAPACITY = Capacity(blocks=100.0, seats=100, max_step_tokens=MOST)


@dataclass(frozen=True)
class Job:
    """A request. Times are whole units; ``due`` is the end of its prompt, or of its open window.

    ``left`` counts tokens of its prompt, or, once it decodes, of its open window.
    """

    tpot: int
    left: int
    due: int
    decoding: bool

    def served(self, tokens: int, end: int) -> Job | None:
        """The request after a step that ends then; None if it has missed an objective."""
        left = self.left - tokens
        if left == 0:
            return (
                None if end > self.due else Job(self.tpot, WINDOW, end + WINDOW * self.tpot, True)
            )
        return None if end >= self.due else replace(self, left=left)


def grants(jobs: tuple[Job, ...]) -> Iterator[tuple[int, ...]]:
    """What a step may give each request, the fullest steps first."""
    choices = [range(2) if job.decoding else range(min(job.left, MOST) + 1) for job in jobs]
    fitting = [grant for grant in product(*choices) if sum(grant) <= MOST]
    return iter(sorted(fitting, key=sum, reverse=True))


def is_hopeless(now: int, jobs: tuple[Job, ...]) -> bool:
    """Whether not even full steps can do in time what is due."""
    tokens = 0
    for job in sorted(jobs, key=lambda job: job.due):
        tokens += job.left
        if now + STEP * math.ceil(tokens / MOST) + TOKEN * tokens > job.due:
            return True
    return False


def sustainable(jobs: tuple[Job, ...]) -> bool:
    """Whether all can decode together for ever: a step gives each request one token at the most."""
    return STEP / min(job.tpot for job in jobs) + sum(TOKEN / job.tpot for job in jobs) <= 1.0


def can_be_served(jobs: tuple[Job, ...]) -> bool | None:
    """Whether some schedule keeps every objective until each request has decoded for a window;
    None: that takes too long to find out."""
    until = max(job.due + (0 if job.decoding else WINDOW * job.tpot) for job in jobs)
    seen: set[tuple[int, tuple[Job, ...]]] = set()

    def search(now: int, jobs: tuple[Job, ...]) -> bool:
        if now >= until:
            return True
        if (now, jobs) in seen or len(seen) > MOST_STATES or is_hopeless(now, jobs):
            return False
        seen.add((now, jobs))
        for grant in grants(jobs):
            end = now + (STEP + TOKEN * sum(grant) if any(grant) else 1)
            after = [job.served(tokens, end) for job, tokens in zip(jobs, grant, strict=True)]
            kept = tuple(job for job in after if job is not None)
            if len(kept) == len(jobs) and search(end, kept):
                return True
        return False

    if not sustainable(jobs):
        return False
    return search(0, jobs) or (None if len(seen) > MOST_STATES else False)


def random_jobs(rng: random.Random) -> tuple[Job, ...]:
    """Requests that decode, on schedule or up to a token ahead, perhaps one before its first token,
    and last the new one."""
    jobs = []
    for _ in range(rng.randint(0, 2)):
        tpot, left = rng.choice([8, 12, 16]), rng.randint(1, WINDOW)
        jobs.append(Job(tpot, left, left * tpot + rng.randint(0, tpot), True))
    prompts = [
        Job(rng.choice([8, 12, 16]), rng.randint(1, 10), rng.randint(4, 36), False)
        for _ in range(rng.randint(1, 2))
    ]
    return (*jobs, *prompts)


def is_admitted(jobs: tuple[Job, ...]) -> bool:
    decoding: dict[float, int] = {}
    for job in jobs:
        if job.decoding:
            decoding[float(job.tpot)] = decoding.get(float(job.tpot), 0) + 1
    demands = [
        Demand(str(place), float(job.due), job.left, float(job.tpot), 1)
        for place, job in enumerate(jobs)
        if not job.decoding
    ]
    plan = plan_admission(0.0, demands[-1:], demands[:-1], decoding, ENGINE, CAPACITY)
    return bool(plan.admitted)


def test_refusals_that_some_schedule_could_have_served_are_bounded() -> None:
    """With this seed 151 of 372 requests are refused, and 91 of those (60%) could be served.

    The program charges a decode its full rate at once, though its window may let it wait, and it
    charges every tight instant for a step that is cut in two. The share says nothing of an engine,
    whose steps and windows hold more tokens. A program that is more careful fails this test; for
    one that refuses less the bound is to be lowered.
    """
    rng = random.Random(11)
    admitted = refused = falsely = 0
    for _ in range(400):
        jobs = random_jobs(rng)
        if jobs[:-1] and not can_be_served(jobs[:-1]):
            continue  # a promise is broken already
        servable = can_be_served(jobs)
        if servable is None:
            continue
        if is_admitted(jobs):
            admitted += 1
            assert servable, "a promise that no schedule keeps"
        else:
            refused += 1
            falsely += servable
    assert admitted > 200 and refused - falsely > 50  # the cases are neither trivial nor hopeless
    assert falsely / refused < 0.62
