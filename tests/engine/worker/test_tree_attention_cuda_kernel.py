# SPDX-License-Identifier: Apache-2.0
"""engine/worker/tree_attention/cuda_kernel.py in Triton's interpreter against a dense reference,
and its compilation for GPUs that need not be there."""

import random
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from depth import DEPTH
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.slow

triton = pytest.importorskip("triton")

from vllm_slo.engine.worker.tree_attention import cuda_kernel  # noqa: E402
from vllm_slo.engine.worker.tree_attention.cuda_kernel import Tiling, choose_tiling  # noqa: E402

SMALL = Tiling(16, 16, 1, 4, 2)
HEAD_SIZES, GROUPS, BLOCK_SIZES = (64, 96, 128, 256), (1, 4, 8), (16, 32, 64, 128)


@dataclass(frozen=True)
class Case:
    """A batch: (tokens, context, parents of the tree's nodes or None) per request."""

    requests: tuple[tuple[int, int, tuple[int, ...] | None], ...]
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float = 0.0
    tiling: Tiling | None = SMALL
    seed: int = 0
    flipped: tuple[int, int] | None = None  # (token, bit) that the kernel is told wrongly
    forgotten: bool = False  # the kernel is not told of trees


def tree(rng: random.Random, tokens: int, context: int) -> tuple[int, int, tuple[int, ...]]:
    return tokens, context, tuple(rng.randint(-1, node - 1) for node in range(tokens - 1))


def masks(parents: tuple[int, ...]) -> list[int]:
    seen = [1]
    for node, parent in enumerate(parents):
        seen.append(seen[parent + 1] | 2 << node)
    return seen


