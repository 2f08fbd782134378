# SPDX-License-Identifier: Apache-2.0
"""How long steps take on the live engine, and when the next one can begin.

What is measured as a step's time: from its ``schedule()`` call, or from the end of the step before
it if that was still running then (async scheduling overlaps the two), until its output arrives.
Time in which the engine had nothing to do is not counted.
"""

from __future__ import annotations

from collections import deque
from statistics import NormalDist
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_slo.core.clock import Clock
from vllm_slo.core.speculation.draft_pass_time import with_draft_steps
from vllm_slo.core.step_time.estimator import OnlineCorrection, StepTimeEstimator
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel

MODEL_REFRESH_STEPS = 8
"""The corrected step-time models are rebuilt this often; their correction moves slowly."""
TYPICAL_TOKENS = 64
"""Models are compared by a step of so many."""
MEAN_STEPS = 32
"""`StepClock.mean_s` is an exponential mean with this many steps as its time constant."""
MOST_STRENGTHENED = 0.1
"""Of a TPOT: objectives are strengthened by no more. The value is a choice: where steps overrun by
more, a promise may break, and a larger margin would leave capacity unused for it."""


class _Step(NamedTuple):
    """One scheduled step: (its output, when it was scheduled, shape, predicted seconds)."""

    output: SchedulerOutput
    begun_s: float
    shape: BatchShape
    predicted_s: float


class StepClock:
    """Follows steps from ``schedule()`` to their output, and learns from them.

    Args:
        estimator: the step times known so far; it is taught here.
        quantile: of their error that promises keep as margin.
        window: tokens over which a TPOT is judged.

    Attributes:
        clock: time, to be read where the moment matters; `now_s` is the time of a whole step.
        now_s: when the step that is being planned, or processed, was begun.
        ticks: counts readings of the clock and steps: while it stands, nothing was computed.
        expected_model: typical step times, drafting included.
        promise_model: step times to promise by, drafting included.
        verifying_model, plain_promise_model: the same without drafting.
        verified_s: what the last step took, drafting left out.
        mean_s: mean of the last steps (`MEAN_STEPS`), drafting included; 0 before the first.
        fastest_model: the shortest of the plain promise models that came of enough steps, or None.
        jitter: share of its time by which a single step may overrun the expected one.
        spread: standard deviation of step times, as a share of the expected ones.
        strength: share of a TPOT to work towards, at most 1 (see `request_views.decode_view`).
        first_strength: the same in the first window of an answer.
    """

    def __init__(
        self, clock: Clock, estimator: StepTimeEstimator, quantile: float, window: int
    ) -> None:
        self.clock = clock
        self.now_s = clock.monotonic_s()
        self.ticks = 0
        self.estimator = estimator
        self.verified_s = 0.0
        self.mean_s = 0.0
        self.fastest_model: StepTimeModel | None = None
        self._quantile = quantile
        self._deviations = NormalDist().inv_cdf(quantile)
        self._window = window
        self._flight: deque[_Step] = deque()
        self._busy_until_s = self.now_s
        self._last_done_s = self.now_s
        self._learnt = 0
        self._drafting = 0.0, 0.0, 0
        self._doubted = False
        self._refresh()

    def tick(self) -> float:
        """Read the clock: from here on `now_s` is this moment."""
        self.now_s = self.clock.monotonic_s()
        self.ticks += 1
        return self.now_s

    @property
    def start_s(self) -> float:
        """When a step begins that is scheduled now: at once, or when those in flight are done."""
        return self.next_start_s(self.now_s)

    @property
    def margin(self) -> float:
        """Promised over expected step time."""
        return self.estimator.correction.margin(self._quantile)

    def next_start_s(self, now_s: float) -> float:
        """`start_s` of a step that is scheduled at ``now_s``."""
        return max(now_s, self._busy_until_s) if self._flight else now_s

    def idle_s(self, now_s: float) -> float:
        """Seconds since the last step; 0 while one is in flight."""
        return 0.0 if self._flight else now_s - self._last_done_s

    def doubt(self) -> None:
        """What was learnt may be long out of date: the next step begins it anew."""
        self._doubted = True

    def drafting(self, fixed_s: float, token_s: float, passes: int = 0) -> None:
        """From now on each step drafts for so many seconds, and so many per token besides; in so
        many passes, whose price in the model comes on top."""
        if (fixed_s, token_s, passes) != self._drafting:
            self._drafting = fixed_s, token_s, passes
            self._add_drafting()

    def scheduled(self, output: SchedulerOutput, shape: BatchShape, begun_s: float) -> None:
        """Remember a step until its output comes; empty ones are not measured."""
        self.ticks += 1
        if shape.tokens:
            predicted_s = self.expected_model.predict_shape_s(shape)
            self._flight.append(_Step(output, begun_s, shape, predicted_s))
            self._busy_until_s = max(self._busy_until_s, begun_s) + predicted_s

    def done(
        self, output: SchedulerOutput, now_s: float, drafting_s: float = 0.0
    ) -> tuple[float, float] | None:
        """Learn from a step in flight, ``drafting_s`` of which went into drafting; returns
        (predicted, actual) seconds."""
        if not output.num_scheduled_tokens:
            return None
        while self._flight and self._flight[0].output is not output:
            self._flight.popleft()  # it failed: steps end in order, and that one never did
        if not self._flight:
            return None
        step = self._flight.popleft()
        actual_s = now_s - max(step.begun_s, self._last_done_s)
        self._last_done_s = now_s
        self._busy_until_s = now_s + sum(s.predicted_s for s in self._flight)
        self.verified_s = actual_s - drafting_s
        self.mean_s += (actual_s - self.mean_s) / (MEAN_STEPS if self._learnt else 1)
        if not output.scheduled_encoder_inputs:
            self._learn(step.shape)
        return step.predicted_s, actual_s

    def _learn(self, shape: BatchShape) -> None:
        """Learn from a step that took `verified_s`. The time of one that encoded images is not that
        of its tokens, and teaches nothing."""
        if self._doubted:
            self.estimator.begin_anew()
        self.estimator.observe(shape, self.verified_s)
        self._learnt += 1
        if self._doubted or self._learnt % MODEL_REFRESH_STEPS == 0:
            self._refresh()
        self._doubted = False

    def _refresh(self) -> None:
        self.plain_promise_model = self.estimator.promise(self._quantile)
        self.verifying_model = self.estimator.expected()
        self._add_drafting()
        if len(self.estimator.correction) >= OnlineCorrection.ENOUGH:
            known, now = self.fastest_model, self.plain_promise_model
            if known is None or now.predict_s(TYPICAL_TOKENS) < known.predict_s(TYPICAL_TOKENS):
                self.fastest_model = now
        self.jitter = self.estimator.correction.jitter(self._quantile)
        self.spread = (self.margin - 1.0) / self._deviations
        self.strength = 1.0 - min(self.jitter / self._window, MOST_STRENGTHENED)
        # An answer that ends in its first window is judged by the few steps that it had.
        self.first_strength = 1.0 - min(self.jitter, MOST_STRENGTHENED)

    def _add_drafting(self) -> None:
        self.promise_model = self.plain_promise_model
        self.expected_model = self.verifying_model
        if any(self._drafting):
            self.promise_model = self._besides(self.plain_promise_model, max(self.margin, 1.0))
            self.expected_model = self._besides(self.verifying_model, 1.0)

    def _besides(self, model: StepTimeModel, margin: float) -> StepTimeModel:
        fixed_s, token_s, passes = self._drafting
        drafting = with_draft_steps(model, passes) if passes else model
        return drafting.besides(margin * fixed_s, margin * token_s)
