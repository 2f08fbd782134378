# SPDX-License-Identifier: Apache-2.0
"""What the trees of one draft model are typically like."""

from __future__ import annotations

import numpy as np

from vllm_slo.core.arrays import Floats, Floats2D, Ints
from vllm_slo.core.jit import jit

FIRST_GUESS = 0.6
"""Acceptance of the best guess at each depth before the first tree."""
SHORTEST = 1e-9


@jit
def _learn_layers(
    typical: Floats2D,
    weights: Floats2D,
    guessed: Floats,
    memory: float,
    chances: Floats,
    depths: Ints,
    offsets: Ints,
) -> int:
    """Update means by trees; the depth of the deepest tree.

    Args:
        typical: (depths, width) mean path probabilities, updated.
        weights: (depths, width) trees that each mean counts for, updated.
        guessed: (depths,) share of the first guess in the best node's mean, updated.
        memory: most that a weight becomes.
        chances, depths, offsets: as in `DraftShape.observe_nodes`.
    """
    most, width = typical.shape
    sums, trees = np.zeros((most, width)), np.zeros(most)
    ranks = np.zeros(most, dtype=np.int64)  # the widest layer of each depth
    layer, filled = np.zeros((most, width)), np.zeros(most, dtype=np.int64)
    for r in range(len(offsets) - 1):
        filled[:] = 0
        for node in range(offsets[r], offsets[r + 1]):
            depth, place = depths[node] - 1, 0
            if not 0 <= depth < most:
                continue
            count = filled[depth]
            for rank in range(count):
                place += layer[depth, rank] >= chances[node]
            for rank in range(min(count, width - 1), place, -1):
                layer[depth, rank] = layer[depth, rank - 1]
            if place < width:
                layer[depth, place] = chances[node]
                filled[depth] = min(count + 1, width)
        for depth in range(most):
            trees[depth] += filled[depth] > 0
            ranks[depth] = max(ranks[depth], filled[depth])
            for rank in range(filled[depth]):
                sums[depth, rank] += layer[depth, rank]
    deepest = 0
    for depth in range(most):
        for rank in range(ranks[depth]):
            deepest = depth + 1
            total = weights[depth, rank] + trees[depth]
            if rank == 0:
                guessed[depth] *= weights[depth, rank] / total
            total_chance = typical[depth, rank] * weights[depth, rank] + sums[depth, rank]
            typical[depth, rank], weights[depth, rank] = total_chance / total, min(total, memory)
    return deepest


class DraftShape:
    """The typical path probabilities of the nodes of one model's trees.

    Where trees are shallower than before, the ratios between the depths below them are kept. Depths
    that were never drafted continue with the ratio of the last two that were.

    Args:
        chances: (depths, width) the means, of the largest tree.
        memory: trees after which an old one counts for 1/e.

    Attributes:
        is_guess: whether the first guess still counts at depth 1.
    """

    PRIOR = 16.0
    """Trees that the first guess counts for. A convention, not measured."""
    NEGLIGIBLE = 0.02
    """Share of the first guess in a mean below which it is no longer updated."""
    HARDLY = 0.003
    """Change of the first guess that is too small for an update."""

    def __init__(self, chances: Floats, memory: float = 200.0) -> None:
        self._chances = chances
        self._chances[:] = 0.0
        self._weights = np.full(chances.shape, self.PRIOR)
        self._assumed = 0.0
        self._guess: Floats = np.zeros(len(chances))
        self._guessed = np.ones(len(chances))
        self._memory = memory
        self._deepest = 0
        self.is_guess = True
        self.assume(FIRST_GUESS)

    @property
    def typical(self) -> Floats:
        """(depths, width) mean path probabilities by depth and rank; shared, not to be changed."""
        return self._chances

    def assume(self, chance: float) -> None:
        """Make ``chance`` the first guess of the best node's acceptance at each depth. It replaces
        the earlier first guess in the means; a change below `HARDLY` is ignored."""
        if abs(chance - self._assumed) < self.HARDLY:
            return
        self._assumed = chance
        guess: Floats = np.power(chance, np.arange(1.0, len(self._chances) + 1.0))
        self._chances[:, 0] += self._guessed * (guess - self._guess)
        self._guess = guess

    def observe_nodes(self, chances: Floats, depths: Ints, offsets: Ints) -> None:
        """Learn from n trees of any form.

        The mean of a depth is over the trees that are so deep, whose nodes of that depth are ranked
        by path probability. A rank that a tree lacks counts as 0.

        Args:
            chances: (N,) path probabilities.
            depths: (N,) of the nodes, 1 for a child of the root.
            offsets: (n+1,) where each tree's nodes begin.
        """
        before = self._chances[:, 0].copy()
        deepest = _learn_layers(
            self._chances,
            self._weights,
            self._guessed,
            self._memory,
            chances,
            depths,
            offsets,
        )
        self.is_guess = bool(self._guessed[0] > self.NEGLIGIBLE)
        if 0 < deepest < self._deepest and before[deepest - 1] > self.NEGLIGIBLE:
            self._chances[deepest:] *= self._chances[deepest - 1, 0] / before[deepest - 1]
        self._deepest = max(self._deepest, deepest)
        if 0 < self._deepest < len(self._chances):
            self._guessed[self._deepest :] = 0.0
            last = self._chances[self._deepest - 1]
            above = self._chances[self._deepest - 2, 0] if self._deepest > 1 else 1.0
            goes_on = min(last[0] / max(above, SHORTEST), 1.0)
            beyond = np.arange(1, len(self._chances) - self._deepest + 1)
            self._chances[self._deepest :] = last * goes_on ** beyond[:, None]
