# SPDX-License-Identifier: Apache-2.0
"""engine/speculation/verifying_time.py: which steps it learns from."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm_slo.core.clock import VirtualClock
from vllm_slo.core.step_time.estimator import StepTimeEstimator
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.speculation.verifying_time import VerifyingTime

pytestmark = pytest.mark.versions

FLAT = StepTimeModel(((0.0, 0.0, 0.040), (0.001, 0.0, 0.020)), max_tokens=8192)
"""A step takes 40 ms; beyond twenty tokens each further one costs a millisecond."""
DECODE = BatchShape(tokens=1)


def alternate(verifying: VerifyingTime, clock: StepClock) -> None:
    """Decode for 16 steps; those with trees take 20 ms more."""
    for has_trees in [False, True] * 8:
        verifying.scheduled(DECODE, has_trees=has_trees)
        clock.verified_s = (0.060 if has_trees else 0.040) - verifying.step_s
        verifying.done(decoded_only=True)


def test_a_step_whose_schedule_was_lost_teaches_nothing() -> None:
    """A fault may lose the schedule of any step, also of the first."""
    clock = StepClock(VirtualClock(), StepTimeEstimator(FLAT), 0.9, 10)
    verifying = VerifyingTime(clock)
    clock.verified_s = 0.9
    verifying.done(decoded_only=True)
    alternate(verifying, clock)
    known_s = verifying.seconds(1, 0)
    assert known_s == pytest.approx(0.020)
    verifying.scheduled(BatchShape(tokens=500), has_trees=False)
    verifying.done(decoded_only=False)  # prompts
    for turn in range(40):
        verifying.done(decoded_only=True)  # of a step of 9 s
        verifying.scheduled(DECODE, has_trees=turn % 2 == 0)
        clock.verified_s = (0.040 if turn % 2 else 0.060) - verifying.step_s
        verifying.done(decoded_only=True)
        clock.verified_s = 9.0
    assert verifying.seconds(1, 0) == pytest.approx(known_s)
