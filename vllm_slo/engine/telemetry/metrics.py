# SPDX-License-Identifier: Apache-2.0
"""Prometheus series of the scheduler, on vLLM's own ``/metrics``; see `exposition`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from prometheus_client import CollectorRegistry, Counter

from vllm_slo.core.lengths.forecast import ForecastError
from vllm_slo.core.sessions.stages import StageResult
from vllm_slo.engine.telemetry.exposition import SeriesFile
from vllm_slo.engine.telemetry.series import RATIO_BUCKETS, Members, SeriesMaker
from vllm_slo.engine.telemetry.speculation_metrics import SpeculationMetrics
from vllm_slo.engine.telemetry.step_series import step_series

__all__ = ["SchedulerMetrics"]

PUBLISH_INTERVAL_S = 1.0
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TPOT_BUCKETS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
_ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
_GAUGES = {
    "promised_requests": "Live requests whose objectives are promised.",
    "best_effort_requests": "Live requests with an SLO and no promise.",
    "best_effort_age_seconds": "Age of the oldest request with an SLO and no promise.",
    "step_time_margin_ratio": "Margin that promises keep on predicted step times.",
    "step_time_bias_ratio": "Correction learnt from live steps.",
    "sessions": "Sessions that have not ended.",
    "warm_prefix_blocks": "KV blocks of sessions that are evicted after all others.",
    "planning_stands_aside": "1 while planning stands aside because it failed many steps in a row: "
    "vLLM schedules alone, and nothing is promised. Else 0.",
}


def _attained_label(attained: bool | None) -> str:
    return "none" if attained is None else str(attained).lower()


class SchedulerMetrics:
    """The series of one scheduler. Labels are class names from the configuration, nothing wider.

    Series of features that an engine may not use are exposed from their first value on.

    Attributes:
        registry: all series.
        speculation: those of draft tokens.
    """

    def __init__(self, engine: int = 0) -> None:
        self.registry = CollectorRegistry()
        self._file = SeriesFile(self.registry, engine)
        self._make = make = SeriesMaker(self.registry, str(engine))
        self.speculation = SpeculationMetrics(make, self._file)
        self._next_s = 0.0
        self._admissions = make.counter(
            "vllm_slo:admissions",
            "Requests by admission outcome (promised, promised_later, promised_late, moved, "
            "best_effort, best_effort_asked, declined) and the resource, or quota, that stood in "
            "the way.",
            *("slo_class", "outcome", "reason"),
        )
        self._quotes = make.counter(
            "vllm_slo:quotes",
            "Quotes given, by whether the request would have been promised, and what stood in the "
            "way.",
            *("slo_class", "promised", "reason"),
        )
        self._finished = make.counter(
            "vllm_slo:requests_finished",
            "Requests that ended by themselves, by whether they were promised (true, false, late) "
            "and attained.",
            *("slo_class", "promised", "attained"),
        )
        self._broken = make.counter(
            "vllm_slo:promises_broken",
            "Promises that could not be kept, by objective.",
            *("slo_class", "objective"),
        )
        self._late = make.counter(
            "vllm_slo:late_promises_finished",
            "Requests with a late promise that ended by themselves, by whether it was kept.",
            *("slo_class", "kept"),
        )
        self._tokens = make.counter(
            "vllm_slo:generation_tokens",
            "Output tokens of finished requests.",
            *("slo_class", "attained"),
        )
        self._ttft = make.histogram(
            "vllm_slo:ttft_seconds",
            "Time to first token since arrival at the server, by class.",
            "slo_class",
            buckets=_TTFT_BUCKETS,
        )
        self._tpot = make.histogram(
            "vllm_slo:worst_window_tpot_seconds",
            "Time per output token over the worst window of 10 tokens, by class.",
            "slo_class",
            buckets=_TPOT_BUCKETS,
        )
        self._stages = make.counter(
            "vllm_slo:stages_finished",
            "Stages of requests that ended by themselves, of requests with more than one stage, by "
            "number and whether they attained.",
            *("slo_class", "stage", "attained"),
        )
        self._sessions = make.counter(
            "vllm_slo:sessions_finished",
            "Sessions that ended, by whether every round and the whole attained.",
            *("slo_class", "attained"),
        )
        self._failures = make.counter(
            "vllm_slo:planning_failures",
            "Faults in vllm-slo's own code that cost a step its plan, or a request its promise or "
            "report, by the part that failed. Requests were served all the same.",
            "part",
        )
        self._steps = step_series(self.registry, make, str(engine))
        self._gauges = {
            name: make.gauge(f"vllm_slo:{name}", text) for name, text in _GAUGES.items()
        }
        self._set({"planning_stands_aside": 0.0})

    def admission(self, slo_class: str, outcome: str, reason: str = "") -> None:
        """Count what became of a request that asked for a promise."""
        self._admissions.of(slo_class, outcome, reason).inc()

    def quoted(self, slo_class: str, promised: bool, reason: str | None) -> None:
        """Count an answer to what a request would be promised."""
        self._quotes.of(slo_class, str(promised).lower(), reason or "").inc()

    def broken(self, slo_class: str, objective: str) -> None:
        """Count a promise that could not be kept."""
        self._broken.of(slo_class, objective).inc()

    def finished(
        self,
        slo_class: str,
        attained: bool | None,
        *,
        promised: str,
        tokens: int,
        ttft_s: float | None,
        tpot_s: float | None,
    ) -> None:
        """Count a request that ended by itself.

        ``promised``: "true", "false", or "late".
        """
        label = _attained_label(attained)
        self._finished.of(slo_class, promised, label).inc()
        self._tokens.of(slo_class, label).inc(tokens)
        if ttft_s is not None:
            self._ttft.of(slo_class).observe(ttft_s)
        if tpot_s is not None:
            self._tpot.of(slo_class).observe(tpot_s)

    def late_promise(self, slo_class: str, *, kept: bool) -> None:
        """Count a request with a late promise that ended by itself."""
        self._late.of(slo_class, str(kept).lower()).inc()

    def stages(self, slo_class: str, results: Iterable[StageResult]) -> None:
        """Count the stages of a request that ended by itself. Stages without an objective, or that
        did not begin, do not count."""
        for number, stage in enumerate(results, start=1):
            if stage.attained is not None:
                label = _attained_label(stage.attained)
                self._stages.of(slo_class, str(number), label).inc()

    def session(self, slo_class: str, attained: bool | None) -> None:
        """Count a session that ended."""
        self._sessions.of(slo_class, _attained_label(attained)).inc()

    def planning_failed(self, part: str) -> None:
        """Count a fault that was held."""
        self._failures.of(part).inc()
        self._file.write_soon()

    def stands_aside(self, aside: bool) -> None:
        """Planning stands aside, or is tried again."""
        self._set({"planning_stands_aside": float(aside)})
        self._file.write_soon()

    def step(self, predicted_s: float, actual_s: float) -> None:
        """Compare one step's time with its prediction."""
        self._steps.observe(predicted_s, actual_s)

    @cached_property
    def _promised(self) -> Members[Counter]:
        return self._make.counter(
            "vllm_slo:tenant_promised_tokens",
            "Tokens of promises that are over, as they count against quotas: what a tight TPOT "
            "makes of a step makes its tokens dearer.",
            "tenant",
        )

    def promised_tokens(self, tenant: str, tokens: float) -> None:
        """Count what a promise that is over has cost its tenant."""
        self._promised.of(tenant).inc(tokens)

    @cached_property
    def _order(self) -> OrderSeries:
        return OrderSeries(self._make)

    def foretold_length(self, source: str, error: ForecastError) -> None:
        """Compare the first forecast of a request's output length with the length."""
        self._order.lengths.of(source).observe(error.ratio)
        self._order.length_errors.of(source).observe(error.relative)

    def foreseen_service(self, foreseen_s: float, taken_s: float) -> None:
        """Compare the first forecast of a request's service with the service that it took."""
        self._order.service.observe(foreseen_s / taken_s)
        self._order.service_error.observe(abs(foreseen_s - taken_s) / taken_s)

    def recording(self) -> RecordingSeries:
        """The series of a recording, which show from now on."""
        return RecordingSeries(self._make)

    def due(self, now_s: float) -> bool:
        """Whether the file should be written again."""
        return now_s >= self._next_s

    def publish(self, now_s: float, **gauges: float) -> None:
        """Set the gauges and write the file."""
        self._next_s = now_s + PUBLISH_INTERVAL_S
        self._set(gauges)
        self._file.write()

    def publish_soon(self, **gauges: float) -> None:
        """Set the gauges and write the file a little later, in a thread of its own."""
        self._set(gauges)
        self._file.write_soon()

    def _set(self, gauges: dict[str, float]) -> None:
        for name, value in gauges.items():
            self._gauges[name].of().set(value)


