# SPDX-License-Identifier: Apache-2.0
"""Trees change the speed of an answer and nothing else: real engines in fp32, side by side.

Each engine runs in a process of its own (``tree_engine.py``). With chunked prompts, prefix caching,
preemption, penalties, logprobs, grammars, stop conditions and seeds, every request must say with
trees what it says without; the same comparison must fail as soon as a part of verification is
broken. What is drawn at random is compared by distribution.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from scipy.stats import chi2_contingency

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

CHILD = Path(__file__).with_name("tree_engine.py")
LOGPROB_TOLERANCE = 2e-3
FEWER = 6
DRAWS = {
    "prompt": "def main(argv):\n    for name in ",
    "count": 2500,
    "temperature": 0.7,
    "top_p": 0.95,
    "tokens": 4,
}


@functools.cache
def run(**said: Any) -> dict[str, Any]:
    """What the requests of one engine got, and what happened in it."""
    drawn = {"sample": DRAWS} if said.pop("draws", False) else {}
    done = subprocess.run(
        [sys.executable, str(CHILD), json.dumps({**said, **drawn})],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[int]:
    """The requests that got something else: tokens, text, reason of their end, logprobs."""
    assert len(one["said"]) == len(other["said"])
    return [
        place
        for place, (a, b) in enumerate(zip(one["said"], other["said"], strict=True))
        if any(a[key] != b[key] for key in ("tokens", "text", "end"))
        or _logprobs_differ(a["logprobs"], b["logprobs"])
    ]


def _logprobs_differ(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is not other
    return any(
        abs(dict(map(tuple, a)).get(token, 99.0) - logprob) > LOGPROB_TOLERANCE
        for a, b in zip(one, other, strict=True)
        for token, logprob in b
    )


def test_every_kind_of_request_says_what_it_says_without_trees() -> None:
    with_trees, without = run(trees=True), run(trees=False)
    assert len(with_trees["said"]) >= 200
    assert differing(with_trees, without) == []


@pytest.mark.real_data
def test_public_problems_get_what_they_get_without_trees() -> None:
    with_trees, without = run(trees=True, public=True), run(trees=False, public=True)
    assert len(with_trees["said"]) >= 200
    assert differing(with_trees, without) == []
    assert with_trees["seen"]["branching"] > 500


def test_the_run_contained_what_it_is_to_show() -> None:
    seen = run(trees=True)["seen"]
    assert seen["branching"] > 500, "trees, not chains"
    assert seen["tokens"] > 1.5 * seen["trees"], "nodes were accepted"
    assert seen["deepest"] == 5, "whole paths were accepted"
    assert seen["preempted"] > 0
    assert seen["cached"] > 0
    assert seen["chunks"] > 0


def test_seeded_requests_draw_what_they_draw_without_trees() -> None:
    with_trees = run(trees=True, seeded=True, every=4)
    assert with_trees["seen"]["tokens"] > with_trees["seen"]["trees"]
    assert differing(with_trees, run(trees=False, seeded=True, every=4)) == []


def test_masks_verify_what_rows_verify() -> None:
    """What a kernel that takes masks is told, by a dense one on CPU."""
    masked = run(trees=True, masked=True, every=FEWER)
    assert masked["seen"]["branching"] > 100
    assert differing(masked, run(trees=False, every=FEWER)) == []


@pytest.mark.parametrize("masked", [False, True], ids=["rows", "masks"])
@pytest.mark.parametrize("part", ["mask", "compaction"])
def test_a_broken_part_is_noticed(part: str, masked: bool) -> None:
    broken = run(trees=True, every=FEWER, masked=masked, **{"break": part})
    assert len(differing(broken, run(trees=False, every=FEWER))) > 10


def test_wrong_positions_are_noticed() -> None:
    broken = run(trees=True, every=FEWER, **{"break": "positions"})
    assert len(differing(broken, run(trees=False, every=FEWER))) > 10


def test_the_draft_has_seen_all_that_it_guesses_from() -> None:
    """A hole in its KV cache makes no answer wrong, only its guesses."""
    seen = run(trees=True, watch=True, every=FEWER)["seen"]
    assert seen["roots"] > 300
    assert seen["wrong"] == 0


def test_a_hole_in_the_drafts_cache_is_noticed() -> None:
    seen = run(trees=True, watch=True, every=FEWER, **{"break": "draft"})["seen"]
    assert seen["wrong"] > 0


def joint_p_value(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Whether both draw the last three tokens from the same joint distribution (chi-square)."""
    counts = [Counter(tuple(said["tokens"][1:]) for said in run_["said"]) for run_ in (one, other)]
    both = counts[0] + counts[1]
    often = [joint for joint, count in both.items() if count >= 20]
    table = [[c[joint] for joint in often] + [sum(c.values())] for c in counts]
    for row in table:
        row[-1] -= sum(row[:-1])
    assert len(often) > 10
    return float(chi2_contingency(table).pvalue)


def test_random_draws_have_the_same_joint_distribution() -> None:
    with_trees = run(trees=True, draws=True)
    assert with_trees["seen"]["tokens"] > 1.2 * with_trees["seen"]["trees"]
    assert joint_p_value(with_trees, run(trees=False, draws=True)) > 1e-3


def test_a_walk_that_accepts_too_much_is_noticed() -> None:
    broken = run(trees=True, draws=True, **{"break": "walk"})
    assert joint_p_value(broken, run(trees=False, draws=True)) < 1e-6
