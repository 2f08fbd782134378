# SPDX-License-Identifier: Apache-2.0
"""Ends an engine's processes with the server that started them, also when it was killed.

vLLM's engine core outlives a server that was killed: it waits for ever for requests that cannot
come. A server may therefore hold the only write end of a named pipe. Every process of its engine
that has the pipe's name in its environment ends when that end is closed.
"""

from __future__ import annotations

import os
import select
import shutil
import threading
from contextlib import suppress
from pathlib import Path

VARIABLE = "VLLMSLO_LIFELINE"
"""Environment variable that names the pipe. Its folder is the server's own, and is removed."""

_held: int | None = None
_watches = False


def hold(folder: Path) -> None:
    """Make the pipe in a private ``folder``; processes started from now on end with this one.

    Raises:
        OSError: it cannot be made.
    """
    global _held
    path = folder / "lifeline"
    os.mkfifo(path, 0o600)
    # Opened for reading too: opening the write end alone waits for a reader.
    _held = os.open(path, os.O_RDWR)
    os.environ[VARIABLE] = str(path)


def watch() -> None:
    """End this process when the server that holds the pipe has ended; nothing without a pipe."""
    global _held, _watches
    if _held is not None:  # a forked process would otherwise keep itself alive
        os.close(_held)
        _held = None
    path = os.environ.get(VARIABLE)
    if path is None or _watches:
        return
    _watches = True
    threading.Thread(target=_await_end, args=(Path(path),), daemon=True).start()


def _await_end(path: Path) -> None:
    with suppress(FileNotFoundError):  # it was removed already
        pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if _has_writer(pipe):  # poll does not report a writer that has left before
            poll = select.poll()
            poll.register(pipe, select.POLLHUP)
            poll.poll()
    clean_up(path.parent)
    os._exit(1)


def _has_writer(pipe: int) -> bool:
    try:
        return bool(os.read(pipe, 1))
    except BlockingIOError:
        return True


def clean_up(folder: Path) -> None:
    """Remove the folders of a server that has ended: of its pipe, and of its metrics."""
    # Not above: prometheus_client settles at its import whether processes share their values.
    from vllm_slo.engine.telemetry.exposition import FOLDER_VARIABLE, remove_folder

    shutil.rmtree(folder, ignore_errors=True)
    if written := os.environ.get(FOLDER_VARIABLE):
        remove_folder(Path(written))
