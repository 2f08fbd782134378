# SPDX-License-Identifier: Apache-2.0
"""KV blocks: how many there are, which request holds them, what one needs. Only this reads
vLLM's KV cache manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import takewhile
from typing import Final

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vllm_slo.engine.compat import kv_cache
from vllm_slo.engine.scheduling.slo_request import SharedPrefix, SLORequest

FEW: Final = 64
"""Requests that have ended and whose shared prefixes may still be remembered: a limit of memory."""


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
        self._kind = kv_cache.full_attention(manager)
        self._shared: dict[tuple[str, int], SharedPrefix] = {}

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

    def freed_in_turn(
        self, requests: Sequence[Request], kept: Container[int] = frozenset()
    ) -> list[int]:
        """(n,) KV blocks that become free with each running request if these are preempted in this
        order. A block that several requests hold becomes free with the last of them.

        ``kept``: numbers of blocks that do not become free, since a request is about to use them.
        """
        gone: Counter[int] = Counter()
        freed = []
        for request in requests:
            blocks = kv_cache.growing_blocks(self._manager, self._kind, request.request_id)
            shared = list(takewhile(lambda b: b.ref_cnt > 1 or b.block_id in kept, blocks))
            gone.update(block.block_id for block in shared)
            stay = sum(b.block_id in kept or gone[b.block_id] < b.ref_cnt for b in shared)
            freed.append(self.held(request) - (self.filled(stay * self.sizes[0]) if stay else 0))
        return freed

    def shared_prefix(self, request: Request) -> SharedPrefix | None:
        """The longest prefix that a running request has shared with others since it started. It
        stays the same when the others end."""
        if not self.caches:
            return None
        name = request.request_id, request.num_preemptions
        known = self._shared.get(name)
        number = len(known.blocks) if known else 0
        blocks = kv_cache.growing_blocks(self._manager, self._kind, request.request_id)
        if number < len(blocks) and blocks[number].ref_cnt > 1:
            holding = kv_cache.holders(self._manager)
            if len(self._shared) > 2 * len(holding) + FEW:
                self._shared = {key: p for key, p in self._shared.items() if key[0] in holding}
            more = self._in_use(blocks[number:], holders=2)
            known = self._shared[name] = self._prefix([*blocks[:number], *more])
        return known

    @staticmethod
    def _in_use(blocks: Iterable[KVCacheBlock], holders: int) -> list[KVCacheBlock]:
        """The first of ``blocks`` that at least so many requests hold."""
        return list(takewhile(lambda block: block.ref_cnt >= holders, blocks))

    def _prefix(self, blocks: Sequence[KVCacheBlock]) -> SharedPrefix:
        return SharedPrefix(tuple([b.block_id for b in blocks]), len(blocks) * self.sizes[0])

    def distinct(self, prefixes: Iterable[SharedPrefix | None]) -> int:
        """KV blocks of all these prefixes together. A block of several prefixes counts once."""
        numbers: set[int] = set()
        for prefix in prefixes:
            if prefix is not None and prefix.blocks[-1] not in numbers:
                numbers.update(prefix.blocks)
        return self.filled(len(numbers) * self.sizes[0]) if numbers else 0

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a request without blocks that the prefix cache holds now."""
        cached = self._cached(request)
        return cached.tokens if cached else 0

    def present_blocks(self, request: Request, own: int) -> int:
        """Blocks of a request without blocks that need not be allocated.

        Running requests hold them. Of the blocks that follow in its prefix, ``own`` count as well.
        """
        cached = self._cached(request)
        if not cached or not cached.blocks:
            return 0
        shared = len(self._in_use(cached.blocks, holders=1))
        number = min(shared + own, len(cached.blocks))
        return self.filled(number * self.sizes[0])

    def is_held_by(self, request: Request, prefix: SharedPrefix) -> bool:
        """Whether a running request holds all blocks of a prefix."""
        blocks = kv_cache.growing_blocks(self._manager, self._kind, request.request_id)
        last = len(prefix.blocks) - 1
        return len(blocks) > last and blocks[last].block_id == prefix.blocks[last]

    def _cached(self, request: Request) -> kv_cache.CachedPrefix | None:
        if not self.caches:
            return None
        return kv_cache.cached_prefix(self._manager, self._kind, request)

    def look_up_prefix(self, tracked: SLORequest) -> None:
        """Note how much of a prompt that has not started the prefix cache holds now, or a connector
        will load, and how much of it running requests hold. A connector is asked until it knows,
        and no more: it may ask others."""
        if tracked.request.num_computed_tokens:
            return
        cached = self._cached(tracked.request)
        local = cached.tokens if cached else None
        shared = self._in_use(cached.blocks, holders=1) if cached else []
        tracked.shared_prefix = self._prefix(shared) if shared else None
        if self._connector is not None and tracked.loaded_tokens is None:
            known = local or 0
            external = kv_cache.external_tokens(self._connector, tracked.request, known)
            tracked.loaded_tokens = None if external is None else known + external
        if local is not None or tracked.loaded_tokens:
            tracked.cached_tokens = max(local or 0, tracked.loaded_tokens or 0)
