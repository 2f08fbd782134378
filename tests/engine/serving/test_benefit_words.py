# SPDX-License-Identifier: Apache-2.0
"""engine/serving/benefit_words.py: what is said of measured drafts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_runs import CHAIN_2, PLAIN, SERVED, of_speeds, run_of

from vllm_slo.core.speculation.benefit import SHOWN, Benefit, Effect, benefits
from vllm_slo.engine.serving.benefit_words import verdict


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
