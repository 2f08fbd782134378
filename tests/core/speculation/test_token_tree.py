# SPDX-License-Identifier: Apache-2.0
"""core/speculation/token_tree.py: order, masks, rows and the walk."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.speculation.token_tree import (
    PathRow,
    ancestors,
    depths,
    leading_chain,
    path_rows,
    reorder,
    walk,
)

# root - 0 - 1 - 3
#      |   ` - 4 - 6
#      ` - 2 - 5
PARENTS = [-1, 0, -1, 1, 0, 2, 4]


@st.composite
def scored_trees(draw, most=14):
    """(tokens, parents, scores) with siblings distinct and scores that may be equal."""
    size = draw(st.integers(0, most))
    parents, tokens, scores = [], [], []
    for node in range(size):
        parent = draw(st.integers(-1, node - 1))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        tokens.append(draw(st.sampled_from([t for t in range(most + 1) if t not in taken])))
        share = draw(st.sampled_from([1.0, 0.75, 0.5, 0.25]))
        scores.append(share * (scores[parent] if parent >= 0 else 1.0))
        parents.append(parent)
    return tokens, parents, scores


def path_of(node, parents):
    """Node indices from the root's child to ``node``."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def test_shape_by_hand() -> None:
    assert depths(PARENTS) == [1, 2, 1, 3, 2, 2, 3]
    assert leading_chain(PARENTS) == 2
    assert ancestors(PARENTS) == [
        0b11, 0b111, 0b1001, 0b10111, 0b100011, 0b1001001, 0b10100011,
    ]  # fmt: skip
    assert path_rows(PARENTS) == [
        PathRow((0, 1, 2), 3),
        PathRow((0, 1, 2, 4), 1),
        PathRow((0, 3, 6), 2),
        PathRow((0, 1, 5, 7), 2),
    ]


def test_nothing_but_a_root() -> None:
    assert depths([]) == ancestors([]) == walk([], [], [7]) == []
    assert leading_chain([]) == 0
    assert path_rows([]) == [PathRow((0,), 1)]
    assert reorder([], [], []) == ([], [])


def test_a_chain_is_one_row() -> None:
    assert path_rows([-1, 0, 1]) == [PathRow((0, 1, 2, 3), 4)]


def test_reorder_by_hand() -> None:
    """The second child of the root and what follows it are left out."""
    assert reorder([10, 11, 12, 13, 14, 15, 16], PARENTS, [0, 4, 6, 1, 3]) == (
        [10, 14, 16, 11, 13],
        [-1, 0, 1, 0, 3],
    )


@given(scored_trees())
def test_depths_and_masks_follow_the_paths(tree) -> None:
    _, parents, _ = tree
    for node, (depth, mask) in enumerate(zip(depths(parents), ancestors(parents), strict=True)):
        path = path_of(node, parents)
        assert depth == len(path)
        assert mask == sum(1 << token for token in [0, *(n + 1 for n in path)])


@given(scored_trees())
def test_each_token_is_a_query_of_one_row(tree) -> None:
    _, parents, _ = tree
    rows = path_rows(parents)
    computed = [token for row in rows for token in row.path[len(row.path) - row.queries :]]
    assert sorted(computed) == list(range(len(parents) + 1))
    assert all(row.queries > 0 for row in rows)
    before: set[int] = set()
    for row in rows:
        assert row.path[0] == 0
        assert [n + 1 for n in path_of(row.path[-1] - 1, parents)] == list(row.path[1:])
        # What is no query was computed by earlier rows, and so is all that a query attends to.
        assert before >= set(row.path[: len(row.path) - row.queries])
        before |= set(row.path)
    leaves = set(range(1, len(parents) + 1)) - {parent + 1 for parent in parents}
    assert leaves <= {row.path[-1] for row in rows}
    assert rows[0].path == tuple(range(leading_chain(parents) + 1))
    assert {row.path[-1] for row in rows[1:]} <= leaves


def test_walk_by_hand() -> None:
    tokens = [5, 6, 7, 8, 9, 5, 6]
    #               root 0  1  2  3  4  5  6
    assert walk(tokens, PARENTS, [5, 9, 0, 0, 0, 6, 0, 3]) == [0, 4, 6]
    assert walk(tokens, PARENTS, [5, 7, 8, 5, 0, 6, 0, 3]) == [0]  # 7 is no child of node 0
    assert walk(tokens, PARENTS, [7, 6, 8, 5, 0, 6, 1, 3]) == [2, 5]
    assert walk(tokens, PARENTS, [1, 6, 8, 5, 0, 6, 1, 3]) == []


@given(scored_trees(), st.data())
def test_the_walk_follows_the_samples(tree, data) -> None:
    tokens, parents, _ = tree
    children = {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}
    offered = [[t for p, t in children if p == at] or [0] for at in range(-1, len(parents))]
    sampled = [data.draw(st.sampled_from([*choice, 99])) for choice in offered]
    accepted = walk(tokens, parents, sampled)
    assert accepted == path_of(accepted[-1] if accepted else -1, parents)
    assert [tokens[node] for node in accepted] == [
        sampled[at + 1] for at in [-1, *accepted][: len(accepted)]
    ]
    last = accepted[-1] if accepted else -1
    assert (last, sampled[last + 1]) not in children