class Batch:
    """The tensors of a case. Slots of the cache that hold no key are NaN: reading one shows."""

    def __init__(self, case: Case) -> None:
        self.case = case
        make = torch.Generator().manual_seed(case.seed)
        lengths = [tokens for tokens, _, _ in case.requests]
        sizes = [tokens + context for tokens, context, _ in case.requests]
        self.starts = torch.tensor([0, *lengths]).cumsum(0).int()
        self.sizes = torch.tensor(sizes, dtype=torch.int32)
        width = -(-max(sizes) // case.block_size)
        blocks = torch.randperm(len(sizes) * width + 3, generator=make)
        self.table = blocks[: len(sizes) * width].view(len(sizes), width).int()
        # As vLLM lays it out: [blocks, block_size, heads, K and V], seen with the heads before.
        shape = (len(blocks), case.block_size, case.kv_heads, 2 * case.head_size)
        self.kv_cache = torch.full(shape, float("nan"), dtype=case.dtype).transpose(1, 2)
        self.keys, self.values = self.kv_cache.transpose(1, 2).split(case.head_size, dim=-1)
        for request, size in enumerate(sizes):
            new = torch.randn(size, case.kv_heads, 2 * case.head_size, generator=make)
            block, slot = self.place(request)
            self.kv_cache.transpose(1, 2)[block, slot] = new.to(case.dtype)
        # A slice of the fused projection: its rows are further apart than its own width.
        fused = torch.randn(sum(lengths), case.heads + 2, case.head_size, generator=make)
        self.query = fused.to(case.dtype)[:, : case.heads]
        self.is_tree = torch.tensor([parents is not None for *_, parents in case.requests])
        self.ancestors = torch.zeros(sum(lengths), dtype=torch.int64)
        for start, (tokens, _, parents) in zip(self.starts, case.requests, strict=False):
            if parents is not None:
                bits = torch.tensor(masks(parents), dtype=torch.uint64).view(torch.int64)
                self.ancestors[start : start + tokens] = bits

    def place(self, request: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(int(self.sizes[request]))
        size = self.case.block_size
        return self.table[request, index // size].long(), index % size

    def dense(self) -> Tensor:
        """What the output should be, in float32, from whole score matrices."""
        case, parts = self.case, []
        for request, (tokens, context, parents) in enumerate(case.requests):
            block, slot = self.place(request)
            group = case.heads // case.kv_heads
            keys = self.keys[block, slot].float().repeat_interleave(group, 1)
            values = self.values[block, slot].float().repeat_interleave(group, 1)
            start = int(self.starts[request])
            query = self.query[start : start + tokens].float()
            scores = torch.einsum("thd,khd->htk", query, keys) * case.head_size**-0.5
            if case.softcap:
                scores = case.softcap * (scores / case.softcap).tanh()
            seen = torch.ones(tokens, tokens + context, dtype=torch.bool).tril(context)
            if parents is not None:
                rows = [[mask >> bit & 1 for bit in range(tokens)] for mask in masks(parents)]
                seen[:, context:] = torch.tensor(rows, dtype=torch.bool)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            parts.append(torch.einsum("htk,khd->thd", weights, values))
        return torch.cat(parts)


def computed(batch: Batch) -> Tensor:
    """What the kernel writes. Runs in the interpreter's process."""
    case = batch.case
    ancestors = batch.ancestors.clone()
    if case.flipped is not None:
        token, bit = case.flipped
        ancestors[token] ^= 1 << bit
    output = torch.full(batch.query.shape, float("nan"), dtype=case.dtype)
    cuda_kernel.tree_attention(
        batch.query,
        batch.keys,
        batch.values,
        output,
        batch.starts,
        batch.sizes,
        batch.table,
        ancestors,
        batch.is_tree & (not case.forgotten),
        scale=case.head_size**-0.5,
        max_query_len=max(tokens for tokens, _, _ in case.requests),
        max_seq_len=int(batch.sizes.max()),
        softcap=case.softcap,
        tiling=case.tiling,
    )
    return output.float()


def error(case: Case) -> float:
    """Largest distance from the reference; not a number if any output is not."""
    batch = Batch(case)
    return float((computed(batch) - batch.dense()).abs().max())


def distance(one: Case, other: Case) -> float:
    return float((computed(Batch(one)) - computed(Batch(other))).abs().max())


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Executor]:
    """A process of its own: the variable must be set before Triton is imported."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(int).result()  # the first task starts the process
        yield pool


def mixed(seed: int) -> Case:
    """Prefill chunks, decodes and trees in any order, with any of the shapes supported."""
    rng = random.Random(seed)
    requests = [
        (rng.randint(2, 40), rng.choice([0, rng.randint(1, 80)]), None),
        (1, rng.randint(0, 300), None),
        tree(rng, rng.randint(2, 24), rng.randint(0, 300)),
        tree(rng, rng.randint(2, 24), rng.choice([0, 15, 16, 17])),
        tree(rng, 1, rng.randint(0, 40)),
    ]
    rng.shuffle(requests)
    heads, kv_heads = rng.choice([(2, 2), (4, 2), (4, 1), (7, 1), (10, 2)])
    rows = rng.choice([16, 32, 64])
    return Case(
        tuple(requests),
        heads,
        kv_heads,
        head_size=rng.choice([64, 80, 128]),
        block_size=rng.choice([16, 32]),
        softcap=rng.choice([0.0, 0.0, 1.5]),
        tiling=Tiling(rows, rng.choice([16, 32, 64]), rng.choice([1, 1, 3, 8]), 4, 2),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(12))
def test_mixed_batches_match_the_dense_reference(interpreter: Executor, seed: int) -> None:
    assert interpreter.submit(error, mixed(seed)).result() < 1e-5


@pytest.mark.parametrize("splits", [1, 3])
def test_half_precision(interpreter: Executor, splits: int) -> None:
    """float16 only: the interpreter does not know bfloat16."""
    case = replace(mixed(2), dtype=torch.float16, tiling=Tiling(32, 32, splits, 4, 2))
    assert interpreter.submit(error, case).result() < 2e-3


def test_the_tiling_chosen_for_a_device(interpreter: Executor) -> None:
    case = replace(mixed(4), tiling=None)
    assert interpreter.submit(error, case).result() < 1e-5


def shape_cases() -> list[tuple[int, int, int]]:
    """(head size, heads of a group, block size): each of every one; all of them in a deep run."""
    if DEPTH > 1:
        return list(product(HEAD_SIZES, GROUPS, BLOCK_SIZES))
    return [(64, 1, 128), (96, 4, 64), (128, 8, 32), (256, 4, 16)]


@pytest.mark.parametrize(("head_size", "group", "block_size"), shape_cases())
def test_the_tilings_of_every_shape(
    interpreter: Executor, head_size: int, group: int, block_size: int
) -> None:
    """The smallest and the largest of those that are chosen for half precision."""
    smallest, *_, largest = cuda_kernel.tilings(2 * group, 2, head_size, torch.float16)
    rng = random.Random(head_size + group)
    requests = (tree(rng, 12, 150), (1, 300, None), (20, 40, None), tree(rng, 3, block_size))
    for tiling in (smallest, largest):
        case = Case(
            requests, 2 * group, 2, head_size, block_size, torch.float16, tiling=tiling, seed=group
        )
        assert interpreter.submit(error, case).result() < 4e-3


def warmed(head_size: int, softcap: float) -> list[dict[str, Any]]:
    """The constants of each kernel that a layer of the backend warms up."""
    from vllm_slo.engine.worker.tree_attention.cuda import TritonTreeImpl

    launched: list[dict[str, Any]] = []
    kernel = cuda_kernel._attend

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **constants: Any) -> None:
                launched.append(constants)
                kernel[grid](*args, **constants)

            return launch

    impl = TritonTreeImpl(8, head_size, 1.0, 2, None, None, "auto", softcap or None)
    cache = torch.zeros(3, 2, 16, 2 * head_size, dtype=torch.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_kernel, "_attend", Watched())
        impl.warm_up_trees(cache, torch.zeros(4, 5, dtype=torch.int32))
    return launched


@pytest.mark.parametrize(("head_size", "softcap"), [(64, 0.0), (256, 30.0)])
def test_every_kernel_that_can_be_chosen_is_warmed_up(
    interpreter: Executor, head_size: int, softcap: float
) -> None:
    """`test_any_shape_has_a_tiling` tries that ``tilings`` has them all."""
    names = ("BLOCK_M", "BLOCK_N", "SPLIT", "SOFTCAP", "num_warps", "num_stages")
    found = [
        [one[name] for name in names]
        for one in interpreter.submit(warmed, head_size, softcap).result()
    ]
    assert found == [
        [t.block_m, t.block_n, t.splits > 1, softcap > 0, t.num_warps, t.num_stages]
        for t in cuda_kernel.tilings(8, 2, head_size, torch.float16)
    ]


@pytest.mark.parametrize("splits", [1, 2])
def test_a_tree_of_64_tokens_uses_every_bit(interpreter: Executor, splits: int) -> None:
    chain = tuple(range(-1, 62))  # its last token sees all: the mask is -1
    bushy = tree(random.Random(0), 64, 33)
    case = Case(((64, 20, chain), bushy), 2, 2, tiling=Tiling(32, 32, splits, 4, 2))
    assert interpreter.submit(error, case).result() < 1e-5
    lost = replace(case, flipped=(63, 63))  # the last token of the chain no longer sees itself
    assert not interpreter.submit(error, lost).result() < 1e-3


def test_a_chain_is_a_causal_request(interpreter: Executor) -> None:
    chain = Case(((9, 50, tuple(range(-1, 7))),))
    causal = Case(((9, 50, None),))
    assert interpreter.submit(distance, chain, causal).result() == 0.0


def test_splits_change_nothing(interpreter: Executor) -> None:
    rng = random.Random(5)
    whole = Case((tree(rng, 9, 300), (1, 3, None)), heads=2)
    for splits in (2, 7, cuda_kernel.MAX_SPLITS):
        split = replace(whole, tiling=SMALL._replace(splits=splits))
        assert interpreter.submit(distance, whole, split).result() < 1e-6


def test_more_requests_than_are_looked_through_at_once(interpreter: Executor) -> None:
    some = tree(random.Random(1), 5, 20)
    case = Case((some,) + ((1, 2, None),) * 130 + (some, some), 1, 1, 32)
    assert interpreter.submit(error, case).result() < 1e-5


@pytest.mark.parametrize("splits", [1, 3])
def test_a_wrong_mask_shows(interpreter: Executor, splits: int) -> None:
    parents = (-1, -1, 0, 0, 1, 1, 2)
    tiling = SMALL._replace(splits=splits)
    right = Case(((1, 30, None), (8, 60, parents)), tiling=tiling)
    assert interpreter.submit(error, right).result() < 1e-5
    # Token 3 of the tree, the fifth of the batch, sees 0b1011: not its aunt, its parent, itself.
    for bit in (0, 1, 2, 3):
        wrong = replace(right, flipped=(4, bit))
        assert interpreter.submit(error, wrong).result() > 1e-2
    assert interpreter.submit(error, replace(right, forgotten=True)).result() > 1e-2


@given(
    requests=st.integers(1, 512),
    max_query_len=st.integers(1, 8192),
    max_seq_len=st.integers(1, 1 << 20),
    kv_heads=st.sampled_from([1, 2, 8, 32]),
    group=st.sampled_from([1, 3, 4, 7, 8, 71]),
    head_size=st.integers(32, 256),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_shape_has_a_tiling(
    requests: int,
    max_query_len: int,
    max_seq_len: int,
    kv_heads: int,
    group: int,
    head_size: int,
    dtype: torch.dtype,
) -> None:
    chosen = choose_tiling(
        requests,
        requests + max_query_len - 1,
        max_query_len,
        max_seq_len,
        group * kv_heads,
        kv_heads,
        head_size,
        torch.empty(0, dtype=dtype),
    )
    kinds = cuda_kernel.tilings(group * kv_heads, kv_heads, head_size, dtype)
    assert chosen._replace(splits=min(chosen.splits, 2)) in kinds, "what is warmed up is all"
    for size in (chosen.block_m, chosen.block_n):
        assert size >= 16 and size.bit_count() == 1
    assert chosen.block_m // group >= 1
    assert 1 <= chosen.splits <= cuda_kernel.MAX_SPLITS
    assert chosen.splits == 1 or max_seq_len // chosen.splits >= cuda_kernel.MIN_KEYS_PER_SPLIT


ATTEND = {
    "BLOCK_SIZE": 16,
    "GROUP": 4,
    "HEAD": 128,
    "HEAD_PADDED": 128,
    "BLOCK_Q": 16,
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "SOFTCAP": True,
}
TYPES = {
    **dict.fromkeys(("query_ptr", "key_ptr", "value_ptr", "output_ptr"), "*bf16"),
    **dict.fromkeys(("target_ptr", "weight_ptr", "part_ptr"), "*fp32"),
    **dict.fromkeys(("starts_ptr", "lens_ptr", "table_ptr"), "*i32"),
    "ancestors_ptr": "*i64",
    "is_tree_ptr": "*i1",
    "scale": "fp32",
    "softcap": "fp32",
}


def compiled(
    name: str,
    capability: int,
    constants: dict[str, int],
    warps: int = 4,
    stages: int = 3,
    **types: str,
) -> tuple[str, int]:
    """(PTX, bytes of shared memory) of a kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(cuda_kernel, name)
    known = TYPES | types | dict.fromkeys(constants, "constexpr")
    names = function.arg_names
    signature = {argument: known.get(argument, "i32") for argument in names}
    values = {(names.index(constant),): value for constant, value in constants.items()}
    source = ASTSource(function, signature, values)
    options = {"num_warps": warps, "num_stages": stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return kernel.asm["ptx"], kernel.metadata.shared


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """A process of its own, with an empty cache."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
            pool.submit(int).result()  # the first task starts the process
        yield pool


def test_the_kernels_compile_for_gpus(compiler: Executor) -> None:
    """The compiler refuses much that the interpreter takes; neither needs a GPU."""
    split = compiler.submit(compiled, "_attend", 90, ATTEND | {"SPLIT": True})
    whole = compiler.submit(compiled, "_attend", 80, ATTEND | {"SPLIT": False}, target_ptr="*bf16")
    combine = compiler.submit(compiled, "_combine", 90, {"HEAD": 80, "HEAD_PADDED": 128})
    hopper, shared = split.result()
    ampere, _ = whole.result()
    assert ".entry _combine" in combine.result()[0]
    assert "wgmma.mma_async" in hopper
    assert "mma.sync" in ampere
    assert shared <= SHARED_BYTES


SHARED_BYTES = 99 * 1024
"""Shared memory of a program on the smallest GPUs of these generations."""


def compile_cases() -> list[tuple[int, int, int, str, int, bool]]:
    """(capability, head size, heads of a group, type, block size, largest tiling): each of every
    one; in a deep run all but block sizes, which take turns: they change divisors only."""
    if DEPTH > 1:
        cases = product((80, 90, 100), HEAD_SIZES, GROUPS, ("bf16", "fp16"), (False, True))
        return [
            (capability, size, group, kind, BLOCK_SIZES[place // 2 % 4], largest)
            for place, (capability, size, group, kind, largest) in enumerate(cases)
        ]
    return [
        (80, 64, 1, "fp16", 128, False),
        (80, 256, 8, "bf16", 16, True),
        (90, 96, 4, "bf16", 64, True),
        (100, 128, 8, "bf16", 32, True),
        (100, 256, 1, "fp16", 16, False),
    ]


@pytest.mark.parametrize(
    ("capability", "head_size", "group", "kind", "block_size", "largest"), compile_cases()
)
def test_every_shape_compiles(
    compiler: Executor,
    capability: int,
    head_size: int,
    group: int,
    kind: str,
    block_size: int,
    largest: bool,
) -> None:
    """A KV cache in fp8 is refused at start, so there is none to compile for."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    tiling = cuda_kernel.tilings(8 * group, 8, head_size, dtype)[-1 if largest else 0]
    split = tiling.splits > 1
    constants = {
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "HEAD": head_size,
        "HEAD_PADDED": 1 << (head_size - 1).bit_length(),
        "BLOCK_Q": tiling.block_m // group,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "SOFTCAP": split,
        "SPLIT": split,
    }
    types: dict[str, Any] = dict.fromkeys(("query_ptr", "key_ptr", "value_ptr"), f"*{kind}")
    if not split:
        types |= dict.fromkeys(("target_ptr", "weight_ptr"), f"*{kind}")
    options = capability, constants, tiling.num_warps, tiling.num_stages
    ptx, shared = compiler.submit(compiled, "_attend", *options, **types).result()
    assert ".entry _attend" in ptx
    assert shared <= SHARED_BYTES
