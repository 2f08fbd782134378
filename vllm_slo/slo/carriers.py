# SPDX-License-Identifier: Apache-2.0
"""The SLO of one HTTP request: where its carriers are, and the configuration it is read with.

Shared by those who see requests as HTTP: the middleware of one server and the front of several.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypedDict

import msgspec

from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo.fields import MAX_OUTPUT_TOKENS, MAX_TTFT_MS, NAME, SHORTEST_MS
from vllm_slo.slo.model import (
    HEADER_FIELDS,
    SLO,
    OnUnattainable,
    check_thinking,
    has_slo_key,
    is_slo_key,
    resolve_slo,
)

__all__ = [
    "FORWARDED",
    "MAX_BODY_BYTES",
    "QUOTE_ROUTE",
    "ROUTES",
    "Carriers",
    "Forwarded",
    "Policy",
    "asked_by",
    "carriers_of",
    "is_json_type",
    "peek",
    "prompts_in",
    "read_body",
    "slo_headers",
    "slo_keys_of",
]

ROUTES: Final = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
    }
)
"""Routes below /v1 that generate from a JSON body, each in the words of its own API."""
QUOTE_ROUTE: Final = "/v1/slo/quote"
FORWARDED: Final = "vllm_slo.forwarded"
"""Key of the ASGI scope that holds what a trusted front says of the request it sends."""
MAX_BODY_BYTES: Final = 32 * 1024 * 1024
"""Longest body that the front and quotes take."""

_HINT_HEADERS: Final[Mapping[str, str]] = {
    "x-llm-d-inference-objective": "slo_class",
    "x-llm-d-inference-fairness-id": "tenant",
    "x-llm-d-inference-ttl": "ttft_ms",
    "x-vllm-priority": "priority",
    "x-session-id": "session_id",
}
"""Header of a gateway, or of vLLM -> what it hints at. None of them is ever an error."""
_HINTS_OF: Final[Mapping[str, frozenset[str]]] = {
    "class": frozenset({"slo_class", "priority"}),
    "tier": frozenset({"slo_class", "priority", "ttft_ms"}),
    "ttft_ms": frozenset({"ttft_ms"}),
    "expected_output_tokens": frozenset({"osl"}),
}
"""Field that a key may not have -> the hints that may have set it."""

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


class Forwarded(TypedDict):
    """What the front of several replicas says of one request.

    Attributes:
        age_ms: for how long the front has had it already.
        ticket: its mark at this replica, from 1.
        on_unattainable: what to do if it cannot be promised, whatever it says itself: refuse it
            (the front goes on elsewhere) or serve it; None: as it says.
    """

    age_ms: float
    ticket: int
    on_unattainable: OnUnattainable | None


@dataclass(frozen=True, slots=True)
class Policy:
    """The part of the configuration that requests are read with.

    Attributes:
        classes: configured classes by name.
        service_tiers: service tier -> class name.
        default: SLO of the requests that carry none; None when no default class is configured.
        thinking: whether the server tells thinking from the answer.
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
    """Where one request says what it asks for; `empty` when nowhere.

    Attributes:
        body: its field ``slo``, or None.
        in_body: whether it has that field at all.
        xargs: its field ``vllm_xargs``, whatever that is.
        in_xargs: whether one of their keys is the SLO's.
        headers: the SLO headers, names in lower case.
        service_tier: OpenAI's field, or None.
        hints: what gateways, vLLM and Dynamo say in words of their own; unchecked.
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
        """Whether the request says something that has no meaning but an SLO's."""
        return self.in_body or self.in_xargs or any(name in HEADER_FIELDS for name in self.headers)

    @property
    def empty(self) -> bool:
        return not (self.explicit or self.service_tier is not None or self.hints)

    def with_xargs(self, xargs: Mapping[str, Any]) -> Carriers:
        """The same with other ``vllm_xargs``."""
        return replace(self, xargs=xargs, in_xargs=has_slo_key(xargs))

    def without_hints(self, names: Collection[str]) -> Carriers:
        """The same without these hints."""
        left = {name: value for name, value in self.hints.items() if name not in names}
        return replace(self, hints=left)

    def without_hints_of(self, field: str) -> Carriers | None:
        """The same without the hints that may have set this field of the SLO; None: it has none."""
        names = _HINTS_OF.get(field, frozenset()) & self.hints.keys()
        return self.without_hints(names) if names else None

    def resolve(self, policy: Policy, arrival_s: float) -> SLO | None:
        """What the carriers ask for together; None when they ask for nothing.

        Raises:
            InvalidSLOError: a carrier holds a mistake, or two carriers disagree.
        """
        if self.empty:
            return None
        slo = resolve_slo(
            body_slo=self.body,
            xargs=self.xargs,
            headers={name: value for name, value in self.headers.items() if name in HEADER_FIELDS},
            service_tier=self.service_tier,
            hints=self.hinted(policy) if self.hints else {},
            classes=policy.classes,
            service_tiers=policy.service_tiers,
            arrival_s=arrival_s,
        )
        if slo is not None:
            check_thinking(slo, told=policy.thinking)
        return slo

    def hinted(self, policy: Policy) -> dict[str, object]:
        """The hints as SLO fields. What is not valid, or not configured, says nothing: these words
        were not made for us."""
        said = self.hints
        fields: dict[str, object] = {}
        named = said.get("slo_class")
        if named not in policy.classes:
            priority = _whole(said.get("priority"))
            named = None if priority is None else policy.priorities.get(priority)
        if named is not None:
            fields["slo_class"] = named
        if _is_name(said.get("tenant")):
            fields["tenant"] = said["tenant"]
        if policy.reads_session_id and _is_name(said.get("session_id")):
            fields["session_id"] = said["session_id"]
        tokens = _whole(said.get("osl"))
        if tokens is not None and 1 <= tokens <= MAX_OUTPUT_TOKENS:
            fields["expected_output_tokens"] = tokens
        if (ttl_ms := _duration_ms(said.get("ttft_ms"))) is not None:
            fields |= {"ttft_ms": ttl_ms, "on_unattainable": "decline"}
        return fields


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
        _hints_of(request, headers),
    )


