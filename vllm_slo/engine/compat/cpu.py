# SPDX-License-Identifier: Apache-2.0
"""What vLLM's attention on CPU needs of torch."""

from __future__ import annotations


def enable_amx() -> None:
    """Ask the kernel for AMX on CPUs that have it.

    vLLM's attention kernels use AMX tiles but leave asking to oneDNN, which a small model may not
    have called before its first attention: the process then dies of an illegal instruction.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
