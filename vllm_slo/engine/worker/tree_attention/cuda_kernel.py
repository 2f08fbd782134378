# SPDX-License-Identifier: Apache-2.0
# Triton reads the names and annotations of a kernel's parameters: constants are in capitals, what
# has no annotation is a pointer or a number.
# ruff: noqa: ANN001, ANN202, N803
# mypy: disable-error-code="no-untyped-def"
"""Paged attention over a batch of prefill chunks, decodes and token trees: two Triton kernels.

A program owns a block of rows: consecutive tokens of one request, times the query heads that share
one KV head. It reads the request's keys once for all its rows, with an online softmax
(FlashAttention-2, Dao 2023, algorithm 1). Where the blocks are too few to fill the device, each
one's keys are split among several programs, and a second kernel combines what these found
(Flash-Decoding, Dao et al. 2023).

Needs torch and Triton only. With ``TRITON_INTERPRET=1``, set before this module is imported, it
runs on CPU tensors.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # placeholders: this module can be imported, its kernels cannot run
    from vllm.triton_utils import tl, triton

MAX_TREE_TOKENS = 64
"""Tokens of one tree, its root included: the bits of an ancestor mask."""

MAX_SPLITS = 64
MIN_KEYS_PER_SPLIT = 256
TILE_BYTES = 32 * 1024
STAGED_BYTES = 64 * 1024

_SCAN = tl.constexpr(128)
_SPLITS = tl.constexpr(MAX_SPLITS)
_LAST_BIT = tl.constexpr(MAX_TREE_TOKENS - 1)
# Below every score, yet finite: a row that has seen no key decays by 2 ** 0 and not by NaN.
_FLOOR = tl.constexpr(-1.0e30)


class Tiling(NamedTuple):
    """How the work is cut.

    Attributes:
        block_m: rows (tokens times heads of a group) per program; a power of two, at least 16.
        block_n: keys per turn of its loop; a power of two, at least 16.
        splits: programs that share the keys of one block of rows; at most ``MAX_SPLITS``.
        num_warps: warps per program.
        num_stages: tiles of keys in flight, and one for the numbers of the next one's blocks.
    """

    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    ancestors: torch.Tensor,
    is_tree: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    softcap: float = 0.0,
    tiling: Tiling | None = None,
) -> None:
    """Write into ``output`` what every query token attends to in its own request.

    A request's last keys are those of this step's tokens, already in the cache; all keys before
    them are seen by all its tokens. Among this step's tokens, the i-th sees those up to itself; in
    a tree only the ones among these whose bit is set in its ancestor mask.

    Args:
        query: [T, Hq, D], float16, bfloat16 or float32, contiguous in D.
        key_cache: [num_blocks, block_size, Hkv, D], any strides but 1 in D; Hkv divides Hq.
        value_cache: like ``key_cache``.
        output: [T, Hq, D], contiguous in D; rows of tokens that belong to no request are undefined.
        query_start_loc: int32 [R + 1]; where each request's tokens begin in ``query``.
        seq_lens: int32 [R]; keys per request, this step's included.
        block_table: int32 [R, max_blocks], contiguous in its last dimension.
        ancestors: int64 [T]; bit j of a tree token: it sees its request's j-th token of this step.
            Its own and bit 0, the root's, are set. Masks of other requests' tokens do not count.
        is_tree: bool or int32 [R].
        scale: what scores are multiplied by.
        max_query_len: upper bound of the tokens of one request.
        max_seq_len: upper bound of ``seq_lens``; a loose one costs time only.
        softcap: c of ``c * tanh(score / c)``; 0 for none.
        tiling: instead of what ``choose_tiling`` says.
    """
    tokens, heads, head_size = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    requests, group = seq_lens.shape[0], heads // kv_heads
    tiling = tiling or choose_tiling(
        requests, tokens, max_query_len, max_seq_len, heads, kv_heads, head_size, query
    )
    block_q = tiling.block_m // group
    split = tiling.splits > 1
    # Requests begin new blocks, so there are at most this many.
    blocks = tokens // block_q + requests
    if split:
        shape = (tiling.splits, tokens, heads, head_size)
        target = torch.empty(shape, dtype=torch.float32, device=query.device)
        weight = torch.empty(shape[:3], dtype=torch.float32, device=query.device)
    else:
        target, weight = output.unsqueeze(0), output
    _attend[(blocks, kv_heads, tiling.splits)](
        query,
        key_cache,
        value_cache,
        target,
        weight,
        query_start_loc,
        seq_lens,
        block_table,
        ancestors,
        is_tree,
        requests,
        tokens,
        scale * math.log2(math.e),
        softcap * math.log2(math.e),
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *target.stride()[:3],
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        GROUP=group,
        HEAD=head_size,
        HEAD_PADDED=_power_of_2(head_size),
        BLOCK_Q=block_q,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        SOFTCAP=softcap > 0.0,
        SPLIT=split,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if split:
        _combine[(tokens, heads)](
            target,
            weight,
            output,
            tiling.splits,
            *target.stride()[:3],
            *output.stride()[:2],
            HEAD=head_size,
            HEAD_PADDED=_power_of_2(head_size),
        )


def choose_tiling(
    requests: int,
    tokens: int,
    max_query_len: int,
    max_seq_len: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    query: torch.Tensor,
) -> Tiling:
    """The tiling for one call, from what the host knows without asking the device.

    A tile of keys and values takes ``TILE_BYTES`` at most; float32, which has no tensor cores to
    work for it, takes smaller tiles to stay in registers. Keys are split until there are two
    programs per multiprocessor, each part of the longest request having ``MIN_KEYS_PER_SPLIT``
    keys or more.
    """
    group = heads // kv_heads
    sizes, block_n, stages = _tile_sizes(group, head_size, query.dtype)
    rows = _power_of_2(max_query_len * group)
    block_m = next((size for size in sizes if size >= rows), sizes[-1])
    programs = kv_heads * max(requests, tokens // (block_m // group))
    wanted = 2 * _multiprocessors(query.device) // programs
    splits = max(1, min(wanted, max_seq_len // MIN_KEYS_PER_SPLIT, MAX_SPLITS))
    return Tiling(block_m, block_n, splits, _warps(block_m), stages)


def tilings(heads: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> list[Tiling]:
    """One of each kind of tiling that ``choose_tiling`` may choose for an attention layer.

    Each kind is compiled by itself. How often keys are split, beyond once, makes no difference.
    """
    sizes, block_n, stages = _tile_sizes(heads // kv_heads, head_size, dtype)
    return [
        Tiling(block_m, block_n, splits, _warps(block_m), stages)
        for block_m in sizes
        for splits in (1, 2)
    ]


def _tile_sizes(group: int, head_size: int, dtype: torch.dtype) -> tuple[list[int], int, int]:
    """(possible rows of a program, the fewest first; keys of a tile; stages)."""
    row_bytes = 2 * _power_of_2(head_size) * dtype.itemsize
    most_rows, most_keys = (32, 16) if dtype == torch.float32 else (128, 64)
    most = min(most_rows, 2 * TILE_BYTES // row_bytes)
    sizes = [max(16, _power_of_2(group))]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    block_n = max(16, min(most_keys, TILE_BYTES // row_bytes))
    return sizes, block_n, 1 + max(2, min(4, STAGED_BYTES // (row_bytes * block_n)))


def _warps(block_m: int) -> int:
    return 4 if block_m <= 64 else 8


def _power_of_2(n: int) -> int:
    """The smallest power of two that is not less than ``n`` >= 1."""
    return 1 << (n - 1).bit_length()


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit(do_not_specialize=["requests", "tokens"])
def _attend(
    query_ptr,
    key_ptr,
    value_ptr,
    target_ptr,
    weight_ptr,
    starts_ptr,
    lens_ptr,
    table_ptr,
    ancestors_ptr,
    is_tree_ptr,
    requests,
    tokens,
    scale,
    softcap,
    query_token,
    query_head,
    key_block,
    key_slot,
    key_head,
    value_block,
    value_slot,
    value_head,
    target_split,
    target_token,
    target_head,
    table_request,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One block of rows over one part of its keys; grid (blocks, KV heads, splits).

    Scores are kept in base 2: ``scale`` and ``softcap`` come multiplied by log2(e). With SPLIT,
    ``target`` [splits, T, Hq, D] receives the part's own attention and ``weight`` [splits, T, Hq]
    the base-2 logarithm of its softmax's denominator; else ``target`` is the output.
    """
    request, first = _locate(tl.program_id(0), starts_ptr, requests, BLOCK_Q)
    start = tl.load(starts_ptr + request)
    length = tl.load(starts_ptr + request + 1) - start
    if first >= length:
        return
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PADDED)
    index = first + rows // GROUP
    token = (start + index).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    # BLOCK_M need not be a multiple of GROUP: the rows left over belong to the next block.
    valid = (rows < BLOCK_Q * GROUP) & (index < length)
    inside = valid[:, None] & (dims < HEAD)[None, :]
    query_at = token[:, None] * query_token + head[:, None] * query_head + dims[None, :]
    query = tl.load(query_ptr + query_at, mask=inside, other=0.0)
    tree = tl.load(is_tree_ptr + request).to(tl.int32) != 0
    # A row that is no tree sees whatever causality allows: all bits are set.
    bits = tl.where(tree, tl.load(ancestors_ptr + token, mask=valid, other=-1), -1)

    context = tl.load(lens_ptr + request) - length
    stop = context + tl.minimum(first + BLOCK_Q, length)
    # Keys before `clear` are seen by every row; only those from there on need the mask.
    clear = context + tl.where(tree, 0, first + 1)
    share = tl.cdiv(stop, tl.num_programs(2) * BLOCK_N) * BLOCK_N
    begin = part * share
    end = tl.minimum(begin + share, stop)
    middle = tl.maximum(begin, tl.minimum(end, clear // BLOCK_N * BLOCK_N))

    key_ptr += kv_head.to(tl.int64) * key_head
    value_ptr += kv_head.to(tl.int64) * value_head
    table_ptr += request.to(tl.int64) * table_request
    top = tl.full([BLOCK_M], _FLOOR, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)
    for masked in tl.static_range(2):
        top, mass, total = _fold(
            top,
            mass,
            total,
            query,
            middle if masked else begin,
            end if masked else middle,
            index,
            bits,
            context,
            key_ptr,
            value_ptr,
            table_ptr,
            scale,
            softcap,
            key_block,
            key_slot,
            value_block,
            value_slot,
            BLOCK_SIZE,
            HEAD,
            HEAD_PADDED,
            BLOCK_N,
            SOFTCAP,
            masked,
        )

    # The key with the largest score adds 1, so mass is below 1 only where a part holds no key that
    # the row sees; there its top is the floor and gives it no weight.
    mass = tl.maximum(mass, 1.0)
    found = total / mass[:, None]
    target_at = token[:, None] * target_token + head[:, None] * target_head + dims[None, :]
    target_ptr += part.to(tl.int64) * target_split
    tl.store(target_ptr + target_at, found.to(target_ptr.dtype.element_ty), mask=inside)
    if SPLIT:
        heads = tl.num_programs(1) * GROUP
        weight_at = (part.to(tl.int64) * tokens + token) * heads + head
        tl.store(weight_ptr + weight_at, top + tl.log2(mass), mask=valid)


@triton.jit
def _locate(block, starts_ptr, requests, BLOCK_Q: tl.constexpr):
    """(request, index of its first token) of the rows that the program ``block`` owns.

    Request r owns the blocks from ``starts[r] // BLOCK_Q + r`` up to the next request's first:
    at least as many as its tokens fill, so some own none.
    """
    begun = 0
    latest = 0
    for base in range(0, requests, _SCAN):
        request = base + tl.arange(0, _SCAN)
        start = tl.load(starts_ptr + request, mask=request < requests, other=0)
        opening = start // BLOCK_Q + request
        reached = (request < requests) & (opening <= block)
        begun += tl.sum(reached.to(tl.int32), 0)
        latest = tl.maximum(latest, tl.max(tl.where(reached, opening, 0), 0))
    return begun - 1, (block - latest) * BLOCK_Q


@triton.jit
def _fold(
    top,
    mass,
    total,
    query,
    begin,
    end,
    index,
    bits,
    context,
    key_ptr,
    value_ptr,
    table_ptr,
    scale,
    softcap,
    key_block,
    key_slot,
    value_block,
    value_slot,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the keys from ``begin`` to ``end`` into the rows' running softmax.

    ``top`` is the largest score so far, ``mass`` the sum of 2 ** (score - top), ``total`` the
    values so weighted. Without MASKED every row sees every key and whole tiles are read.
    """
    dims = tl.arange(0, HEAD_PADDED)
    for base in range(begin, end, BLOCK_N):
        key = base + tl.arange(0, BLOCK_N)
        present = (dims < HEAD)[None, :]
        if MASKED:
            present = present & (key < end)[:, None]
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
        slot = key % BLOCK_SIZE
        key_at = (block * key_block + slot * key_slot)[:, None] + dims[None, :]
        value_at = (block * value_block + slot * value_slot)[:, None] + dims[None, :]
        keys = tl.load(key_ptr + key_at, mask=present, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if SOFTCAP:
            # tanh(x) == 2 * sigmoid(2 * x) - 1, which saturates and never divides inf by inf
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if MASKED:
            # Bit 0 stands for the context as well: the root, like it, is seen by all.
            step = (key - context)[None, :]
            bit = tl.minimum(tl.maximum(step, 0), _LAST_BIT).to(tl.int64)
            seen = (
                (key < end)[None, :] & (step <= index[:, None]) & ((bits[:, None] >> bit) & 1 != 0)
            )
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        decay = tl.exp2(top - new_top)
        share = tl.exp2(scores - new_top[:, None])
        values = tl.load(value_ptr + value_at, mask=present, other=0.0)
        mass = mass * decay + tl.sum(share, 1)
        total = tl.dot(
            share.to(values.dtype), values, total * decay[:, None], input_precision="ieee"
        )
        top = new_top
    return top, mass, total


@triton.jit(do_not_specialize=["splits"])
def _combine(
    part_ptr,
    weight_ptr,
    output_ptr,
    splits,
    part_split,
    part_token,
    part_head,
    output_token,
    output_head,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
):
    """The parts' mean by their weights; grid (T, Hq), layouts as ``_attend`` leaves them."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    tokens = tl.num_programs(0)
    part = tl.arange(0, _SPLITS).to(tl.int64)
    dims = tl.arange(0, HEAD_PADDED)
    inside = dims < HEAD
    exists = part < splits
    weight_at = (part * tokens + token) * heads + head
    weight = tl.load(weight_ptr + weight_at, mask=exists, other=float("-inf"))
    weight = tl.exp2(weight - tl.max(weight, 0))
    part_at = part[:, None] * part_split + token * part_token + head * part_head + dims[None, :]
    parts = tl.load(part_ptr + part_at, mask=exists[:, None] & inside[None, :], other=0.0)
    mean = tl.sum(weight[:, None] * parts, 0) / tl.sum(weight, 0)
    output_at = token * output_token + head * output_head + dims
    tl.store(output_ptr + output_at, mean.to(output_ptr.dtype.element_ty), mask=inside)
