# SPDX-License-Identifier: Apache-2.0
"""Chains of models change the speed of an answer and nothing else: real engines in fp32.

Which models work, and how far ahead they guess, changes every few steps, in the middle of every
request; beside that prompts come in chunks, prefixes are cached and requests are preempted. See
``tree_engine.py`` for the workload.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from lossless import differing, told

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_chains_of_two_and_three_models_say_what_the_target_says() -> None:
    """Two: a draft and the target. Three: a draft, a model between them and the target."""
    chained = told("two drafts")
    assert len(chained["said"]) >= 100
    assert differing(chained, told("plain")) == []
    assert {"0", "1", "0-1", ""} == {*chained["chains"]}
    assert min(chained["chains"].values()) > 10, "all took turns"
    seen = chained["seen"]
    assert seen["tokens"] > 1.5 * seen["trees"], "guesses were accepted"
    assert seen["branching"] > 50, "chains with alternatives beside them"
    assert seen["preempted"] > 0
    assert seen["cached"] > 0
    assert seen["chunks"] > 0


def test_each_level_says_what_it_would_say_by_itself() -> None:
    """At every root every model says what it says after a pass over the whole request, and what a
    chain proposes is what its last model would go on with: with one, two and three drafts."""
    watched = told("three drafts", "watched")
    assert differing(watched, told("plain", "fewer")) == []
    assert {"0-1", "0-1-2", "1-2"} < {*watched["chains"]}
    assert watched["seen"]["roots"] > 700
    assert watched["seen"]["wrong"] == 0


def test_guesses_taken_for_what_was_said_are_noticed() -> None:
    assert told("two drafts", "guesses")["seen"]["wrong"] > 0


def test_models_that_fail_are_left_out_and_the_answers_stay() -> None:
    """One cannot be loaded, one runs out of memory in mid-service; the third goes on alone."""
    found = told("failing drafts", "fewer")
    assert differing(found, told("plain", "fewer")) == []
    assert found["there"] == [0]
    assert found["chains"]["2"] > 0, "it worked until it failed"
    before_known = sum(steps for chain, steps in found["chains"].items() if "1" in chain)
    assert before_known <= 1, "the first report tells that it was not loaded"


def test_drafts_are_warmed_up_in_every_way() -> None:
    """Before the first request: one and many requests, several new tokens of each and one."""
    warmed = {tuple(one) for one in told("two drafts")["warmed"]}
    assert {model for model, *_ in warmed} == {"draft0", "draft1"}
    for model in ("draft0", "draft1"):
        counts = {n for name, n, _ in warmed if name == model}
        assert {n for name, n, new in warmed if name == model and new > 1} >= {1, 8}
        assert {n for name, n, new in warmed if name == model and new == 1} >= {1, 8, 32}
        assert max(counts) == 32, "rows of the largest beam: speculation.draft_tokens"


def test_the_memory_of_drafts_is_profiled() -> None:
    """vLLM measures while each draft reads as many tokens as a step has."""
    profiled = told("two drafts", "guesses")["profiled"]
    assert profiled == [[96, 96], [96, 96]]
