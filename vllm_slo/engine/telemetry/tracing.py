# SPDX-License-Identifier: Apache-2.0
"""Spans of requests with an SLO, through vLLM's own tracing (``--otlp-traces-endpoint``).

vLLM traces a request in the API server (span ``llm_request``), where nobody knows why it was or was
not promised. The scheduler adds a span `NAME` to the same trace from the engine's process, where
vLLM has set up a tracer as well.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.tracing import SpanAttributes, extract_trace_context, instrument_manual

from vllm_slo.core.clock import Clock
from vllm_slo.engine.scheduling.slo_request import SLORequest

__all__ = ["NAME", "RequestSpans", "attributes_of"]

NAME: Final = "slo_request"


class RequestSpans:
    """Makes one span for each request that carries an SLO, from its arrival to its end."""

    @classmethod
    def from_config(cls, observability_config: Any) -> RequestSpans | None:
        """None where vLLM's tracing is off: it then costs nothing."""
        return cls() if observability_config.otlp_traces_endpoint else None

    def ended(self, tracked: SLORequest, attained: bool | None, clock: Clock) -> None:
        """A request has ended just now.

        Its span is a child of the trace that the client named in ``traceparent``, beside vLLM's.
        """
        end_s = clock.epoch_s()
        lived_s = max(clock.monotonic_s() - tracked.arrival_s, 0.0)
        instrument_manual(
            NAME,
            start_time=round((end_s - lived_s) * 1e9),
            end_time=round(end_s * 1e9),
            attributes=attributes_of(tracked, attained),
            context=extract_trace_context(tracked.request.trace_headers),
        )


def attributes_of(tracked: SLORequest, attained: bool | None) -> dict[str, Any]:
    """The objectives of a request, what was decided and what came of it; nothing that is None."""
    report, slo, request = tracked.report(attained), tracked.slo, tracked.request
    stages = report.get("stages")
    said = {
        SpanAttributes.GEN_AI_REQUEST_ID: request.request_id,
        SpanAttributes.GEN_AI_USAGE_PROMPT_TOKENS: request.num_prompt_tokens,
        SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS: request.num_output_tokens,
        "slo.class": tracked.slo_class,
        "slo.tenant": slo.tenant,
        "slo.value": slo.value,
        "slo.ttft_ms": slo.ttft_ms,
        "slo.tpot_ms": slo.tpot_ms,
        "slo.tier": report["tier"],
        "slo.promised": report["promised"],
        "slo.reason": report["reason"],
        "slo.ttft_achieved_ms": report["ttft_ms"],
        "slo.tpot_achieved_ms": report["tpot_ms"],
        "slo.attained": report["attained"],
        "slo.stages": stages and len(stages),
        "slo.stages_attained": stages and sum(one["attained"] is True for one in stages),
        "slo.declined": str(request.stop_reason or "").startswith("slo_declined"),
    }
    return {name: value for name, value in said.items() if value is not None}
