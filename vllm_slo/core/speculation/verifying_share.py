# SPDX-License-Identifier: Apache-2.0
"""What verifying trees adds to a step besides their tokens, as a share of a step without trees.

Masks, sampling at every node and copies take time, whatever the size of the trees. If every step
had trees, that would look like the time of a step, and drafts would seem to cost less than they do.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median


class VerifyingShare:
    """Estimates the share where steps with trees follow steps without, or the other way round.

    The first step after such a change is compared with the mean of the steps before it. So a
    machine that slowly becomes slower or faster looks the same with trees and without. The estimate
    is the median of these comparisons. So a step that is held up does not count, nor does the first
    step with trees, which may take several times as long as the next ones.
    """

    PRIOR = 2
    """Changes that are taken to have shown nothing before any was seen. Few, as plain steps are
    rare where drafts pay. A convention, not measured."""
    REMEMBERED = 32
    """Changes of which the median is taken, the last ones. A convention, not measured."""
    RUN = 16
    """Steps of the mean that a step is compared with, about. A convention, not measured."""

    def __init__(self) -> None:
        self._has_trees = False
        self._run = 0  # steps since the last change
        self._mean = 0.0  # of these
        self._changes = deque([0.0] * self.PRIOR, maxlen=self.REMEMBERED)

    def observe(self, ratio: float, *, has_trees: bool) -> None:
        """Learn from a step that computed no prompts.

        Args:
            ratio: its time over what its tokens are expected to take. Whatever is wrong with that
                is the same with trees and without. An impossible one is ignored.
            has_trees: whether it verified trees.
        """
        if not 0.0 < ratio < math.inf:
            return
        if self._run and has_trees != self._has_trees:
            trees, plain = (ratio, self._mean) if has_trees else (self._mean, ratio)
            self._changes.append(trees / plain - 1.0)
            self._run = 0
        self._has_trees = has_trees
        self._run = min(self._run + 1, self.RUN)
        self._mean += (ratio - self._mean) / self._run

    def share(self) -> float:
        """The share; at least 0."""
        return max(median(self._changes), 0.0)
