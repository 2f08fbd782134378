# SPDX-License-Identifier: Apache-2.0
"""Draft token trees: their shape, the order of their nodes, and the walk that accepts some of them.

The root of a tree is the last committed token, which is sampled but not yet verified.
Its nodes are numbered 0..m-1 with parents before children; ``parents[i]`` is -1 for a child of the
root. A step that verifies the tree computes m+1 tokens: token 0 is the root, token i+1 is node i.

The functions run for every request of every step, so they do not check their input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class PathRow(NamedTuple):
    """One causal row of a tree's verification.

    Attributes:
        path: token indices from the root to a leaf.
        queries: how many of the last tokens of ``path`` this row computes.
    """

    path: tuple[int, ...]
    queries: int


def reorder(
    tokens: Sequence[int], parents: Sequence[int], order: Sequence[int]
) -> tuple[list[int], list[int]]:
    """``tokens`` and ``parents`` of the nodes in ``order``, which may leave out some subtrees."""
    place = [-1] * (len(parents) + 1)  # place[-1] is the root's and stays -1
    for new, old in enumerate(order):
        place[old] = new
    return [tokens[old] for old in order], [place[parents[old]] for old in order]


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node; 1 for a child of the root."""
    depth = [0] * (len(parents) + 1)  # depth[-1] is the root's
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1
    depth.pop()
    return depth


def ancestors(parents: Sequence[int]) -> list[int]:
    """The tokens that each node sees: a bit mask over token indices, the root and itself included.

    The root is bit 0 and node i bit i+1. The root itself, which sees bit 0 only, has no entry.
    """
    masks = [0] * len(parents) + [1]  # masks[-1] is the root's
    for node, parent in enumerate(parents):
        masks[node] = masks[parent] | 2 << node
    masks.pop()
    return masks


def leading_chain(parents: Sequence[int]) -> int:
    """How many of the first nodes form a chain from the root."""
    for node, parent in enumerate(parents):
        if parent != node - 1:
            return node
    return len(parents)


def path_rows(parents: Sequence[int]) -> list[PathRow]:
    """The rows in which a causal attention kernel verifies the tree.

    Row 0 is the root with the leading chain; every other leaf, in order, gives one row. A row
    computes the tokens of its path that no earlier row has computed, and these are its last: a
    token is computed only after its ancestors. So every token is a query of exactly one row.
    """
    chain = leading_chain(parents)
    inner = set(parents)
    rows = [PathRow(tuple(range(chain + 1)), chain + 1)]
    computed = [True] * chain + [False] * (len(parents) - chain) + [True]  # the root at [-1]
    for leaf in range(chain, len(parents)):
        if leaf in inner:
            continue
        path = []
        queries = 0
        node = leaf
        while node >= 0:
            path.append(node + 1)
            if not computed[node]:
                computed[node] = True
                queries += 1
            node = parents[node]
        path.append(0)
        rows.append(PathRow(tuple(reversed(path)), queries))
    return rows


def walk(tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The accepted nodes: from the root to the child that equals the sampled token, and so on.

    The request's new tokens are ``sampled[0]`` and ``sampled[node + 1]`` of each accepted node.

    Args:
        tokens: (m,).
        parents: (m,).
        sampled: (m+1,) what the model sampled after each token of the step.
    """
    accepted = []
    at = -1
    wanted = sampled[0]
    for node, parent in enumerate(parents):  # one pass: children come after their parent
        if parent == at and tokens[node] == wanted:
            accepted.append(node)
            at = node
            wanted = sampled[node + 1]
    return accepted
