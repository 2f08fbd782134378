# SPDX-License-Identifier: Apache-2.0
"""Writes the lines of a recording in a thread, so that no step waits for hashes or for the disk."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from vllm.logger import init_logger

from vllm_slo.engine.telemetry.faults import FaultLog
from vllm_slo.engine.telemetry.recording_files import RecordingFiles

__all__ = ["RecordingWriter", "WriterSeries"]

logger = init_logger(__name__)

INTERVAL_S: Final = 0.1
"""Seconds between two looks at what is to be written. vLLM kills its engines when a server ends,
unless it is started with ``--shutdown-timeout``: so much is lost then."""
MOST_PENDING: Final = 1 << 24
"""Weight of what may wait to be written, in prompt tokens: 128 MiB of token ids. It is reached only
if the disk hangs."""
LINE_WEIGHT: Final = 256
"""Weight of a line beside that of its prompt."""
CLOSE_S: Final = 5.0
"""Seconds that the end of the engine waits for the disk."""


class WriterSeries(Protocol):
    """Counts lines, in two threads."""

    def recorded(self) -> None:
        """A line is to be written."""

    def dropped(self) -> None:
        """It was lost."""


class RecordingWriter:
    """Writes lines in the order in which they are given.

    Faults lose lines, which are counted, and end nothing: they are logged once.
    """

    def __init__(self, files: RecordingFiles, series: WriterSeries) -> None:
        self._files = files
        self._series = series
        self._lines: deque[tuple[Callable[[], bytes], int]] = deque()
        self._given = 0  # weights; each number has one thread that changes it
        self._taken = 0
        self._warned = False
        self._faults = FaultLog("The request is left out of the recording.")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-slo-recording", daemon=True)
        self._thread.start()

    def put(self, make: Callable[[], bytes], prompt_tokens: int) -> None:
        """Have a line written soon; never waits.

        Args:
            make: makes the line, in the thread.
            prompt_tokens: how many it keeps in memory until then.
        """
        self._series.recorded()
        weight = prompt_tokens + LINE_WEIGHT
        if self._given - self._taken + weight > MOST_PENDING or self._closing.is_set():
            self._series.dropped()
            return
        self._given += weight
        self._lines.append((make, weight))

    def close(self) -> None:
        """Write what is left, and end.

        The garbage collector may call this in the writer's own thread, which then ends by itself.
        """
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            self._write_all()
        self._write_all()
        self._files.close()

    def _write_all(self) -> None:
        while self._lines:
            began_s = time.perf_counter()
            make, weight = self._lines.popleft()
            self._write(make)
            self._taken += weight
            # The interpreter runs one thread at a time: leave as much time to steps as this took.
            self._closing.wait(time.perf_counter() - began_s)

    def _write(self, make: Callable[[], bytes]) -> None:
        try:
            self._files.write(make())
        except Exception as error:  # noqa: BLE001 - the thread goes on with the next line
            self._series.dropped()
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not isinstance(error, OSError):
            self._faults.note(error)
        elif not self._warned:
            self._warned = True
            logger.warning(
                "vllm-slo: the recording %s cannot be written: %s. Serving goes on; "
                "vllm_slo:recording_dropped_total counts the requests that are left out.",
                *(self._files.path, error.strerror or error),
            )
