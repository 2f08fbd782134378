# SPDX-License-Identifier: Apache-2.0
"""core/speculation/acceptance.py: expected tokens, and acceptance by class."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.speculation.acceptance import AcceptanceEstimator, expected_tokens


@pytest.mark.parametrize(("acceptance", "expected"), [(0.0, 1.0), (0.5, 1.875), (1.0, 4.0)])
def test_acc_is_the_sum_of_the_chances_to_get_so_far(acceptance: float, expected: float) -> None:
    assert expected_tokens(acceptance, 4) == pytest.approx(expected)
    assert expected_tokens(acceptance, 1) == 1.0


def feed(known: AcceptanceEstimator, slo_class: str, chance: float, steps: int) -> None:
    """Steps of four drafts each, at random."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        accepted = int(np.argmin(np.append(rng.random(4) < chance, [False])))
        known.observe(slo_class, accepted, min(accepted + 1, 4))


def test_nothing_seen_is_the_prior() -> None:
    assert AcceptanceEstimator(0.6).acceptance("chat") == pytest.approx(0.6)
    assert AcceptanceEstimator(0.6).acceptance() == pytest.approx(0.6)


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.9])
def test_trials_tell_the_chance(chance: float) -> None:
    known = AcceptanceEstimator(memory=2000.0)
    feed(known, "code", chance, 2000)
    assert known.acceptance("code") == pytest.approx(chance, abs=0.04)


def test_classes_are_told_apart_and_new_ones_are_like_the_rest() -> None:
    known = AcceptanceEstimator()
    for _ in range(20):
        feed(known, "code", 0.9, 20)
        feed(known, "chat", 0.4, 20)
    assert known.acceptance("code") > 0.8
    assert known.acceptance("chat") < 0.5
    assert 0.5 < known.acceptance("new") == known.acceptance() < 0.8
    known.observe("new", 0, 4)
    assert known.acceptance("chat") < known.acceptance("new") < known.acceptance()


def test_what_was_is_forgotten() -> None:
    known = AcceptanceEstimator(memory=200.0)
    feed(known, "code", 0.9, 500)
    feed(known, "code", 0.3, 500)
    assert known.acceptance("code") < 0.4


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 8), st.integers(0, 8))))
def test_a_chance_is_never_certain(steps: list[tuple[str, int, int]]) -> None:
    known = AcceptanceEstimator()
    for name, accepted, rejected in steps:
        known.observe(name, accepted, accepted + rejected)
        assert 0.02 <= known.acceptance(name) <= 0.98


@given(st.integers(0, 100), st.integers(1, 8))
def test_an_accepted_draft_never_lowers_the_estimate(seen: int, more: int) -> None:
    known = AcceptanceEstimator()
    for place in range(seen):
        known.observe("chat", place % 3, 2 + place % 3)
    before = known.acceptance("chat")
    known.observe("chat", more, more)
    assert known.acceptance("chat") >= before - 1e-12


def test_no_more_can_be_accepted_than_was_tried() -> None:
    with pytest.raises(ValueError, match="3 of 2 drafts"):
        AcceptanceEstimator().observe("chat", 3, 2)
