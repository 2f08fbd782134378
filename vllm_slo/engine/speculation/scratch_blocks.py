# SPDX-License-Identifier: Apache-2.0
"""The size of the scratch blocks in which the worker keeps paths of trees."""

from __future__ import annotations

__all__ = ["scratch_blocks_per_row"]


def scratch_blocks_per_row(block_size: int, max_depth: int) -> int:
    """KV blocks that always hold the tokens of a partly filled block, a root and ``max_depth``
    nodes.

    Args:
        block_size: tokens per block.
        max_depth: depth of the deepest tree.
    """
    return -(-(block_size + max_depth) // block_size)
