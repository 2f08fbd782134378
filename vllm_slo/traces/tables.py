# SPDX-License-Identifier: Apache-2.0
"""CSV tables with known columns: Azure's traces and BurstGPT's."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Final, TextIO

from vllm_slo.traces import fields
from vllm_slo.traces.csv_rows import CSVRows, cell, is_blank
from vllm_slo.traces.errors import FieldError, RecordError
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.times import ORIGIN, at_of

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS: Final = ("Timestamp", "Request tokens", "Response tokens")
_WITH_MICROSECONDS: Final = len("2024-05-10 00:00:00.009930+00:00")


def azure(text: TextIO) -> Iterator[TraceRequest]:
    """Azure's traces of 2023 and 2024; times are dates.

    Rows as the trace of 2024 has them, 27 million, are read without a function call of Python's.
    """
    rows = CSVRows(text)
    when, prompt, output = rows.places(AZURE_COLUMNS)
    parse, origin, most = datetime.fromisoformat, ORIGIN, fields.MOST_TOKENS
    with rows.errors():
        for row in rows.rows:
            try:
                date, prompt_tokens, output_tokens = row[when], int(row[prompt]), int(row[output])
                if not (
                    len(date) == _WITH_MICROSECONDS
                    and 0 <= prompt_tokens <= most
                    and 0 <= output_tokens <= most
                ):
                    raise ValueError
                at_s = (parse(date) - origin).total_seconds()
            except (ValueError, IndexError, TypeError):
                if not is_blank(row):
                    yield _azure(rows, row, when, prompt, output)
                continue
            yield TraceRequest(at_s, prompt_tokens, output_tokens)


def _azure(rows: CSVRows, row: list[str], when: int, prompt: int, output: int) -> TraceRequest:
    """A row with any date, or the error that says what is wrong with it."""
    try:
        return TraceRequest(
            fields.date_s("TIMESTAMP", cell(row, when)),
            fields.tokens("ContextTokens", cell(row, prompt)),
            fields.tokens("GeneratedTokens", cell(row, output)),
        )
    except FieldError as error:
        raise RecordError(f"{rows.where}, {error}") from None


def burstgpt(text: TextIO) -> Iterator[TraceRequest]:
    """BurstGPT's trace, with sessions or without; times are seconds."""
    rows = CSVRows(text)
    when, prompt, output = rows.places(BURSTGPT_COLUMNS)
    model, session = (
        rows.header.index(column) if column in rows.header else None
        for column in ("Model", "Session ID")
    )
    for row in rows:
        try:
            request = TraceRequest(
                at_of(fields.number("Timestamp", cell(row, when))),
                fields.tokens("Request tokens", cell(row, prompt)),
                fields.tokens("Response tokens", cell(row, output)),
                model=cell(row, model) or None,
                session=cell(row, session) or None,
            )
        except FieldError as error:
            raise RecordError(f"{rows.where}, {error}") from None
        yield request
