# SPDX-License-Identifier: Apache-2.0
"""The recent history of the series on ``/metrics``, in bounded memory.

A page that is opened late must show what happened before, so the server samples its own series
every `STEP_S` seconds. Counters are kept as increments, which can be summed over any span; a
counter that restarts loses only its last, unsampled increment. There are two resolutions: `FINE`
samples of `STEP_S`, and `COARSE` samples of a minute, with the highest value of each gauge.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import Metric

STEP_S: Final = 2.0
FINE: Final = 450
"""Samples of `STEP_S`: a quarter of an hour."""
MINUTE_S: Final = 60.0
COARSE: Final = 360
"""Samples of a minute: six hours."""
MOST_SERIES: Final = 1_024
"""Most series; later ones are not kept. Labels have few values, but users choose class names."""
KEPT: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm_slo:admissions_total": ("slo_class", "outcome", "reason"),
    "vllm_slo:requests_finished_total": ("slo_class", "promised", "attained"),
    "vllm_slo:late_promises_finished_total": ("slo_class", "kept"),
    "vllm_slo:promises_broken_total": ("slo_class", "objective"),
    "vllm_slo:stages_finished_total": ("slo_class", "stage", "attained"),
    "vllm_slo:sessions_finished_total": ("slo_class", "attained"),
    "vllm_slo:sessions": (),
    "vllm_slo:generation_tokens_total": ("slo_class", "attained"),
    "vllm_slo:ttft_seconds_bucket": ("slo_class", "le"),
    "vllm_slo:worst_window_tpot_seconds_bucket": ("slo_class", "le"),
    "vllm_slo:step_time_ratio_count": (),
    "vllm_slo:step_seconds_total": (),
    "vllm_slo:step_predicted_seconds_total": (),
    "vllm_slo:promised_requests": (),
    "vllm_slo:best_effort_requests": (),
    "vllm_slo:best_effort_age_seconds": (),
    "vllm_slo:step_time_margin_ratio": (),
    "vllm_slo:planning_failures_total": ("part",),
    "vllm_slo:planning_stands_aside": (),
    "vllm_slo:speculation_enabled": (),
    "vllm_slo:tree_verified_tokens_total": (),
    "vllm_slo:tree_accepted_tokens_total": (),
    "vllm_slo:draft_length_tokens": ("slo_class",),
    "vllm_slo:draft_acceptance_ratio": ("slo_class",),
    "vllm_slo:tenant_acceptance_ratio": ("tenant",),
    "vllm_slo:tenant_granted_tokens": ("tenant",),
    "vllm_slo:tenant_goodput_tokens": ("tenant",),
    "vllm_slo:drafter_up": ("drafter",),
    "vllm_slo:drafter_acceptance_ratio": ("drafter",),
    "vllm_slo:drafter_granted_tokens": ("drafter",),
    "vllm_slo:drafter_verified_tokens_total": ("drafter",),
    "vllm_slo:drafter_accepted_tokens_total": ("drafter",),
    "vllm:num_requests_running": (),
    "vllm:num_requests_waiting": (),
    "vllm:kv_cache_usage_perc": (),
    "vllm:spec_decode_num_draft_tokens_total": (),
    "vllm:spec_decode_num_accepted_tokens_total": (),
}
"""Names of samples -> the labels that are kept; over other labels, such as the engine, counters
are summed."""
ADDED: Final = (
    *("_requests", "_tokens", ":sessions", ":num_requests_running", ":num_requests_waiting"),
)
"""Endings of gauges that are summed likewise; of other gauges the highest value counts."""


@dataclass(slots=True)
class _Sample:
    """Increments since the previous sample, and values at its end.

    Attributes:
        time_ms: end of the sample, epoch milliseconds.
        span_s: seconds since the end of the previous sample.
        counts: place of a counter -> its increment, unless 0.
        gauges: place of a gauge -> its value.
    """

    time_ms: int
    span_s: float
    counts: dict[int, float] = field(default_factory=dict)
    gauges: dict[int, float] = field(default_factory=dict)

    def add(self, other: _Sample) -> None:
        self.time_ms = other.time_ms
        self.span_s += other.span_s
        for place, count in other.counts.items():
            self.counts[place] = self.counts.get(place, 0.0) + count
        for place, value in other.gauges.items():
            self.gauges[place] = max(self.gauges.get(place, value), value)

    def as_list(self) -> list[Any]:
        """For JSON: [time, span, {place: increment}, {place: value}]."""
        counts = {place: round(count, 6) for place, count in self.counts.items()}
        gauges = {place: round(value, 6) for place, value in self.gauges.items()}
        return [self.time_ms, round(self.span_s, 3), counts, gauges]


class History:
    """Samples of the series in `KEPT`; one thread adds, and any thread may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[tuple[str, tuple[str, ...]], int] = {}
        self._last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._fine: deque[_Sample] = deque(maxlen=FINE)
        self._coarse: deque[_Sample] = deque(maxlen=COARSE)
        self._before_s: float | None = None

    def add(self, now_s: float, families: Iterable[Metric]) -> None:
        """Add a sample. The first one only shows where counters begin.

        ``now_s``: epoch seconds. If the clock went back, samples after ``now_s`` are dropped.
        """
        with self._lock:
            first = self._before_s is None
            time_ms = round(now_s * 1e3)
            if not first and now_s <= (self._before_s or 0.0):
                self._forget_from(time_ms)
                self._before_s = now_s
            sample = _Sample(time_ms, 0.0 if first else now_s - (self._before_s or 0.0))
            self._before_s = now_s
            self._take(sample, families, first=first)
            self._fine.append(sample)
            minute = self._coarse[-1] if self._coarse else None
            if minute is None or minute.time_ms // 60_000 != time_ms // 60_000:
                self._coarse.append(_Sample(time_ms, 0.0))
            self._coarse[-1].add(sample)

    def since(self, time_ms: int, *, coarse: bool) -> dict[str, Any]:
        """The samples that a page does not have yet, for JSON.

        Args:
            time_ms: time of the page's last sample; 0: it has none.
            coarse: whether the page shows minutes.

        Returns:
            ``series``: names with labels, by place. ``samples``: those after ``time_ms``; of
            minutes also the one at ``time_ms``, which may have grown. ``reset``: whether the page
            must drop its samples, because the one at ``time_ms`` is unknown.
        """
        grid_ms = 60_000 if coarse else 1
        with self._lock:
            kept = list(self._coarse if coarse else self._fine)
            places = [sample.time_ms // grid_ms for sample in kept]
            reset = time_ms // grid_ms not in places
            start = 0 if reset else places.index(time_ms // grid_ms) + (not coarse)
            samples = [sample.as_list() for sample in kept[start:]]
            series = [[name, *labels] for name, labels in self._places]
        return {"series": series, "samples": samples, "reset": reset}

    def _take(self, sample: _Sample, families: Iterable[Metric], *, first: bool) -> None:
        counters: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[int, float]] = {}
        for family in families:
            for name, labels, value, *_ in family.samples:
                place = self._place(name, labels)
                if place is None or not math.isfinite(value):
                    continue
                if family.type == "gauge":
                    self._add_gauge(sample.gauges, place, name, value)
                else:  # two files may be of the same engine: of one that ended, and of the next
                    key = name, tuple(sorted(labels.items()))
                    counters[key] = place, value + counters.get(key, (0, 0.0))[1]
        for key, (place, value) in counters.items():
            before = self._last.get(key, value if first else 0.0)
            self._last[key] = value
            grown = value - before if value >= before else value
            if grown > 0.0:
                sample.counts[place] = sample.counts.get(place, 0.0) + grown

    @staticmethod
    def _add_gauge(gauges: dict[int, float], place: int, name: str, value: float) -> None:
        if name.endswith(ADDED):
            gauges[place] = gauges.get(place, 0.0) + value
        else:
            gauges[place] = max(gauges.get(place, value), value)

    def _place(self, name: str, labels: Mapping[str, str]) -> int | None:
        """Place of a series in the list of `since`; None: it is not kept."""
        kept = KEPT.get(name)
        if kept is None:
            return None
        key = name, tuple(labels.get(label, "") for label in kept)
        place = self._places.get(key)
        if place is None and len(self._places) < MOST_SERIES:
            place = self._places[key] = len(self._places)
        return place

    def _forget_from(self, time_ms: int) -> None:
        for kept in (self._fine, self._coarse):
            while kept and kept[-1].time_ms >= time_ms:
                kept.pop()
