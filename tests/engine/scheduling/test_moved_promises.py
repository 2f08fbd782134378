# SPDX-License-Identifier: Apache-2.0
"""A promise of which nothing is computed gives way to requests that are worth more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_slo import SLO
from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import VirtualEngine
from vllm_slo.slo.verdicts import Declined, unpack

pytestmark = [pytest.mark.slow, pytest.mark.versions]

SIX_A_UNIT = StepTimeModel(((0.0, 0.0, 0.0), (1 / 6, 0.0, 0.0)), max_tokens=1000)


def busy(config_folder: Path, **long: Any) -> VirtualEngine:
    """Three requests decode, which leaves three tokens a second to prompts. A prompt of 3 tokens
    has the first second, and a long one is promised that is due at 6 s: 12 of the 15 tokens that
    there are from 1 s on."""
    engine = VirtualEngine(
        Scheduler,
        config_folder,
        SIX_A_UNIT.predict_shape_s,
        believed=SIX_A_UNIT,
        slo_config={"tpot_window_tokens": 1},
    )
    for number in range(3):
        engine.add(f"old{number}", 1, 30, SLO(ttft_ms=6000, tpot_ms=1000))
    engine.step()
    begun_s = engine.clock.now_s
    engine.add("first", 3, 1, SLO(ttft_ms=1000))
    engine.add("long", 12, 2, SLO(ttft_ms=6000, tpot_ms=1000, **long))
    while engine.clock.now_s < begun_s + 1.0 - 1e-6:
        engine.step()
    parts = engine.scheduler.parts
    assert parts.tracker.get("long").promised
    assert parts.tracker.get("long").request.num_computed_tokens == 0
    return engine


def promised(engine: VirtualEngine, names: str) -> list[bool]:
    engine.run()
    return [engine.outcomes[name].promised_in_time for name in names.split()]


def test_a_long_promise_gives_way_to_two_short_ones(config_folder: Path) -> None:
    engine = busy(config_folder)
    for name in ("a", "b"):
        engine.add(name, 4, 2, SLO(ttft_ms=4000, tpot_ms=1000))
    assert promised(engine, "first long a b") == [True, False, True, True]
    long = engine.outcomes["long"]
    assert long.report["reason"] == "prefill" and long.finish_reason == "stop"
    assert [engine.outcomes[name].report["attained"] for name in "ab"] == [True, True]
    assert moved(engine) == 1


def test_it_does_not_give_way_to_one(config_folder: Path) -> None:
    engine = busy(config_folder)
    engine.add("a", 4, 2, SLO(ttft_ms=4000, tpot_ms=1000))
    assert promised(engine, "long a") == [True, False]
    assert moved(engine) == 0


def test_it_gives_way_to_one_that_is_worth_more(config_folder: Path) -> None:
    engine = busy(config_folder)
    engine.add("a", 4, 2, SLO(ttft_ms=4000, tpot_ms=1000, value=1.2))
    assert promised(engine, "long a") == [False, True]


@pytest.mark.parametrize("declines", [False, True])
def test_a_promise_to_a_front_moves_and_is_declined_where_it_is_to_be(
    config_folder: Path, declines: bool
) -> None:
    """The front that is answered 429 asks the next replica."""
    engine = busy(config_folder, **({"on_unattainable": "decline"} if declines else {}))
    engine.scheduler.parts.tracker.get("long").ticket = Ticket("", 7)
    for name in ("a", "b"):
        engine.add(name, 4, 2, SLO(ttft_ms=4000, tpot_ms=1000))
    assert promised(engine, "a b") == [True, True]
    assert moved(engine) == 1
    long = engine.outcomes["long"]
    assert len(long.token_ids) == (0 if declines else 2)
    if declines:
        assert isinstance(unpack(long.stop_reason), Declined)


@pytest.mark.parametrize("how", ["declines", "computed"])
def test_what_somebody_relies_on_is_not_moved(config_folder: Path, how: str) -> None:
    engine = busy(config_folder, **({"on_unattainable": "decline"} if how == "declines" else {}))
    if how == "computed":
        engine.step()
        assert engine.scheduler.parts.tracker.get("long").request.num_computed_tokens
    for name in ("a", "b"):
        engine.add(name, 4, 2, SLO(ttft_ms=4000, tpot_ms=1000))
    found = promised(engine, "long a b")
    assert found[0] and not all(found)
    assert moved(engine) == 0


def moved(engine: VirtualEngine) -> float:
    """How many promises were moved, as the metrics count them."""
    registry = engine.scheduler.parts.metrics.registry
    return sum(
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "vllm_slo:admissions_total" and sample.labels["outcome"] == "moved"
    )
