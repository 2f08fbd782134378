# SPDX-License-Identifier: Apache-2.0
"""Ends a process group after the process that started it has ended for any reason.

``python -I -S guard.py LIFELINE GROUP PATIENCE_S``: LIFELINE is the read end of a pipe whose only
write end the owner holds. A byte ends the guard; end of file means that the owner died. The script
needs only the standard library, because one runs beside every child.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

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


def main(lifeline: int, group: int, patience_s: float) -> None:
    """Wait for the owner's end in a process of its own; the owner goes on at once.

    The guard is not a direct child of the owner, because Ray kills the children of a worker that
    exits and the guard has to outlive it.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.read(lifeline, 1) == b"":
        end_group(group, patience_s)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
