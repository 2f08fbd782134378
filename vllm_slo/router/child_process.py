# SPDX-License-Identifier: Apache-2.0
"""A process that is a `Child`: JSON lines on stdin and stdout, signals, its event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final

logger = logging.getLogger("vllm_slo.front")

MAX_LINE_BYTES: Final = 16 * 1024 * 1024


def report_line(message: Mapping[str, Any]) -> None:
    """Write one line to stdout; the line is dropped if the parent does not read."""
    with suppress(OSError):
        os.write(1, json.dumps(message).encode() + b"\n")


def heed_signals(stop: asyncio.Event) -> None:
    """Set ``stop`` at SIGTERM and SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def read_stdin(take: Callable[[Mapping[str, Any]], None], stop: asyncio.Event) -> None:
    """Pass the object in every line of stdin to ``take``, in the running loop; set ``stop`` at the
    end. A line that cannot be read, or that ``take`` does not take, is logged and left out."""
    loop = asyncio.get_running_loop()

    def taken(line: bytes) -> None:
        try:
            take(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            logger.error("a line on stdin cannot be read: %s", type(error).__name__)

    def read() -> None:
        held = b""
        with suppress(OSError):
            while chunk := os.read(0, 65_536):
                *lines, held = (held + chunk).split(b"\n")
                if len(held) > MAX_LINE_BYTES:
                    break
                for line in lines:
                    loop.call_soon_threadsafe(taken, line)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=read, daemon=True).start()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop if it is installed. Stdout does not block."""
    with suppress(OSError):
        os.set_blocking(1, False)
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)
