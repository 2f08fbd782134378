# SPDX-License-Identifier: Apache-2.0
"""What a draft's probabilities are worth: how often the target accepts a node, by what was said.

AdaServe approximates a node's path probability by the draft's own (equation 7), which is as good as
the draft is honest; one that is over-confident makes long trees look cheap. Here the share of
accepted nodes, given that the parent was accepted, is learnt for each depth and draft probability,
for the draft's best guess after a parent and for its other guesses apart: a target that decodes
greedily takes what is likeliest, so the best guess is accepted far more often than another of the
same probability, and chains would look no better than bushes without the difference.

For each depth and kind of guess the draft's probabilities q are sorted into bins of equal width in
logit(q). The bins' mean q and accepted share, made monotone, are the knots of a line in logit(q)
and logit(share) that goes on with slope 1 beyond the outermost. A bin begins with a few
observations that say what the depth above says of it, and the first depth with such as say q:
nothing is changed before there is data, and a depth that was hardly seen borrows from the one
above.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_slo.core.jit import jit

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

SMALLEST_Q = 1e-9
"""Draft probabilities are kept this far from 0 and 1; NaN counts as 0."""
OUTER_LOGIT = math.log(999.0)
"""The inner edges of the bins spread over q = 0.001 .. 0.999; the outermost bins have no end."""

COUNT, SAID, FORETOLD, ACCEPTED = 0, 1, 2, 3
"""Sums of a bin: observations, their q, what the calibration made of it, how many were accepted."""


class Reliability(NamedTuple):
    """One point of a reliability plot.

    Attributes:
        depth: of the nodes; the deepest also stands for those below it.
        best: whether they are the draft's best guesses after their parents.
        said: mean draft probability.
        accepted: share of them that the target accepted, their parents being accepted.
        observations: how many they are, those long past counting less.
    """

    depth: int
    best: bool
    said: float
    accepted: float
    observations: float


class CalibrationError(NamedTuple):
    """Expected calibration error: mean |probability - accepted share| over bins by count.

    Attributes:
        before: of the draft's probabilities.
        after: of the calibrated ones, each as given before its outcome was known.
    """

    before: float
    after: float


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
    """Where a depth and kind of guess lies: the best guesses of all depths, then the others."""
    depths = rows // 2
    return min(max(depth, 1), depths) - 1 + (0 if best else depths)


@jit
def _map(knots: Floats, depth: Ints, best: Bools, x: Floats) -> Floats:
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
def _add(
    sums: Floats, depth: Ints, best: Bools, x: Floats, q: Floats, foretold: Floats, hit: Bools
) -> None:
    """Add observations to ``sums`` (4, rows, bins)."""
    for node in range(len(x)):
        row = _row(depth[node], best[node], sums.shape[1])
        b = _bin(x[node], sums.shape[2])
        sums[COUNT, row, b] += 1.0
        sums[SAID, row, b] += q[node]
        sums[FORETOLD, row, b] += foretold[node]
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
def _fit(sums: Floats, prior: float) -> Floats:
    """(2, rows, bins): mean q of each bin and the share that the target accepts."""
    rows, bins = sums.shape[1], sums.shape[2]
    result = np.empty((2, rows, bins))
    centres = ((np.arange(bins) + 0.5) / bins * 2.0 - 1.0) * OUTER_LOGIT
    middle = 1.0 / (1.0 + np.exp(-centres))
    said, share = middle, middle
    for row in range(rows):
        if row == rows // 2:
            said, share = middle, middle
        weight = prior + sums[COUNT, row]
        said = (prior * said + sums[SAID, row]) / weight
        share = (prior * share + sums[ACCEPTED, row]) / weight
        _make_monotone(share, weight)
        result[0, row], result[1, row] = said, share
    return result


@jit
def _kinds(offsets: Ints, parent: Ints, q: Floats) -> tuple[Ints, Bools]:
    """Of each node of the requests' trees: its depth, 1 for a child of the root, and whether it is
    the best guess after its parent."""
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
"""`outcomes`: a node whose parent was accepted, but not the node."""
ACCEPTED_NODE = 2
"""`outcomes`: an accepted node."""


@jit
def outcomes(
    starts: Ints,
    counts: Ints,
    tokens: Ints,
    parent: NDArray[np.int32],
    given_offsets: Ints,
    given: Ints,
) -> tuple[Ints, NDArray[np.int8]]:
    """What became of the nodes of n trees that a step verified.

    Args:
        starts: (n,) where each tree's nodes begin.
        counts: (n,) how many of them were verified.
        tokens, parent: (N,) of all nodes; a parent by its index within the tree, -1: root.
        given_offsets: (n+1,) where the tokens begin that came out of each tree.
        given: (M,) those tokens, one more for each tree than nodes were accepted unless its answer
            ended.

    Returns:
        (N,) depth, 1 for a child of the root, 0 of what was not verified; (N,) `REACHED` where the
        parent was accepted and the node was not, `ACCEPTED_NODE` where it was, else 0.
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
    """Learns what a draft's probabilities are worth from what the target accepts.

    Args:
        max_depth: depths told apart; a deeper node counts as of this depth.
        bins: bins of a depth.
        prior: observations that the beliefs before any data are worth, in each bin.
        half_life: observations after which an observation counts half; infinite: it never fades.

    Raises ValueError naming the argument that is out of range. The first call of a method compiles
    it where numba's cache is empty, which takes some seconds.
    """

    def __init__(
        self,
        max_depth: int = 8,
        *,
        bins: int = 12,
        prior: float = 8.0,
        half_life: float = 10_000.0,
    ) -> None:
        if max_depth < 1:
            raise ValueError(f"max_depth: must be at least 1, not {max_depth}")
        if bins < 2:
            raise ValueError(f"bins: must be at least 2, not {bins}")
        if not 0.0 < prior < math.inf:
            raise ValueError(f"prior: must be positive and finite, not {prior}")
        if not half_life > 0.0:
            raise ValueError(f"half_life: must be positive, not {half_life}")
        self._prior = float(prior)
        self._half_life = half_life
        self._sums = np.zeros((4, 2 * max_depth, bins))
        self._knots: Floats | None = None

    def observe(
        self, depth: ArrayLike, q: ArrayLike, accepted: ArrayLike, best: ArrayLike = True
    ) -> None:
        """Take in nodes whose parent was accepted (or is the root).

        Args:
            depth: (m,) 1 for a child of the root.
            q: (m,) what the draft gave the node, its parent given.
            accepted: (m,) whether the target accepted it.
            best: (m,) whether the draft gave no other node after that parent more.
        """
        depths, said = _indices_and_q(depth, q)
        kinds = _flags(best, said, "best")
        outcomes = _flags(accepted, said, "accepted")
        x = _logits(said)
        foretold = _sigmoid(_map(self._fitted(), depths, kinds, x))
        self._sums *= 0.5 ** (len(x) / self._half_life)
        _add(self._sums, depths, kinds, x, _sigmoid(x), foretold, outcomes)
        self._knots = None

    def conditional(self, depth: ArrayLike, q: ArrayLike, best: ArrayLike = True) -> Floats:
        """(m,) probability that the target accepts each node if it accepts the parent.

        In (0, 1], and at any depth, among the best guesses and among the others, it does not fall
        as ``q`` rises. Arguments as in `observe`.
        """
        depths, said = _indices_and_q(depth, q)
        kinds = _flags(best, said, "best")
        return _sigmoid(_map(self._fitted(), depths, kinds, _logits(said)))

    def path_probabilities(
        self, offsets: ArrayLike, parent: ArrayLike, q: ArrayLike
    ) -> tuple[Floats, Bools]:
        """f(v) of equation 7: the product of the calibrated probabilities along the path.

        Args:
            offsets: (n+1,) where each request's nodes begin.
            parent: (N,) index of the parent within the request, smaller than the node's; -1: root.
            q: (N,) what the draft gave each node, its parent given.

        Returns:
            (N,) f(v), no child's above its parent's; (N,) whether the draft gave no other node
            after the same parent more; of equals, the first.

        Raises ValueError if the arrays do not fit together.
        """
        starts, parents, said = _trees(offsets, parent, q)
        depths, best = _kinds(starts, parents, said)
        result = self.conditional(depths, said, best)
        _multiply_down(starts, parents, result)
        return result, best

    def reliability(self) -> list[Reliability]:
        """What was seen, for each bin of half an observation or more: the best guesses by depth and
        q, then the others."""
        count, said, _, accepted = self._sums
        depths = len(count) // 2
        return [
            Reliability(
                int(row) % depths + 1,
                bool(row < depths),
                float(said[row, b] / count[row, b]),
                float(accepted[row, b] / count[row, b]),
                float(count[row, b]),
            )
            for row, b in zip(*np.nonzero(count >= 0.5), strict=True)
        ]

    def error(self) -> CalibrationError:
        """How far off the draft is, and its calibration; 0 before any data."""
        count, said, foretold, accepted = self._sums
        total = max(float(count.sum()), 1e-300)
        return CalibrationError(
            float(np.abs(said - accepted).sum()) / total,
            float(np.abs(foretold - accepted).sum()) / total,
        )

    def _fitted(self) -> Floats:
        """The knots (2, rows, bins), worked out anew if something was seen since."""
        if self._knots is None:
            self._knots = _logits(_fit(self._sums, self._prior))
        return self._knots


