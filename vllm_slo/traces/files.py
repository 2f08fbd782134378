# SPDX-License-Identifier: Apache-2.0
"""Reads files of recorded requests, line by line, in several formats.

The format is found by the content of a file, not by its name. A file may be compressed with gzip.

| format | content | times |
| --- | --- | --- |
| Azure CSV | ``TIMESTAMP,ContextTokens,GeneratedTokens`` (2023 and 2024) | dates |
| BurstGPT CSV | ``Timestamp,...,Request tokens,Response tokens,...`` | seconds |
| Mooncake JSON lines | ``{"timestamp", "input_length", "output_length", "hash_ids"}`` | ms |
| AdaServe JSON | a list of ``{"emission_time_ms", "input_length", ..., "slo_ratio"}`` | ms |

For a mistake in a file, a `TraceError` names the file, its likely format, line and field.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TextIO

from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.request import MOONCAKE_BLOCK_TOKENS, TraceRequest

Format = Literal["azure", "burstgpt", "mooncake", "adaserve"]

_GZIP: Final = b"\x1f\x8b"
_HEAD: Final = 4096
"""Characters of a file's first line that are enough to find its format."""
_MOST_TOKENS: Final = 10**9
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_DATE: Final = re.compile(
    r"(\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?)"  # a date, with a time or not
    r"(?:(?<=:\d\d:\d\d)\.(\d{1,9}))?"  # a fraction only of seconds
    r" ?(Z|[+-]\d\d(?::?\d\d)?)?",
    re.ASCII | re.IGNORECASE,
)


class _RecordError(ValueError):
    """A mistake and its place in the file, without the file's name."""


def detect(path: Path) -> Format:
    """The format of a file, by its first line.

    Raises:
        TraceError: the file cannot be read, or has none of the formats.
    """
    with _text(path) as text:
        head = text.readline(_HEAD)
        while head and not head.strip():
            head = text.readline(_HEAD)
    head = head.strip()
    if not head:
        raise TraceError(f"{path} is empty")
    if head.startswith("["):
        return "adaserve"
    if head.startswith("{"):
        return "mooncake"
    cells = {cell.strip() for cell in head.replace('"', "").split(",")}
    shared = {form: len(cells & set(_FORMATS[form].fields)) for form in _TABLES}
    likeliest = max(_TABLES, key=lambda form: shared[form])
    if shared[likeliest]:
        return likeliest
    if head.startswith("version https://git-lfs"):
        raise TraceError(f"{path} is a Git LFS pointer to the trace; run 'git lfs pull'")
    known = "; ".join(f"{reader.name} ({', '.join(reader.fields)})" for reader in _FORMATS.values())
    raise TraceError(f"{path} line 1: {head[:60]!r} begins no known trace; known: {known}")


def format_name(form: Format) -> str:
    """The usual name of a format."""
    return _FORMATS[form].name


def read(path: Path, form: Format) -> Iterator[TraceRequest]:
    """The requests of a file, in its order, one at a time.

    AdaServe's file is one JSON value and is read at once.

    Raises:
        TraceError: the file cannot be read, or a line of it; earlier lines have been yielded.
    """
    reader = _FORMATS[form]
    try:
        with _text(path) as text:
            for where, record in reader.records(text):
                yield reader.request(where, record)
    except _RecordError as error:
        raise TraceError(f"{path} looks like {reader.name}; {error}") from None


@contextmanager
def _text(path: Path) -> Iterator[TextIO]:
    """The text of a file, decompressed if needed; TraceError if it cannot be read."""
    try:
        with path.open("rb") as raw:
            packed = raw.peek(len(_GZIP)).startswith(_GZIP)
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            yield io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not UTF-8 text: {error.reason}") from error
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot read {path}: {why}") from error


# --- one function per format ---------------------------------------------------------------------


def _azure(where: str, row: Mapping[str, Any]) -> TraceRequest:
    return TraceRequest(
        _date_s(where, "TIMESTAMP", row["TIMESTAMP"]),
        _tokens(where, "ContextTokens", row["ContextTokens"]),
        _tokens(where, "GeneratedTokens", row["GeneratedTokens"]),
    )


def _burstgpt(where: str, row: Mapping[str, Any]) -> TraceRequest:
    return TraceRequest(
        _number(where, "Timestamp", row["Timestamp"]),
        _tokens(where, "Request tokens", row["Request tokens"]),
        _tokens(where, "Response tokens", row["Response tokens"]),
    )


def _mooncake(where: str, item: Mapping[str, Any]) -> TraceRequest:
    _present(where, item, "timestamp", "input_length", "output_length")
    prompt_tokens = _tokens(where, "input_length", item["input_length"])
    return TraceRequest(
        _number(where, "timestamp", item["timestamp"]) / 1e3,
        prompt_tokens,
        _tokens(where, "output_length", item["output_length"]),
        hash_ids=_hash_ids(where, item.get("hash_ids", []), prompt_tokens),
    )


def _adaserve(where: str, item: Mapping[str, Any]) -> TraceRequest:
    _present(where, item, "emission_time_ms", "input_length", "output_length", "slo_ratio")
    at_ms = _number(where, "emission_time_ms", item["emission_time_ms"])
    ratio = _number(where, "slo_ratio", item["slo_ratio"])
    if at_ms < 0:
        raise _RecordError(f"{where}, field emission_time_ms: {at_ms} is negative")
    if ratio == 0:
        raise _RecordError(f"{where}, field slo_ratio: 0 is no objective")
    return TraceRequest(
        at_ms / 1e3,
        _tokens(where, "input_length", item["input_length"]),
        _tokens(where, "output_length", item["output_length"]),
        slo_ratio=ratio,
    )


