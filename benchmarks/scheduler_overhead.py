# SPDX-License-Identifier: Apache-2.0
"""What objectives cost: schedule() + update_from_output() per step, ours over stock AsyncScheduler.

Every request carries an SLO with ours and none with stock; both run vLLM's real objects on the
same requests, step by step in alternation in one process.

- `decode`: all requests decode, with objectives of three tiers.
- `arrivals`: a prompt of 400 tokens with a TTFT and a TPOT arrives before every step. Its answer is
  as long as there are running requests, so that one request ends and one begins with each step.
- `no objective`: both loads, and no request has an objective with ours either.

The second table is the floor: AsyncScheduler against a subclass that only calls super(), and one
that also overrides five methods of a step or of a request, on `decode`.

The third table: best effort alone, half of it decoding, half waiting for a place, by its order.

    python benchmarks/scheduler_overhead.py                 all of it
    python benchmarks/scheduler_overhead.py --only decode   one load, nothing is written
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from common import markdown, write_result
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_slo import SLO, tiny
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import AsyncScheduler, EngineShape, VirtualEngine

MODEL = StepTimeModel(((0.0, 0.0, 0.015), (3e-5, 0.0, 0.008)), kv_s=1e-9, max_tokens=8192)
TIERS = (
    SLO(ttft_ms=2000, tpot_ms=30),
    SLO(ttft_ms=4000, tpot_ms=50),
    SLO(ttft_ms=8000, tpot_ms=100),
)
LOOSE_TIERS = (
    SLO(ttft_ms=4000, tpot_ms=80),
    SLO(ttft_ms=8000, tpot_ms=120),
    SLO(ttft_ms=16000, tpot_ms=200),
)
"""Of the largest batch, whose steps take 39 ms."""
WAITS = SLO(tier="best_effort", expected_output_tokens=3500)
STOCK = "stock"
ORDERS = ("fcfs", "lp_sjf", "las", "laps_sd")
RUNNING = (16, 64, 256, 1024)
PROMPT: Final = 400
"""Tokens of the prompts that arrive: with 256 decodes a step of 30 ms has room for one."""
STEPS = 300
REPEATS = 5


class SubclassOnly(AsyncScheduler):
    """A subclass that changes nothing."""


class HooksOnly(AsyncScheduler):
    """Overrides of methods that are called in each step or for each request; nothing is in them."""

    def schedule(self, throttle_prefills: bool = False) -> Any:
        return super().schedule(throttle_prefills)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        return super().update_from_output(scheduler_output, model_runner_output)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> Any:
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> Any:
        return super()._update_request_with_output(request, new_token_ids, is_stale)

    def get_request_counts(self) -> Any:
        return super().get_request_counts()


class Took(NamedTuple):
    """Milliseconds per step: the median, and what one step in twenty exceeds."""

    p50: float
    p95: float


def idle_engine(
    cls: type[AsyncScheduler], seats: int, *, records: bool = False, **slo_config: Any
) -> VirtualEngine:
    """An engine on which so many requests can run."""
    one = VirtualEngine(
        cls,
        tiny.path("target"),
        MODEL.predict_shape_s,
        EngineShape(400_000, 16, seats, 8192, 4096),
        believed=MODEL,
        slo_config=slo_config if cls is Scheduler else None,
        records=records,
    )
    one.keep_history = False
    return one


def engine(
    cls: type[AsyncScheduler],
    running: int,
    waiting: int = 0,
    slos: Sequence[SLO | None] = TIERS,
    **options: Any,
) -> VirtualEngine:
    """An engine on which ``running`` requests decode and as many as said wait. ``options``: as
    `idle_engine`."""
    one = idle_engine(cls, running if waiting else running + 64, **options)
    for i in range(running + waiting):
        slo = slos[i % len(slos)] if cls is Scheduler else None
        one.add(f"r{i}", 64, 3500, slo, max_tokens=3500)
    while len(one.scheduler.running) < running:
        one.step()
    for _ in range(30):
        one.step()
    return one


def busy_engine(
    cls: type[AsyncScheduler], running: int, slos: Sequence[SLO | None], **options: Any
) -> VirtualEngine:
    """An engine to which a prompt comes before every step; about ``running`` of them decode.
    ``options``: as `idle_engine`."""
    one = idle_engine(cls, running + 64, **options)
    for step in range(-2 * running - 20, 0):
        feed(one, cls, running, slos, step)
        one.step()
    return one


def feed(
    one: VirtualEngine,
    cls: type[AsyncScheduler],
    running: int,
    slos: Sequence[SLO | None],
    step: int,
) -> None:
    """A prompt arrives; its answer takes ``running`` steps."""
    slo = slos[step % len(slos)] if cls is Scheduler else None
    one.add(f"p{step}", PROMPT, running, slo)
    for name in one.finished:
        one.forget(name)
    one.finished.clear()


def timed(
    engines: Mapping[str, tuple[VirtualEngine, type[AsyncScheduler]]],
    arriving: int = 0,
    slos: Sequence[SLO | None] = TIERS,
) -> dict[str, Took]:
    """Milliseconds per step of each, by turns; with ``arriving``, requests of so many tokens."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    gc.collect()
    gc.freeze()
    for step in range(STEPS):
        for name, (one, cls) in engines.items():
            if arriving:
                feed(one, cls, arriving, slos, step)
            before = one.scheduler_s
            one.step()
            times[name].append((one.scheduler_s - before) * 1e3)
    return {
        name: Took(statistics.median(took), statistics.quantiles(took, n=20)[-1])
        for name, took in times.items()
    }


