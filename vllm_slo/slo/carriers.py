# SPDX-License-Identifier: Apache-2.0
"""The SLO of one HTTP request: its carriers, and the configuration with which they are read.

Shared by the middleware of one server and the front of several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypedDict

from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo.claims import HEADER_FIELDS, Claims
from vllm_slo.slo.hints import HINT_HEADERS, HINTS_OF, fields_of_hints, hints_of
from vllm_slo.slo.keys import has_slo_key
from vllm_slo.slo.model import SLO, OnUnattainable, slo_of_fields

ROUTES: Final = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
    }
)
"""Routes below /v1 that generate from a JSON body."""
SERVICE_TIERS: Final = ("auto", "default", "flex", "scale", "priority")
"""OpenAI's values of `service_tier`. ``flex`` is best effort. Any other value, known or not, asks
for nothing unless the configuration maps it to a class."""
QUOTE_ROUTE: Final = "/v1/slo/quote"
FORWARDED: Final = "vllm_slo.forwarded"
"""Key of the ASGI scope that holds the `Forwarded` of a request that a trusted front sends."""


class Forwarded(TypedDict):
    """What the front of several replicas adds to one request.

    Attributes:
        age_ms: for how long the front has had the request.
        ticket: the front's mark of the request at this replica, ``FRONT:NUMBER`` or ``NUMBER``;
            empty: it has none.
        on_unattainable: what to do if the request cannot be promised, in place of its own
            `on_unattainable`: refuse it (the front tries another replica) or serve it; None: its
            own counts.
    """

    age_ms: float
    ticket: str
    on_unattainable: OnUnattainable | None


@dataclass(frozen=True, slots=True)
class Policy:
    """The part of the configuration with which requests are read.

    Attributes:
        service_tiers: service tier -> class name.
        default: SLO of the requests that carry none; None when no default class is configured.
        thinking: whether the server tells the model's thinking from its answer.
        priorities: vLLM's or Dynamo's priority -> class name.
        reads_session_id: whether vLLM's session id names the session.
        decline_status: HTTP status of a declined request.
    """

    classes: Mapping[str, SLO]
    service_tiers: Mapping[str, str | None]
    default: SLO | None
    thinking: bool = True
    priorities: Mapping[int, str] = field(default_factory=dict)
    reads_session_id: bool = False
    decline_status: int = 429


@dataclass(frozen=True, slots=True)
class Carriers:
    """The carriers of one request's SLO, unchecked.

    Attributes:
        body: the body field ``slo``, or None.
        in_body: whether the body has that field.
        xargs: the body field ``vllm_xargs``, of any type.
        in_xargs: whether one of its keys is the SLO's.
        headers: the SLO headers, names in lower case.
        hints: see `vllm_slo.slo.hints`.
    """

    body: Any
    in_body: bool
    xargs: Any
    in_xargs: bool
    headers: Mapping[str, str]
    service_tier: Any
    hints: Mapping[str, Any]

    @property
    def explicit(self) -> bool:
        """Whether a carrier is there that has no other meaning than an SLO."""
        return self.in_body or self.in_xargs or any(name in HEADER_FIELDS for name in self.headers)

    @property
    def empty(self) -> bool:
        """Whether no carrier is there."""
        return not (self.explicit or self.service_tier is not None or self.hints)

    def with_xargs(self, xargs: Mapping[str, Any]) -> Carriers:
        return replace(self, xargs=xargs, in_xargs=has_slo_key(xargs))

    def without_hints(self, names: Collection[str]) -> Carriers:
        left = {name: value for name, value in self.hints.items() if name not in names}
        return replace(self, hints=left)

    def without_hints_of(self, field: str) -> Carriers | None:
        """These carriers without the hints that may have set a field of the SLO; None: no hint has
        set it."""
        names = HINTS_OF.get(field, frozenset()) & self.hints.keys()
        return self.without_hints(names) if names else None

    def resolve(self, policy: Policy, arrival_s: float) -> SLO | None:
        """The SLO that the carriers state together; None if they state none.

        Raises:
            InvalidSLOError: a carrier holds a mistake, or two carriers disagree.
        """
        if self.empty:
            return None
        hints = fields_of_hints(
            self.hints,
            classes=policy.classes,
            priorities=policy.priorities,
            reads_session_id=policy.reads_session_id,
        )
        slo = resolve_slo(
            body_slo=self.body,
            xargs=self.xargs,
            headers={name: value for name, value in self.headers.items() if name in HEADER_FIELDS},
            service_tier=self.service_tier,
            hints=hints,
            classes=policy.classes,
            service_tiers=policy.service_tiers,
            arrival_s=arrival_s,
        )
        if slo is not None:
            check_thinking(slo, told=policy.thinking)
        return slo


def carriers_of(request: Mapping[str, Any], headers: Mapping[str, str]) -> Carriers:
    """The carriers of a parsed body and of its headers (see `slo_headers`)."""
    xargs = request.get("vllm_xargs")
    return Carriers(
        request.get("slo"),
        "slo" in request,
        xargs,
        isinstance(xargs, Mapping) and has_slo_key(xargs),
        headers,
        request.get("service_tier"),
        hints_of(request, headers),
    )


def asked_by(
    request: Mapping[str, Any], carriers: Carriers, policy: Policy, arrival_s: float
) -> tuple[SLO | None, bool]:
    """(SLO of a request, whether the request states it itself). Otherwise it is the default SLO.

    A beam search has no SLO: it is many small requests of the engine.

    Raises:
        InvalidSLOError: a carrier holds a mistake, or two carriers disagree.
    """
    if request.get("use_beam_search") is True:
        if carriers.explicit:
            raise InvalidSLOError(
                "use_beam_search", "a beam search takes no objectives", "leave one of them out"
            )
        return None, False
    own = carriers.resolve(policy, arrival_s)
    return (policy.default, False) if own is None else (own, True)


def slo_headers(raw_headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers that are carriers; empty ones are left out.

    Different values of a header that was sent twice are joined by a comma.
    """
    headers: dict[str, str] = {}
    for raw_name, raw_value in raw_headers:
        name = raw_name.decode("latin-1").lower()
        if name in HEADER_FIELDS or name in HINT_HEADERS:
            value = raw_value.decode("latin-1").strip()
            if not value:
                continue
            before = headers.setdefault(name, value)
            headers[name] = value if before == value else f"{before}, {value}"
    return headers


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
