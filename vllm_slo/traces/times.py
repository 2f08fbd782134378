# SPDX-License-Identifier: Apache-2.0
"""Dates of traces: seconds since 2000, which a float holds to a tenth of a microsecond."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

ORIGIN: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""Where `TraceRequest.at_s` counts from if a trace has dates."""
UNIX_ORIGIN_S: Final = 946_684_800
"""Unix time of `ORIGIN`."""
_FIRST_UNIX_S: Final = 1e9
"""A number of seconds from here on (2001) is Unix time."""
_FIRST_DATED_S: Final = 1e8
"""A time from here on (2003) is a date; no trace that counts from its own start is that long."""
_DATE: Final = re.compile(
    r"(\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?)"  # a date, with a time or not
    r"(?:(?<=:\d\d:\d\d)\.(\d{1,9}))?"  # a fraction only of seconds
    r" ?(Z|[+-]\d\d(?::?\d\d)?)?",
    re.ASCII | re.IGNORECASE,
)


def seconds_of(moment: datetime) -> float:
    """Seconds since `ORIGIN` of a moment with a time zone."""
    return (moment - ORIGIN).total_seconds()


def moment_of(at_s: float) -> datetime:
    """The moment, in UTC, at seconds since `ORIGIN`."""
    return ORIGIN + timedelta(seconds=at_s)


def at_of(seconds: float) -> float:
    """A time of a trace from a number: Unix time becomes seconds since `ORIGIN`."""
    return seconds - UNIX_ORIGIN_S if seconds >= _FIRST_UNIX_S else seconds


def is_dated(at_s: float) -> bool:
    """Whether a time of a trace is a date, and not seconds from the trace's own start."""
    return at_s >= _FIRST_DATED_S


def parse_date_s(text: str) -> float:
    """Seconds since `ORIGIN` of a date and time in ISO 8601, which is UTC without a time zone.

    Raises:
        ValueError: it is none.
    """
    match = _DATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:80]!r} is not a date and time")
    whole, fraction, zone = match.groups()
    moment = datetime.fromisoformat(whole.upper())
    if zone is not None and zone.upper() != "Z":
        moment = datetime.fromisoformat(f"{moment.isoformat()}{zone}")
    else:
        moment = moment.replace(tzinfo=UTC)
    return seconds_of(moment) + (float(f"0.{fraction}") if fraction else 0.0)