def ratio(runs: Sequence[dict[str, Took]], name: str, base: str = STOCK) -> Took:
    """To that of ``base`` in the same run, the median of all."""
    return Took(*(statistics.median(run[name][i] / run[base][i] for run in runs) for i in range(2)))


def middle(runs: Sequence[dict[str, Took]], name: str) -> Took:
    """The median of all runs."""
    return Took(*(statistics.median(run[name][i] for run in runs) for i in range(2)))


def loads() -> Iterator[tuple[str, int, str, str]]:
    """(load, running, target of p50, target of p95)."""
    for running in RUNNING:
        yield "decode", running, "<= 1.25" if running == 1024 else "<= 1.15", ""
    for running in RUNNING[:-1]:
        yield "arrivals", running, "<= 1.25", "<= 1.6"
    for running in RUNNING[:-1]:
        yield "decode, no objective", running, "<= 1.02", ""
        yield "arrivals, no objective", running, "<= 1.02", ""


def run_load(load: str, running: int) -> dict[str, Took]:
    """Stock and ours on one load."""
    slos: Sequence[SLO | None] = LOOSE_TIERS if running == RUNNING[-1] else TIERS
    if "no objective" in load:
        slos = [None]
    arriving = running if load.startswith("arrivals") else 0
    pair = ((STOCK, AsyncScheduler), ("ours", Scheduler))
    if arriving:
        engines = {name: (busy_engine(cls, running, slos), cls) for name, cls in pair}
    else:
        engines = {name: (engine(cls, running, slos=slos), cls) for name, cls in pair}
    return timed(engines, arriving, slos)


def overhead_table(only: str | None = None) -> str:
    """Ours against stock, load by load."""
    rows = []
    for load, running, p50, p95 in loads():
        if only is not None and load != only:
            continue
        runs = [run_load(load, running) for _ in range(REPEATS)]
        stock, ours, ratios = middle(runs, STOCK), middle(runs, "ours"), ratio(runs, "ours")
        rows.append(
            [
                *(load, running, f"{stock.p50:.3f}", f"{ours.p50:.3f}"),
                *(f"{ratios.p50:.2f}", p50, f"{ratios.p95:.2f}", p95),
            ]
        )
    head = ["load", "running", "stock ms", "ours ms", "ratio p50", "target", "ratio p95", "target"]
    return markdown(head, rows)


def floor_table() -> str:
    """What a subclass costs by itself."""
    rows = []
    for running in RUNNING[:3]:
        classes = {STOCK: AsyncScheduler, "subclass": SubclassOnly, "hooks": HooksOnly}
        runs = [
            timed({name: (engine(cls, running), cls) for name, cls in classes.items()})
            for _ in range(REPEATS)
        ]
        stock = middle(runs, STOCK).p50
        found = [f"{ratio(runs, name).p50:.2f}" for name in ("subclass", "hooks")]
        rows.append([running, f"{stock:.3f}", *found])
    return markdown(["running", "stock ms", "empty subclass", "hooks alone"], rows)


def ordering_table() -> str:
    """Best effort by its order."""
    rows = []
    for running in RUNNING[:3]:
        runs = []
        for _ in range(REPEATS):
            stock: type[AsyncScheduler] = AsyncScheduler
            engines = {STOCK: (engine(stock, running, running), stock)}
            for order in ORDERS:
                options = {"best_effort": {"order": order}, "ageing_s": 80_000.0}
                engines[order] = engine(Scheduler, running, running, [WAITS], **options), Scheduler
            runs.append(timed(engines))
        cells = [f"{middle(runs, n).p50:.3f} ({ratio(runs, n).p50:.2f})" for n in runs[0]]
        rows.append([running, running, *cells])
    return markdown(
        ["running", "waiting", *(f"{name} ms (ratio)" for name in (STOCK, *ORDERS))], rows
    )


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description="What objectives cost the scheduler.")
    names = sorted({load for load, *_ in loads()})
    parser.add_argument("--only", choices=names, help="measure one load; nothing is written")
    only = parser.parse_args().only
    if only is not None:
        print(overhead_table(only))
        return
    tables = [overhead_table(), "The floor:", floor_table()]
    tables += ["Best effort, by its order:", ordering_table()]
    write_result("scheduler_overhead", __doc__ or "", "\n\n".join(tables))


if __name__ == "__main__":
    main()
