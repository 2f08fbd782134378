# SPDX-License-Identifier: Apache-2.0
"""The fields of an SLO, with one validator each: a mistake has the same text in every carrier."""

from __future__ import annotations

import json
import math
import numbers
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from vllm_slo.errors import InvalidSLOError

SHORTEST_MS: Final = 0.001
MAX_TTFT_MS: Final = 86_400_000
MAX_TPOT_MS: Final = 3_600_000
MIN_VALUE: Final = 1e-6
MAX_VALUE: Final = 1_000_000
MAX_OUTPUT_TOKENS: Final = 10_000_000
MAX_WAITING: Final = 1_000_000
MAX_SESSION_ROUNDS: Final = 10_000
MAX_STAGES: Final = 8
MAX_MARK_CHARS: Final = 64
MAX_ECHO_CHARS: Final = 80
NAME: Final = re.compile(r"[A-Za-z0-9_.:@/-]{1,64}")


class Stage(NamedTuple):
    """A stretch of one answer with an objective of its own (SLOs-Serve, table 1).

    Attributes:
        tpot_ms: time per output token, milliseconds; None: no objective.
        until: text that ends the stage, itself included; None: it lasts to the end.
    """

    tpot_ms: float | None
    until: str | None = None


def echo(value: object) -> str:
    """A printable one-line rendering of untrusted `value`, at most 80 characters."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = MAX_ECHO_CHARS
    try:
        text = brief.repr(value)
    except Exception:  # noqa: BLE001 - a foreign __repr__ may raise anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_ECHO_CHARS else text[: MAX_ECHO_CHARS - 3] + "..."


def number_of(name: str, value: object, low: float, high: float, unit: str, example: str) -> float:
    """`value` as a float in [`low`, `high`]."""
    fix = f"give {unit} from {low:g} to {high:.0f}, for example {example}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidSLOError(name, f"{echo(value)} is not a number", fix)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidSLOError(name, f"{echo(value)} is not a finite number", fix)
    if not low <= number <= high:
        raise InvalidSLOError(name, f"{echo(number)} is out of range", fix)
    return number


def whole_of(name: str, value: object, high: int) -> int:
    """`value` as an int in [1, `high`]."""
    fix = f"give a whole number from 1 to {high}, for example 256"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidSLOError(name, f"{echo(value)} is not a whole number", fix)
    whole = int(value)
    if not 1 <= whole <= high:
        raise InvalidSLOError(name, f"{echo(whole)} is out of range", fix)
    return whole


def choice_of(name: str, value: object, choices: tuple[str, ...]) -> str:
    """`value` if it is one of `choices`."""
    if isinstance(value, str) and value in choices:
        return value
    raise InvalidSLOError(name, f"{echo(value)} is unknown", f"use one of {', '.join(choices)}")


def name_of(name: str, value: object) -> str:
    """`value` if it is an identifier that is safe as a metric label."""
    if isinstance(value, str) and NAME.fullmatch(value):
        return value
    fix = "give 1 to 64 characters out of A-Z a-z 0-9 _ . : @ / -"
    raise InvalidSLOError(name, f"{echo(value)} is not a name", fix)


def flag_of(name: str, value: object) -> bool:
    """`value` as a bool; 0 and 1 too, which is what `vllm_xargs` can carry."""
    if isinstance(value, bool | int) and value in (0, 1):
        return bool(value)
    raise InvalidSLOError(name, f"{echo(value)} is not a bool", "give true or false")


def stages_of(name: str, value: object) -> tuple[Stage, ...]:
    """`value` as stages: a list of objects, or that as JSON (which is what `vllm_xargs` can carry).

    Every stage but the last has a text that ends it.
    """
    fix = 'give a list such as [{"until": "</think>", "tpot_ms": 20}, {"tpot_ms": 100}]'
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidSLOError(name, f"{echo(value)} is not JSON", fix) from None
    if not isinstance(value, list | tuple) or not value:
        raise InvalidSLOError(name, f"{echo(value)} is not a list of stages", fix)
    if len(value) > MAX_STAGES:
        raise InvalidSLOError(name, f"{len(value)} stages are too many", f"give up to {MAX_STAGES}")
    stages = tuple(_stage(f"{name}[{i}]", stage, fix) for i, stage in enumerate(value))
    for i, stage in enumerate(stages):
        if (stage.until is None) != (i == len(stages) - 1):
            problem = "nothing ends the stage" if stage.until is None else "ends the last stage"
            fix = "give every stage but the last one until"
            raise InvalidSLOError(f"{name}[{i}].until", problem, fix)
    if all(stage.tpot_ms is None for stage in stages):
        raise InvalidSLOError(name, "no stage has an objective", "give one of them tpot_ms")
    return stages


def _stage(name: str, value: object, fix: str) -> Stage:
    if isinstance(value, Stage):
        value = value._asdict()
    if not isinstance(value, Mapping):
        raise InvalidSLOError(name, f"{echo(value)} is not an object", fix)
    if unknown := next((key for key in value if key not in Stage._fields), None):
        raise InvalidSLOError(name, f"{echo(unknown)} is unknown", "a stage has until and tpot_ms")
    tpot_ms, until = value.get("tpot_ms"), value.get("until")
    if tpot_ms is not None:
        tpot_ms = _ms_of(f"{name}.tpot_ms", tpot_ms, MAX_TPOT_MS, "50")
    if until is not None and not _is_mark(until):
        raise InvalidSLOError(
            f"{name}.until",
            f"{echo(until)} is not a text to look for",
            f"give 1 to {MAX_MARK_CHARS} characters, for example </think>",
        )
    return Stage(tpot_ms, until)


def _is_mark(value: object) -> bool:
    """Whether this is a text that an answer can hold."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_MARK_CHARS:
        return False
    return not any("\ud800" <= char <= "\udfff" for char in value)  # lone surrogates


