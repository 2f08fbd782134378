# SPDX-License-Identifier: Apache-2.0
"""The oracle of false refusals, by cases computed by hand and by a search without any shortcut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import step_oracle
from step_oracle import NEVER, Engine, Job, StepOracle, begun_job

from vllm_slo.core.attainment import worst_window_tpot_s

PLAIN = Engine(0, 2, 8)
"""A step of n tokens takes 2 + n units."""
ROOFLINE = Engine(6, 0, 12)
"""Up to six tokens a step takes 6 units."""


def new(prompt: int, due: int, length: int = 1, tpot: int = NEVER, window: int = 1) -> Job:
    return Job(prompt, prompt, 0, length, tpot, window, due)


def decode(left: int, tpot: int, window: int = 1, prompt: int = 1) -> Job:
    """One token is out, now, and ``left`` are to come."""
    return begun_job(prompt, 1 + left, tpot, window, [0], 0)


def kept(engine: Engine, *jobs: Job) -> bool | None:
    return StepOracle(engine).feasible(jobs)


@pytest.mark.parametrize(
    ("prompt", "units"), [(1, 3), (6, 8), (8, 10), (9, 13), (17, 23)]
)  # the last: 8 + 8 + 1 tokens in three steps
def test_a_prompt_takes_full_steps(prompt: int, units: int) -> None:
    assert kept(PLAIN, new(prompt, units))
    assert not kept(PLAIN, new(prompt, units - 1))


def test_two_prompts_share_a_step_or_take_two() -> None:
    assert kept(PLAIN, new(3, 8), new(3, 8))  # 2 + 6
    assert kept(PLAIN, new(3, 5), new(3, 10))  # 2 + 3, twice
    assert not kept(PLAIN, new(3, 7), new(3, 8))
    assert not kept(PLAIN, new(3, 5), new(3, 9))


def test_tokens_that_reading_the_weights_hides_are_free() -> None:
    assert kept(ROOFLINE, decode(2, 6), new(10, 12))  # 1 + 5 tokens, twice
    assert not kept(ROOFLINE, decode(2, 6), new(11, 12))


def test_a_first_token_may_be_held_back() -> None:
    """Whenever the short request begins to decode it needs two steps in a row."""
    short, long = new(1, 20, length=2, tpot=3), new(7, 14)
    assert kept(PLAIN, short, long)  # the long one at 9, the short one at 12 and 15
    # Three steps and nine tokens take 15 units if the short one begins first.
    assert not kept(PLAIN, replace(short, due=5), long)
    assert kept(PLAIN, replace(short, due=5), replace(long, due=15))


def test_a_window_lets_a_decode_wait() -> None:
    assert kept(PLAIN, decode(3, 5, window=3), new(4, 6))  # then tokens at 9, 12 and 15
    assert not kept(PLAIN, decode(3, 5, window=3), decode(1, 5), new(4, 6))
    # Steps of two tokens of the prompt and one of the decode, which end at 5 and 10.
    assert kept(PLAIN, decode(3, 5), new(4, 10))
    assert not kept(PLAIN, decode(3, 5), new(4, 9))
    assert kept(PLAIN, decode(1, 5), new(4, 9))


def test_a_decode_ends() -> None:
    """What comes after it has the engine for itself."""
    assert kept(PLAIN, decode(1, 3), new(8, 13))
    assert not kept(PLAIN, decode(2, 3), new(8, 13))
    assert kept(PLAIN, decode(2, 3), new(8, 16))


def test_memory_is_free_when_an_answer_has_ended() -> None:
    tight = replace(PLAIN, blocks=2, block_size=4)
    begun = decode(1, 20, prompt=5)  # holds both blocks until it has ended
    assert kept(PLAIN, begun, new(4, 7))
    assert not kept(tight, begun, new(4, 8))
    assert kept(tight, begun, new(4, 9))
    assert not kept(tight, begun, new(9, 99))  # three blocks


def test_a_seat_is_free_when_an_answer_has_ended() -> None:
    tight = replace(PLAIN, seats=1)
    assert not kept(tight, decode(1, 20), new(4, 8))
    assert kept(tight, decode(1, 20), new(4, 9))


def test_the_best_sets_are_those_that_no_other_contains() -> None:
    offered = [new(6, 8), new(6, 9), new(2, 12)]
    assert StepOracle(PLAIN).best_sets([], offered) == [(0, 2), (1, 2)]
    assert StepOracle(PLAIN).best_sets([new(8, 10)], offered) == [()]


def test_a_search_that_takes_too_long_gives_up() -> None:
    jobs = [new(3, 7), new(3, 8), new(3, 40, length=4, tpot=9)]
    assert StepOracle(PLAIN, most_states=0).feasible(jobs) is None
    with pytest.raises(TimeoutError):
        StepOracle(PLAIN, most_states=0).best_sets([], jobs)


def test_a_tail_joins_the_last_window() -> None:
    assert [new(1, 9, length=n, window=3).cuts() for n in (1, 2, 4, 6, 7, 9)] == [
        [1],
        [1, 2],
        [1, 4],
        [1, 6],
        [1, 4, 7],
        [1, 4, 9],
    ]
    assert begun_job(1, 6, 5, 3, [0, 4], 5).due == 20  # five gaps of five units, from 0
    assert begun_job(1, 7, 5, 3, [0, 4, 8, 9], 9).due == 15


def test_windows_are_those_of_attainment() -> None:
    rng = random.Random(3)
    outcomes = set()
    for _ in range(500):
        window, length, tpot = rng.randint(1, 4), rng.randint(2, 10), rng.randint(2, 5)
        times = [0]
        for _ in range(length - 1):
            times.append(times[-1] + rng.randint(1, tpot + 1))
        cuts = new(1, 9, length, tpot, window).cuts()
        ends = [begun_job(1, length, tpot, window, times[:n], 0).due for n in range(1, length)]
        on_time = all(times[cut - 1] <= ends[cut - 2] for cut in cuts[1:])
        worst = worst_window_tpot_s([float(time) for time in times], window)
        assert worst is not None and on_time == (worst <= tpot)
        outcomes.add(on_time)
    assert outcomes == {True, False}


def plain_search(engine: Engine, jobs: Sequence[Job]) -> bool:
    """The same question, answered by every grant of every step, idle units included; a request is
    judged by all the times of its tokens."""

    @cache
    def search(now: int, left: tuple[int, ...], times: tuple[tuple[int, ...], ...]) -> bool:
        if all(len(t) == job.length for t, job in zip(times, jobs, strict=True)):
            return True
        if now > max(job.due + job.length * min(job.tpot, 6) for job in jobs):
            return False  # a schedule that idles less ends sooner
        if any(not t and now >= job.due for t, job in zip(times, jobs, strict=True)):
            return False
        choices = [
            range(min(n, engine.most) + 1) if n else range(1 + (len(t) < job.length))
            for n, t, job in zip(left, times, jobs, strict=True)
        ]
        for grant in product(*choices):
            if sum(grant) > engine.most or not memory_suffices(left, times, grant):
                continue
            end = now + (engine.step(sum(grant)) if any(grant) else 1)
            rest = tuple(max(n - g, 0) for n, g in zip(left, grant, strict=True))
            after = tuple(
                (*t, end) if g and not r else t for t, g, r in zip(times, grant, rest, strict=True)
            )
            ok = all(in_time(job, t) for job, t in zip(jobs, after, strict=True))
            if ok and search(end, rest, after):
                return True
        return False

    def memory_suffices(
        left: tuple[int, ...], times: tuple[tuple[int, ...], ...], grant: tuple[int, ...]
    ) -> bool:
        held = [
            job.prompt - n + max(len(t) - 1, 0) + g
            for job, n, t, g in zip(jobs, left, times, grant, strict=True)
            if len(t) < job.length
        ]
        blocks = sum(-(-tokens // engine.block_size) for tokens in held)
        return blocks <= engine.blocks and sum(map(bool, held)) <= engine.seats

    def in_time(job: Job, times: tuple[int, ...]) -> bool:
        if times and not job.emitted and times[0] > job.due:
            return False
        if len(times) < job.length or job.tpot >= NEVER:
            return True
        worst = worst_window_tpot_s([float(time) for time in times], job.window)
        return worst is None or worst <= job.tpot

    return search(0, tuple(j.left for j in jobs), tuple((0,) * j.emitted for j in jobs))


def random_jobs(rng: random.Random) -> list[Job]:
    window = rng.choice([1, 1, 2])
    jobs = [decode(rng.randint(1, 2), rng.randint(3, 7), window) for _ in range(rng.randint(0, 1))]
    for _ in range(2):
        tpot = rng.choice([NEVER, 4, 5, 6])
        jobs.append(new(rng.randint(1, 3), rng.randint(4, 11), rng.randint(1, 2), tpot, window))
    return jobs


def test_the_shortcuts_of_the_search_lose_no_schedule() -> None:
    rng = random.Random(5)
    outcomes = []
    for _ in range(200):
        engine = rng.choice([Engine(0, 2, 4), Engine(4, 2, 4), Engine(3, 0, 5)])
        if rng.random() < 0.4:
            engine = replace(engine, blocks=rng.randint(2, 5), block_size=2)
        if rng.random() < 0.2:
            engine = replace(engine, seats=2)
        jobs = random_jobs(rng)
        asked = plain_search(engine, jobs)
        assert StepOracle(engine).feasible(jobs) == asked, (engine, jobs)
        assert StepOracle(engine, every_fill=True).feasible(jobs) == asked
        outcomes.append(asked)
    assert 50 < sum(outcomes) < 150


class Forgetful(dict[Any, list[Any]]):
    """Remembers nothing."""

    def setdefault(self, key: Any, default: Any = None) -> list[Any]:
        return []


def test_what_has_failed_is_rightly_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(9)
    cases = []
    for _ in range(1000):
        engine = rng.choice([PLAIN, ROOFLINE, Engine(4, 2, 8)])
        window = rng.choice([1, 2, 3])
        jobs = [decode(rng.randint(2, 4), rng.randint(7, 12), window) for _ in range(2)]
        for _ in range(2):
            length, tpot = rng.randint(1, 3), rng.choice([NEVER, 8, 10, 12])
            jobs.append(new(rng.randint(2, 7), rng.randint(10, 26), length, tpot, window))
        cases.append((engine, jobs, StepOracle(engine).feasible(jobs)))
    monkeypatch.setattr(step_oracle, "MEMORY", Forgetful)
    for engine, jobs, found in cases:
        asked = StepOracle(engine, most_states=2000).feasible(jobs)
        assert asked is None or asked == found, (engine, jobs)
    assert 100 < sum(not found for _, _, found in cases) < 300
