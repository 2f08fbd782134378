# SPDX-License-Identifier: Apache-2.0
"""While no request with an objective is live, the next one still finds steps that are short enough.

vLLM alone fills a step with prompts up to its token limit. A request that arrives in the midst of
such a step cannot be answered before its end.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from promise_engine import CHAT, Make, maker

from vllm_slo import SLO
from vllm_slo.core.batching.recent_objectives import GRID
from vllm_slo.sim.harness import EngineShape, VirtualEngine

pytestmark = [pytest.mark.slow, pytest.mark.versions]

SHAPE = EngineShape(num_blocks=4000, max_num_seqs=64, max_num_batched_tokens=8192)
BACKLOG, PROMPT = 20, 400
RESPONSIVE_S = 0.25 * 0.6
"""A quarter of the TTFT of ``CHAT``."""


@pytest.fixture
def make(config_folder: Path) -> Make:
    return maker(config_folder)


def serve_backlog(make: Make, slo: SLO | None, after_s: float) -> VirtualEngine:
    """Serve a request with ``slo``, and ``after_s`` later begin a backlog of batch work."""
    engine = make(shape=SHAPE)
    engine.add("before", 10, 2, slo)
    engine.run()
    engine.clock.advance(after_s)
    for number in range(BACKLOG):
        engine.add(f"batch{number}", PROMPT, 4)
    return engine


def test_a_request_that_arrives_in_the_midst_of_a_step_of_batch_work_is_promised(
    make: Make,
) -> None:
    engine = serve_backlog(make, CHAT, after_s=5.0)
    arrival_s = engine.clock.now_s + 0.001
    engine.step()
    assert engine.clock.now_s - arrival_s <= RESPONSIVE_S
    engine.add("chat", 200, 20, CHAT, max_tokens=20, arrival_s=arrival_s)
    engine.run()
    report = engine.outcomes["chat"].report
    assert report is not None and report["promised"] and not report["late"] and report["attained"]
    assert all(outcome.finish_reason for outcome in engine.outcomes.values())


def test_each_step_of_batch_work_is_filled_as_far_as_an_arrival_may_wait(make: Make) -> None:
    engine = serve_backlog(make, CHAT, after_s=5.0)
    for _ in range(20):
        begun_s = engine.clock.now_s
        engine.step()
        assert RESPONSIVE_S / GRID <= engine.clock.now_s - begun_s <= RESPONSIVE_S
    engine.run()
    assert all(outcome.finish_reason for outcome in engine.outcomes.values())


@pytest.mark.parametrize(
    ("slo", "after_s"),
    [
        pytest.param(None, 5.0, id="no objective was ever seen"),
        pytest.param(CHAT, 61.0, id="objectives are forgotten after a minute"),
        pytest.param(SLO(ttft_ms=20_000), 5.0, id="no step is too long for it"),
    ],
)
def test_otherwise_vllm_fills_the_step(make: Make, slo: SLO | None, after_s: float) -> None:
    engine = serve_backlog(make, slo, after_s)
    assert engine.step().total_num_scheduled_tokens == BACKLOG * PROMPT


def test_steps_that_only_decode_are_left_to_vllm(make: Make) -> None:
    engine = make(shape=SHAPE)
    engine.add("answer", 10, 50)
    engine.step()
    engine.add("chat", 10, 2, CHAT)
    while not engine.outcomes["chat"].finish_reason:
        engine.step()
    assert not engine.scheduler.parts.controller.active
    engine.add("batch", 10, 2)
    assert engine.scheduler.parts.controller.active
    engine.run()
    assert not engine.scheduler.parts.controller.active
