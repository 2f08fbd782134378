# SPDX-License-Identifier: Apache-2.0
"""Trees change the speed of an answer and nothing else: real engines in fp32, side by side.

Each engine runs in a process of its own (``tree_engine.py``). With chunked prompts, prefix caching,
preemption, penalties, logprobs, grammars, stop conditions and seeds, every request must say with
trees what it says without; the same comparison must fail as soon as a part of verification is
broken. What is drawn at random is compared by distribution.
"""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm")

from lossless import Said, differing, told
from scipy.stats import chi2_contingency

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.versions
def test_every_kind_of_request_says_what_it_says_without_trees() -> None:
    assert len(told("trees")["said"]) >= 100
    assert differing(told("trees"), told("plain")) == []


@pytest.mark.real_data
def test_public_problems_get_what_they_get_without_trees() -> None:
    with_trees = told("public trees")
    assert len(with_trees["said"]) >= 100
    assert differing(with_trees, told("public plain")) == []
    assert with_trees["seen"]["branching"] > 250


@pytest.mark.versions
def test_the_run_contained_what_it_is_to_show() -> None:
    seen = told("trees")["seen"]
    assert seen["branching"] > 250, "trees, not chains"
    assert seen["tokens"] > 1.5 * seen["trees"], "nodes were accepted"
    assert seen["deepest"] == 5, "whole paths were accepted"
    assert seen["preempted"] > 0
    assert seen["cached"] > 0
    assert seen["chunks"] > 0


def test_seeded_requests_draw_what_they_draw_without_trees() -> None:
    with_trees = told("seeded trees", "fewer")
    assert with_trees["seen"]["tokens"] > with_trees["seen"]["trees"]
    assert differing(with_trees, told("seeded plain", "fewer")) == []


def test_masks_verify_what_rows_verify() -> None:
    """What a kernel that takes masks is told, by a dense one on CPU."""
    masked = told("masks", "fewer")
    assert masked["seen"]["branching"] > 100
    assert differing(masked, told("plain", "fewer")) == []


@pytest.mark.parametrize("engine", ["trees", "masks"])
@pytest.mark.parametrize("part", ["mask", "compaction"])
def test_a_broken_part_is_noticed(part: str, engine: str) -> None:
    assert len(differing(told(engine, part), told("plain", "fewer"))) > 8


def test_wrong_positions_are_noticed() -> None:
    assert len(differing(told("trees", "positions"), told("plain", "fewer"))) > 8


def test_the_draft_has_seen_all_that_it_guesses_from() -> None:
    """A hole in its KV cache makes no answer wrong, only its guesses."""
    seen = told("trees", "watched")["seen"]
    assert seen["roots"] > 250
    assert seen["wrong"] == 0


def test_a_hole_in_the_drafts_cache_is_noticed() -> None:
    assert told("trees", "hole")["seen"]["wrong"] > 0


def tokens_a_tree(said: Said) -> float:
    return float(said["seen"]["tokens"] / said["seen"]["trees"])


def test_a_draft_that_rested_catches_up_in_one_pass() -> None:
    """Steps without drafting make no pass of the draft, and it misses their tokens. The first pass
    after them reads these, too: no further pass is made, and guesses are as good as without."""
    rested, always = told("trees", "rests"), told("trees", "watched")
    assert differing(rested, told("plain", "fewer")) == []
    seen = rested["seen"]
    assert (seen["roots"] > 100, seen["wrong"]) == (True, 0)
    resumed, going_on = seen["drafting"]["resumed"], seen["drafting"]["going on"]
    assert len(resumed) > 4
    assert {passes for passes, _ in resumed} == {passes for passes, _ in going_on} == {5}
    requests = 8
    assert sum(tokens for _, tokens in resumed) > 3 * requests * len(resumed), "what it missed"
    assert len(always["seen"]["drafting"]["resumed"]) <= 1, "at the start"
    assert tokens_a_tree(rested) > 0.9 * tokens_a_tree(always)


def test_a_draft_that_does_not_catch_up_is_noticed() -> None:
    hollow = told("trees", "rests for good")
    assert differing(hollow, told("plain", "fewer")) == [], "only its guesses are worse"
    assert tokens_a_tree(hollow) < 0.8 * tokens_a_tree(told("trees", "watched"))


def joint_p_value(one: Said, other: Said) -> float:
    """Whether both draw the last three tokens from the same joint distribution (chi-square)."""
    counts = [Counter(tuple(said["tokens"][1:]) for said in run_["said"]) for run_ in (one, other)]
    both = counts[0] + counts[1]
    often = [joint for joint, count in both.items() if count >= 20]
    table = [[c[joint] for joint in often] + [sum(c.values())] for c in counts]
    for row in table:
        row[-1] -= sum(row[:-1])
    assert len(often) > 10
    return float(chi2_contingency(table).pvalue)


@pytest.mark.deep
def test_random_draws_have_the_same_joint_distribution() -> None:
    with_trees = told("draws trees")
    assert with_trees["seen"]["tokens"] > 1.2 * with_trees["seen"]["trees"]
    assert joint_p_value(with_trees, told("draws plain")) > 1e-3


@pytest.mark.deep
def test_a_walk_that_accepts_too_much_is_noticed() -> None:
    assert joint_p_value(told("draws trees", "walk"), told("draws plain")) < 1e-6
