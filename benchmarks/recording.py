# SPDX-License-Identifier: Apache-2.0
"""What a recording costs: time of a step, time of a line, bytes of a request.

The first table: add_request() + schedule() + update_from_output() per step, with a recording over
without one. Both are vllm-slo's scheduler on the same requests, step by step in turns in one
process, with the recording's thread beside them. It is the processor time of the scheduler's
thread, so that other work on the machine counts little.

- `decode`: all requests decode. With objectives nothing is to be done for the recording in a step.
  Without, the tokens of each request are counted.
- `arrivals`: a prompt of 400 tokens arrives before every step, and about one request ends in it.
  Virtual steps follow each other without the time that a model takes, so several hundred requests
  end in a second: many more than an engine serves.

The second table: a request of which nothing is shared, by the length of its prompt. The step that
ends it makes a record of it; later a thread hashes the prompt and makes the line. Processor time,
too. The interpreter runs one thread at a time: while a line is made, a step can wait for it, by at
most 5 ms (Python's switch interval).

The third table: bytes of a request in a recording of Azure's traces (2023, the first 10,000 rows,
with a class, a tenant and objectives of two kinds, as served), plain and with gzip. Nothing is
shared by prompts there; ids that repeat are packed better. The last column: how many requests the
default bound of 8 files of 64 MB holds.

    python benchmarks/recording.py
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import gzip
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from common import markdown, write_result
from scheduler_overhead import RUNNING, TIERS, Took, busy_engine, engine, feed, middle, ratio
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from vllm_slo import SLO
from vllm_slo.bench.traces import data_folder
from vllm_slo.config.recording import RecordingConfig
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.telemetry.request_recorder import RequestRecorder
from vllm_slo.traces.files import read
from vllm_slo.traces.request import TraceRequest

BASE: Final = "without"
REPEATS: Final = 2
STEPS: Final = 150
CONFIG: Final = RecordingConfig()
PROMPTS: Final = (400, 4_000, 32_000, 128_000)
ROWS: Final = 10_000
FILES: Final = {"conversations": "azure_llm_2023_conv.csv", "code": "azure_llm_2023_code.csv"}
SLOS: Final = (
    SLO(ttft_ms=2000, tpot_ms=50, slo_class="chat", tenant="acme", session_id="a-session"),
    SLO(tier="best_effort", slo_class="batch", tenant="other"),
)


def timed(scheduler: Scheduler) -> list[float]:
    """The processor time of a scheduler's calls, seconds, as they come."""
    took: list[float] = []

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            began_s = time.thread_time()
            try:
                return call(*arguments)
            finally:
                took.append(time.thread_time() - began_s)

        return counted

    for name in ("add_request", "schedule", "update_from_output"):
        setattr(scheduler, name, around(getattr(scheduler, name)))
    return took


def pair(running: int, arriving: bool, slos: Sequence[SLO | None], folder: Path) -> dict[str, Took]:
    """Milliseconds per step of vllm-slo's scheduler without and with a recording."""
    recording: dict[str, Any] = {"records": True, "recording": {"path": str(folder / "r.jsonl")}}
    engines = {}
    for name, options in ((BASE, {}), ("with", recording)):
        if arriving:
            one = busy_engine(Scheduler, running, slos, **options)
        else:
            one = engine(Scheduler, running, slos=slos, **options)
        engines[name] = one, timed(one.scheduler)
    steps: dict[str, list[float]] = {name: [] for name in engines}
    gc.collect()
    gc.freeze()
    for step in range(STEPS):
        for name, (one, took) in engines.items():
            took.clear()
            if arriving:
                feed(one, Scheduler, running, slos, step)
            one.step()
            steps[name].append(sum(took) * 1e3)
    engines["with"][0].scheduler.shutdown()
    return {
        name: Took(statistics.median(ms), statistics.quantiles(ms, n=20)[-1])
        for name, ms in steps.items()
    }


def loads() -> Iterator[tuple[str, int, Sequence[SLO | None], str]]:
    """(load, running, objectives in turn, target of the median's ratio)."""
    for running in RUNNING[:-1]:
        yield "decode", running, TIERS, "<= 1.02"
        yield "decode, no objective", running, [None], "<= 1.02"
    for running in RUNNING[:-1]:
        yield "arrivals", running, TIERS, "<= 1.05"
        yield "arrivals, no objective", running, [None], "<= 1.05"


