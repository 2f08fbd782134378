# SPDX-License-Identifier: Apache-2.0
"""The configuration of a draft model, made after the served model's."""

from __future__ import annotations

from vllm.config import ModelConfig, VllmConfig
from vllm.config.speculative import SpeculativeConfig

__all__ = ["draft_model_config"]


def draft_model_config(vllm_config: VllmConfig, model: str) -> ModelConfig:
    """The configuration of the draft model ``model``, a name or a folder.

    Raises:
        Exception: vLLM cannot read the model.
    """
    target = vllm_config.model_config
    return ModelConfig(
        model=model,
        runner="draft",
        tokenizer=target.tokenizer,
        tokenizer_mode=target.tokenizer_mode,
        trust_remote_code=target.trust_remote_code,
        dtype=target.dtype,
        seed=target.seed,
        enforce_eager=target.enforce_eager,
        max_logprobs=target.max_logprobs,
        spec_target_max_model_len=target.max_model_len,
        hf_overrides=SpeculativeConfig.hf_config_override,
    )
