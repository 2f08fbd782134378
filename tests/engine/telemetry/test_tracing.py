# SPDX-License-Identifier: Apache-2.0
"""Spans of requests with an SLO, by the real scheduler under a virtual clock; what a collector gets
of a live server is in ``test_seen_live``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_slo import SLO
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.telemetry import tracing
from vllm_slo.engine.telemetry.tracing import RequestSpans
from vllm_slo.sim.harness import VirtualEngine

MODEL = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
HEADERS = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


@pytest.fixture
def engine(config_folder: Path) -> VirtualEngine:
    return VirtualEngine(Scheduler, config_folder, MODEL.predict_shape_s, believed=MODEL)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(
        tracing, "instrument_manual", lambda name, **given: made.append({"name": name, **given})
    )
    return made


def test_without_an_endpoint_there_is_nothing_to_do(engine: Any, spans: list[Any]) -> None:
    assert RequestSpans.from_config(SimpleNamespace(otlp_traces_endpoint=None)) is None
    engine.add("one", 100, 5, SLO(ttft_ms=1000, tpot_ms=100))
    engine.run()
    assert engine.scheduler.parts.outcomes._spans is None
    assert spans == []


def traced(engine: Any) -> None:
    engine.scheduler.parts.outcomes._spans = RequestSpans.from_config(
        SimpleNamespace(otlp_traces_endpoint="http://127.0.0.1:4317")
    )


def test_a_span_says_what_was_asked_decided_and_kept(engine: Any, spans: list[Any]) -> None:
    traced(engine)
    engine.add("one", 100, 5, SLO(ttft_ms=1000, tpot_ms=100, value=2, tenant="me"))
    engine.scheduler.requests["one"].trace_headers = HEADERS
    engine.add("none", 100, 5, None)
    engine.run()
    (span,) = spans
    outcome = engine.outcomes["one"]
    assert span["name"] == "slo_request"
    assert span["attributes"] == {
        "gen_ai.request.id": "one",
        "gen_ai.usage.prompt_tokens": 100,
        "gen_ai.usage.completion_tokens": 5,
        "slo.class": "custom",
        "slo.tenant": "me",
        "slo.value": 2,
        "slo.ttft_ms": 1000,
        "slo.tpot_ms": 100,
        "slo.tier": "guaranteed",
        "slo.promised": True,
        "slo.late": False,
        "slo.ttft_achieved_ms": outcome.report["ttft_ms"],
        "slo.tpot_achieved_ms": outcome.report["tpot_ms"],
        "slo.attained": True,
        "slo.declined": False,
    }
    lived_s = outcome.token_times_s[-1] - outcome.arrival_s
    assert (span["end_time"] - span["start_time"]) / 1e9 == pytest.approx(lived_s, abs=1e-6)
    from opentelemetry.trace import get_current_span

    parent = get_current_span(span["context"]).get_span_context()
    assert f"{parent.span_id:016x}" == HEADERS["traceparent"].split("-")[2]


def test_stages_are_counted_in_the_span(engine: Any, spans: list[Any]) -> None:
    traced(engine)
    stages: Any = [{"until": "</think>", "tpot_ms": 0.001}, {"tpot_ms": 5000}]
    engine.add("one", 100, 30, SLO(ttft_ms=1000, stages=stages), stage_ends=[15])
    engine.run()
    (span,) = spans
    said = span["attributes"]
    assert (said["slo.stages"], said["slo.stages_attained"]) == (2, 1)
    assert said["slo.attained"] is False


@pytest.mark.parametrize(("wish", "declined"), [("best_effort", False), ("decline", True)])
def test_a_refusal_is_told_with_its_reason(
    engine: Any, spans: list[Any], wish: Any, declined: bool
) -> None:
    traced(engine)
    engine.add("late", 4000, 5, SLO(ttft_ms=1, on_unattainable=wish))
    engine.run()
    (span,) = spans
    said = span["attributes"]
    assert said["slo.promised"] is said["slo.late"] is not declined
    assert said["slo.tier"] == ("best_effort" if declined else "guaranteed")
    assert said["slo.reason"] in ("prefill", "expired")
    assert said["slo.declined"] is declined
    assert said.get("slo.attained") is (None if declined else False)
    assert "slo.tpot_ms" not in said and "slo.tenant" not in said


def test_an_aborted_request_has_neither_kept_nor_missed(engine: Any, spans: list[Any]) -> None:
    traced(engine)
    engine.add("gone", 100, 50, SLO(ttft_ms=1000))
    engine.step()
    engine.abort("gone")
    engine.run()
    (span,) = spans
    assert "slo.attained" not in span["attributes"]


def test_a_wall_clock_that_jumps_bends_no_span(engine: Any, spans: list[Any]) -> None:
    traced(engine)
    engine.add("one", 100, 5, SLO(ttft_ms=1000))
    clock = engine.scheduler.parts.clock.clock
    monotonic = clock.monotonic_s
    engine.scheduler.parts.outcomes._spans = Jumped(
        engine.scheduler.parts.outcomes._spans, monotonic
    )
    engine.run()
    (span,) = spans
    outcome = engine.outcomes["one"]
    lived_s = outcome.token_times_s[-1] - outcome.arrival_s
    assert (span["end_time"] - span["start_time"]) / 1e9 == pytest.approx(lived_s, abs=1e-6)


class Jumped:
    """Tells of a clock that is an hour ahead when a request ends."""

    def __init__(self, spans: RequestSpans, monotonic: Any) -> None:
        self._spans = spans
        self._clock = SimpleNamespace(monotonic_s=monotonic, epoch_s=lambda: monotonic() + 3600.0)

    def ended(self, tracked: Any, attained: bool | None, clock: Any) -> None:
        self._spans.ended(tracked, attained, self._clock)
