# SPDX-License-Identifier: Apache-2.0
"""What else a machine did during a run, and what that does to the run's figures."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import psutil

NOTABLE: Final = 0.08
"""Share of the machine that others may take before it is said. The system itself takes some
hundredths."""
SLOWER: Final = 1.15
"""Times a lone step took before it is said: two measurements on a quiet machine differ by 5%."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Shares of all cores' time in one run.

    Attributes:
        others: taken by processes that are neither the client nor the server.
        stolen: taken by other guests of the same host.
        step_ratio: what a lone step took right before the run, over what it took when the
            objectives were set.
    """

    others: float
    stolen: float
    step_ratio: float = 1.0

    @property
    def taken(self) -> float:
        """The share that client and server could not have."""
        return self.others + self.stolen

    def warnings(self) -> list[str]:
        """What is worth saying, and what it does to the figures; nothing on a quiet machine."""
        found = []
        if self.taken > NOTABLE:
            found.append(
                f"other processes took {self.others:.0%} of the cores during this run and the "
                f"host {self.stolen:.0%}: fewer objectives were kept, and everything took longer, "
                "than on a quiet machine"
            )
        if not 1 / SLOWER < self.step_ratio < SLOWER:
            slower = self.step_ratio > 1
            found.append(
                f"a lone step took {self.step_ratio:.2f} times as long as when the objectives were "
                f"set: they were {'harder' if slower else 'easier'} to keep"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


class DisturbanceWatch:
    """Watches from its construction on; the client is this process, the server a child of it."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._own_s = self._own()
        self._busy_s, self._stolen_s = _machine()

    def result(self, step_ratio: float = 1.0) -> Disturbance:
        """What happened until now."""
        busy_s, stolen_s = _machine()
        own_s = sum(
            max(0.0, now_s - self._own_s.get(pid, 0.0)) for pid, now_s in self._own().items()
        )
        whole_s = max(time.monotonic() - self._begun_s, 1e-9) * (psutil.cpu_count() or 1)
        others_s = max(0.0, busy_s - self._busy_s - own_s)
        return Disturbance(others_s / whole_s, (stolen_s - self._stolen_s) / whole_s, step_ratio)

    @staticmethod
    def _own() -> dict[int, float]:
        """Seconds of CPU by process: this one and what it started, the ended ones with their
        parents."""
        me = psutil.Process()
        found = {}
        for process in (me, *me.children(recursive=True)):
            try:
                found[process.pid] = sum(process.cpu_times()[:4])
            except psutil.Error:  # it has just ended
                continue
        return found


def unlike(first: Disturbance, second: Disturbance) -> bool:
    """Whether two runs had too different a machine to be compared."""
    return abs(first.taken - second.taken) > NOTABLE


def _machine() -> tuple[float, float]:
    """Seconds in which cores were busy, and in which the host kept them, since boot."""
    times = psutil.cpu_times()
    busy_s = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    return busy_s, getattr(times, "steal", 0.0)
