# SPDX-License-Identifier: Apache-2.0
"""How long a step without promises may take, so that what arrives in its midst can be promised."""

from __future__ import annotations

from vllm_slo.core.batching.recent_objectives import RecentObjectives
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduling.step_clock import StepClock


class ResponsiveSteps:
    """The longest step that best effort may cause; see `RecentObjectives`."""

    def __init__(self, clock: StepClock, recent: RecentObjectives) -> None:
        self._clock = clock
        self._recent = recent

    def longest_s(self, model: StepTimeModel, tpots: float = 2.0) -> float:
        """Seconds of that step by a model that keeps the margin of promises; ``tpots`` times the
        tightest TPOT are allowed whatever TTFTs are."""
        shortest_s = self._clock.expected_model.predict_s(1)
        step_s = self._recent.responsive_step_s(self._clock.now_s, shortest_s, tpots)
        return step_s * model.predict_s(1) / shortest_s
