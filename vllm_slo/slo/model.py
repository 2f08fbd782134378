# SPDX-License-Identifier: Apache-2.0
"""What a request asks for, and the carriers that bring it: Python, body, xargs, headers, tier.

Units at this edge are milliseconds. Every carrier goes through the one validator of each
field (`slo_fields`).
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, TypeAlias, cast

from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo.fields import (
    MAX_TPOT_MS,
    MAX_TTFT_MS,
    NAME,
    PUBLIC,
    PUBLIC_OF,
    SHORTEST_MS,
    VALIDATORS,
    Stage,
    echo,
    number_of,
    validate,
)

__all__ = [
    "AGE_KEY",
    "EACH_KEY",
    "EXEMPT_KEY",
    "GROUP_KEY",
    "HEADER_FIELDS",
    "INTERNAL_KEYS",
    "QUOTE_KEY",
    "SEAL_KEY",
    "SERVICE_TIERS",
    "SLO",
    "TICKET_KEY",
    "OnUnattainable",
    "Speculate",
    "Stage",
    "Tier",
    "check_thinking",
    "has_slo_key",
    "is_slo_key",
    "pack_quote",
    "resolve_slo",
    "unpack_quote",
]

Tier: TypeAlias = Literal["guaranteed", "best_effort"]
OnUnattainable: TypeAlias = Literal["best_effort", "decline"]
Speculate: TypeAlias = Literal["auto", "off"]

EXPIRED_TTFT_MS: Final = SHORTEST_MS
"""TTFT of a `prefill_ddl` that lies in the past: valid, and never attainable."""

SERVICE_TIERS: Final = ("auto", "default", "flex", "scale", "priority")
"""OpenAI's values of `service_tier`. ``flex`` is best effort. Any other value, known or not, asks
for nothing unless the configuration maps it to a class."""

HEADER_FIELDS: Final[Mapping[str, str]] = {
    "x-llm-d-slo-ttft-ms": "ttft_ms",
    "x-llm-d-slo-tpot-ms": "tpot_ms",
    "x-slo-ttft-ms": "ttft_ms",
    "x-slo-tpot-ms": "tpot_ms",
    "x-slo-e2e-ms": "e2e_ms",
    "x-slo-class": "slo_class",
    "x-slo-tier": "tier",
    "x-slo-session-id": "session_id",
}
"""Request header (lower case) -> SLO field. Of two names for one field, llm-d's wins."""

AGE_KEY: Final = "slo_age_ms"
"""Internal key of `extra_args`: for how long a front has had the request, milliseconds."""

TICKET_KEY: Final = "slo_ticket"
"""Internal key: the mark by which a front knows the request, from 1."""

QUOTE_KEY: Final = "slo_quote"
"""Internal key: the request is not to be served, but told what it would be promised."""

EXEMPT_KEY: Final = "slo_exempt"
"""Internal key: the request is a part of another one. It has no SLO, not even the default class."""

EACH_KEY: Final = "slo_each"
"""Internal key: the report is to travel in the stop reason, since vLLM unites the outputs of the
choices of one prompt, and then keeps the other fields of one of them only."""

GROUP_KEY: Final = "slo_group"
"""Internal key: a name that the choices of one HTTP request share. They are declined together or
not at all."""

SEAL_KEY: Final = "slo_seal"
"""Internal key: proves that this server wrote the others; see `vllm_slo.slo.access`."""

INTERNAL_KEYS: Final = (AGE_KEY, TICKET_KEY, QUOTE_KEY, EXEMPT_KEY, EACH_KEY, GROUP_KEY, SEAL_KEY)
"""Keys that only this server's own processes may write. A client that sends one is refused."""

_PREFIX: Final = "slo_"
_DDL_KEY: Final = "prefill_ddl"
_TPOT_S_KEY: Final = "slo_tpot"
MOST_MS: Final[Mapping[str, float]] = {
    "ttft_ms": MAX_TTFT_MS,
    "tpot_ms": MAX_TPOT_MS,
    "e2e_ms": MAX_TTFT_MS,
}
_DECIMAL: Final = re.compile(r"[+-]?(\d{1,32}(\.\d{0,32})?|\.\d{1,32})([eE][+-]?\d{1,3})?", re.A)


