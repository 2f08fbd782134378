# SPDX-License-Identifier: Apache-2.0
"""How many nodes a step verifies beside everybody's objectives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.speculation.candidate_trees import (
    ENOUGH,
    CandidateTrees,
    StepLoad,
    TPOTLimit,
    TPOTNeeds,
    nodes_of_step,
    tpot_needs,
)
from vllm_slo.core.speculation.tree_budget import worthwhile_nodes
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY, DecodeView

FLAT = StepTimeModel(((0.0, 0.0, 0.040), (0.001, 0.0, 0.020)), max_tokens=8192)
"""Twenty tokens ride along for free, each further one costs a millisecond."""


def candidates(*trees: list[float], limit: int = 64) -> CandidateTrees:
    """Chains of these path probabilities, one for each request."""
    offsets = np.cumsum([0, *map(len, trees)])
    parents = np.concatenate([np.arange(-1, len(tree) - 1) for tree in trees]).astype(np.int32)
    chances = np.concatenate(trees)
    return CandidateTrees(offsets, parents, chances, chances, np.full(len(trees), limit))


def count(found: CandidateTrees, step: StepLoad) -> int:
    """Nodes of a step on the engine of ``FLAT``."""
    return int(np.count_nonzero(nodes_of_step(found, step, FLAT, FLAT)))


def due_at(tpot_s: float, owed: float = 0.0) -> TPOTNeeds:
    """On schedule where ``owed`` is 0: a step of one TPOT must yield a token."""
    return TPOTNeeds(tpot_s, tpot_s, owed)


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
    needs = tpot_needs(view, 0.2, 100)
    assert needs.pace_s == pytest.approx(0.05)
    found = candidates([0.5])
    found.require(0, needs, promised=True)
    assert found.required(0.12).tolist() == pytest.approx([2.4])
    assert found.required(0.05).tolist() == pytest.approx([1.0])
    assert (found.behind(0.12), found.behind(0.049)) == (1, 0)
    assert tpot_needs(view, 0.2, 2).pace_s == pytest.approx(0.05), "two tokens to its end"
    late = tpot_needs(view, 0.35, 100)
    assert late.pace_s == pytest.approx(0.025)
    found.require(0, late, promised=True)
    assert found.required(0.05).tolist() == pytest.approx([4.0])
    assert candidates([0.5]).required(9.0).tolist() == [-INFINITY], "nothing is asked"


def test_free_nodes_are_taken_and_costly_ones_must_pay() -> None:
    trees = [0.5, 0.25, 0.1]
    assert count(candidates(*[trees] * 4), load(4)) == 12
    assert count(candidates(*[trees] * 40), load(40)) == 0


def test_a_limit_of_the_plan_is_kept() -> None:
    """A step of 45 ms has room for 25 tokens, roots included."""
    found = candidates(*[[0.9, 0.8, 0.7, 0.6]] * 10)
    assert count(found, load(10)) == 40
    assert count(found, load(10, limit_s=0.045)) == 15
    assert count(found, load(10, limit_s=0.010)) == 0


def test_a_step_may_be_longer_by_what_its_trees_yield() -> None:
    found = candidates(*[[0.9, 0.8, 0.7, 0.6]] * 10)
    due = [TPOTLimit(0.045, 0.045, place) for place in range(10)]
    assert count(found, load(10, limit_s=0.045, limits=lambda: due)) == 40, "70 ms for 4 tokens"
    bare = [*due, TPOTLimit(0.045, 0.045, -1)]
    assert count(found, load(10, limit_s=0.045, limits=lambda: bare)) == 15
    prompt = load(10, limit_s=0.045, deadline_s=0.045, limits=lambda: due)
    assert count(found, prompt) == 15, "no tree makes up for a deadline"


def test_where_plain_steps_are_too_slow_nodes_serve_most() -> None:
    """Steps of 40 ms break everybody's 15 ms; one guess in ten is bad."""
    found = candidates(*[[p - 0.001 * i for p in (0.9, 0.8, 0.7, 0.6)] for i in range(9)], [0.1])
    due = [TPOTLimit(0.015, 0.015, place) for place in range(10)]
    nodes = count(found, load(10, limit_s=0.040, limits=lambda: due))
    assert nodes >= 27, "57 ms for 1 + 2.4 tokens of 15 ms, but for one request"
    kept = [TPOTLimit(0.042, 0.042, place) for place in range(10)]
    nodes = count(found, load(10, limit_s=0.042, limits=lambda: kept))
    assert nodes <= 12, "nobody's TPOT is broken for the others' sake"


