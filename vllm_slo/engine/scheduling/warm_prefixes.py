# SPDX-License-Identifier: Apache-2.0
"""Keeps the KV of a session's rounds in the prefix cache while its tools run.

Blocks that a request has left are free, and vLLM evicts the free block that was used longest ago.
Those of a session are used again now and then, before it would be their turn: so all others go
first. A promise may take any of them. Best effort starts in the other blocks, as long as it is not
starved: a job that has kept its objectives so far would lose them for want of its prefix.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any, TypeAlias

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_slo.core.sessions.rounds import Key

Held: TypeAlias = list[tuple[KVCacheBlock, Any]]
"""Blocks of a prefix in order, each with the hash by which it is found."""

COST = 8
"""Warm blocks that may be used again, or counted, for each block that is taken, on average."""
MOST_SHARED = 2
"""How often a warm block may be part of a prefix, on average: a limit of the time that counting
takes where sessions begin with the same text."""


class WarmPrefixes:
    """The prefixes of sessions that wait for their next round.

    Args:
        pool: all blocks.
        most: blocks that are kept warm at most while no request holds them; then the session that
            is quiet the longest goes.
    """

    def __init__(self, pool: BlockPool, most: int) -> None:
        self._pool = pool
        self._most = most
        self._held: OrderedDict[Key, Held] = OrderedDict()
        self._entries = 0
        self._sessions: Counter[int] = Counter()
        self._free = 0
        self._free_of: dict[Key, int] = {}
        self._counted_at = 0
        self._used = 0.0
        self._ahead = 0

    def free_blocks(self) -> int:
        """Warm blocks that no request holds. They are counted again when the pool has changed by an
        eighth of them."""
        if not self._held:
            return 0
        moved = abs(self._pool.get_num_free_blocks() - self._counted_at)
        if moved >= max(self._entries / COST, 1):
            self._recount()
        return self._free

    def free_of(self, key: Key) -> int:
        """Of the prefix of one session, the warm blocks that no request holds."""
        self.free_blocks()
        if key not in self._free_of:
            held = _still_there(self._held.get(key, []))
            self._free_of[key] = sum(block.ref_cnt == 0 for block, _ in held)
        return self._free_of[key]

    def _recount(self) -> None:
        self._counted_at = self._pool.get_num_free_blocks()
        self._free_of.clear()
        numbers = {
            block.block_id
            for held in self._held.values()
            for block, known in held
            if block.ref_cnt == 0 and block.block_hash == known
        }
        self._free = len(numbers)

    def keep(self, key: Key, blocks: Iterable[KVCacheBlock]) -> None:
        """A round has ended that held these blocks; only full ones can be found again."""
        self.drop(key)
        held = [(block, block.block_hash) for block in blocks if block.block_hash is not None]
        if not 0 < len(held) <= self._most:
            return
        self._held[key] = held
        self._entries += len(held)
        for block, _ in held:
            self._free += not self._sessions[block.block_id] and block.ref_cnt == 0
            self._sessions[block.block_id] += 1
        while self._free > self._most or self._entries > MOST_SHARED * self._most:
            self.drop(next(iter(self._held)))

    def drop(self, key: Key) -> None:
        """Whatever is held for a session is like any other free block again."""
        self._forget(self._held.pop(key, []))
        self._free_of.pop(key, None)

    def _forget(self, held: Held) -> None:
        self._entries -= len(held)
        for block, known in held:
            self._sessions[block.block_id] -= 1
            if not self._sessions[block.block_id]:
                del self._sessions[block.block_id]
                self._free -= block.ref_cnt == 0 and block.block_hash == known
        self._free = max(self._free, 0)

    def used(self, blocks: float) -> None:
        """So many blocks were taken from the pool since the last call.

        Half of those that would go before a warm one may go until all warm ones are used again;
        with little free memory more, since that costs time for each of them.
        """
        if not self._held:
            return
        self._used += blocks
        if self._used >= max(self._ahead / 2, self._entries / COST):
            self._refresh()

    def _refresh(self) -> None:
        """Make these blocks those that were used last; forget what is gone."""
        self._used, touched = 0.0, set[int]()
        for key, known in list(self._held.items()):
            # The end of a prefix is evicted first: keep what is still there of its beginning.
            held = _still_there(known)
            self._forget(known[len(held) :])
            self._held[key] = held
            if not held:
                del self._held[key]
            cold = [b for b, _ in held if b.ref_cnt == 0 and b.block_id not in touched]
            touched.update(block.block_id for block in cold)
            self._pool.touch(cold)
            self._pool.free_blocks(reversed(cold))
        self._recount()
        self._ahead = max(self._pool.get_num_free_blocks() - self._free, 0)


def _still_there(held: Held) -> Held:
    kept: Held = []
    for block, known in held:
        if block.block_hash != known:
            break
        kept.append((block, known))
    return kept
