# SPDX-License-Identifier: Apache-2.0
"""How long attention over token trees takes on a GPU, beside causal chains of as many tokens.

One layer of a Llama-3-8B (32 query heads, 8 KV heads, head size 128, bfloat16, blocks of 16). Every
request verifies one random tree; the chain is the same batch with a causal mask, by the fastest
kernel at hand: this project's own without its mask, vLLM's FlashAttention and Triton attention
where vLLM is installed, torch's FlashAttention on keys laid out without pages. Times are medians
of replayed CUDA graphs that go round as many KV caches as it takes to find none of them in the L2
cache. TB/s counts each request's keys and values once.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
from common import markdown, write_result
from torch import Tensor
from triton.runtime.errors import OutOfResources

from vllm_slo.engine.worker.tree_attention.cuda_kernel import Tiling, choose_tiling, tree_attention

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
BATCHES = (1, 16, 64)
CONTEXTS = (512, 2048, 8192, 32768)
TREES = (8, 16, 64)
TUNED = ((1, 32768, 16), (1, 2048, 64), (16, 2048, 16), (64, 8192, 16))
CACHE_BYTES = 256 << 20
"""Bytes of keys and values that are read before any is read again."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""On "cpu" only `check` runs, and Triton must interpret its kernels (TRITON_INTERPRET=1)."""
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative distance (Frobenius) from the dense reference."""


@dataclass(frozen=True)
class Shape:
    """What the layer and the batch look like; lengths are (tokens, context, tree or not)."""

    lengths: tuple[tuple[int, int, bool], ...]
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_size: int = HEAD_SIZE
    dtype: torch.dtype = torch.bfloat16
    softcap: float = 0.0


class Batch:
    """The tensors of one step and one layer."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        torch.manual_seed(seed)
        rng = random.Random(seed)
        tokens = [length for length, _, _ in shape.lengths]
        sizes = [length + context for length, context, _ in shape.lengths]
        self.max_query_len, self.max_seq_len = max(tokens), max(sizes)
        width = -(-self.max_seq_len // BLOCK_SIZE)
        make = partial(torch.tensor, device=DEVICE)
        self.starts = make([0, *tokens]).cumsum(0).int()
        self.sizes = make(sizes, dtype=torch.int32)
        blocks = torch.randperm(len(sizes) * width, device=DEVICE, dtype=torch.int32)
        self.table = blocks.view(len(sizes), width)
        page = (shape.kv_heads, BLOCK_SIZE, 2 * shape.head_size)
        cache = torch.randn(len(blocks), *page, device=DEVICE, dtype=shape.dtype)
        self.keys, self.values = cache.transpose(1, 2).split(shape.head_size, dim=-1)
        row = (sum(tokens), shape.heads, shape.head_size)
        self.query = torch.randn(row, device=DEVICE, dtype=shape.dtype)
        self.output = torch.full_like(self.query, float("nan"))
        self.is_tree = make([is_tree for *_, is_tree in shape.lengths])
        self.no_tree = torch.zeros_like(self.is_tree)
        masks = [bit for length in tokens for bit in random_tree(rng, length)]
        self.ancestors = make(masks, dtype=torch.int64)

    @property
    def scale(self) -> float:
        return float(self.shape.head_size**-0.5)

    def bytes_read(self) -> int:
        """Bytes of keys and values, each once."""
        keys = sum(tokens + context for tokens, context, _ in self.shape.lengths)
        return keys * 2 * self.shape.kv_heads * self.shape.head_size * int(self.keys.itemsize)

    def contiguous(self, request: int, cache: Tensor) -> Tensor:
        """One request's keys or values, [size, Hkv, D]."""
        pages = cache[self.table[request].long()]
        return pages.flatten(0, 1)[: int(self.sizes[request])]


def random_tree(rng: random.Random, tokens: int) -> list[int]:
    """Ancestor masks of a root and ``tokens - 1`` nodes as int64; unused beyond 64 tokens."""
    masks = [1]
    for token in range(1, tokens):
        masks.append(masks[rng.randrange(token)] | 1 << token)
    return [(mask & (1 << 64) - 1) - ((mask >> 63 & 1) << 64) for mask in masks]


def run_tree(batch: Batch, *, causal: bool = False, tiling: Tiling | None = None) -> Tensor:
    """Our kernel; ``causal`` treats every tree as a chain."""
    tree_attention(
        batch.query,
        batch.keys,
        batch.values,
        batch.output,
        batch.starts,
        batch.sizes,
        batch.table,
        batch.ancestors,
        batch.no_tree if causal else batch.is_tree,
        scale=batch.scale,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        softcap=batch.shape.softcap,
        tiling=tiling,
    )
    return batch.output


def dense(batch: Batch, *, causal: bool = False) -> Tensor:
    """The reference: whole score matrices in float64."""
    shape, parts = batch.shape, []
    for request, (tokens, context, is_tree) in enumerate(shape.lengths):
        group = shape.heads // shape.kv_heads
        keys = batch.contiguous(request, batch.keys).double().repeat_interleave(group, 1)
        values = batch.contiguous(request, batch.values).double().repeat_interleave(group, 1)
        rows = slice(int(batch.starts[request]), int(batch.starts[request + 1]))
        scores = torch.einsum("thd,khd->htk", batch.query[rows].double(), keys) * batch.scale
        if shape.softcap:
            scores = shape.softcap * (scores / shape.softcap).tanh()
        seen = torch.ones(tokens, tokens + context, device=DEVICE, dtype=torch.bool).tril(context)
        if is_tree and not causal:
            bits = torch.arange(tokens, device=DEVICE)
            seen[:, context:] = batch.ancestors[rows, None] >> bits & 1 != 0
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        parts.append(torch.einsum("htk,khd->thd", weights, values))
    return torch.cat(parts)


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius distance; not a number if any element is not."""
    return float((found.double() - expected).norm() / expected.norm())


MIXED = ((300, 700, False), (1, 5000, False), (64, 999, True), (17, 0, True), (9, 2048, True))
CHECKED = (
    Shape(MIXED),
    Shape(MIXED, dtype=torch.float16, softcap=20.0),
    Shape(MIXED, dtype=torch.float32),
    Shape(MIXED, heads=28, kv_heads=4),
    Shape(MIXED, heads=16, kv_heads=2, head_size=256),
    Shape(MIXED, heads=16, kv_heads=16, head_size=80),
    Shape(MIXED, heads=8, kv_heads=1, head_size=64),
    Shape(((16, 32000, True),)),
    Shape(((8, 3000, True),) * 200),
    Shape(MIXED, heads=16, kv_heads=8, head_size=96, dtype=torch.float16),
    Shape(MIXED, heads=12, kv_heads=2, head_size=128, dtype=torch.float16),
    Shape(MIXED, heads=8, kv_heads=8, head_size=64, dtype=torch.float32),
)
SHORT = ((7, 20, False), (1, 60, False), (16, 33, True), (9, 0, True))
CHECKED_ON_CPU = (
    Shape(SHORT, heads=4, kv_heads=2, head_size=64, dtype=torch.float32),
    Shape(SHORT, heads=4, kv_heads=1, head_size=80, dtype=torch.float16),
    Shape(SHORT, heads=2, kv_heads=2, head_size=128, dtype=torch.float32, softcap=20.0),
    Shape(SHORT, heads=8, kv_heads=1, head_size=256, dtype=torch.float16),
)
"""Triton's interpreter takes seconds for each."""


def check(shapes: Sequence[Shape] = CHECKED) -> float:
    """Our kernel against the reference, as it is and split; the largest share of a limit reached.

    Raises:
        SystemExit: a result is too far off, or a wrong mask does not show.
    """
    worst = 0.0
    for seed, shape in enumerate(shapes):
        batch = Batch(shape, seed)
        expected, limit = dense(batch), LIMITS[shape.dtype]
        usual = chosen(batch)
        for tiling in (usual, usual._replace(splits=1), usual._replace(splits=5)):
            batch.output.fill_(float("nan"))
            off = distance(run_tree(batch, tiling=tiling), expected)
            if not off < limit:
                raise SystemExit(f"{shape}, {tiling}: off by {off:.1e}, allowed {limit}")
            worst = max(worst, off / limit)
        if distance(run_tree(batch, causal=True), expected) < 3 * off:
            raise SystemExit(f"{shape}: a causal mask passes for the trees'")
    return worst


def chosen(batch: Batch) -> Tiling:
    """The tiling that the kernel chooses for ``batch``."""
    return choose_tiling(
        len(batch.sizes),
        len(batch.query),
        batch.max_query_len,
        batch.max_seq_len,
        batch.shape.heads,
        batch.shape.kv_heads,
        batch.shape.head_size,
        batch.query,
    )


def vllm_flash(batch: Batch) -> Callable[[], Tensor]:
    """vLLM's FlashAttention, version 3 where the GPU has it."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported

    return partial(
        flash_attn_varlen_func,
        q=batch.query,
        k=batch.keys,
        v=batch.values,
        max_seqlen_q=batch.max_query_len,
        cu_seqlens_q=batch.starts,
        max_seqlen_k=batch.max_seq_len,
        seqused_k=batch.sizes,
        softmax_scale=batch.scale,
        causal=True,
        block_table=batch.table,
        fa_version=3 if is_fa_version_supported(3) else 2,
    )


def vllm_triton(batch: Batch) -> Callable[[], Tensor]:
    """vLLM's Triton attention."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    output = torch.empty_like(batch.query)
    call = partial(
        unified_attention,
        q=batch.query,
        k=batch.keys,
        v=batch.values,
        out=output,
        cu_seqlens_q=batch.starts,
        max_seqlen_q=batch.max_query_len,
        seqused_k=batch.sizes,
        max_seqlen_k=batch.max_seq_len,
        softmax_scale=batch.scale,
        causal=True,
        window_size=(-1, -1),
        block_table=batch.table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    return lambda: (call(), output)[1]


def torch_flash(batch: Batch) -> Callable[[], Tensor]:
    """torch's FlashAttention 2, whose causal mask is aligned to the last key, without pages."""
    requests = range(len(batch.sizes))
    query = batch.query.unflatten(0, (len(requests), -1)).transpose(1, 2)
    keys, values = (
        torch.stack([batch.contiguous(request, cache) for request in requests]).transpose(1, 2)
        for cache in (batch.keys, batch.values)
    )
    flash = torch.ops.aten._scaled_dot_product_flash_attention

    def call() -> Tensor:
        found: Tensor = flash(query, keys, values, 0.0, True, False, scale=batch.scale)[0]
        return found.transpose(1, 2).flatten(0, 1)

    return call


Baseline = Callable[[Batch], Callable[[], Tensor]]
BASELINES: dict[str, Baseline] = {
    "vLLM flash": vllm_flash,
    "vLLM Triton": vllm_triton,
    "torch flash": torch_flash,
}


def baselines() -> dict[str, Baseline]:
    """The kernels that run here and compute a causal chain; why the others do not, to stderr."""
    batch = Batch(uniform(2, 1000, 16))
    expected = dense(batch, causal=True)
    found = {}
    for name, make in BASELINES.items():
        try:
            off = distance(make(batch)(), expected)
        except (ImportError, RuntimeError, TypeError) as error:
            print(f"without {name}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        if off < LIMITS[torch.bfloat16]:
            found[name] = make
        else:
            print(f"without {name}: off by {off:.1e}", file=sys.stderr)
    return found


def uniform(requests: int, context: int, tokens: int) -> Shape:
    """A batch of trees of one size behind contexts of one length."""
    return Shape(((tokens, context, True),) * requests)


def seconds(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Median time of one call, when a CUDA graph of all of them is replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(repeats + 3):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1e3)
    return sorted(times[3:])[repeats // 2] / len(calls)


def layers(shape: Shape) -> list[Batch]:
    """Enough copies of a batch that the L2 cache holds none when its turn comes again."""
    first = Batch(shape)
    count = max(2, min(64, CACHE_BYTES // first.bytes_read()))
    return [first, *(Batch(shape, seed) for seed in range(1, count))]


def compare(points: list[tuple[int, int, int]]) -> Iterator[list[str]]:
    """A row per (requests, context, tokens): the tree, the chain, and what the tree adds."""
    rivals = baselines()
    for requests, context, tokens in points:
        batches = layers(uniform(requests, context, tokens))
        tree = seconds([partial(run_tree, batch) for batch in batches])
        chains = {"ours": seconds([partial(run_tree, batch, causal=True) for batch in batches])}
        for name, make in rivals.items():
            chains[name] = seconds([make(batch) for batch in batches])
        best = min(chains, key=chains.__getitem__)
        yield [
            *map(str, (requests, context, tokens)),
            f"{tree * 1e6:.0f}",
            f"{chains['ours'] * 1e6:.0f}",
            f"{chains[best] * 1e6:.0f} ({best})",
            f"{tree / chains[best]:.2f}",
            f"{batches[0].bytes_read() / tree / 1e12:.2f}",
        ]


def neighbours(tiling: Tiling) -> Iterator[Tiling]:
    """The tiling, then those that differ from it in one number."""
    yield tiling
    options = {
        "block_m": (16, 32, 64, 128),
        "block_n": (32, 64, 128),
        "splits": (1, 2, 4, 8, 16, 32, 64),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 5),
    }
    for name, values in options.items():
        for value in values:
            if value != getattr(tiling, name):
                yield tiling._replace(**{name: value})


def tune() -> Iterator[list[str]]:
    """A row per point of ``TUNED``: the chosen tiling and the best among its neighbours."""
    for point in TUNED:
        batches = layers(uniform(*point))
        usual, times = chosen(batches[0]), dict[Tiling, float]()
        for tiling in neighbours(usual):
            calls = [partial(run_tree, batch, tiling=tiling) for batch in batches]
            try:
                times[tiling] = seconds(calls)
            except OutOfResources:
                continue
        best = sorted(times, key=times.__getitem__)[:3]
        shown = [f"{tuple(tiling)}: {times[tiling] * 1e6:.0f}" for tiling in (usual, *best)]
        yield ["{} x {}, {} tokens".format(*point), *shown]


def main() -> None:
    """Check, measure, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the reference only")
    parser.add_argument("--quick", action="store_true", help="one context, no tuning")
    given = parser.parse_args()
    worst = check()
    print(f"correct: {worst:.0%} of the allowed distance at worst")
    if given.check:
        return
    contexts = (2048,) if given.quick else CONTEXTS
    points = [(n, context, tokens) for n in BATCHES for context in contexts for tokens in TREES]
    head = ["requests", "context", "tokens", "tree µs", "chain µs, ours", "chain µs, best"]
    table = markdown([*head, "tree / best chain", "TB/s"], compare(points))
    tuned = ["batch", "chosen: µs", "best: µs", "second: µs", "third: µs"]
    note = f"Beside a float64 reference: {worst:.0%} of the allowed relative distance at worst."
    if not given.quick:
        note += (
            "\n\nTilings (block_m, block_n, splits, num_warps, num_stages), the chosen one and "
            "those that differ from it in one number:\n\n" + markdown(tuned, tune())
        )
    gpu = torch.cuda.get_device_name()
    note += f"\n\n- GPU: {gpu}, torch {torch.__version__}, Triton {triton.__version__}"
    write_result("tree_attention_cuda", __doc__, table, note=note)


if __name__ == "__main__":
    main()
