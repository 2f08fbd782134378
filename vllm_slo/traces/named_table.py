# SPDX-License-Identifier: Apache-2.0
"""Plain CSV whose header names the columns, in words of many traces and spreadsheets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TextIO, cast, get_args

from vllm_slo.traces import fields
from vllm_slo.traces.csv_rows import CSVRows, cell
from vllm_slo.traces.errors import FieldError, RecordError
from vllm_slo.traces.request import End, Served, TraceRequest
from vllm_slo.traces.times import at_of

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "time": (
        "timestamp", "time", "arrival", "arrivaltime", "arrivaltimestamp", "arrivedat", "arrived",
        "requesttime", "requesttimestamp", "starttime", "start", "date", "datetime", "createdat",
        "emissiontime", "ts", "at",
    ),
    "prompt tokens": (
        "prompttokens", "promptlength", "promptlen", "inputtokens", "inputlength", "inputlen",
        "contexttokens", "requesttokens", "prefilltokens", "numprompttokens", "numinputtokens",
        "numprefilltokens", "prompttokencount", "inputtokencount",
    ),
    "output tokens": (
        "outputtokens", "outputlength", "outputlen", "completiontokens", "completionlength",
        "generatedtokens", "responsetokens", "decodetokens", "numoutputtokens",
        "numcompletiontokens", "numdecodetokens", "outputtokencount", "completiontokencount",
        "answertokens",
    ),
    "class": ("class", "sloclass"),
    "tenant": ("tenant", "customer", "team", "user", "userid", "tenantid"),
    "model": ("model", "modelname", "modelid"),
    "session": ("session", "sessionid", "conversation", "conversationid"),
    "priority": ("priority",),
    "ttft_ms": ("ttft", "slottft"),
    "tpot_ms": ("tpot", "slotpot"),
    "e2e_ms": ("e2e", "sloe2e"),
    "end": ("end",),
    "served_ttft_ms": ("servedttft",),
    "served_tpot_ms": ("servedtpot",),
    "served_e2e_ms": ("servede2e",),
}  # fmt: skip
"""What a column holds -> its names, in small letters, without other signs and without its unit."""
NEEDED: Final = ("time", "prompt tokens", "output tokens")
EXAMPLE: Final = "timestamp, prompt_tokens, output_tokens"
_UNITS_S: Final = {
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0,
    "ms": 1e-3, "msec": 1e-3, "millis": 1e-3, "milliseconds": 1e-3,
    "us": 1e-6, "micros": 1e-6, "microseconds": 1e-6, "ns": 1e-9, "nanoseconds": 1e-9,
}  # fmt: skip
"""Last word of a column's name -> seconds."""
_UNIX_UNITS_S: Final = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""A number from here on cannot be seconds of this age: (lowest number, its unit in seconds)."""
_DELIMITERS: Final = ",;\t|"
_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", re.ASCII)
_ENDS: Final = get_args(End)


@dataclass(frozen=True, slots=True)
class _Column:
    """A column that is known.

    Attributes:
        title: its name in the header.
        place: its place in a row.
        unit_s: seconds of its unit; None: the header does not say.
    """

    title: str
    place: int
    unit_s: float | None


def columns_of(header: str) -> dict[str, _Column]:
    """What a header names: what is held -> the first column that holds it."""
    return _columns([title.strip() for title in header.replace('"', "").split(_delimiter(header))])


def _columns(titles: list[str]) -> dict[str, _Column]:
    meanings = {name: meaning for meaning, names in NAMES.items() for name in names}
    found: dict[str, _Column] = {}
    for place, title in enumerate(titles):
        words = [word.lower() for word in _WORDS.findall(title)]
        unit_s = _UNITS_S.get(words[-1]) if len(words) > 1 else None
        # "e2e" falls apart into words; joined they are one again.
        name = "".join(words if unit_s is None else words[:-1])
        if name in meanings:
            found.setdefault(meanings[name], _Column(title, place, unit_s))
    return found


def _delimiter(header: str) -> str:
    return max(_DELIMITERS, key=header.count)


def requests(text: TextIO) -> Iterator[TraceRequest]:
    """The requests of a table, in its order.

    Raises:
        RecordError: a needed column is missing, or a row is broken.
    """
    above: list[str] = []
    for line in text:
        above.append(line)
        if line.strip():
            break
    rows = CSVRows(chain(above, text), _delimiter("".join(above[-1:])))
    columns = _columns(rows.header)
    for meaning in NEEDED:
        if meaning not in columns:
            raise RecordError(
                f"{rows.where}: no column of {meaning} among {', '.join(rows.header)[:200]}; "
                f"needed are columns such as {EXAMPLE}"
            )
    row_of = _Row(columns)
    for row in rows:
        try:
            request = row_of(row)
        except FieldError as error:
            raise RecordError(f"{rows.where}, {error}") from None
        yield request


class _Row:
    """Turns rows into requests; the first row decides what its times are."""

    def __init__(self, columns: Mapping[str, _Column]) -> None:
        self._columns = columns
        self._time = columns["time"]
        self._time_s: Callable[[str], float] | None = None
        self._served = [m for m in ("end", *_SERVED) if m in columns]

    def __call__(self, row: list[str]) -> TraceRequest:
        when = cell(row, self._time.place)
        if self._time_s is None:
            self._time_s = _time_reader(self._time, when)
        values = {
            attribute: read(self._columns[meaning].title, text)
            for meaning, (attribute, read) in _FIELDS.items()
            if meaning in self._columns
            if (text := cell(row, self._columns[meaning].place)) or meaning in NEEDED
        }
        for meaning in ("ttft_ms", "tpot_ms", "e2e_ms"):
            if meaning in self._columns and (text := cell(row, self._columns[meaning].place)):
                values[meaning] = self._ms(meaning, text, fields.objective_ms)
        return TraceRequest(self._time_s(when), **values, served=self._outcome(row))

    def _outcome(self, row: list[str]) -> Served | None:
        told = {m: text for m in self._served if (text := cell(row, self._columns[m].place))}
        if not told:
            return None
        title = self._columns["end"].title if "end" in told else "end"
        end = cast("End", fields.word(title, told.pop("end", "completed"), _ENDS))
        times: Any = {
            _SERVED[m]: self._ms(m, text, fields.duration_ms) / 1e3 for m, text in told.items()
        }
        return Served(end, **times)

    def _ms(self, meaning: str, text: str, read: Callable[[str, object], float]) -> float:
        """Milliseconds of a column, whose own unit counts."""
        column = self._columns[meaning]
        number = fields.number(column.title, text)
        return read(column.title, number if column.unit_s is None else number * column.unit_s * 1e3)


def _time_reader(column: _Column, first: str) -> Callable[[str], float]:
    """How the times of a column are read, by its unit or its first value."""
    title = column.title
    try:
        number = fields.number(title, first)
    except FieldError:
        if column.unit_s is not None:
            raise
        fields.date_s(title, first)
        return lambda text: fields.date_s(title, text)
    unit_s = column.unit_s
    if unit_s is None:
        unit_s = next((unit for low, unit in _UNIX_UNITS_S if number >= low), 1.0)
    return lambda text: at_of(fields.number(title, text) * unit_s)


_FIELDS: Final[Mapping[str, tuple[str, Callable[[str, object], Any]]]] = {
    "prompt tokens": ("prompt_tokens", fields.tokens),
    "output tokens": ("output_tokens", fields.tokens),
    "class": ("slo_class", fields.name),
    "tenant": ("tenant", fields.name),
    "model": ("model", fields.name),
    "session": ("session", fields.name),
    "priority": ("priority", fields.integer),
}
_SERVED: Final = {
    "served_ttft_ms": "ttft_s",
    "served_tpot_ms": "tpot_s",
    "served_e2e_ms": "e2e_s",
}
