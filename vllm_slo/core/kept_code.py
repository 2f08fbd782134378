# SPDX-License-Identifier: Apache-2.0
"""Where compiled code is kept between processes: in the first folder that can be written of

1. the one that ``NUMBA_CACHE_DIR`` names, where it is set;
2. beside the package;
3. ``vllm-slo/compiled`` in ``XDG_CACHE_HOME``, or in ``~/.cache``.

Each function is compiled for one signature (`core.jit`). So all that processes may write at the
same time to the same file is the same code, and numba replaces files as a whole.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

BESIDE = Path(__file__).parent / "__pycache__" / "compiled"
"""Beside the package. An image is built by somebody who can write here, and run by somebody else,
who takes the code from here (`adopt_shipped`)."""


@cache
def folder() -> Path | None:
    """The folder to keep code in; None: none can be written. Asked once in a process."""
    return next(filter(_writable, candidates()), None)


def candidates() -> list[Path]:
    """The folders that come into question, the best one first."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    found = [Path(named).absolute()] if named else []
    found.append(BESIDE)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    if Path(home).is_absolute():  # "~" is left as it is where nobody knows the home
        found.append(Path(home) / "vllm-slo" / "compiled")
    return found


def _writable(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        return False
    return True


@contextmanager
def numba_keeps_in(path: Path) -> Iterator[None]:
    """Have numba keep what is decorated meanwhile in this folder, and nothing else."""
    from numba.core import config

    before, config.CACHE_DIR = config.CACHE_DIR, str(path)
    try:
        yield
    finally:
        config.CACHE_DIR = before


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time, where the file system can lock files."""
    with (path / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield
            return
        yield  # closing the file unlocks it


def adopt_shipped(path: Path) -> None:
    """Copy the code that lies beside the package to this folder, where it is missing there.

    numba uses no folder that it cannot write.
    """
    if path == BESIDE or not BESIDE.is_dir():
        return
    for source in sorted(BESIDE.rglob("*.nb?")):
        target = path / source.relative_to(BESIDE)
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as new:
                new.write(source.read_bytes())
            shutil.move(new.name, target)
