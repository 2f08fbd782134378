# SPDX-License-Identifier: Apache-2.0
"""The KV memory that best effort leaves to promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.batching.best_effort_memory import MOST_ASKED, Memory, fitting
from vllm_slo.core.types import BestEffortView


def view(name: str, needed: int, hold: int) -> BestEffortView:
    return BestEffortView(name, 0.0, 10, False, 0, needed, starts=needed > 0, hold_blocks=hold)


RUNNING = view("running", 0, 20)
SMALL, LARGE, STARVED = view("small", 5, 10), view("large", 12, 30), view("starved", 40, 60)


def names(memory: Memory, *ranked: BestEffortView, starved: str | None = None) -> list[str]:
    return [r.request_id for r in fitting(ranked, memory, starved)]


def test_best_effort_leaves_what_promises_are_likely_to_need() -> None:
    """100 blocks, of which 40 are set aside for promises and 20 for what runs."""
    ranked = RUNNING, LARGE, SMALL
    assert names(Memory(100, 50, 40, 0.0), *ranked) == ["running", "large", "small"]
    assert names(Memory(100, 50, 40, 1.0), *ranked) == ["running", "large"]
    assert names(Memory(100, 50, 40, 10.1), *ranked) == ["running", "small"]
    assert names(Memory(100, 50, 40, 30.1), *ranked) == ["running"]


def test_what_is_not_free_starts_nobody() -> None:
    assert names(Memory(100, 11, 0, 0.0), LARGE, SMALL) == ["small"]
    assert names(Memory(100, 16, 0, 0.0), LARGE, SMALL) == ["large"]


def test_the_starved_request_may_take_all_that_is_free() -> None:
    memory = Memory(100, 40, 70, 20.0)
    assert names(memory, RUNNING, STARVED) == ["running"]
    assert names(memory, RUNNING, STARVED, starved="starved") == ["running", "starved"]
    assert names(memory._replace(free=39), STARVED, starved="starved") == []


def test_warm_blocks_are_left_to_those_whose_prefixes_they_hold() -> None:
    """100 blocks, of which 20 are held by what runs and 30 are warm."""
    memory = Memory(100, 80, 0, 0.0, warm=30)
    assert names(memory, RUNNING, view("fits", 50, 50)) == ["running", "fits"]
    assert names(memory, RUNNING, view("tall", 51, 51)) == ["running"]
    assert names(memory._replace(free=34), RUNNING, SMALL) == ["running"]
    assert names(memory._replace(free=40), STARVED, starved="starved") == ["starved"]
    assert names(memory._replace(free=40), STARVED, RUNNING, starved="starved") == ["running"]
    assert len(names(memory._replace(free=70), STARVED, RUNNING, starved="starved")) == 2


def test_nobody_takes_what_the_starved_request_waits_for() -> None:
    memory = Memory(100, 39, 0, 0.0)
    assert names(memory, STARVED, RUNNING, SMALL, starved="starved") == ["running"]
    assert names(memory, STARVED, RUNNING, SMALL) == ["running", "small"]


def test_what_running_requests_hold_of_a_prompt_is_not_needed_again() -> None:
    memory = Memory(100, 10, 75, 0.0)
    assert names(memory, LARGE) == []
    fit = fitting([LARGE, SMALL], memory, present={"large": 9, "small": 0}.__getitem__)
    assert [(r.request_id, r.needed_blocks, r.hold_blocks) for r in fit] == [("large", 3, 21)]


def test_a_starved_request_that_promises_leave_no_memory_holds_nobody_back() -> None:
    """What it waits for does not come while the promises last."""
    memory = Memory(100, 39, 55, 0.0)
    assert names(memory, STARVED, SMALL, starved="starved") == ["small"]
    assert names(memory, STARVED, view("short", 0, 1), SMALL, starved="starved") == ["short"]


def test_few_requests_are_asked_what_they_would_share() -> None:
    """One that fits is not asked."""
    asked: list[str] = []
    tall = [view(f"tall{i}", 12, 12) for i in range(20)]
    fitting([SMALL, *tall], Memory(100, 10, 0, 0.0), present=lambda name: asked.append(name) or 0)
    assert asked == [f"tall{i}" for i in range(MOST_ASKED)]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), max_size=12),
    st.integers(0, 200),
    st.integers(0, 200),
    st.floats(0.0, 50.0),
    st.integers(0, 200),
)
def test_those_that_start_leave_the_spread_and_what_is_warm(
    sizes: list[tuple[int, int]], free: int, promised: int, spread: float, warm: int
) -> None:
    ranked = [view(f"r{i}", needed, max(needed, hold)) for i, (needed, hold) in enumerate(sizes)]
    memory = Memory(200, free, promised, spread, warm)
    fit = fitting(ranked, memory)
    starting = [r for r in fit if r.needed_blocks]
    assert [r for r in ranked if not r.needed_blocks] == [r for r in fit if not r.needed_blocks]
    if starting:
        assert sum(r.needed_blocks for r in starting) <= free - warm
        assert sum(r.hold_blocks for r in fit) + promised + spread + warm <= 200 + 1e-9


def test_the_spread_is_that_of_requests_that_come_in_a_poisson_process() -> None:
    """An oracle that knows nothing of the formula: requests of three sizes come and stay."""
    rng = np.random.default_rng(0)
    sizes, rate, stay_s, end_s = np.array([10, 50, 90]), 3.0, 8.0, 4000.0
    count = rng.poisson(rate * end_s)
    at = np.sort(rng.uniform(0.0, end_s, count))
    leaves = at + rng.exponential(stay_s, count)
    holds = rng.choice(sizes, count)
    times = np.arange(100.0, end_s - 100.0, 5.0)
    present = [(at <= t) & (leaves > t) for t in times]
    held = np.array([holds[mask].sum() for mask in present])
    spreads = np.array([math.sqrt((holds[mask] ** 2).sum()) for mask in present])
    assert spreads.mean() == pytest.approx(held.std(), rel=0.1)
