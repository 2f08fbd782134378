# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that this package relies on, by the process that uses it; see `probe`.

Tests compare these lists with what the package reads of vLLM's objects. Methods that subclasses
override are in `overrides`.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from vllm_slo.engine.compat.probe import Seam, check

_SCHEDULER: Final = "vllm.v1.core.sched.scheduler.Scheduler"
_REQUEST: Final = "vllm.v1.request.Request"
_MANAGER: Final = "vllm.v1.core.kv_cache_manager.KVCacheManager"
_COORDINATOR: Final = "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator"
_POOL: Final = "vllm.v1.core.block_pool.BlockPool"
_BLOCK: Final = "vllm.v1.core.kv_cache_utils.KVCacheBlock"
_QUEUE: Final = "vllm.v1.core.sched.request_queue.FCFSRequestQueue"
_STRUCTURED: Final = "vllm.v1.structured_output.StructuredOutputManager"
_STEP: Final = "vllm.v1.core.sched.output.SchedulerOutput"
_OUTPUT: Final = "vllm.v1.outputs.ModelRunnerOutput"
_RUNNER: Final = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_BATCH: Final = "vllm.v1.worker.gpu_input_batch.InputBatch"
_TABLE: Final = "vllm.v1.worker.block_table.BlockTable"
_SAMPLING: Final = "vllm.v1.sample.metadata.SamplingMetadata"
_MIN_TOKENS: Final = "vllm.v1.sample.logits_processor.builtin.MinTokensLogitsProcessor"
_EXTERNAL: Final = "num_external_computed_tokens"
_COMMON: Final = "vllm.v1.attention.backend.CommonAttentionMetadata"
_GROUP: Final = "vllm.v1.worker.utils.AttentionGroup"


def _held(owner: str, use: str, *names: str) -> tuple[Seam, ...]:
    """Names that instances of a class hold."""
    return tuple(Seam(owner, name, use) for name in names)


