# SPDX-License-Identifier: Apache-2.0
"""The simulated draft model of token trees: what it reads, what it guesses, what is verified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm_slo.core.speculation.model_chain import Plan
from vllm_slo.engine.speculation import messages
from vllm_slo.sim.jobs import STOP_TOKEN, answer_token
from vllm_slo.sim.virtual_draft import SIBLING, DraftModel, VirtualDraft, beams, verified

PASS_S, TOKEN_S = 0.002, 1e-5
DRAFTS = Plan((0,), 3, 1)
LENGTH = 1000


def token_at(_: str, place: int) -> int:
    return answer_token(place, LENGTH)


def draft(rows: int = 64, pass_tokens: int = 2048) -> VirtualDraft:
    return VirtualDraft(DraftModel(PASS_S, TOKEN_S, rows), pass_tokens, token_at, 0)


def step(plan: Plan, *, drafts: int = 0, **scheduled: int) -> Any:
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_spec_decode_tokens=dict.fromkeys(scheduled, [5] * drafts) if drafts else {},
    )
    messages.attach(output, messages.StepTrees({}, plan))
    return output


def request(computed: int, *, prefills: bool = False) -> Any:
    return SimpleNamespace(num_computed_tokens=computed, is_prefill_chunk=prefills)


def read(one: VirtualDraft, output: Any, live: Any) -> int:
    """Tokens of the first pass after a step."""
    one.work(output, live)
    return one.report.passes[0][1]


def test_it_reads_what_it_missed_when_it_drafts_again() -> None:
    one = draft()
    assert one.work(step(Plan(), a=300), {"a": request(300)}) == 0.0
    for computed in range(301, 310):
        assert one.work(step(Plan(), a=1), {"a": request(computed)}) == 0.0
    assert one.report.passes == []
    took_s = one.work(step(DRAFTS, a=1), {"a": request(310)})
    assert [count for _, count, _ in one.report.passes] == [310, 1, 1]
    assert took_s == pytest.approx(3 * PASS_S + 312 * TOKEN_S)
    assert read(one, step(DRAFTS, a=1), {"a": request(311)}) == 1


def test_what_was_in_the_prefix_cache_was_read() -> None:
    assert read(draft(), step(DRAFTS, a=20), {"a": request(300)}) == 20


def test_rejected_drafts_are_not_read() -> None:
    one = draft()
    one.work(step(DRAFTS, a=300), {"a": request(300)})
    assert read(one, step(DRAFTS, drafts=3, a=4), {"a": request(304)}) == 1


def test_what_does_not_fit_one_pass_is_not_drafted_for_yet() -> None:
    one = draft(pass_tokens=250)
    live = {"a": request(400), "b": request(30)}
    assert read(one, step(DRAFTS, a=400, b=30), live) == 250
    made, best = {"a": 1, "b": 1}, {"a": 0.5, "b": 0.5}
    assert one.trees(made, best).req_ids == ["b"]
    live = {"a": request(401), "b": request(31)}
    one.work(step(DRAFTS, a=1, b=1), live)
    assert sorted(one.trees(made, best).req_ids) == ["a", "b"]


def test_a_prompt_under_way_is_read_and_not_drafted_for() -> None:
    one = draft()
    assert read(one, step(DRAFTS, a=100), {"a": request(100, prefills=True)}) == 100
    assert one.trees({"a": 0}, {"a": 0.5}).req_ids == []


@given(st.floats(0.0, 1.0), st.integers(1, 6), st.integers(1, 4))
def test_a_beam_search_keeps_the_likeliest(best: float, depth: int, width: int) -> None:
    tree = beams(best, depth, width)
    assert len(tree.parents) == depth * width
    assert all(parent < node for node, parent in enumerate(tree.parents))
    paths = np.empty(depth * width)
    for node, (parent, chance) in enumerate(zip(tree.parents, tree.chances, strict=True)):
        paths[node] = chance * (1.0 if parent < 0 else paths[parent])
    layers = paths.reshape(depth, width)
    assert (np.diff(layers, axis=1) <= 1e-12).all()
    assert layers[0, 0] == pytest.approx(max(best, SIBLING * (1.0 - best) if width > 1 else best))


@pytest.mark.parametrize(("best", "depth", "width"), [(0.7, 4, 1), (0.7, 2, 3), (1.0, 5, 1)])
def test_nodes_are_accepted_as_often_as_they_say(best: float, depth: int, width: int) -> None:
    one, plan = draft(), Plan((0,), depth, width)
    yields = []
    for made in range(3000):
        one.work(step(plan, a=1), {"a": request(100 + made)})
        trees = one.trees({"a": made % 500}, {"a": best})
        tokens, parents = trees.tokens.tolist(), trees.parents.tolist()
        yields.append(len(verified("a", tokens, parents, made % 500, token_at)))
    tree = beams(best, depth, width)
    paths: list[float] = []
    for parent, chance in zip(tree.parents, tree.chances, strict=True):
        paths.append(chance * (1.0 if parent < 0 else paths[parent]))
    assert np.mean(yields) == pytest.approx(1.0 + sum(paths), rel=0.03)


def test_an_answer_ends_with_its_last_token() -> None:
    tokens = [answer_token(place, LENGTH) for place in range(LENGTH - 3, LENGTH)] + [7]
    given_ = verified("a", tokens, [-1, 0, 1, 2], LENGTH - 3, token_at)
    assert given_ == tokens[:3]
    assert given_[-1] == STOP_TOKEN
