# SPDX-License-Identifier: Apache-2.0
"""vLLM's workers with the tree runner: ``--worker-cls vllm_slo.engine.worker.TreeWorker``."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from vllm_slo.config import SLOConfig
from vllm_slo.engine import model_runner
from vllm_slo.engine.draft_check import check_draft
from vllm_slo.errors import ConfigError

logger = init_logger(__name__)

_BACKENDS = {
    AttentionBackendEnum.CPU_ATTN: "vllm_slo.engine.tree_attention.cpu.TreeCPUBackend",
    AttentionBackendEnum.TRITON_ATTN: "vllm_slo.engine.tree_attention.cuda.TreeCUDABackend",
}


def register_backends() -> None:
    """Put the attention backends that verify trees in the place of vLLM's.

    They are vLLM's own for a step without trees. vLLM remembers its choice, so an engine that ran
    in this process before is made to forget it.
    """
    for name, path in _BACKENDS.items():
        register_backend(name, path)
    selector._cached_get_attn_backend.cache_clear()


def refuse_what_fails(vllm_config: VllmConfig) -> None:
    """Refuse, before any weights are loaded, what trees cannot be served with.

    Raises:
        ConfigError: one line, also in the log: vLLM shows only tracebacks of what a worker raises.
    """
    config = SLOConfig.from_additional_config(vllm_config.additional_config).speculation
    try:
        check_draft(vllm_config, config)
    except ConfigError as error:
        logger.critical("vllm-slo: error: %s", error)
        raise


class CPUTreeWorker(CPUWorker):
    """vLLM's CPU worker with trees."""

    def init_device(self) -> None:
        refuse_what_fails(self.vllm_config)
        super().init_device()
        register_backends()
        self.model_runner = model_runner.CPUTreeRunner(self.vllm_config, self.device)


class CUDATreeWorker(GPUWorker):
    """vLLM's CUDA worker with trees."""

    def init_device(self) -> None:
        refuse_what_fails(self.vllm_config)
        register_backends()
        super().init_device()

    def _make_model_runner(self) -> Any:
        return model_runner.CUDATreeRunner(self.vllm_config, self.device)


TreeWorker = CPUTreeWorker if current_platform.is_cpu() else CUDATreeWorker
"""The worker of this platform."""