SCHEDULING: Final = (
    Seam(_SCHEDULER, "schedule", "a step", ("throttle_prefills",)),
    Seam(_SCHEDULER, "update_from_output", "a step", ("scheduler_output", "model_runner_output")),
    Seam(_SCHEDULER, "add_request", "following requests", ("request",)),
    Seam(_SCHEDULER, "finish_requests", "declining", ("request_ids", "finished_status")),
    Seam(_SCHEDULER, "get_request_counts", "quotes", ()),
    Seam(_SCHEDULER, "get_grammar_bitmask", "grammars on trees", ("scheduler_output",)),
    Seam(_SCHEDULER, "update_draft_token_ids", "trees", ("draft_token_ids",)),
    Seam(
        *(_SCHEDULER, "_reserve_prefill_lookahead", "limiting the tokens of a request"),
        ("request", "num_computed_tokens", "num_new_tokens"),
        called_by="schedule",
    ),
    Seam(
        *(_SCHEDULER, "_mamba_block_aligned_split", "limiting the tokens of a request"),
        ("request", "num_new_tokens", "num_new_local_computed_tokens", _EXTERNAL),
        called_by="schedule",
    ),
    Seam(
        *(_SCHEDULER, "_try_schedule_encoder_inputs", "limiting the images of a request"),
        called_by="schedule",
    ),
    Seam(*(_SCHEDULER, "_update_after_schedule", "pipelines"), called_by="schedule"),
    Seam(
        *(_SCHEDULER, "_update_request_with_output", "pipelines"),
        ("request", "new_token_ids"),
        called_by="update_from_output",
    ),
    Seam(_SCHEDULER, "set_pause_state", "pauses", ("pause_state",)),
    Seam(_SCHEDULER, "shutdown", "recording", ()),
    Seam(_SCHEDULER, "_free_request", "following requests", ("request", "delay_free_blocks")),
    Seam(_SCHEDULER, "_handle_blocked_waiting_request", "loads and grammars", ("request",)),
    Seam(_SCHEDULER, "_request_blocks_can_be_freed", "preempting", ("request",)),
    Seam(
        *(_SCHEDULER, "_preempt_request", "preempting"),
        ("request", "timestamp", "drop_stale_output"),
    ),
    *_held(_SCHEDULER, "the order of a step", "running", "waiting", "kv_holding_waiting"),
    *_held(_SCHEDULER, "quotes", "deferred_waiting"),
    *_held(_SCHEDULER, "following requests", "requests"),
    *_held(_SCHEDULER, "the tokens of a step", "max_num_scheduled_tokens", "num_spec_tokens"),
    *_held(_SCHEDULER, "KV blocks", "kv_cache_manager", "block_size", "num_lookahead_tokens"),
    Seam(_SCHEDULER, "_spec_decode_step_blocks", "the KV blocks of drafts"),
    *_held(_SCHEDULER, "seats", "max_num_active_reqs", "num_waiting_for_streaming_input"),
    *_held(_SCHEDULER, "lengths", "max_model_len"),
    *_held(_SCHEDULER, "LoRAs of a step", "lora_config"),
    *_held(_SCHEDULER, "stages and grammars", "structured_output_manager"),
    *_held(_SCHEDULER, "the configuration", "vllm_config"),
    *_held(_SCHEDULER, "chains of drafts", "prev_step_scheduled_req_ids"),
    *_held(_SCHEDULER, "preempting", "requires_kv_delivery"),
    *_held(_SCHEDULER, "pauses", "_pause_state"),
    *_held(_SCHEDULER, "prompts from elsewhere", "connector"),
    *_held(
        *(_SCHEDULER, "decodes that sit a step out", "current_step"),
        "num_sampled_tokens_per_step",
    ),
    *_held("vllm.multimodal.inputs.MultiModalFeatureSpec", "images", "mm_position", "identifier"),
    Seam("vllm.config.VllmConfig", "use_v2_model_runner", "chains of drafts"),
    *_held(_SCHEDULER, "steps in which nothing is decided", "_inflight_prefills"),
    Seam(_MANAGER, "get_blocks", "KV blocks", ("request_id",)),
    Seam(_MANAGER, "prefix_cache_lookup_enabled", "prefixes", ("request",)),
    *_held(_MANAGER, "KV blocks", "block_pool", "coordinator"),
    *_held("vllm.v1.core.kv_cache_manager.KVCacheBlocks", "KV blocks", "blocks"),
    *_held(_COORDINATOR, "KV blocks", "single_type_managers"),
    Seam(
        *(_COORDINATOR, "find_longest_cache_hit", "prefixes"),
        ("block_hashes", "max_cache_hit_length"),
    ),
    *_held(
        "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager",
        *("KV blocks", "req_to_blocks", "kv_cache_spec", "block_size"),
    ),
    Seam(_POOL, "get_num_free_blocks", "KV blocks", ()),
    Seam(_POOL, "touch", "prefixes of sessions", ("blocks",)),
    Seam(_POOL, "free_blocks", "prefixes of sessions", ("ordered_blocks",)),
    *_held(_POOL, "KV blocks", "num_gpu_blocks", "enable_caching"),
    *_held(_BLOCK, "prefixes of sessions", "block_id", "block_hash", "ref_cnt"),
    Seam(_QUEUE, "remove_requests", "the order of a step", ("requests",)),
    Seam(_QUEUE, "remove_request", "quotes", ("request",)),
    Seam(_QUEUE, "prepend_request", "the order of a step", ("request",)),
    Seam(_REQUEST, "is_finished", "draft servers", ()),
    Seam(_REQUEST, "take_events", "declining", ()),
    *_held(
        *(_REQUEST, "what a request asks for", "request_id", "client_index", "sampling_params"),
        *("arrival_time", "max_tokens", "prompt_token_ids", "lora_request", "trace_headers"),
        *("mm_features", "skip_reading_prefix_cache", "priority", "cache_salt"),
        *("resumable", "structured_output_request", "use_structured_output"),
    ),
    *_held(
        *(_REQUEST, "what a request has got", "status", "stop_reason", "num_tokens"),
        *("num_prompt_tokens", "num_computed_tokens", "num_output_tokens", "num_preemptions"),
        *("num_output_placeholders", "num_tokens_with_spec", "is_prefill_chunk"),
        *("all_token_ids", "output_token_ids", "spec_token_ids", "block_hashes"),
        *("num_stale_output_tokens", "drop_stale_output", "next_decode_eligible_step"),
    ),
    *_held(_STRUCTURED, "stages", "tokenizer", "reasoner_cls"),
    Seam(
        *(_STRUCTURED, "_get_constraint_bounds", "grammars on trees", ("request", "spec_tokens")),
        older="_get_constraint_start",
    ),
    Seam(
        *(_STRUCTURED, "grammar_bitmask", "grammars on trees"),
        ("requests", "structured_output_request_ids", "scheduled_spec_decode_tokens"),
    ),
    *_held(
        "vllm.v1.structured_output.request.StructuredOutputRequest",
        *("stages and grammars", "grammar", "reasoner", "reasoning_parser_kwargs"),
    ),
    *_held(
        *(_STEP, "what a step computes", "num_scheduled_tokens", "total_num_scheduled_tokens"),
        *("scheduled_new_reqs", "scheduled_cached_reqs", "scheduled_spec_decode_tokens"),
        *("num_spec_tokens_to_schedule", "num_invalid_spec_tokens"),
        *("has_structured_output_requests", "scheduled_encoder_inputs"),
    ),
    *_held(
        *("vllm.v1.core.sched.output.CachedRequestData", "what a step computes", "req_ids"),
        *("num_computed_tokens", "num_output_tokens"),
    ),
    *_held(
        *("vllm.v1.core.sched.output.NewRequestData", "what a step computes", "req_id"),
        "num_computed_tokens",
    ),
    *_held(_OUTPUT, "what a step gave", "sampled_token_ids", "req_ids", "req_id_to_index"),
    *_held("vllm.v1.outputs.DraftTokenIds", "trees", "req_ids", "draft_token_ids"),
    *_held(
        *("vllm.v1.engine.EngineCoreOutput", "reports and refusals", "request_id"),
        *("new_token_ids", "finish_reason", "stop_reason", "kv_transfer_params", "events"),
        "trace_headers",
    ),
)
"""What the scheduler reads, calls and replaces, in the engine's process."""

