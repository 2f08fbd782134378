# SPDX-License-Identifier: Apache-2.0
"""Of the requests that the scheduler refuses, how many some schedule could have served; and whether
what it promises can be kept at all."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from depth import examples
from refused_cases import Case, Verdict, play, random_case

pytestmark = pytest.mark.slow

MOST_FALSE = 0.82
"""Share of the refusals that may be false: some 80% are, and a little more. A scheduler that is
more careful fails the test; for one that refuses less the bound is to be lowered."""

MOST_BROKEN = 0.02
"""Share of the promises that may be missed: 1.4% are, in windows of one token that leave no time
for the steps that decodes share."""

MOST_UNSAFE = 0.002
"""Share of the cases in which no schedule keeps all promises: 1 of 1,000 where two deadlines are
closer together than the shortest step takes (benchmarks/results/false_refusals.md)."""


def test_false_refusals_are_bounded_and_promises_are_safe(config_folder: Path) -> None:
    rng = random.Random(1)
    found: Counter[str] = Counter()
    unsafe: list[tuple[Case, Verdict]] = []
    for _ in range(examples(240)):
        case = random_case(rng)
        try:
            verdict = play(case, config_folder)
        except TimeoutError:
            continue
        found["cases"] += 1
        if verdict.unsafe:
            unsafe.append((case, verdict))
        found["refused"] += len(verdict.reasons)
        found["false"] += len(verdict.false)
        found["promised"] += len(verdict.promised) + len(verdict.later)
        found["broken"] += len(verdict.broken)
    assert found["promised"] > 200 and found["refused"] > 300
    assert found["false"] / found["refused"] < MOST_FALSE, found
    assert len(unsafe) <= MOST_UNSAFE * found["cases"], unsafe
    assert found["broken"] < MOST_BROKEN * found["promised"], found
