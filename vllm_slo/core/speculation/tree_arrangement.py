# SPDX-License-Identifier: Apache-2.0
"""The chosen nodes of a step as trees, in the order in which they are verified."""

from __future__ import annotations

import numpy as np

from vllm_slo.core.arrays import Bools, Floats, Ints, Marks, Parents
from vllm_slo.core.jit import jit


@jit
def _order(left: Bools, probability: Floats, parent: Parents, nodes: Ints) -> int:
    """Write the nodes ``left`` of one request to ``nodes`` in the order of `arrange_trees`;
    how many of them form the best path."""
    placed = np.zeros(len(left), dtype=np.bool_)
    at, count, chain = -1, 0, -1
    while True:
        best = -1
        for node in range(len(left)):
            better = best < 0 or probability[node] > probability[best]
            if left[node] and parent[node] == at and better:
                best = node
        if best < 0:  # after a leaf: the best node whose parent is placed comes next
            chain = count if chain < 0 else chain
            for node in range(len(left)):
                has_parent = parent[node] < 0 or placed[parent[node]]
                better = best < 0 or probability[node] > probability[best]
                if left[node] and has_parent and better:
                    best = node
        if best < 0:
            return chain
        left[best] = False
        placed[best] = True
        nodes[count] = at = best
        count += 1


@jit
def _leaves(parents: Parents, chain: int) -> int:
    """How many leaves a tree has beyond its leading chain of ``chain`` nodes."""
    leaves = 0
    for node in range(chain, len(parents)):
        inner = False
        for later in range(node + 1, len(parents)):
            inner = inner or parents[later] == node
        leaves += not inner
    return leaves


@jit
def arrange_trees(
    offsets: Ints,
    probability: Floats,
    parent: Parents,
    chosen: Marks,
    deepest: Ints,
    paths: int,
) -> tuple[Ints, Parents, Ints]:
    """The chosen nodes of all requests as trees, in the order in which they are verified.

    The best path comes first. It goes from the root to its best child, and so on to a leaf. Of the
    nodes left whose parent is placed, the best one starts the next path, which goes on likewise.
    Ties go by index. So the nodes that a row of `token_tree.path_rows` computes are consecutive.
    Where the trees have more extra paths than ``paths``, the last requests lose their last nodes.

    Args:
        offsets, probability, parent: as `tree_selection.select_trees` takes them.
        chosen: (N,) marks that it returned.
        deepest: (n,) greatest depth of a node; deeper ones are left out.
        paths: most extra paths of all trees together; see `token_tree.path_rows`.

    Returns:
        (K,) the nodes by index within their request, request by request; (K,) each node's parent in
        its new tree; (n,) how many nodes each request has.
    """
    total, requests = len(probability), len(deepest)
    nodes = np.empty(total, dtype=np.int64)
    parents = np.empty(total, dtype=np.int32)
    counts = np.zeros(requests, dtype=np.int64)
    depth = np.zeros(total, dtype=np.int64)
    place = np.full(total, -1)
    left = np.zeros(total, dtype=np.bool_)
    end = 0
    for r in range(requests):
        start, stop = offsets[r], offsets[r + 1]
        for node in range(start, stop):
            above = parent[node]
            depth[node] = 1 if above < 0 else depth[start + above] + 1
            left[node] = chosen[node] > 0 and depth[node] <= deepest[r]
        size = int(left[start:stop].sum())
        chain = _order(left[start:stop], probability[start:stop], parent[start:stop], nodes[end:])
        for where in range(size):
            node = nodes[end + where]
            place[start + node] = where
            above = parent[start + node]
            parents[end + where] = -1 if above < 0 else place[start + above]
        leaves = _leaves(parents[end : end + size], chain)
        while leaves > paths:
            size -= 1
            leaves = _leaves(parents[end : end + size], chain)
        paths -= leaves
        counts[r] = size
        end += size
    return nodes[:end], parents[:end], counts
