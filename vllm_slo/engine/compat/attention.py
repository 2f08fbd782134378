# SPDX-License-Identifier: Apache-2.0
"""What attention needs: vLLM's choice of a backend, and AMX of torch."""

from __future__ import annotations


def forget_chosen_backends() -> None:
    """Make vLLM choose attention backends anew.

    It remembers its choice for the process, also from before a backend was replaced.
    """
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()


def enable_amx(_module: object = None) -> None:
    """Ask the kernel for AMX on CPUs that have it.

    Called when vLLM imports its CPU worker; ``_module`` is that module.

    vLLM's attention kernels use AMX tiles but leave asking to oneDNN, which a small model may not
    have called before its first attention: the process then dies of an illegal instruction.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
