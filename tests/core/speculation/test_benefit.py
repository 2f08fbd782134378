# SPDX-License-Identifier: Apache-2.0
"""core/speculation/benefit.py: what measured runs say of speculation, in numbers and in words."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.speculation.benefit import (
    SHOWN,
    Benefit,
    Effect,
    Estimate,
    Kind,
    Run,
    Way,
    benefits,
    verdict,
)

PLAIN, CHAIN_2, CHAIN_4 = Way(Kind.PLAIN), Way(Kind.CHAIN, 2), Way(Kind.CHAIN, 4)
TREE, SERVED = Way(Kind.TREE, 4), Way(Kind.SERVED)


def run_of(
    way: Way,
    requests: int = 1,
    turn: int = 0,
    *,
    steps: int = 10,
    per_step: float = 1.0,
    step_ms: float = 10.0,
    drafting_ms: float = 0.0,
) -> Run:
    """A run whose requests get ``per_step`` tokens in each step of ``step_ms``, drafting apart."""
    return Run(
        requests, turn, way, steps,
        tokens=round(steps * requests * per_step),
        verified=way.length * requests * steps,
        drafted=steps if way.length else 0,
        seconds=steps * (step_ms + drafting_ms) / 1e3,
        drafting_s=steps * drafting_ms / 1e3,
    )  # fmt: skip


def of_speeds(speeds: dict[int, float], spread: float = 0.0) -> list[Benefit]:
    """What is found where a chain of 2 has these speedups, by the number of requests."""
    return benefits(
        run
        for requests, speed in speeds.items()
        for turn, off in enumerate((-spread, 0.0, spread))
        for run in (
            run_of(PLAIN, requests, turn, step_ms=12.0),
            run_of(CHAIN_2, requests, turn, per_step=2.0, step_ms=24.0 / (speed + off)),
        )
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


def first(found: list[Benefit]) -> str:
    return " ".join(verdict(found))


def test_few_requests_are_helped_and_many_are_not() -> None:
    said = first(of_speeds({1: 1.8, 4: 1.4, 16: 1.1, 64: 0.7}))
    assert "helps up to 16 requests at once: 1.80x at 1, 1.40x at 4, 1.10x at 16." in said
    assert "From 64 requests at once on drafting costs more than it gives: 0.70x at 64" in said
    assert "noise" not in said
    assert "a token takes 12.00 ms without drafts and 6.67 ms with the best ones" in said


def test_what_the_noise_hides_is_named() -> None:
    said = first(of_speeds({1: 1.8, 4: 1.05, 16: 0.6}, spread=0.1))
    assert "helps with 1 request: 1.80x at 1." in said
    assert (
        "With 4 requests at once the difference is within the noise: 1.05x (\u00b1 0.10) at 4."
        in said
    )
    assert "From 16 requests at once on drafting costs" in said


def test_where_nothing_helps_no_tpot_is_named() -> None:
    said = first(of_speeds({1: 0.9, 4: 0.7}))
    assert "does not help here: at best it is 0.90x (\u00b1 0.01) with 1 request." in said
    assert "From 1 request on drafting costs" in said
    assert "TPOT" not in said


def test_noise_alone_is_no_verdict() -> None:
    said = first(of_speeds({1: 1.1, 4: 0.5}, spread=0.2))
    assert said.startswith(
        "No drafts were faster than none by more than the noise. From 4 requests"
    )
    assert "does not help" not in said
    assert "With 1 request the difference is within the noise: 1.10x (\u00b1 0.20) at 1." in said


def test_gaps_are_listed() -> None:
    said = first(of_speeds({1: 0.9, 4: 1.2, 16: 0.8, 64: 1.3}))
    assert "helps with 4 and 64 requests at once: 1.20x at 4, 1.30x at 64." in said
    assert "With 1 and 16 requests at once drafting costs" in said


def test_what_the_scheduler_made_of_it() -> None:
    runs = [run_of(way, 1, turn) for turn in range(2) for way in (PLAIN, CHAIN_2, SERVED)]
    said = " ".join(verdict(benefits(runs)))
    assert "The scheduler itself chooses the drafts of every step: 1.00x at 1." in said
    assert "verify drafts: 0% at 1." in said


def test_a_busy_machine_is_named() -> None:
    def said_of(step_ms: float) -> str:
        runs = [
            run_of(way, 1, turn, step_ms=step_ms if turn else 10.0)
            for turn in range(2)
            for way in (PLAIN, CHAIN_2)
        ]
        return first(benefits(runs))

    said = said_of(20.0)
    assert said.startswith("Nothing can be said with 1 request: the time of a token without drafts")
    assert "differs by \u00b1 33% from turn to turn." in said
    assert "Speculation helps" not in said
    assert "busy" not in said_of(12.0)


speeds = st.dictionaries(st.sampled_from([1, 4, 16, 64]), st.floats(0.2, 3.0), min_size=1)


@given(speeds, st.floats(0.0, 0.15))
def test_every_number_of_requests_gets_one_judgement_that_agrees_with_its_figures(
    given_speeds: dict[int, float], spread: float
) -> None:
    found = of_speeds(given_speeds, spread)
    assert [one.requests for one in found] == sorted(given_speeds)
    judged = dict.fromkeys(Effect, "")
    for sentence in verdict(found):
        for start, effect in (
            ("helps", Effect.HELPS), ("costs more", Effect.COSTS), ("noise", Effect.UNCLEAR)
        ):  # fmt: skip
            if start in sentence:
                judged[effect] = sentence
    for one in found:
        value, noise = one.best.speedup
        assert noise == pytest.approx(spread, abs=0.02 + spread / 5)
        expected = Effect.UNCLEAR if abs(value - 1.0) <= max(noise, SHOWN) else None
        expected = expected or (Effect.HELPS if value > 1.0 else Effect.COSTS)
        for effect, sentence in judged.items():
            named = re.search(rf"{value:.2f}x (\(.*?\) )?at {one.requests}\b", sentence)
            assert bool(named) == (effect == expected), (effect, sentence)
