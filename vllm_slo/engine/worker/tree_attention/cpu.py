# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention with trees."""

from __future__ import annotations

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from vllm_slo.engine.worker.tree_attention.path_rows import with_path_rows

TreeCPUBackend = with_path_rows(CPUAttentionBackend)
