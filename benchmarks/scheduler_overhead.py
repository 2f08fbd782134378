# SPDX-License-Identifier: Apache-2.0
"""What steering costs: schedule() + update_from_output() per step, ours over stock AsyncScheduler.

Every request carries an SLO with ours and none with stock; both run vLLM's real objects on the
same requests, step by step in alternation in one process. ``decode``: all requests decode.
``mixed``: the same, with a prompt being prefilled in every step and others waiting, so that every
step is planned anew.

The second table: best effort alone, half of it decoding, half waiting for a place, by its order.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common import markdown, write_result

from vllm_slo import SLO, tiny
from vllm_slo.core.step_time import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import AsyncScheduler, EngineShape, VirtualEngine

MODEL = StepTimeModel(((0.0, 0.0, 0.015), (3e-5, 0.0, 0.008)), kv_s=1e-9, max_tokens=8192)
TIERS = (
    SLO(ttft_ms=2000, tpot_ms=30),
    SLO(ttft_ms=4000, tpot_ms=50),
    SLO(ttft_ms=8000, tpot_ms=100),
)
WAITS = SLO(tier="best_effort", expected_output_tokens=3500)
STOCK = "stock"
ORDERS = ("fcfs", "lp_sjf", "las", "laps_sd")
RUNNING = (16, 64, 256)
STEPS = 300
REPEATS = 5


def engine(
    cls: type[AsyncScheduler],
    running: int,
    waiting: int = 0,
    slos: Sequence[SLO] = TIERS,
    **slo_config: Any,
) -> VirtualEngine:
    """An engine on which ``running`` requests decode and as many as said wait."""
    one = VirtualEngine(
        cls,
        tiny.path("target"),
        MODEL.predict_shape_s,
        EngineShape(200_000, 16, running if waiting else running + 64, 8192, 4096),
        believed=MODEL,
        slo_config=slo_config if cls is Scheduler else None,
    )
    one.keep_history = False
    for i in range(running + waiting):
        slo = slos[i % len(slos)] if cls is Scheduler else None
        one.add(f"r{i}", 64, 3500, slo, max_tokens=3500)
    while len(one.scheduler.running) < running:
        one.step()
    for _ in range(30):
        one.step()
    return one


def feed(one: VirtualEngine, cls: type[AsyncScheduler], step: int) -> None:
    """Keep prompts arriving: one of 3,000 tokens every fourth step, its answer one token."""
    if step % 4 == 0:
        slo = SLO(ttft_ms=20_000) if cls is Scheduler else None
        one.add(f"p{step}", 3000, 1, slo)


def timed(engines: Mapping[str, VirtualEngine], mixed: bool = False) -> dict[str, float]:
    """Median milliseconds per step of each, by turns."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    gc.collect()
    gc.freeze()
    for step in range(STEPS):
        for name, one in engines.items():
            if mixed:
                feed(one, AsyncScheduler if name == STOCK else Scheduler, step)
            before = one.scheduler_s
            one.step()
            times[name].append((one.scheduler_s - before) * 1e3)
    return {name: statistics.median(took) for name, took in times.items()}


def medians(runs: Sequence[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Of each: milliseconds, and their ratio to stock's of the same run."""
    return {
        name: (
            statistics.median(run[name] for run in runs),
            statistics.median(run[name] / run[STOCK] for run in runs),
        )
        for name in runs[0]
    }


def steering_table() -> str:
    """Objectives of three tiers against none."""
    rows = []
    for mixed, running in itertools.product((False, True), RUNNING):
        runs = [
            timed(
                {STOCK: engine(AsyncScheduler, running), "ours": engine(Scheduler, running)}, mixed
            )
            for _ in range(REPEATS)
        ]
        found = medians(runs)
        (stock, _), (ours, ratio) = found[STOCK], found["ours"]
        load, reach = ("mixed", "") if mixed else ("decode", "<= 1.25")
        rows.append([load, running, f"{stock:.3f}", f"{ours:.3f}", f"{ratio:.2f}", reach])
    return markdown(["load", "running", "stock ms", "ours ms", "ratio", "reach"], rows)


def ordering_table() -> str:
    """Best effort by its order."""
    rows = []
    for running in RUNNING:
        runs = []
        for _ in range(REPEATS):
            engines = {STOCK: engine(AsyncScheduler, running, running)}
            for order in ORDERS:
                options = {"best_effort": {"order": order}, "ageing_s": 80_000.0}
                engines[order] = engine(Scheduler, running, running, [WAITS], **options)
            runs.append(timed(engines))
        found = medians(runs)
        cells = [f"{ms:.3f} ({ratio:.2f})" for ms, ratio in found.values()]
        rows.append([running, running, *cells])
    return markdown(
        ["running", "waiting", *(f"{name} ms (ratio)" for name in (STOCK, *ORDERS))], rows
    )


def main() -> None:
    """Measure and write the tables."""
    tables = [steering_table(), "Best effort, by its order:", ordering_table()]
    write_result("scheduler_overhead", __doc__ or "", "\n\n".join(tables))


if __name__ == "__main__":
    main()
