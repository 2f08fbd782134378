# SPDX-License-Identifier: Apache-2.0
"""Keeps the KV of a session's rounds in the prefix cache while its tools run.

Blocks that a request has left are free, and vLLM evicts the free block that was used longest ago.
Those of a session are used again now and then, before it would be their turn: so all others go
first. A promise may take any of them. Best effort starts in the other blocks, as long as it is not
starved: a job that has kept its objectives so far would lose them for want of its prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_slo.core.sessions.rounds import Key

Held: TypeAlias = list[tuple[KVCacheBlock, Any]]
"""Blocks of a prefix in order, each with the hash by which it is found."""

COST = 8
"""Warm blocks that may be used again, or counted, for each block that is taken, on average."""


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
        self._used = 0.0
        self._ahead = 0
        self._blocks = 0
        self._count: _Count | None = None
        self._used_since_count = 0.0

    def free_blocks(self) -> int:
        """Warm blocks that no request holds."""
        return self._counted().free

    def free_of(self, key: Key) -> int:
        """Of the prefix of one session, the warm blocks that no request holds."""
        return self._counted().by_session.get(key, 0)

    def _counted(self) -> _Count:
        """What is free; counted anew when prefixes change, and when others may have taken some."""
        if self._count is None or self._used_since_count >= self._blocks / COST:
            self._used_since_count = 0.0
            self._count = _free(self._held)
        return self._count

    def keep(self, key: Key, blocks: Iterable[KVCacheBlock]) -> None:
        """A round has ended that held these blocks; only full ones can be found again."""
        self.drop(key)
        held = [(block, block.block_hash) for block in blocks if block.block_hash is not None]
        if not 0 < len(held) <= self._most:
            return
        self._held[key] = held
        self._blocks += len(held)
        while self.free_blocks() > self._most:
            self.drop(next(iter(self._held)))

    def drop(self, key: Key) -> None:
        """Whatever is held for a session is like any other free block again."""
        self._blocks -= len(self._held.pop(key, ()))
        self._count = None

    def used(self, blocks: float) -> None:
        """So many blocks were taken from the pool since the last call.

        Half of those that would go before a warm one may go until all warm ones are used again;
        with little free memory more, since that costs time for each of them.
        """
        if not self._held:
            return
        self._used += blocks
        self._used_since_count += blocks
        if self._used >= max(self._ahead / 2, self._blocks / COST):
            self.refresh()

    def refresh(self) -> None:
        """Make these blocks those that were used last; forget what is gone."""
        self._used, self._count = 0.0, None
        for key, known in list(self._held.items()):
            # The end of a prefix is evicted first: keep what is still there of its beginning.
            held = _still_there(known)
            self._blocks -= len(known) - len(held)
            self._held[key] = held
            if not held:
                del self._held[key]
            free = [block for block, _ in held if block.ref_cnt == 0]
            self._pool.touch(free)
            self._pool.free_blocks(reversed(free))
        self._ahead = max(self._pool.get_num_free_blocks() - self.free_blocks(), 0)


class _Count(NamedTuple):
    """Warm blocks that no request holds: all of them, and those of each session. A block that
    several sessions share counts once in the first."""

    free: int
    by_session: Mapping[Key, int]


def _free(held: Mapping[Key, Held]) -> _Count:
    numbers: set[int] = set()
    by_session: dict[Key, int] = {}
    for key, prefix in held.items():
        own = [block.block_id for block, _ in _still_there(prefix) if block.ref_cnt == 0]
        by_session[key] = len(own)
        numbers.update(own)
    return _Count(len(numbers), by_session)


def _still_there(held: Held) -> Held:
    kept: Held = []
    for block, known in held:
        if block.block_hash != known:
            break
        kept.append((block, known))
    return kept
