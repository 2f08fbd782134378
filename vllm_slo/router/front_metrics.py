# SPDX-License-Identifier: Apache-2.0
"""Prometheus series of the front, on its own ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_slo.router.upstream import Upstream

_HOPS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 64.0)
_DECISION_S = (25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 20e-3)
_FIRST_BYTE_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class FrontMetrics:
    """The series of one front. Labels: outcomes, reasons, classes, names of replicas."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        gauge = partial(Gauge, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry)
        self.requests = counter(
            "vllm_slo:front_requests",
            "Generation requests by what became of them: promised, best_effort, no_slo, declined, "
            "invalid, unavailable.",
            ["result"],
        )
        for result in ("promised", "best_effort", "no_slo", "declined", "invalid", "unavailable"):
            self.requests.labels(result)
        self.declined = counter(
            "vllm_slo:front_declined",
            "Requests declined here that no replica has counted as declined: no shadow promised.",
            ["slo_class"],
        )
        self.retries = counter(
            "vllm_slo:front_retries",
            "Tries that failed before the answer began, by reason: connection (broken, silent, or "
            "answered with an error of the server).",
            ["reason"],
        )
        self.refused_after_promise = counter(
            "vllm_slo:front_refused_after_promise",
            "Refusals by replicas whose shadow had promised: the picture was wrong.",
        )
        self.client_gone = counter(
            "vllm_slo:front_client_gone", "Exchanges whose client left before the end."
        )
        self.hops = histogram(
            "vllm_slo:front_hops",
            "Replicas asked for a promise, by requests that want one.",
            buckets=_HOPS,
        )
        self.decision = histogram(
            "vllm_slo:front_decision_seconds", "Time of one routing decision.", buckets=_DECISION_S
        )
        self.first_byte = histogram(
            "vllm_slo:front_time_to_first_byte_seconds",
            "Time from a request's arrival to the first byte of its answer, retries included.",
            buckets=_FIRST_BYTE_S,
        )
        self.in_flight = gauge("vllm_slo:front_in_flight", "Requests being served now.")
        self.wanted = gauge(
            "vllm_slo:front_wanted_replicas",
            "Replicas wanted by the demand of late, refused promises included.",
        )
        self._ready = gauge(
            "vllm_slo:front_replica_ready", "1 when a replica may get new requests.", ["replica"]
        )
        self._outstanding = gauge(
            "vllm_slo:front_replica_outstanding",
            "Requests sent to a replica that have not ended.",
            ["replica"],
        )
        self._age = gauge(
            "vllm_slo:front_replica_state_age_seconds",
            "Time since the last word of a replica.",
            ["replica"],
        )

    def page(self, upstreams: Iterable[Upstream], now_s: float) -> bytes:
        """The page, in Prometheus's text format."""
        for gauge in (self._ready, self._outstanding, self._age):
            gauge.clear()
        for upstream in upstreams:
            self._ready.labels(upstream.name).set(upstream.ready)
            self._outstanding.labels(upstream.name).set(upstream.virtual.outstanding)
            if (age_s := upstream.age_s(now_s)) is not None:
                self._age.labels(upstream.name).set(age_s)
        return generate_latest(self._registry)
