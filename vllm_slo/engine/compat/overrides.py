# SPDX-License-Identifier: Apache-2.0
"""Methods of vLLM that our subclasses override although vLLM does not promise to keep them.

The subclasses define them; a test compares both with this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OVERRIDDEN: Final[Mapping[tuple[str, str], Mapping[str, str]]] = {
    ("vllm.v1.core.sched.async_scheduler.AsyncScheduler", "vllm_slo.engine.scheduler.Scheduler"): {
        "_mamba_block_aligned_split": "ends a chunk where state is cached, after the plan cut it",
        "_try_schedule_encoder_inputs": "encodes inputs of the planned tokens only",
        "_reserve_prefill_lookahead": "limits a request's tokens in a step to what is planned",
        "_free_request": "learns of a request's end, and adds the report to its last output",
    },
    (
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        "vllm_slo.engine.worker.model_runner.TreeRunner",
    ): {
        "profile_run": "takes the memory of the largest step with trees as well",
        "initialize_kv_cache": "hands the KV cache to the proposer",
        "_prepare_inputs": "gives tree nodes the positions of their depths",
        "_build_attention_metadata": "tells attention layers which tokens a tree node sees",
        "maybe_get_kv_connector_output": "has KV connectors load the served model's layers alone",
        "_sample": "samples at every tree node and accepts a path",
        "_input_fits_in_drafter": "drafts at every length; the proposer limits it by itself",
        "propose_draft_token_ids": "has the proposer draft trees instead of rows of tokens",
        "sample_tokens": "adds the report on drafting to the step's output",
        "take_draft_token_ids": "sends the drafted trees to the scheduler",
        "shutdown": "closes the proposer",
    },
    ("vllm.v1.worker.cpu_worker.CPUWorker", "vllm_slo.engine.worker.cpu.CPUTreeWorker"): {
        "init_device": "checks the configuration and makes the runner with trees",
        "compile_or_warm_up_model": "drafts and verifies trees before the first request",
    },
    ("vllm.v1.worker.gpu_worker.Worker", "vllm_slo.engine.worker.cuda.CUDATreeWorker"): {
        "init_device": "checks the configuration and registers attention with trees",
        "_make_model_runner": "makes the runner with trees",
        "compile_or_warm_up_model": "drafts and verifies trees before the first request",
    },
    (
        "vllm.v1.attention.backends.triton_attn.TritonAttentionMetadataBuilder",
        "vllm_slo.engine.worker.tree_attention.cuda.TritonTreeMetadataBuilder",
    ): {"_cudagraph_support": "keeps steps with trees out of captured graphs"},
    (
        "vllm.v1.attention.backends.triton_attn.TritonAttentionImpl",
        "vllm_slo.engine.worker.tree_attention.cuda.TritonTreeImpl",
    ): {
        "fused_output_quant_supported": "keeps quantised outputs out of the kernel for trees",
        "forward": "attends to tree nodes",
    },
}
"""(class of vLLM, our subclass) -> method or class variable -> what the override does."""
SINCE: Final[Mapping[str, tuple[int, int]]] = {"_make_model_runner": (0, 32)}
"""The release in which vLLM got a method that not all supported ones have."""
