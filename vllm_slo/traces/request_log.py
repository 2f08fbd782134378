# SPDX-License-Identifier: Apache-2.0
"""vLLM's log of requests, as text: ``--enable-log-requests --enable-log-outputs`` at level DEBUG.

A request's lines, of which the second and third hold its lengths, as token ids:

    ... INFO 11-30 12:00:00 [...] Received request chatcmpl-1: params: SamplingParams(n=1, ...
    ... DEBUG 11-30 12:00:00 [...] Request chatcmpl-1 details: prompt: '...', prompt_token_ids: [..
    ... DEBUG 11-30 12:00:04 [...] Generated response chatcmpl-1 details: output_token_ids: [..
    ... INFO 11-30 12:00:04 [...] Generated response chatcmpl-1: output: ..., finish_reason: stop

The times have whole seconds and no year. They count from the start of the first line's year. The
lines of ``--logging-config.formatter json`` have dates with milliseconds, which are taken for UTC.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TextIO

from vllm_slo.traces import fields
from vllm_slo.traces.errors import FieldError, RecordError
from vllm_slo.traces.request import Served, TraceRequest

FIELDS: Final = ("Received request", "Generated response")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX: Final = re.compile(r".*?(\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]]*\] ", re.ASCII)
_MESSAGE: Final = re.compile(
    r"(Received request|Request|Generated response) ([^\s:]+)(.*)", re.ASCII | re.DOTALL
)
_PROMPT_IDS: Final = re.compile(r".*prompt_token_ids: (None|\[[\d, ]*\])", re.ASCII | re.DOTALL)
_OUTPUT_IDS: Final = re.compile(r"(?: \([\w ]+\))? details: output_token_ids: (None|[\[(][\d, ]*)")
_WHOLE: Final = re.compile(
    r" \(streaming complete\): output: '<streaming_complete: (\d{1,9}) tokens>'"
)
"""The end of a stream whose text vLLM does not keep: it tells the number of all tokens."""
_CHOICES: Final = re.compile(r".*params: SamplingParams\(n=(\d{1,4}),", re.ASCII | re.DOTALL)
_REASON: Final = re.compile(r".*finish_reason: (\w+)", re.ASCII | re.DOTALL)
_YEAR_S: Final = 366 * 86_400
"""Of the year 2000, to which the dates without a year are read."""
_DELTA: Final = " (streaming delta)"
_LEVEL: Final = "start the server with VLLM_LOGGING_LEVEL=DEBUG, without --max-log-len"


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    line: int
    at_s: float
    choices: int = 1
    prompt_tokens: int | None = None
    output_tokens: int = 0
    whole_tokens: int = 0
    lengths_told: bool = False
    aborted: bool = False


def requests(text: TextIO) -> Iterator[TraceRequest]:
    """The requests of a log, in the order of their ends; the requests without an end come last.

    Raises:
        RecordError: the log lacks the lengths; it names what the server must be started with.
    """
    unfinished: dict[str, _Open] = {}
    clock = _Clock()
    for line_number, line in enumerate(text, 1):
        if not any(word in line for word in ("Received request ", " details: ", FIELDS[1])):
            continue
        at_s, message = _json_line(line_number, line) if line[0] == "{" else clock.line(line)
        match = _MESSAGE.match(message)
        if match is None:
            continue
        kind, name, rest = match.groups()
        if kind != "Generated response":
            _received(unfinished.setdefault(name, _Open(line_number, at_s)), rest)
            continue
        name = name if name in unfinished else f"{name}_0"  # the first turn of a /v1/responses
        if name in unfinished and _responded(unfinished[name], rest):
            yield _ended(name, unfinished.pop(name))
    for name, request in unfinished.items():
        if name.startswith("cmpl-"):
            raise RecordError(
                f"line {request.line}, request {name}: vLLM logs no answers of /v1/completions; "
                "use spans (--otlp-traces-endpoint) or record with vllm-slo"
            )
        request.aborted = True
        yield _ended(name, request)


def _json_line(line_number: int, line: str) -> tuple[float, str]:
    """(seconds since 2000, message) of a line of ``--logging-config.formatter json``."""
    try:
        item = json.loads(line)
        date = str(item["asctime"]).replace(",", ".")
        return fields.date_s("asctime", date), str(item["message"])
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        why = error if isinstance(error, FieldError) else "not a line of vLLM's JSON log"
        raise RecordError(f"line {line_number}, {why}") from None


def _received(request: _Open, rest: str) -> None:
    """Take note of what a line says after the request's name, in whichever order the lines come."""
    choices = _CHOICES.match(rest)
    if choices is not None:
        request.choices = int(choices.group(1))
    count = _count(_PROMPT_IDS.match(rest), 1)
    if count is not None:
        request.prompt_tokens = count


def _responded(request: _Open, rest: str) -> bool:
    """Take note of one line of an answer; whether it was the request's last."""
    ids = _OUTPUT_IDS.match(rest)
    if ids is not None:
        count = _count(ids, 1)
        if count is not None:
            request.output_tokens += count
            request.lengths_told = True
        return False
    if rest.startswith(_DELTA):
        return False
    whole = _WHOLE.match(rest)
    if whole is not None:
        request.whole_tokens += int(whole.group(1))
        request.lengths_told = True
    reason = _REASON.match(rest)
    request.aborted = request.aborted or (reason is not None and reason.group(1) == "abort")
    request.choices -= 1
    return request.choices == 0


def _ended(name: str, request: _Open) -> TraceRequest:
    where = f"line {request.line}, request {name}"
    if request.prompt_tokens is None:
        raise RecordError(f"{where}: the log does not tell the prompt's length; {_LEVEL}")
    if not (request.lengths_told or request.aborted):
        raise RecordError(
            f"{where}: the log does not tell the answer's length; {_LEVEL}, "
            "with --enable-log-outputs and --enable-log-deltas"
        )
    return TraceRequest(
        request.at_s,
        request.prompt_tokens,
        request.whole_tokens or request.output_tokens,
        served=Served("aborted" if request.aborted else "completed"),
    )


def _count(match: re.Match[str] | None, group: int) -> int | None:
    """How many ids a list holds; None: there is no list."""
    if match is None or match.group(group) == "None":
        return None
    ids = match.group(group).strip("[]() ,")
    return ids.count(",") + 1 if ids else 0


class _Clock:
    """Reads the times of text lines: dates without a year, which never go back by half a year."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self._years_s = 0.0

    def line(self, line: str) -> tuple[float, str]:
        """(seconds since the log's first year began, message); the message is empty for others."""
        plain = _COLOUR.sub("", line)
        match = _PREFIX.match(plain)
        return (0.0, "") if match is None else (self._seconds(match[1]), plain[match.end() :])

    def _seconds(self, date: str) -> float:
        moment = datetime.strptime(f"2000-{date}", "%Y-%m-%d %H:%M:%S")
        at_s = (moment - datetime(2000, 1, 1)).total_seconds() + self._years_s
        if at_s < self._last_s - _YEAR_S / 2:
            self._years_s += _YEAR_S
            at_s += _YEAR_S
        self._last_s = max(self._last_s, at_s)
        return at_s
