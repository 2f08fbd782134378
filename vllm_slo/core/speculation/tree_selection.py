# SPDX-License-Identifier: Apache-2.0
"""Which draft nodes to verify: AdaServe's selection of token trees.

Source: AdaServe, section 3 (equations 1-6) and section 4.3 (algorithm 2).

All counts include the root, a request's last token, which is verified with its tree and always
yields a token: a request expects 1 token without any node, and a budget of B for n requests leaves
B - n nodes. The pseudo-code's "while B >= 0" would choose one node too many; equation 1 and figure
5 (a budget of 8 is two roots and six nodes) are followed.

A node may be chosen once its parent is: the "candidate set" of section 4.2. No path probability
exceeds the parent's, so the best of this set is the best of all nodes left (appendix B). Where
probabilities are equal the parent comes first by its index, so every choice is a tree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_slo.core.arrays import Bools, Floats, Ints, Marks, Parents
from vllm_slo.core.jit import jit

NOT_CHOSEN, FOR_SLO, FOR_THROUGHPUT = 0, 1, 2
"""Marks of a node that `select_trees` returns."""

UNBOUNDED = 1 << 40


def select_trees(
    offsets: ArrayLike,
    probability: ArrayLike,
    parent: ArrayLike,
    required: ArrayLike,
    *,
    budget: int,
    most: ArrayLike | None = None,
    worth: ArrayLike | None = None,
    throughput_phase: bool = True,
    slo_floor: float = 0.0,
) -> Marks:
    """Algorithm 2: first the nodes that objectives need, the most demanding request first, then the
    best nodes of all requests.

    Args:
        offsets: (n+1,) where each request's nodes begin in the flat arrays of N nodes.
        probability: (N,) path probabilities; no child's exceeds its parent's.
        parent: (N,) index of the parent within the request, smaller than the node's own; -1: root.
        required: (n,) A(r), tokens that the step must yield (equation 3); at most 1 needs no node.
        budget: B, the tokens to verify, roots included.
        most: (n,) most nodes of a request, root not included; default no limit.
        worth: (N,) the order of the second phase, see `node_worths`; default the probabilities.
        throughput_phase: whether there is a second phase.
        slo_floor: least path probability of a node of the first phase. Without it a request that
            is far behind could fill a step with nodes that hardly ever help it.

    Returns:
        (N,) `NOT_CHOSEN`, `FOR_SLO` or `FOR_THROUGHPUT` for each node. The chosen ones of a
        request are connected to its root, whatever the probabilities.

    Raises ValueError if shapes differ. The first call compiles where numba's cache is empty, which
    takes some seconds.
    """
    starts = np.ascontiguousarray(offsets, dtype=np.int64)
    scores = np.ascontiguousarray(probability, dtype=np.float64)
    parents = np.ascontiguousarray(parent, dtype=np.int32)
    needed = np.ascontiguousarray(required, dtype=np.float64)
    limit = (
        np.full(len(needed), UNBOUNDED) if most is None else np.ascontiguousarray(most, np.int64)
    )
    values = scores if worth is None else np.ascontiguousarray(worth, dtype=np.float64)
    _check(starts, scores, parents, needed, limit)
    if values.shape != scores.shape:
        raise ValueError(f"worth: {len(values)} for {len(scores)} probabilities")
    return _select(
        starts, scores, values, parents, np.argsort(-needed, kind="stable"), needed, limit,
        int(budget), bool(throughput_phase), float(slo_floor),
    )  # fmt: skip


def _check(
    offsets: Ints, probability: Floats, parent: NDArray[Any], *by_request: NDArray[Any]
) -> None:
    """Raise ValueError if the compiled code, which checks no index, would leave its arrays."""
    total, requests = len(probability), len(offsets) - 1
    if parent.shape != probability.shape:
        raise ValueError(f"parent: {len(parent)} for {total} probabilities")
    if requests < 0 or offsets[0] != 0 or offsets[-1] != total or not _ascend(offsets):
        raise ValueError(f"offsets: must ascend from 0 to {total}")
    if any(values.shape != (requests,) for values in by_request):
        shapes = [values.shape for values in by_request]
        raise ValueError(f"required, most: shapes {shapes} for {requests} requests")


@jit
def _ascend(offsets: Ints) -> bool:
    """Whether no offset is below the one before."""
    steps = 0
    for r in range(len(offsets) - 1):
        steps += offsets[r] <= offsets[r + 1]
    return steps == len(offsets) - 1


@jit
def _push(heap: Ints, count: int, node: int, score: Floats) -> int:
    """Add ``node`` to a heap of ``count`` nodes, the best at its top; the new count."""
    place, value = count, score[node]
    while place > 0:
        above = (place - 1) >> 1
        other = heap[above]
        if score[other] > value or (score[other] == value and other < node):
            break
        heap[place] = other
        place = above
    heap[place] = node
    return count + 1


@jit
def _open(heap: Ints, count: int, node: int, first: Ints, following: Ints, score: Floats) -> int:
    """Add the children of ``node`` to a heap of ``count`` nodes; the new count."""
    child = first[node]
    while child >= 0:
        count = _push(heap, count, child, score)
        child = following[child]
    return count


@jit
def _pop(heap: Ints, count: int, score: Floats) -> int:
    """Remove the top, ``heap[0]``, from a heap of ``count`` nodes; the new count."""
    count -= 1
    node = heap[count]
    value = score[node]
    place, child = 0, 1
    while child < count:
        other = heap[child]
        if child + 1 < count:
            right = heap[child + 1]
            if score[right] > score[other] or (score[right] == score[other] and right < other):
                child, other = child + 1, right
        if value > score[other] or (value == score[other] and node < other):
            break
        heap[place] = other
        place, child = child, 2 * child + 1
    heap[place] = node
    return count


@jit
def _select(
    offsets: Ints,
    probability: Floats,
    worth: Floats,
    parent: Parents,
    order: Ints,
    needed: Floats,
    most: Ints,
    budget: int,
    throughput_phase: bool,
    slo_floor: float,
) -> Marks:
    """`select_trees`, given the order of the requests."""
    requests, total = len(needed), len(probability)
    chosen = np.zeros(total, dtype=np.int8)
    owner = np.empty(total, dtype=np.int64)
    first = np.full(total + requests, -1)  # first child; root r counts as node total + r
    following = np.full(total, -1)  # next sibling
    for r in range(requests):
        start = offsets[r]
        for node in range(offsets[r + 1] - 1, start - 1, -1):
            if not -1 <= parent[node] < node - start:
                raise ValueError("parent: must be -1 or an earlier node of the same request")
            home = start + parent[node] if parent[node] >= 0 else total + r
            following[node] = first[home]
            first[home] = node
            owner[node] = r
    size = np.zeros(requests, dtype=np.int64)
    left = budget - requests
    frontier, waiting = np.empty(total, dtype=np.int64), 0
    heap = np.empty(total, dtype=np.int64)
    for r in order:
        count = _open(heap, 0, total + r, first, following, probability)
        expected = 1.0
        while expected < needed[r] and size[r] < most[r] and left > 0 and count > 0:
            node = heap[0]
            if probability[node] < slo_floor:
                break
            count = _pop(heap, count, probability)
            chosen[node] = 1
            expected += probability[node]
            size[r] += 1
            left -= 1
            count = _open(heap, count, node, first, following, probability)
        for node in heap[:count]:
            waiting = _push(frontier, waiting, node, worth)
    while throughput_phase and left > 0 and waiting > 0:
        node = frontier[0]
        waiting = _pop(frontier, waiting, worth)
        r = owner[node]
        if size[r] < most[r]:
            chosen[node] = 2
            size[r] += 1
            left -= 1
            waiting = _open(frontier, waiting, node, first, following, worth)
    return chosen


def node_worths(
    offsets: Ints,
    probability: Floats,
    parent: Parents,
    best: Bools,
    path_tokens: float,
) -> Floats:
    """Expected tokens of each node per token of verification cost.

    A node that is not the best guess after its parent begins another path of its tree, whose
    verification may cost extra time.

    Args:
        offsets, probability, parent: as `select_trees` takes them.
        best: (N,) whether a node is the best guess after its parent.
        path_tokens: cost of another path besides its nodes, in tokens.

    Returns:
        (N,) at most the path probability; no child's exceeds its parent's.
    """
    if not path_tokens:
        return probability
    return _worths(offsets, probability, parent, best, path_tokens)


@jit
def _worths(
    offsets: Ints,
    probability: Floats,
    parent: Parents,
    best: Bools,
    path_tokens: float,
) -> Floats:
    worth = probability.copy()
    for r in range(len(offsets) - 1):
        for node in range(offsets[r], offsets[r + 1]):
            if not best[node]:
                worth[node] /= 1.0 + path_tokens
            if parent[node] >= 0:
                worth[node] = min(worth[node], worth[offsets[r] + parent[node]])
    return worth
