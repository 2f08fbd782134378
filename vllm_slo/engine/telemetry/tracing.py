# SPDX-License-Identifier: Apache-2.0
"""Spans of requests with an SLO, through vLLM's own tracing (``--otlp-traces-endpoint``).

vLLM traces a request in the API server (span ``llm_request``), which does not know why the request
was or was not promised. The scheduler adds a span `NAME` to the same trace from the engine's
process, where vLLM has set up a tracer as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from vllm.tracing import SpanAttributes, extract_trace_context, instrument_manual
from vllm.v1.request import Request

from vllm_slo.core.clock import Clock
from vllm_slo.slo.model import SLO

__all__ = ["NAME", "RequestSpans", "TracedRequest", "attributes_of"]

NAME: Final = "slo_request"


class TracedRequest(Protocol):
    """What a span says of a request.

    Attributes:
        request: vLLM's.
        slo: its objectives.
        slo_class: their class, the label of metrics.
        arrival_s: monotonic seconds.
    """

    @property
    def request(self) -> Request: ...
    @property
    def slo(self) -> SLO: ...
    @property
    def slo_class(self) -> str: ...
    @property
    def arrival_s(self) -> float: ...

    def report(self, attained: bool | None) -> Mapping[str, Any]:
        """What its client is told."""


class RequestSpans:
    """Makes one span for each request that carries an SLO, from its arrival to its end."""

    @classmethod
    def from_config(cls, observability_config: Any) -> RequestSpans | None:
        """None where vLLM's tracing is off: it then costs nothing."""
        return cls() if observability_config.otlp_traces_endpoint else None

    def ended(self, traced: TracedRequest, attained: bool | None, clock: Clock) -> None:
        """A request has ended just now.

        Its span is a child of the trace that the client named in ``traceparent``, beside vLLM's.
        """
        end_s = clock.epoch_s()
        lived_s = max(clock.monotonic_s() - traced.arrival_s, 0.0)
        instrument_manual(
            NAME,
            start_time=round((end_s - lived_s) * 1e9),
            end_time=round(end_s * 1e9),
            attributes=attributes_of(traced, attained),
            context=extract_trace_context(traced.request.trace_headers),
        )


def attributes_of(traced: TracedRequest, attained: bool | None) -> dict[str, Any]:
    """The objectives of a request, the decision and the outcome; nothing that is None."""
    report, slo, request = traced.report(attained), traced.slo, traced.request
    stages = report.get("stages")
    attributes = {
        SpanAttributes.GEN_AI_REQUEST_ID: request.request_id,
        SpanAttributes.GEN_AI_USAGE_PROMPT_TOKENS: request.num_prompt_tokens,
        SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS: request.num_output_tokens,
        "slo.class": traced.slo_class,
        "slo.tenant": slo.tenant,
        "slo.value": slo.value,
        "slo.ttft_ms": slo.ttft_ms,
        "slo.tpot_ms": slo.tpot_ms,
        "slo.tier": report["tier"],
        "slo.promised": report["promised"],
        "slo.late": report["late"],
        "slo.reason": report["reason"],
        "slo.ttft_achieved_ms": report["ttft_ms"],
        "slo.tpot_achieved_ms": report["tpot_ms"],
        "slo.attained": report["attained"],
        "slo.stages": stages and len(stages),
        "slo.stages_attained": stages and sum(stage["attained"] is True for stage in stages),
        "slo.declined": str(request.stop_reason or "").startswith("slo_declined"),
    }
    return {name: value for name, value in attributes.items() if value is not None}