def _indices_and_q(index: ArrayLike, q: ArrayLike) -> tuple[Ints, Floats]:
    """Two arrays of one length, as the compiled code wants them."""
    indices = np.ascontiguousarray(index, dtype=np.int64)
    said = np.ascontiguousarray(q, dtype=np.float64)
    if said.ndim != 1 or indices.shape != said.shape:
        raise ValueError(f"q: shape {said.shape} beside {indices.shape}")
    return indices, said


def _trees(offsets: ArrayLike, parent: ArrayLike, q: ArrayLike) -> tuple[Ints, Ints, Floats]:
    """The arrays of some trees, as the compiled code wants them."""
    starts = np.ascontiguousarray(offsets, dtype=np.int64)
    parents, said = _indices_and_q(parent, q)
    leads = len(starts) > 0 and starts[0] == 0 and starts[-1] == len(said)
    if not leads or np.any(np.diff(starts) < 0):
        raise ValueError(f"offsets: must ascend from 0 to {len(said)}")
    return starts, parents, said


def _flags(flags: ArrayLike, q: Floats, name: str) -> Bools:
    """One flag for each of ``q``; a single one stands for all."""
    found = np.asarray(flags, dtype=np.bool_)
    if found.ndim and found.shape != q.shape:
        raise ValueError(f"{name}: shape {found.shape} beside {q.shape} of q")
    return np.ascontiguousarray(np.broadcast_to(found, q.shape))
