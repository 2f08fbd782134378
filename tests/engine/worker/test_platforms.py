# SPDX-License-Identifier: Apache-2.0
"""Each platform loads its own worker, and nothing of another platform's."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("vllm")

NO_CPU = """
import sys
from vllm.platforms import current_platform
type(current_platform).is_cpu = lambda _: False
"""
"""A platform that is not CPU. It does not say that it is CUDA: this vLLM may lack those kernels."""
CPU_ONLY = ("vllm.v1.worker.cpu.shm", "vllm.v1.worker.cpu_worker", "vllm_slo.engine.worker.cpu")


def loaded(code: str) -> tuple[str, set[str]]:
    """What a process of its own prints, and which of vLLM's CPU modules it has loaded."""
    report = f"print(*[name for name in {CPU_ONLY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *_, printed, modules = done.stdout.splitlines()
    return printed, set(modules.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "from vllm_slo.engine.worker import TreeWorker; print(TreeWorker.__name__)",
        "from vllm_slo.engine.worker.cuda import CUDATreeWorker as W; print(W.__name__)",
    ],
)
def test_the_cuda_worker_loads_nothing_of_the_cpu_worker(code: str) -> None:
    """vLLM's CPU worker replaces functions of ``torch.cuda`` for the whole process."""
    assert loaded(NO_CPU + code) == ("CUDATreeWorker", set())


@pytest.mark.slow
def test_the_cpu_worker_is_found_to_be_loaded() -> None:
    """The test above would see it."""
    code = (
        "import sys; from vllm_slo.engine.worker.cpu import CPUTreeWorker as W; print(W.__name__)"
    )
    assert loaded(code) == ("CPUTreeWorker", set(CPU_ONLY))
