# SPDX-License-Identifier: Apache-2.0
"""The trees of one step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ScheduledTrees(NamedTuple):
    """The trees that a step verifies, as flat arrays of (K,) nodes, request by request.

    Attributes:
        starts: request -> where its nodes begin.
        models: whose guesses they are.
        tokens: of the nodes.
        parents: by index within the tree, -1 for the root.
        probabilities: the draft's, of each node given its path.
        best: whether the draft gave no sibling more.
        chances: calibrated path probabilities.
    """

    starts: dict[str, int]
    models: Ints
    tokens: Ints
    parents: NDArray[np.int32]
    probabilities: Floats
    best: NDArray[np.bool_]
    chances: Floats

    @classmethod
    def none(cls) -> ScheduledTrees:
        """No trees."""
        tokens, floats = np.empty(0, dtype=np.int64), np.empty(0)
        return cls({}, tokens, tokens, tokens.astype(np.int32), floats, floats > 0.0, floats)
