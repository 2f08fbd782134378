# SPDX-License-Identifier: Apache-2.0
"""A step-time model and random batches."""

from __future__ import annotations

import random

from vllm_slo.core.step_time.model import BatchShape, StepTimeModel

TRUE = StepTimeModel(((0.0002, 0.0, 0.037), (0.0005, 0.0, 0.012)), 3e-6, pair_s=2e-8)


def shapes(seed: int = 0, n: int = 200) -> list[BatchShape]:
    rng = random.Random(seed)
    made = []
    for _ in range(n):
        if rng.random() < 0.5:
            decodes = rng.randint(1, 64)
            made.append(BatchShape.of([(1, rng.randint(0, 4000)) for _ in range(decodes)]))
        else:
            made.append(BatchShape.of([(rng.randint(2, 1024), rng.randint(0, 6000))]))
    return made
