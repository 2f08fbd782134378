# SPDX-License-Identifier: Apache-2.0
"""Reads files of recorded requests, line by line, in several formats.

The format is found by the content of a file, not by its name. A file may be compressed with gzip
or zstd.

| format | content | times |
| --- | --- | --- |
| ours | JSON lines, see `own_format` | dates |
| Azure CSV | ``TIMESTAMP,ContextTokens,GeneratedTokens`` (2023 and 2024) | dates |
| BurstGPT CSV | ``Timestamp,...,Request tokens,Response tokens,...`` | seconds |
| Mooncake JSON lines | ``{"timestamp", "input_length", "output_length", "hash_ids"}`` | ms |
| AdaServe JSON | a list of ``{"emission_time_ms", "input_length", ..., "slo_ratio"}`` | ms |

For a mistake in a file, a `TraceError` names the file, its likely format, line and field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TextIO

from vllm_slo.traces import json_traces, own_format, tables
from vllm_slo.traces.compression import opened
from vllm_slo.traces.errors import RecordError, TraceError
from vllm_slo.traces.request import TraceRequest

Format = Literal["vllm-slo", "azure", "burstgpt", "mooncake", "adaserve"]

_HEAD: Final = 4096
"""Characters of a file's first line that are enough to find its format."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """How to read a format: its name, the fields that tell it, and its requests."""

    name: str
    fields: tuple[str, ...]
    requests: Callable[[TextIO], Iterator[TraceRequest]]


_FORMATS: Final[Mapping[Format, _Reader]] = {
    "vllm-slo": _Reader("vllm-slo's recording", ("schema",), own_format.requests),
    "azure": _Reader("Azure CSV", tables.AZURE_COLUMNS, tables.azure),
    "burstgpt": _Reader("BurstGPT CSV", tables.BURSTGPT_COLUMNS, tables.burstgpt),
    "mooncake": _Reader("Mooncake JSON lines", json_traces.MOONCAKE_FIELDS, json_traces.mooncake),
    "adaserve": _Reader("AdaServe JSON", json_traces.ADASERVE_FIELDS, json_traces.adaserve),
}
_TABLES: Final[tuple[Format, ...]] = ("azure", "burstgpt")


def detect(path: Path) -> Format:
    """The format of a file, by its first line.

    Raises:
        TraceError: the file cannot be read, or has none of the formats.
    """
    with opened(path) as text:
        head = text.readline(_HEAD)
        while head and not head.strip():
            head = text.readline(_HEAD)
    head = head.strip()
    if not head:
        raise TraceError(f"{path} is empty")
    if head.startswith("["):
        return "adaserve"
    if head.startswith("{"):
        return "vllm-slo" if '"schema"' in head else "mooncake"
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


def read(path: Path, form: Format | None = None) -> Iterator[TraceRequest]:
    """The requests of a file, in its order, one at a time.

    AdaServe's file is one JSON value and is read at once.

    Args:
        form: None: it is detected.

    Raises:
        TraceError: the file cannot be read, or a line of it; earlier lines have been yielded.
    """
    reader = _FORMATS[form or detect(path)]
    try:
        with opened(path) as text:
            yield from reader.requests(text)
    except RecordError as error:
        raise TraceError(f"{path} looks like {reader.name}; {error}") from None
