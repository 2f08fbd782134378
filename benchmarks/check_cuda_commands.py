# SPDX-License-Identifier: Apache-2.0
"""Parts of ``check_cuda.py``: short forms of what users run by themselves."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import yaml
from check_cuda_runner import CheckError, Found, run_command
from rich.console import Console

from vllm_slo.bench.demo_load import GPU_SIZE, SIZES, twin

MOST_OVERHEAD: Final = 2.0
"""Times stock's scheduler. The target is 1.15 (benchmarks/results/scheduler_overhead.md); one short
run on a machine that does other things may be far above it."""
RUNNING: Final = 64


def overhead(cpu: bool) -> Found:
    """Time of the scheduler over stock's, on this machine's CPU."""
    import scheduler_overhead

    ratios = {}
    for load in ("decode", "arrivals"):
        took = scheduler_overhead.run_load(load, RUNNING)
        ratios[load] = took["ours"].p50 / took[scheduler_overhead.STOCK].p50
    text = ", ".join(f"{load} {ratio:.2f} times stock" for load, ratio in ratios.items())
    if max(ratios.values()) > MOST_OVERHEAD:
        raise CheckError(f"{text}; at most {MOST_OVERHEAD:g} is allowed")
    return Found(f"{text}, {RUNNING} requests", ratios)


def profile(cpu: bool) -> Found:
    """``vllm-slo profile``."""
    model = twin(SIZES[0] if cpu else GPU_SIZE, Console(stderr=True))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "profile.yaml"
        words = ["-m", "vllm_slo.cli", "profile", str(model), "--quick", f"--out={out}"]
        size = ["--max-model-len=1024", "--max-num-seqs=32", "--max-num-batched-tokens=1024"]
        run_command([*words, *size, "--gpu-memory-utilization=0.3"], VLLM_CPU_KVCACHE_SPACE="1")
        stored = yaml.safe_load(out.read_text(encoding="utf-8"))
    if not isinstance(stored, dict):
        raise CheckError(f"the profile is empty: {stored}")
    numbers = {key: value for key, value in stored.items() if isinstance(value, int | float | str)}
    return Found(f"a profile is measured and stored, R² {numbers.get('r2', '?')}", numbers)


def demo(cpu: bool) -> Found:
    """``vllm-slo demo``: stock vLLM and vllm-slo on the same arrivals."""
    size, duration_s = (SIZES[0], 8) if cpu else (GPU_SIZE, 30)
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "vllm_slo.cli", "demo", f"--out={folder}", f"--parameters={size:.0f}"]
        printed = run_command([*words, f"--duration={duration_s}"], COLUMNS="200")
    lines = [line for line in printed.splitlines() if "of objectives kept" in line]
    kept = {line.partition(":")[0]: line.partition(":")[2].split()[0] for line in lines}
    if len(kept) != 2:
        raise CheckError("the demo does not tell of two servers; the log has what it printed")
    text = ", ".join(f"{name} keeps {share}" for name, share in kept.items())
    return Found(f"{text} of the objectives, all requests finish", kept)
