# SPDX-License-Identifier: Apache-2.0
"""How paged attention verifies the trees of a batch: as masks, or as rows of a causal kernel.

A kernel that takes masks gets one word for each token. For any other kernel, the root and the
leading chain of a tree are an ordinary row of the batch. Each other leaf becomes an extra row. It
shares the whole blocks of its request's context. The rest of the context, which lies in a partly
filled block, and the path lie in scratch blocks. A causal mask over such a row is exactly the
tree's mask. Every token is a query in one row only, so no query is computed twice. The extra rows
cost reading the context again and writing their paths twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.arrays import Bools, Ints
from vllm_slo.core.speculation.token_tree import ancestors, depths, path_rows


@dataclass(frozen=True, slots=True)
class TreeSlot:
    """Where one request's tree lies in the batch.

    Attributes:
        index: the request's place in the batch.
        first: its root's place among the tokens of the batch; its nodes follow.
        context: KV tokens before the root.
        parents: parent of each node, -1 for the root, path by path as ``arrange_trees`` orders
            them.
    """

    index: int
    first: int
    context: int
    parents: Sequence[int]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A batch as rows of a causal kernel.

    Attributes:
        owner: request whose block table each row starts from, [rows].
        query_start: where each row's queries begin, [rows + 1].
        seq_lens: KV tokens of each row with its queries, [rows].
        table: (row, column, block): what the extra rows' block tables hold instead, [x, 3].
        copies: partly filled blocks, and the first block of each extra row that they are copied
            to, [2, y].
        sources: tokens whose keys and values are written once more, [z].
        slots: the slots where they are written, [z].
        paths: (request, path as nodes, first scratch block) of each extra row.
    """

    owner: Ints
    query_start: Ints
    seq_lens: Ints
    table: Ints
    copies: Ints
    sources: Ints
    slots: Ints
    paths: list[tuple[int, tuple[int, ...], int]]


class _Rows:
    """The plan while rows are added; scratch blocks are handed out in order."""

    def __init__(self, block_size: int, scratch: Ints, blocks_per_row: int) -> None:
        self.block_size = block_size
        self.scratch = scratch
        self.blocks_per_row = blocks_per_row
        self.taken = 0
        self.owner: list[int] = []
        self.lengths: list[int] = []
        self.seq_lens: list[int] = []
        self.paths: list[tuple[int, tuple[int, ...], int]] = []
        self.table: list[tuple[int, int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.sources: list[int] = []
        self.slots: list[int] = []

    def add(self, owner: int, queries: int, seq_len: int) -> None:
        """A row whose queries are the next tokens of the batch."""
        self.owner.append(owner)
        self.lengths.append(queries)
        self.seq_lens.append(seq_len)

    def add_path(
        self, slot: TreeSlot, path: Sequence[int], queries: int, table: NDArray[np.integer[Any]]
    ) -> None:
        """An extra row: ``path`` are token indices from the root on, the last ``queries`` new."""
        tokens = np.asarray(path, dtype=np.int64) + slot.first
        column, offset = divmod(slot.context, self.block_size)
        blocks = self.scratch[self.taken : self.taken + self.blocks_per_row]
        self.taken += self.blocks_per_row
        row = len(self.owner)
        self.table.extend((row, column + i, int(block)) for i, block in enumerate(blocks))
        if offset:
            self.copies.append((int(table[slot.index, column]), int(blocks[0])))
        places = offset + np.arange(len(path))
        self.sources.extend(tokens.tolist())
        self.slots.extend(
            (
                blocks[places // self.block_size] * self.block_size + places % self.block_size
            ).tolist()
        )
        self.paths.append((slot.index, tuple(t - 1 for t in path[1:]), int(blocks[0])))
        self.add(slot.index, queries, slot.context + len(path))


def node_positions(slots: Sequence[TreeSlot]) -> Ints:
    """The place of each tree node among the tokens of the batch, and its position in its request,
    [2, nodes]."""
    places = [np.arange(slot.first + 1, slot.first + 1 + len(slot.parents)) for slot in slots]
    positions = [slot.context + np.asarray(depths(slot.parents), dtype=np.int64) for slot in slots]
    return np.stack((np.concatenate(places), np.concatenate(positions)))


def plan_rows(
    slots: Sequence[TreeSlot],
    query_start: Ints,
    seq_lens: Ints,
    block_table: NDArray[np.integer[Any]],
    block_size: int,
    scratch: Ints,
    blocks_per_row: int,
) -> RowPlan | None:
    """Turn a batch with trees into rows.

    Args:
        slots: the trees, by place in the batch.
        query_start: where each request's tokens begin, [requests + 1].
        seq_lens: KV tokens of each request with this step's, [requests].
        block_table: blocks of each request, [requests, columns].
        block_size: tokens per block.
        scratch: consecutive blocks that no request owns, enough for the extra rows.
        blocks_per_row: scratch blocks of each extra row.

    Returns:
        The plan, or None where every tree is a chain, which a causal kernel verifies as it is.
    """
    rows = _Rows(block_size, scratch, blocks_per_row)
    trees = {slot.index: slot for slot in slots}
    extra = False
    for index in range(len(seq_lens)):
        first, end = int(query_start[index]), int(query_start[index + 1])
        slot = trees.get(index)
        if slot is None:
            rows.add(index, end - first, int(seq_lens[index]))
            continue
        main, *others = path_rows(slot.parents)
        rows.add(index, main.queries, slot.context + main.queries)
        for row in others:
            extra = True
            rows.add_path(slot, row.path, row.queries, block_table)
    if not extra:
        return None
    return RowPlan(
        np.asarray(rows.owner),
        np.cumsum([0, *rows.lengths]),
        np.asarray(rows.seq_lens),
        np.asarray(rows.table, dtype=np.int64).reshape(-1, 3),
        np.asarray(rows.copies, dtype=np.int64).reshape(-1, 2).T.copy(),
        np.asarray(rows.sources, dtype=np.int64),
        np.asarray(rows.slots, dtype=np.int64),
        rows.paths,
    )


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """A batch with trees for a kernel that takes masks.

    Attributes:
        ancestors: which of its request's tokens of this step each token sees, itself included, as
            bits, [tokens]; 0 where the request has no tree.
        is_tree: whether a request has a tree, [requests].
        max_tree: tokens of the largest tree, root included.
    """

    ancestors: Ints
    is_tree: Bools
    max_tree: int


def plan_masks(slots: Sequence[TreeSlot], tokens: int, requests: int) -> MaskPlan | None:
    """Turn a batch with trees into masks.

    Args:
        slots: the trees, by place in the batch.
        tokens, requests: of the batch.

    Returns:
        The plan, or None where every tree is a chain, which a causal kernel verifies as it is.
    """
    if all(parent == node - 1 for slot in slots for node, parent in enumerate(slot.parents)):
        return None
    masks = np.zeros(tokens, dtype=np.uint64)
    is_tree = np.zeros(requests, dtype=np.bool_)
    for slot in slots:
        seen = [1, *ancestors(slot.parents)]
        masks[slot.first : slot.first + len(seen)] = np.asarray(seen, dtype=np.uint64)
        is_tree[slot.index] = True
    most = max(len(slot.parents) for slot in slots) + 1
    return MaskPlan(masks.view(np.int64), is_tree, most)
