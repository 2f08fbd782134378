# SPDX-License-Identifier: Apache-2.0
"""Attention layers that cannot attend to trees are refused when they are made, not in a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from vllm_slo import tiny
from vllm_slo.engine.worker.tree_attention import cuda
from vllm_slo.engine.worker.tree_attention.cpu import TreeCPUBackend
from vllm_slo.engine.worker.tree_attention.layer_check import check_backends
from vllm_slo.errors import ConfigError

BACKENDS = {"cpu": TreeCPUBackend, "cuda": cuda.TreeCUDABackend}


@pytest.fixture(scope="module")
def engine() -> Any:
    return EngineArgs(str(tiny.path("target")), max_model_len=256).create_engine_config()


def layer(engine: Any, platform: str, **given: Any) -> Any:
    usual: dict[str, Any] = {
        "num_heads": 4,
        "head_size": 64,
        "scale": 0.125,
        "num_kv_heads": 2,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    with set_current_vllm_config(engine):
        return BACKENDS[platform].get_impl_cls()(**usual | given)


@pytest.mark.parametrize("platform", BACKENDS)
def test_full_attention_passes(engine: Any, platform: str) -> None:
    layer(engine, platform)
    layer(engine, platform, logits_soft_cap=30.0, kv_cache_dtype="bfloat16")


@pytest.mark.parametrize("platform", BACKENDS)
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"alibi_slopes": [1.0] * 4}, "ALiBi slopes"),
        ({"sinks": torch.zeros(4)}, "attention sinks"),
        ({"sliding_window": 128}, "a sliding window"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "the KV cache of another layer"),
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder attention"),
    ],
)
def test_what_trees_cannot_attend_with_is_refused(
    engine: Any, platform: str, given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        layer(engine, platform, **given)
    name = engine.model_config.model
    assert str(caught.value) == (
        f"speculation: an attention layer of {name!r} has {reason}, which trees cannot verify; use "
        "another model, or serve without drafts"
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"chunk_lookback": 1}, "chunked attention"),
        ({"head_size": 512}, "a head size of 512"),
        ({"head_size": 16}, "a head size of 16"),
    ],
)
def test_what_the_kernel_for_trees_does_not_take_is_refused(
    engine: Any, given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"has {reason}, which trees cannot verify"):
        layer(engine, "cuda", **given)


@pytest.mark.parametrize("platform", BACKENDS)
@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2", "int8_per_token_head", "nvfp4"])
def test_a_kv_cache_that_a_checkpoint_quantises_is_refused(
    engine: Any, platform: str, dtype: str
) -> None:
    """It takes effect while the model is built, long after the flags were checked."""
    with pytest.raises(ConfigError, match=f"^--kv-cache-dtype: the checkpoint asks for {dtype}, "):
        layer(engine, platform, kv_cache_dtype=dtype)


def test_layers_of_another_backend_are_refused() -> None:
    """A model may choose a backend of its own for some layers."""
    ours, theirs = (
        SimpleNamespace(backend=backend, layer_names=[name])
        for backend, name in ((TreeCPUBackend, "ours"), (CPUAttentionBackend, "theirs"))
    )
    check_backends([ours])
    with pytest.raises(ConfigError, match=r"^speculation: the layer 'theirs' uses the attention"):
        check_backends([ours, theirs])
