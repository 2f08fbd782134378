# SPDX-License-Identifier: Apache-2.0
"""The smallest models of every kind that vLLM serves, with random weights, made on the spot.

Weights are large, so that the likeliest token is so by far and rounding decides nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import save_file

from vllm_slo import tiny

SPREAD: Final = 0.3
"""Standard deviation of the weights."""
TOKENS: Final = 2048
"""Of the built-in models, whose tokenizer all models here have."""
IMAGE: Final = TOKENS
"""The token that stands for a part of an image."""
SIZES: Final[dict[str, Any]] = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
}
VISION: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": SPREAD,
}
PIXELS: Final = 28
"""Height and width of an image."""
QUERIES: Final = 8
"""Tokens of an image."""


def dense(folder: Path) -> None:
    """A Llama, beside which the other models differ in one thing."""
    _save(folder, transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))


def sliding(folder: Path) -> None:
    """A model that attends to the last 16 tokens alone."""
    config = transformers.MistralConfig(**SIZES, sliding_window=16)
    _save(folder, transformers.MistralForCausalLM(config))


def experts(folder: Path) -> None:
    """Four experts, of which each token has two."""
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    _save(folder, transformers.MixtralForCausalLM(config))


def hybrid(folder: Path) -> None:
    """A Mamba layer and an attention layer."""
    config = transformers.GraniteMoeHybridConfig(
        **SIZES,
        layer_types=["mamba", "attention"],
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=16,
        num_local_experts=0,
        shared_intermediate_size=128,
    )
    _save(folder, transformers.GraniteMoeHybridForCausalLM(config))


def state_space(folder: Path) -> None:
    """Mamba layers alone."""
    config = transformers.Mamba2Config(
        vocab_size=TOKENS,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=32,
        n_groups=1,
        state_size=16,
        chunk_size=16,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
    )
    _save(folder, transformers.Mamba2ForCausalLM(config))


def vision_language(folder: Path) -> None:
    """A language model that reads an image as eight tokens."""
    config = transformers.Blip2Config(
        vision_config={**VISION, "image_size": PIXELS, "patch_size": PIXELS // 2},
        qformer_config={**VISION, "encoder_hidden_size": 32, "vocab_size": 64},
        text_config={
            "model_type": "opt",
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": TOKENS + 1,
            "max_position_embeddings": 512,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "init_std": SPREAD,
        },
        num_query_tokens=QUERIES,
        image_token_index=IMAGE,
    )
    model = transformers.Blip2ForConditionalGeneration(config)
    with torch.no_grad():  # else all images look alike
        model.query_tokens.normal_(std=SPREAD)
        model.language_projection.weight.normal_(std=SPREAD)
    _save(folder, model)
    size = {"height": PIXELS, "width": PIXELS}
    transformers.Blip2Processor(
        transformers.BlipImageProcessorPil(size=size),
        transformers.AutoTokenizer.from_pretrained(folder),
        num_query_tokens=QUERIES,
    ).save_pretrained(folder)


def encoder_decoder(folder: Path) -> None:
    """A Whisper, which hears 30 seconds."""
    config = transformers.WhisperConfig(
        vocab_size=TOKENS,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=8,
        max_target_positions=256,
        init_std=SPREAD,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        decoder_start_token_id=3,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    _save(folder, transformers.WhisperForConditionalGeneration(config))
    transformers.WhisperProcessor(
        transformers.WhisperFeatureExtractor(feature_size=8),
        transformers.AutoTokenizer.from_pretrained(folder),
    ).save_pretrained(folder)


def adapter(folder: Path) -> None:
    """A LoRA adapter of ``dense``."""
    torch.manual_seed(1)
    folder.mkdir(parents=True)
    width, rank = SIZES["hidden_size"], 8
    modules = ["q_proj", "v_proj"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": modules,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for layer in range(SIZES["num_hidden_layers"]):
        for module in modules:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, width) * SPREAD
            weights[f"{name}.lora_B.weight"] = torch.randn(width, rank) * SPREAD
    save_file(weights, folder / "adapter_model.safetensors")


def built_in(folder: Path) -> None:
    """The built-in target."""
    shutil.copytree(tiny.path("target"), folder)


BUILDERS: Final[dict[str, Callable[[Path], None]]] = {
    "dense": dense,
    "sliding": sliding,
    "hybrid": hybrid,
    "state_space": state_space,
    "vision_language": vision_language,
    "encoder_decoder": encoder_decoder,
    "adapter": adapter,
    "built_in": built_in,
}


def folder_of(name: str) -> str:
    """The folder in this one with the model, which is made at the first call."""
    folder = Path(name).resolve()
    if not folder.exists():
        torch.manual_seed(0)
        BUILDERS[name](folder)
    return str(folder)


def _save(folder: Path, model: Any) -> None:
    model.float().save_pretrained(folder)
    for file in tiny.path("target").glob("*token*"):
        shutil.copy(file, folder)
