# SPDX-License-Identifier: Apache-2.0
"""Other load on the machine during a run, and its effect on the results."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import psutil

NOTABLE: Final = 0.08
"""Share of the machine taken by others above which there is a warning; the system itself takes a
few percent."""
SLOWER: Final = 1.15
"""Ratio of two lone step times above which there is a warning; on a quiet machine they differ by
5%."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Shares of all cores' time in one run.

    Attributes:
        others: taken by processes other than client and server.
        stolen: taken by other guests of the same host.
        step_ratio: time of a lone step right before the run over its time when the objectives were
            set.
    """

    others: float
    stolen: float
    step_ratio: float = 1.0

    @property
    def taken(self) -> float:
        """The share that was not available to client and server."""
        return self.others + self.stolen

    def warnings(self) -> list[str]:
        """Warnings with the effect on the results; none on a quiet machine."""
        warnings = []
        if self.taken > NOTABLE:
            warnings.append(
                f"other processes took {self.others:.0%} of the cores during this run and the "
                f"host {self.stolen:.0%}: fewer objectives were kept, and everything took longer, "
                "than on a quiet machine"
            )
        if not 1 / SLOWER < self.step_ratio < SLOWER:
            slower = self.step_ratio > 1
            warnings.append(
                f"a lone step took {self.step_ratio:.2f} times as long as when the objectives were "
                f"set: they were {'harder' if slower else 'easier'} to keep"
            )
        return warnings

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class DisturbanceWatch:
    """Measures from its construction on; the client is this process, the server its child."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._own_s = self._own()
        self._busy_s, self._stolen_s = _machine()

    def result(self, step_ratio: float = 1.0) -> Disturbance:
        busy_s, stolen_s = _machine()
        own_s = sum(
            max(0.0, now_s - self._own_s.get(pid, 0.0)) for pid, now_s in self._own().items()
        )
        whole_s = max(time.monotonic() - self._begun_s, 1e-9) * (psutil.cpu_count() or 1)
        others_s = max(0.0, busy_s - self._busy_s - own_s)
        return Disturbance(others_s / whole_s, (stolen_s - self._stolen_s) / whole_s, step_ratio)

    @staticmethod
    def _own() -> dict[int, float]:
        """CPU seconds by process: of this one and its children; ended children count at parents."""
        me = psutil.Process()
        seconds = {}
        for process in (me, *me.children(recursive=True)):
            try:
                seconds[process.pid] = sum(process.cpu_times()[:4])
            except psutil.Error:  # the process has just ended
                continue
        return seconds


def unlike(first: Disturbance, second: Disturbance) -> bool:
    """Whether the machine was too different in two runs to compare them."""
    return abs(first.taken - second.taken) > NOTABLE


def _machine() -> tuple[float, float]:
    """Seconds in which cores were busy, and in which the host kept them, since boot."""
    times = psutil.cpu_times()
    busy_s = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    return busy_s, getattr(times, "steal", 0.0)
