# SPDX-License-Identifier: Apache-2.0
"""CSV tables with known columns: Azure's traces and BurstGPT's."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from typing import Final, TextIO

from vllm_slo.traces import fields
from vllm_slo.traces.errors import RecordError
from vllm_slo.traces.request import TraceRequest

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS: Final = ("Timestamp", "Request tokens", "Response tokens")
_BURSTGPT_NAMES: Final = ("Session ID", "Model")


def azure(text: TextIO) -> Iterator[TraceRequest]:
    """Azure's traces of 2023 and 2024; times are dates."""
    return fields.requests_of(_rows(text, AZURE_COLUMNS), _azure)


def _azure(row: Mapping[str, str]) -> TraceRequest:
    return TraceRequest(
        fields.date_s("TIMESTAMP", row["TIMESTAMP"]),
        fields.tokens("ContextTokens", row["ContextTokens"]),
        fields.tokens("GeneratedTokens", row["GeneratedTokens"]),
    )


def burstgpt(text: TextIO) -> Iterator[TraceRequest]:
    """BurstGPT's trace, with sessions or without; times are seconds."""
    return fields.requests_of(_rows(text, BURSTGPT_COLUMNS, _BURSTGPT_NAMES), _burstgpt)


def _burstgpt(row: Mapping[str, str]) -> TraceRequest:
    return TraceRequest(
        fields.number("Timestamp", row["Timestamp"]),
        fields.tokens("Request tokens", row["Request tokens"]),
        fields.tokens("Response tokens", row["Response tokens"]),
        model=row.get("Model") or None,
        session=row.get("Session ID") or None,
    )


def _rows(
    text: TextIO, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """(``line N``, cells by column) of a table; a missing cell is empty."""
    rows = csv.reader(text)
    places: dict[str, int] = {}
    try:
        for row in rows:
            if not any(map(str.strip, row)):
                continue
            if places:
                cells = {
                    column: row[place].strip() if place < len(row) else ""
                    for column, place in places.items()
                }
                yield f"line {rows.line_num}", cells
            else:
                places = _places(f"line {rows.line_num}", row, required, optional)
    except csv.Error as error:
        raise RecordError(f"line {rows.line_num}: {error}") from error


def _places(
    where: str, header: list[str], required: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, int]:
    names = [name.strip() for name in header]
    for column in required:
        if column not in names:
            raise RecordError(f"{where}: column {column} is missing")
    return {c: names.index(c) for c in (*required, *optional) if c in names}
