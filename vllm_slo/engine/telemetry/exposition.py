# SPDX-License-Identifier: Apache-2.0
"""How a scheduler's series come to vLLM's ``/metrics``.

The scheduler lives in the engine's process, ``/metrics`` in the API server's. Each scheduler keeps
its series in a registry of its own. `SeriesFile` writes them, in Prometheus's text format, to a
file in a folder that both processes know; `FolderCollector` in the API server reads the files when
it is scraped. With several API servers vLLM turns on Prometheus's multiprocess mode, which shares
the values itself.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

__all__ = [
    "FOLDER_VARIABLE",
    "FolderCollector",
    "SeriesFile",
    "choose_folder",
    "remove_folder",
]

FOLDER_VARIABLE: Final = "VLLMSLO_METRICS_DIR"
"""Environment variable that names the folder; child processes inherit it. (vLLM warns of variables
beginning with "VLLM_" that it does not know.)"""

SETTLE_S: Final = 0.2
"""How long `SeriesFile.write_soon` waits for further changes."""


class SeriesFile:
    """The file of one scheduler; there is none where `FOLDER_VARIABLE` is not set."""

    def __init__(self, registry: CollectorRegistry, engine: int) -> None:
        self._registry = registry
        folder = os.environ.get(FOLDER_VARIABLE)
        name = f"engine-{engine}-{os.getpid()}.prom"
        self._path = Path(folder) / name if folder else None
        self._writing = threading.Lock()
        self._write_is_due = False
        self._folder_was_made = False

    def write_soon(self) -> None:
        """Write the file a little later, in a thread of its own.

        For the last request of all: no step may follow whose end would write, and its client is
        not to wait for the disk.
        """
        if self._path is None or self._write_is_due:
            return
        self._write_is_due = True
        timer = threading.Timer(SETTLE_S, self._write_now)
        timer.daemon = True
        timer.start()

    def _write_now(self) -> None:
        self._write_is_due = False  # first, so that what changes from here on is written again
        self.write()

    def write(self) -> None:
        """Write the file, atomically.

        A full disk costs metrics, not service, and only until it has room again.
        """
        with self._writing:
            if self._path is None:
                return
            try:
                if not self._folder_was_made:  # its owner removes it when the server ends
                    self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._folder_was_made = True
                draft = self._path.with_suffix(".tmp")
                draft.write_bytes(generate_latest(self._registry))
                draft.replace(self._path)
            except OSError:
                if not self._path.parent.is_dir():
                    self._path = None


def choose_folder() -> Path:
    """Name a private folder for this process and its children; nothing is created yet."""
    folder = Path(tempfile.gettempdir()) / f"vllm-slo-{uuid.uuid4().hex}"
    os.environ[FOLDER_VARIABLE] = str(folder)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove the folder and what the schedulers wrote."""
    shutil.rmtree(folder, ignore_errors=True)


class FolderCollector(Collector):
    """Gives a scrape the series that the schedulers have written.

    A file that cannot be read is left out, since vLLM's own series stand on the same page.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for path in sorted(self._folder.glob("*.prom")):
            for family in _families(path):
                first = merged.setdefault(family.name, family)
                if first is not family:
                    first.samples.extend(family.samples)
        return merged.values()


def _families(path: Path) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(path.read_text(encoding="utf-8")))
    except Exception:  # noqa: BLE001 (vLLM's own series stand on the same page)
        return []
