# SPDX-License-Identifier: Apache-2.0
"""How much speculation pays: nodes, depth, and what drafting costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_slo.core.admission.program import PLAIN
from vllm_slo.core.speculation.tree_budget import (
    TREE,
    Verifying,
    depth_and_width,
    fastest_shapes,
    needs_drafts,
    prompts_fill,
    sustained_trees,
    worthwhile_nodes,
)
from vllm_slo.core.step_time.model import StepTimeModel

FLAT = StepTimeModel(((0.0, 0.0, 0.040), (0.001, 0.0, 0.020)))
"""Twenty tokens ride along for free, each further one costs a millisecond."""

probabilities = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60).map(
    lambda found: np.sort(np.asarray(found))[::-1]
)


def passes(pass_s: float, depths: int) -> np.ndarray:
    """Seconds until a tree is 1, 2, .. deep where each depth is a pass."""
    return pass_s * np.arange(1.0, depths + 1.0)


def fastest(
    typical: np.ndarray,
    active: int,
    behind: int,
    context: int,
    deepest: int,
    passes_s: dict[int, float],
    model: StepTimeModel,
    path_tokens: float = 0.0,
) -> tuple[int, int]:
    """Depth and width with which those behind get their tokens soonest, drafted by one model in
    passes; depth 0 where that is no sooner than without."""
    drafting_s = np.array([[passes(pass_s, deepest) for pass_s in passes_s.values()]])
    step = Verifying(active, behind, model.kv_s * context, path_tokens)
    owner, widths = np.zeros(1, dtype=np.int64), np.array(list(passes_s))
    chances = np.ascontiguousarray(typical[None])
    found = fastest_shapes(chances, owner, widths, drafting_s, 1, step, model.lines())
    depth, width, tokens, seconds = found[0].tolist()
    faster = tokens * model.predict_s(active, context) > seconds
    return (int(depth), int(width)) if faster else (0, 1)


def rate(nodes: int, chances: np.ndarray, roots: int, others: int, model: StepTimeModel) -> float:
    longer = model.predict_s(others + roots + nodes) - model.predict_s(others + roots)
    return (roots + float(chances[:nodes].sum())) / (model.predict_s(roots) + longer)


@given(
    chances=probabilities,
    roots=st.integers(1, 64),
    others=st.integers(0, 512),
    most=st.integers(0, 80),
    slope=st.floats(0.0, 0.01),
)
def test_no_other_number_of_nodes_yields_more_per_second(
    chances: np.ndarray, roots: int, others: int, most: int, slope: float
) -> None:
    model = StepTimeModel(((0.0, 0.0, 0.040), (slope, 0.0, 0.020)))
    nodes = worthwhile_nodes(chances, roots, others, 0, model, most)
    assert 0 <= nodes <= min(most, len(chances))
    best = max(rate(n, chances, roots, others, model) for n in range(min(most, len(chances)) + 1))
    assert rate(nodes, chances, roots, others, model) == pytest.approx(best, rel=1e-9)


def test_nodes_that_ride_along_for_free_are_taken() -> None:
    assert worthwhile_nodes(np.full(16, 0.01), 4, 0, 0, FLAT, 100) == 16


def test_nodes_must_be_worth_what_they_cost() -> None:
    """At 40 requests a token costs 1.5 ms; a node that costs 1 ms must be 2/3 of one."""
    assert worthwhile_nodes(np.full(16, 0.70), 40, 0, 0, FLAT, 100) == 16
    assert worthwhile_nodes(np.full(16, 0.60), 40, 0, 0, FLAT, 100) == 0


def test_a_prompt_in_the_step_does_not_make_nodes_cheap() -> None:
    """Four requests get a token each 10 ms; beside a prompt a node costs its millisecond."""
    chances = np.linspace(0.5, 0.02, 16)
    alone = worthwhile_nodes(chances, 4, 0, 0, FLAT, 100)
    beside = worthwhile_nodes(chances, 4, 500, 0, FLAT, 100)
    assert alone == 16
    assert 8 < beside < 16
    assert chances[beside - 1] > 0.1 > chances[beside + 1] - 0.05


def test_nothing_decodes_or_nothing_fits() -> None:
    assert worthwhile_nodes(np.full(4, 0.9), 0, 100, 0, FLAT, 100) == 0
    assert worthwhile_nodes(np.full(4, 0.9), 1, 0, 0, FLAT, -3) == 0
    assert worthwhile_nodes(np.zeros(0), 1, 0, 0, FLAT, 10) == 0


def test_a_model_that_knows_no_cost_takes_everything() -> None:
    free = StepTimeModel(((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)))
    assert worthwhile_nodes(np.full(4, 0.1), 1, 0, 0, free, 10) == 4


lines = st.tuples(st.floats(0.001, 0.05), st.floats(1e-5, 0.005), st.floats(0.0, 0.05)).map(
    lambda found: StepTimeModel(((1e-5, 0.0, found[0]), (found[1], 0.0, found[2])), 1e-6)
)
typical = st.lists(
    st.lists(st.floats(0.001, 1.0), min_size=3, max_size=3), min_size=1, max_size=6
).map(lambda rows: np.sort(np.asarray(rows))[:, ::-1])


@given(
    chances=typical,
    active=st.integers(1, 64),
    share=st.floats(0.0, 1.0),
    context=st.integers(0, 10_000),
    each_s=st.lists(st.floats(0.0, 0.01), min_size=3, max_size=3),
    model=lines,
    path_tokens=st.sampled_from([0.0, 0.5, 3.0]),
)
def test_no_other_depth_or_width_is_faster(
    chances: np.ndarray,
    active: int,
    share: float,
    context: int,
    each_s: list[float],
    model: StepTimeModel,
    path_tokens: float,
) -> None:
    """Of trees of the likeliest nodes, each but the best of its layer on a path of its own."""
    behind = max(int(share * active), 1)
    passes_s = dict(zip((1, 2, 3), each_s, strict=True))

    def rate(depth: int, width: int) -> float:
        if not depth:
            return 1.0 / model.predict_s(active, context)
        flat = chances[:depth, :width].ravel()
        order = np.argsort(-flat, kind="stable")
        price = np.where(order % width, 1.0 + path_tokens, 1.0)
        return max(
            (1.0 + flat[order[:n]].sum())
            / (
                model.predict_s(active + behind * price[:n].sum(), context)
                + depth * passes_s[width]
            )
            for n in range(1, len(order) + 1)
        )

    load = active, behind, context, len(chances)
    found = fastest(chances, *load, passes_s, model, path_tokens)
    best = max(rate(d, w) for d in range(len(chances) + 1) for w in (1, 2, 3))
    assert rate(*found) == pytest.approx(best, rel=1e-9)


@given(
    chances=typical,
    share=st.floats(0.0, 1.0),
    tpot_s=st.floats(0.001, 0.2),
    pass_s=st.floats(0.0, 0.01),
    model=lines,
)
def test_no_other_trees_sustain_more_requests(
    chances: np.ndarray, share: float, tpot_s: float, pass_s: float, model: StepTimeModel
) -> None:
    most = float(model.time_to_tokens(tpot_s))
    for depth in range(1, len(chances) + 1):
        likely = np.sort(chances[:depth], axis=None)[::-1][:TREE]
        for nodes in range(1, len(likely) + 1):
            tokens = max(share * (1.0 + likely[:nodes].sum()), 1.0)
            most = max(most, model.time_to_tokens(tpot_s * tokens - depth * pass_s) / (1 + nodes))
    found, drafting_s, requests = sustained_trees(
        chances, share, tpot_s, model, passes(pass_s, len(chances))
    )
    assert requests == pytest.approx(most, abs=1.0)  # a step may hold one token less by rounding
    within = model.time_to_tokens(tpot_s * found.tokens_out - drafting_s)
    assert within / found.tokens_in == pytest.approx(requests, abs=1.0)


class TestDepth:
    DEEP = np.stack([0.8 ** np.arange(1.0, 7.0), np.full(6, 0.1)], axis=1)
    """Typical chances: the best path is accepted at 0.8, 0.64, ..., the second at 0.1."""

    def test_few_requests_are_drafted_deep_and_many_not_at_all(self) -> None:
        chosen = [fastest(self.DEEP, n, n, 0, 6, {2: 0.002}, FLAT)[0] for n in (1, 4, 16, 64, 256)]
        assert chosen == sorted(chosen, reverse=True)
        assert chosen[0] == 6
        assert chosen[-1] == 0

    def test_an_expensive_draft_is_not_used(self) -> None:
        assert fastest(self.DEEP, 1, 1, 0, 6, {2: 0.050}, FLAT)[0] == 0

    def test_a_bad_draft_is_not_used(self) -> None:
        assert fastest(np.full((4, 2), 0.01), 4, 4, 0, 4, {2: 0.002}, FLAT)[0] == 0

    def test_equation_8_bounds_it(self) -> None:
        assert fastest(self.DEEP, 1, 1, 0, 2, {2: 0.002}, FLAT)[0] == 2


class TestFastest:
    def test_who_lags_alone_gets_a_deeper_tree_than_all_would(self) -> None:
        typical = np.stack([0.8 ** np.arange(1.0, 7.0), np.full(6, 0.05)], axis=1)
        all_of_them = fastest(typical, 40, 40, 0, 6, {2: 0.001}, FLAT)[0]
        one = fastest(typical, 40, 1, 0, 6, {2: 0.001}, FLAT)[0]
        assert one > all_of_them
        assert fastest(typical, 40, 40, 0, 6, {2: 0.001}, FLAT)[0] <= one

    def test_a_draft_that_slows_everybody_down_is_not_used(self) -> None:
        assert fastest(0.6 ** np.arange(1.0, 5.0)[:, None], 8, 1, 0, 4, {2: 0.2}, FLAT)[0] == 0


@given(
    best=st.floats(0.05, 0.98),
    width=st.integers(1, 4),
    share=st.floats(0.0, 1.2),
    tpot_s=st.floats(0.005, 0.2),
    pass_s=st.floats(0.0, 0.02),
)
@example(best=0.5, width=1, share=0.0, tpot_s=0.19999999999999996, pass_s=0.0)  # rounding
def test_no_other_tree_sustains_more_requests(
    best: float, width: int, share: float, tpot_s: float, pass_s: float
) -> None:
    chances = np.array([[best**d * 0.3**rank for rank in range(width)] for d in range(1, 5)])
    found, drafting_s, most = sustained_trees(
        chances, share, tpot_s, FLAT, passes(pass_s, len(chances))
    )

    def requests(tokens_out: float, tokens_in: float, took_s: float) -> float:
        return FLAT.time_to_tokens(tpot_s * tokens_out - took_s) / tokens_in

    # A step may end at the objective exactly, but for rounding.
    late, early = drafting_s + 1e-12, drafting_s - 1e-12
    assert requests(found.tokens_out, found.tokens_in, late) <= most
    assert most <= requests(found.tokens_out, found.tokens_in, early)
    assert most >= requests(1.0, 1.0, 1e-12)
    for depth in range(1, 5):
        likely = sorted(chances[:depth].ravel(), reverse=True)[:TREE]
        for nodes in range(1, len(likely) + 1):
            out = max(share * (1.0 + sum(likely[:nodes])), 1.0)
            assert requests(out - 1e-12, nodes + 1, depth * pass_s) <= most + 1e-9
    if share < 0.5 and best < 0.3:
        assert found == PLAIN, "nothing to count on"


def test_trees_that_sustain_most_by_hand() -> None:
    """A lone chain of 0.9 each: two tokens more for two nodes; steps of 20 ms and 1 ms a token."""
    line = StepTimeModel(((0.0, 0.0, 0.0), (0.001, 0.0, 0.020)))
    chances = np.array([[0.9], [0.8]])
    found, drafting_s, most = sustained_trees(
        chances, 1.0, 0.030, line, passes(0.002, len(chances))
    )
    assert found.tokens_out == pytest.approx(2.7)
    assert found.tokens_in == 3.0
    assert drafting_s == pytest.approx(0.004)
    assert most == 57 / 3, "2.7 * 30 - 4 - 20 ms; 10 without trees"


# Depth and width: AdaServe's equations 8 and 9.


def test_depth_and_width_by_hand() -> None:
    limits = {"min_depth": 1, "max_depth": 8, "max_width": 6}
    assert [
        depth_and_width(n, verifier_tokens=64, speculator_tokens=32, **limits)
        for n in (0, 1, 6, 8, 14, 30, 500)
    ] == [(8, 6), (8, 6), (8, 5), (7, 4), (3, 2), (1, 1), (1, 1)]


@given(st.integers(0, 2000), st.integers(0, 100))
def test_more_requests_never_get_deeper_or_wider_trees(active: int, more: int) -> None:
    limits = {"min_depth": 2, "max_depth": 10, "max_width": 16}
    depth, width = depth_and_width(active, verifier_tokens=256, speculator_tokens=128, **limits)
    deeper, wider = depth_and_width(
        active + more, verifier_tokens=256, speculator_tokens=128, **limits
    )
    assert 2 <= deeper <= depth <= 10
    assert 1 <= wider <= width <= 16


@pytest.mark.parametrize(
    ("room", "seats", "blocks", "waiting", "filled"),
    [
        (-1, 0, 0, [], True),  # by prompts that are being computed
        (100, 8, 99, [], False),
        (100, 8, 99, [(60, 4), (40, 3)], False),
        (100, 8, 99, [(60, 4), (41, 3)], True),
        (100, 1, 99, [(60, 4), (41, 3)], False),  # the second finds no seat
        (100, 0, 99, [(500, 32)], False),
        (100, 8, 6, [(60, 4), (41, 3)], False),  # the second finds no memory
        (100, 8, 7, [(60, 4), (41, 3)], True),
    ],
)
def test_prompts_fill_a_step_if_those_that_can_begin_have_more_tokens(
    room: int, seats: int, blocks: int, waiting: list[tuple[int, int]], filled: bool
) -> None:
    assert prompts_fill(room, seats, blocks, iter(waiting)) == filled


def test_no_more_of_a_long_queue_is_looked_at_than_fits_into_a_step() -> None:
    assert prompts_fill(100, 1000, 1000, itertools.repeat((50, 4)))


def test_a_tpot_of_one_and_a_half_steps_needs_no_drafts() -> None:
    assert not needs_drafts(0.030, 0.020)
    assert needs_drafts(0.029, 0.020)
