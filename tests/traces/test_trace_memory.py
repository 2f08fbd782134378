# SPDX-License-Identifier: Apache-2.0
"""Long traces are streamed: memory does not grow with their length."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from vllm_slo.traces.files import read
from vllm_slo.traces.own_format import header_line, request_line
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.selection import Selection, selected

ROWS = 60_000
MOST_BYTES = 5 << 20
"""Some buffers; the rows themselves would take more than 10 MB."""


def azure() -> Iterator[str]:
    yield "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    for i in range(ROWS):
        minute, second = divmod(i // 100, 60)
        yield f"2024-05-10 00:{minute:02}:{second:02}.{i % 100:02}0000+00:00,{i % 9000},{i % 999}\n"


def plain() -> Iterator[str]:
    yield "time,prompt_tokens,output_tokens,tenant\n"
    for i in range(ROWS // 2):
        yield f"{i / 100},{i % 9000},{i % 999},tenant-{i % 7}\n"


def mooncake() -> Iterator[str]:
    for i in range(ROWS // 2):
        yield f'{{"timestamp": {i}, "input_length": 900, "output_length": 9, "hash_ids": [{i}]}}\n'


def ours() -> Iterator[str]:
    yield header_line(datetime(2026, 11, 30, tzinfo=UTC), 64, "tiny")
    for i in range(ROWS // 2):
        yield request_line(TraceRequest(float(i), 900, 9, "chat", f"tenant-{i % 7}"), 0.0)


@pytest.mark.parametrize("lines", [azure, plain, mooncake, ours])
def test_reading_takes_the_same_memory_for_any_length(tmp_path: Path, lines: object) -> None:
    path = tmp_path / "trace"
    with path.open("w") as file:
        file.writelines(lines())  # type: ignore[operator]
    count = 0
    tracemalloc.start()
    try:
        for _ in selected(read(path), Selection(from_s=10.0, thin=0.5)):
            count += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count > ROWS // 8
    assert peak < MOST_BYTES
