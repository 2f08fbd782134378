# SPDX-License-Identifier: Apache-2.0
"""Decodes that vLLM leaves out of a step are not planned, and no step counts as stalled by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_slo import SLO
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.scheduling.step_schedule import StepSchedule
from vllm_slo.sim.harness import EngineShape, VirtualEngine

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
CHAT = SLO(ttft_ms=5000, tpot_ms=100)
WITHOUT = SLO(ttft_ms=5000, tier="best_effort")
"""It has no promise, so every step is planned."""


class Planned(Scheduler):
    """Keeps the plan of each step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.plans: list[StepSchedule | None] = []

    def _schedule(self, throttle_prefills: bool, plan: StepSchedule | None) -> SchedulerOutput:
        self.plans.append(plan)
        return super()._schedule(throttle_prefills, plan)


def engine(folder: Path, **options: Any) -> VirtualEngine:
    return VirtualEngine(
        Planned,
        folder,
        ROOFLINE.predict_shape_s,
        believed=ROOFLINE,
        overlap=True,
        **options,
    )


def plan_after(one: VirtualEngine, steps: int) -> tuple[SchedulerOutput, StepSchedule | None]:
    for _ in range(steps):
        one.step()
    output = one.scheduler.schedule()
    return output, one.scheduler.plans[-1]


@pytest.mark.parametrize("slo", [CHAT, None], ids=["promised", "best effort"])
def test_a_decode_that_is_certain_to_be_the_last_is_left_out(
    config_folder: Path, slo: SLO | None
) -> None:
    """Two tokens: both are on their way when the third step is scheduled."""
    one = engine(config_folder)
    one.add("short", 16, 2, slo)
    one.add("asks", 16, 400, WITHOUT)
    output, plan = plan_after(one, 2)
    assert plan is not None
    assert list(output.num_scheduled_tokens) == ["asks"]
    assert not plan.tokens.get("short")
    assert plan.token_budget == output.total_num_scheduled_tokens
    assert [request.request_id for request in one.scheduler.running] == ["short", "asks"]


def test_alone_it_stalls_no_step(config_folder: Path) -> None:
    """The step after would then have been scheduled without limits."""
    one = engine(config_folder)
    one.add("short", 16, 2, WITHOUT)
    output, _ = plan_after(one, 2)
    assert not output.num_scheduled_tokens
    assert not one.scheduler._controller._stalled
    one.run()
    assert one.outcomes["short"].finish_reason == "stop"


def test_a_decode_at_the_longest_context_is_left_out(config_folder: Path) -> None:
    """The model's length ends an answer as its cap does."""
    shape = EngineShape(max_model_len=64)
    one = engine(config_folder, shape=shape)
    one.add("long", 62, 400, CHAT)
    one.add("asks", 16, 400, WITHOUT)
    output, plan = plan_after(one, 2)
    assert plan is not None
    assert list(output.num_scheduled_tokens) == ["asks"]
    assert not plan.tokens.get("long")


def test_a_decode_whose_turn_is_later_is_left_out(config_folder: Path) -> None:
    """Pipeline parallelism with vLLM's V2 runner lets a request decode every few steps."""
    one = engine(config_folder)
    later = one.add("later", 16, 400, CHAT)
    one.add("asks", 16, 400, WITHOUT)
    one.step()
    later.next_decode_eligible_step = one.scheduler.current_step + 2
    output, plan = plan_after(one, 0)
    assert plan is not None
    assert list(output.num_scheduled_tokens) == ["asks"]
    assert not plan.tokens.get("later")
    output, _ = plan_after(one, 0)
    assert "later" in output.num_scheduled_tokens


def test_a_preempted_request_waits_for_its_output(config_folder: Path) -> None:
    """vLLM resumes it once the token that was on its way has come."""
    one = engine(config_folder)
    request = one.add("resumes", 16, 40, WITHOUT)
    for _ in range(3):
        one.step()
    one.scheduler._state.preempt(request, 0.0)
    output, _ = plan_after(one, 0)
    assert not output.num_scheduled_tokens
    assert not one.scheduler._controller._stalled
    one.run()
    assert len(one.outcomes["resumes"].token_ids) == 40