def test_who_hurries_without_a_promise_is_not_held_up() -> None:
    found = candidates([0.1], *[[0.9, 0.8, 0.7, 0.6]] * 9)
    found.require(0, due_at(0.045), promised=False)
    assert count(found, load(10)) <= 19, "49 ms, with its own node"
    found.require(0, TPOTNeeds(0.001, 0.045, 30.0), promised=False)
    assert count(found, load(10)) >= 9, "too late, but these take no time"


def test_a_hard_text_gets_its_nodes_where_an_easy_one_has_enough() -> None:
    """Eight hard and eight easy texts at 40 ms a token: a longer step suits the easy ones only."""
    hard, easy = [0.5, 0.2, 0.08], [0.9, 0.8, 0.7, 0.6, 0.5]
    found = candidates(*[hard] * 8, *[easy] * 8)
    for place in range(16):
        found.require(place, due_at(0.040), promised=False)
    marks = nodes_of_step(found, load(16), FLAT, FLAT)
    step_s = FLAT.predict_s(16 + int(np.count_nonzero(marks)))
    paces = (1.0 + found.gains(marks > 0)) * 0.040 / step_s
    assert (paces >= 1.0 - 1e-9).all()
    assert np.count_nonzero(marks[: 8 * len(hard)] > 0) >= 8
    free = nodes_of_step(candidates(*[hard] * 8, *[easy] * 8), load(16), FLAT, FLAT)
    assert np.count_nonzero(free) > np.count_nonzero(marks), "nobody asks: what pays is taken"


@pytest.mark.parametrize("requests", range(1, 12))
def test_tokens_of_a_step_are_brought_to_a_multiple(requests: int) -> None:
    """As far as there are nodes and room; never beyond what the plan allows."""
    found = candidates(*[[0.5, 0.4, 0.3, 0.2, 0.1]] * requests)
    nodes = count(found, load(requests, multiple=4))
    assert (requests + nodes) % 4 == 0 or nodes == 5 * requests
    assert abs(nodes - count(found, load(requests))) < 4
    limited = count(found, load(requests, multiple=4, limit_s=0.043))
    assert FLAT.predict_s(requests + limited) <= 0.043 + 1e-9
    assert (requests + limited) % 4 == 0 or limited in (0, 5 * requests)


def test_little_that_is_missing_makes_no_step_shorter() -> None:
    """One of fifty lags for good; the others gain tokens by steps that are longer than it likes."""
    chances = [0.9, 0.8, 0.7]
    found = candidates([0.01], *[chances] * 49)
    for place in range(50):
        pace_s = 0.060 if place == 0 else 0.150
        found.require(place, due_at(pace_s), promised=False)
    free = count(candidates([0.01], *[chances] * 49), load(50))
    assert count(found, load(50)) == free > 90


def test_another_path_must_pay_for_itself_unless_an_objective_needs_it() -> None:
    """A second guess of 0.4 that costs two tokens stands behind a third token of 0.3."""
    offsets, parents = np.array([0, 4]), np.array([-1, -1, 0, 2], dtype=np.int32)
    chances, worths = np.array([0.5, 0.4, 0.35, 0.3]), np.array([0.5, 0.2, 0.35, 0.3])
    found = CandidateTrees(offsets, parents, chances, worths, np.array([8]))
    assert found.likely().tolist() == [0.5, 0.35, 0.3, 0.2]
    assert found.select(3, 0.030, 0.0).tolist() == [2, 0, 2, 2]
    found.require(0, due_at(0.030, 1.0), promised=False)
    assert found.select(2, 0.027, 0.0).tolist() == [1, 1, 0, 0]


