# SPDX-License-Identifier: Apache-2.0
"""What the front adds: the same requests to a replica's own port and through the front, in turn.

One real replica (built-in model on CPU) behind the front, as `vllm-slo serve --replicas` starts
them. A request is a streamed completion of 32 tokens with an objective; client, front and engine
share the machine. Direct and routed requests alternate; medians of all.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
from common import markdown, write_result
from timed_way import Way

from vllm_slo.config.serve_args import TINY, serve_arguments
from vllm_slo.router.child import Child
from vllm_slo.wire.front_protocol import TOKEN_HEADER
from vllm_slo.wire.ports import free_port

TOKENS = 32
ENGINE = (
    *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16"),
    *("--gpu-memory-utilization", "0.2", "--uvicorn-log-level", "warning"),
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
BODY = {
    "model": TINY,
    "prompt": "def add(a, b):\n    return",
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
    "slo": {"ttft_ms": 5_000, "tpot_ms": 500},
}


@asynccontextmanager
async def ways() -> AsyncIterator[tuple[Way, Way]]:
    """(the replica's own port, the front)."""
    environment = {**os.environ, **ENVIRONMENT}
    replica = Child(
        [sys.executable, "-m", "vllm_slo.router.replica", "--private-host", "127.0.0.1",
         "--", *serve_arguments(TINY, ENGINE, {})],
        environment,
    )  # fmt: skip
    port = free_port()
    front = Child(
        [sys.executable, "-m", "vllm_slo.router.front", "--host", "127.0.0.1", "--port", str(port),
         "--config", json.dumps({"slo_config": None})],
        environment,
    )  # fmt: skip
    try:
        await replica.start()
        await front.start()
        told = await replica.read()
        await front.read()
        if told is None:
            raise SystemExit("the replica did not start")
        front.write({"replicas": [{"name": "r", "url": told["url"], "token": told["token"]}]})
        while (await front.read() or {}).get("ready") != 1:
            pass
        secret = {TOKEN_HEADER: told["token"]}
        async with (
            aiohttp.ClientSession(headers=secret) as private,
            aiohttp.ClientSession() as public,
        ):
            yield (
                Way(private, told["url"], BODY),
                Way(public, f"http://127.0.0.1:{port}", BODY),
            )
    finally:
        for child in (front, replica):
            if child.returncode is None:
                await child.terminate(10.0)


async def measure(repeats: int) -> list[list[str]]:
    """The rows of the table."""
    rows = []
    async with ways() as both:
        for at_once in (1, 8):
            seconds: list[list[tuple[float, float]]] = [[], []]
            gc.collect()
            for turn in range(-8, repeats // at_once):
                for way, found in zip(both, seconds, strict=True):
                    answers = await asyncio.gather(*(way.timed() for _ in range(at_once)))
                    if turn >= 0:  # the first are warm-up
                        found.extend(answers)
            rows += table(at_once, *(np.array(one) * 1e3 for one in seconds))
    return rows


def table(at_once: int, direct: np.ndarray, routed: np.ndarray) -> list[list[str]]:
    """Two rows, TTFT and end to end. Both arrays: (answers, 2) in milliseconds."""
    rows = []
    for column, name in enumerate(("TTFT", f"{TOKENS} tokens, end to end")):
        d50, r50 = np.median(direct[:, column]), np.median(routed[:, column])
        d99, r99 = (np.percentile(one[:, column], 99) for one in (direct, routed))
        reach = "" if at_once > 1 else ("+7 ms", "1.15x")[column]
        rows.append(
            [f"{name}, {at_once} at once", f"{d50:.1f}", f"{r50:.1f}", f"{r50 - d50:+.1f}",
             f"{r50 / d50:.2f}x", reach, f"{d99:.1f}", f"{r99:.1f}"]
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=400, help="answers per way and concurrency")
    rows = asyncio.run(measure(parser.parse_args().repeats))
    head = ["what", "direct p50, ms", "front p50, ms", "added, ms", "ratio", "target",
            "direct p99", "front p99"]  # fmt: skip
    write_result("front_latency", __doc__, markdown(head, rows))


if __name__ == "__main__":
    main()
