# SPDX-License-Identifier: Apache-2.0
"""Each platform loads its own worker, and nothing of another platform's."""

from __future__ import annotations

import re
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
SHM = "vllm.v1.worker.cpu.shm"
"""What replaces functions of ``torch.cuda``."""
CPU_ONLY = re.compile(
    r"vllm\.v1\.(worker|attention\.backends)\.cpu.*|vllm_slo\.engine\.worker\.(.*\.)?cpu"
)
"""Modules of one platform. `vllm.platforms.cpu` finds out which one this is, and may be there."""
CUDA_WORKER = """
import torch
from importlib import import_module
from vllm_slo.engine.serving import plugin
asked = []
torch.cpu._is_amx_tile_supported = lambda: True
torch.cpu._init_amx = lambda: asked.append("AMX")
plugin.register()
from vllm_slo.engine.worker import TreeWorker
from vllm_slo.engine.worker.cuda import CUDATreeWorker
assert TreeWorker is CUDATreeWorker
assert not asked
for name in ("proposers", "worker.model_runner", "worker.setup", "worker.tree_sampling",
             "worker.proposers.warm_up", "worker.tree_attention.cuda"):
    import_module("vllm_slo.engine." + name)
print(TreeWorker.__name__)
"""
"""All that a worker of a server with trees loads: the plugin, the worker, what flags name."""


def loaded(code: str) -> tuple[str, set[str]]:
    """What a process of its own prints, and which modules for CPU it has loaded."""
    report = "import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *_, printed, modules = done.stdout.splitlines()
    return printed, {name for name in modules.split() if CPU_ONLY.fullmatch(name)}


@pytest.mark.slow
def test_the_cuda_worker_loads_nothing_of_the_cpu_worker() -> None:
    """vLLM's CPU worker replaces functions of ``torch.cuda`` for the whole process. Nor does the
    plugin ask for anything of a CPU there."""
    assert loaded(NO_CPU + CUDA_WORKER) == ("CUDATreeWorker", set())


@pytest.mark.slow
def test_the_cpu_worker_is_found_to_be_loaded() -> None:
    """The test above would see it."""
    code = (
        "import sys; from vllm_slo.engine.worker.cpu import CPUTreeWorker as W; print(W.__name__)"
    )
    name, modules = loaded(code)
    assert name == "CPUTreeWorker"
    assert modules >= {SHM, "vllm.v1.worker.cpu_worker", "vllm_slo.engine.worker.cpu"}


@pytest.mark.versions
def test_a_cuda_worker_that_has_made_a_runner_gets_the_one_with_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.31 makes its runner in ``init_device``; 0.32 asks ``_make_model_runner`` for one."""
    from vllm_slo.engine.worker import cuda

    made = object.__new__(cuda.TreeRunner)
    monkeypatch.setattr(cuda, "refuse_what_fails", lambda *_: None)
    monkeypatch.setattr(cuda, "register_backends", lambda: None)
    monkeypatch.setattr(cuda.CUDATreeWorker, "_make_model_runner", lambda _: made)
    for theirs in (object(), made):
        monkeypatch.setattr(
            cuda.GPUWorker,
            "init_device",
            lambda worker, runner=theirs: setattr(worker, "model_runner", runner),
        )
        worker = object.__new__(cuda.CUDATreeWorker)
        worker.vllm_config = None
        worker.init_device()
        assert worker.model_runner is made
