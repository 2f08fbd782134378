# SPDX-License-Identifier: Apache-2.0
"""Without chunked prefill nothing is promised, and every decision is vLLM's own."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from test_stock_equivalence import ROOFLINE, Op, Script, TracedEngine, Traffic, compare, plain
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_slo import SLO
from vllm_slo.core.routing.policy import route
from vllm_slo.core.routing.virtual_replica import RoutedRequest, VirtualReplica
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.scheduling.obstacles import NO_CHUNKED_PREFILL
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.slo.verdicts import unpack_quote

SHAPE = EngineShape(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
CLASSES = {"classes": {"chat": {"ttft_ms": 900, "tpot_ms": 60}}, "default_class": "chat"}
ORDERED = {
    "best_effort": {"order": "laps_sd"},
    "quotas": {"default": {"promised_tokens_per_s": 10, "burst_tokens": 100}},
}
SLOS = (
    SLO(ttft_ms=800, tpot_ms=60),
    SLO(ttft_ms=0.001),
    SLO(tpot_ms=30),
    SLO(tpot_ms=100, tier="best_effort"),
    SLO(ttft_ms=5000, tpot_ms=100, value=3.0),
    None,
)


@pytest.fixture
def engine(config_folder: Path) -> Callable[..., VirtualEngine]:
    def make(cls: type[AsyncScheduler] = Scheduler, **options: Any) -> VirtualEngine:
        return VirtualEngine(
            cls,
            config_folder,
            ROOFLINE.predict_shape_s,
            **{
                "shape": SHAPE,
                "believed": ROOFLINE,
                "enable_chunked_prefill": False,
                **options,
            },
        )

    return make


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What the scheduler's modules warn of."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    handler, log = Keep(), logging.getLogger("vllm_slo")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    try:
        yield said
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def with_objectives(script: Script, seed: int) -> Script:
    """The same requests, most of which ask for something."""
    rng = random.Random(seed)

    def asking(op: Op) -> Op:
        slo = rng.choice(SLOS)
        if op.kind != "submit" or slo is None or op.args[0].resumable:
            return op
        extra = tuple(slo.to_extra_args().items())
        return Op(op.kind, (replace(op.args[0], extra=op.args[0].extra + extra),))

    return {step: [asking(op) for op in ops] for step, ops in script.items()}


def pair(folder: Path, **options: Any) -> tuple[TracedEngine, TracedEngine]:
    both = [
        TracedEngine(cls, folder, shape=SHAPE, enable_chunked_prefill=False, **options)
        for cls in (Scheduler, AsyncScheduler)
    ]
    return both[0], both[1]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [None, NGRAM])
@pytest.mark.parametrize("seed", range(2))
def test_without_objectives_it_is_stock(
    config_folder: Path, overlap: bool, drafts: Any, seed: int
) -> None:
    options = {"overlap": overlap, "speculative_config": drafts}
    traffic = Traffic(prompt=150, output=60, priorities=3, aborts=0.2, sessions=1)
    seen = compare(*pair(config_folder, **options), traffic.script(seed))
    assert seen.difference is None
    assert seen.counts["scheduled"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [None, NGRAM])
@pytest.mark.parametrize("config", [{}, CLASSES, ORDERED], ids=["plain", "default", "ordered"])
def test_with_objectives_every_decision_is_stock(
    config_folder: Path, overlap: bool, drafts: Any, config: dict[str, Any]
) -> None:
    """All that differs is the report of each request that asked."""
    options = {"overlap": overlap, "speculative_config": drafts, "slo_config": config}
    ours, stock = pair(config_folder, **options)
    traffic = Traffic(prompt=150, output=60, aborts=0.1, sessions=1, strange_extra=False)
    script = with_objectives(traffic.script(7), 7)
    for step in range(3000):
        ops = script.get(step, [])
        ours.turn(ops)
        stock.turn(ops)
        assert len(ours.history) == len(stock.history)
        if ours.history:
            assert plain(ours.history[-1]) == plain(stock.history[-1])
        if step > max(script) and not ours.busy and not stock.busy:
            break
    reports = [outcome.report for outcome in ours.outcomes.values() if outcome.report]
    assert len(reports) > 10
    assert not any(report["promised"] for report in reports)
    assert {report["reason"] for report in reports} <= {NO_CHUNKED_PREFILL, None}
    assert any(report["reason"] for report in reports)
    for name, outcome in ours.outcomes.items():
        other = stock.outcomes[name]
        assert outcome.token_ids == other.token_ids
        assert outcome.token_times_s == other.token_times_s
        assert outcome.finish_reason == other.finish_reason
    assert not ours.scheduler.requests


def test_it_says_so_once_at_the_start(engine: Any) -> None:
    with warnings() as said:
        one = engine()
        for number in range(3):
            one.add(f"r{number}", 20, 5, SLO(ttft_ms=800, tpot_ms=60))
        one.run()
    assert len(said) == 1
    assert "chunked prefill" in said[0].lower()
    assert NO_CHUNKED_PREFILL in said[0]
    with warnings() as said:
        engine(enable_chunked_prefill=True)
    assert said == []


def test_a_request_is_served_and_told(engine: Any) -> None:
    one = engine()
    one.add("asks", 300, 20, SLO(ttft_ms=5000, tpot_ms=100))
    one.add("free", 300, 20, SLO(ttft_ms=5000, tpot_ms=100, tier="best_effort"))
    assert not one.scheduler.promise_now("asks")
    one.run()
    report = one.outcomes["asks"].report
    assert (report["promised"], report["reason"]) == (False, NO_CHUNKED_PREFILL)
    assert (report["tier"], report["attained"]) == ("best_effort", True)
    assert one.outcomes["free"].report["reason"] is None
    registry = one.scheduler.parts.metrics.registry
    labels = {"engine": "0", "slo_class": "custom", "outcome": "best_effort"}
    labels["reason"] = NO_CHUNKED_PREFILL
    assert registry.get_sample_value("vllm_slo:admissions_total", labels) == 1


def test_who_would_rather_be_declined_is(engine: Any) -> None:
    one = engine()
    one.add("asks", 300, 20, SLO(ttft_ms=5000, on_unattainable="decline"))
    one.add("other", 300, 20)
    one.run()
    assert str(one.outcomes["asks"].stop_reason).startswith("slo_declined:")
    assert one.outcomes["asks"].token_ids == []
    assert one.outcomes["other"].finish_reason == "stop"


def test_a_default_class_is_no_obstacle(engine: Any) -> None:
    one = engine(slo_config=CLASSES)
    one.add("r", 100, 5)
    one.run()
    assert one.outcomes["r"].report["reason"] == NO_CHUNKED_PREFILL


def test_a_quote_says_so(engine: Any) -> None:
    one = engine()
    for name, slo in (("asks", SLO(ttft_ms=5000, tpot_ms=100)), ("nothing", None)):
        one.add(name, 100, 5, slo, quote=True)
    one.run()
    for name in ("asks", "nothing"):
        quoted = unpack_quote(one.outcomes[name].stop_reason)
        assert (quoted["promised"], quoted["reason"]) == (False, NO_CHUNKED_PREFILL)
        assert quoted["cheapest"] is quoted["ttft_ms"] is quoted["tpot_ms"] is None


def test_a_front_expects_no_promise_there(engine: Any) -> None:
    double = VirtualReplica("a")
    double.update(engine().scheduler.state(), 0.0)
    asked = RoutedRequest(100, 10, 5.0, 0.5, wants_promise=True)
    assert not route(asked, [double], 0.0, rng=random.Random(0)).promised


def test_a_pooling_model_is_as_before(config_folder: Path) -> None:
    """vLLM turns chunked prefill off for some of them; they never ask for anything."""
    with warnings() as said:
        VirtualEngine(
            Scheduler,
            config_folder,
            ROOFLINE.predict_shape_s,
            SHAPE,
            runner="pooling",
            enable_chunked_prefill=False,
        )
    assert not any(NO_CHUNKED_PREFILL in one for one in said)
