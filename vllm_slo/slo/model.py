# SPDX-License-Identifier: Apache-2.0
"""The SLO of one request, as Python code writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, cast

from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo.claims import Claims
from vllm_slo.slo.fields import PUBLIC_OF, VALIDATORS, Stage, echo, validate
from vllm_slo.slo.keys import INTERNAL_KEYS, PREFIX

__all__ = ["SLO", "OnUnattainable", "Speculate", "Stage", "Tier", "slo_of_fields"]

Tier: TypeAlias = Literal["guaranteed", "best_effort"]
OnUnattainable: TypeAlias = Literal["best_effort", "decline"]
Speculate: TypeAlias = Literal["auto", "off"]


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
        session_id: requests of one id (and tenant) are the rounds of one job, such as a tool loop.
            The same characters as in `tenant`.
        session_e2e_ms: the whole job, milliseconds from the arrival of its first round to the last
            token of its last one, tools included; at most 86,400,000.
        session_rounds: how many rounds the job is expected to have, 1 to 10,000.
        session_last: whether this is its last round; None: not known.
        value: weight of the request when not all can be promised; 1e-6 <= value <= 1e6.
        tier: None means `guaranteed` when an objective is set, else `best_effort`.
        on_unattainable: what happens when no promise can be made: served `best_effort`, or
            `decline` (HTTP 429; in Python an output whose stop_reason says so).
        max_wait_ms: how long the request waits for its first token at most, milliseconds from
            arrival; 0.001 <= max_wait_ms <= 86,400,000 and not below `ttft_ms`. If its turn comes
            later it is declined, as soon as that is known. None: it waits.
        max_waiting: it is declined if as many requests of its class wait already, 1 to 1,000,000.
            None: there is no bound.
        expected_output_tokens: how long the client expects the output to be, 1 to 10,000,000.
        tenant: the customer or team that asks; 1 to 64 characters of ``[A-Za-z0-9_.:@/-]``.
        speculation: ``off``: no tokens are drafted for the request. None, or ``auto``: as it pays.
        slo_class: a class of the server's configuration (key ``class`` in JSON). Fields that this
            object leaves at their defaults are taken from the class where the class is known.

    Raises:
        InvalidSLOError: a field is out of its range, `max_wait_ms` is below `ttft_ms`, `tier` is
            ``guaranteed`` with neither an objective nor a class, `stages` stand beside another
            TPOT, or a field of a session is set without a session id.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    thinking_tpot_ms: float | None = None
    stages: tuple[Stage, ...] | None = None
    value: float = 1.0
    tier: Tier | None = None
    on_unattainable: OnUnattainable = "best_effort"
    max_wait_ms: float | None = None
    max_waiting: int | None = None
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
        _check_wait(self)
        _check_session(self)
        if self.slo_class is None:
            _check_guarantee(self)

    @property
    def may_be_declined(self) -> bool:
        """Whether it prefers a refusal over being served late."""
        bounds = (self.max_wait_ms, self.max_waiting)
        return self.on_unattainable == "decline" or any(bound is not None for bound in bounds)

    @property
    def has_objective(self) -> bool:
        """Whether a TTFT, a TPOT, or a time for the whole answer or session is set."""
        asked = (self.ttft_ms, self.tpot_ms, self.thinking_tpot_ms, self.e2e_ms)
        alone = (self.stages, self.session_e2e_ms)
        return any(value is not None for value in (*asked, *alone))

    @property
    def answer_stages(self) -> tuple[Stage, ...]:
        """The stages of the answer, at least one; of thinking, `until` is left to the server."""
        if self.stages is not None:
            return self.stages
        last = Stage(self.tpot_ms)
        return (last,) if self.thinking_tpot_ms is None else (Stage(self.thinking_tpot_ms), last)

    @property
    def tightest_tpot_ms(self) -> float | None:
        """The TPOT by which admission judges all stages (SLOs-Serve, section 3.2.1, "Multi-Decode
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

        ``resolved``: this SLO came out of `resolve_slo`, so its class has been applied. Then
        `value` and `on_unattainable` are written even at their defaults: reading the keys back
        against the same classes gives this SLO again, and never None.
        """
        flat: dict[str, str | int | float] = {}
        for spec in fields(self):
            given = getattr(self, spec.name)
            if (resolved and given is not None) or given != spec.default:
                if spec.name == "stages":
                    given = json.dumps([stage._asdict() for stage in given])
                elif isinstance(given, bool):
                    given = int(given)
                flat[PREFIX + PUBLIC_OF[spec.name]] = given
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
            extra: `SamplingParams.extra_args`; keys that are not the SLO's, and `INTERNAL_KEYS`,
                are ignored.
            classes: the configured classes; None leaves a named class unapplied.
            arrival_s: when the request arrived, epoch seconds; needed for `prefill_ddl` only.

        Raises:
            InvalidSLOError: a bad value, an unknown ``slo_`` key, an unknown class.
        """
        claims = Claims()
        claims.add_xargs(extra, arrival_s, internal=INTERNAL_KEYS)
        return slo_of_fields(claims.values(), {}, classes)


def _check_stages(slo: SLO) -> None:
    if slo.stages is None:
        return
    for name in ("tpot_ms", "thinking_tpot_ms"):
        if getattr(slo, name) is not None:
            fix = "give the stages their own tpot_ms, or leave stages out"
            raise InvalidSLOError("stages", f"stand beside {name}", fix)


def _check_wait(slo: SLO) -> None:
    if slo.max_wait_ms is None or slo.ttft_ms is None or slo.max_wait_ms >= slo.ttft_ms:
        return
    raise InvalidSLOError(
        "max_wait_ms",
        f"{slo.max_wait_ms:g} is less than ttft_ms",
        "give at least ttft_ms, or use on_unattainable decline",
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


def slo_of_fields(
    explicit: Mapping[str, object], weak: Mapping[str, object], classes: Mapping[str, SLO] | None
) -> SLO | None:
    """The SLO of `explicit` fields, completed by their class and then by the `weak` ones.

    Args:
        explicit: attribute -> value, as the request states them.
        weak: values for what neither the request nor its class states.
        classes: configured classes; None leaves a named class unapplied.

    Returns:
        None if there are no fields.

    Raises:
        InvalidSLOError: a bad value, an unknown class, or fields that do not go together.
    """
    if not explicit and not weak:
        return None
    values = dict(explicit)
    if "slo_class" in values:
        _fill_from_class(values, classes)
    values = {**weak, **values}
    if "slo_class" in weak and "slo_class" not in explicit:
        _fill_from_class(values, classes)
    slo = SLO(**cast("dict[str, Any]", values))
    if classes is not None:
        _check_guarantee(slo)
    return slo


def _fill_from_class(values: dict[str, object], classes: Mapping[str, SLO] | None) -> None:
    """Add to `values`, in place, the fields that only the class sets."""
    if classes is None:
        return
    name = str(values["slo_class"])
    replaced = _replaced_by(values)
    if name not in classes:
        configured = ", ".join(sorted(classes)[:16]) or "none"
        fix = f"configured classes: {configured}"
        raise InvalidSLOError("class", f"{echo(name)} is unknown", fix)
    for spec in fields(SLO):
        given = getattr(classes[name], spec.name)
        if given != spec.default and spec.name not in replaced:
            values.setdefault(spec.name, given)


def _replaced_by(values: Mapping[str, object]) -> tuple[str, ...]:
    """Fields of its class that do not apply to a request.

    The request states them in another form, or they are a session's and the request is in none.
    """
    replaced: tuple[str, ...] = ()
    if "stages" in values:
        replaced += ("tpot_ms", "thinking_tpot_ms")
    elif "tpot_ms" in values or "thinking_tpot_ms" in values:
        replaced += ("stages",)
    if "session_id" not in values:
        replaced += ("session_e2e_ms", "session_rounds")
    return replaced
