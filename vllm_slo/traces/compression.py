# SPDX-License-Identifier: Apache-2.0
"""Text files that may be compressed with gzip or zstd: read by content, written by suffix."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, TextIO, cast

from backports import zstd

from vllm_slo.traces.errors import TraceError

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_BUFFER: Final = 1 << 20
"""Bytes that are read at once."""


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """The text of a file, decompressed if its first bytes say so.

    Raises:
        TraceError: it cannot be read, also later while it is read.
    """
    try:
        with path.open("rb", buffering=_BUFFER) as raw:
            yield io.TextIOWrapper(_plain(raw), encoding="utf-8-sig", newline="")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not UTF-8 text: {error.reason}") from error
    except (OSError, EOFError, zlib.error, zstd.ZstdError) as error:
        why = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot read {path}: {why}") from error


@contextmanager
def written(path: Path) -> Iterator[TextIO]:
    """A new text file, compressed if its name ends in ``.gz`` or ``.zst``.

    It has its name once it is complete; a file of that name is replaced then.

    Raises:
        TraceError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with _packed(part, path.suffix) as file, io.TextIOWrapper(file, "utf-8") as text:
            yield text
        part.replace(path)
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _packed(path: Path, suffix: str) -> IO[bytes]:
    if suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "wb"))
    if suffix == ".zst":
        return cast("IO[bytes]", zstd.open(path, "wb"))
    return path.open("wb")


def _plain(raw: IO[bytes]) -> IO[bytes]:
    head = cast("io.BufferedReader", raw).peek(len(_ZSTD))
    if head.startswith(_GZIP):
        return io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=raw)), _BUFFER)
    if head.startswith(_ZSTD):
        return io.BufferedReader(cast("io.RawIOBase", zstd.ZstdFile(raw)), _BUFFER)
    return raw
