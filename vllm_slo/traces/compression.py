# SPDX-License-Identifier: Apache-2.0
"""Text files that may be compressed with gzip or zstd."""

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


def _plain(raw: IO[bytes]) -> IO[bytes]:
    head = cast("io.BufferedReader", raw).peek(len(_ZSTD))
    if head.startswith(_GZIP):
        return io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=raw)), _BUFFER)
    if head.startswith(_ZSTD):
        return io.BufferedReader(cast("io.RawIOBase", zstd.ZstdFile(raw)), _BUFFER)
    return raw
