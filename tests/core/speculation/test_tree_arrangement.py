# SPDX-License-Identifier: Apache-2.0
"""core/speculation/tree_arrangement.py: the order of chosen nodes, and their extra paths."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tree_batches import batches, select

from vllm_slo.core.speculation import token_tree
from vllm_slo.core.speculation.tree_arrangement import arrange_trees


def arranged(trees, marks, deepest, paths):
    """(tokens stand-ins, parents) of each request, as `arrange_trees` says."""
    offsets = np.cumsum([0, *(len(tree[0]) for tree in trees)])
    nodes, parents, counts = arrange_trees(
        offsets,
        np.concatenate([np.asarray(tree[1], dtype=np.float64) for tree in trees]),
        np.concatenate([np.asarray(tree[0], dtype=np.int32) for tree in trees]),
        np.concatenate([np.asarray(mark, dtype=np.int8) for mark in marks]),
        np.asarray(deepest, dtype=np.int64),
        paths,
    )
    ends = np.cumsum(counts)
    assert ends[-1] == len(nodes) == len(parents)
    return [
        (nodes[end - count : end].tolist(), parents[end - count : end].tolist())
        for end, count in zip(ends, counts, strict=True)
    ]


def test_the_best_path_leads() -> None:
    # root - 0 - 1 - 3
    #      |   ` - 4 - 6
    #      ` - 2 - 5
    parents = [-1, 0, -1, 1, 0, 2, 4]
    tree = parents, [0.5, 0.2, 0.4, 0.1, 0.3, 0.25, 0.15]
    assert arranged([tree], [[1] * 7], [9], 9) == [([0, 4, 6, 2, 5, 1, 3], [-1, 0, 1, -1, 3, 0, 5])]


def test_equal_chances_keep_parents_first() -> None:
    tree = [-1, -1, 0, 1, 3], [0.5] * 5
    assert arranged([tree], [[1] * 5], [9], 9) == [([0, 2, 1, 3, 4], [-1, 0, -1, 2, 3])]


@given(st.data())
def test_chosen_nodes_come_path_by_path_the_best_first(data) -> None:
    trees = data.draw(batches().filter(bool))
    budget = data.draw(st.integers(len(trees), 40))
    marks = select(trees, [-math.inf] * len(trees), budget=budget)
    deepest = [data.draw(st.integers(0, 8)) for _ in trees]
    for (above, chances), mark, most, (order, parents) in zip(
        trees, marks, deepest, arranged(trees, marks, deepest, 1000), strict=True
    ):
        depth = token_tree.depths(above)
        kept = [node for node, chosen in enumerate(mark) if chosen and depth[node] <= most]
        assert sorted(order) == kept
        assert parents == token_tree.reorder(above, above, order)[1]
        rows = token_tree.path_rows(parents)
        assert [t for row in rows for t in row.path[-row.queries :]] == list(range(len(order) + 1))
        for place, node in enumerate(order):
            last = order[place - 1] if place else -1
            going_on = [n for n in order[place:] if above[n] == last]
            started = [n for n in order[place:] if above[n] < 0 or above[n] in order[:place]]
            assert node == min(going_on or started, key=lambda n: (-chances[n], n))


@given(st.data())
def test_no_more_extra_paths_than_there_is_room_for(data) -> None:
    trees = data.draw(batches().filter(bool))
    marks = select(trees, [-math.inf] * len(trees), budget=60)
    paths = data.draw(st.integers(0, 6))
    free = arranged(trees, marks, [64] * len(trees), 1000)
    bound = arranged(trees, marks, [64] * len(trees), paths)
    taken = [len(token_tree.path_rows(parents)) - 1 for _, parents in bound]
    assert sum(taken) <= paths
    for (some, _), (every, _) in zip(bound, free, strict=True):
        assert some == every[: len(some)]
