# SPDX-License-Identifier: Apache-2.0
"""A real engine in a process of its own, to which things happen; prints as JSON what came of them.

The faults are put into the model runner of the in-process engine: a step that takes long, and one
that raises. The clock is the scheduler's, set off by an hour.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from patience import patience
from vllm import SamplingParams

from vllm_slo import LLM, SLO
from vllm_slo.core.clock import SystemClock
from vllm_slo.engine.serving.llm import report_of

PROMPTS = ["def read(path):\n", "class Stack:\n    def", "import os\n", "# A comment about"]
SLOW_S = patience(2.0)
HOUR_S = 3600.0


class WrongClock(SystemClock):
    """Its epoch reading is off."""

    def __init__(self, off_s: float) -> None:
        self.off_s = off_s

    def epoch_s(self) -> float:
        return super().epoch_s() + self.off_s


class Faults:
    """An engine, and what can happen to it."""

    def __init__(self) -> None:
        self.llm = LLM(
            "tiny",
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            gpu_memory_utilization=0.2,
            disable_log_stats=True,
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.parts = core.scheduler.parts
        self.runner = core.model_executor.driver_worker.worker.model_runner

    @contextmanager
    def before_steps(self, happens: Callable[[], None]) -> Iterator[None]:
        """Something happens before every step of the model."""
        stock = self.runner.execute_model

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            happens()
            return stock(*args, **kwargs)

        self.runner.execute_model = execute_model
        try:
            yield
        finally:
            self.runner.execute_model = stock

    def ask(self, slo: SLO | None, tokens: int = 12) -> list[Any]:
        """Four greedy answers: their texts and reports."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        done = self.llm.generate(PROMPTS, params, use_tqdm=False, slo=slo)
        return [[output.outputs[0].text, report_of(output)] for output in done]

    def counted(self, counter: str) -> float:
        """A counter of the scheduler's, over all labels."""
        found = getattr(self.parts.metrics, counter)._series.collect()
        return sum(s.value for f in found for s in f.samples if s.name.endswith("_total"))

    def left(self) -> dict[str, int]:
        """What the scheduler still holds."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "requests": len(self.scheduler.requests),
            "tracked": len(self.parts.tracker.live),
            "unpromised": self.parts.tracker.unpromised,
            "steps": len(self.parts.clock._flight),
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }

    def slow_step(self) -> Any:
        """One step takes twice as long as was promised in the midst of it."""
        pauses = iter([SLOW_S])
        broken = self.counted("_broken")
        with self.before_steps(lambda: time.sleep(next(pauses, 0.0))):
            answers = self.ask(SLO(ttft_ms=500 * SLOW_S, tpot_ms=10_000))
        return {"answers": answers, "broken": self.counted("_broken") - broken}

    def slow_phase(self) -> Any:
        """Every step takes longer for a while than a TPOT allows that could be kept before: what is
        promised of it before and after."""
        tpot_s = max(4 * self.parts.clock.promise_model.predict_s(4), 0.05)
        wish = SLO(tpot_ms=1e3 * tpot_s)
        before = [report["promised"] for _, report in self.ask(wish)]
        with self.before_steps(lambda: time.sleep(tpot_s)):
            self.ask(None, 40)
        return before, [report["promised"] for _, report in self.ask(wish, 4)]

    def wrong_clock(self, off_s: float) -> Any:
        """The epoch clock is off by so much when requests come that were stamped before."""
        self.parts.clock.clock = WrongClock(off_s)
        try:
            return self.ask(SLO(ttft_ms=60_000))
        finally:
            self.parts.clock.clock = SystemClock()

    def failing_step(self) -> Any:
        """The third step raises; the requests are given up, and the next ones come."""

        def fail() -> None:
            count.append(None)
            if len(count) == 3:
                raise RuntimeError("the device is gone (a test says so)")

        count: list[None] = []
        begun_s = time.monotonic()
        error = None
        try:
            with self.before_steps(fail):
                self.ask(SLO(ttft_ms=60_000, tpot_ms=10_000))
        except RuntimeError as raised:
            error = str(raised)
        took_s = time.monotonic() - begun_s
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        return {"error": error, "seconds": took_s, "left": self.left(), "after": self.ask(None)}


def main() -> None:
    faults = Faults()
    said: dict[str, Any] = {"plain": faults.ask(None)}
    said["ahead"] = faults.wrong_clock(HOUR_S)
    said["behind"] = faults.wrong_clock(-HOUR_S)
    said["slow_step"] = faults.slow_step()
    said["failing_step"] = faults.failing_step()
    said["slow_phase"] = faults.slow_phase()
    said["left"] = faults.left()
    sys.stdout.write(f"\n{json.dumps(said)}\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown takes longer than all of this


if __name__ == "__main__":
    main()
