# SPDX-License-Identifier: Apache-2.0
"""core/speculation/benefit.py: what measured runs say of speculation, in numbers and in words."""

from __future__ import annotations

import pytest
from measured_runs import CHAIN_2, CHAIN_4, PLAIN, SERVED, TREE, run_of

from vllm_slo.core.speculation.benefit import (
    SHOWN,
    Effect,
    Estimate,
    benefits,
)


def test_a_worked_example() -> None:
    """4 requests, plain steps of 10 ms. A chain of 2 gets 2 tokens a step for 11 + 1 ms, so 20 / 12
    = 1.67 times as many; its 8 draft tokens make a step 1 ms longer, 0.125 ms each."""
    (found,) = benefits(
        run
        for turn in range(2)
        for run in (
            run_of(PLAIN, 4, turn),
            run_of(CHAIN_4, 4, turn, per_step=2.5, step_ms=18.0, drafting_ms=12.0),
            run_of(CHAIN_2, 4, turn, per_step=2.0, step_ms=11.0, drafting_ms=1.0),
            run_of(TREE, 4, turn, per_step=3.0, step_ms=15.0, drafting_ms=5.0),
        )
    )
    assert (found.requests, found.turns, found.served) == (4, 2, None)
    assert found.plain_s == pytest.approx((0.010, 0.0))
    assert found.plain_tokens_per_s == pytest.approx(400.0)
    assert [gain.way for gain in found.chains] == [CHAIN_2, CHAIN_4]
    best = found.best_chain
    assert best.way == CHAIN_2
    assert best.speedup.value == pytest.approx(20 / 12)
    assert best.accepted == pytest.approx(1.0)
    assert best.token_s == pytest.approx(0.006)
    assert best.drafting_s == pytest.approx(0.001)
    assert best.verify_s is not None
    assert best.verify_s.value == pytest.approx(0.000125)
    assert found.chains[1].speedup.value == pytest.approx(25 / 30)
    assert found.best.speedup.value == pytest.approx(1.67, abs=0.01)
    assert found.trees[0].speedup.value == pytest.approx(1.5)


def test_each_turn_is_compared_with_the_plain_run_of_its_own() -> None:
    """The machine is half as fast in the second turn, for both ways: the speedup has no noise."""
    runs = [
        run_of(way, 1, turn, per_step=tokens, step_ms=10.0 * (1 + turn))
        for turn in range(3)
        for way, tokens in ((PLAIN, 1.0), (CHAIN_2, 1.5))
    ]
    (found,) = benefits(runs)
    assert found.best.speedup == pytest.approx((1.5, 0.0))
    assert found.plain_s == pytest.approx((0.020, 0.010))


def test_what_was_not_measured_twice_is_left_out() -> None:
    whole = [run_of(way, 1, turn) for turn in range(2) for way in (PLAIN, CHAIN_2)]
    once = [run_of(way, 4, 0) for way in (PLAIN, CHAIN_2)]
    torn = [run_of(PLAIN, 16, turn) for turn in range(2)] + [run_of(CHAIN_2, 16, 0)]
    assert [one.requests for one in benefits(whole + once + torn)] == [1]


def test_a_run_without_verified_drafts_has_no_price_of_one() -> None:
    runs = [
        run_of(way, 1, turn) for turn in range(2) for way in (PLAIN, CHAIN_2, SERVED)
    ]  # a run as served has no length here, so it verified nothing
    (found,) = benefits(runs)
    assert found.served is not None
    assert found.served.verify_s is None
    assert found.served.drafted == 0.0
    assert found.best.way == CHAIN_2  # the scheduler's choice is no fixed draft


def test_one_bad_turn_of_seven_is_no_noise() -> None:
    assert Estimate.of([1.0, 1.1, 1.2]) == pytest.approx((1.1, 0.1))
    assert Estimate.of([1.0, 1.1, 1.2, 9.0, 1.1, 1.3, 0.1]) == pytest.approx((1.1, 0.15))


def test_noise_decides_what_is_a_difference() -> None:
    assert Effect.of(Estimate(1.30, 0.1)) is Effect.HELPS
    assert Effect.of(Estimate(1.30, 0.4)) is Effect.UNCLEAR
    assert Effect.of(Estimate(0.80, 0.1)) is Effect.COSTS
    assert Effect.of(Estimate(1.0 + SHOWN / 2, 0.0)) is Effect.UNCLEAR
    assert Effect.of(Estimate(1.0 - SHOWN / 2, 0.0)) is Effect.UNCLEAR
