# SPDX-License-Identifier: Apache-2.0
"""Every series that the code can show on /metrics, with its labels, read from the code itself."""

from __future__ import annotations

import ast
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from vllm_slo.core.speculation.proportional_fairness import ClientView
from vllm_slo.engine.speculation.servers_report import ServersReport
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics
from vllm_slo.engine.telemetry.step_series import StepSeries
from vllm_slo.router.front_metrics import FrontMetrics

__all__ = ["EVERY", "engine_series", "front_series"]


def _samples(registry: CollectorRegistry) -> dict[str, set[str]]:
    """Sample name -> label names."""
    found: dict[str, set[str]] = {}
    for collector in registry._collector_to_names:
        if isinstance(collector, StepSeries):
            for family in collector.collect():
                for sample in family.samples:
                    found[sample.name] = set(sample.labels)
            continue
        assert isinstance(collector, MetricWrapperBase)
        labels, name = set(collector._labelnames), collector._name
        if isinstance(collector, Histogram):
            found |= {f"{name}_count": labels, f"{name}_sum": labels}
            found[f"{name}_bucket"] = {*labels, "le"}
        elif isinstance(collector, Counter):
            found[f"{name}_total"] = labels
        else:
            assert isinstance(collector, Gauge)
            found[name] = labels
    return found


def engine_series() -> dict[str, set[str]]:
    """Those of a scheduler that does everything."""
    series = SchedulerMetrics()
    series.speculation.speculation_on(True)
    series.speculation.draft_model_up("small", up=True)
    series.speculation.draft_lengths("chat", tokens=2.0, acceptance=0.5)
    series.speculation.tenant(
        "one", ClientView(acceptance=0.5, granted=1, goodput=1.0, utility=0.0)
    )
    series.speculation.draft_servers(ServersReport(()), {})
    series.foreseen_service(1.0, 1.0)
    series.recording()
    return _samples(series.registry)


def front_series() -> dict[str, set[str]]:
    """Those of the front of several replicas."""
    return _samples(FrontMetrics()._registry)


def vllm_series() -> dict[str, set[str]]:
    """Those of vLLM that are named in its own source, with the labels that all of them have."""
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    home = Path(spec.submodule_search_locations[0])
    found: dict[str, set[str]] = {}
    for file in ("v1/metrics/loggers.py", "v1/spec_decode/metrics.py"):
        for node in ast.walk(ast.parse((home / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
                if name.startswith("vllm:") and name.replace("_", "").replace(":", "").isalnum():
                    for ending in ("", "_total", "_count", "_sum", "_bucket"):
                        found[name + ending] = {"engine", "model_name"} | (
                            {"le"} if ending == "_bucket" else set()
                        )
    return found


EVERY: dict[str, set[str]] = {**engine_series(), **front_series()}
