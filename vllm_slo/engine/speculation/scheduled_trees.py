# SPDX-License-Identifier: Apache-2.0
"""The trees that one step verifies, and what became of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_slo.core.arrays import Bools, Floats, Ints, Parents
from vllm_slo.core.speculation.calibration import ACCEPTED_NODE, outcomes


class Outcome(NamedTuple):
    """What became of some trees of a step.

    Attributes:
        expected: tokens that each tree was expected to yield, the root's included.
        depths: (K,) of all nodes of the step; 0 for a node that was not verified.
        seen: (K,) whether the target looked at the node, as its parent was accepted.
        accepted: (K,) whether it accepted the node.
    """

    expected: list[float]
    depths: Ints
    seen: Bools
    accepted: Bools


class ScheduledTrees(NamedTuple):
    """The trees that a step verifies, as flat arrays of (K,) nodes, request by request.

    Attributes:
        starts: request -> where its nodes begin.
        models: which draft model or server each node is of.
        tokens: token ids.
        parents: by index within the tree, -1 for the root.
        probabilities: the draft's, of each node given its path.
        best: whether the draft gave no sibling more.
        chances: calibrated path probabilities.
    """

    starts: dict[str, int]
    models: Ints
    tokens: Ints
    parents: Parents
    probabilities: Floats
    best: Bools
    chances: Floats

    @classmethod
    def none(cls) -> ScheduledTrees:
        """No trees."""
        tokens, floats = np.empty(0, dtype=np.int64), np.empty(0)
        return cls({}, tokens, tokens, tokens.astype(np.int32), floats, floats > 0.0, floats)

    def outcome(
        self, request_ids: Sequence[str], counts: Ints, given: Sequence[list[int]]
    ) -> Outcome:
        """Compare trees with the tokens that came of them.

        Args:
            request_ids: whose trees, n of them.
            counts: (n,) nodes that were verified; the step may have cut trees short.
            given: new tokens of each request.
        """
        starts = np.asarray([self.starts[name] for name in request_ids], dtype=np.int64)
        depths, fates = outcomes(
            starts,
            counts,
            self.tokens,
            self.parents,
            np.cumsum([0, *map(len, given)]),
            np.asarray(list(itertools.chain.from_iterable(given)), dtype=np.int64),
        )
        sums = np.cumsum(np.append(0.0, self.chances))
        expected = 1.0 + sums[starts + counts] - sums[starts]
        return Outcome(expected.tolist(), depths, fates > 0, fates == ACCEPTED_NODE)
