# SPDX-License-Identifier: Apache-2.0
"""What verifying trees adds to a step besides their tokens.

Masks, sampling at every node and copies take time, whatever the size of the trees. If every step
had trees, that would look like the time of a step. So it is learnt from steps with trees and
without, and left out of what the step-time model learns.
"""

from __future__ import annotations

from typing import Final

from vllm_slo.core.speculation.draft_pass_time import DraftPassTime
from vllm_slo.core.step_time.model import BatchShape
from vllm_slo.engine.scheduling.step_clock import StepClock

PRIOR: Final = 2.0
"""Steps without trees that "nothing" counts for before any was seen. Few, as plain steps are rare
where drafts pay. A convention, not measured."""


class VerifyingTime:
    """Estimates it as a share of the time of a step without trees, in the times of the profile or
    prior. How far these are off is learnt meanwhile, and is the same with trees and without.

    Attributes:
        step_s: seconds of it in the step that was scheduled last.
    """

    def __init__(self, clock: StepClock) -> None:
        self.step_s = 0.0
        self._clock = clock
        self._base = clock.estimator.base
        self._share = _unknown()
        self._plain_s = self._expected_s = 0.0
        self._has_trees = False

    def seconds(self, requests: int, context: int) -> float:
        """Expected of a step.

        Args:
            requests: that decode in it, with trees or without; at least 1.
            context: KV tokens that they read.
        """
        return self._share.share() * self._base.predict_s(requests, context)

    def scheduled(self, shape: BatchShape, *, has_trees: bool) -> None:
        """A step begins."""
        if self._clock.estimator.base is not self._base:
            self._base = self._clock.estimator.base
            self._share = _unknown()
        self._plain_s = self._base.predict_s(max(shape.requests, 1), shape.context_tokens)
        self._expected_s = self._base.predict_shape_s(shape)
        self._has_trees = has_trees
        self.step_s = self._share.share() * self._plain_s if has_trees else 0.0

    def done(self) -> None:
        """The step has ended, and computed no prompts."""
        beyond_s = self._clock.verified_s + self.step_s - self._expected_s
        self._share.observe(int(self._has_trees), 1.0 + beyond_s / self._plain_s)


def _unknown() -> DraftPassTime:
    """Of trees in place of passes: a step has them, or it does not."""
    return DraftPassTime(first_guess=0.0, prior=PRIOR)
