# SPDX-License-Identifier: Apache-2.0
"""Refuses attention layers that cannot attend to trees, while the models are built.

`draft_check` refuses what a model's configuration tells. A model may give a layer a feature that
its configuration does not tell, so each layer is looked at, too. No step has to be refused later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType

from vllm_slo.engine.speculation.draft_check import PLAIN_KV, refuse
from vllm_slo.errors import ConfigError


class Group(Protocol):
    """Attention layers that share a backend."""

    @property
    def backend(self) -> type: ...

    @property
    def layer_names(self) -> list[str]: ...


def unsupported(impl: Any) -> str | None:
    """Why this layer cannot attend to a tree; None if it can."""
    low, high = getattr(impl, "tree_head_sizes", (impl.head_size, impl.head_size))
    reasons = {
        "ALiBi slopes": impl.alibi_slopes is not None,
        "attention sinks": impl.sinks is not None,
        "a sliding window": impl.sliding_window not in (-1, (-1, -1)),
        "chunked attention": getattr(impl, "chunk_lookback", -1) != -1,
        "the KV cache of another layer": impl.kv_sharing_target_layer_name is not None,
        f"{impl.attn_type} attention": impl.attn_type != AttentionType.DECODER,
        f"a head size of {impl.head_size}": not low <= impl.head_size <= high,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def check_layer(impl: Any) -> None:
    """Refuse a layer that cannot attend to a tree, of the model that is being built.

    Raises:
        ConfigError: one line, also in the log: the model, the feature, what to do.
    """
    if impl.kv_cache_dtype not in PLAIN_KV:
        refuse(
            ConfigError(
                f"--kv-cache-dtype: the checkpoint asks for {impl.kv_cache_dtype}, and trees need "
                "a KV cache that is not quantised; set --kv-cache-dtype bfloat16, or serve without "
                "drafts"
            )
        )
    reason = unsupported(impl)
    if reason is not None:
        name = get_current_vllm_config().model_config.model
        refuse(
            ConfigError(
                f"speculation: an attention layer of {name!r} has {reason}, which trees cannot "
                "verify; use another model, or serve without drafts"
            )
        )


def check_backends(groups: Iterable[Group]) -> None:
    """Refuse layers whose attention backend cannot verify trees.

    Raises:
        ConfigError: one line, also in the log: the layer, its backend, what to do.
    """
    for group in groups:
        if not getattr(group.backend, "verifies_trees", False):
            refuse(
                ConfigError(
                    f"speculation: the layer {group.layer_names[0]!r} uses the attention backend "
                    f"{group.backend.__name__}, which cannot verify trees; serve without drafts"
                )
            )
