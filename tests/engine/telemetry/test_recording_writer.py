# SPDX-License-Identifier: Apache-2.0
"""The thread that writes a recording: nothing waits for it, and its faults end nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import patience

pytest.importorskip("vllm")

from vllm_slo.engine.telemetry import recording_writer
from vllm_slo.engine.telemetry.recording_files import RecordingFiles
from vllm_slo.engine.telemetry.recording_writer import RecordingWriter

HEADER = b'{"schema":"vllm-slo-trace/1"}\n'


class Counts:
    """Counts lines."""

    def __init__(self) -> None:
        self.given = 0
        self.lost = 0

    def recorded(self) -> None:
        self.given += 1

    def dropped(self) -> None:
        self.lost += 1


class Writing:
    """A writer, its file and what it counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = RecordingFiles(path, HEADER, 10**6, 3)
        self.counts = Counts()
        self.writer = RecordingWriter(self.files, self.counts)

    def put(self, text: str, prompt_tokens: int = 0) -> None:
        self.writer.put(f"{text}\n".encode, prompt_tokens)

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()[1:]


@pytest.fixture
def writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writing]:
    monkeypatch.setattr(recording_writer, "INTERVAL_S", 0.01)
    made = Writing(tmp_path / "r.jsonl")
    yield made
    made.writer.close()


def eventually(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + patience(20)
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_lines_are_written_soon_and_in_order(writing: Writing) -> None:
    for number in range(100):
        writing.put(str(number))
    eventually(lambda: len(writing.lines()) == 100)
    assert writing.lines() == [str(number) for number in range(100)]
    assert (writing.counts.given, writing.counts.lost) == (100, 0)


def test_what_is_left_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_writer, "INTERVAL_S", 3600.0)
    writing = Writing(tmp_path / "r.jsonl")
    writing.put("last")
    assert writing.lines() == []
    writing.writer.close()
    assert writing.lines() == ["last"]
    writing.put("too late")
    assert (writing.counts.given, writing.counts.lost) == (2, 1)
    again = RecordingFiles(writing.path, HEADER, 10**6, 3)  # its lock was given back
    again.close()


def test_the_garbage_collector_may_end_it_in_its_own_thread(writing: Writing) -> None:
    def end_and_write() -> bytes:
        writing.writer.close()
        return b"ended\n"

    writing.writer.put(end_and_write, 0)
    eventually(lambda: writing.lines() == ["ended"])
    assert (writing.counts.given, writing.counts.lost) == (1, 0)


def test_a_disk_that_hangs_holds_up_nobody(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_writer, "MOST_PENDING", 10 * 1000)
    goes_on, hangs = threading.Event(), threading.Event()
    write = writing.files.write

    def hang(line: bytes) -> None:
        hangs.set()
        goes_on.wait(patience(60))
        write(line)

    monkeypatch.setattr(writing.files, "write", hang)
    writing.put("first")
    assert hangs.wait(patience(20))
    for number in range(20):
        writing.put(str(number), 1000 - recording_writer.LINE_WEIGHT)
    assert writing.counts.lost == 11  # 9 of 1000 fit beside the first one
    goes_on.set()
    eventually(lambda: writing.lines() == ["first", *map(str, range(9))])
    writing.put("again", 1000)
    eventually(lambda: writing.lines()[-1] == "again")
    assert writing.counts.lost == 11


def test_a_full_disk_is_told_once_and_counted(
    writing: Writing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(line: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk, caplog.at_level(logging.WARNING, "vllm_slo"):
        disk.setattr(writing.files, "write", full)
        for number in range(3):
            writing.put(str(number))
        eventually(lambda: writing.counts.lost == 3)
    (warning,) = [r for r in caplog.records if "cannot be written" in r.getMessage()]
    assert warning.levelname == "WARNING"
    assert f"{writing.path} cannot be written: No space left on device." in warning.getMessage()
    writing.put("room again")
    eventually(lambda: writing.lines() == ["room again"])
    assert (writing.counts.given, writing.counts.lost) == (4, 3)


def test_a_line_that_cannot_be_made_costs_only_itself(
    writing: Writing, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bytes:
        raise KeyError("tenant")

    with caplog.at_level(logging.ERROR, "vllm_slo"):
        writing.writer.put(broken, 0)
        writing.writer.put(broken, 0)
        writing.put("next")
        eventually(lambda: writing.lines() == ["next"])
    assert writing.counts.lost == 2
    (fault,) = [r for r in caplog.records if "KeyError" in r.getMessage()]
    assert "The request is left out of the recording." in fault.getMessage()


def test_the_thread_leaves_half_of_the_time_to_steps(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    wait = writing.writer._closing.wait

    def note(seconds: float | None = None) -> bool:
        pauses.append(seconds or 0.0)
        return wait(seconds)

    monkeypatch.setattr(writing.writer._closing, "wait", note)

    def slow() -> bytes:
        time.sleep(0.05)
        return b"slow\n"

    writing.writer.put(slow, 0)
    eventually(lambda: writing.lines() == ["slow"])
    eventually(lambda: any(pause >= 0.05 for pause in pauses))
