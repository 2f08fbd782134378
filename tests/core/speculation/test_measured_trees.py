# SPDX-License-Identifier: Apache-2.0
"""core/speculation/measured_trees.py: the share of expected tokens to count on."""

from __future__ import annotations

import pytest

from vllm_slo.core.speculation.measured_trees import MeasuredTrees


def test_nothing_is_known_before_enough_was_seen() -> None:
    measured = MeasuredTrees(10, 0.95)
    for _ in range(15):
        for _ in range(5):
            measured.observe("a", 2.0, 3)
    assert measured.share() == 0.0
    for _ in range(5):
        measured.observe("a", 2.0, 3)
    assert measured.share() == pytest.approx(1.5)


def test_promises_count_on_what_nearly_all_windows_yield() -> None:
    """One window in ten yields half of what was expected."""
    for quantile, share in ((0.95, 0.5), (0.8, 1.0), (0.5, 1.0)):
        measured = MeasuredTrees(12, quantile)
        for window in range(200):
            for _ in range(6):
                measured.observe("a", 2.0, 1 if window % 10 == 0 else 2)
        assert measured.share() == pytest.approx(share)


def test_an_answer_that_ends_before_its_window_is_judged_by_what_it_has() -> None:
    """Answers of 32 tokens: first half of what was expected comes, then one and a half times as
    much. By windows of sixteen the share would be 0.5."""
    measured = MeasuredTrees(128, 0.95)
    for answer in range(64):
        for step in range(16):
            measured.observe(f"r{answer}", 2.0, 1 if step < 8 else 3)
        measured.forget(f"r{answer}")
    assert measured.share() == pytest.approx(1.0)
    assert measured.spread() == pytest.approx(0.0)


def test_a_few_tokens_of_an_answer_tell_nothing() -> None:
    measured = MeasuredTrees(128, 0.95)
    for answer in range(64):
        measured.observe(f"r{answer}", 15.0, 1)
        measured.forget(f"r{answer}")
    assert measured.share() == 0.0


@pytest.mark.parametrize("window", [128, 4096])
def test_long_windows_even_luck_out_and_are_known_before_long(window: int) -> None:
    """By turns a step yields nothing but its root and all that is expected."""
    measured = MeasuredTrees(window, 0.95)
    for step in range(16 * 64):
        measured.observe("r", 2.0, 1 if step % 2 else 3)
    assert measured.share() == pytest.approx(1.0)
    assert measured.spread() == pytest.approx(0.0)


def test_short_windows_stand_for_long_ones_until_there_are_enough() -> None:
    """Of sixteen tokens half or one and a half come, by turns; of 128 all."""
    measured, steps = MeasuredTrees(128, 0.95), 0

    def observe(windows: int) -> None:
        nonlocal steps
        for _ in range(8 * windows):
            measured.observe("r", 2.0, 1 if steps // 8 % 2 else 3)
            steps += 1

    observe(15)
    assert measured.share() == 0.0
    observe(1)
    assert (measured.share(), measured.spread()) == pytest.approx((0.5, 0.5))
    observe(16 * 8 - 16 - 1)
    assert measured.share() == pytest.approx(0.5)
    observe(1)
    assert (measured.share(), measured.spread()) == pytest.approx((1.0, 0.0))


def test_windows_are_told_apart_by_request() -> None:
    measured = MeasuredTrees(4, 0.5)
    for _ in range(64):
        measured.observe("slow", 2.0, 1)
        measured.observe("fast", 4.0, 8)
    assert measured.share() == 2.0  # of three windows two are the fast one's
    measured.forget("slow")
    measured.forget("never seen")


def test_the_spread_is_that_of_windows_and_follows_new_ones() -> None:
    """Windows yield 0.5 and 1.5 of what was expected, by turns; then all yield 1.0."""
    measured = MeasuredTrees(4, 0.5)
    assert measured.spread() == 0.0
    for window in range(100):
        measured.observe("a", 4.0, 6 if window % 2 else 2)
    assert measured.spread() == pytest.approx(0.5)
    for _ in range(1000):
        measured.observe("a", 4.0, 4)
    assert measured.spread() == 0.0
