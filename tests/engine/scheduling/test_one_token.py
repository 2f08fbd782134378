# SPDX-License-Identifier: Apache-2.0
"""Requests that yield one token: they decode nothing, and do not teach how long answers are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_slo import SLO
from vllm_slo.core.routing.policy import route
from vllm_slo.core.routing.virtual_replica import RoutedRequest, VirtualReplica
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import Outcome, VirtualEngine
from vllm_slo.slo.verdicts import unpack_quote

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
IMPOSSIBLE_MS = 0.01
"""No step is so short."""


@pytest.fixture
def engine(config_folder: Path) -> Callable[..., VirtualEngine]:
    def make(**options: Any) -> VirtualEngine:
        return VirtualEngine(
            Scheduler, config_folder, ROOFLINE.predict_shape_s, believed=ROOFLINE, **options
        )

    return make


def _request(engine: VirtualEngine, name: str, params: SamplingParams) -> Request:
    now_s, hasher = engine.clock.now_s, engine._hasher
    return Request(name, [5] * 50, params, None, now_s, block_hasher=hasher)


def decoding(engine: VirtualEngine, count: int, slo: SLO) -> None:
    """So many requests that decode from now on."""
    for number in range(count):
        engine.add(f"busy{number}", 16, 400, slo)
    for _ in range(10):
        engine.step()


@pytest.mark.parametrize("ttft_ms", [1000, None])
def test_any_tpot_is_promised(engine: Any, ttft_ms: float | None) -> None:
    one = engine()
    one.add("classify", 300, 1, SLO(ttft_ms=ttft_ms, tpot_ms=IMPOSSIBLE_MS))
    one.add("answer", 300, 2, SLO(ttft_ms=ttft_ms, tpot_ms=IMPOSSIBLE_MS))
    one.run()
    report, longer = (one.outcomes[name].report for name in ("classify", "answer"))
    assert (report["promised"], report["reason"], report["attained"]) == (True, None, True)
    assert report["tpot_ms"] is None
    assert (longer["promised"], longer["reason"]) == (False, "decode")


def test_its_ttft_is_kept_all_the_same(engine: Any) -> None:
    one = engine()
    one.add("late", 4000, 1, SLO(ttft_ms=100, tpot_ms=100))
    one.run()
    report = one.outcomes["late"].report
    assert (report["late"], report["reason"]) == (True, "prefill")


def test_nothing_is_reserved_for_its_decoding(engine: Any) -> None:
    one = engine()
    decoding(one, 8, SLO(ttft_ms=5000, tpot_ms=100))
    for number in range(40):
        one.add(f"classify{number}", 16, 1, SLO(ttft_ms=60_000, tpot_ms=21))
    one.scheduler.promise_now("classify0")
    state = one.scheduler.state()
    assert len(state.committed) == 40
    assert {demand.tpot_s for demand in state.committed} == {INFINITY}
    # Forty that decode at 21 ms would leave nothing for this one.
    one.add("answer", 16, 50, SLO(ttft_ms=5000, tpot_ms=22))
    assert one.scheduler.promise_now("answer")
    one.run()
    reports = [outcome.report for outcome in one.outcomes.values()]
    assert all(report["promised"] and report["attained"] for report in reports)


def test_without_a_ttft_it_does_not_wait_for_room_to_decode(engine: Any) -> None:
    """Who asks for a TPOT alone had better wait where it could not keep it."""
    one = engine()
    decoding(one, 20, SLO(tpot_ms=55))
    for name, tokens in (("classify", 1), ("answer", 50)):
        one.add(name, 16, tokens, SLO(tpot_ms=55))
    parts = one.scheduler.parts
    waits = {
        name: parts.starts.had_better_wait(parts.tracker.live[name])
        for name in ("classify", "answer")
    }
    assert waits == {"classify": False, "answer": True}


def test_a_quote_says_so(engine: Any) -> None:
    one = engine()
    decoding(one, 20, SLO(ttft_ms=5000, tpot_ms=100))
    slo = SLO(ttft_ms=1000, tpot_ms=IMPOSSIBLE_MS)
    one.add("one", 100, 1, slo, quote=True)
    one.add("two", 100, 2, slo, quote=True)
    one.step()
    quoted, longer = (unpack_quote(one.outcomes[name].stop_reason) for name in ("one", "two"))
    assert quoted["promised"]
    assert quoted["cheapest"] == {"ttft_ms": 1000, "tpot_ms": IMPOSSIBLE_MS}
    assert quoted["tpot_ms"] == IMPOSSIBLE_MS
    assert quoted["ttft_ms"] < 1000
    assert (longer["promised"], longer["reason"]) == (False, "decode")


def test_a_front_knows_it(engine: Any) -> None:
    one = engine()
    decoding(one, 20, SLO(ttft_ms=5000, tpot_ms=100))
    double = VirtualReplica("a")
    double.update(one.scheduler.state(), 0.0)
    for tokens, promised in ((1, True), (2, False)):
        asked = RoutedRequest(100, tokens, 5.0, IMPOSSIBLE_MS / 1e3, wants_promise=True)
        assert route(asked, [double], 0.0, rng=Random(0)).promised == promised
        assert (double.demand(asked).tpot_s == INFINITY) == promised


@pytest.mark.parametrize("order", ["fcfs", "laps_sd"])
@pytest.mark.parametrize("slo", [None, SLO(slo_class="chat"), SLO(ttft_ms=5000)])
def test_it_does_not_teach_the_length_of_answers(engine: Any, order: str, slo: Any) -> None:
    one = engine(
        slo_config={
            "classes": {"chat": {"ttft_ms": 5000, "tpot_ms": 200}},
            "best_effort": {"order": order},
        }
    )
    for number in range(20):
        one.add(f"answer{number}", 10, 40, slo, max_tokens=400)
    one.run()
    known = one.scheduler.parts.workload.lengths.all_points()
    assert [points[0] for points in known.values()] == [40]
    for number in range(300):
        # Some end there by themselves, others are cut off.
        one.add(f"one{number}", 10, 1 + number % 2 * 40, slo, max_tokens=1)
    one.run()
    assert one.scheduler.parts.workload.lengths.all_points() == known


def test_a_prefill_leg_does_not_either(engine: Any) -> None:
    """Where prefill and decode are apart, the one gets each prompt with ``max_tokens: 1``."""
    one = engine()
    for number in range(20):
        name = f"leg{number}"
        params = SamplingParams(
            max_tokens=1,
            extra_args={
                **SLO(ttft_ms=5000, tpot_ms=IMPOSSIBLE_MS).to_extra_args(),
                "kv_transfer_params": {"do_remote_decode": True},
            },
        )
        one.outcomes[name], one.lengths[name] = Outcome(one.clock.now_s, None), 50
        one.stages.ends[name] = ()
        one.scheduler.add_request(_request(one, name, params))
    one.run()
    assert all(outcome.report["promised"] for outcome in one.outcomes.values())
    assert one.scheduler.parts.workload.lengths.all_points() == {}
