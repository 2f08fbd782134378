# SPDX-License-Identifier: Apache-2.0
"""A draft model inside vLLM: its layers, its forward pass, and the contents of its KV cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.utils import AttentionGroup

from vllm_slo.core.arrays import Ints
from vllm_slo.engine.compat.runner import KV_GROUP, attention_metadata, registered_layers
from vllm_slo.engine.speculation.draft_check import draft_model_config
from vllm_slo.engine.worker.transfer import to_device
from vllm_slo.engine.worker.tree_attention.path_rows import ROWS, Rows

Blocks = NDArray[np.int32]
_NOTHING: Ints = np.empty(0, dtype=np.int64)


def common_metadata(
    query_start: Ints,
    seq_lens: Ints,
    block_table: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
) -> CommonAttentionMetadata:
    """The metadata of a causal pass that all attention backends share.

    Args:
        query_start: where each row's queries begin, [rows + 1].
        seq_lens: KV tokens of each row with its queries, [rows].
        block_table: on the device, [rows, columns].
        slot_mapping, positions: on the device, [tokens].
    """
    starts, lengths = query_start.astype(np.int32), seq_lens.astype(np.int32)
    device = block_table.device
    return CommonAttentionMetadata(
        query_start_loc=to_device(starts, device),
        query_start_loc_cpu=torch.from_numpy(starts),
        seq_lens=to_device(lengths, device),
        seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
        num_reqs=len(seq_lens),
        num_actual_tokens=int(query_start[-1]),
        max_query_len=int(np.diff(query_start).max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=block_table,
        slot_mapping=slot_mapping,
        causal=True,
        is_prefilling=torch.zeros(len(seq_lens), dtype=torch.bool),
        positions=positions,
    )


def config_with(vllm_config: VllmConfig, draft: ModelConfig) -> VllmConfig:
    """The engine's configuration with a draft as its model.

    vLLM's own way to replace a field completes the configuration anew, and so changes the parts
    that both share. Here the served model's configuration stays as it is. Passes of a dense draft
    beside a mixture of experts are not coordinated among data-parallel engines.
    """
    config = copy.copy(vllm_config)
    config.model_config = draft
    config.quant_config = VllmConfig.get_quantization_config(draft, config.load_config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.is_moe_model = draft.is_moe
    return config


class DraftModel:
    """A language model beside the served one, with layers of its own in the same KV cache groups.

    Args:
        model: name or folder of the draft.
        prefix: distinguishes its layers' names from those of other models.
    """

    def __init__(
        self, vllm_config: VllmConfig, model: str, device: torch.device, prefix: str
    ) -> None:
        self.device = device
        self.prefix = prefix
        self.vllm_config = config_with(vllm_config, draft_model_config(vllm_config, model))
        self.max_len = min(
            self.vllm_config.model_config.max_model_len, vllm_config.model_config.max_model_len
        )
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self.model: nn.Module | None = None
        self.layer_names: list[str] = []
        self._groups: list[AttentionGroup] = []

    def load(self) -> None:
        """Load the weights; the layers register themselves with the engine.

        If that fails, they are removed again.
        """
        layers = registered_layers(self.vllm_config)
        others = dict(layers)
        try:
            with set_model_tag(self.prefix):
                self.model = get_model(vllm_config=self.vllm_config, prefix=self.prefix)
        except Exception:
            layers.clear()
            layers.update(others)
            raise
        after = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        self.layer_names = [name for name in after if name not in others]

    @property
    def parameters(self) -> int:
        """Number of the loaded model's parameters on this device."""
        assert self.model is not None
        return sum(weights.numel() for weights in self.model.parameters())

    def bind(self, groups: Sequence[AttentionGroup]) -> None:
        """Take the attention groups of its layers, once the KV cache is there."""
        own = set(self.layer_names)
        self._groups = [group for group in groups if own & set(group.layer_names)]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        common: CommonAttentionMetadata,
        *,
        rows: Rows | None = None,
    ) -> Tensor:
        """Hidden states of one pass, [tokens, hidden].

        With ``rows`` the layers write keys and values by ``rows``, else by the slot mapping.
        """
        metadata: dict[str, Any] = {}
        for group in self._groups:
            built = attention_metadata(group, common)
            setattr(built, ROWS, rows)
            metadata.update(dict.fromkeys(group.layer_names, built))
        slots = {} if rows is not None else dict.fromkeys(self.layer_names, common.slot_mapping)
        with set_forward_context(
            metadata, self.vllm_config, num_tokens=len(tokens), slot_mapping=slots
        ):
            assert self.model is not None
            hidden: Tensor = self.model(input_ids=tokens, positions=positions)
        return hidden

    def profile(self, tokens: int, rows: int) -> Tensor:
        """Logits of ``rows`` of so many tokens, while there is no KV cache: this compiles the model
        and takes the memory of the largest pass."""
        inputs = torch.zeros(tokens, dtype=torch.int32, device=self.device)
        with set_forward_context(None, self.vllm_config, num_tokens=tokens):
            assert self.model is not None
            hidden: Tensor = self.model(input_ids=inputs, positions=inputs.long())
        return self.logits(hidden[:rows])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, [tokens, vocabulary of the target]."""
        if not len(hidden):  # several ranks cannot gather logits of no token: vLLM on CPU crashes
            return hidden.new_empty(0, self._vocabulary)
        assert self.model is not None
        logits: Tensor = self.model.compute_logits(hidden)
        return logits[:, : self._vocabulary]


class DraftCoverage:
    """How much of each KV block holds the draft's keys and values.

    The draft shares block tables with the target. A step without drafting leaves holes in the
    draft's KV, also in blocks that another request computes and shares. This record finds them, and
    a later catch-up pass fills them.

    Args:
        num_blocks: blocks of the pool.
        block_size: tokens per block.
        trust_hits: False where cached blocks may come from another engine, without the draft's KV.
    """

    def __init__(self, num_blocks: int, block_size: int, *, trust_hits: bool = True) -> None:
        self._filled = np.zeros(num_blocks, dtype=np.int32)
        self._block_size = block_size
        self._trust_hits = trust_hits
        self._tokens: dict[str, int] = {}
        self._guesses: dict[str, tuple[int, Ints]] = {}

    def begin_step(self, output: SchedulerOutput) -> None:
        """Follow what the scheduler allocated and freed."""
        for request_id in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._tokens.pop(request_id, None)
            self._guesses.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._start(new.req_id, new.block_ids[KV_GROUP], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if blocks is None:
                continue
            if request_id in cached.resumed_req_ids:
                self._start(request_id, blocks[KV_GROUP], computed)
            else:
                self._filled[blocks[KV_GROUP]] = 0

    def _start(self, request_id: str, blocks: list[int], computed: int) -> None:
        """A request that (re)starts with ``computed`` tokens found in the prefix cache."""
        self._guesses.pop(request_id, None)
        hits = computed // self._block_size if self._trust_hits else 0
        self._filled[blocks[hits:]] = 0
        tokens = 0
        for block in blocks[:hits]:
            tokens += int(self._filled[block])
            if self._filled[block] < self._block_size:
                break
        self._tokens[request_id] = tokens

    def tokens(self, request_id: str) -> int:
        """Leading tokens of a request that the draft has computed."""
        return self._tokens.get(request_id, 0)

    def advance(self, request_id: str, end: int, blocks: Blocks) -> None:
        """Note that the draft has computed a request's first ``end`` tokens, in ``blocks``."""
        size = self._block_size
        first, last = self._tokens.get(request_id, 0) // size, (end - 1) // size
        self._filled[blocks[first:last]] = size
        self._filled[blocks[last]] = max(end - last * size, int(self._filled[blocks[last]]))
        self._tokens[request_id] = end

    def guess(self, request_id: str, tokens: Ints) -> None:
        """Note guesses whose KV lies behind the computed tokens of a request.

        They count as computed only once `confirm` finds them to be true.
        """
        if len(tokens):
            self._guesses[request_id] = self.tokens(request_id), tokens

    def confirm(self, request_id: str, committed: NDArray[np.int32], blocks: Blocks) -> None:
        """Count guesses that have become true as computed, and forget the others.

        Args:
            request_id: id of the request.
            committed: its tokens, [tokens].
            blocks: its blocks.
        """
        start, guessed = self._guesses.pop(request_id, (0, _NOTHING))
        if not len(guessed) or start != self.tokens(request_id):
            return
        actual = committed[start : start + len(guessed)]
        wrong = np.flatnonzero(actual != guessed[: len(actual)])
        right = int(wrong[0]) if len(wrong) else len(actual)
        if right:
            self.advance(request_id, start + right, blocks)
