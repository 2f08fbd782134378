# SPDX-License-Identifier: Apache-2.0
"""The rotated files of a recording: ``FILE`` is written, ``FILE.1`` was before it, and so on.

At any time a file holds the header and whole lines after it. Only the end of the machine can leave
a part of a line, as the last one. ``FILE.lock`` keeps a second engine away.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from vllm_slo.config.recording import check_path, refused
from vllm_slo.errors import ConfigError
from vllm_slo.traces.own_format import SCHEMA

__all__ = ["RecordingFiles", "named"]

MOST_REPLICAS: Final = 10_000
"""As many as a front has at most."""
_CLOSED: Final = -1
_HEAD_BYTES: Final = 256
"""Bytes of a file that are enough to see whether it is a recording."""


class _TakenError(ConfigError):
    """Another engine records into this file."""


def named(path: Path, mark: str) -> Path:
    """The name of one engine's file: ``requests.jsonl`` and ``rank-1`` give
    ``requests.rank-1.jsonl``."""
    return path.with_name(f"{path.stem}.{mark}{path.suffix}")


class RecordingFiles:
    """The files of one engine. One thread writes.

    Args:
        path: the file that is written. One from an earlier run is renamed first.
        header: the first line of every file.
        max_bytes: size of a file; a single line that is longer gets a file of its own.
        files: how many there may be.

    Raises:
        ConfigError: the file cannot be written, is something else than a recording, or another
            engine writes it now.
    """

    def __init__(self, path: Path, header: bytes, max_bytes: int, files: int) -> None:
        self.path = path
        self._header = header
        self._max_bytes = max_bytes
        self._files = files
        self._file = _CLOSED
        self._size = 0
        check_path(path)
        try:
            _check_content(path)
            self._lock = _lock(path)
            try:
                self._next()
            except OSError:
                os.close(self._lock)
                raise
        except OSError as error:
            raise refused(path, f"{error.strerror or error}; name another file") from error

    @classmethod
    def of_replica(cls, path: Path, header: bytes, max_bytes: int, files: int) -> RecordingFiles:
        """The files of one of several replicas: the first name with ``.replica-K`` into which no
        engine records. So a replica that takes the place of another one goes on with its files.

        Raises:
            ConfigError: as the class.
        """
        for number in range(MOST_REPLICAS):
            with suppress(_TakenError):
                return cls(named(path, f"replica-{number}"), header, max_bytes, files)
        raise refused(path, f"{MOST_REPLICAS} engines record into it; name another file")

    def write(self, line: bytes) -> None:
        """Append a line, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        fits = self._size + len(line) <= self._max_bytes or self._size == len(self._header)
        if self._file == _CLOSED or not fits or not self._is_in_place():
            self._next()
        self._append(line)

    def close(self) -> None:
        """Leave the files to others."""
        self._leave()
        os.close(self._lock)

    def _next(self) -> None:
        """Begin a new file. The others get the next number, and the oldest goes. One without a
        request is not kept: else a server that starts again and again would push out all others."""
        self._leave()
        with suppress(FileNotFoundError):
            if _holds_requests(self.path):
                self._shift()
            else:
                self.path.unlink()
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self._size = 0
        try:
            self._append(self._header)
        except OSError:
            self._leave()
            self.path.unlink()  # without a header it would be no recording
            raise

    def _shift(self) -> None:
        names = [self.path, *(Path(f"{self.path}.{n}") for n in range(1, self._files))]
        names[-1].unlink(missing_ok=True)
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            with suppress(FileNotFoundError):
                newer.rename(older)

    def _append(self, line: bytes) -> None:
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._shorten()
            raise
        self._size += len(line)

    def _shorten(self) -> None:
        """Take back a part of a line."""
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            self._leave()  # the next line is not to follow that part

    def _leave(self) -> None:
        if self._file != _CLOSED:
            os.close(self._file)
            self._file = _CLOSED

    def _is_in_place(self) -> bool:
        """Whether the file still has its name: somebody may have moved it away."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._file))
        except FileNotFoundError:
            return False


def _holds_requests(path: Path) -> bool:
    """Whether there is anything behind the header of a file."""
    with path.open("rb") as file:
        file.readline()
        return bool(file.read(1))


def _check_content(path: Path) -> None:
    """Refuse a file that holds something else.

    Raises:
        ConfigError: it does.
        OSError: it cannot be read.
    """
    with suppress(FileNotFoundError), path.open("rb") as old:
        head = old.readline(_HEAD_BYTES)
        if head and SCHEMA.encode() not in head:
            raise refused(path, "it is no recording; move it away, or name another file")


def _lock(path: Path) -> int:
    """The open file whose lock says that this engine writes ``path``.

    Raises:
        OSError: the file cannot be made.
        _TakenError: another engine has the lock.
    """
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        reason = "another engine records into it; name another file"
        raise _TakenError(str(refused(path, reason))) from None
    except OSError:
        pass  # a file system without locks: nobody can be kept away
    return lock
