# SPDX-License-Identifier: Apache-2.0
"""core/speculation/tree_selection.py: AdaServe's algorithms 1 and 2."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_batches import Tree, batches, select

from vllm_slo.core.speculation.tree_selection import (
    FOR_SLO,
    FOR_THROUGHPUT,
    NOT_CHOSEN,
    node_worths,
    select_trees,
)

# Figure 5: two requests, three steps of a beam of two, a budget of 8.  Nodes t_1 .. t_6 of each,
# as (parent, path probability); the caption tells t_1(0), t_1(1), t_2(1) and what is chosen.
FIGURE_5: list[Tree] = [
    ([-1, -1, 0, 0, 2, 2], [0.7, 0.2, 0.5, 0.15, 0.4, 0.1]),
    ([-1, -1, 0, 1, 2, 3], [0.5, 0.4, 0.35, 0.25, 0.2, 0.1]),
]
FIGURE_5_REQUIRED = [1.6, 1.8]
"""The figure's A_cap, 0.6 and 0.8, do not count the root."""


def chosen(marks: list[list[int]]) -> list[list[int]]:
    return [[node for node, mark in enumerate(own) if mark] for own in marks]


def expected(trees: list[Tree], marks: Sequence[Sequence[int]]) -> list[float]:
    """Expected tokens of each request, the root's own included."""
    return [
        1.0 + sum(p for p, mark in zip(tree[1], own, strict=True) if mark)
        for tree, own in zip(trees, marks, strict=True)
    ]


def needs(trees):
    return st.lists(
        st.sampled_from([-math.inf, 0.5, 1.0, 1.25, 1.5, 2.0, 2.75, 9.0, math.inf]),
        min_size=len(trees),
        max_size=len(trees),
    )


def optimal_trees(
    probability: Sequence[Sequence[float]], required: Sequence[float], budget: int
) -> list[list[int]] | None:
    """AdaServe's algorithm 1, word for word: the optimum over trees that are known beforehand.

    Args:
        probability: path probability of each node of each request's tree, parents first and no
            child's above its parent's.
        required: A(r) of each request.
        budget: B, roots included.

    Returns:
        The nodes of each request in the order of choice; None if its objectives cannot all be met.
    """
    trees: list[list[int]] = [[] for _ in probability]
    ranked = [_worst_first(tree) for tree in probability]
    left = budget - len(trees)
    if left < 0:
        return None
    for request, needed in enumerate(required):
        expected = 1.0
        while expected < needed:
            if left <= 0 or not ranked[request]:
                return None
            node = ranked[request].pop()
            trees[request].append(node)
            expected += probability[request][node]
            left -= 1
    while left > 0 and any(ranked):
        tops = [(probability[r][nodes[-1]], -r) for r, nodes in enumerate(ranked) if nodes]
        request = -max(tops)[1]
        trees[request].append(ranked[request].pop())
        left -= 1
    return trees


def _worst_first(tree: Sequence[float]) -> list[int]:
    """The nodes of a tree such that ``pop`` is the paper's GetTop."""
    return sorted(range(len(tree)), key=lambda node: (tree[node], -node))


# The paper's example.


def test_figure_5() -> None:
    assert select(FIGURE_5, FIGURE_5_REQUIRED, budget=8) == [
        [FOR_SLO, NOT_CHOSEN, FOR_THROUGHPUT, NOT_CHOSEN, FOR_THROUGHPUT, NOT_CHOSEN],
        [FOR_SLO, FOR_SLO, FOR_THROUGHPUT, NOT_CHOSEN, NOT_CHOSEN, NOT_CHOSEN],
    ]


def test_figure_5_by_algorithm_1() -> None:
    known = [probabilities for _, probabilities in FIGURE_5]
    assert optimal_trees(known, FIGURE_5_REQUIRED, 8) == [[0, 2, 4], [0, 1, 2]]
    assert optimal_trees(known, FIGURE_5_REQUIRED, 5) == [[0], [0, 1]]
    assert optimal_trees(known, FIGURE_5_REQUIRED, 4) is None


def test_algorithm_1_tells_what_cannot_be_met() -> None:
    assert optimal_trees([[0.5], [0.5]], [1.0, 1.0], 1) is None  # not even the roots
    assert optimal_trees([[0.5]], [1.6], 9) is None  # not by all there is
    assert optimal_trees([[0.5]], [1.5], 1) is None
    assert optimal_trees([[0.5]], [1.5], 2) == [[0]]
    assert optimal_trees([], [], 0) == []


# Against the oracles.


