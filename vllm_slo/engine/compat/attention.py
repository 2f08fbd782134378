# SPDX-License-Identifier: Apache-2.0
"""What attention with trees needs of vLLM's choice of a backend."""

from __future__ import annotations

from vllm.v1.attention import selector


def forget_chosen_backends() -> None:
    """Make vLLM choose attention backends anew.

    It remembers its choice for the process, also from before a backend was replaced.
    """
    selector._cached_get_attn_backend.cache_clear()
