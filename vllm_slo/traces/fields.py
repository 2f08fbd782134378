# SPDX-License-Identifier: Apache-2.0
"""The fields of a record: each function reads one value and raises `FieldError` for a mistake."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from vllm_slo.traces.errors import FieldError, RecordError
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.times import parse_date_s

T = TypeVar("T")

MOST_TOKENS: Final = 10**9
"""Of one prompt or answer; a larger number is a mistake."""
_LONGEST_MS: Final = 86_400_000.0 * 366
"""No objective and no time of an answer is above a year."""


def requests_of(
    records: Iterable[tuple[str, T]], parse: Callable[[T], TraceRequest]
) -> Iterator[TraceRequest]:
    """The requests of records and their places; a `FieldError` becomes a `RecordError`."""
    for where, record in records:
        try:
            request = parse(record)
        except FieldError as error:
            raise RecordError(f"{where}, {error}") from None
        yield request


def bad(field: str, value: object, wanted: str) -> FieldError:
    """The error for a value that is not what is wanted."""
    return FieldError(f"field {field}: {str(value)[:80]!r} is not {wanted}")


def require(item: Mapping[str, Any], *fields: str) -> None:
    """Refuse a record that lacks one of the fields."""
    for field in fields:
        if field not in item:
            raise FieldError(f"field {field}: missing")


def number(field: str, value: object) -> float:
    """A finite number from a CSV cell or a JSON value."""
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        result = float(value)
        if not math.isfinite(result):
            raise ValueError
    except (ValueError, OverflowError):
        raise bad(field, value, "a number") from None
    return result


def tokens(field: str, value: object) -> int:
    """A whole number of tokens from a CSV cell or a JSON value."""
    try:
        count = number(field, value)
    except FieldError:
        count = -1.0
    if not (count.is_integer() and 0 <= count <= MOST_TOKENS):
        raise bad(field, value, "a number of tokens")
    return int(count)


def integer(field: str, value: object) -> int:
    """A whole number, maybe negative, from a CSV cell or a JSON value."""
    result = number(field, value)
    if not result.is_integer():
        raise bad(field, value, "a whole number")
    return int(result)


def duration_ms(field: str, value: object) -> float:
    """Milliseconds, 0 or above."""
    result = number(field, value)
    if not 0 <= result <= _LONGEST_MS:
        raise bad(field, value, "a time in ms")
    return result


def duration_s(field: str, value: object) -> float:
    """Seconds, 0 or above, from milliseconds."""
    return duration_ms(field, value) / 1e3


def objective_ms(field: str, value: object) -> float:
    """The milliseconds of an objective, which are above 0."""
    result = number(field, value)
    if not 0 < result <= _LONGEST_MS:
        raise bad(field, value, "an objective in ms")
    return result


def name(field: str, value: object) -> str:
    """A name of a class, tenant, model or session."""
    if not isinstance(value, str):
        raise bad(field, value, "a name")
    return value


def flag(field: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise bad(field, value, "true or false")
    return value


def word(field: str, value: object, known: tuple[str, ...]) -> str:
    """One of the known words."""
    if value not in known:
        raise bad(field, value, f"one of {', '.join(known)}")
    return str(value)


def date_s(field: str, value: object) -> float:
    """Seconds since 2000 of a date and time, which is UTC without a time zone."""
    try:
        if not isinstance(value, str):
            raise ValueError
        return parse_date_s(value)
    except ValueError:
        raise bad(field, value, "a date and time") from None


def hash_ids(value: object, prompt_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """The ids of a prompt's blocks; the last block may be shorter."""
    if not isinstance(value, list) or any(type(hash_id) is not int for hash_id in value):
        raise bad("hash_ids", value, "a list of whole numbers")
    if len(value) > math.ceil(prompt_tokens / block_tokens):
        raise FieldError(
            f"field hash_ids: {len(value)} ids are too many for {prompt_tokens} tokens "
            f"in blocks of {block_tokens}"
        )
    return tuple(value)
