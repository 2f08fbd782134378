# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's own features leave no room for a plan, nothing is promised, everybody is told why,
and every decision is vLLM's own."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from test_no_chunked_prefill import ORDERED, warnings, with_objectives
from test_stock_equivalence import ROOFLINE, Op, TracedEngine, Traffic, plain
from vllm.config import SchedulerConfig
from vllm.pooling_params import PoolingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.v1.request import Request

from vllm_slo import SLO
from vllm_slo.core.routing.policy import route
from vllm_slo.core.routing.virtual_replica import RoutedRequest, VirtualReplica
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.scheduling.obstacles import (
    NO_CHUNKED_PREFILL,
    PIPELINE_PARALLEL,
    PREFILL_INTERVAL,
    check_model,
    obstacle_of,
)
from vllm_slo.errors import ConfigError
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.slo.verdicts import unpack_quote

SHAPE = EngineShape(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=128, max_model_len=512)
INTERVAL = {"prefill_schedule_interval": 4}
PIPELINE = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
OBSTACLES = pytest.mark.parametrize(
    ("options", "reason"),
    [(INTERVAL, PREFILL_INTERVAL), (PIPELINE, PIPELINE_PARALLEL)],
    ids=["interval", "pipeline"],
)


def engine(folder: Path, cls: type[AsyncScheduler] = Scheduler, **options: Any) -> VirtualEngine:
    options = {"shape": SHAPE, "believed": ROOFLINE, **options}
    return VirtualEngine(cls, folder, ROOFLINE.predict_shape_s, **options)


@OBSTACLES
def test_a_request_is_served_and_told(
    config_folder: Path, options: dict[str, Any], reason: str
) -> None:
    with warnings() as said:
        one = engine(config_folder, **options)
    assert len(said) == 1
    assert said[0].endswith(f"reports say {reason}.")
    assert f"--{reason.replace('_', '-')}" in said[0]
    one.add("asks", 300, 20, SLO(ttft_ms=5000, tpot_ms=100))
    one.add("firm", 300, 20, SLO(ttft_ms=5000, on_unattainable="decline"))
    one.add("quote", 300, 20, SLO(ttft_ms=5000), quote=True)
    one.run()
    report = one.outcomes["asks"].report
    assert report is not None
    assert (report["promised"], report["reason"]) == (False, reason)
    assert len(one.outcomes["asks"].token_ids) == 20
    assert str(one.outcomes["firm"].stop_reason).startswith("slo_declined:")
    quoted = unpack_quote(one.outcomes["quote"].stop_reason)
    assert quoted is not None
    assert (quoted["promised"], quoted["reason"]) == (False, reason)
    double = VirtualReplica("a")
    double.update(one.scheduler.state(), 0.0)
    asked = RoutedRequest(100, 10, 5.0, 0.5, wants_promise=True)
    assert not route(asked, [double], 0.0, rng=random.Random(0)).promised


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason", "cls"),
    [
        (INTERVAL, PREFILL_INTERVAL, AsyncScheduler),
        (PIPELINE, PIPELINE_PARALLEL, SyncScheduler),
        ({**PIPELINE, "overlap": True}, PIPELINE_PARALLEL, SyncScheduler),
    ],
    ids=["interval", "pipeline", "full pipeline"],
)
def test_with_objectives_every_decision_is_stock(
    config_folder: Path, options: dict[str, Any], reason: str, cls: type[AsyncScheduler]
) -> None:
    """Also in the steps in which vLLM is told to hold prompts back, and where a pipeline takes the
    next step before the tokens of the last are known: vLLM on CPU has no async scheduling."""
    ours, stock = (
        TracedEngine(each, config_folder, shape=SHAPE, slo_config=ORDERED, **options)
        for each in (Scheduler, cls)
    )
    traffic = Traffic(prompt=150, output=60, throttled=0.2, strange_extra=False)
    script = with_objectives(traffic.script(7), 7)
    for step in range(3000):
        ops: list[Op] = script.get(step, [])
        ours.turn(ops)
        stock.turn(ops)
        if ours.history:
            assert plain(ours.history[-1]) == plain(stock.history[-1])
        if step > max(script) and not ours.busy and not stock.busy:
            break
    reports = [outcome.report for outcome in ours.outcomes.values() if outcome.report]
    assert {report["reason"] for report in reports} == {reason, None}


def test_pooling_requests_are_not_ordered(config_folder: Path) -> None:
    """Their prompts must not be cut where the model cannot go on with the rest of one."""
    options = {"runner": "pooling", "enable_chunked_prefill": False, "slo_config": ORDERED}
    shape = EngineShape(60, 16, 8, 128, 128)
    steps: list[dict[str, int]] = []
    for cls in (Scheduler, AsyncScheduler):
        one = engine(config_folder, cls, shape=shape, **options)
        for number, length in enumerate((100, 90, 20, 80)):
            params = PoolingParams(task="embed")
            one.scheduler.add_request(
                Request(
                    f"r{number}", [5 + number] * length, None, params, 0.0, block_hasher=one._hasher
                )
            )
        steps.append(one.scheduler.schedule().num_scheduled_tokens)
    assert steps == [{"r0": 100}, {"r0": 100}]


def test_an_encoder_decoder_is_left_to_vllm(config_folder: Path) -> None:
    """vLLM itself turns chunked prefill off for such a model."""
    one = engine(config_folder)
    config = one.config
    assert obstacle_of(config) is None
    config.scheduler_config = SchedulerConfig(max_model_len=512, is_encoder_decoder=True)
    assert obstacle_of(config) == NO_CHUNKED_PREFILL


def test_a_model_that_generates_by_diffusion_is_refused() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(is_diffusion=True))
    with pytest.raises(ConfigError, match="--scheduler-cls"):
        check_model(config)
