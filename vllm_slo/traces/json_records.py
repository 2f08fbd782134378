# SPDX-License-Identifier: Apache-2.0
"""JSON files as records and their places: one object a line, or one value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from vllm_slo.traces.errors import RecordError


def json_lines(
    text: TextIO, *, may_be_cut: bool = False
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(``line N``, object) of a file of JSON lines.

    ``may_be_cut``: a part of a line at the end of the file, without a line break, is passed over.
    """
    for line_number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            if may_be_cut and not line.endswith("\n"):
                return
            raise RecordError(f"line {line_number} is not JSON: {error}") from error
        if not isinstance(item, dict):
            raise RecordError(f"line {line_number} is not a JSON object")
        yield f"line {line_number}", item


def json_value(text: TextIO) -> Any:
    """The one value of a JSON file, which is read whole."""
    try:
        return json.load(text)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise RecordError(f"line {getattr(error, 'lineno', '?')} is not JSON: {error}") from error


def json_list(text: TextIO) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(``request N``, object) of a file that is one list."""
    data = json_value(text)
    if not isinstance(data, list) or not data:
        raise RecordError("it must hold a list of requests")
    yield from objects(data, "request")


def objects(items: list[Any], kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(``kind N``, object) of a list."""
    for place, item in enumerate(items):
        if not isinstance(item, dict):
            raise RecordError(f"{kind} {place} is not an object")
        yield f"{kind} {place}", item
