# SPDX-License-Identifier: Apache-2.0
"""engine/worker/tree_attention/cuda.py: when vLLM's Triton backend runs the tree kernel, and on
what."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vllm_slo.engine.worker.tree_attention import cuda

TOKENS, PADDING = 9, 2


def layer(**given: Any) -> cuda.TritonTreeImpl:
    usual: dict[str, Any] = {
        "num_heads": 4,
        "head_size": 64,
        "scale": 0.125,
        "num_kv_heads": 2,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    return cuda.TritonTreeBackend.get_impl_cls()(**usual | given)


def step(**given: Any) -> SimpleNamespace:
    """Attention metadata of a step: a tree of 8 tokens and a decode."""
    usual: dict[str, Any] = {
        "num_actual_tokens": TOKENS,
        "max_query_len": 8,
        "query_start_loc": torch.tensor([0, 8, 9]),
        "max_seq_len": 100,
        "seq_lens": torch.tensor([28, 6]),
        "block_table": torch.tensor([[4, 1], [0, 0]]),
        "causal": True,
        "mm_prefix_range": None,
        "rswa_prefix_lens": None,
        "tree": SimpleNamespace(ancestors=torch.ones(9), is_tree=torch.ones(2), max_tree=8),
    }
    return SimpleNamespace(**usual | given)


def forward(impl: cuda.TritonTreeImpl, metadata: Any) -> tuple[Any, list[Tensor]]:
    """What ``forward`` returns, and the query, KV cache and output it was given."""
    query, output = torch.rand(2, TOKENS + PADDING, 4, 64)
    kv_cache = torch.rand(5, 16, 2, 128).transpose(1, 2)
    new = torch.empty(0)
    found = impl.forward(torch.nn.Module(), query, new, new, kv_cache, metadata, output)
    return found, [query, kv_cache, output]


def test_a_step_with_a_tree_runs_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = []
    monkeypatch.setattr(cuda, "tree_attention", lambda *args, **named: calls.append((args, named)))
    metadata = step()
    found, (query, kv_cache, output) = forward(layer(logits_soft_cap=3.0), metadata)
    ((queries, keys, values, written, *rest), named), *others = calls
    assert found is output and not others
    assert torch.equal(queries, query[:TOKENS])
    assert torch.equal(keys, kv_cache.transpose(1, 2)[..., :64])
    assert torch.equal(values, kv_cache.transpose(1, 2)[..., 64:])
    assert {part.untyped_storage().data_ptr() for part in (keys, values)} == {kv_cache.data_ptr()}
    assert (written.data_ptr(), len(written)) == (output.data_ptr(), TOKENS)
    assert rest[:3] == [metadata.query_start_loc, metadata.seq_lens, metadata.block_table]
    assert rest[3:] == [metadata.tree.ancestors, metadata.tree.is_tree]
    assert named == {"scale": 0.125, "max_query_len": 8, "max_seq_len": 100, "softcap": 3.0}


@pytest.mark.parametrize("metadata", [None, SimpleNamespace(), SimpleNamespace(tree=None)])
def test_a_step_without_a_tree_is_the_stock_one(
    monkeypatch: pytest.MonkeyPatch, metadata: Any
) -> None:
    monkeypatch.setattr(TritonAttentionImpl, "forward", lambda *args: ("stock", args[6]))
    assert forward(layer(sliding_window=8), metadata)[0] == ("stock", metadata)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"causal": False}, "not causal"),
        ({"causal": torch.tensor([True, False])}, "not causal"),
        ({"mm_prefix_range": {0: [(0, 3)]}}, "images"),
        ({"rswa_prefix_lens": torch.zeros(2)}, "sliding window"),
        ({"tree": SimpleNamespace(max_tree=65)}, "64 tokens in one tree"),
    ],
)
def test_steps_that_trees_do_not_go_with_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        forward(layer(), step(**given))


def test_the_backend_stands_in_for_the_stock_one() -> None:
    backend = cuda.TritonTreeBackend
    assert backend.get_name() == "TRITON_ATTN"
    # A graph captured for steps of several tokens would replay the causal kernel for a tree.
    support = backend.get_builder_cls().get_cudagraph_support(None, None)
    assert support == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
