# SPDX-License-Identifier: Apache-2.0
"""The worlds in which ways of routing are compared (``routing_help.py``): jobs, and replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_slo.sim.arrivals import draw
from vllm_slo.sim.conditions import Slowness
from vllm_slo.sim.hardware import load_hardware
from vllm_slo.sim.jobs import Job, Round, Stage
from vllm_slo.sim.scenarios import Lengths

HARDWARE = load_hardware("a100-toolllama-7b")


@dataclass(frozen=True)
class Kind:
    """One class of jobs.

    Attributes:
        share: of the jobs of its world.
        prompt, answer: tokens of each round.
        ttft: objective, in multiples of a lone request's TTFT; infinite: none.
        tpot_s: objective; infinite: none.
        rounds: of each job; every round reads the ones before.
        wait_s: between the end of a round and the next one.
    """

    name: str
    share: float
    prompt: Lengths
    answer: Lengths
    ttft: float = math.inf
    tpot_s: float = math.inf
    rounds: int = 1
    wait_s: float = 0.0


@dataclass(frozen=True)
class World:
    """Jobs and replicas.

    Attributes:
        arrivals: as `arrivals.draw` takes them.
        slowness: number of a replica -> how it is slower.
        jobs: for each replica and window.
        rate: load 1.0, jobs/s of a replica at full speed; found by `routing_help.capacity`.
    """

    kinds: Sequence[Kind]
    arrivals: str = "poisson"
    slowness: Mapping[int, Slowness] = field(default_factory=dict)
    jobs: int = 100
    rate: float = 1.0

    def speed(self, replicas: int) -> float:
        """Mean speed of the replicas at the end of a window; 1: as the hardware."""
        slow = sum(1.0 - 1.0 / one.factor for one in self.slowness.values())
        return 1.0 - slow / replicas

    def make(self, rate: float, replicas: int, seed: int) -> list[Job]:
        """A window of ``rate`` jobs/s for each replica; the rate only scales time."""
        count = self.jobs * replicas
        rng = np.random.default_rng([seed, 7])
        at = draw(self.arrivals, count=count, seed=seed).at / (rate * replicas)
        shares = [kind.share for kind in self.kinds]
        drawn = rng.choice(len(self.kinds), count, p=shares)
        return [
            _job(self.kinds[place], number, float(at_s), rng)
            for number, (place, at_s) in enumerate(zip(drawn, at, strict=True))
        ]


def _job(kind: Kind, number: int, at_s: float, rng: np.random.Generator) -> Job:
    prompts = kind.prompt.sample(rng, kind.rounds).tolist()
    answers = kind.answer.sample(rng, kind.rounds).tolist()
    rounds, context = [], 0
    for place, (drawn, answer) in enumerate(zip(prompts, answers, strict=True)):
        prompt = min(drawn, HARDWARE.max_model_len - context - answer - 1)
        if prompt < 1:
            break
        ttft_s = kind.ttft * HARDWARE.zero_load_ttft_s(prompt, context)
        wait_s = float(rng.exponential(kind.wait_s)) if place else 0.0
        rounds.append(Round(prompt, (Stage(answer, kind.tpot_s),), ttft_s, wait_s))
        context += prompt + answer
    return Job(f"{kind.name}-{number}", kind.name, at_s, tuple(rounds))


SHORT, ANSWER = Lengths(450, 250, 1200), Lengths(60, 40, 200)
CHAT = (
    Kind("tight", 0.4, SHORT, Lengths(30, 20, 100), ttft=4.0, tpot_s=0.05),
    Kind("loose", 0.45, SHORT, ANSWER, ttft=8.0, tpot_s=0.1),
    Kind("plain", 0.15, SHORT, ANSWER),
)
CODE = Lengths(847, 617, 2010, "beta", 2036)
WORLDS: Mapping[str, World] = {
    "skewed lengths": World(
        (
            Kind("tight", 0.85, Lengths(250, 150, 700), ANSWER, ttft=5.0, tpot_s=0.05),
            Kind("loose", 0.07, Lengths(5000, 800, 6800), ANSWER, ttft=4.0, tpot_s=0.1),
            Kind("plain", 0.08, Lengths(5000, 800, 6800), ANSWER),
        ),
        rate=18.0,
    ),
    "bursts": World(
        (
            Kind("tight", 0.5, CODE, Lengths(26, 20, 90), ttft=5.0, tpot_s=0.05),
            Kind("loose", 0.35, CODE, ANSWER, ttft=10.0, tpot_s=0.1),
            Kind("plain", 0.15, CODE, ANSWER),
        ),
        arrivals="azure-code",
        rate=10.4,
    ),
    "one at half speed": World(CHAT, slowness={0: Slowness(2.0)}, rate=26.7),
    "one becomes slow": World(CHAT, slowness={0: Slowness(2.5, after_s=1.0)}, rate=26.7),
    "sessions": World(
        (
            Kind("tight", 0.5, Lengths(700, 300, 1600), ANSWER, 4.0, 0.05, 4, 3.0),
            Kind("loose", 0.35, Lengths(1200, 500, 2600), ANSWER, 6.0, 0.1, 4, 3.0),
            Kind("plain", 0.15, Lengths(700, 300, 1600), ANSWER, rounds=4, wait_s=3.0),
        ),
        jobs=30,
        rate=1.26,
    ),
    "mixed classes": World(
        (
            Kind("tight", 0.3, SHORT, ANSWER, ttft=3.0, tpot_s=0.025),
            Kind("loose", 0.5, Lengths(1200, 500, 2600), Lengths(80, 50, 250), 15.0, 0.15),
            Kind("plain", 0.2, Lengths(1500, 600, 3000), Lengths(120, 60, 300)),
        ),
        rate=12.2,
    ),
}
"""Name -> world. Prompts and answers are chosen, except for ``bursts``, which has the prompts of
SLOs-Serve's coder (table 4) at the times of Azure's code requests of 2023."""
