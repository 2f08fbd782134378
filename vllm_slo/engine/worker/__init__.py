# SPDX-License-Identifier: Apache-2.0
"""vLLM's workers with the tree runner: ``--worker-cls vllm_slo.engine.worker.TreeWorker``.

`TreeWorker` is `CPUTreeWorker` or `CUDATreeWorker`, whichever this platform needs. They are loaded
on first use: vLLM's CPU worker replaces functions of `torch.cuda` for the whole process, so it must
not be imported where CUDA is the platform.
"""

from importlib import import_module
from typing import Any

from vllm_slo.engine.compat.probe import imports

_HOME_OF = {
    "CPUTreeWorker": "vllm_slo.engine.worker.cpu",
    "CUDATreeWorker": "vllm_slo.engine.worker.cuda",
}


def __getattr__(name: str) -> Any:
    """Load a worker from the module of its platform.

    Raises:
        AttributeError: no worker has this name.
        IncompatibleVLLMError: this vLLM lacks a name that is imported.
    """
    if name == "TreeWorker":
        from vllm.platforms import current_platform

        name = "CPUTreeWorker" if current_platform.is_cpu() else "CUDATreeWorker"
    if name not in _HOME_OF:
        raise AttributeError(f"module 'vllm_slo.engine.worker' has no attribute {name!r}")
    with imports():
        return getattr(import_module(_HOME_OF[name]), name)
