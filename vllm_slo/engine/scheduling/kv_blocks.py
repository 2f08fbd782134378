# SPDX-License-Identifier: Apache-2.0
"""KV blocks: how many there are, which request holds them, what one needs. Only this reads
vLLM's KV cache manager."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vllm_slo.engine.compat import kv_cache
from vllm_slo.engine.scheduling.slo_request import SLORequest


class KVBlocks:
    """The KV blocks of one engine.

    Args:
        connector: where KV may come from that was computed elsewhere; None: from nowhere.

    Attributes:
        pool: all blocks, for `warm_prefixes`.
        total: KV blocks there are.
        sizes: tokens of a block, by kind of attention that grows with the context.
        caches: whether blocks are found again by their prefix.
    """

    def __init__(
        self, manager: KVCacheManager, connector: KVConnectorBase_V1 | None = None
    ) -> None:
        self._manager = manager
        self._connector = connector
        self.pool = kv_cache.block_pool(manager)
        self.total = kv_cache.total_blocks(manager)
        self.sizes = kv_cache.block_sizes(manager)
        self.caches = bool(manager.enable_caching)

    @property
    def free(self) -> int:
        """Blocks that no request holds."""
        return int(self.pool.get_num_free_blocks())

    def needed(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens fill, never more than there are: a request that vLLM would
        run alone is not refused for memory."""
        blocks = sum(-(-tokens // size) for size in self.sizes)
        return min(blocks, self.total)

    def filled(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens fill to the last slot: those that others can find again."""
        return sum(tokens // size for size in self.sizes)

    def needed_by_each(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n,) `needed` of requests."""
        blocks = sum(-(-tokens // size) for size in self.sizes)
        return np.minimum(blocks, self.total)

    def held(self, request: Request) -> int:
        """Blocks that a request holds."""
        return sum(map(len, kv_cache.held_blocks(self._manager, request.request_id)))

    def spare_slots(self, request: Request, block_size: int) -> int:
        """Tokens for which a request's blocks have room behind its last one."""
        blocks = kv_cache.held_count(self._manager, request.request_id)
        return blocks * block_size - int(request.num_tokens)

    def blocks_of(self, request: Request) -> Sequence[KVCacheBlock]:
        """The blocks that a request holds, in the order of its tokens."""
        held = kv_cache.held_blocks(self._manager, request.request_id)
        return [block for kind in held for block in kind]

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a request without blocks that the prefix cache holds now."""
        return (kv_cache.cached_tokens(self._manager, request) or 0) if self.caches else 0

    def look_up_prefix(self, tracked: SLORequest) -> None:
        """Note how much of a prompt that has not started the prefix cache holds now, or a connector
        will load. A connector is asked until it knows, and no more: it may ask others."""
        if tracked.request.num_computed_tokens:
            return
        local = kv_cache.cached_tokens(self._manager, tracked.request)
        if self._connector is not None and tracked.loaded_tokens is None:
            known = local or 0
            external = kv_cache.external_tokens(self._connector, tracked.request, known)
            tracked.loaded_tokens = None if external is None else known + external
        if local is not None or tracked.loaded_tokens:
            tracked.cached_tokens = max(local or 0, tracked.loaded_tokens or 0)