TREES: Final = (
    Seam(_RUNNER, "initialize_kv_cache", "the KV cache of drafts"),
    Seam(_RUNNER, "_prepare_inputs", "positions of tree nodes", called_by="execute_model"),
    Seam(*(_RUNNER, "_build_attention_metadata", "what tree nodes see"), called_by="execute_model"),
    Seam(_RUNNER, "maybe_get_kv_connector_output", "KV connectors", called_by="execute_model"),
    Seam(_RUNNER, "_sample", "sampling at tree nodes", called_by="sample_tokens"),
    Seam(_RUNNER, "_input_fits_in_drafter", "drafting", called_by="sample_tokens"),
    Seam(_RUNNER, "propose_draft_token_ids", "drafting"),
    Seam(_RUNNER, "sample_tokens", "reports on drafting", ("grammar_output",)),
    Seam(_RUNNER, "take_draft_token_ids", "sending trees", ()),
    Seam(_RUNNER, "shutdown", "closing drafters", ()),
    *_held(_RUNNER, "drafting", "drafter", "device", "vllm_config", "sampler"),
    *_held(_RUNNER, "the batch", "input_batch", "query_start_loc", "optimistic_seq_lens_cpu"),
    *_held(_RUNNER, "the batch", "positions", "max_num_reqs", "max_num_tokens"),
    Seam(_RUNNER, "profile_run", "the memory of drafts"),
    Seam(_RUNNER, "_sync_device", "the memory of drafts", ()),
    Seam(_RUNNER, "_dummy_sampler_run", "the memory of drafts", ("hidden_states",)),
    *_held(_RUNNER, "the KV cache", "kv_cache_config", "attn_groups"),
    *_held(
        *(_BATCH, "the batch", "req_ids", "req_id_to_index", "token_ids_cpu", "block_table"),
        *("num_tokens_no_spec", "num_computed_tokens_cpu", "spec_token_ids", "sampling_metadata"),
    ),
    Seam(_BATCH, "update_async_output_token_ids", "penalties", ()),
    *_held(_TABLE, "the KV cache", "num_blocks_per_row"),
    Seam(_TABLE, "get_device_tensor", "the KV cache", ("num_reqs",)),
    Seam(_TABLE, "get_numpy_array", "the KV cache", ()),
    *_held(
        *(_SAMPLING, "sampling at tree nodes", "all_greedy", "temperature", "top_p", "top_k"),
        *("generators", "frequency_penalties", "presence_penalties", "repetition_penalties"),
        *("output_token_ids", "prompt_token_ids", "allowed_token_ids_mask"),
        *("bad_words_token_ids", "logitsprocs", "logprob_token_ids"),
    ),
    *_held("vllm.v1.sample.sampler.Sampler", "seeded requests on trees", "topk_topp_sampler"),
    *_held(
        *(_MIN_TOKENS, "minimum lengths on trees", "min_toks", "device", "logits_slice"),
        "restore_logits_slice",
    ),
    *_held(
        *(_COMMON, "what tree nodes see", "query_start_loc", "query_start_loc_cpu", "seq_lens"),
        *("seq_lens_cpu_upper_bound", "num_reqs", "num_actual_tokens", "max_query_len"),
        *("max_seq_len", "block_table_tensor", "slot_mapping", "is_prefilling", "positions"),
        "causal",
    ),
    *_held(_GROUP, "what tree nodes see", "backend", "layer_names", "kv_cache_spec"),
    Seam(
        *(_GROUP, "build_metadata", "what tree nodes see", ("common_attn_metadata",)),
        older="get_metadata_builder",
    ),
    Seam("vllm.v1.attention.selector", "_cached_get_attn_backend", "choosing backends"),
    Seam("vllm.v1.attention.backends.registry", "register_backend", "choosing backends"),
    Seam("vllm.config.VllmConfig", "compilation_config", "attention layers"),
    *_held("vllm.v1.core.sched.output.NewRequestData", "the KV cache of drafts", "block_ids"),
    *_held(
        *("vllm.v1.core.sched.output.CachedRequestData", "the KV cache of drafts"),
        *("new_block_ids", "resumed_req_ids"),
    ),
)
"""What trees read, call and override of vLLM's V1 runner, in the workers' processes."""

SERVING: Final = (
    Seam("vllm.v1.engine.async_llm.AsyncLLM", "generate", "reading objectives"),
    Seam("vllm.v1.engine.async_llm.AsyncLLM", "encode", "refusing objectives of pooling"),
    *_held(
        *("vllm.outputs.RequestOutput", "reports", "outputs", "kv_transfer_params"),
    ),
    *_held("vllm.outputs.CompletionOutput", "reports", "index", "finish_reason", "stop_reason"),
    Seam("vllm.exceptions", "GracefulHTTPError", "declining"),
    Seam("vllm.exceptions", "VLLMValidationError", "refusing"),
)
"""What reads the requests of a server, in the process of its API."""


@cache
def check_scheduling(scheduler: type) -> None:
    """Refuse a vLLM whose scheduler is not as ``scheduler``, a subclass, expects it.

    Raises:
        IncompatibleVLLMError: one line that names the seam.
    """
    check(SCHEDULING, [scheduler])