def asked_by(
    request: Mapping[str, Any], carriers: Carriers, policy: Policy, arrival_s: float
) -> tuple[SLO | None, bool]:
    """The SLO of a request, and whether it asks for it itself; if not, it is the default class.

    A beam search has none: it is many small requests of the engine.

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


def is_json_type(content_type: str) -> bool:
    """Whether a Content-Type says that the body is JSON, as FastAPI reads it."""
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _hints_of(request: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """What is hinted at; of several words for one thing, the one that vLLM would take."""
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
    hints |= {name: headers[header] for header, name in _HINT_HEADERS.items() if header in headers}
    if request.get("session_id"):
        hints["session_id"] = request["session_id"]
    return hints


def slo_headers(raw_headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers that are carriers, empty ones left out; values of a header that was sent twice
    are joined unless they agree."""
    found: dict[str, str] = {}
    for raw_name, raw_value in raw_headers:
        name = raw_name.decode("latin-1").lower()
        if name in HEADER_FIELDS or name in _HINT_HEADERS:
            value = raw_value.decode("latin-1").strip()
            if not value:
                continue
            before = found.setdefault(name, value)
            found[name] = value if before == value else f"{before}, {value}"
    return found


def _is_name(value: object) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def _whole(value: object) -> int | None:
    """`value` as a whole number, also of a header; None if it is none."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,9}", value, re.ASCII):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _duration_ms(text: object) -> float | None:
    """Milliseconds of a duration as Go writes it, such as ``1500ms`` or ``1m30s``; None if it is
    none, or 0 (which is llm-d's word for no limit)."""
    if not isinstance(text, str) or not _GO_DURATION.fullmatch(text):
        return None
    parts = ((part.rstrip("."), unit) for part, unit in _GO_PART.findall(text))
    total_ms = sum(float(part) * _GO_UNITS_MS[unit] for part, unit in parts)
    return min(max(total_ms, SHORTEST_MS), float(MAX_TTFT_MS)) if total_ms else None


# --- the body -------------------------------------------------------------------------------------


def read_body(body: bytes) -> dict[str, Any] | None:
    """The whole body as vLLM reads it: UTF-8, 16 or 32, with or without a byte order mark, the last
    of two equal keys; None if it is not a JSON object."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


_UNSET: Final = msgspec.UNSET
_Large = msgspec.Raw | msgspec.UnsetType


class _Fields(msgspec.Struct, gc=False):
    """Fields of a body that are looked at. Prompts are skipped over, not built."""

    slo: Any = _UNSET
    vllm_xargs: Any = _UNSET
    service_tier: Any = _UNSET
    nvext: Any = _UNSET
    priority: Any = _UNSET
    session_id: Any = _UNSET
    background: Any = _UNSET
    use_beam_search: Any = _UNSET
    prompt: _Large = _UNSET
    prompt_embeds: _Large = _UNSET
    messages: _Large = _UNSET


_decoder: Final = msgspec.json.Decoder(_Fields)
_NAMES: Final = _Fields.__struct_fields__


def peek(body: bytes) -> dict[str, Any] | None:
    """As `read_body`, but with the fields only that matter here, and much faster.

    Prompts (``prompt``, ``prompt_embeds``, ``messages``) may be `msgspec.Raw`: decode them where
    they are needed. What the fast reader does not take, vLLM's may, so it is read by that then.
    """
    try:
        fields = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        given = read_body(body)
        return given and {name: given[name] for name in _NAMES if name in given}
    values = ((name, getattr(fields, name)) for name in _NAMES)
    return {name: value for name, value in values if value is not _UNSET}


def prompts_in(request: Mapping[str, Any]) -> int:
    """For how many prompts a peeked request asks; a list of token ids is one."""
    listed = [_decoded(request.get(key)) for key in ("prompt", "prompt_embeds", "messages")]
    several = [
        len(prompts)
        for prompts in listed
        if isinstance(prompts, list) and isinstance(next(iter(prompts), 0), str | list)
    ]
    return max(sum(several), 1)


def _decoded(value: object) -> object:
    """A prompt as vLLM reads it; None if it does not."""
    if not isinstance(value, msgspec.Raw):
        return value
    try:
        return json.loads(bytes(value))
    except (ValueError, RecursionError):
        return None


def slo_keys_of(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The SLO's keys among `extra_args`."""
    return {key: value for key, value in (extra or {}).items() if is_slo_key(key)}
