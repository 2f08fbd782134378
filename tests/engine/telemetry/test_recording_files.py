# SPDX-License-Identifier: Apache-2.0
"""The rotated files of a recording: their bounds, their names, and what is refused."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from vllm_slo.engine.telemetry import recording_files
from vllm_slo.engine.telemetry.recording_files import RecordingFiles, named
from vllm_slo.errors import ConfigError
from vllm_slo.traces.files import read
from vllm_slo.traces.own_format import header_line, request_line
from vllm_slo.traces.request import TraceRequest

HEADER = header_line(datetime(2026, 12, 1, tzinfo=UTC), 64, "tiny").encode()


def line(number: int) -> bytes:
    return request_line(TraceRequest(1.0, 100, 1000 + number), 0.0).encode()


ROOM = len(HEADER) + 3 * len(line(1)) + 1
"""Bytes for three lines."""


def opened(path: Path, max_bytes: int = ROOM, files: int = 3) -> RecordingFiles:
    return RecordingFiles(path, HEADER, max_bytes, files)


def lengths(path: Path) -> list[int]:
    """The output lengths in a file, as its reader sees them."""
    return [request.output_tokens - 1000 for request in read(path)]


def everything(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_bytes_and_files_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    files = opened(path)
    for number in range(1, 15):
        files.write(line(number))
    assert everything(tmp_path) == ["r.jsonl", "r.jsonl.1", "r.jsonl.2", "r.jsonl.lock"]
    assert lengths(tmp_path / "r.jsonl.2") == [7, 8, 9]
    assert lengths(tmp_path / "r.jsonl.1") == [10, 11, 12]
    assert lengths(path) == [13, 14]
    assert max(p.stat().st_size for p in tmp_path.iterdir()) <= ROOM
    for name in ("r.jsonl", "r.jsonl.1", "r.jsonl.2"):
        assert (tmp_path / name).read_bytes().startswith(HEADER)


def test_a_single_file_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    files = opened(path, files=1)
    for number in range(1, 5):
        files.write(line(number))
    assert everything(tmp_path) == ["r.jsonl", "r.jsonl.lock"]
    assert lengths(path) == [4]


def test_a_line_longer_than_a_file_gets_one_of_its_own(tmp_path: Path) -> None:
    files = opened(tmp_path / "r.jsonl", max_bytes=len(HEADER) + 10)
    for number in (1, 2):
        files.write(line(number))
    assert [lengths(tmp_path / name) for name in ("r.jsonl", "r.jsonl.1")] == [[2], [1]]


def test_the_file_of_an_earlier_run_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = opened(path)
    first.write(line(1))
    first.close()
    second = opened(path)
    second.write(line(2))
    assert [lengths(tmp_path / name) for name in ("r.jsonl", "r.jsonl.1")] == [[2], [1]]


@pytest.mark.parametrize("content", [b"", HEADER])
def test_a_file_without_a_request_pushes_out_no_other(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    for _ in range(3):
        opened(path).close()
    opened(path).write(line(1))
    assert lengths(path) == [1]
    assert everything(tmp_path) == ["r.jsonl", "r.jsonl.lock"]


def test_a_file_that_was_moved_away_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    files = opened(path)
    files.write(line(1))
    path.rename(tmp_path / "mine.jsonl")
    files.write(line(2))
    assert [lengths(tmp_path / "mine.jsonl"), lengths(path)] == [[1], [2]]
    assert not (tmp_path / "r.jsonl.1").exists()


def test_two_engines_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = opened(path)
    with pytest.raises(ConfigError, match=r"^recording.path .*another engine records into it; "):
        opened(path)
    first.close()
    opened(path).close()


def test_each_replica_has_the_first_free_name(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    replicas = [RecordingFiles.of_replica(path, HEADER, ROOM, 3) for _ in range(3)]
    assert [files.path.name for files in replicas] == [f"r.replica-{n}.jsonl" for n in range(3)]
    replicas[1].write(line(1))
    replicas[1].close()
    again = RecordingFiles.of_replica(path, HEADER, ROOM, 3)
    assert again.path.name == "r.replica-1.jsonl"
    assert lengths(tmp_path / "r.replica-1.jsonl.1") == [1]


def test_a_replica_is_told_what_is_wrong_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "r.replica-0.jsonl").write_text("my notes\n")
    with pytest.raises(ConfigError, match="it is no recording"):
        RecordingFiles.of_replica(tmp_path / "r.jsonl", HEADER, ROOM, 3)


def test_the_mark_stands_before_the_suffix() -> None:
    assert named(Path("a/r.jsonl"), "rank-1") == Path("a/r.rank-1.jsonl")
    assert named(Path("a/r"), "rank-1") == Path("a/r.rank-1")


def test_what_is_no_recording_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("remember the milk\n")
    with pytest.raises(ConfigError) as refused:
        opened(path)
    assert str(refused.value) == (
        f"recording.path {str(path)!r}: it is no recording; move it away, or name another file"
    )
    assert path.read_text() == "remember the milk\n"
    assert everything(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("fails", ["half", "all"])
def test_on_a_full_disk_there_is_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "r.jsonl"
    files = opened(path, max_bytes=10**6)
    files.write(line(1))
    write = os.write

    def full(file: int, data: bytes) -> int:
        if fails == "all":
            raise OSError(28, "No space left on device")
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr(recording_files.os, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        files.write(line(2))
    assert lengths(path) == [1]
    monkeypatch.undo()
    files.write(line(3))
    assert lengths(path) == [1, 3]


def test_a_part_of_a_line_that_stays_is_the_last_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"
    files = opened(path)
    files.write(line(1))
    write = os.write

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(recording_files.os, "write", lambda f, data: write(f, data[:20]))
    monkeypatch.setattr(recording_files.os, "ftruncate", refuse)
    with pytest.raises(OSError, match="No space"):
        files.write(line(2))
    monkeypatch.undo()
    files.write(line(3))
    assert [lengths(path), lengths(tmp_path / "r.jsonl.1")] == [[3], [1]]


def test_a_file_whose_header_cannot_be_written_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"
    files = opened(path, max_bytes=len(HEADER) + len(line(1)))
    files.write(line(1))
    write = os.write
    monkeypatch.setattr(recording_files.os, "write", lambda f, data: write(f, data[:20]))
    for number in (2, 3):
        with pytest.raises(OSError, match="No space"):
            files.write(line(number))
    assert everything(tmp_path) == ["r.jsonl.1", "r.jsonl.lock"]
    monkeypatch.undo()
    files.write(line(4))
    assert [lengths(path), lengths(tmp_path / "r.jsonl.1")] == [[4], [1]]