@settings(max_examples=examples(100))
@given(st.data())
def test_algorithm_1_is_the_optimum(data) -> None:
    trees = data.draw(batches(requests=3, nodes=3))
    required = data.draw(needs(trees))
    budget = data.draw(st.integers(0, 10))
    best = None
    sizes = [len(parents) for parents, _ in trees]
    for marks in itertools.product((False, True), repeat=sum(sizes)):
        if sum(marks) + len(trees) > budget:
            continue
        flat = iter(marks)
        own = [list(itertools.islice(flat, size)) for size in sizes]
        connected = all(
            parent < 0 or mark[parent]
            for mark, (parents, _) in zip(own, trees, strict=True)
            for node, parent in enumerate(parents)
            if mark[node]
        )
        tokens = expected(trees, own)
        if connected and all(t >= need for t, need in zip(tokens, required, strict=True)):
            best = max(best or 0.0, sum(tokens))
    found = optimal_trees([p for _, p in trees], required, budget)
    if best is None:
        assert found is None
    else:
        assert found is not None
        total = sum(
            1.0 + sum(p[n] for n in tree) for tree, (_, p) in zip(found, trees, strict=True)
        )
        assert total == best


@settings(max_examples=examples(300))
@given(st.data())
def test_algorithm_2_finds_the_optimum_where_there_is_one(data) -> None:
    trees = data.draw(batches())
    required = data.draw(needs(trees))
    budget = data.draw(st.integers(0, 40))
    best = optimal_trees([p for _, p in trees], required, budget)
    marks = select(trees, required, budget=budget)
    if best is not None:
        assert chosen(marks) == [sorted(tree) for tree in best]


# Properties.


@settings(max_examples=examples(300))
@given(st.data())
def test_choices_are_trees_within_every_limit(data) -> None:
    trees = data.draw(batches())
    required = data.draw(needs(trees))
    count = len(trees)
    most = data.draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    budget = data.draw(st.integers(-1, 40))
    floor = data.draw(st.sampled_from([0.0, 0.25, 0.5]))
    marks = select(trees, required, budget=budget, most=most, slo_floor=floor)
    sizes = [len(own) for own in chosen(marks)]
    assert sum(sizes) <= max(budget - count, 0)
    assert all(size <= limit for size, limit in zip(sizes, most, strict=True))
    left = budget - count - sum(sizes) > 0
    for own, (parents, p), need, limit in zip(marks, trees, required, most, strict=True):
        assert all(own[parent] for node, parent in enumerate(parents) if own[node] and parent >= 0)
        first = [p[node] for node, mark in enumerate(own) if mark == FOR_SLO]
        # Not one node more than the objective asks for.
        assert not first or 1.0 + sum(first) - min(first) < need
        assert all(p[node] >= floor for node, mark in enumerate(own) if mark == FOR_SLO)
        kept = [p[node] for node, mark in enumerate(own) if mark]
        missed = [p[node] for node, mark in enumerate(own) if not mark]
        assert not kept or not missed or min(kept) >= max(missed)
        # Nothing is left while there is room.
        assert not left or len(kept) == limit or not missed


@settings(max_examples=examples(200))
@given(st.data())
def test_a_larger_budget_is_never_worse(data) -> None:
    trees = data.draw(batches())
    required = data.draw(needs(trees))
    budget = data.draw(st.integers(0, 40))
    smaller = select(trees, required, budget=budget)
    larger = select(trees, required, budget=budget + data.draw(st.integers(0, 8)))
    assert sum(expected(trees, larger)) >= sum(expected(trees, smaller))
    kept = {FOR_SLO: [FOR_SLO], FOR_THROUGHPUT: [FOR_SLO, FOR_THROUGHPUT]}
    met = select(trees, required, budget=10**6, throughput_phase=False)
    if select(trees, required, budget=budget, throughput_phase=False) == met:
        for before, after in zip(smaller, larger, strict=True):
            pairs = zip(before, after, strict=True)
            assert all(later in kept[mark] for mark, later in pairs if mark)


@settings(max_examples=examples(200))
@given(st.data())
def test_the_order_of_requests_does_not_matter(data) -> None:
    trees = data.draw(batches())
    # All probabilities and needs differ, so that no tie is left to the order.
    scale = [1.0 - 1e-4 * r for r in range(len(trees))]
    trees = [
        (parents, [p * s * (1.0 - 1e-6 * node) for node, p in enumerate(values)])
        for s, (parents, values) in zip(scale, trees, strict=True)
    ]
    required = [
        need + 0.01 * r for r, need in enumerate(data.draw(needs(trees))) if need < math.inf
    ]
    trees = trees[: len(required)]
    budget = data.draw(st.integers(0, 40))
    order = data.draw(st.permutations(range(len(trees))))
    plain = select(trees, required, budget=budget)
    turned = select([trees[r] for r in order], [required[r] for r in order], budget=budget)
    assert turned == [plain[r] for r in order]


