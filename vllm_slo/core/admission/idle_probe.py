# SPDX-License-Identifier: Apache-2.0
"""How an idle engine finds out how fast it is now: it promises one request.

An engine learns nothing from requests that it refuses. If it was slow once and has promised nothing
since, it would never know that it is fast again. So after some time without a step it promises one
request, if the fastest steps there have been would keep its objectives. The next probe comes after
twice that time. The first promise by the present model ends this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vllm_slo.core.admission.program import Capacity, plan_admission
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand

LONGEST_IDLE_S: Final = 3600.0
"""Seconds between two probes at the most, however many failed. The value is a choice: one broken
promise an hour is the price of noticing that the engine is fast again."""
SLOW: Final = ("prefill", "decode")
"""Reasons for a refusal that faster steps could remove."""


class IdleProbe:
    """How long an engine idles before it probes.

    Args:
        after_s: seconds before the first probe.
    """

    def __init__(self, after_s: float) -> None:
        self._first_s = self._after_s = after_s

    def is_due(self, idle_s: float) -> bool:
        """Whether an engine that made no step for ``idle_s`` seconds is to probe."""
        return idle_s >= self._after_s

    def probed(self) -> None:
        """Note that a request was promised as a probe."""
        self._after_s = min(2.0 * self._after_s, LONGEST_IDLE_S)

    def promised(self) -> None:
        """Note that a request was promised by the present model."""
        self._after_s = self._first_s


def whom_to_probe(
    refused: Sequence[Demand], hoped: StepTimeModel, capacity: Capacity, now_s: float
) -> str | None:
    """The request to probe with; None: not even steps by ``hoped`` keep the objectives of any.

    Args:
        refused: requests that were refused for `SLOW` reasons; nothing else is promised.
        hoped: the fastest steps there have been.
        capacity: the whole engine's.
        now_s: when the next step can begin.
    """
    admitted = plan_admission(now_s, refused, (), {}, hoped, capacity).admitted
    return admitted[-1] if admitted else None
