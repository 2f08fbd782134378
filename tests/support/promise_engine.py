# SPDX-License-Identifier: Apache-2.0
"""A virtual engine whose step times are known, for tests of what becomes of promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_slo import SLO
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import VirtualEngine

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), max_tokens=8192)
CHAT = SLO(ttft_ms=600, tpot_ms=60)
Make: TypeAlias = Callable[..., VirtualEngine]


def maker(model: Path) -> Make:
    """Makes engines of a model's folder; arguments are those of ``VirtualEngine``."""

    def engine(**options: Any) -> VirtualEngine:
        return VirtualEngine(
            Scheduler, model, ROOFLINE.predict_shape_s, believed=ROOFLINE, **options
        )

    return engine


def counts(engine: VirtualEngine, name: str) -> dict[tuple[str, ...], float]:
    """Values of a counter that are not zero, by its labels without engine and class."""
    text = generate_latest(engine.scheduler.parts.metrics.registry).decode()
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"vllm_slo:{name}_total" and sample.value:
                labels = {
                    k: v for k, v in sample.labels.items() if k not in ("engine", "slo_class")
                }
                found[tuple(labels.values())] = sample.value
    return found