def step_table(folder: Path) -> str:
    """With a recording against without, load by load."""
    rows = []
    for load, running, slos, target in loads():
        arriving = load.startswith("arrivals")
        runs = [pair(running, arriving, slos, folder) for _ in range(REPEATS)]
        base, recording = middle(runs, BASE), middle(runs, "with")
        ratios = ratio(runs, "with", BASE)
        rows.append(
            [
                *(load, running, f"{base.p50:.3f}", f"{recording.p50:.3f}"),
                *(f"{ratios.p50:.3f}", target, f"{ratios.p95:.2f}"),
            ]
        )
    head = ["load", "running", "without ms", "with ms", "ratio p50", "target", "ratio p95"]
    return markdown(head, rows)


class Kept:
    """A writer that keeps what makes the lines."""

    def __init__(self) -> None:
        self.makers: list[Any] = []

    def put(self, make: Any, prompt_tokens: int) -> None:
        self.makers.append(make)

    def close(self) -> None:
        """Nothing is open."""


def request_of(row: TraceRequest, number: int, rng: np.random.Generator) -> Request:
    """A request with its own tokens, whose answer has come."""
    request = Request(
        request_id=f"r{number}",
        prompt_token_ids=rng.integers(0, 100_000, row.prompt_tokens).tolist(),
        sampling_params=SamplingParams(max_tokens=max(row.output_tokens, 1)),
        pooling_params=None,
        arrival_time=0.0,
    )
    request._output_token_ids += [1] * row.output_tokens
    request.status = RequestStatus.FINISHED_STOPPED
    return request


def served(row: TraceRequest) -> Any:
    """How such a request with an SLO did."""
    first_s = row.at_s + 0.0001 * row.prompt_tokens + 0.0123456
    return SimpleNamespace(
        first_token_s=first_s,
        last_token_s=first_s + 0.0234567 * row.output_tokens,
        tpot=SimpleNamespace(worst_s=0.0345678),
        was_promised=True,
        late=None,
        late_kept=False,
    )


def line_table() -> str:
    """Time for one request, by the length of its prompt."""
    rows, rng = [], np.random.default_rng(0)
    for tokens in PROMPTS:
        writer = Kept()
        recorder = RequestRecorder(writer, CONFIG, bytes(16), 0.0, 10)  # type: ignore[arg-type]
        record, make = [], []
        for number in range(30):
            row = TraceRequest(1.0, tokens, 100)
            request, did = request_of(row, number, rng), served(row)
            began_s = time.thread_time()
            recorder.arrived(request, SLOS[0], 1.0)
            recorder.ended(request, did, True, 9.0, by_itself=True)
            ended_s = time.thread_time()
            line = writer.makers.pop()()
            record.append(ended_s - began_s)
            make.append(time.thread_time() - ended_s)
        cells = [statistics.median(times) * 1e6 for times in (record, make)]
        rows.append([f"{tokens:,}", *(f"{cell:,.0f}" for cell in cells), f"{len(line):,}"])
    head = [
        "prompt tokens",
        "scheduler's thread, us",
        "recording's thread, us",
        "bytes of the line",
    ]
    return markdown(head, rows)


def size_table(folder: Path) -> str:
    """Bytes of a request, by trace and tokens of a block."""
    rows = []
    for (name, file), block_tokens in itertools.product(FILES.items(), (64, 512)):
        rng, writer = np.random.default_rng(0), Kept()
        config = RecordingConfig(block_tokens=block_tokens)
        recorder = RequestRecorder(writer, config, bytes(16), 0.0, 10)  # type: ignore[arg-type]
        lines, prompt_tokens = [], []
        for number, row in enumerate(itertools.islice(read(folder / file), ROWS)):
            request = request_of(row, number, rng)
            recorder.arrived(request, SLOS[number % len(SLOS)], row.at_s)
            recorder.ended(request, served(row), True, row.at_s, by_itself=True)
            lines.append(writer.makers.pop()())
            prompt_tokens.append(row.prompt_tokens)
        text = b"".join(lines)
        plain, packed = len(text) / len(lines), len(gzip.compress(text)) / len(lines)
        bound = CONFIG.files * CONFIG.max_mb * 1_000_000 / plain
        mean = statistics.mean(prompt_tokens)
        rows.append(
            [name, f"{mean:,.0f}", block_tokens, f"{plain:,.0f}", f"{packed:,.0f}", f"{bound:,.0f}"]
        )
    head = ["trace", "prompt tokens, mean", "block_tokens", "bytes", "bytes, gzip", "in 512 MB"]
    return markdown(head, rows)


def main() -> None:
    """Measure and write the tables."""
    data = data_folder()
    if data is None:
        raise SystemExit("Azure's traces are needed; see vllm_slo/bench/traces.py")
    lines, sizes = line_table(), size_table(data)
    with tempfile.TemporaryDirectory() as folder:
        steps = step_table(Path(folder))
    tables = [steps, "The time of a line:", lines, "Its size:", sizes]
    write_result("recording", __doc__ or "", "\n\n".join(tables))


if __name__ == "__main__":
    main()