@dataclass(frozen=True, slots=True)
class SLO:
    """The service-level objective of one request. Immutable; checked on construction.

    Attributes:
        ttft_ms: time to first token, milliseconds from arrival at the server, queueing included;
            0.001 <= ttft_ms <= 86,400,000. None: no objective.
        tpot_ms: time per output token, milliseconds; 0.001 <= tpot_ms <= 3,600,000. None: no
            objective.
        e2e_ms: time to the last token of the answer, milliseconds from arrival; 0.001 <= e2e_ms <=
            86,400,000. It may stand beside the others, or alone. None: no objective.
        thinking_tpot_ms: time per output token while the model thinks, as the server's reasoning
            parser tells; `tpot_ms` is then for what follows.
        stages: up to 8 stages, each with a TPOT of its own, in place of both; mappings and JSON are
            taken, too. The text that ends a stage is looked for in the answer.
        session_id: requests of one id (and tenant) are the rounds of one job, such as a tool loop;
            a name as `tenant`.
        session_e2e_ms: the whole job, milliseconds from the arrival of its first round to the last
            token of its last one, tools included; at most 86,400,000.
        session_rounds: how many rounds the job is expected to have, 1 to 10,000.
        session_last: whether this is its last round; None: nobody knows.
        value: weight of the request when not all can be promised; 1e-6 <= value <= 1e6.
        tier: None means `guaranteed` when an objective is set, else `best_effort`.
        on_unattainable: what happens when no promise can be made: served `best_effort`, or
            `decline` (HTTP 429; in Python an output whose stop_reason says so).
        expected_output_tokens: how long the client expects the output to be, 1 to 10,000,000.
        tenant: who is asking; 1 to 64 characters of ``[A-Za-z0-9_.:@/-]``.
        speculation: ``off``: nothing is drafted for the request. None, or ``auto``: as it pays.
        slo_class: a class of the server's configuration (key ``class`` in JSON). Fields that this
            object leaves at their defaults are taken from the class where the class is known.

    Raises:
        InvalidSLOError: a field is out of its range, `tier` is ``guaranteed`` with neither an
            objective nor a class, `stages` stand beside another TPOT, or something is said of a
            session that has no id.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    thinking_tpot_ms: float | None = None
    stages: tuple[Stage, ...] | None = None
    value: float = 1.0
    tier: Tier | None = None
    on_unattainable: OnUnattainable = "best_effort"
    expected_output_tokens: int | None = None
    tenant: str | None = None
    speculation: Speculate | None = None
    session_id: str | None = None
    session_e2e_ms: float | None = None
    session_rounds: int | None = None
    session_last: bool | None = None
    slo_class: str | None = None

    def __post_init__(self) -> None:
        for name in VALIDATORS:
            given = getattr(self, name)
            if given is not None or name in ("value", "on_unattainable"):
                object.__setattr__(self, name, validate(name, given))
        _check_stages(self)
        _check_session(self)
        if self.slo_class is None:
            _check_guarantee(self)

    @property
    def has_objective(self) -> bool:
        """Whether a TTFT or a TPOT is asked for, or a time for the whole answer or session."""
        asked = (self.ttft_ms, self.tpot_ms, self.thinking_tpot_ms, self.e2e_ms)
        alone = (self.stages, self.session_e2e_ms)
        return any(one is not None for one in (*asked, *alone))

    @property
    def answer_stages(self) -> tuple[Stage, ...]:
        """The stages of the answer, at least one; of thinking, `until` is left to the server."""
        if self.stages is not None:
            return self.stages
        last = Stage(self.tpot_ms)
        return (last,) if self.thinking_tpot_ms is None else (Stage(self.thinking_tpot_ms), last)

    @property
    def tightest_tpot_ms(self) -> float | None:
        """What stands for all stages in admission (SLOs-Serve, section 3.2.1, "Multi-Decode
        SLOs")."""
        asked = [s.tpot_ms for s in self.answer_stages if s.tpot_ms is not None]
        return min(asked, default=None)

    @property
    def effective_tier(self) -> Tier:
        """The tier asked for, with the default filled in."""
        if self.tier is not None:
            return self.tier
        return "guaranteed" if self.has_objective else "best_effort"

    def to_extra_args(self, *, resolved: bool = False) -> dict[str, str | int | float]:
        """Flat keys for `SamplingParams.extra_args` and `vllm_xargs`.

        Args:
            resolved: this SLO came out of `resolve_slo`, so its class has been applied. Then
                `value` and `on_unattainable` are written even at their defaults: reading the keys
                back against the same classes gives this SLO again, and never None.
        """
        flat: dict[str, str | int | float] = {}
        for spec in fields(self):
            given = getattr(self, spec.name)
            if (resolved and given is not None) or given != spec.default:
                if spec.name == "stages":
                    given = json.dumps([stage._asdict() for stage in given])
                elif isinstance(given, bool):
                    given = int(given)
                flat[_PREFIX + PUBLIC_OF[spec.name]] = given
        return flat

    @classmethod
    def from_extra_args(
        cls,
        extra: Mapping[str, Any] | None,
        *,
        classes: Mapping[str, SLO] | None = None,
        arrival_s: float | None = None,
    ) -> SLO | None:
        """Read the flat keys back; None when `extra` holds none of them.

        Also reads SLOs-Serve's `prefill_ddl` (absolute deadline of the first token, epoch seconds)
        and `slo_tpot` (seconds per token).

        Args:
            extra: `SamplingParams.extra_args`; keys that are not the SLO's are left alone, and
                `INTERNAL_KEYS` say nothing about the SLO.
            classes: the configured classes; None leaves a named class unapplied.
            arrival_s: when the request arrived, epoch seconds; needed for `prefill_ddl` only.

        Raises:
            InvalidSLOError: a bad value, an unknown ``slo_`` key, an unknown class.
        """
        claims = _Claims()
        claims.add_xargs(extra, arrival_s, internal=INTERNAL_KEYS)
        return _build(claims.values(), {}, classes)


def _check_stages(slo: SLO) -> None:
    if slo.stages is None:
        return
    for name in ("tpot_ms", "thinking_tpot_ms"):
        if getattr(slo, name) is not None:
            fix = "give the stages their own tpot_ms, or leave stages out"
            raise InvalidSLOError("stages", f"stand beside {name}", fix)


def check_thinking(slo: SLO, *, told: bool) -> None:
    """Refuse an objective for thinking where it is not ``told`` apart from the answer.

    Raises:
        InvalidSLOError: there is one.
    """
    if slo.thinking_tpot_ms is not None and not told:
        raise InvalidSLOError(
            "thinking_tpot_ms",
            "the server does not tell thinking from the answer",
            "start it with --reasoning-parser, or give stages with the text that ends thinking",
        )


def _check_session(slo: SLO) -> None:
    if slo.session_id is not None or slo.slo_class is not None:
        return
    for name in ("session_e2e_ms", "session_rounds", "session_last"):
        if getattr(slo, name):
            raise InvalidSLOError(name, "there is no session", "add session_id, or leave it out")


def _check_guarantee(slo: SLO) -> None:
    if slo.tier == "guaranteed" and not slo.has_objective:
        raise InvalidSLOError(
            "tier",
            "'guaranteed' has no objective to guarantee",
            "add ttft_ms or tpot_ms, or use tier best_effort",
        )


_QUOTE_PREFIX: Final = "slo_quote:"


def pack_quote(quote: Mapping[str, Any]) -> str:
    """The stop reason by which a request is told what it would be promised."""
    return _QUOTE_PREFIX + json.dumps(quote, separators=(",", ":"))


def unpack_quote(stop_reason: object) -> dict[str, Any] | None:
    """Inverse of `pack_quote`; None of any other stop reason."""
    if not isinstance(stop_reason, str) or not stop_reason.startswith(_QUOTE_PREFIX):
        return None
    return dict(json.loads(stop_reason.removeprefix(_QUOTE_PREFIX)))


def is_slo_key(key: object) -> bool:
    """Whether a key of `extra_args` belongs to the SLO: ``slo_*`` or ``prefill_ddl``."""
    return isinstance(key, str) and (key.startswith(_PREFIX) or key == _DDL_KEY)


def has_slo_key(extra: Mapping[str, Any] | None) -> bool:
    """Whether any key of `extra` belongs to the SLO."""
    return extra is not None and any(is_slo_key(key) for key in extra)


@dataclass(slots=True)
class _Claims:
    """Fields said so far by the explicit carriers: attribute -> (value, carrier)."""

    said: dict[str, tuple[object, str]] = field(default_factory=dict)

    def values(self) -> dict[str, object]:
        return {name: value for name, (value, _) in self.said.items()}

    def add(self, name: str, value: object, carrier: str) -> None:
        """Record a validated value; a carrier that disagrees with an earlier one is an error."""
        value = validate(name, value)
        before = self.said.setdefault(name, (value, carrier))
        if not _same(before[0], value):
            raise InvalidSLOError(
                PUBLIC_OF[name],
                f"{before[1]} says {echo(before[0])} but {carrier} says {echo(value)}",
                "send one value",
            )

    def add_body(self, body: object) -> None:
        if not isinstance(body, Mapping):
            fix = 'give an object, for example {"ttft_ms": 500, "tpot_ms": 50} or {"class": "chat"}'
            raise InvalidSLOError("slo", f"{echo(body)} is not an object", fix)
        for key, value in body.items():
            name = PUBLIC.get(key) if isinstance(key, str) else None
            if name is None:
                raise _unknown_key(key)
            if value is not None:
                self.add(name, value, f"body slo.{key}")

    def add_xargs(
        self, xargs: object, arrival_s: float | None, internal: tuple[str, ...] = ()
    ) -> None:
        if xargs is None:
            return
        if not isinstance(xargs, Mapping):
            fix = 'give an object, for example {"slo_ttft_ms": 500}'
            raise InvalidSLOError("vllm_xargs", f"{echo(xargs)} is not an object", fix)
        for key, value in xargs.items():
            if not is_slo_key(key) or key in internal:
                continue
            name = PUBLIC.get(key.removeprefix(_PREFIX))
            if name is None and key not in (_DDL_KEY, _TPOT_S_KEY):
                raise _unknown_key(key.removeprefix(_PREFIX))
            if value is None:
                continue
            if key == _DDL_KEY:
                self.add("ttft_ms", _ttft_of_deadline(value, arrival_s), f"vllm_xargs {key}")
            elif key == _TPOT_S_KEY:
                seconds = number_of(
                    key, value, SHORTEST_MS / 1000, MAX_TPOT_MS / 1000, "seconds", "0.05"
                )
                self.add("tpot_ms", seconds * 1000, f"vllm_xargs {key}")
            elif name is not None:
                self.add(name, value, f"vllm_xargs {key}")

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Times in headers follow llm-d: its own names win over the older ones, 0 and less has
        expired, too large a value is the largest, and an empty one says nothing."""
        low = {header.lower(): text.strip() for header, text in headers.items()}
        known = [(header, low[header]) for header in HEADER_FIELDS if low.get(header)]
        timed: set[str] = set()
        for header, text in known:
            name = HEADER_FIELDS[header]
            if name in MOST_MS:
                if name not in timed:
                    self.add(name, _time_of(name, text), f"header {header}")
                timed.add(name)
            else:
                self.add(name, text, f"header {header}")


def _time_of(name: str, text: str) -> object:
    """Milliseconds in a header; what is not a number is left to the validator to refuse."""
    if not _DECIMAL.fullmatch(text):
        return text
    return min(max(float(text), SHORTEST_MS), MOST_MS[name])


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return one == other


def _unknown_key(key: object) -> InvalidSLOError:
    known = ", ".join(PUBLIC)
    near = difflib.get_close_matches(str(key)[:64], PUBLIC, n=1) if isinstance(key, str) else []
    fix = f"did you mean {near[0]}? known: {known}" if near else f"known: {known}"
    shown = key if isinstance(key, str) and NAME.fullmatch(key) else echo(key)
    return InvalidSLOError(str(shown), "is not a field of an SLO", fix)


def _ttft_of_deadline(value: object, arrival_s: float | None) -> float:
    """TTFT in milliseconds of an absolute deadline `value` in epoch seconds."""
    fix = "give epoch seconds at most one day from now, or use ttft_ms"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidSLOError(_DDL_KEY, f"{echo(value)} is not a number", fix)
    if arrival_s is None:
        raise InvalidSLOError(_DDL_KEY, "the arrival time is unknown here", "use ttft_ms")
    try:
        ttft_ms = (float(value) - arrival_s) * 1000
    except OverflowError:
        ttft_ms = math.inf
    if not math.isfinite(ttft_ms):
        raise InvalidSLOError(_DDL_KEY, f"{echo(value)} is not a finite number", fix)
    if abs(ttft_ms) > MAX_TTFT_MS:  # long past: a duration, taken for an instant
        raise InvalidSLOError(_DDL_KEY, f"{echo(value)} is out of range", fix)
    return max(ttft_ms, EXPIRED_TTFT_MS)


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
        body_slo: the body field ``slo``.
        xargs: the body field ``vllm_xargs``; keys that are not the SLO's are ignored.
        headers: request headers, any case; only those in `HEADER_FIELDS` are read.
        service_tier: OpenAI's ``service_tier``, as sent.
        hints: valid SLO fields that gateways say in words of their own. They fill what nobody else
            has said. Without a class or an objective among them, they ask for nothing.
        classes: configured classes by name.
        service_tiers: service tier -> class name.
        arrival_s: arrival, epoch seconds; needed for ``prefill_ddl`` only.

    Raises:
        InvalidSLOError: a bad value, an unknown key or class, or two carriers that disagree.
    """
    claims = _Claims()
    if body_slo is not None:
        claims.add_body(body_slo)
    claims.add_xargs(xargs, arrival_s)
    claims.add_headers(headers or {})
    explicit, hints = claims.values(), hints or {}
    weak = _of_service_tier(service_tier, service_tiers)
    if explicit or weak or not hints.keys().isdisjoint(("slo_class", "ttft_ms")):
        weak = {**hints, **weak}
    return _build(explicit, weak, classes)


def _of_service_tier(
    service_tier: object, service_tiers: Mapping[str, str | None]
) -> dict[str, object]:
    weak: dict[str, object] = {}
    if isinstance(service_tier, str) and (mapped := service_tiers.get(service_tier)):
        weak["slo_class"] = mapped
    if service_tier == "flex":
        weak["tier"] = "best_effort"
    return weak


def _build(
    explicit: Mapping[str, object],
    weak: Mapping[str, object],
    classes: Mapping[str, SLO] | None,
) -> SLO | None:
    """The SLO of `explicit` fields, completed by their class and then by the `weak` ones."""
    if not explicit and not weak:
        return None
    said = dict(explicit)
    if "slo_class" in said:
        _fill_from_class(said, classes)
    said = {**weak, **said}
    if "slo_class" in weak and "slo_class" not in explicit:
        _fill_from_class(said, classes)
    slo = SLO(**cast("dict[str, Any]", said))
    if classes is not None:
        _check_guarantee(slo)
    return slo


def _fill_from_class(said: dict[str, object], classes: Mapping[str, SLO] | None) -> None:
    """Add to `said`, in place, the fields that only the class sets."""
    if classes is None:
        return
    name = str(said["slo_class"])
    others = _instead_of(said)
    if name not in classes:
        known = ", ".join(sorted(classes)[:16]) or "none"
        raise InvalidSLOError("class", f"{echo(name)} is unknown", f"configured classes: {known}")
    for spec in fields(SLO):
        given = getattr(classes[name], spec.name)
        if given != spec.default and spec.name not in others:
            said.setdefault(spec.name, given)


def _instead_of(said: Mapping[str, object]) -> tuple[str, ...]:
    """Fields of a class that a request replaces by saying the same in another way; of a class of
    sessions, what it says of them is nothing to a request that is in none."""
    replaced: tuple[str, ...] = ()
    if "stages" in said:
        replaced += ("tpot_ms", "thinking_tpot_ms")
    elif "tpot_ms" in said or "thinking_tpot_ms" in said:
        replaced += ("stages",)
    if "session_id" not in said:
        replaced += ("session_e2e_ms", "session_rounds")
    return replaced
