# SPDX-License-Identifier: Apache-2.0
"""Memory of the scheduler over 10,000 requests, ours beside stock AsyncScheduler.

vLLM's real scheduler objects in virtual time, one process each: 1,000 requests at a time with and
without SLOs, some declined, some aborted. Reported: resident memory and live Python objects after
each batch has finished and what the clients saw has been dropped.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import multiprocessing
import random
from pathlib import Path

from common import markdown, write_result

from vllm_slo import SLO, tiny
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import AsyncScheduler, EngineShape, VirtualEngine

MODEL = StepTimeModel(((0.0, 0.0, 0.015), (1e-4, 0.0, 0.008)), kv_s=1e-9, max_tokens=8192)
BATCHES = 10
BATCH = 1000
SLOS = (
    SLO(ttft_ms=500, tpot_ms=40),
    SLO(ttft_ms=2000, tpot_ms=100, slo_class=None, tenant="t"),
    SLO(ttft_ms=200, tpot_ms=30, on_unattainable="decline"),
    None,
)


def send(engine: VirtualEngine, rng: random.Random, batch: int) -> None:
    """Run 1,000 requests to their end."""
    for number in range(BATCH):
        name = f"b{batch}-{number}"
        engine.add(name, rng.randint(10, 400), rng.randint(1, 40), rng.choice(SLOS), max_tokens=64)
        engine.step()
        if number % 50 == 0:
            engine.abort(name)
    engine.run()
    engine.outcomes.clear()
    engine.lengths.clear()


def resident_mib() -> float:
    """Resident memory of this process, MiB."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(ours: bool, results: multiprocessing.Queue[list[tuple[float, int]]]) -> None:
    """Put (resident MiB, live objects) after each batch into ``results``."""
    cls = Scheduler if ours else AsyncScheduler
    engine = VirtualEngine(
        cls,
        tiny.path("target"),
        MODEL.predict_shape_s,
        EngineShape(4000, 16, 64, 2048, 1024),
        believed=MODEL,
    )
    engine.keep_history = False
    rng = random.Random(1)
    rows = []
    for batch in range(BATCHES):
        send(engine, rng, batch)
        gc.collect()
        rows.append((resident_mib(), len(gc.get_objects())))
    results.put(rows)


def main() -> None:
    """Measure both and write the table."""
    context = multiprocessing.get_context("spawn")
    columns = []
    for ours in (False, True):
        results = context.Queue()
        process = context.Process(target=measure, args=(ours, results))
        process.start()
        columns.append(results.get())
        process.join()
    rows = [
        [(batch + 1) * BATCH, f"{stock[0]:.1f}", f"{own[0]:.1f}", stock[1], own[1]]
        for batch, (stock, own) in enumerate(zip(*columns, strict=True))
    ]
    write_result(
        "memory_growth",
        __doc__ or "",
        markdown(["requests", "stock MiB", "ours MiB", "stock objects", "our objects"], rows),
    )


if __name__ == "__main__":
    main()
