# SPDX-License-Identifier: Apache-2.0
"""Reads the SLO of one HTTP request, as far as its API key may have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_slo.engine.http.outcome import Asked
from vllm_slo.errors import ForbiddenSLOError
from vllm_slo.slo.access import Access, Seal
from vllm_slo.slo.carriers import Carriers, Forwarded, Policy, asked_by, carriers_of, slo_headers
from vllm_slo.slo.keys import INTERNAL_KEYS
from vllm_slo.slo.model import SLO, OnUnattainable


@dataclass(frozen=True, slots=True)
class Rules:
    """How the requests of one server are read.

    Attributes:
        access: what each API key may ask for; None: anything.
        seal: proves to the scheduler that this server wrote the keys; None: there is no secret.
    """

    policy: Policy
    access: Access | None
    seal: Seal | None


def read_request(
    request: Mapping[str, Any],
    raw_headers: Sequence[tuple[bytes, bytes]],
    rules: Rules,
    arrival_s: float,
    forwarded: Forwarded | None = None,
    xargs: Mapping[str, Any] | None = None,
) -> Asked:
    """What a request asks for.

    Args:
        raw_headers: ASGI headers, names in lower case.
        arrival_s: arrival here, epoch seconds.
        forwarded: what a front has added; None: it did not come through one.
        xargs: the SLO's keys that reached the engine; None: those of the body.

    Raises:
        InvalidSLOError: a carrier holds a mistake, or two carriers disagree.
        ForbiddenSLOError: the key may not ask for that.
    """
    carriers = carriers_of(request, slo_headers(raw_headers))
    if xargs is not None:
        carriers = carriers.with_xargs(xargs)
    if rules.access is not None:  # the tenant is the key's
        carriers = carriers.without_hints({"tenant"})
    before_s = 0.0 if forwarded is None else forwarded["age_ms"] / 1e3
    slo = _allowed(request, carriers, raw_headers, rules, arrival_s - before_s)
    if forwarded is not None and slo is not None:
        slo = _as_forwarded(slo, forwarded["on_unattainable"])
    return Asked(slo, carriers.service_tier)


def _allowed(
    request: Mapping[str, Any],
    carriers: Carriers,
    raw_headers: Sequence[tuple[bytes, bytes]],
    rules: Rules,
    arrival_s: float,
) -> SLO | None:
    """The SLO of a request, as far as its API key may have it.

    A hint that the key may not have is ignored, like a hint that is not valid.

    Raises:
        ForbiddenSLOError: the key may not have what the request states itself.
    """
    slo, own = asked_by(request, carriers, rules.policy, arrival_s)
    if rules.access is None or slo is None:
        return slo
    try:
        return rules.access.ruled(slo, raw_headers, rules.policy.classes, own=own)
    except ForbiddenSLOError as error:
        fewer = carriers.without_hints_of(error.field)
        if fewer is None:
            raise
    return _allowed(request, fewer, raw_headers, rules, arrival_s)


def _as_forwarded(slo: SLO, wish: OnUnattainable | None) -> SLO:
    """`slo` with the front's wish for the case that no promise can be made."""
    if wish is None or slo.effective_tier != "guaranteed":
        return slo
    return replace(slo, on_unattainable=wish)


def sealed(flat: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """`flat` with its seal. Without a secret internal keys are left out: they would be refused."""
    if rules.seal is not None:
        return rules.seal.sealed(flat)
    return {key: value for key, value in flat.items() if key not in INTERNAL_KEYS}
