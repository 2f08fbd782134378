# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention with trees: a step that has one runs ``cuda_kernel.tree_attention``.

The model runner attaches a ``TreePlan`` to the step's attention metadata as ``tree``. Steps without
one are the stock backend's own. Can be imported where there is neither Triton nor a GPU.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from vllm_slo.engine.worker.tree_attention.cuda_kernel import (
    MAX_TREE_TOKENS,
    tilings,
    tree_attention,
)
from vllm_slo.engine.worker.tree_attention.path_rows import with_path_rows


class TreePlan(Protocol):
    """The trees of one step, with T tokens and R requests.

    Attributes:
        ancestors: int64 [T], on the device: which of its request's tokens of this step each token
            of a tree sees, itself included, as bits.
        is_tree: bool or int32 [R], on the device; the other requests are causal.
        max_tree: tokens of the largest tree, root included.
    """

    ancestors: torch.Tensor
    is_tree: torch.Tensor
    max_tree: int


class TritonTreeMetadataBuilder(TritonAttentionMetadataBuilder):
    """Builds the stock metadata, to which a ``TreePlan`` may be attached.

    A captured graph would replay the causal kernel for a tree. Single-token decodes have no tree:
    only their steps may be captured whole; others run attention eagerly between the pieces.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )


class TritonTreeImpl(TritonAttentionImpl):
    """One attention layer, with trees.

    ``tree_head_sizes``: the smallest and the largest that the kernel takes.
    """

    tree_head_sizes: ClassVar[tuple[int, int]] = (32, 256)

    def warm_up_trees(self, kv_cache: torch.Tensor, block_table: torch.Tensor) -> None:
        """Compile the kernel in every form that a step with trees can choose.

        Args:
            kv_cache: of this layer, as ``forward`` gets it.
            block_table: int32 [requests, columns].
        """
        device, dtype = kv_cache.device, kv_cache.dtype
        table, ones = block_table[:1], torch.ones(1, dtype=torch.int32, device=device)
        # A slice of the fused projection, as models have it.
        fused = torch.zeros(
            1, self.num_heads + 2 * self.num_kv_heads, self.head_size, dtype=dtype, device=device
        )
        query = fused[:, : self.num_heads]
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        starts = torch.arange(2, dtype=torch.int32, device=device)
        for tiling in tilings(self.num_heads, self.num_kv_heads, self.head_size, dtype):
            tree_attention(
                query,
                key_cache,
                value_cache,
                torch.empty_like(query, memory_format=torch.contiguous_format),
                starts,
                ones,
                table,
                ones.long(),
                ones.bool(),
                scale=self.scale,
                max_query_len=1,
                max_seq_len=1,
                softcap=self.logits_soft_cap,
                tiling=tiling,
            )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the stock ``forward``, shapes included, but for a step whose metadata has a tree.

        Raises:
            NotImplementedError: the step has a tree and a feature that does not work with trees.
                No engine that has passed `draft_check` makes such a step.
        """
        tree: TreePlan | None = getattr(attn_metadata, "tree", None)
        if tree is None:
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        refusal = _refusal(tree, attn_metadata)
        if refusal:
            raise NotImplementedError(f"token trees do not work with {refusal}")
        tokens = attn_metadata.num_actual_tokens
        # [num_blocks, Hkv, block_size, K and V] as the stock backend receives it.
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        tree_attention(
            query[:tokens],
            key_cache,
            value_cache,
            output[:tokens],
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            tree.ancestors,
            tree.is_tree,
            scale=self.scale,
            max_query_len=attn_metadata.max_query_len,
            max_seq_len=attn_metadata.max_seq_len,
            softcap=self.logits_soft_cap,
        )
        return output


class TritonTreeBackend(TritonAttentionBackend):
    """Replaces ``TRITON_ATTN``, whose name and KV cache layout it keeps."""

    takes_masks: ClassVar[bool] = True

    @staticmethod
    def get_impl_cls() -> type[TritonTreeImpl]:
        return TritonTreeImpl

    @staticmethod
    def get_builder_cls() -> type[TritonTreeMetadataBuilder]:
        return TritonTreeMetadataBuilder


TreeCUDABackend = with_path_rows(TritonTreeBackend)
"""The backend of an engine with trees: masks to verify them, path rows for the draft's beam."""


def _refusal(tree: TreePlan, metadata: TritonAttentionMetadata) -> str | None:
    """The feature of this step that does not work with trees; None if there is none."""
    if tree.max_tree > MAX_TREE_TOKENS:
        return f"more than {MAX_TREE_TOKENS} tokens in one tree ({tree.max_tree} given)"
    if metadata.causal is not True:
        return "attention that is not causal"
    if metadata.mm_prefix_range is not None:
        return "bidirectional attention to images"
    if metadata.rswa_prefix_lens is not None:
        return "a sliding window behind a global prefix"
    return None
