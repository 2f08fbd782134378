# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache manager: how many blocks there are, who holds which, what the cache knows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request


def block_pool(manager: KVCacheManager) -> BlockPool:
    """The pool of all KV blocks, free ones in the order in which they are taken."""
    return manager.block_pool


def total_blocks(manager: KVCacheManager) -> int:
    """KV blocks there are, without the one that vLLM keeps as a placeholder."""
    return int(manager.block_pool.num_gpu_blocks) - 1


def block_sizes(manager: KVCacheManager) -> list[int]:
    """Tokens of a block of each kind of full attention. Bounded caches (sliding window, state) are
    left out: they hold no more as a request grows."""
    return [
        kind.block_size
        for kind in manager.coordinator.single_type_managers
        if isinstance(kind.kv_cache_spec, FullAttentionSpec)
    ]


def held_blocks(manager: KVCacheManager, request_id: str) -> Sequence[Sequence[KVCacheBlock]]:
    """The blocks that a request holds, kind by kind."""
    return manager.get_blocks(request_id).blocks


def held_count(manager: KVCacheManager, request_id: str) -> int:
    """How many blocks of the first kind a request holds."""
    return len(manager.coordinator.single_type_managers[0].req_to_blocks.get(request_id, ()))


def external_tokens(connector: KVConnectorBase_V1, request: Request, local: int) -> int | None:
    """Prompt tokens beyond ``local`` ones whose KV a connector will load; None: it cannot say yet.
    vLLM asks the same whenever it looks at the request."""
    if request.skip_reading_prefix_cache:
        return 0
    return connector.get_num_new_matched_tokens(request, local)[0]


class CachedPrefix(NamedTuple):
    """What the prefix cache holds of a prompt.

    Attributes:
        tokens: how many of its tokens.
        blocks: of one kind of full attention, in order.
    """

    tokens: int
    blocks: Sequence[KVCacheBlock]


def cached_prefix(
    manager: KVCacheManager, kind: int | None, request: Request
) -> CachedPrefix | None:
    """What the prefix cache holds now; None where a request does not look there. ``kind``: as
    `full_attention` said."""
    if not manager.prefix_cache_lookup_enabled(request):
        return None
    blocks, tokens, _ = manager.coordinator.find_longest_cache_hit(
        request.block_hashes, request.num_tokens - 1
    )
    if kind is None:
        return CachedPrefix(int(tokens), ())
    # A block that is filled in part is copied by those that find it, and not shared.
    whole = int(tokens) // manager.coordinator.single_type_managers[kind].block_size
    return CachedPrefix(int(tokens), blocks[kind][:whole])


def growing_blocks(
    manager: KVCacheManager, kind: int | None, request_id: str
) -> Sequence[KVCacheBlock]:
    """The blocks of that kind of full attention that a request holds."""
    if kind is None:
        return ()
    return manager.coordinator.single_type_managers[kind].req_to_blocks.get(request_id, ())


def holders(manager: KVCacheManager) -> Collection[str]:
    """The requests that hold blocks of the first kind."""
    return manager.coordinator.single_type_managers[0].req_to_blocks


def full_attention(manager: KVCacheManager) -> int | None:
    """Number of the first kind of full attention; None: there is none."""
    for number, kind in enumerate(manager.coordinator.single_type_managers):
        if isinstance(kind.kv_cache_spec, FullAttentionSpec):
            return number
    return None