def _ms_of(name: str, value: object, high: float, example: str) -> float:
    return number_of(name, value, SHORTEST_MS, high, "milliseconds", example)


VALIDATORS: Final[Mapping[str, Callable[[str, object], object]]] = {
    "ttft_ms": lambda n, v: _ms_of(n, v, MAX_TTFT_MS, "500"),
    "tpot_ms": lambda n, v: _ms_of(n, v, MAX_TPOT_MS, "50"),
    "e2e_ms": lambda n, v: _ms_of(n, v, MAX_TTFT_MS, "5000"),
    "thinking_tpot_ms": lambda n, v: _ms_of(n, v, MAX_TPOT_MS, "20"),
    "stages": stages_of,
    "session_id": name_of,
    "session_e2e_ms": lambda n, v: _ms_of(n, v, MAX_TTFT_MS, "10000"),
    "session_rounds": lambda n, v: whole_of(n, v, MAX_SESSION_ROUNDS),
    "session_last": flag_of,
    "value": lambda n, v: number_of(n, v, MIN_VALUE, MAX_VALUE, "a weight", "1"),
    "tier": lambda n, v: choice_of(n, v, ("guaranteed", "best_effort")),
    "on_unattainable": lambda n, v: choice_of(n, v, ("best_effort", "decline")),
    "max_wait_ms": lambda n, v: _ms_of(n, v, MAX_TTFT_MS, "10000"),
    "max_waiting": lambda n, v: whole_of(n, v, MAX_WAITING),
    "expected_output_tokens": lambda n, v: whole_of(n, v, MAX_OUTPUT_TOKENS),
    "tenant": name_of,
    "speculation": lambda n, v: choice_of(n, v, ("auto", "off")),
    "slo_class": name_of,
}
PUBLIC: Final[Mapping[str, str]] = {
    ("class" if name == "slo_class" else name): name for name in VALIDATORS
}
"""Key as a client writes it -> SLO attribute."""
PUBLIC_OF: Final[Mapping[str, str]] = {name: key for key, name in PUBLIC.items()}


def validate(name: str, value: object) -> object:
    """``value`` as the attribute ``name`` of an SLO holds it.

    Raises:
        InvalidSLOError: it is not valid there.
    """
    return VALIDATORS[name](PUBLIC_OF[name], value)