def test_needed_nodes_come_first() -> None:
    found = candidates([0.9, 0.8], [0.9, 0.8], [0.3])
    found.require(1, due_at(0.030, 0.2), promised=True)
    assert found.select(100, 0.030, 0.0, throughput=False).tolist() == [0, 0, 1, 0, 0]
    assert found.select(1, 0.030, 0.0).tolist() == [0, 0, 1, 0, 0]
    assert found.select(1, 0.010, 0.0).tolist() == [2, 0, 0, 0, 0], "a short step needs none"
    assert found.select(2, 0.030, 0.95).tolist() == [2, 0, 2, 0, 0], "beneath the floor"
    found.leave_out(np.array([True, False, True]))
    assert found.select(1, 0.030, 0.0).tolist() == [2, 0, 0, 0, 0]


@given(
    trees=st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), min_size=1, max_size=12),
    others=st.integers(0, 300),
    limit_s=st.one_of(st.just(INFINITY), st.floats(0.01, 0.5)),
    pace_s=st.one_of(st.just(INFINITY), st.floats(0.01, 0.5)),
)
def test_no_step_exceeds_its_tokens_nor_what_there_is(
    trees: list[list[float]], others: int, limit_s: float, pace_s: float
) -> None:
    found = candidates(*[sorted(tree, reverse=True) for tree in trees])
    if pace_s < INFINITY:
        found.require(0, TPOTNeeds(pace_s, pace_s, 0.5), promised=False)
    roots = len(trees)
    step = load(roots, others=others, planned=roots + others, limit_s=limit_s, max_tokens=400)
    nodes = count(found, step)
    assert 0 <= nodes <= min(sum(map(len, trees)), 400 - roots - others)
    if limit_s < INFINITY and nodes:
        assert FLAT.predict_s(roots + others + nodes) <= limit_s + 1e-9


@given(
    trees=st.lists(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4), min_size=1, max_size=6),
    tpots=st.lists(st.floats(0.01, 0.1), min_size=6, max_size=6),
    owed=st.lists(st.floats(-1.0, 2.0), min_size=6, max_size=6),
)
def test_no_cut_serves_objectives_better(
    trees: list[list[float]], tpots: list[float], owed: list[float]
) -> None:
    """Of the parts of what would pay, none gives more of the pace that is asked for, up to where
    it is enough."""
    ordered = [sorted(tree, reverse=True) for tree in trees]
    found = candidates(*ordered)
    needs = [TPOTNeeds(tpot_s, tpot_s, late) for tpot_s, late in zip(tpots, owed, strict=True)]
    for place in range(len(trees)):
        found.require(place, needs[place], promised=False)
    roots = len(trees)

    def served(marks: np.ndarray) -> float:
        step_s = FLAT.predict_s(roots + int(np.count_nonzero(marks)))
        paces = (1.0 + found.gains(marks > 0)) * np.asarray(tpots[:roots]) / step_s
        return float(np.minimum(paces, 1.0).sum())

    marks = nodes_of_step(found, load(roots), FLAT, FLAT)
    chosen, enough = served(marks), ENOUGH * roots
    nothing = served(np.zeros_like(marks))
    likely = found.likely()
    paying = worthwhile_nodes(likely, roots, 0, 0, FLAT, 500)
    assert chosen >= min(nothing, enough) - 1e-9
    if not found.behind(FLAT.predict_s(roots + len(found.chances))):
        everything = found.select(paying, 0.0, 0.0)
        assert chosen >= min(served(everything), enough) - 1e-9
