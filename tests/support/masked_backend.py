# SPDX-License-Identifier: Apache-2.0
"""A CPU backend that takes tree masks, dense and in plain torch.

It stands in for the GPU's, so that what the runner tells a masking kernel is tested without one.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_slo.engine.worker.tree_attention.path_rows import MASKS, with_path_rows


class MaskedImpl(CPUAttentionBackendImpl):
    """Keys and values lie side by side in [block, head, slot, 2 * size]."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        size = kv_cache.shape[2]
        block, slot = slot_mapping // size, slot_mapping % size
        kv_cache[block, :, slot] = torch.cat((key, value), dim=-1)[: len(slot_mapping)]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if attn_metadata is None:
            return output
        tree = getattr(attn_metadata, MASKS, None)
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        for i, length in enumerate(lengths):
            first, end = starts[i], starts[i + 1]
            blocks = attn_metadata.block_table[i, : -(-length // kv_cache.shape[2])]
            seen = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length]
            keys, values = seen.split(self.head_size, dim=-1)
            new = end - first
            visible = torch.ones(new, length, dtype=torch.bool).tril(length - new)
            if tree is not None and tree.is_tree[i]:
                bits = torch.arange(new)
                visible[:, length - new :] = (tree.ancestors[first:end, None] >> bits) & 1 == 1
            group = self.num_heads // self.num_kv_heads
            output[first:end] = torch.nn.functional.scaled_dot_product_attention(
                query[first:end].transpose(0, 1),
                keys.transpose(0, 1).repeat_interleave(group, dim=0),
                values.transpose(0, 1).repeat_interleave(group, dim=0),
                attn_mask=visible,
                scale=self.scale,
            ).transpose(0, 1)
        return output


class MaskedBackend(CPUAttentionBackend):
    """CPU_ATTN with masks."""

    takes_masks: ClassVar[bool] = True

    @staticmethod
    def get_impl_cls() -> type[MaskedImpl]:
        return MaskedImpl


TreeMaskedBackend = with_path_rows(MaskedBackend)
