# SPDX-License-Identifier: Apache-2.0
"""Made-up what-if reports: seeded outcomes of made-up requests, no simulation."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_slo.sim.hardware import load_hardware
from vllm_slo.sim.whatif.numbers import Column, Kind, compare
from vllm_slo.sim.whatif.outcomes import Asked, Measured, Outcome
from vllm_slo.sim.whatif.report import Origin, Report, Setup, Trace
from vllm_slo.slo.model import SLO
from vllm_slo.traces.request import Served, TraceRequest

CLASSES: Mapping[str, SLO | None] = {
    "chat": SLO(ttft_ms=500, tpot_ms=50),
    "code": SLO(ttft_ms=1000, tpot_ms=30, e2e_ms=20_000),
    "batch": None,
}
System = tuple[str, str, Kind, float]
"""Name, title, kind, and how slow it is."""
SYSTEMS: Sequence[System] = (
    ("served", "As served", "served", 2.2),
    ("fcfs-2048", "Stock vLLM", "stock", 2.0),
    ("vllm-slo", "vllm-slo", "ours", 1.2),
)


def asked(
    classes: Mapping[str, SLO | None] = CLASSES, count: int = 300, seed: int = 0
) -> list[Asked]:
    """Requests of all classes in turn, as of a Poisson process of 4 a second."""
    rng, at_s, made = random.Random(seed), 0.0, []
    for number in range(count):
        at_s += rng.expovariate(4)
        name = list(classes)[number % len(classes)]
        request = TraceRequest(
            at_s, rng.randint(10, 2000), rng.randint(2, 400), name, served=Served()
        )
        made.append(Asked(request, name, classes[name]))
    return made


def column(requests: Sequence[Asked], system: System, seed: int) -> Column:
    """A system that makes something of each request; ours promises."""
    name, title, kind, slow = system
    rng, outcomes, spans = random.Random(seed), [], []
    for each in requests:
        ttft_s = rng.lognormvariate(-1.6, 0.7) * slow
        tpot_s = rng.lognormvariate(-3.6, 0.3) * slow**0.5
        e2e_s = ttft_s + tpot_s * each.request.output_tokens
        attained = promised = late = None
        if each.slo is not None:
            attained = ttft_s * 1e3 <= (each.slo.ttft_ms or 1e9)
            attained = attained and tpot_s * 1e3 <= (each.slo.tpot_ms or 1e9)
        if kind == "ours":
            promised = attained is True
            late = rng.random() < 0.9 if attained is False else None
        outcomes.append(
            Outcome("completed", attained, ttft_s, tpot_s, e2e_s, promised, late, 100.0)
        )
        spans.append((each.request.at_s, each.request.at_s + e2e_s, promised))
    return Column(name, title, kind, tuple(outcomes), tuple(spans))


def setup() -> Setup:
    """Two replicas, and a class with stages."""
    return Setup(
        slo_config="mine.yaml",
        rules="rules.yaml",
        window_tokens=10,
        staged=("think",),
        hardware=load_hardware("h100-llama-8b"),
        replicas=2,
        routing="slo",
        bias=1.0,
        noise=0.0,
        seed=0,
    )


def report(
    classes: Mapping[str, SLO | None] = CLASSES,
    systems: Sequence[System] = SYSTEMS,
    count: int = 300,
    **trace: Any,
) -> Report:
    """A whole report. ``trace``: fields of `Trace` to replace."""
    requests = asked(classes, count)
    measured = Measured(requests[0].request.at_s, requests[-1].request.at_s)
    columns = [column(requests, system, 0) for system in systems]
    served = any(kind == "served" for _, _, kind, _ in systems)
    facts: dict[str, Any] = {
        "name": "monday.jsonl",
        "format": "vllm-slo's recording",
        "selection": "from 0 s to 600 s",
        "requests": count + 7,
        "left_out": 1,
        "estimated": 2,
        "clipped": 3,
        "aborted": 4,
        "warmup": 3,
        "unrecorded": None if served else "There is no column of what was served.",
        "mean_tpot": False,
    }
    return Report(
        compare(requests, columns, measured, list(classes)),
        Trace(**facts | trace),
        Setup(
            "mine.yaml",
            "rules.yaml",
            10,
            ("think",),
            load_hardware("h100-llama-8b"),
            2,
            "slo",
            1.0,
            0.0,
            0,
        ),
        Origin("vllm-slo whatif monday.jsonl", "2026-12-01T12:00:00+00:00", {"vllm-slo": "1"}),
    )
