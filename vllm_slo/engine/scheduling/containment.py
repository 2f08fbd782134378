# SPDX-License-Identifier: Apache-2.0
"""Keeps an exception of a policy from ending the engine, and all streams with it.

The scheduler calls our code in blocks ``with containment.planning:``. An exception ends its block
and no more: it is logged and counted, and the code behind the block does without what failed. So a
fault costs one step its plan, and vLLM schedules that step alone. If planning fails many steps in a
row, it stands aside for a while: nothing is planned and promised, and vLLM goes on alone.

Exceptions of vLLM's own methods are not caught: no block has a call of ``super()`` in it.
"""

from __future__ import annotations

import contextlib
from typing import Final

from vllm.logger import init_logger

from vllm_slo.core.clock import Clock
from vllm_slo.engine.telemetry.faults import Context, FaultLog, part_of
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics

__all__ = ["MOST_FAILED_STEPS", "Containment"]

logger = init_logger(__name__)

MOST_FAILED_STEPS: Final = 16
"""Steps in a row whose planning may fail before it stands aside: less than a second of decoding,
and more than the steps for which one request that nobody can plan usually lives."""
FIRST_ASIDE_S: Final = 60.0
"""Seconds for which planning stands aside at first. The time doubles while planning still fails
afterwards, since each new try makes promises that are soon withdrawn."""
LONGEST_ASIDE_S: Final = 3_600.0


class Containment:
    """What holds the faults of one scheduler's policies.

    Args:
        contains: whether faults are held. If not, they are raised: a test, or a simulation, that
            did not see them would measure vLLM's decisions and take them for ours.

    Attributes:
        planning: the context of calls without which no step can be planned.
        single: the context of calls whose failure costs one request, one report or one series.
        failures: how many faults there were.
        stands_aside: whether planning stands aside now.
    """

    def __init__(self, clock: Clock, metrics: SchedulerMetrics, *, contains: bool) -> None:
        self._clock = clock
        self._metrics = metrics
        self.contains = contains
        self.planning = _Contained(self, of_step=True)
        self.single = _Contained(self, of_step=False)
        self.failures = 0
        self.stands_aside = False
        self._failed = False
        self._in_row = 0
        self._aside_s = FIRST_ASIDE_S
        self._until_s = 0.0
        self._log = FaultLog(
            "vLLM serves all requests, without what failed; "
            "vllm_slo:planning_failures_total counts such faults."
        )

    def begin_step(self) -> bool:
        """A step is to be scheduled. Whether it is to be planned: planning does not stand aside."""
        with self.single:
            self._begin_step()
        return not self.stands_aside

    def _begin_step(self) -> None:
        self._in_row = self._in_row + 1 if self._failed else 0
        self._failed = False
        if self.stands_aside:
            if self._clock.monotonic_s() >= self._until_s:
                self._resume()
        elif self._in_row >= MOST_FAILED_STEPS:
            self._stand_aside()
        elif not self._in_row:
            self._aside_s = FIRST_ASIDE_S

    @property
    def retry_after_s(self) -> float:
        """Seconds until planning is tried again; 0 while it goes on."""
        if not self.stands_aside:
            return 0.0
        with self.single:
            return max(self._until_s - self._clock.monotonic_s(), 0.0)
        return self._aside_s

    def note(self, error: Exception, *, of_step: bool) -> None:
        """A fault was held: count it, and log it if it is new.

        ``of_step``: whether it cost a step its plan.
        """
        self._failed |= of_step
        with contextlib.suppress(Exception):
            self.count(part_of(error))
        with contextlib.suppress(Exception):
            self._log.note(error)

    def count(self, part: str) -> None:
        """Count a fault of a part: one that was held here, or that a worker reports."""
        self.failures += 1
        with contextlib.suppress(Exception):  # metrics and the log may be what fails
            self._metrics.planning_failed(part)

    def _stand_aside(self) -> None:
        self._until_s = self._clock.monotonic_s() + self._aside_s
        self.stands_aside = True
        logger.error(
            "vllm-slo: planning failed in %d steps in a row and stands aside for %.0f s: vLLM "
            "schedules alone, and nothing is promised.",
            *(self._in_row, self._aside_s),
        )
        self._aside_s = min(2.0 * self._aside_s, LONGEST_ASIDE_S)
        self._show()

    def _resume(self) -> None:
        self.stands_aside = False
        # One more failure is enough to stand aside again; a step that succeeds starts anew.
        self._in_row = MOST_FAILED_STEPS - 1
        logger.warning("vllm-slo: planning is tried again.")
        self._show()

    def _show(self) -> None:
        with contextlib.suppress(Exception):
            self._metrics.stands_aside(self.stands_aside)


class _Contained(Context):
    __slots__ = ("_containment", "_of_step")

    def __init__(self, containment: Containment, *, of_step: bool) -> None:
        self._containment = containment
        self._of_step = of_step

    def holds(self, error: Exception) -> bool:
        if not self._containment.contains:
            return False
        self._containment.note(error, of_step=self._of_step)
        return True