class OrderSeries:
    """The series of best effort in another order than that of arrival."""

    def __init__(self, make: SeriesMaker) -> None:
        self.lengths = make.histogram(
            "vllm_slo:output_length_ratio",
            "Output tokens foretold over those that came.",
            "source",
            buckets=RATIO_BUCKETS,
        )
        self.length_errors = make.histogram(
            "vllm_slo:output_length_error_ratio",
            "Distance between output tokens foretold and those that came, over the latter.",
            "source",
            buckets=_ERROR_BUCKETS,
        )
        self.service = make.histogram(
            "vllm_slo:foreseen_service_ratio",
            "Service that a request was foreseen to need over what it needed.",
            buckets=RATIO_BUCKETS,
        ).of()
        self.service_error = make.histogram(
            "vllm_slo:foreseen_service_error_ratio",
            "Distance between service foreseen and needed, over the latter.",
            buckets=_ERROR_BUCKETS,
        ).of()


class RecordingSeries:
    """The series of a recording, counted in the threads of the scheduler and of the writer."""

    def __init__(self, make: SeriesMaker) -> None:
        self._recorded = make.counter(
            "vllm_slo:recorded_requests",
            "Requests that ended while requests were recorded, those included that were dropped.",
        ).of()
        self._dropped = make.counter(
            "vllm_slo:recording_dropped",
            "Requests that are missing in the recording because it could not be written.",
        ).of()

    def recorded(self) -> None:
        """Count a request."""
        self._recorded.inc()

    def dropped(self) -> None:
        """Count a request that is missing."""
        self._dropped.inc()
