# SPDX-License-Identifier: Apache-2.0
"""Whether first tokens come too late of late: then nothing is drafted that no objective needs."""

from __future__ import annotations

from vllm_slo.core.types import INFINITY


class Pressure:
    """Remembers when a TTFT could not be promised for want of time.

    Args:
        hold_s: seconds for which such a refusal counts.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._late_s = -INFINITY

    def refused(self, now_s: float) -> None:
        """Note that a TTFT could not be promised."""
        self._late_s = now_s

    def first_tokens_late(self, now_s: float) -> bool:
        """Whether some TTFT could not be promised of late."""
        return now_s - self._late_s < self._hold_s
