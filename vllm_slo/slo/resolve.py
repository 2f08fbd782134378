# SPDX-License-Identifier: Apache-2.0
"""Unites the carriers of one request into its SLO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo.claims import Claims
from vllm_slo.slo.model import SLO, slo_of_fields

SERVICE_TIERS: Final = ("auto", "default", "flex", "scale", "priority")
"""OpenAI's values of `service_tier`. ``flex`` is best effort. Any other value, known or not, asks
for nothing unless the configuration maps it to a class."""


def resolve_slo(
    *,
    body_slo: Mapping[str, Any] | None = None,
    xargs: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    service_tier: object = None,
    hints: Mapping[str, object] | None = None,
    classes: Mapping[str, SLO],
    service_tiers: Mapping[str, str | None],
    arrival_s: float | None = None,
) -> SLO | None:
    """Unite the carriers of one request into one SLO; None when none of them asks for anything.

    Precedence, field by field: the explicit carriers (`body_slo`, `xargs`, `headers`), which must
    agree where they overlap; then the class that they name; then what `service_tier` stands for
    (``flex``: tier best_effort; any tier mapped in `service_tiers`: that class); then `hints`.

    Args:
        xargs: the body field ``vllm_xargs``; keys that are not the SLO's are ignored.
        headers: request headers, any case; only those in `HEADER_FIELDS` are read.
        hints: valid SLO fields that gateways state in words of their own. They fill fields that
            are still open. Without a class or an objective among them, they ask for nothing.
        service_tiers: service tier -> class name.
        arrival_s: arrival, epoch seconds; needed for ``prefill_ddl`` only.

    Raises:
        InvalidSLOError: a bad value, an unknown key or class, or two carriers that disagree.
    """
    claims = Claims()
    if body_slo is not None:
        claims.add_body(body_slo)
    claims.add_xargs(xargs, arrival_s)
    claims.add_headers(headers or {})
    explicit, hints = claims.values(), hints or {}
    weak = _of_service_tier(service_tier, service_tiers)
    if explicit or weak or not hints.keys().isdisjoint(("slo_class", "ttft_ms")):
        weak = {**hints, **weak}
    return slo_of_fields(explicit, weak, classes)


def _of_service_tier(
    service_tier: object, service_tiers: Mapping[str, str | None]
) -> dict[str, object]:
    weak: dict[str, object] = {}
    if isinstance(service_tier, str) and (mapped := service_tiers.get(service_tier)):
        weak["slo_class"] = mapped
    if service_tier == "flex":
        weak["tier"] = "best_effort"
    return weak


def check_thinking(slo: SLO, *, told: bool) -> None:
    """Refuse an objective for thinking where the server cannot tell thinking from the answer.

    Raises:
        InvalidSLOError: the SLO has such an objective, and the server does not.
    """
    if slo.thinking_tpot_ms is not None and not told:
        raise InvalidSLOError(
            "thinking_tpot_ms",
            "the server does not tell thinking from the answer",
            "start it with --reasoning-parser, or give stages with the text that ends thinking",
        )
