# SPDX-License-Identifier: Apache-2.0
"""Simulated rounds of ``proportional_fairness.py``: worlds, systems in them, and the optimum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

from vllm_slo.core.speculation.proportional_fairness import (
    GradientScheduler,
    verify_budget,
)
from vllm_slo.core.speculation.tree_budget import node_floor
from vllm_slo.core.step_time.model import StepTimeModel, chunk_pairs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROUNDS: Final = 600
DOMAIN_ROUNDS: Final = 150
DRIFT, DRIFT_ROUNDS = 0.08, 120
SPREAD, SURE = 2.0, 0.001
"""Of the beta distribution: 2 is even for an acceptance of a half; 0.001 is greedy sampling."""
BLOCK: Final = 10
"""Rounds that the optimum of a moving world takes together."""
TANGENTS: Final = 300
"""Of the logarithm."""
CONTEXT: Final = 500
"""Tokens of each client's text so far, where verifying is timed."""
SYSTEMS: Final = ("GoodSpeed", "Fixed-S", "Random-S")


class Setting(NamedTuple):
    """Clients, by acceptance, and the budget C of draft tokens a round."""

    clients: tuple[float, ...]
    budget: int

    @property
    def name(self) -> str:
        return f"{len(self.clients)} clients, C = {self.budget}"


class World(NamedTuple):
    """What would happen to every draft: (T, n) acceptances, (T, n, C) probabilities to be accepted,
    and (T, n) how many from the first on are accepted if all C are drafted."""

    acceptances: Floats
    ratios: Floats
    leading: Ints


@dataclass(frozen=True)
class Run:
    """One system in one world: (T, n) acceptances, draft tokens granted, tokens that came out, and
    X before each round."""

    acceptances: Floats
    granted: Ints
    tokens: Floats
    estimated: Floats | None = None

    def average(self, horizon: int) -> Floats:
        """(n,) goodput from the first round on."""
        mean: Floats = self.tokens[:horizon].mean(axis=0)
        return mean

    def hoped(self) -> Floats:
        """(n,) mu(S, a) on average: what these grants yield without luck."""
        a = self.acceptances
        mean: Floats = ((1.0 - a ** (self.granted + 1)) / (1.0 - a)).mean(axis=0)
        return mean


def make_world(setting: Setting, seed: int, moving: bool, spread: float = SPREAD) -> World:
    """One world of `ROUNDS` rounds. ``spread``: sum of the beta distribution's parameters; the
    smaller, the more often a draft is accepted surely or not at all."""
    rng = np.random.default_rng(seed)
    mean = np.tile(np.array(setting.clients), (ROUNDS, 1))
    if moving:
        for client in range(len(setting.clients)):
            change = int(rng.exponential(DOMAIN_ROUNDS))
            while change < ROUNDS:
                mean[change:, client] = rng.choice(setting.clients)
                change += 1 + int(rng.exponential(DOMAIN_ROUNDS))
        phase = rng.uniform(0.0, 2.0 * math.pi, len(setting.clients))
        turn = 2.0 * math.pi * np.arange(ROUNDS)[:, None] / DRIFT_ROUNDS
        mean = np.clip(mean + DRIFT * np.sin(turn + phase), 0.02, 0.98)
    size = (*mean.shape, setting.budget)
    shape = spread * mean[:, :, None]
    ratios = rng.beta(shape, spread - shape, size)
    leading = np.cumprod(rng.random(size) < ratios, axis=2).sum(axis=2)
    return World(mean, ratios, leading)


def given(world: World, granted: Ints) -> Run:
    """The run of draft lengths that do not depend on the results."""
    return Run(world.acceptances, granted, 1.0 + np.minimum(granted, world.leading))


def fixed(world: World, budget: int) -> Run:
    """C / n tokens each; the remainder goes to each client in turn."""
    rounds, count = world.leading.shape
    each, rest = divmod(budget, count)
    place = (np.arange(count) - rest * np.arange(rounds)[:, None]) % count
    return given(world, each + (place < rest).astype(np.int64))


def random(world: World, budget: int, seed: int) -> Run:
    """All integer vectors whose sum is at most C are equally likely."""
    rng = np.random.default_rng([seed, 1])
    rounds, count = world.leading.shape
    bars = [rng.choice(budget + count, count, replace=False) for _ in range(rounds)]
    granted = np.diff(np.sort(np.array(bars), axis=1), axis=1, prepend=-1) - 1
    return given(world, granted)


