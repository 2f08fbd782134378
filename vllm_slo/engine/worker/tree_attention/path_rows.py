# SPDX-License-Identifier: Apache-2.0
"""Trees on any paged backend: its own causal kernel over the rows of ``plan.RowPlan``.

``with_path_rows`` makes a backend of the same name and layout. Its ``forward`` first writes the
keys and values that the rows of this pass need into scratch blocks. A tree's nodes lie path by
path, so the queries are in the order of the rows. A pass without trees is the backend's own.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend

from vllm_slo.engine.worker.transfer import to_device
from vllm_slo.engine.worker.tree_attention.layer_check import check_layer
from vllm_slo.engine.worker.tree_attention.plan import RowPlan

ROWS = "path_rows"
"""Attribute of the attention metadata that holds a pass's ``Rows``."""
MASKS = "tree"
"""Attribute of the attention metadata that holds a pass's ``TreeMasks``, for backends that take
them: those whose class attribute ``takes_masks`` is true."""

Pair = tuple[Tensor, Tensor]


class Rows(Protocol):
    """Writes to the KV cache that the attention layers of one pass make beside the kernel call."""

    def write(self, impl: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor) -> None:
        """Write what the rows read into this layer's KV cache. ``key``, ``value``: of this pass."""


def copy_blocks(kv_cache: Tensor, copies: Tensor) -> None:
    """Copy blocks within one layer's KV cache; ``copies``: from, to, on the device, [2, blocks]."""
    source, target = copies.unbind()
    kv_cache.index_copy_(0, target, kv_cache.index_select(0, source))


def _write_again(
    impl: Any,
    layer: Any,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    sources: Tensor,
    slots: Tensor,
) -> None:
    """Write the keys and values of the tokens ``sources`` to ``slots``, too."""
    chosen = key.index_select(0, sources), value.index_select(0, sources)
    impl.do_kv_cache_update(layer, *chosen, kv_cache, slots)


class VerifyRows:
    """The rows of a verifying pass.

    Args:
        plan: the batch as rows.
        device: of the KV cache.

    Attributes:
        paths: see ``RowPlan``.
    """

    def __init__(self, plan: RowPlan, device: torch.device) -> None:
        self.paths = plan.paths
        self._copies = to_device(plan.copies, device)
        self._sources = to_device(plan.sources, device)
        self._slots = to_device(plan.slots, device)

    def write(self, impl: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor) -> None:
        copy_blocks(kv_cache, self._copies)
        _write_again(impl, layer, key, value, kv_cache, self._sources, self._slots)


class MaskRows:
    """A verifying pass of a backend that takes masks.

    The batch keeps its layout. The keys and values of the nodes that compaction may move are kept.

    Args:
        keep: tokens of the step whose keys and values are kept, [tokens].

    Attributes:
        kept: layer name -> keys and values of ``keep``.
    """

    def __init__(self, keep: Tensor) -> None:
        self._keep = keep
        self.kept: dict[str, Pair] = {}

    def write(self, impl: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor) -> None:
        del impl, kv_cache
        kept = key.index_select(0, self._keep), value.index_select(0, self._keep)
        self.kept[layer.layer_name] = kept


class BeamRows:
    """The rows of the draft's beam, with one query each.

    Their scratch blocks stay from pass to pass while the paths in them change, so the keys and
    values of every pass are kept.

    Args:
        copies: partly filled blocks and where they are copied to before the first pass, on the
            device, [2, blocks].

    Attributes:
        sources: nodes of this pass's paths, [x], numbered through all passes, this one included.
        slots: where their keys and values go, [x].
    """

    def __init__(self, copies: Tensor) -> None:
        self.sources = self.slots = torch.empty(0, dtype=torch.int64)
        self._copies = copies
        self._history: dict[str, Pair] = {}

    def write(self, impl: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor) -> None:
        past = self._history.get(layer.layer_name)
        if past is None:
            copy_blocks(kv_cache, self._copies)
        else:
            key, value = torch.cat((past[0], key)), torch.cat((past[1], value))
        self._history[layer.layer_name] = key, value
        _write_again(impl, layer, key, value, kv_cache, self.sources, self.slots)


def with_path_rows(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """A subclass of ``backend`` that verifies trees.

    Args:
        backend: a paged backend whose keys and values are written by ``do_kv_cache_update``, apart
            from ``forward``, and whose KV cache's first dimension is the block. Layers that cannot
            attend to trees are refused when they are made.
    """
    stock: Any = backend.get_impl_cls()

    class Impl(stock):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            check_layer(self)

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            rows: Rows | None = getattr(attn_metadata, ROWS, None)
            if rows is not None:
                rows.write(self, layer, key, value, kv_cache)
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )

    Impl.__name__ = Impl.__qualname__ = f"PathRows{stock.__name__}"

    class Backend(backend):
        verifies_trees: ClassVar[bool] = True

        @staticmethod
        def get_impl_cls() -> type[Any]:
            return Impl

    Backend.__name__ = Backend.__qualname__ = f"PathRows{backend.__name__}"
    return Backend
