# SPDX-License-Identifier: Apache-2.0
"""Makes up the recording behind ``whatif-example.html``: five minutes with two bursts.

Nobody's traffic: lengths and arrivals are drawn, and a simulated server stands for a real one. It
is stock vLLM with 8,192 tokens a step, and its step times vary as they do on a real engine.

    python docs/reports/example_recording.py recording.jsonl
    vllm-slo whatif recording.jsonl --slo-config examples/slo.yaml --hardware h100-llama-8b \
        --html docs/reports/whatif-example.html
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from vllm_slo.sim.cluster import simulate
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import load_hardware
from vllm_slo.sim.jobs import JobResult
from vllm_slo.sim.measure import measure_job
from vllm_slo.sim.systems import parse_system
from vllm_slo.sim.traffic import Traffic
from vllm_slo.traces.classes import TrafficClasses
from vllm_slo.traces.own_format import header_line, request_line
from vllm_slo.traces.request import Served, TraceRequest
from vllm_slo.traces.selection import Recording

ROOT: Final = Path(__file__).resolve().parents[2]
LASTS_S: Final = 300.0
BURSTS_S: Final = ((80.0, 115.0), (200.0, 220.0))
CLASSES: Final = {
    "chat": (0.50, 900, 260),
    "code": (0.20, 2600, 110),
    "realtime": (0.15, 250, 60),
    "batch": (0.15, 1500, 420),
}
"""Class -> share of the requests, mean of the prompt's tokens, and of the answer's."""


def requests(rng: random.Random) -> Iterator[TraceRequest]:
    """What arrives: 8 requests a second, 24 in a burst."""
    at_s = 0.0
    shares = [share for share, _, _ in CLASSES.values()]
    while True:
        burst = any(low <= at_s < high for low, high in BURSTS_S)
        at_s += rng.expovariate(24.0 if burst else 8.0)
        if at_s > LASTS_S:
            return
        name = rng.choices(list(CLASSES), shares)[0]
        _, prompt, answer = CLASSES[name]
        lengths = [int(mean * rng.lognormvariate(-0.32, 0.8)) for mean in (prompt, answer)]
        yield TraceRequest(at_s, max(8, lengths[0]), max(2, lengths[1]), name)


def as_recorded(request: TraceRequest, result: JobResult, left: bool) -> TraceRequest:
    """A request with what became of it; some clients leave after half of their answer."""
    job, details = measure_job(result), result.job.rounds[0].details
    assert details is not None
    slo, tpot_s = details.slo, max(job.tpots_s, default=None)
    times_s = result.rounds[0].token_times_s
    if left:
        tokens = max(1, request.output_tokens // 2)
        end_s = times_s[tokens - 1] - request.at_s
        served = Served("aborted", "none", job.ttfts_s[0], None, end_s)
    else:
        tokens = request.output_tokens
        attained = job.attained if job.has_objective else None
        served = Served(
            "completed", "none", job.ttfts_s[0], tpot_s, job.latency_s, attained=attained
        )
    return msgspec.structs.replace(
        request,
        output_tokens=tokens,
        ttft_ms=slo and slo.ttft_ms,
        tpot_ms=slo and slo.tpot_ms,
        served=served,
    )


def main(path: Path) -> None:
    """Write the recording."""
    rng = random.Random(38)
    made = tuple(requests(rng))
    classes = TrafficClasses.load(ROOT / "examples" / "slo.yaml", None)
    hardware = load_hardware("h100-llama-8b")
    jobs = Traffic(Recording("made up", "made up", made, 0), classes).jobs(hardware)
    run = simulate(jobs, parse_system("fcfs-8192"), hardware, Conditions(noise=0.1, seed=38))
    recorded = [
        as_recorded(request, result, rng.random() < 0.01)
        for request, result in zip(made, run.results, strict=True)
    ]
    recorded.sort(key=lambda one: one.at_s + ((one.served and one.served.e2e_s) or 0.0))
    header = header_line(datetime(2026, 12, 1, 9, tzinfo=UTC), 64, "llama-8b")
    path.write_text(header + "".join(request_line(one, 0.0) for one in recorded))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
