# SPDX-License-Identifier: Apache-2.0
"""How long steps took against what was predicted. Counted in plain numbers, as it is once a step;
they become Prometheus series when they are collected."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from vllm_slo.engine.telemetry.series import RATIO_BUCKETS

__all__ = ["StepSeries"]


class StepSeries(Collector):
    """The step times of one engine."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._predicted_s = 0.0
        self._actual_s = 0.0
        self._ratios = 0.0
        self._counts = [0] * (len(RATIO_BUCKETS) + 1)

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Compare one step's time with its prediction."""
        if predicted_s > 0.0 and actual_s > 0.0:
            ratio = actual_s / predicted_s
            self._counts[bisect_left(RATIO_BUCKETS, ratio)] += 1
            self._ratios += ratio
            self._predicted_s += predicted_s
            self._actual_s += actual_s

    def collect(self) -> Iterable[Metric]:
        labels = [self._engine]
        bounds = [*map(floatToGoString, RATIO_BUCKETS), "+Inf"]
        ratio = HistogramMetricFamily(
            "vllm_slo:step_time_ratio",
            "Measured step time over predicted step time.",
            labels=["engine"],
        )
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        ratio.add_metric(labels, buckets, self._ratios)
        yield ratio
        for name, text, seconds in (
            ("vllm_slo:step_predicted_seconds", "Predicted step time.", self._predicted_s),
            ("vllm_slo:step_seconds", "Measured step time.", self._actual_s),
        ):
            series = CounterMetricFamily(name, text, labels=["engine"])
            series.add_metric(labels, seconds)
            yield series
