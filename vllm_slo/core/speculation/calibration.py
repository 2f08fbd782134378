# SPDX-License-Identifier: Apache-2.0
"""Calibrated acceptance: how often the target accepts a node, by the draft's probability of it.

AdaServe takes the draft's own probability for a node's path probability (equation 7). A draft that
is over-confident then makes long trees look cheap. Here the share of accepted nodes among those
whose parent was accepted is learnt for each depth and draft probability. The draft's best guess
after a parent is told apart from its other guesses: a target that decodes greedily takes the
likeliest token, so it accepts the best guess far more often than another guess of the same
probability. Without the difference chains would look no better than bushes.

For each depth and kind of guess the draft's probabilities q are sorted into bins of equal width in
logit(q). The bins' mean q and accepted share, made monotone, are the knots of a line in logit(q)
and logit(share), which continues with slope 1 beyond the outermost knots. Each bin begins with a
few imagined observations that agree with the depth above; at the first depth they agree with q. So
a calibration without data changes nothing, and a depth that was hardly seen borrows from the one
above.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from vllm_slo.core.arrays import Bools, Floats, Floats3D, Ints, Marks, Parents
from vllm_slo.core.jit import jit

SMALLEST_Q = 1e-9
"""Draft probabilities are kept this far from 0 and 1; NaN counts as 0."""
OUTER_LOGIT = math.log(999.0)
"""The inner edges of the bins spread over q = 0.001 .. 0.999; the outermost bins are unbounded."""

COUNT, DRAFT, ACCEPTED = 0, 1, 2
"""Sums of a bin: observations, their q, how many were accepted."""


def _logits(q: Floats) -> Floats:
    """log(q / (1 - q)), finite for any ``q``."""
    kept = np.minimum(np.fmax(q, SMALLEST_Q), 1.0 - SMALLEST_Q)
    result: Floats = np.log(kept / (1.0 - kept))
    return result


def _sigmoid(x: Floats) -> Floats:
    """The inverse of `_logits`."""
    return 1.0 / (1.0 + np.exp(-x))


@jit
def _bin(x: float, bins: int) -> int:
    """The bin of a logit."""
    place = int(np.floor((x + OUTER_LOGIT) * (bins / (2.0 * OUTER_LOGIT))))
    return min(max(place, 0), bins - 1)


@jit
def _row(depth: int, best: bool, rows: int) -> int:
    """The row of a depth and kind of guess: the best guesses of all depths come first."""
    depths = rows // 2
    return min(max(depth, 1), depths) - 1 + (0 if best else depths)


@jit
def _map(knots: Floats3D, depth: Ints, best: Bools, x: Floats) -> Floats:
    """Calibrated logits of the logits ``x``; knot i of a row lies within bin i."""
    last = knots.shape[2] - 1
    result = np.empty(len(x))
    for node in range(len(x)):
        row = _row(depth[node], best[node], knots.shape[1])
        knot, value = knots[0, row], knots[1, row]
        i = _bin(x[node], last + 1)
        if x[node] < knot[i]:
            i -= 1
        if i < 0:
            result[node] = value[0] + (x[node] - knot[0])
        elif i == last:
            result[node] = value[last] + (x[node] - knot[last])
        else:
            slope = (value[i + 1] - value[i]) / (knot[i + 1] - knot[i])
            result[node] = value[i] + (x[node] - knot[i]) * slope
    return result


@jit
def _add(sums: Floats3D, depth: Ints, best: Bools, x: Floats, q: Floats, hit: Bools) -> None:
    """Add observations to ``sums`` (3, rows, bins)."""
    for node in range(len(x)):
        row = _row(depth[node], best[node], sums.shape[1])
        b = _bin(x[node], sums.shape[2])
        sums[COUNT, row, b] += 1.0
        sums[DRAFT, row, b] += q[node]
        sums[ACCEPTED, row, b] += hit[node]


@jit
def _make_monotone(share: Floats, weight: Floats) -> None:
    """Replace each run of descending ``share`` by its mean: pool adjacent violators, in place."""
    start = np.empty(len(share), dtype=np.int64)
    mass = np.empty(len(share))
    pools = 0
    for i in range(len(share)):
        start[pools], mass[pools] = i, weight[i]
        pools += 1
        while pools > 1 and share[start[pools - 2]] > share[start[pools - 1]]:
            left, right = start[pools - 2], start[pools - 1]
            both = mass[pools - 2] + mass[pools - 1]
            share[left] = (share[left] * mass[pools - 2] + share[right] * mass[pools - 1]) / both
            pools -= 1
            mass[pools - 1] = both
    for pool in range(pools):
        end = start[pool + 1] if pool + 1 < pools else len(share)
        share[start[pool] : end] = share[start[pool]]


@jit
def _fit(sums: Floats3D, prior: float) -> Floats:
    """(2, rows, bins): mean q of each bin, and the share that the target accepts."""
    rows, bins = sums.shape[1], sums.shape[2]
    result = np.empty((2, rows, bins))
    centres = ((np.arange(bins) + 0.5) / bins * 2.0 - 1.0) * OUTER_LOGIT
    middle = 1.0 / (1.0 + np.exp(-centres))
    mean_q, share = middle, middle
    for row in range(rows):
        if row == rows // 2:
            mean_q, share = middle, middle
        weight = prior + sums[COUNT, row]
        mean_q = (prior * mean_q + sums[DRAFT, row]) / weight
        share = (prior * share + sums[ACCEPTED, row]) / weight
        _make_monotone(share, weight)
        result[0, row], result[1, row] = mean_q, share
    return result


@jit
def _kinds(offsets: Ints, parent: Ints, q: Floats) -> tuple[Ints, Bools]:
    """(N,) depth of each node, 1 for a child of the root; (N,) whether the draft gave no sibling a
    higher probability."""
    depth = np.empty(len(parent), dtype=np.int64)
    best = np.zeros(len(parent), dtype=np.bool_)
    widest = 1
    for r in range(len(offsets) - 1):
        widest = max(widest, offsets[r + 1] - offsets[r] + 1)
    leader = np.empty(widest, dtype=np.int64)  # of each parent, the root's at the end
    for r in range(len(offsets) - 1):
        start, end = offsets[r], offsets[r + 1]
        leader[: end - start + 1] = -1
        for node in range(start, end):
            above = parent[node]
            if not -1 <= above < node - start:
                raise ValueError("parent: must be -1 or an earlier node of the same request")
            depth[node] = 1 if above < 0 else depth[start + above] + 1
            place = above if above >= 0 else end - start
            if leader[place] < 0 or q[node] > q[leader[place]]:
                leader[place] = node
        for place in range(end - start + 1):
            if leader[place] >= 0:
                best[leader[place]] = True
    return depth, best


@jit
def _multiply_down(offsets: Ints, parent: Ints, probability: Floats) -> None:
    """Turn conditional into path probabilities, in place."""
    for r in range(len(offsets) - 1):
        start = offsets[r]
        for node in range(start, offsets[r + 1]):
            if parent[node] >= 0:
                probability[node] *= probability[start + parent[node]]


REACHED = 1
"""`outcomes`: the node was rejected, and its parent accepted."""
ACCEPTED_NODE = 2
"""`outcomes`: the node was accepted."""


@jit
def outcomes(
    starts: Ints,
    counts: Ints,
    tokens: Ints,
    parent: Parents,
    given_offsets: Ints,
    given: Ints,
) -> tuple[Ints, Marks]:
    """Which nodes of n verified trees the target accepted.

    Args:
        starts: (n,) where each tree's nodes begin.
        counts: (n,) how many of them were verified.
        tokens, parent: (N,) of all nodes; a parent by its index within the tree, -1: root.
        given_offsets: (n+1,) where the tokens begin that each tree yielded.
        given: (M,) those tokens: of each tree one more than accepted nodes, unless its answer
            ended.

    Returns:
        (N,) depth, 1 for a child of the root, 0 for a node that was not verified; (N,)
        `ACCEPTED_NODE`, `REACHED`, or 0 where the parent was not accepted.
    """
    depth = np.zeros(len(tokens), dtype=np.int64)
    fate = np.zeros(len(tokens), dtype=np.int8)
    for r in range(len(starts)):
        start = starts[r]
        for node in range(start, start + counts[r]):
            above = parent[node]
            depth[node] = 1 if above < 0 else depth[start + above] + 1
            place = given_offsets[r] + depth[node] - 1
            on_path = above < 0 or fate[start + above] == ACCEPTED_NODE
            if on_path and place < given_offsets[r + 1]:
                fate[node] = ACCEPTED_NODE if tokens[node] == given[place] else REACHED
    return depth, fate


class DraftCalibration:
    """Learns from accepted and rejected nodes what a draft's probabilities are worth.

    Args:
        max_depth: depths told apart; a deeper node counts as one of this depth.
        prior: imagined observations of each bin.
        half_life: observations after which an older one counts half; infinite: always in full.

    The first call of a method compiles it where numba's cache is empty, which takes some seconds.
    """

    BINS = 12
    """Bins of each depth and kind of guess."""

    def __init__(
        self, max_depth: int = 8, *, prior: float = 8.0, half_life: float = 10_000.0
    ) -> None:
        self._prior = prior
        self._half_life = half_life
        self._sums = np.zeros((3, 2 * max_depth, self.BINS))
        self._knots: Floats | None = None

    def observe(
        self, depth: ArrayLike, q: ArrayLike, accepted: ArrayLike, best: ArrayLike = True
    ) -> None:
        """Learn from nodes whose parent was accepted or is the root.

        Args:
            depth: (m,) 1 for a child of the root.
            q: (m,) the draft's probability of the node after its parent.
            accepted: (m,) whether the target accepted it.
            best: (m,) whether the draft gave no sibling a higher probability.
        """
        depths, probabilities = _indices_and_q(depth, q)
        kinds = _flags(best, probabilities, "best")
        hits = _flags(accepted, probabilities, "accepted")
        x = _logits(probabilities)
        self._sums *= 0.5 ** (len(x) / self._half_life)
        _add(self._sums, depths, kinds, x, _sigmoid(x), hits)
        self._knots = None

    def conditional(self, depth: ArrayLike, q: ArrayLike, best: ArrayLike = True) -> Floats:
        """(m,) probability in (0, 1] that the target accepts each node if it accepts the parent.

        For each depth and kind of guess it does not fall as ``q`` rises. Arguments as in `observe`.
        """
        depths, probabilities = _indices_and_q(depth, q)
        kinds = _flags(best, probabilities, "best")
        return _sigmoid(_map(self._fitted(), depths, kinds, _logits(probabilities)))

    def path_probabilities(
        self, offsets: ArrayLike, parent: ArrayLike, q: ArrayLike
    ) -> tuple[Floats, Bools]:
        """f(v) of equation 7: the product of the calibrated probabilities along the path.

        Args:
            offsets: (n+1,) where each request's nodes begin.
            parent: (N,) index of the parent within the request, smaller than the node's; -1: root.
            q: (N,) the draft's probability of each node after its parent.

        Returns:
            (N,) f(v), no child's above its parent's; (N,) whether the draft gave no sibling a
            higher probability; of equals it is the first.

        Raises ValueError if the arrays do not fit together.
        """
        starts, parents, probabilities = _trees(offsets, parent, q)
        depths, best = _kinds(starts, parents, probabilities)
        result = self.conditional(depths, probabilities, best)
        _multiply_down(starts, parents, result)
        return result, best

    def _fitted(self) -> Floats:
        """The knots (2, rows, bins), computed anew after an observation."""
        if self._knots is None:
            self._knots = _logits(_fit(self._sums, self._prior))
        return self._knots


def _indices_and_q(index: ArrayLike, q: ArrayLike) -> tuple[Ints, Floats]:
    """Two arrays of one length with the types of the compiled code."""
    indices = np.ascontiguousarray(index, dtype=np.int64)
    probabilities = np.ascontiguousarray(q, dtype=np.float64)
    if probabilities.ndim != 1 or indices.shape != probabilities.shape:
        raise ValueError(f"q: shape {probabilities.shape} differs from {indices.shape}")
    return indices, probabilities


def _trees(offsets: ArrayLike, parent: ArrayLike, q: ArrayLike) -> tuple[Ints, Ints, Floats]:
    """The arrays of some trees with the types of the compiled code."""
    starts = np.ascontiguousarray(offsets, dtype=np.int64)
    parents, probabilities = _indices_and_q(parent, q)
    spans = len(starts) > 0 and starts[0] == 0 and starts[-1] == len(probabilities)
    if not spans or np.any(np.diff(starts) < 0):
        raise ValueError(f"offsets: must ascend from 0 to {len(probabilities)}")
    return starts, parents, probabilities


def _flags(flags: ArrayLike, q: Floats, name: str) -> Bools:
    """One flag for each of ``q``; a single one stands for all."""
    array = np.asarray(flags, dtype=np.bool_)
    if array.ndim and array.shape != q.shape:
        raise ValueError(f"{name}: shape {array.shape} differs from {q.shape} of q")
    return np.array(np.broadcast_to(array, q.shape))
