# SPDX-License-Identifier: Apache-2.0
"""The prediction of all chains in one compiled call, against plain Python that takes its time."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from vllm_slo.core.speculation.chain_forecast import ChainForecasts, DraftLoad
from vllm_slo.core.step_time.model import StepTimeModel

TARGET = StepTimeModel(((0.0, 0.0, 0.040), (0.001, 0.0, 0.030)), kv_s=1e-6, max_tokens=8192)
DEPTH = 6


def learnt(models: int, batch: int, seed: int) -> ChainForecasts:
    """Forecasts of a pool of which something was seen."""
    dice, forecasts = random.Random(seed), ChainForecasts(models, DEPTH, 1, 0.0, 1 << 30)
    for model, (times, shape) in enumerate(zip(forecasts.times, forecasts.shapes, strict=True)):
        each_s = 0.001 * 4**model * dice.uniform(0.5, 2.0)
        for size in (1, 4, 32, 256):
            for _ in range(3):
                times.observe(size, each_s * (1.0 + 0.01 * size))
        for _ in range(dice.choice([0, 40])):
            chances = np.cumprod(np.array([dice.uniform(0.3, 0.95) for _ in range(DEPTH)]))
            shape.observe_nodes(chances, np.arange(1, DEPTH + 1), np.array([0, DEPTH]))
        for other in range(model + 1, models + 1):
            forecasts.edges.observe_acceptance(model, other, 100, dice.randrange(101))
    return forecasts


def raised(paths: list[float], odds: float) -> list[float]:
    """Path probabilities if the odds of each guess after the one before it are ``odds`` times as
    high."""
    result, above, now = [], 1.0, 1.0
    for path in paths:
        share = min(path / above, 0.99)
        now *= share * odds / (1.0 - share + share * odds)
        result.append(now)
        above = path
    return result


def slow(forecasts: ChainForecasts, load: DraftLoad, odds: float, trees: int) -> list[float]:
    """T_eff of each chain if ``trees`` of the requests have trees."""
    found = [TARGET.predict_s(load.active, load.context) if not load.min_depth else math.inf]
    for chain in forecasts.chains[1:]:
        if not all(forecasts.available[model] for model in chain):
            found.append(math.inf)
            continue
        paths = raised(forecasts.shapes[chain[-1]].typical[:, 0].tolist(), odds)
        if len(chain) == 1:
            times = forecasts.times[chain[0]]
            first_s = times.pass_s(load.active)
            drafting_s = [first_s + k * times.pass_s(load.active) for k in range(DEPTH)]
        else:
            drafting_s = forecasts.drafting_s(chain, load.active, 1).tolist()
        best_s = math.inf
        for depth in range(max(load.min_depth, 1), load.deepest + 1):
            for nodes in range(1, depth + 1):
                step_s = TARGET.predict_s(load.active + trees * nodes, load.context)
                tokens = 1.0 + sum(paths[:nodes])
                best_s = min(best_s, (step_s + drafting_s[depth - 1]) / tokens)
        found.append(best_s)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("models", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 16, 64])
def test_all_chains_are_predicted_as_one_by_one(models: int, batch: int, seed: int) -> None:
    forecasts = learnt(models, batch, seed)
    load = DraftLoad(batch, 100 * batch, DEPTH, behind=1, min_depth=seed % 2 * 2)
    odds = random.Random(-seed).uniform(0.2, 5.0)
    forecast = forecasts.forecast(load, TARGET, odds)
    assert forecast.time_s == pytest.approx(slow(forecasts, load, odds, batch))
    some = forecasts.with_trees(1, forecast.drafting, load, TARGET)
    assert some.time_s == pytest.approx(slow(forecasts, load, odds, 1))
    for chain, tree, time_s in zip(forecasts.chains, forecast.trees, forecast.time_s, strict=True):
        depth, _, tokens, step_s, drafting_s, _ = tree
        if depth:
            assert time_s == pytest.approx(step_s / tokens)
            times_s = forecasts.drafting_s(chain, batch, 1)
            assert drafting_s == pytest.approx(times_s[int(depth) - 1])


def test_chains_of_a_model_that_is_out_are_never_fastest() -> None:
    forecasts = learnt(2, 1, 0)
    forecasts.drop(0)
    load = DraftLoad(1, 0, DEPTH)
    assert forecasts.forecast(load, TARGET, 1.0).time_s == pytest.approx(
        slow(forecasts, load, 1.0, 1)
    )
