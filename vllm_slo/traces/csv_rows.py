# SPDX-License-Identifier: Apache-2.0
"""Rows of CSV tables: the header, then cells, each with its line."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from vllm_slo.traces.errors import RecordError


class CSVRows:
    """A table whose header has been read; iterating gives lists of cells, without blank lines.

    Raises `RecordError` for a broken line.

    Attributes:
        rows: the rows that are left, blank ones among them, for a reader in a hurry.
    """

    def __init__(self, text: Iterable[str], delimiter: str = ",") -> None:
        self.rows = csv.reader(text, delimiter=delimiter)
        header = next(iter(self), [])
        self.header = [cell.strip() for cell in header]

    def __iter__(self) -> Iterator[list[str]]:
        with self.errors():
            for row in self.rows:
                if not is_blank(row):
                    yield row

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Where ``rows`` is iterated: a broken line is a `RecordError`."""
        try:
            yield
        except csv.Error as error:
            raise RecordError(f"{self.where}: {error}") from error

    @property
    def where(self) -> str:
        """The place of the row that was read last."""
        return f"line {self.rows.line_num}"

    def places(self, columns: Sequence[str]) -> list[int]:
        """Where the columns stand.

        Raises:
            RecordError: one is missing.
        """
        for column in columns:
            if column not in self.header:
                raise RecordError(f"{self.where}: column {column} is missing")
        return [self.header.index(column) for column in columns]


def is_blank(row: Sequence[str]) -> bool:
    """Whether no cell holds anything."""
    return not any(map(str.strip, row))


def cell(row: Sequence[str], place: int | None) -> str:
    """A cell without spaces around it; empty where the row is too short or the column missing."""
    return row[place].strip() if place is not None and place < len(row) else ""
