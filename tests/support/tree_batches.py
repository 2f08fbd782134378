# SPDX-License-Identifier: Apache-2.0
"""Random candidate trees of several requests, and what `select_trees` chooses of them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from vllm_slo.core.speculation.tree_selection import select_trees

Tree = tuple[list[int], list[float]]
"""Parents of the nodes, -1 for the root, and their path probabilities."""


def select(trees: list[Tree], required, **options) -> list[list[int]]:
    """`select_trees`, its marks split by request."""
    offsets = np.cumsum([0, *(len(parents) for parents, _ in trees)])
    probability = [p for _, probabilities in trees for p in probabilities]
    parent = [p for parents, _ in trees for p in parents]
    marks = select_trees(offsets, probability, parent, required, **options)
    return [m.tolist() for m in np.split(marks, offsets[1:-1])][: len(trees)]


@st.composite
def one_tree(draw, most):
    """Sums of these probabilities are exact: each is a multiple of 1/4096."""
    parents: list[int] = []
    probabilities: list[float] = []
    depth: list[int] = []
    for node in range(draw(st.integers(0, most))):
        above = [n for n in range(node) if depth[n] < 6]
        parent = draw(st.sampled_from([-1, *above]))
        share = draw(st.sampled_from([1.0, 0.75, 0.5, 0.25]))
        parents.append(parent)
        depth.append(depth[parent] + 1 if parent >= 0 else 1)
        probabilities.append(share * (probabilities[parent] if parent >= 0 else 1.0))
    return parents, probabilities


def batches(requests=5, nodes=10):
    return st.lists(one_tree(nodes), min_size=0, max_size=requests)
