# SPDX-License-Identifier: Apache-2.0
"""How hard promises press on best effort, and on drafting: what they lacked of late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vllm_slo.core.types import INFINITY, BestEffortView

NEARLY_FREE: Final = 1.5
"""Steps of one token. So long may prompts of best effort make a step after a refusal while no
promise is live. The value is a choice: such a step mostly reads the weights, which it does anyway.
A larger one computes these prompts sooner, and an arrival waits longer for the step to end."""


class Pressure:
    """What promises lacked of late: time, or KV blocks.

    Prompts of best effort stand back while promises press. If an arrival comes in the midst of such
    a prompt's step, it loses time that its deadline may not have. If the KV of such a prompt is
    dropped for a promise, the prompt is computed again. So under overload this is the work that is
    left undone first. Answers that have begun go on.

    Args:
        hold_s: seconds for which a refusal for want of time counts. Half of the blocks that
            promises were short of are forgotten in this time.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._refused_s = self._late_s = -INFINITY
        self._blocks = 0.0
        self._noted_s = 0.0

    def refused(self, now_s: float, *, ttft: bool) -> None:
        """Note that a request could not be promised for want of time, and whether it has a TTFT."""
        self._refused_s = now_s
        if ttft:
            self._late_s = now_s

    def first_tokens_late(self, now_s: float) -> bool:
        """Whether some TTFT could not be promised of late."""
        return now_s - self._late_s < self._hold_s

    def short_of(self, blocks: float, now_s: float) -> None:
        """Note that promises were short of so many KV blocks, or took them from best effort."""
        self._blocks = self.blocks(now_s) + blocks
        self._noted_s = now_s

    def prompt_step_s(self, now_s: float, shortest_s: float, *, promises: bool) -> float:
        """Seconds of the longest step that prompts of best effort may cause.

        After a refusal it is 0 beside live ``promises``, and `NEARLY_FREE` times ``shortest_s`` (a
        step of one token) without any. Otherwise it is infinite.
        """
        if now_s - self._refused_s >= self._hold_s:
            return INFINITY
        return 0.0 if promises else NEARLY_FREE * shortest_s

    def blocks(self, now_s: float) -> float:
        """KV blocks that best effort is to leave free when it starts a request."""
        return float(self._blocks * 0.5 ** (max(now_s - self._noted_s, 0.0) / self._hold_s))

    def fits_in_memory(
        self,
        ranked: Sequence[BestEffortView],
        free_blocks: int,
        now_s: float,
        *,
        ageing_s: float,
        promises: bool,
    ) -> list[BestEffortView]:
        """The requests of best effort for which there is memory, in the order given.

        Live ``promises`` leave some of the ``free_blocks``. Only the first request that has waited
        longer than ``ageing_s`` may have them all. Tokens planned for a request that cannot start
        would be taken from those that hold the memory it waits for.
        """
        spare = free_blocks - (self.blocks(now_s) if promises else 0.0)
        aged = next((r for r in ranked if now_s - r.waiting_since_s > ageing_s), None)
        return [
            request
            for request in ranked
            if not request.needed_blocks
            or request.needed_blocks <= (free_blocks if request is aged else spare)
        ]
