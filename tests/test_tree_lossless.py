# SPDX-License-Identifier: Apache-2.0
"""Trees change the speed of an answer and nothing else: real engines in fp32, side by side.

Each engine runs in a process of its own (``tree_engine.py``). With chunked prompts, prefix caching,
preemption, penalties, logprobs, grammars, stop conditions and seeds, every request must say with
trees what it says without; the same comparison must fail as soon as a part of verification is
broken. What is drawn at random is compared by distribution.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from live_server import ONE_CORE_EACH
from scipy.stats import chi2_contingency

pytestmark = [pytest.mark.engine, pytest.mark.slow]

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


TREES = {"trees": True}
PLAIN = {"trees": False}
SEEDED = {"seeded": True, "every": 4}
FEW = {"every": FEWER}
DRAWN = {"sample": DRAWS}


def run(ask: str) -> dict[str, Any]:
    """What the requests of one engine got, and what happened in it."""
    done = subprocess.run(
        [sys.executable, str(CHILD), ask],
        env=os.environ | ONE_CORE_EACH,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """All that the chosen tests ask for, two at once and ahead of their turn."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asks = [ask for i in items if i.module is request.module for ask in i.callspec.params["ran"]]
    with ThreadPoolExecutor(2) as pool:
        yield {ask: pool.submit(run, ask) for ask in dict.fromkeys(asks)}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def ran(
    request: pytest.FixtureRequest, engines: dict[str, Future[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What came out of the engines that a test names."""
    return [engines[ask].result() for ask in request.param]


def naming(**runs: Sequence[dict[str, Any]]) -> pytest.MarkDecorator:
    """Run a test with these engines, once for each name."""
    asks = [[json.dumps(ask, sort_keys=True) for ask in run] for run in runs.values()]
    return pytest.mark.parametrize("ran", asks, indirect=True, ids=list(runs))


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


@naming(all=[TREES, PLAIN])
def test_every_kind_of_request_says_what_it_says_without_trees(ran: list[dict[str, Any]]) -> None:
    with_trees, without = ran
    assert len(with_trees["said"]) >= 200
    assert differing(with_trees, without) == []


@naming(all=[TREES])
def test_the_run_contained_what_it_is_to_show(ran: list[dict[str, Any]]) -> None:
    seen = ran[0]["seen"]
    assert seen["branching"] > 500, "trees, not chains"
    assert seen["tokens"] > 1.5 * seen["trees"], "nodes were accepted"
    assert seen["deepest"] == 5, "whole paths were accepted"
    assert seen["preempted"] > 0
    assert seen["cached"] > 0
    assert seen["chunks"] > 0


@naming(seeded=[TREES | SEEDED, PLAIN | SEEDED])
def test_seeded_requests_draw_what_they_draw_without_trees(ran: list[dict[str, Any]]) -> None:
    with_trees, without = ran
    assert with_trees["seen"]["tokens"] > with_trees["seen"]["trees"]
    assert differing(with_trees, without) == []


@naming(few=[TREES | FEW | {"masked": True}, PLAIN | FEW])
def test_masks_verify_what_rows_verify(ran: list[dict[str, Any]]) -> None:
    """What a kernel that takes masks is told, by a dense one on CPU."""
    masked, without = ran
    assert masked["seen"]["branching"] > 100
    assert differing(masked, without) == []


@naming(
    **{
        f"{part}_of_{kind}": [TREES | FEW | {"break": part} | how, PLAIN | FEW]
        for part in ("mask", "compaction")
        for kind, how in (("rows", {}), ("masks", {"masked": True}))
    },
    positions=[TREES | FEW | {"break": "positions"}, PLAIN | FEW],
)
def test_a_broken_part_is_noticed(ran: list[dict[str, Any]]) -> None:
    assert len(differing(*ran)) > 10


@naming(few=[TREES | FEW | {"watch": True}])
def test_the_draft_has_seen_all_that_it_guesses_from(ran: list[dict[str, Any]]) -> None:
    """A hole in its KV cache makes no answer wrong, only its guesses."""
    assert ran[0]["seen"]["roots"] > 300
    assert ran[0]["seen"]["wrong"] == 0


@naming(few=[TREES | FEW | {"watch": True, "break": "draft"}])
def test_a_hole_in_the_drafts_cache_is_noticed(ran: list[dict[str, Any]]) -> None:
    assert ran[0]["seen"]["wrong"] > 0


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


@naming(drawn=[TREES | DRAWN, PLAIN | DRAWN])
def test_random_draws_have_the_same_joint_distribution(ran: list[dict[str, Any]]) -> None:
    with_trees, without = ran
    assert with_trees["seen"]["tokens"] > 1.2 * with_trees["seen"]["trees"]
    assert joint_p_value(with_trees, without) > 1e-3


@naming(drawn=[TREES | DRAWN | {"break": "walk"}, PLAIN | DRAWN])
def test_a_walk_that_accepts_too_much_is_noticed(ran: list[dict[str, Any]]) -> None:
    broken, without = ran
    assert joint_p_value(broken, without) < 1e-6
