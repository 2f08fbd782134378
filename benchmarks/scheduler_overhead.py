# SPDX-License-Identifier: Apache-2.0
"""What steering costs: schedule() + update_from_output() per step, ours over stock AsyncScheduler.

Every request carries an SLO with ours and none with stock; both run vLLM's real objects on the
same requests, step by step in alternation in one process. ``decode``: all requests decode.
``mixed``: the same, with a prompt being prefilled in every step and others waiting, so that every
step is planned anew.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import statistics

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
STEPS = 300
REPEATS = 5


def engine(cls: type[AsyncScheduler], running: int) -> VirtualEngine:
    """An engine on which ``running`` requests decode."""
    one = VirtualEngine(
        cls,
        tiny.path("target"),
        MODEL.predict_shape_s,
        EngineShape(200_000, 16, running + 64, 8192, 4096),
        believed=MODEL,
    )
    one.keep_history = False
    for i in range(running):
        slo = TIERS[i % 3] if cls is Scheduler else None
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


def measure(running: int, mixed: bool) -> tuple[float, float]:
    """Median milliseconds per step of (stock, ours)."""
    engines = {cls: engine(cls, running) for cls in (AsyncScheduler, Scheduler)}
    times: dict[type[AsyncScheduler], list[float]] = {cls: [] for cls in engines}
    gc.collect()
    gc.freeze()
    for step in range(STEPS):
        for cls, one in engines.items():
            if mixed:
                feed(one, cls, step)
            before = one.scheduler_s
            one.step()
            times[cls].append((one.scheduler_s - before) * 1e3)
    return statistics.median(times[AsyncScheduler]), statistics.median(times[Scheduler])


def main() -> None:
    """Measure and write the table."""
    rows = []
    for mixed in (False, True):
        for running in (16, 64, 256):
            runs = [measure(running, mixed) for _ in range(REPEATS)]
            stock = statistics.median(stock for stock, _ in runs)
            ours = statistics.median(ours for _, ours in runs)
            ratio = statistics.median(o / s for s, o in runs)
            load = "mixed" if mixed else "decode"
            reach = "" if mixed else "<= 1.25"
            rows.append([load, running, f"{stock:.3f}", f"{ours:.3f}", f"{ratio:.2f}", reach])
    write_result(
        "scheduler_overhead",
        __doc__ or "",
        markdown(["load", "running", "stock ms", "ours ms", "ratio", "reach"], rows),
    )


if __name__ == "__main__":
    main()
