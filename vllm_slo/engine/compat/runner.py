# SPDX-License-Identifier: Apache-2.0
"""What trees read of vLLM's V1 model runner (``vllm/v1/worker/gpu_model_runner.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

Ints = NDArray[np.int64]

KV_GROUP: Final = 0
"""The KV cache group of trees. They need a model with one; `without_scratch` refuses others."""


def registered_layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """Layer name -> attention layer, of all models that were built for this engine. Mutable."""
    return vllm_config.compilation_config.static_forward_context


def attention_metadata(group: AttentionGroup, common: CommonAttentionMetadata) -> Any:
    """What the attention layers of a group need to know of a batch."""
    if hasattr(group, "build_metadata"):
        return group.build_metadata(common)
    return group.get_metadata_builder().build(0, common)  # vLLM 0.31


def kv_buffer(layers: Iterable[Any], tokens: int, like: torch.Tensor) -> torch.Tensor:
    """A buffer as large as the keys and values that so many tokens have in some attention layers.

    ``like``: has the type and the device of the keys.
    """
    per_token = sum(2 * layer.num_kv_heads * layer.head_size for layer in layers)
    return like.new_empty(tokens * per_token)


def profile_sampler(runner: GPUModelRunner, rows: int) -> torch.Tensor:
    """Sample in so many rows, with all that sampling may take, while memory is profiled.

    Returns:
        The logits of the rows, which a step keeps while it drafts, [rows, vocabulary].
    """
    width, dtype = runner.model_config.get_hidden_size(), runner.model_config.dtype
    hidden = torch.zeros(rows, width, dtype=dtype, device=runner.device)
    logits: torch.Tensor = runner.model.compute_logits(hidden)
    # Without this vLLM would profile its rejection sampler for as many rows again.
    speculative, runner.speculative_config = runner.speculative_config, None
    try:
        runner._dummy_sampler_run(hidden)
    finally:
        runner.speculative_config = speculative
    return logits


class RunnerBatch:
    """The batch and the KV cache of a runner. Every property is of this moment.

    The runner keeps the requests of a step in rows; ``index`` is a request's row.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner

    @property
    def device(self) -> torch.device:
        return self._runner.device

    # The KV cache.

    @property
    def block_size(self) -> int:
        group = self._runner.kv_cache_config.kv_cache_groups[KV_GROUP]
        return int(group.kv_cache_spec.block_size)

    @property
    def num_blocks(self) -> int:
        """KV blocks of the engine, scratch blocks included."""
        return int(self._runner.kv_cache_config.num_blocks)

    @property
    def layer_names(self) -> list[str]:
        """The attention layers of the served model and of drafts."""
        return self._runner.kv_cache_config.kv_cache_groups[KV_GROUP].layer_names

    @property
    def attention_groups(self) -> list[AttentionGroup]:
        """The attention layers by the backend that they share."""
        return self._runner.attn_groups[KV_GROUP]

    @property
    def block_table(self) -> NDArray[np.int32]:
        """Blocks of each request, [requests, columns]."""
        return self._runner.input_batch.block_table[KV_GROUP].get_numpy_array()

    def allocated_tokens(self, index: int) -> int:
        """Tokens for which a request has KV blocks."""
        blocks = self._runner.input_batch.block_table[KV_GROUP].num_blocks_per_row[index]
        return int(blocks) * self.block_size

    @property
    def device_block_table(self) -> torch.Tensor:
        """Blocks of each request on the device, as kernels get them, [requests, columns]."""
        return self._runner.input_batch.block_table[KV_GROUP].get_device_tensor(self.max_requests)

    # The requests.

    @property
    def max_requests(self) -> int:
        """Requests of a step at most."""
        return int(self._runner.max_num_reqs)

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests, by row."""
        return self._runner.input_batch.req_ids

    @property
    def index_of(self) -> dict[str, int]:
        """Request id -> row."""
        return self._runner.input_batch.req_id_to_index

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Token ids of prompts and outputs, [requests, positions]."""
        return self._runner.input_batch.token_ids_cpu

    @property
    def num_tokens(self) -> Ints:
        """Tokens of each request without draft tokens, [requests]."""
        return self._runner.input_batch.num_tokens_no_spec

    @property
    def num_computed_tokens(self) -> Ints:
        """Tokens of each request that were computed before this step, [requests]."""
        return self._runner.input_batch.num_computed_tokens_cpu

    def draft_tokens(self, index: int) -> list[int]:
        """The draft tokens of a request that this step verifies."""
        return self._runner.input_batch.spec_token_ids[index]

    @property
    def sampling(self) -> SamplingMetadata:
        return self._runner.input_batch.sampling_metadata

    # The step.

    def computed_after(self, output: SchedulerOutput, index: int) -> int:
        """Tokens of a request that will be computed once the step ``output`` is done."""
        scheduled = output.num_scheduled_tokens[self.request_ids[index]]
        return int(self.num_computed_tokens[index]) + scheduled

    @property
    def query_start(self) -> Ints:
        """Where the tokens of each request begin in the step, [requests + 1] and padding."""
        return self._runner.query_start_loc.np

    @property
    def sequence_lengths(self) -> Ints:
        """Tokens of each request after the step, as if all drafts are accepted, [max requests]."""
        return self._runner.optimistic_seq_lens_cpu.numpy()

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token of the step, on the device, [max tokens]. Mutable."""
        return self._runner.positions

    def complete_outputs(self) -> None:
        """Put the tokens of the step before into the requests' outputs, for penalties: under async
        scheduling they may have come only now."""
        self._runner.input_batch.update_async_output_token_ids()
