# SPDX-License-Identifier: Apache-2.0
"""How many nodes a step verifies beside everybody's objectives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.grove import Grove, StepLoad, TPOTLimit, TPOTNeeds, nodes_of_step, tpot_needs
from vllm_slo.core.step_time import StepTimeModel
from vllm_slo.core.types import INFINITY, DecodeView

FLAT = StepTimeModel(((0.0, 0.0, 0.040), (0.001, 0.0, 0.020)), max_tokens=8192)
"""Twenty tokens ride along for free, each further one costs a millisecond."""


def grove(*trees: list[float], limit: int = 64) -> Grove:
    """Chains of these path probabilities, one for each request."""
    offsets = np.cumsum([0, *map(len, trees)])
    parents = np.concatenate([np.arange(-1, len(tree) - 1) for tree in trees]).astype(np.int32)
    return Grove(offsets, parents, np.concatenate(trees), np.full(len(trees), limit))


def load(roots: int, **given: object) -> StepLoad:
    usual: dict[str, object] = {
        "others": 0,
        "planned": roots,
        "context": 0,
        "max_tokens": 512,
        "limit_s": INFINITY,
        "deadline_s": INFINITY,
        "limits": list,
    }
    return StepLoad(roots, **{**usual, **given})  # type: ignore[arg-type]


def test_what_a_tpot_needs_by_hand() -> None:
    """Four of ten tokens are out on schedule, at 50 ms each; the step takes 120 ms."""
    view = DecodeView("r", due_s=0.25, window_end_s=0.5, window_left=6, tpot_s=0.05)
    needs = tpot_needs(view, 0.2, 0.32, 100)
    assert needs.pace_s == pytest.approx(0.05)
    assert needs.tokens == pytest.approx(2.4)
    assert tpot_needs(view, 0.2, 0.25, 100).tokens == pytest.approx(1.0)
    assert tpot_needs(view, 0.2, 0.32, 2).pace_s == pytest.approx(0.05), "two tokens to its end"
    late = tpot_needs(view, 0.35, 0.40, 100)
    assert late.pace_s == pytest.approx(0.025)
    assert late.tokens == pytest.approx(4.0)


def test_free_nodes_are_taken_and_costly_ones_must_pay() -> None:
    trees = [0.5, 0.25, 0.1]
    assert nodes_of_step(grove(*[trees] * 4), load(4), FLAT, FLAT).nodes == 12
    step = nodes_of_step(grove(*[trees] * 40), load(40), FLAT, FLAT)
    assert step.nodes == 0
    assert step.hoped == 0.0


def test_a_limit_of_the_plan_is_kept() -> None:
    """A step of 45 ms has room for 25 tokens, roots included."""
    found = grove(*[[0.9, 0.8, 0.7, 0.6]] * 10)
    free = nodes_of_step(found, load(10), FLAT, FLAT)
    assert free.nodes == 40
    assert nodes_of_step(found, load(10, limit_s=0.045), FLAT, FLAT).nodes == 15
    assert nodes_of_step(found, load(10, limit_s=0.010), FLAT, FLAT).nodes == 0


def test_a_step_may_be_longer_by_what_its_trees_yield() -> None:
    found = grove(*[[0.9, 0.8, 0.7, 0.6]] * 10)
    due = [TPOTLimit(0.045, 0.045, place) for place in range(10)]
    longer = nodes_of_step(found, load(10, limit_s=0.045, limits=lambda: due), FLAT, FLAT)
    assert longer.nodes == 40, "70 ms for 1 + 3 tokens of 45 ms"
    bare = [*due, TPOTLimit(0.045, 0.045, -1)]
    assert (
        nodes_of_step(found, load(10, limit_s=0.045, limits=lambda: bare), FLAT, FLAT).nodes == 15
    )
    prompt = load(10, limit_s=0.045, deadline_s=0.045, limits=lambda: due)
    assert nodes_of_step(found, prompt, FLAT, FLAT).nodes == 15, "no tree makes up for a deadline"


def test_where_plain_steps_are_too_slow_nodes_serve_most() -> None:
    """Steps of 40 ms break everybody's 15 ms; one guess in ten is bad."""
    found = grove(*[[p - 0.001 * i for p in (0.9, 0.8, 0.7, 0.6)] for i in range(9)], [0.1])
    due = [TPOTLimit(0.015, 0.015, place) for place in range(10)]
    step = nodes_of_step(found, load(10, limit_s=0.040, limits=lambda: due), FLAT, FLAT)
    assert step.nodes >= 27, "57 ms for 1 + 2.4 tokens of 15 ms, but for one request"
    kept = [TPOTLimit(0.042, 0.042, place) for place in range(10)]
    step = nodes_of_step(found, load(10, limit_s=0.042, limits=lambda: kept), FLAT, FLAT)
    assert step.nodes <= 12, "nobody's TPOT is broken for the others' sake"


def test_who_hurries_without_a_promise_is_not_held_up() -> None:
    found = grove([0.1], *[[0.9, 0.8, 0.7, 0.6]] * 9)
    found.require(0, TPOTNeeds(0.045, 1.0), promised=False)
    assert nodes_of_step(found, load(10), FLAT, FLAT).nodes <= 17
    found.require(0, TPOTNeeds(0.001, 1.0), promised=False)
    assert nodes_of_step(found, load(10), FLAT, FLAT).nodes >= 10, "it is too late anyway"


def test_needed_nodes_come_first() -> None:
    found = grove([0.9, 0.8], [0.9, 0.8], [0.3])
    found.require(1, TPOTNeeds(0.030, 1.5), promised=True)
    chosen = found.select_needed(100, 3, 2.0, FLAT, 0.040)
    assert chosen.tolist() == [0, 0, 1, 0, 0]
    assert found.needed == 1
    assert found.needed_gains.tolist() == pytest.approx([0.0, 0.9, 0.0])
    assert found.select(1).tolist() == [0, 0, 1, 0, 0]
    found.leave_out(np.array([True, False, True]))
    assert found.select(1).tolist() == [2, 0, 0, 0, 0]


@given(
    trees=st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), min_size=1, max_size=12),
    others=st.integers(0, 300),
    limit_s=st.one_of(st.just(INFINITY), st.floats(0.01, 0.5)),
    pace_s=st.one_of(st.just(INFINITY), st.floats(0.01, 0.5)),
)
def test_no_step_exceeds_its_tokens_nor_what_there_is(
    trees: list[list[float]], others: int, limit_s: float, pace_s: float
) -> None:
    found = grove(*[sorted(tree, reverse=True) for tree in trees])
    if pace_s < INFINITY:
        found.require(0, TPOTNeeds(pace_s, 2.0), promised=True)
        found.select_needed(400, len(trees), 2.0, FLAT, 0.04)
    roots = len(trees)
    step = load(roots, others=others, planned=roots + others, limit_s=limit_s, max_tokens=400)
    nodes = nodes_of_step(found, step, FLAT, FLAT).nodes
    assert 0 <= nodes <= min(sum(map(len, trees)), 400 - roots - others)
    if limit_s < INFINITY and nodes:
        assert FLAT.predict_s(roots + others + nodes) <= limit_s + 1e-9
