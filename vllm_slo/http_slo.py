# SPDX-License-Identifier: Apache-2.0
"""The SLO of one HTTP request: where its carriers are, and the configuration it is read with.

Shared by those who see requests as HTTP: the middleware of one server and the front of several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm_slo.config import SLOConfig
from vllm_slo.slo import HEADER_FIELDS, SLO, check_thinking, has_slo_key, resolve_slo

__all__ = [
    "MAX_BODY_BYTES",
    "QUOTE_ROUTE",
    "ROUTES",
    "Carriers",
    "Policy",
    "carriers_of",
    "slo_headers",
]

ROUTES: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
QUOTE_ROUTE: Final = "/v1/slo/quote"
"""The routes whose requests may carry an SLO."""
MAX_BODY_BYTES: Final = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Policy:
    """The part of `SLOConfig` that requests are read with.

    Attributes:
        classes: configured classes by name.
        service_tiers: service tier -> class name.
        default: SLO of the requests that carry none; None when no default class is configured.
        thinking: whether the server tells thinking from the answer.
    """

    classes: Mapping[str, SLO]
    service_tiers: Mapping[str, str | None]
    default: SLO | None
    thinking: bool = True

    @classmethod
    def from_config(cls, config: SLOConfig, *, thinking: bool = True) -> Policy:
        """The policy of a checked configuration."""
        classes = config.slo_classes()
        default = classes[config.default_class] if config.default_class else None
        return cls(classes, config.service_tiers, default, thinking)


@dataclass(frozen=True, slots=True)
class Carriers:
    """Where one request says what it asks for; `empty` when nowhere.

    Attributes:
        body: its field ``slo``, or None.
        in_body: whether it has that field at all.
        xargs: its field ``vllm_xargs``, whatever that is.
        in_xargs: whether one of their keys is the SLO's.
        headers: the SLO headers, names in lower case.
        service_tier: OpenAI's field, or None.
    """

    body: Any
    in_body: bool
    xargs: Any
    in_xargs: bool
    headers: Mapping[str, str]
    service_tier: Any

    @property
    def empty(self) -> bool:
        return not (self.headers or self.in_body or self.in_xargs or self.service_tier is not None)

    def resolve(self, policy: Policy, arrival_s: float) -> SLO | None:
        """What the carriers ask for together; None when they ask for nothing.

        Raises:
            InvalidSLOError: a carrier holds a mistake, or two carriers disagree.
        """
        slo = resolve_slo(
            body_slo=self.body,
            xargs=self.xargs,
            headers=self.headers,
            service_tier=self.service_tier,
            classes=policy.classes,
            service_tiers=policy.service_tiers,
            arrival_s=arrival_s,
        )
        if slo is not None:
            check_thinking(slo, told=policy.thinking)
        return slo


def carriers_of(request: Mapping[str, Any], headers: Mapping[str, str]) -> Carriers:
    """The carriers of a parsed body and of its SLO headers (see `slo_headers`)."""
    xargs = request.get("vllm_xargs")
    return Carriers(
        request.get("slo"),
        "slo" in request,
        xargs,
        isinstance(xargs, Mapping) and has_slo_key(xargs),
        headers,
        request.get("service_tier"),
    )


def slo_headers(raw_headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The SLO headers; values of a header that was sent twice are joined unless they agree."""
    found: dict[str, str] = {}
    for raw_name, raw_value in raw_headers:
        name = raw_name.decode("latin-1").lower()
        if name in HEADER_FIELDS:
            value = raw_value.decode("latin-1").strip()
            before = found.setdefault(name, value)
            found[name] = value if before == value else f"{before}, {value}"
    return found
