# SPDX-License-Identifier: Apache-2.0
"""What the workers of all platforms do before they load a model."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_slo.config.model import SLOConfig
from vllm_slo.engine.compat.attention import forget_chosen_backends
from vllm_slo.engine.compat.probe import check
from vllm_slo.engine.compat.seams import TREES
from vllm_slo.engine.speculation.draft_check import check_draft, refuse
from vllm_slo.errors import VllmSLOError

_BACKENDS = {
    AttentionBackendEnum.CPU_ATTN: "vllm_slo.engine.worker.tree_attention.cpu.TreeCPUBackend",
    AttentionBackendEnum.TRITON_ATTN: "vllm_slo.engine.worker.tree_attention.cuda.TreeCUDABackend",
}


def register_backends() -> None:
    """Replace vLLM's attention backends by those that verify trees.

    A step without trees runs as in vLLM's own.
    """
    for name, path in _BACKENDS.items():
        register_backend(name, path)
    forget_chosen_backends()


def refuse_what_fails(vllm_config: VllmConfig, *subclasses: type) -> None:
    """Refuse, before any weights are loaded, what trees cannot be served with.

    Args:
        subclasses: the worker and the runner with trees.

    Raises:
        ConfigError, IncompatibleVLLMError: one line, also in the log.
    """
    try:
        check(TREES, subclasses)
        config = SLOConfig.from_additional_config(vllm_config.additional_config).speculation
        check_draft(vllm_config, config)
    except VllmSLOError as error:
        refuse(error)
