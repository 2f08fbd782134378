# SPDX-License-Identifier: Apache-2.0
"""When an engine that runs nothing finds out how fast it is now, by promising one request.

From whom it turns away an engine learns nothing. If it was slow once and promises nothing since, it
would never know that it is fast again. So after a while without a step one request may find out, if
steps as fast as they have been would do; the next one after twice that while, until a promise is
made by what is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vllm_slo.core.admission.program import Capacity, plan_admission
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand

LONGEST_IDLE_S: Final = 3600.0
"""However often it was in vain, an engine that was idle for so long may have become fast again."""
SLOW: Final = ("prefill", "decode")
"""Reasons for a refusal that faster steps could take away."""


class IdleProbe:
    """How long an engine idles before it probes.

    Args:
        after_s: seconds, the first time.
    """

    def __init__(self, after_s: float) -> None:
        self._first_s = self._after_s = after_s

    def is_due(self, idle_s: float) -> bool:
        """Whether no step for so long is long enough."""
        return idle_s >= self._after_s

    def probed(self) -> None:
        """A request finds out."""
        self._after_s = min(2.0 * self._after_s, LONGEST_IDLE_S)

    def promised(self) -> None:
        """Something was promised by what is known."""
        self._after_s = self._first_s


def whom_to_probe(
    refused: Sequence[Demand], hoped: StepTimeModel, capacity: Capacity, now_s: float
) -> str | None:
    """The request to find out with; None: not even steps by ``hoped`` would do for any.

    Args:
        refused: those who asked, for `SLOW` reasons in vain; nothing else is promised.
        hoped: the fastest steps there have been.
        capacity: the whole engine's.
        now_s: when the next step can begin.
    """
    found = plan_admission(now_s, refused, (), {}, hoped, capacity).admitted
    return found[-1] if found else None
