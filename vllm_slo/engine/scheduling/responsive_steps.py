# SPDX-License-Identifier: Apache-2.0
"""How long a step without promises may take, so that what arrives in its midst can be promised."""

from __future__ import annotations

from vllm_slo.core.batching.recent_objectives import RecentObjectives
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling.step_clock import StepClock


class ResponsiveSteps:
    """The longest step that best effort and drafts may cause; see `RecentObjectives`.

    Args:
        recent: the objectives that requests had of late; they are noted here.
        max_step_tokens: tokens of vLLM's longest step.
    """

    def __init__(
        self,
        state: SchedulerState,
        clock: StepClock,
        recent: RecentObjectives,
        max_step_tokens: int,
    ) -> None:
        self._state = state
        self._clock = clock
        self._recent = recent
        self._max_step_tokens = max_step_tokens

    def note(self, ttft_s: float, tpot_s: float) -> None:
        """A request with these objectives arrived (seconds; infinite: none)."""
        self._recent.add(ttft_s, tpot_s, self._clock.clock.monotonic_s())

    @property
    def are_needed(self) -> bool:
        """Whether vLLM alone might make a step of prompts that is too long for the next request
        with an objective. Steps that only decode are short."""
        model = self._clock.promise_model
        return (self._state.any_waits or self._state.any_prefills) and (
            self.longest_s(model) < model.predict_s(self._max_step_tokens)
        )

    def longest_s(self, model: StepTimeModel) -> float:
        """Seconds of that step by ``model``, which keeps the margin of promises."""
        shortest_s = self._clock.expected_model.predict_s(1)
        step_s = self._recent.responsive_step_s(self._clock.now_s, shortest_s)
        return step_s * model.predict_s(1) / shortest_s
