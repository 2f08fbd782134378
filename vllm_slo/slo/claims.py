# SPDX-License-Identifier: Apache-2.0
"""The fields of an SLO as the explicit carriers of one request state them.

Units at this edge are milliseconds. Every carrier goes through the one validator of each field
(`fields.validate`).
"""

from __future__ import annotations

import difflib
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo.fields import (
    MAX_TPOT_MS,
    MAX_TTFT_MS,
    NAME,
    PUBLIC,
    PUBLIC_OF,
    SHORTEST_MS,
    echo,
    number_of,
    validate,
)
from vllm_slo.slo.keys import DDL_KEY, PREFIX, TPOT_S_KEY, is_slo_key

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
EXPIRED_TTFT_MS: Final = SHORTEST_MS
"""TTFT of a `prefill_ddl` that lies in the past: valid, and never attainable."""

MOST_MS: Final[Mapping[str, float]] = {
    "ttft_ms": MAX_TTFT_MS,
    "tpot_ms": MAX_TPOT_MS,
    "e2e_ms": MAX_TTFT_MS,
}
_DECIMAL: Final = re.compile(r"[+-]?(\d{1,32}(\.\d{0,32})?|\.\d{1,32})([eE][+-]?\d{1,3})?", re.A)


@dataclass(slots=True)
class Claims:
    """What the carriers that were read so far state.

    ``by_name``: attribute of the SLO -> (value, carrier).
    """

    by_name: dict[str, tuple[object, str]] = field(default_factory=dict)

    def values(self) -> dict[str, object]:
        return {name: value for name, (value, _) in self.by_name.items()}

    def add(self, name: str, value: object, carrier: str) -> None:
        """Record a value.

        Raises:
            InvalidSLOError: it is not valid, or an earlier carrier states another.
        """
        value = validate(name, value)
        before = self.by_name.setdefault(name, (value, carrier))
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
        """Read the flat keys of ``vllm_xargs`` or ``extra_args``.

        Args:
            xargs: the keys and values; other keys than the SLO's are ignored.
            arrival_s: arrival of the request, epoch seconds; needed for `DDL_KEY` only.
            internal: keys that are ignored, too.
        """
        if xargs is None:
            return
        if not isinstance(xargs, Mapping):
            fix = 'give an object, for example {"slo_ttft_ms": 500}'
            raise InvalidSLOError("vllm_xargs", f"{echo(xargs)} is not an object", fix)
        for key, value in xargs.items():
            if not is_slo_key(key) or key in internal:
                continue
            name = PUBLIC.get(key.removeprefix(PREFIX))
            if name is None and key not in (DDL_KEY, TPOT_S_KEY):
                raise _unknown_key(key.removeprefix(PREFIX))
            if value is None:
                continue
            if key == DDL_KEY:
                self.add("ttft_ms", _ttft_of_deadline(value, arrival_s), f"vllm_xargs {key}")
            elif key == TPOT_S_KEY:
                seconds = number_of(
                    key, value, SHORTEST_MS / 1000, MAX_TPOT_MS / 1000, "seconds", "0.05"
                )
                self.add("tpot_ms", seconds * 1000, f"vllm_xargs {key}")
            elif name is not None:
                self.add(name, value, f"vllm_xargs {key}")

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Read the headers in `HEADER_FIELDS`.

        Times follow llm-d: its own names win over the older ones, 0 and less has expired, too large
        a value is the largest, and an empty header is ignored.
        """
        texts = {header.lower(): text.strip() for header, text in headers.items()}
        given = [(header, texts[header]) for header in HEADER_FIELDS if texts.get(header)]
        timed: set[str] = set()
        for header, text in given:
            name = HEADER_FIELDS[header]
            if name in MOST_MS:
                if name not in timed:
                    self.add(name, _time_of(name, text), f"header {header}")
                timed.add(name)
            else:
                self.add(name, text, f"header {header}")


def _time_of(name: str, text: str) -> object:
    """Milliseconds in a header. The validator refuses what is not a number."""
    if not _DECIMAL.fullmatch(text):
        return text
    return min(max(float(text), SHORTEST_MS), MOST_MS[name])


def _same(first: object, second: object) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-9)
    return first == second


def _unknown_key(key: object) -> InvalidSLOError:
    fields = ", ".join(PUBLIC)
    near = difflib.get_close_matches(str(key)[:64], PUBLIC, n=1) if isinstance(key, str) else []
    fix = f"did you mean {near[0]}? known: {fields}" if near else f"known: {fields}"
    shown = key if isinstance(key, str) and NAME.fullmatch(key) else echo(key)
    return InvalidSLOError(str(shown), "is not a field of an SLO", fix)


def _ttft_of_deadline(value: object, arrival_s: float | None) -> float:
    """TTFT in milliseconds of an absolute deadline `value` in epoch seconds."""
    fix = "give epoch seconds at most one day from now, or use ttft_ms"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidSLOError(DDL_KEY, f"{echo(value)} is not a number", fix)
    if arrival_s is None:
        raise InvalidSLOError(DDL_KEY, "the arrival time is unknown here", "use ttft_ms")
    try:
        ttft_ms = (float(value) - arrival_s) * 1000
    except OverflowError:
        ttft_ms = math.inf
    if not math.isfinite(ttft_ms):
        raise InvalidSLOError(DDL_KEY, f"{echo(value)} is not a finite number", fix)
    if abs(ttft_ms) > MAX_TTFT_MS:  # far in the past it is a duration, mistaken for an instant
        raise InvalidSLOError(DDL_KEY, f"{echo(value)} is out of range", fix)
    return max(ttft_ms, EXPIRED_TTFT_MS)