# --- records: (place in the file, fields) --------------------------------------------------------

_Records = Callable[[TextIO], Iterator[tuple[str, Mapping[str, Any]]]]


def _table(*columns: str) -> _Records:
    """Reads rows of a CSV table with these columns and maybe others; a missing cell is empty."""

    def records(text: TextIO) -> Iterator[tuple[str, Mapping[str, Any]]]:
        rows = csv.reader(text)
        places: list[int] = []
        try:
            for row in rows:
                if not any(map(str.strip, row)):
                    continue
                if places:
                    cells = [row[place] if place < len(row) else "" for place in places]
                    yield f"line {rows.line_num}", dict(zip(columns, cells, strict=True))
                else:
                    places = _places(f"line {rows.line_num}", row, columns)
        except csv.Error as error:
            raise _RecordError(f"line {rows.line_num}: {error}") from error

    return records


def _places(where: str, header: list[str], columns: tuple[str, ...]) -> list[int]:
    names = [name.strip() for name in header]
    for column in columns:
        if column not in names:
            raise _RecordError(f"{where}: column {column} is missing")
    return [names.index(column) for column in columns]


def _json_lines(text: TextIO) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _RecordError(f"line {number} is not JSON: {error}") from error
        if not isinstance(item, dict):
            raise _RecordError(f"line {number} is not a JSON object")
        yield f"line {number}", item


def _json_list(text: TextIO) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        data = json.load(text)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise _RecordError(f"line {getattr(error, 'lineno', '?')} is not JSON: {error}") from error
    if not isinstance(data, list) or not data:
        raise _RecordError("it must hold a list of requests")
    for place, item in enumerate(data):
        if not isinstance(item, dict):
            raise _RecordError(f"request {place} is not an object")
        yield f"request {place}", item


@dataclass(frozen=True, slots=True)
class _Reader:
    """How to read a format: its name, its fields, its records, and one request."""

    name: str
    fields: tuple[str, ...]
    records: _Records
    request: Callable[[str, Mapping[str, Any]], TraceRequest]


_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT_COLUMNS: Final = ("Timestamp", "Request tokens", "Response tokens")
_FORMATS: Final[Mapping[Format, _Reader]] = {
    "azure": _Reader("Azure CSV", _AZURE_COLUMNS, _table(*_AZURE_COLUMNS), _azure),
    "burstgpt": _Reader("BurstGPT CSV", _BURSTGPT_COLUMNS, _table(*_BURSTGPT_COLUMNS), _burstgpt),
    "mooncake": _Reader(
        "Mooncake JSON lines",
        ("timestamp", "input_length", "output_length", "hash_ids"),
        _json_lines,
        _mooncake,
    ),
    "adaserve": _Reader(
        "AdaServe JSON",
        ("emission_time_ms", "input_length", "output_length", "slo_ratio"),
        _json_list,
        _adaserve,
    ),
}
_TABLES: Final[tuple[Format, ...]] = ("azure", "burstgpt")


# --- fields --------------------------------------------------------------------------------------


def _bad(where: str, field: str, value: object, wanted: str) -> _RecordError:
    return _RecordError(f"{where}, field {field}: {str(value)[:80]!r} is not {wanted}")


def _present(where: str, item: Mapping[str, Any], *fields: str) -> None:
    for field in fields:
        if field not in item:
            raise _RecordError(f"{where}, field {field}: missing")


def _number(where: str, field: str, value: object) -> float:
    """A finite number from a CSV cell or a JSON value."""
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise _bad(where, field, value, "a number") from None
    return number


def _tokens(where: str, field: str, value: object) -> int:
    """A whole number of tokens from a CSV cell or a JSON value."""
    try:
        number = _number(where, field, value)
    except _RecordError:
        number = -1.0
    if not (number.is_integer() and 0 <= number <= _MOST_TOKENS):
        raise _bad(where, field, value, "a number of tokens")
    return int(number)


def _date_s(where: str, field: str, value: str) -> float:
    """Seconds since 2000 of a date and time, which is UTC without a time zone."""
    match = _DATE.fullmatch(value.strip())
    try:
        if match is None:
            raise ValueError
        whole, fraction, zone = match.groups()
        moment = datetime.fromisoformat(whole.upper())
        if zone is not None and zone.upper() != "Z":
            moment = datetime.fromisoformat(f"{moment.isoformat()}{zone}")
        else:
            moment = moment.replace(tzinfo=UTC)
    except ValueError:
        raise _bad(where, field, value, "a date and time") from None
    return (moment - _EPOCH).total_seconds() + (float(f"0.{fraction}") if fraction else 0.0)


def _hash_ids(where: str, value: object, prompt_tokens: int) -> tuple[int, ...]:
    """The ids of a prompt's blocks; the last block may be shorter."""
    if not isinstance(value, list) or any(type(hash_id) is not int for hash_id in value):
        raise _bad(where, "hash_ids", value, "a list of whole numbers")
    if len(value) > math.ceil(prompt_tokens / MOONCAKE_BLOCK_TOKENS):
        raise _RecordError(
            f"{where}, field hash_ids: {len(value)} ids are too many for {prompt_tokens} tokens "
            f"in blocks of {MOONCAKE_BLOCK_TOKENS}"
        )
    return tuple(value)
