# SPDX-License-Identifier: Apache-2.0
"""What the dynamic program costs: one run over 16 new requests beside 256 running in 3 tiers.

Sizes are drawn so that some, but not all, of the new requests can be admitted; the table also shows
lighter and heavier loads.
"""

from __future__ import annotations

import random
import statistics
import time

from common import markdown, write_result

from vllm_slo.core.admission.program import Capacity, plan_admission
from vllm_slo.core.jit import compile_package
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand

MODEL = StepTimeModel(
    ((0.0, 0.0, 0.015), (1e-4, 0.0, 0.008)), kv_s=1e-8, pair_s=1e-9, max_tokens=8192
)
TIERS = (0.03, 0.05, 0.1)
RUNS = 3000


def instance(rng: random.Random, new: int, load: float, values: bool) -> tuple[list[Demand], ...]:
    """(new requests, promised prefills) of one problem."""

    def one(name: str, low: float, high: float, tokens: int) -> Demand:
        return Demand(
            name,
            rng.uniform(low, high),
            rng.randint(50, tokens),
            rng.choice(TIERS),
            rng.randint(10, 100),
            rng.choice((0.5, 1.0, 2.0, 5.0)) if values else 1.0,
            rng.randint(100, 2000),
        )

    fresh = [one(f"n{i}", 0.2, 3.0, int(1000 * load)) for i in range(new)]
    return fresh, [one(f"c{i}", 0.1, 1.0, 400) for i in range(6)]


def measure(new: int, load: float, values: bool) -> tuple[float, float, float]:
    """(median ms, p99 ms, mean admitted) over ``RUNS`` problems."""
    rng = random.Random(17)
    times, admitted = [], 0
    for _ in range(RUNS):
        fresh, committed = instance(rng, new, load, values)
        begun = time.perf_counter()
        plan = plan_admission(
            0.0,
            fresh,
            committed,
            {0.03: 80, 0.05: 80, 0.1: 90},
            MODEL,
            Capacity(600.0, 200, 8192),
            decoding_context=250 * 500,
        )
        times.append((time.perf_counter() - begun) * 1e3)
        admitted += len(plan.admitted)
    times.sort()
    return statistics.median(times), times[int(0.99 * RUNS)], admitted / RUNS


def main() -> None:
    """Measure and write the table."""
    compile_package("vllm_slo.core.admission")
    rows = []
    for new, load, values in (
        (16, 0.5, False),
        (16, 1.0, False),
        (16, 1.0, True),
        (16, 3.0, False),
        (63, 0.5, True),
    ):
        median, p99, admitted = measure(new, load, values)
        reach = "<= 1 / <= 5" if new == 16 else ""
        kinds = "four" if values else "equal"
        rows.append(
            [new, f"{load:g}x", kinds, f"{admitted:.1f}", f"{median:.2f}", f"{p99:.2f}", reach]
        )
    write_result(
        "admission_latency",
        __doc__ or "",
        markdown(
            ["new", "prompt length", "values", "admitted", "median ms", "p99 ms", "reach"], rows
        ),
    )


if __name__ == "__main__":
    main()
