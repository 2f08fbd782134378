# SPDX-License-Identifier: Apache-2.0
"""Hints: what gateways, vLLM and Dynamo state about a request in fields of their own.

These fields were not made for SLOs. A hint that is not valid, or not configured, is ignored; it is
never an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from vllm_slo.slo.fields import MAX_OUTPUT_TOKENS, MAX_TTFT_MS, NAME, SHORTEST_MS

HINT_HEADERS: Final[Mapping[str, str]] = {
    "x-gateway-inference-objective": "slo_class",
    "x-llm-d-inference-objective": "slo_class",
    "x-gateway-inference-fairness-id": "tenant",
    "x-llm-d-inference-fairness-id": "tenant",
    "x-llm-d-inference-ttl": "ttft_ms",
    "x-vllm-priority": "priority",
    "x-session-id": "session_id",
}
"""Header of a gateway, or of vLLM -> name of the hint. Of two headers for one hint the later one
counts: ``x-gateway-*`` are older names of the Gateway API Inference Extension."""
HINTS_OF: Final[Mapping[str, frozenset[str]]] = {
    "class": frozenset({"slo_class", "priority"}),
    "tier": frozenset({"slo_class", "priority", "ttft_ms"}),
    "ttft_ms": frozenset({"ttft_ms"}),
    "expected_output_tokens": frozenset({"osl"}),
}
"""Field of an SLO, as errors name it -> the hints that may have set it."""

_GO_DURATION: Final = re.compile(r"(?:\d{1,12}(?:\.\d{0,9})?(?:ns|us|µs|ms|s|m|h))+")
_GO_PART: Final = re.compile(r"([\d.]+)(ns|us|µs|ms|s|m|h)")
_GO_UNITS_MS: Final[Mapping[str, float]] = {
    "ns": 1e-6,
    "us": 1e-3,
    "µs": 1e-3,
    "ms": 1.0,
    "s": 1e3,
    "m": 60e3,
    "h": 3600e3,
}


def hints_of(request: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Name of a hint -> its value. Where fields differ, the one that vLLM would take counts."""
    hints: dict[str, Any] = {}
    xargs = request.get("vllm_xargs")
    if isinstance(xargs, Mapping) and xargs.get("session_id") is not None:
        hints["session_id"] = xargs["session_id"]
    extension = request.get("nvext")
    agent = extension.get("agent_hints") if isinstance(extension, Mapping) else None
    if isinstance(agent, Mapping):
        hints |= {key: agent[key] for key in ("priority", "osl") if agent.get(key) is not None}
    if request.get("priority") is not None:
        hints["priority"] = request["priority"]
    hints |= {name: headers[header] for header, name in HINT_HEADERS.items() if header in headers}
    if request.get("session_id"):
        hints["session_id"] = request["session_id"]
    return hints


def fields_of_hints(
    hints: Mapping[str, Any],
    *,
    classes: Collection[str],
    priorities: Mapping[int, str],
    reads_session_id: bool,
) -> dict[str, object]:
    """The hints as valid fields of an SLO.

    Args:
        priorities: priority -> class name.
        reads_session_id: whether vLLM's session id names the session.
    """
    fields: dict[str, object] = {}
    slo_class = hints.get("slo_class")
    if slo_class not in classes:
        priority = _whole(hints.get("priority"))
        slo_class = None if priority is None else priorities.get(priority)
    if slo_class is not None:
        fields["slo_class"] = slo_class
    if _is_name(hints.get("tenant")):
        fields["tenant"] = hints["tenant"]
    if reads_session_id and _is_name(hints.get("session_id")):
        fields["session_id"] = hints["session_id"]
    tokens = _whole(hints.get("osl"))
    if tokens is not None and 1 <= tokens <= MAX_OUTPUT_TOKENS:
        fields["expected_output_tokens"] = tokens
    if (ttl_ms := _duration_ms(hints.get("ttft_ms"))) is not None:
        fields |= {"ttft_ms": ttl_ms, "on_unattainable": "decline"}
    return fields


def _is_name(value: object) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def _whole(value: object) -> int | None:
    """`value` as a whole number, also from a header's text; None if it is not one."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,9}", value, re.ASCII):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _duration_ms(text: object) -> float | None:
    """Milliseconds of a duration as Go writes it, such as ``1500ms`` or ``1m30s``.

    None if it is not such a text, or 0, which means no limit to llm-d.
    """
    if not isinstance(text, str) or not _GO_DURATION.fullmatch(text):
        return None
    parts = ((part.rstrip("."), unit) for part, unit in _GO_PART.findall(text))
    total_ms = sum(float(part) * _GO_UNITS_MS[unit] for part, unit in parts)
    return min(max(total_ms, SHORTEST_MS), float(MAX_TTFT_MS)) if total_ms else None