# Rules, one at a time.


def test_the_most_demanding_request_is_served_first() -> None:
    chain: Tree = ([-1, 0, 1], [0.5, 0.5, 0.5])
    assert chosen(select([chain] * 3, [1.5, 2.5, 1.5], budget=7)) == [[0], [0, 1, 2], []]
    assert chosen(select([chain] * 3, [1.5, 2.5, 1.5], budget=5)) == [[], [0, 1], []]


def test_the_second_phase_can_be_switched_off() -> None:
    frugal = select(FIGURE_5, FIGURE_5_REQUIRED, budget=99, throughput_phase=False)
    assert chosen(frugal) == [[0], [0, 1]]


def test_the_second_phase_takes_what_is_worth_most() -> None:
    """The first phase looks at probabilities: it is objectives that it serves."""
    tree: Tree = ([-1, -1, 0], [0.5, 0.4, 0.3])
    worth = [0.5, 0.2, 0.3]
    marks = select([tree], [-math.inf], budget=3, worth=worth)
    assert marks == [[FOR_THROUGHPUT, NOT_CHOSEN, FOR_THROUGHPUT]]
    marks = select([tree], [1.9], budget=3, worth=worth)
    assert marks == [[FOR_SLO, FOR_SLO, NOT_CHOSEN]]
    with pytest.raises(ValueError, match="worth: 2 for 3 probabilities"):
        select([tree], [1.0], budget=3, worth=worth[:2])


def test_worths_by_hand() -> None:
    """A guess at 0.2 that begins another path is worth 0.1 for a path of one token; what follows it
    costs its own token only, but comes with it."""
    offsets, parents = np.array([0, 4, 5]), np.array([-1, -1, 0, 1, -1], dtype=np.int32)
    chances = np.array([0.6, 0.2, 0.3, 0.15, 0.5])
    best = np.array([True, False, True, True, True])
    found = node_worths(offsets, chances, parents, best, 1.0)
    assert found.tolist() == pytest.approx([0.6, 0.1, 0.3, 0.1, 0.5])
    assert node_worths(offsets, chances, parents, best, 0.0) is chances, "the kernel takes masks"


@given(batches(), st.floats(0.1, 3.0), st.data())
def test_worths_keep_trees_connected(trees: list[Tree], path_tokens: float, data) -> None:
    """By worth alone no child comes before its parent, and nothing is worth more than it yields."""
    for parents, p in trees:
        nodes = len(parents)
        best = np.array(data.draw(st.lists(st.booleans(), min_size=nodes, max_size=nodes)), bool)
        chances, above = np.array(p), np.array(parents, dtype=np.int32)
        found = node_worths(np.array([0, nodes]), chances, above, best, path_tokens)
        assert (found <= chances).all()
        assert (found >= chances / (1.0 + path_tokens) ** 6 - 1e-12).all()
        assert all(found[n] <= found[parents[n]] for n in range(nodes) if parents[n] >= 0)
        assert (found[best] == chances[best]).all() or not best.all()


def test_a_request_without_nodes_wanted_leaves_its_share_to_others() -> None:
    marks = select(FIGURE_5, FIGURE_5_REQUIRED, budget=7, most=[0, 99])
    assert chosen(marks) == [[], [0, 1, 2, 3, 4]]


def test_a_child_that_looks_better_than_its_parent_still_needs_it() -> None:
    broken: list[Tree] = [([-1, 0, -1], [0.1, 0.9, 0.5]), ([-1], [math.nan])]
    for budget in range(3, 7):
        for own, (parents, _) in zip(
            select(broken, [1.2, 1.2], budget=budget), broken, strict=True
        ):
            assert all(own[p] for node, p in enumerate(parents) if own[node] and p >= 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parent": [-1, 1]}, "parent"),
        ({"parent": [-2, 0]}, "parent"),
        ({"parent": [-1]}, "parent"),
        ({"offsets": [0, 1]}, "offsets"),
        ({"offsets": [0, 3, 2]}, "offsets"),
        ({"offsets": []}, "offsets"),
        ({"required": [1.0, 1.0]}, "required"),
        ({"most": [1, 1]}, "most"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, named) -> None:
    fitting: dict[str, Any] = {
        "offsets": [0, 2],
        "probability": [0.5, 0.4],
        "parent": [-1, 0],
        "required": [1.5],
    }
    assert select_trees(**fitting, budget=3).tolist() == [1, 2]
    with pytest.raises(ValueError, match=named):
        select_trees(**(fitting | change), budget=3)
