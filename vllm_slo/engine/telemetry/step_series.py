# SPDX-License-Identifier: Apache-2.0
"""How long steps took against what was predicted.

As it is once a step, it is counted in plain numbers, which become Prometheus series when they are
collected. Prometheus's multiprocess mode (several API servers) collects no such numbers, only the
values of its own series. `SharedStepSeries` counts in these; a step costs 7 us there.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Final, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from vllm_slo.engine.telemetry.series import RATIO_BUCKETS, SeriesMaker

__all__ = ["SharedStepSeries", "StepSeries", "Steps", "step_series"]

_RATIO: Final = (
    "vllm_slo:step_time_ratio",
    "Measured step time over predicted step time.",
)
_PREDICTED: Final = ("vllm_slo:step_predicted_seconds", "Predicted step time.")
_MEASURED: Final = ("vllm_slo:step_seconds", "Measured step time.")


class Steps(Protocol):
    """The step times of one engine."""

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Compare one step's time with its prediction."""


def step_series(registry: CollectorRegistry, make: SeriesMaker, engine: str) -> Steps:
    """The series of an engine's steps, in its registry."""
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return SharedStepSeries(make)
    series = StepSeries(engine)
    registry.register(series)
    return series


class StepSeries(Collector):
    """Counted in plain numbers."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._predicted_s = 0.0
        self._actual_s = 0.0
        self._ratios = 0.0
        self._counts = [0] * (len(RATIO_BUCKETS) + 1)

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """As `Steps`."""
        if predicted_s > 0.0 and actual_s > 0.0:
            ratio = actual_s / predicted_s
            self._counts[bisect_left(RATIO_BUCKETS, ratio)] += 1
            self._ratios += ratio
            self._predicted_s += predicted_s
            self._actual_s += actual_s

    def collect(self) -> Iterable[Metric]:
        labels = [self._engine]
        bounds = [*map(floatToGoString, RATIO_BUCKETS), "+Inf"]
        ratio = HistogramMetricFamily(*_RATIO, labels=["engine"])
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        ratio.add_metric(labels, buckets, self._ratios)
        yield ratio
        for named, seconds in ((_PREDICTED, self._predicted_s), (_MEASURED, self._actual_s)):
            series = CounterMetricFamily(*named, labels=["engine"])
            series.add_metric(labels, seconds)
            yield series


class SharedStepSeries:
    """Counted in Prometheus's own series."""

    def __init__(self, make: SeriesMaker) -> None:
        self._ratio = make.histogram(*_RATIO, buckets=RATIO_BUCKETS).of()
        self._predicted = make.counter(*_PREDICTED).of()
        self._measured = make.counter(*_MEASURED).of()

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """As `Steps`."""
        if predicted_s > 0.0 and actual_s > 0.0:
            self._ratio.observe(actual_s / predicted_s)
            self._predicted.inc(predicted_s)
            self._measured.inc(actual_s)
