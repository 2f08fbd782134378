# SPDX-License-Identifier: Apache-2.0
"""Reads files of recorded requests, request by request, in the formats that people have.

The format is found by the beginning of a file, not by its name. A file may be compressed with gzip
or zstd. A folder stands for all recordings of ours in it, such as those that a server rotates.

For a mistake in a file, a `TraceError` names the file, its likely format, line and field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TextIO

from vllm_slo.traces import (
    bench_reports,
    json_traces,
    named_table,
    own_format,
    request_log,
    spans,
    tables,
)
from vllm_slo.traces.compression import opened
from vllm_slo.traces.errors import RecordError, TraceError
from vllm_slo.traces.request import TraceRequest

Format = Literal[
    "vllm-slo",
    "azure",
    "burstgpt",
    "csv",
    "mooncake",
    "bailian",
    "adaserve",
    "vllm-bench",
    "guidellm",
    "spans",
    "vllm-log",
]

_HEAD: Final = 16_384
"""Characters of a file that are enough to find its format."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """How to read a format.

    Attributes:
        name: as people call it.
        fields: what tells it.
        requests: of a text, in its order.
        in_time_order: whether the first request is the earliest one.
    """

    name: str
    fields: tuple[str, ...]
    requests: Callable[[TextIO], Iterator[TraceRequest]]
    in_time_order: bool = True


_FORMATS: Final[Mapping[Format, _Reader]] = {
    "vllm-slo": _Reader("vllm-slo's recording", ("schema",), own_format.requests, False),
    "azure": _Reader("Azure CSV", tables.AZURE_COLUMNS, tables.azure),
    "burstgpt": _Reader("BurstGPT CSV", tables.BURSTGPT_COLUMNS, tables.burstgpt),
    "mooncake": _Reader("Mooncake JSON lines", json_traces.MOONCAKE_FIELDS, json_traces.mooncake),
    "bailian": _Reader("Alibaba's JSON lines", json_traces.BAILIAN_FIELDS, json_traces.bailian),
    "adaserve": _Reader("AdaServe JSON", json_traces.ADASERVE_FIELDS, json_traces.adaserve),
    "vllm-bench": _Reader(
        "a result of vllm bench serve", bench_reports.VLLM_BENCH_FIELDS, bench_reports.vllm_bench
    ),
    "guidellm": _Reader(
        "a report of guidellm", bench_reports.GUIDELLM_FIELDS, bench_reports.guidellm, False
    ),
    "spans": _Reader("OpenTelemetry spans", spans.FIELDS, spans.requests, False),
    "vllm-log": _Reader("vLLM's log", request_log.FIELDS, request_log.requests, False),
    "csv": _Reader("plain CSV", named_table.NEEDED, named_table.requests, False),
}
_KEYS: Final[tuple[tuple[str, Format], ...]] = (
    ("schema", "vllm-slo"),
    ("resourceSpans", "spans"),
    ("guidellm_version", "guidellm"),
    ("benchmarks", "guidellm"),
    ("start_times", "vllm-bench"),
    ("endpoint_type", "vllm-bench"),
    ("parent_chat_id", "bailian"),
    ("asctime", "vllm-log"),
)
"""A key near the beginning of a JSON object -> its format; the first that is there counts."""
_TABLES: Final[tuple[Format, ...]] = ("azure", "burstgpt")
_RECORDING: Final = re.compile(r"^[^.].*\.jsonl(\.\d+)?(\.gz|\.zst)?$", re.ASCII)
"""Names of recordings: as a server rotates them, and as people pack them."""
_KEY: Final = re.compile(r'"(\w+)"\s*:', re.ASCII)


def detect(path: Path) -> Format:
    """The format of a file, by its beginning, or of a folder of recordings.

    Raises:
        TraceError: the file cannot be read, or has none of the formats.
    """
    if path.is_dir():
        return "vllm-slo"
    with opened(path) as text:
        head = text.read(_HEAD).lstrip()
        while head == "" and (more := text.read(_HEAD)):
            head = more.lstrip()
    if not head:
        raise TraceError(f"{path} is empty")
    if head.startswith("["):
        return "adaserve"
    if head.startswith("{"):
        keys = set(_KEY.findall(head))
        return next((form for key, form in _KEYS if key in keys), "mooncake")
    line = head.splitlines()[0].strip()
    form = _table(line) or ("vllm-log" if " Received request " in head else None)
    if form is not None:
        return form
    if line.startswith("version https://git-lfs"):
        raise TraceError(f"{path} is a Git LFS pointer to the trace; run 'git lfs pull'")
    known = ", ".join(reader.name for reader in _FORMATS.values())
    raise TraceError(
        f"{path} line 1: {line[:60]!r} begins no known trace; known: {known} "
        f"(with a header such as {named_table.EXAMPLE})"
    )


def _table(header: str) -> Format | None:
    """The format of a table by its header, maybe one that lacks a column; None: it is no header."""
    cells = {cell.strip() for cell in header.replace('"', "").split(",")}
    named = named_table.columns_of(header)
    missing: dict[Format, set[str]] = {form: set(_FORMATS[form].fields) - cells for form in _TABLES}
    likeliest = min(missing, key=lambda form: len(missing[form]))
    if not missing[likeliest]:
        return likeliest
    if all(meaning in named for meaning in named_table.NEEDED):
        return "csv"
    return likeliest if len(missing[likeliest]) == 1 else "csv" if named else None


def format_name(form: Format) -> str:
    """The usual name of a format."""
    return _FORMATS[form].name


def in_time_order(form: Format) -> bool:
    """Whether the first request of a file is the earliest one."""
    return _FORMATS[form].in_time_order


def read(path: Path, form: Format | None = None) -> Iterator[TraceRequest]:
    """The requests of a file, in its order, one at a time.

    A file that is one JSON value (AdaServe's, reports of load generators) is read at once.

    Args:
        path: a file, or a folder of recordings, which are read by their names.
        form: None: it is detected.

    Raises:
        TraceError: the file cannot be read, or a line of it; earlier lines have been yielded.
    """
    reader = _FORMATS[form or detect(path)]
    for file in _recordings(path) if path.is_dir() else (path,):
        try:
            with opened(file) as text:
                yield from reader.requests(text)
        except RecordError as error:
            raise TraceError(f"{file} looks like {reader.name}; {error}") from None


def _recordings(folder: Path) -> list[Path]:
    """The recordings in a folder, by name."""
    try:
        files = sorted(p for p in folder.iterdir() if p.is_file() and _RECORDING.search(p.name))
    except OSError as error:
        raise TraceError(f"cannot read {folder}: {error.strerror}") from error
    if not files:
        raise TraceError(f"{folder} holds no recording (*.jsonl, *.jsonl.1, *.jsonl.zst)")
    return files
