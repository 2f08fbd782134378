# SPDX-License-Identifier: Apache-2.0
"""Ends a process group after the process that started it has ended for any reason.

``python -I -S guard.py watch LIFELINE PATIENCE_S``: LIFELINE is the read end of a pipe whose only
write end the owner holds. The first line names the group. Another line ends the guard; end of file
without it means that the owner died.

``python -I -S guard.py start LIFELINE COMMAND...``: LIFELINE is the write end of that pipe. This
process becomes COMMAND once the guard knows it, so no moment exists in which the owner could die
and leave it behind. It must lead its process group.

The script needs only the standard library, because one runs beside every child.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

POLL_S = 0.05


def end_group(group: int, patience_s: float) -> None:
    """Send SIGTERM to the group, and SIGKILL to what is left of it after ``patience_s``."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(POLL_S)
        os.killpg(group, signal.SIGKILL)


def watch(lifeline: int, patience_s: float) -> None:
    """Wait for the owner's end in a process of its own; the owner goes on at once.

    The guard is not a direct child of the owner, because Ray kills the children of a worker that
    exits and the guard has to outlive it.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    with open(lifeline, "rb", buffering=0) as owner:
        group = owner.readline()
        if group and not owner.readline():
            end_group(int(group), patience_s)


def start(lifeline: int, command: Sequence[str]) -> NoReturn:
    """Become the command, which gets no end of the pipe."""
    os.write(lifeline, f"{os.getpid()}\n".encode())
    os.set_inheritable(lifeline, False)
    os.execvp(command[0], [*command])


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(int(sys.argv[2]), sys.argv[3:])
    watch(int(sys.argv[2]), float(sys.argv[3]))
