# SPDX-License-Identifier: Apache-2.0
"""Runs on a machine that others use, and whose speed changes by a quarter within minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, TypeAlias

from adaserve_engine import Disturbance

Run: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the disturbance of a run.

    Attributes:
        others: share of the machine's time that other processes take.
        drift: by how much the machine is faster or slower than usual.
        wait_s: how long to wait for both, before each run; 0: not at all.
        retries: of a run that suffered more; the best counts.
    """

    others: float
    drift: float
    wait_s: float
    retries: int


class Machine:
    """Waits until this machine is quiet and as fast as usual.

    Attributes:
        usual_s: seconds of a probe that others are compared with; 0: unknown.
    """

    PROBES: Final = 30
    ROWS: Final = 16
    SHAPE: Final = (73_728, 2_048)
    """Weights that no cache holds, as a decoding step reads them: 300 MB in bfloat16."""

    def __init__(self, limits: Limits, say: Callable[[str], None]) -> None:
        import torch

        self.limits = limits
        self.usual_s = 0.0
        self._say = say
        self._weights = torch.ones(self.SHAPE, dtype=torch.bfloat16)
        self._rows = torch.ones(self.ROWS, self.SHAPE[1], dtype=torch.bfloat16)

    def probe_s(self) -> float:
        """Median seconds of a fixed matrix product now."""
        from torch.nn.functional import linear

        times = []
        for _ in range(self.PROBES):
            begun_s = time.perf_counter()
            linear(self._rows, self._weights)
            times.append(time.perf_counter() - begun_s)
        return median(times)

    def slower(self) -> float:
        """Seconds of a probe now over the usual ones."""
        return self.probe_s() / self.usual_s if self.usual_s else 1.0

    def suffers(self, others: float, slower: float) -> bool:
        """Whether a run was disturbed more than allowed."""
        return others > self.limits.others or abs(slower - 1.0) > self.limits.drift

    def wait(self) -> float:
        """Until the machine is quiet and as fast as usual, but not for ever; how many times as long
        as usual it takes."""
        until_s = time.monotonic() + self.limits.wait_s
        while True:
            found = Disturbance()
            if self.limits.wait_s:
                time.sleep(2.0)
            others, slower = found.share(), self.slower()
            if not self.suffers(others, slower):
                return slower
            if time.monotonic() >= until_s:
                if self.limits.wait_s:
                    self._say(f"  not quiet: others {others:.0%}, {slower:.2f}x as long as usual")
                return slower

    def undisturbed(self, run: Callable[[], Run]) -> Run:
        """Run once the machine is itself, and again where it was not meanwhile.

        Args:
            run: returns a mapping that has "others", a share; "slower" is added to it.
        """
        best: Run | None = None
        for _ in range(1 + self.limits.retries):
            before = self.wait()
            found = run()
            slower = max(before, self.slower(), key=lambda ratio: abs(ratio - 1.0))
            found["slower"] = slower
            if best is None or _badness(found) < _badness(best):
                best = found
            if not self.suffers(best["others"], best["slower"]):
                break
            self._say(f"  others took {found['others']:.0%}; {slower:.2f}x as long as usual")
        assert best is not None
        return best


def _badness(run: Run) -> float:
    return float(max(run["others"], abs(run["slower"] - 1.0)))
