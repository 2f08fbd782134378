# SPDX-License-Identifier: Apache-2.0
"""Small random cases for admission, played on the virtual engine and judged by `step_oracle`.

It also runs with older versions of the package, so it imports only what those have, too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from step_oracle import NEVER, Engine, Job, StepOracle, begun_job

UNIT_S = 1 / 64
"""Seconds of a unit: a power of two, so that times of the virtual clock are exact."""
NONE = 0
"""A TTFT or TPOT that is not asked for, in units."""


@dataclass(frozen=True)
class Ask:
    """A request: tokens of prompt and answer, TTFT and TPOT in units, and what it is worth."""

    prompt: int
    length: int
    ttft: int
    tpot: int
    value: int = 1


@dataclass(frozen=True)
class Case:
    """Requests that come in waves, the last of which is judged.

    Attributes:
        engine: of the oracle; the virtual engine is made alike.
        window: tokens of a TPOT window.
        waves: the requests of each wave. All but those of the last leave where they are refused.
        steps: how many steps pass after each wave but the last.
    """

    engine: Engine
    window: int
    waves: tuple[tuple[Ask, ...], ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """What became of the last wave of a case.

    Attributes:
        jobs: the promises before it, as they stood.
        promised: positions of the requests that were promised when they came.
        reasons: position -> why a request was refused then.
        later: positions of refused requests that were promised later.
        attained: positions of requests that kept their objectives in the end.
        broken: names of requests that were promised, before or after, and missed an objective.
        broken_later: those of them that were refused when they came.
        unsafe: whether no schedule keeps what was promised.
        false: positions of refused requests that could have been promised beside those.
        lost: value of the best set beyond that of the promised one.
        refused_value: value of all that was refused.
    """

    jobs: tuple[Job, ...]
    promised: tuple[int, ...]
    reasons: dict[int, str]
    later: tuple[int, ...]
    attained: tuple[int, ...]
    broken: tuple[str, ...]
    broken_later: tuple[str, ...]
    unsafe: bool
    false: tuple[int, ...]
    lost: int
    refused_value: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


ENGINES = (Engine(0, 2, 8), Engine(4, 2, 8), Engine(6, 0, 12), Engine(4, 3, 10))
"""Fixed costs of a step, and free tokens beside decodes, more or less of either."""


def random_case(rng: random.Random) -> Case:
    """Requests decode on schedule or a little ahead; some more come, most of them borderline."""
    engine = rng.choice(ENGINES)
    window = rng.choice([1, 1, 3])
    step = engine.step(3)
    kind = rng.random()
    if kind < 0.12:
        engine = Engine(engine.flat, engine.fixed, engine.most, rng.randint(4, 8), 4)
    elif kind < 0.2:
        engine = Engine(engine.flat, engine.fixed, engine.most, seats=rng.randint(2, 4))
    decodes = tuple(
        Ask(1, rng.randint(2, 9), NONE, rng.choice([1, 2, 3, 4]) * step)
        for _ in range(rng.randint(0, 3))
    )
    waves, steps = [decodes], [rng.randint(1, 3)]
    if rng.random() < 0.3:
        waves.append(tuple(_new(rng, step) for _ in range(rng.randint(1, 2))))
        steps.append(rng.randint(1, 2))
        waves.append(tuple(_new(rng, step) for _ in range(rng.randint(1, 2))))
    else:
        waves.append(tuple(_new(rng, step) for _ in range(rng.randint(2, 4))))
    return Case(engine, window, tuple(waves), tuple(steps))


def _new(rng: random.Random, step: int) -> Ask:
    """A request that comes while others decode."""
    prompt, length = rng.randint(1, 9), rng.choice([1, 2, 3, 4, 6])
    ttft = step + rng.randint(0, 4 * step) + prompt // 2
    tpot = rng.choice([NONE, 1, 2, 2, 3, 4])
    return Ask(prompt, length, ttft, tpot * step, rng.choice([1, 1, 1, 2]))


def virtual_engine(case: Case, config_folder: Path) -> Any:
    """The engine of a case, which believes the true time of its steps."""
    harness = import_module("vllm_slo.sim.harness")
    engine = case.engine
    model = harness.StepTimeModel(
        ((0.0, 0.0, engine.flat * UNIT_S), (UNIT_S, 0.0, engine.fixed * UNIT_S)),
        max_tokens=engine.most,
    )
    shape = harness.EngineShape(
        # vLLM keeps one block to itself.
        num_blocks=engine.blocks + 1 if engine.blocks < NEVER else 10_000,
        block_size=engine.block_size if engine.blocks < NEVER else 16,
        max_num_seqs=min(engine.seats, engine.most),
        max_num_batched_tokens=engine.most,
        max_model_len=64,
    )
    return harness.VirtualEngine(
        harness.Scheduler,
        config_folder,
        model.predict_shape_s,
        shape,
        believed=model,
        slo_config={"tpot_window_tokens": case.window, "ageing_s": 86_400.0},
    )


class _Play:
    """A case while it is played."""

    def __init__(self, case: Case, config_folder: Path) -> None:
        self.case = case
        self.engine = virtual_engine(case, config_folder)
        self.asks: dict[str, Ask] = {}
        self.requests: dict[str, Any] = {}

    def now(self) -> int:
        """Units of the virtual clock."""
        units: float = self.engine.clock.now_s / UNIT_S
        assert units == round(units)
        return round(units)

    def send(self, wave: int) -> list[str]:
        """Send the requests of a wave; returns their names."""
        slo = import_module("vllm_slo").SLO
        names = []
        last = wave == len(self.case.waves) - 1
        for number, ask in enumerate(self.case.waves[wave]):
            name = f"{wave}.{number}"
            objectives = {
                "ttft_ms": ask.ttft * UNIT_S * 1e3 if ask.ttft else None,
                "tpot_ms": ask.tpot * UNIT_S * 1e3 if ask.tpot else None,
                "value": float(ask.value),
                "expected_output_tokens": ask.length,
                "on_unattainable": "best_effort" if last else "decline",
            }
            asked = {key: value for key, value in objectives.items() if value is not None}
            self.requests[name] = self.engine.add(name, ask.prompt, ask.length, slo(**asked))
            self.asks[name] = ask
            names.append(name)
        return names

    def standing(self, name: str) -> Job | None:
        """A request of an earlier wave as it stands; None where it has ended."""
        outcome, ask, now = self.engine.outcomes[name], self.asks[name], self.now()
        if outcome.finish_reason is not None:
            return None
        times = [round(time_s / UNIT_S) for time_s in outcome.token_times_s]
        tpot = ask.tpot or NEVER
        if times:
            return begun_job(ask.prompt, ask.length, tpot, self.case.window, times, now)
        left = ask.prompt - self.requests[name].num_computed_tokens
        due = round(outcome.arrival_s / UNIT_S) + ask.ttft - now if ask.ttft else NEVER
        return Job(ask.prompt, left, 0, ask.length, tpot, self.case.window, due)


def play(case: Case, config_folder: Path) -> Verdict:
    """Play a case and judge what was promised and refused.

    Raises:
        TimeoutError: the oracle gave up.
    """
    game = _Play(case, config_folder)
    for wave, steps in enumerate(case.steps):
        game.send(wave)
        for _ in range(steps):
            game.engine.step()
    standing = {name: game.standing(name) for name in game.asks}
    jobs = tuple(job for job in standing.values() if job is not None)
    names = game.send(len(case.waves) - 1)
    new = [game.standing(name) for name in names]
    game.engine.run()
    reports = {name: game.engine.outcomes[name].report for name in game.asks}
    return _judged(case, jobs, [job for job in new if job is not None], names, reports)


def _judged(
    case: Case,
    jobs: tuple[Job, ...],
    new: Sequence[Job],
    names: Sequence[str],
    reports: dict[str, dict[str, Any]],
) -> Verdict:
    of = [reports[name] for name in names]
    promised = tuple(i for i, report in enumerate(of) if report["reason"] is None)
    reasons = {i: report["reason"] for i, report in enumerate(of) if report["reason"]}
    values = [ask.value for ask in case.waves[-1]]
    oracle = StepOracle(case.engine)
    best = oracle.best_sets(jobs, new)
    most = max((sum(values[i] for i in subset) for subset in best), default=0)
    given = {n: bool(r) and r["promised"] and not r.get("late") for n, r in reports.items()}
    broken = tuple(n for n, r in reports.items() if given[n] and not r["attained"])
    late = {names[i] for i in reasons}
    unsafe = not any(set(promised) <= set(subset) for subset in best)
    return Verdict(
        jobs,
        promised,
        reasons,
        tuple(i for i in reasons if given[names[i]]),
        tuple(i for i, report in enumerate(of) if report["attained"]),
        broken,
        tuple(name for name in broken if name in late),
        unsafe,
        tuple(i for i in reasons if any({*promised, i} <= set(subset) for subset in best)),
        max(most - sum(values[i] for i in promised), 0),
        sum(values[i] for i in reasons),
    )