@dataclass(frozen=True)
class Verifying:
    """The time of verifying, and how GoodSpeed uses it.

    Attributes:
        model: step times.
        price: whether tokens that do not pay for their verification are left out.
        budget: whether C is what pays, up to the setting's.
    """

    model: StepTimeModel
    price: bool = False
    budget: bool = False

    def seconds(self, granted: Ints) -> Floats:
        """(T,) of the steps that verify these (T, n) draft tokens."""
        context = CONTEXT * granted.shape[1]
        return np.array(
            [
                self.model.predict_s(
                    float(row.sum() + len(row)),
                    context,
                    pairs=sum(chunk_pairs(drafts + 1, CONTEXT) for drafts in row.tolist()),
                )
                for row in granted
            ]
        )

    def price_of(self, count: int) -> float:
        """The least gain of a token: what plain decoding of all clients gains in its time."""
        plain_s = self.model.predict_s(count, CONTEXT * count)
        return node_floor(count, count, self.model, plain_s) if self.price else 0.0


def good_speed(
    world: World, budget: int, verifying: Verifying | None = None, **settings: float
) -> Run:
    """The gradient scheduler, which learns acceptances and goodputs as it goes."""
    rounds, count = world.leading.shape
    scheduler, names = GradientScheduler(**settings), [f"client {n}" for n in range(count)]
    for name in names:
        scheduler.add(name)
    granted, tokens = np.zeros((rounds, count), np.int64), np.ones((rounds, count))
    estimated = np.zeros((rounds, count))
    price, total = (verifying.price_of(count) if verifying else 0.0), budget
    for turn in range(rounds):
        estimated[turn] = [view.goodput for view in scheduler.views().values()]
        if verifying and verifying.budget:
            weights, chances = scheduler.gradient(names), scheduler.acceptances(names)
            total = verify_budget(
                weights, chances, verifying.model, budget, context_tokens=CONTEXT * count
            )
        granted[turn] = scheduler.grants(names, total, price=price)
        tokens[turn] += np.minimum(granted[turn], world.leading[turn])
        for place, name in enumerate(names):
            ratios = world.ratios[turn, place, : granted[turn, place]].tolist()
            scheduler.observe(name, ratios, int(tokens[turn, place]))
    return Run(world.acceptances, granted, tokens, estimated)


def every_run(setting: Setting, moving: bool, seeds: int) -> dict[str, list[Run]]:
    """System -> its runs, one per seed."""
    found: dict[str, list[Run]] = {name: [] for name in SYSTEMS}
    for seed in range(seeds):
        world = make_world(setting, seed, moving)
        found["GoodSpeed"].append(good_speed(world, setting.budget))
        found["Fixed-S"].append(fixed(world, setting.budget))
        found["Random-S"].append(random(world, setting.budget, seed))
    return found


def in_blocks(acceptances: Floats) -> tuple[Floats, Floats]:
    """(B, n) mean acceptances of `BLOCK` rounds each, and the (B,) shares of all rounds; one block
    if nothing moves."""
    if (acceptances == acceptances[0]).all():
        return acceptances[:1], np.ones(1)
    parts = np.split(acceptances, range(BLOCK, len(acceptances), BLOCK))
    means: Floats = np.array([part.mean(axis=0) for part in parts])
    return means, np.array([len(part) for part in parts]) / len(acceptances)


def optimal_utility(acceptances: Floats, budget: int) -> float:
    """The most that sum_i log x_i can be in the long run, (T, n) acceptances known beforehand.

    A linear program. y_bik is the share of block b in which client i's k-th draft token is
    verified: sum y_b <= C, and x_i = 1 + mean_b sum_k a_bi^k y_bik. The vertices of these y are
    whole numbers, so they are mixtures of allocations; the first tokens of a client yield most.
    u_i = log x_i is held below `TANGENTS` tangents, each less than 0.00002 above it.
    """
    blocks, shares = in_blocks(acceptances)
    count, clients = blocks.shape
    gains = shares[:, None, None] * blocks[:, :, None] ** np.arange(1, budget + 1)
    client = np.tile(np.repeat(np.arange(clients), budget), count)
    yields = sparse.coo_array((gains.ravel(), (client, np.arange(gains.size))))
    each, at = sparse.eye_array(clients), np.geomspace(1.0, budget + 1.0, TANGENTS)
    verified = sparse.kron(sparse.eye_array(count), np.ones((1, clients * budget)))
    below = sparse.kron(-1.0 / at[:, None], each), sparse.kron(np.ones((TANGENTS, 1)), each)
    result = linprog(
        np.concatenate([np.zeros(gains.size + clients), -np.ones(clients)]),
        A_eq=sparse.block_array([[-yields, each, 0.0 * each]], format="csr"),
        b_eq=np.ones(clients),
        A_ub=sparse.block_array([[None, *below], [verified, None, None]], format="csr"),
        b_ub=np.concatenate([np.repeat(np.log(at) - 1.0, clients), np.full(count, budget)]),
        bounds=[(0.0, 1.0)] * gains.size + [(None, None)] * (2 * clients),
    )
    if not result.success:
        raise SystemExit(f"no optimum: {result.message}")
    return float(-result.fun)
