# SPDX-License-Identifier: Apache-2.0
"""The time that verifying trees adds to steps of this engine, left out of what the step-time model
learns of them."""

from __future__ import annotations

from vllm_slo.core.speculation.verifying_share import VerifyingShare
from vllm_slo.core.step_time.model import BatchShape
from vllm_slo.engine.scheduling.step_clock import StepClock


class VerifyingTime:
    """Follows steps for `VerifyingShare`.

    Attributes:
        step_s: seconds that verifying trees is expected to add to the step that was scheduled last.
    """

    def __init__(self, clock: StepClock) -> None:
        self.step_s = 0.0
        self._clock = clock
        self._share = VerifyingShare()
        self._expected_s: float | None = None  # of the step under way; None: not known
        self._has_trees = False

    def seconds(self, requests: int, context: int) -> float:
        """Expected of a step.

        Args:
            requests: that decode in it, with trees or without; at least 1.
            context: KV tokens that they read.
        """
        return self._share.share() * self._clock.verifying_model.predict_s(requests, context)

    def scheduled(self, shape: BatchShape, *, has_trees: bool) -> None:
        """A step begins."""
        self._expected_s = self._clock.verifying_model.predict_shape_s(shape)
        self._has_trees = has_trees
        self.step_s = self.seconds(shape.requests, shape.context_tokens) if has_trees else 0.0

    def done(self, *, decoded_only: bool) -> None:
        """The step has ended. If it was not `scheduled`, nothing is learnt from it.

        Args:
            decoded_only: whether it computed tokens, and no prompts.
        """
        expected_s, self._expected_s = self._expected_s, None
        if decoded_only and expected_s is not None:
            took_s = self._clock.verified_s + self.step_s
            self._share.observe(took_s / expected_s, has_trees=self._has_trees)
