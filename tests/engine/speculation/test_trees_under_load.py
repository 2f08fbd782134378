# SPDX-License-Identifier: Apache-2.0
"""AdaServe's mix of objectives on the virtual engine, against vLLM's chain of two drafts.

Real scheduler objects and a draft of known skill; step times as measured with the costlier twin of
the built-in target on two CPU cores, with noise. A request attains by its mean time per token, as
AdaServe judges. The chain is simulated by hand: everybody at once, two guesses each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("vllm")

from virtual_trees import TreeEngine

from vllm_slo import SLO
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.sim.harness import EngineShape

pytestmark = pytest.mark.slow

MODEL = StepTimeModel(((0.0, 0.0, 0.0), (0.0014, 0.0, 0.0275)), 1.2e-6, max_tokens=8192)
TPOT_MS = (36.0, 36.0, 36.0, 45.0, 135.0)
"""1.2, 1.5 and 4.5 times the zero-load latency, by turns."""
ANSWER = 128
MOST_STEPS = 20_000
PROMPT = 50
CHAIN_PASS_S = 0.002
SURE = (0.97, 0.85, 0.6, 0.35, 0.2)
"""How likely a draft's best guess is, from token to token."""
SHARES = (0.35, 0.25, 0.15, 0.15, 0.1)


@dataclass(frozen=True)
class Job:
    """One request."""

    name: str
    at_s: float
    tpot_ms: float


def jobs(rate: float, count: int, seed: int) -> list[Job]:
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, count)
    return [
        Job(f"r{i}", float(at_s), TPOT_MS[i % len(TPOT_MS)])
        for i, at_s in enumerate(np.cumsum(gaps))
    ]


def noise(seed: int) -> Callable[[], float]:
    """Factors of step times: some from step to step, as much that comes and goes."""
    rng, slow = np.random.default_rng(seed), 0.0

    def factor() -> float:
        nonlocal slow
        slow = 0.995 * slow + 0.006 * rng.normal()
        return math.exp(slow + 0.06 * rng.normal())

    return factor


class Noisy(TreeEngine):
    """Step times that vary, and a draft that is surer of some tokens than of others."""

    def __init__(self, seed: int) -> None:
        super().__init__(
            MODEL,
            pass_s=0.003,
            shape=EngineShape(max_model_len=512, max_num_seqs=64, block_size=32, num_blocks=2000),
            slo_config={"tpot_window_tokens": ANSWER},
            speculation={"max_width": 4, "max_nodes": 24, "draft_tokens": 256},
            seed=seed,
        )
        exact, factor = self.step_time, noise(seed)
        self.step_time = lambda shape: exact(shape) * factor()

    def _candidates(
        self, honest: float, depth: int, width: int
    ) -> tuple[list[int], list[int], list[float]]:
        return super()._candidates(float(self._rng.choice(SURE, p=SHARES)), depth, width)


def with_trees(work: list[Job], seed: int) -> dict[str, list[float]]:
    """Times of each request's tokens."""
    engine = Noisy(seed)
    for i in range(8):
        engine.add(f"warm{i}", PROMPT, 60, SLO(tpot_ms=36.0))
    engine.run()
    begun_s, left = engine.clock.now_s, list(work)
    while left or engine.busy:
        while left and begun_s + left[0].at_s <= engine.clock.now_s:
            job = left.pop(0)
            engine.add(job.name, PROMPT, ANSWER, SLO(tpot_ms=job.tpot_ms))
        if engine.scheduler.has_requests():
            engine.step()
            assert len(engine.history) < MOST_STEPS, "nothing moves"
        else:
            engine.wait_until(begun_s + left[0].at_s)
    return {job.name: engine.outcomes[job.name].token_times_s for job in work}


def with_a_chain(work: list[Job], seed: int, drafts: int = 2) -> dict[str, list[float]]:
    rng, factor = np.random.default_rng(seed), noise(seed)
    times: dict[str, list[float]] = {job.name: [] for job in work}
    left, running, now_s = list(work), [], 0.0
    while left or running:
        if not running:
            now_s = max(now_s, left[0].at_s)
        new = [job.name for job in left if job.at_s <= now_s]
        left = left[len(new) :]
        context = sum(PROMPT + len(times[name]) for name in running)
        tokens = len(running) * (1 + drafts) + PROMPT * len(new)
        now_s += (MODEL.predict_s(tokens, context) + drafts * CHAIN_PASS_S) * factor()
        for name in running:
            given = 1
            while given <= drafts and rng.random() < rng.choice(SURE, p=SHARES):
                given += 1
            times[name] += [now_s] * min(given, ANSWER - len(times[name]))
        for name in new:
            times[name].append(now_s)
        running = [name for name in [*running, *new] if len(times[name]) < ANSWER]
    return times


def attained(work: list[Job], times: dict[str, list[float]]) -> int:
    paces = {name: (seen[-1] - seen[0]) / (ANSWER - 1) for name, seen in times.items()}
    return sum(1e3 * paces[job.name] <= job.tpot_ms for job in work)


@pytest.mark.parametrize(("rate", "more"), [(1.0, -2), (2.4, 25), (3.2, 45)])
def test_objectives_are_kept_where_a_chain_breaks_them(rate: float, more: int) -> None:
    """Of two times fifty; at 1 request/s there is room for everybody."""
    trees = chain = 0
    for seed in (1, 2):
        work = jobs(rate, 50, seed)
        trees += attained(work, with_trees(work, seed))
        chain += attained(work, with_a_chain(work, seed))
    assert trees >= 92
    assert trees >= chain + more, chain


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_everybody_gets_an_answer_far_above_capacity(seed: int) -> None:
    work = jobs(8.0, 60, seed)
    times = with_trees(work, seed)
    assert all(len(times[job.name]) == ANSWER for job in work)
