# SPDX-License-Identifier: Apache-2.0
"""core/speculation/draft_shape.py: what the trees of a draft model are typically like."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_slo.core.speculation.draft_shape import DraftShape


def observe(shape: DraftShape, chances: np.ndarray, depth: int, width: int) -> None:
    """Learn from n trees: (n, depth * width) path probabilities, layer by layer."""
    count, size = len(chances), depth * width
    depths = np.tile(np.repeat(np.arange(1, depth + 1), width), count)
    shape.observe_nodes(chances.ravel(), depths, np.arange(0, count * size + 1, size))


def deep() -> DraftShape:
    """After many trees whose best path is accepted at 0.8, 0.64, ..., the second at 0.1."""
    depths = DraftShape(np.empty((6, 2)))
    tree = np.stack([0.8 ** np.arange(1, 7), np.full(6, 0.1)], axis=1)
    for _ in range(50):
        observe(depths, np.tile(tree.ravel(), (100, 1)), 6, 2)
    return depths


def test_what_was_seen_is_typical() -> None:
    assert deep().typical[:, 0] == pytest.approx(0.8 ** np.arange(1, 7), rel=1e-3)


def test_a_shallower_tree_leaves_how_the_deeper_go_on() -> None:
    depths = deep()
    before = depths.typical[1:].copy()
    observe(depths, np.full((10, 4), 0.5), 2, 2)
    after = depths.typical[1:]
    assert after[0, 0] < before[0, 0]
    assert after[1:] / after[0, 0] == pytest.approx(before[1:] / before[0, 0])


def test_a_tree_of_which_nothing_is_hoped_does_not_lift_the_deeper() -> None:
    depths = DraftShape(np.empty((4, 1)))
    observe(depths, np.full((1000, 4), 0.001), 4, 1)
    observe(depths, np.full((1000, 2), 0.9), 2, 1)
    assert (depths.typical[2:] < 0.02).all()
