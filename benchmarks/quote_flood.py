# SPDX-License-Identifier: Apache-2.0
"""How long steps are held up when 1,000 clients ask for a quote at the same moment.

vLLM's scheduler, loaded with 64 or 256 promises that decode and 16 requests that wait for one. It
runs in virtual time: what ``schedule()`` takes is measured here, and the model is given 15 ms
a step, more with many tokens. All quotes come to the engine itself: a server lets in 8 at once.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import random
import time
from typing import Any, NamedTuple

import numpy as np
from common import markdown, write_result
from quotes import ask, loaded


class Flood(NamedTuple):
    """Steps of the engine's thread, each as (``schedule()``, whole step) in milliseconds.

    Attributes:
        before: each step before anybody asks.
        during: each step while some quotes wait for their answer.
        answered: quotes that each of these steps answered.
    """

    before: list[tuple[float, float]]
    during: list[tuple[float, float]]
    answered: list[int]


def flood(running: int, quotes: int) -> Flood:
    """So many quotes at the same moment. What a quote takes here passes on the engine's clock,
    by which the scheduler bounds them. A whole step is what ``schedule()`` took here, and then the
    time of the model."""
    from vllm_slo.engine.telemetry.recording import shape_of

    rng = random.Random(3)
    engine = loaded(running, rng)
    asking = engine.scheduler.parts.quotes
    schedule, answer, step_time = engine.scheduler.schedule, asking.answer, engine.step_time
    found = Flood([], [], [])

    def timed_answer(*arguments: Any) -> Any:
        begun_s = time.thread_time()
        said = answer(*arguments)
        engine.clock.advance(time.thread_time() - begun_s)
        return said

    def timed_schedule(*arguments: Any) -> Any:
        waiting, begun_s = len(asking), time.thread_time()
        output = schedule(*arguments)
        took_s = time.thread_time() - begun_s
        whole_s = took_s + step_time(shape_of(output))
        (found.during if waiting else found.before).append((took_s * 1e3, whole_s * 1e3))
        if waiting:
            found.answered.append(waiting - len(asking))
        return output

    asking.answer, engine.scheduler.schedule = timed_answer, timed_schedule
    for _ in range(200):
        engine.step()
    for i in range(quotes):
        ask(engine, f"q{i}", rng)
    while asking:
        engine.step()
    return found


def flood_table(quotes: int) -> str:
    """How long steps are held up while so many quotes wait, beside steps before they came."""
    rows = []
    for running in (64, 256):
        found = flood(running, quotes)
        usual = float(np.median([whole_ms for _, whole_ms in found.before]))
        asking = f"they ask, at most {max(found.answered)} a step answered"
        for what, steps in (("nobody asks", found.before), (asking, found.during)):
            took_ms, whole_ms = zip(*steps, strict=True)
            cells = [f"{np.median(took_ms):.2f}", f"{max(took_ms):.2f}"]
            cells += [f"{np.median(whole_ms):.1f}", f"{max(whole_ms):.1f}"]
            cells += [f"{max(whole_ms) / usual:.2f}x"]
            rows.append([f"{running} promises run, {what}", len(steps), *cells])
    head = [f"{quotes:,} quotes at once", "steps", "schedule(): median ms", "longest ms"]
    head += ["whole step: median ms", "longest ms", "longest over the median when nobody asks"]
    return markdown(head, rows)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shows that it runs; writes nothing")
    args = parser.parse_args()
    if args.quick:
        print(flood_table(100))
        return
    note = "Asked for: no step longer than twice the median."
    write_result("quote_flood", __doc__, flood_table(1_000), note=note)


if __name__ == "__main__":
    main()
