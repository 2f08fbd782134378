# SPDX-License-Identifier: Apache-2.0
"""core/speculation/verifying_share.py: what steps with trees take beyond their tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.speculation.verifying_share import VerifyingShare


def after(ratios: list[tuple[float, bool]]) -> float:
    """The share after such steps."""
    found = VerifyingShare()
    for ratio, has_trees in ratios:
        found.observe(ratio, has_trees=has_trees)
    return found.share()


def test_two_changes_among_two_that_show_nothing() -> None:
    """Trees, two plain steps, trees: the step with trees takes half as much again."""
    ratios = [(1.5, True), (1.5, True), (1.0, False), (1.0, False), (1.5, True)]
    assert after(ratios) == pytest.approx(0.5 * 2 / (2 + VerifyingShare.PRIOR))


def test_steps_of_one_kind_show_nothing() -> None:
    for has_trees in (False, True):
        assert after([(3.0, has_trees)] * 50) == 0.0


@given(st.floats(0.0, 1.5), st.floats(0.2, 5.0), st.integers(1, 40))
def test_the_share_is_found_whatever_is_wrong_with_the_model(
    share: float, off: float, run: int
) -> None:
    ratios = [
        (off * (1.0 + share * has_trees), has_trees)
        for _ in range(100)
        for has_trees, steps in ((True, run), (False, 2))
        for _ in range(steps)
    ]
    assert after(ratios) == pytest.approx(share, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("slower", [0.99, 1.01])
def test_a_machine_that_drifts_looks_the_same_with_trees(slower: float) -> None:
    """It becomes three times as slow, or as fast, within 110 steps; every twentieth is plain."""
    ratios = [(slower**step, step % 20 > 1) for step in range(110)]
    assert after(ratios) < 0.1


def test_noise_evens_out() -> None:
    dice = random.Random(1)
    ratios = [
        (dice.lognormvariate(0.0, 0.1) * (1.3 if step % 10 > 1 else 1.0), step % 10 > 1)
        for step in range(400)
    ]
    assert after(ratios) == pytest.approx(0.3, abs=0.1)


@given(
    st.floats(0.0, 1.0),
    st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=5),
    st.permutations(range(20)),
)
def test_steps_that_were_cold_or_held_up_are_not_believed(
    share: float, wrong: list[float], order: list[int]
) -> None:
    """Up to five of twenty steps with trees took any other time. A plain step follows each, so each
    makes two changes."""
    took = dict(zip(order, wrong, strict=False))
    ratios = [
        (ratio, has_trees)
        for place in range(20)
        for ratio, has_trees in (((1.0 + share) * took.get(place, 1.0), True), (1.0, False))
    ]
    assert after([(1.0, False), *ratios]) == pytest.approx(share)


def test_a_cold_beginning_is_forgotten_at_once() -> None:
    """The first step with trees takes four times as long. The mean of the changes would still be
    0.29 after these six."""
    trees, plain = (1.0, True), (1.0, False)
    assert after([plain, (4.0, True), *[trees] * 9, plain, trees, plain, trees, plain]) == 0.0


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_time_is_ignored(ratio: float) -> None:
    assert after([(1.0, False), (ratio, True), (1.0, False), (1.0, True)]) == 0.0
