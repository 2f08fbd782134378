# SPDX-License-Identifier: Apache-2.0
"""Measures how fast this CPU multiplies matrices; ``python -m vllm_slo.tiny.speed`` prints JSON.

The demo chooses the size of its model by it. It takes two seconds.
"""

import json
import os
import sys
import time

import torch

TOKENS = 128
"""Rows of the product, as many as a chunk of a prompt has."""
HIDDEN = 1024
REPEATS = 15


def product_s(dtype: torch.dtype, repeats: int = REPEATS) -> float:
    """Median seconds of a product of ``TOKENS`` rows with a matrix of an MLP."""
    rows = torch.ones(TOKENS, HIDDEN, dtype=dtype)
    weights = torch.ones(4 * HIDDEN, HIDDEN, dtype=dtype)
    times = []
    for _ in range(repeats + 2):
        begun_s = time.perf_counter()
        torch.nn.functional.linear(rows, weights)
        times.append(time.perf_counter() - begun_s)
    return sorted(times[2:])[repeats // 2]


def measure() -> dict[str, float | str]:
    """The faster number type, and its floating-point operations per second.

    It uses as many threads as vLLM's engine, which leaves a core to the server.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    torch.set_num_threads(max(1, cores - 1))
    # A CPU without bfloat16 instructions takes about fifty times as long, so one try is enough.
    slow = product_s(torch.bfloat16, 1) > 3 * product_s(torch.float32, 3)
    dtype = torch.float32 if slow else torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "flops_per_s": 2 * TOKENS * 4 * HIDDEN**2 / product_s(dtype)}


def main() -> None:
    """Print the speed."""

    sys.stdout.write(json.dumps(measure()) + "\n")


if __name__ == "__main__":
    main()
