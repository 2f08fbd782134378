# SPDX-License-Identifier: Apache-2.0
"""Parts of ``check_cuda.py``: short forms of what users run by themselves."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

from check_cuda_runner import CheckError, Found, run_command
from rich.console import Console

from vllm_slo.bench.demo_load import GPU_SIZE, SIZES, twin
from vllm_slo.config import profiles

MOST_OVERHEAD: Final = {"decode": 1.5, "arrivals": 2.5}
"""Load -> times stock's scheduler. The targets and what is measured on a machine that does nothing
else are in benchmarks/results/scheduler_overhead.md. One short run beside other work may be above
that; without compiled policies it is far above these bounds."""
RUNNING: Final = 64


def overhead(cpu: bool) -> Found:
    """Time of the scheduler over stock's, on this machine's CPU."""
    import scheduler_overhead

    ratios = {}
    for load in MOST_OVERHEAD:
        took = scheduler_overhead.run_load(load, RUNNING)
        ratios[load] = took["ours"].p50 / took[scheduler_overhead.STOCK].p50
    text = ", ".join(f"{load} {ratio:.2f} times stock" for load, ratio in ratios.items())
    above = [load for load, most in MOST_OVERHEAD.items() if ratios[load] > most]
    if above:
        allowed = ", ".join(f"at most {MOST_OVERHEAD[load]:g} for {load}" for load in above)
        raise CheckError(f"{text}; allowed: {allowed}")
    return Found(f"{text}, {RUNNING} requests", ratios)


def profile(cpu: bool) -> Found:
    """``vllm-slo profile``."""
    model = twin(SIZES[0] if cpu else GPU_SIZE, Console(stderr=True))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "profile.yaml"
        words = ["-m", "vllm_slo.cli", "profile", str(model), "--quick", f"--json={out}"]
        size = ["--max-model-len=1024", "--max-num-seqs=32", "--max-num-batched-tokens=1024"]
        run_command([*words, *size, "--gpu-memory-utilization=0.3"], VLLM_CPU_KVCACHE_SPACE="1")
        report = profiles.load(out)
    text = f"a profile of {len(report.samples)} kinds of steps, R² {report.fit.r2:.3f}"
    return Found(text, {"r2": report.fit.r2, "model": report.model.to_dict()})


def demo(cpu: bool) -> Found:
    """``vllm-slo demo``: stock vLLM and vllm-slo on the same arrivals."""
    size, duration_s = (SIZES[0], 8) if cpu else (GPU_SIZE, 30)
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "vllm_slo.cli", "demo", f"--out={folder}", f"--parameters={size:.0f}"]
        run_command([*words, f"--duration={duration_s}"])
        return found_in_demo(json.loads((Path(folder) / "demo.json").read_text(encoding="utf-8")))


def found_in_demo(told: dict[str, Any]) -> Found:
    """What ``demo.json`` says of its two servers.

    Raises:
        CheckError: there are not two, or a request did not finish.
    """
    totals = {server["name"]: server["total"] for server in told["servers"]}
    if len(totals) != 2:
        raise CheckError(f"the demo tells of {', '.join(totals) or 'no server'}, not of two")
    for name, total in totals.items():
        if total["finished"] < total["n"]:
            raise CheckError(f"{name}: {total['finished']} of {total['n']} requests finished")
    kept = {name: total["attainment"] for name, total in totals.items()}
    text = ", ".join(f"{name} keeps {share:.0%}" for name, share in kept.items())
    return Found(f"{text} of the objectives, all requests finish", kept)
