# SPDX-License-Identifier: Apache-2.0
"""Requests that begin with the same text hold its KV blocks once, and are counted so."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_slo import SLO
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.sim.jobs import own_text

MODEL = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
SYSTEM = list(range(3, 3 + 640))
"""40 blocks of 16 tokens."""
PATIENT = SLO(ttft_ms=20_000, tpot_ms=400, expected_output_tokens=60)


@pytest.fixture
def engine(config_folder: Path) -> Callable[..., VirtualEngine]:
    def make(num_blocks: int, **options: Any) -> VirtualEngine:
        shape = EngineShape(num_blocks=num_blocks)
        return VirtualEngine(
            *(Scheduler, config_folder, MODEL.predict_shape_s),
            **{"shape": shape, "believed": MODEL, **options},
        )

    return make


def ask(engine: VirtualEngine, name: str, slo: SLO | None = None, answer: int = 60) -> None:
    """The system prompt and 32 tokens of its own: 46 blocks at the end, 6 of them its own."""
    engine.add(name, [*SYSTEM, *own_text(name, 32)], answer, slo)


def committed(engine: VirtualEngine) -> int:
    parts = engine.scheduler.parts
    return parts.workload.committed(parts.clock.now_s, parts.clock.promise_model).blocks


def held(engine: VirtualEngine, *, promised: bool) -> int:
    """Blocks that running requests hold, by their numbers."""
    tracker, manager = engine.scheduler.parts.tracker, engine.scheduler.kv_cache_manager
    names = [r.request_id for r in engine.scheduler.running]
    chosen = [n for n in names if bool((t := tracker.get(n)) and t.promised) is promised]
    return len({b.block_id for n in chosen for b in manager.get_blocks(n).blocks[0]})


def test_a_system_prompt_is_set_aside_once(engine: Any) -> None:
    """100 blocks hold the system prompt and ten answers; counted for each, they hold two."""
    one = engine(101)
    ask(one, "first", PATIENT)
    for _ in range(4):
        one.step()
    for number in range(8):
        ask(one, f"later{number}", PATIENT)
    for _ in range(4):
        one.step()
        assert held(one, promised=True) <= committed(one) <= 100
    assert [tracked.promised for tracked in one.scheduler.parts.tracker] == [True] * 9
    one.run()
    reports = [outcome.report for outcome in one.outcomes.values()]
    assert [report["promised"] and not report["late"] for report in reports] == [True] * 9
    assert all(report["attained"] for report in reports)


def test_best_effort_shares_it_too(engine: Any) -> None:
    one = engine(101)
    for number in range(10):  # how long such answers are is known from now on
        one.add(f"before{number}", 40, 60)
    one.run()
    one.add("promised", 32, 200, SLO(ttft_ms=5000, tpot_ms=400, expected_output_tokens=200))
    ask(one, "first")
    for _ in range(4):
        one.step()
    for number in range(8):
        ask(one, f"later{number}")
    for _ in range(8):
        one.step()
    # 15 blocks are set aside for the promise, and as many are left free: 70 hold five of them.
    assert len(one.scheduler.running) == 1 + 5
    one.run()
    assert all(outcome.finish_reason == "stop" for outcome in one.outcomes.values())


def test_a_promise_starts_beside_those_that_hold_its_prefix(engine: Any) -> None:
    """54 blocks: there is never room for two whole prompts of 42."""
    one = engine(55)
    ask(one, "first", PATIENT)
    for _ in range(4):
        one.step()
    ask(one, "second", PATIENT)
    for _ in range(4):
        one.step()
    assert [r.request_id for r in one.scheduler.running] == ["first", "second"]
    one.run()
    assert one.outcomes["second"].report["attained"]


def test_a_promise_counts_what_only_best_effort_holds(engine: Any) -> None:
    """Of 60 blocks a promise has 15 at its end. Best effort holds the system prompt, which may go:
    so a request behind it needs 46, and is promised what it asks when the first one has ended."""
    one = engine(61)
    ask(one, "batch", answer=40)
    for _ in range(4):
        one.step()
    one.add("promised", 32, 200, SLO(ttft_ms=5000, tpot_ms=400, expected_output_tokens=200))
    for _ in range(4):
        one.step()
    assert len(one.scheduler.running) == 2
    ask(one, "asks", PATIENT)
    for _ in range(3):
        one.step()
        assert committed(one) <= 60
    one.run()
    reports = [one.outcomes[name].report for name in ("promised", "asks")]
    assert all(report["promised"] and report["attained"] for report in reports)


def test_requests_that_share_their_blocks_free_few_of_them(engine: Any) -> None:
    """Four requests of best effort hold 40 blocks together and four each. A promise needs 30 where
    20 are free: three of them must go, since each frees no more than four."""
    one = engine(78)
    ask(one, "batch0", answer=200)
    for _ in range(4):
        one.step()
    for number in range(1, 4):
        ask(one, f"batch{number}", answer=200)
    for _ in range(14):
        one.step()
    free = one.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    needed = free + 9
    one.add("promised", 16 * needed - 8, 4, SLO(ttft_ms=20_000))
    one.step()
    one.step()
    running = [r.request_id for r in one.scheduler.running]
    assert "promised" in running
    assert len(running) == 2
    one.run()
    assert one.outcomes["promised"].report["attained"]
    assert all(outcome.finish_reason == "stop" for outcome in one.outcomes.values())


def test_the_last_of_those_that_share_blocks_frees_them(engine: Any) -> None:
    """Three requests of best effort hold 40 blocks together. The promise needs nearly all blocks:
    none of them frees enough, and all of them do."""
    one = engine(61)
    ask(one, "batch0", answer=200)
    for _ in range(4):
        one.step()
    for name in ("batch1", "batch2"):
        ask(one, name, answer=200)
    for _ in range(8):
        one.step()
    assert len(one.scheduler.running) == 3
    one.add("promised", 55 * 16, 4, SLO(ttft_ms=20_000))
    one.step()
    one.step()
    assert [r.request_id for r in one.scheduler.running] == ["promised"]
    one.run()
    assert one.outcomes["promised"].report["attained"]
    assert all(outcome.finish_reason == "stop" for outcome in one.outcomes.values())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("overlap", [False, True])
def test_no_less_is_set_aside_than_promises_hold(engine: Any, seed: int, overlap: bool) -> None:
    """Prompts share nothing, a part of a prefix, all of it, or one that divides."""
    rng = random.Random(seed)
    one = engine(201, overlap=overlap)
    trunks = [SYSTEM[:320], [*SYSTEM[:160], *own_text("branch", 480)], SYSTEM]
    requests, summed, distinct = [], 0, 0
    for number in range(60):
        trunk = rng.choice([[], *trunks])
        prompt = [*trunk[: rng.choice([96, 200, 640])], *own_text(f"r{number}", rng.randint(8, 90))]
        answer = rng.randint(4, 60)
        slo = SLO(ttft_ms=rng.choice([400, 4000]), tpot_ms=400, expected_output_tokens=answer)
        requests.append(one.add(f"r{number}", prompt, answer, slo if rng.random() < 0.8 else None))
        for _ in range(rng.randint(0, 4)):
            one.step()
            holding = held(one, promised=True)
            assert holding <= committed(one)
            manager, tracker = one.scheduler.kv_cache_manager, one.scheduler.parts.tracker
            distinct += holding
            summed += sum(
                len(manager.get_blocks(r.request_id).blocks[0])
                for r in one.scheduler.running
                if (tracked := tracker.get(r.request_id)) is not None and tracked.promised
            )
    assert distinct < 0.8 * summed, "much is shared"
    one.run()
    for request in requests:
        outcome = one.outcomes[request.request_id]
        assert outcome.finish_reason == "stop"
        if outcome.promised_in_time:
            assert outcome.report["attained"]
            assert not request.num_preemptions
