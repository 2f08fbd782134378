# SPDX-License-Identifier: Apache-2.0
"""Refuses engines and models that token trees do not work with, before any weights are loaded.

Where tree verification is wrong, answers are silently wrong, too. So every feature that it does not
support is refused by name, with one line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from pydantic import ValidationError
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.tokenizers import get_tokenizer

from vllm_slo.config.class_names import (
    SCHEDULER,
    SCHEDULER_NAMES,
    TREE_WORKER,
    TREE_WORKER_NAMES,
)
from vllm_slo.config.command_line import flag_of
from vllm_slo.config.draft_folder import check_draft_folder, check_vocabulary
from vllm_slo.config.serve_args import proposer_of
from vllm_slo.config.speculation import SpeculationConfig
from vllm_slo.engine.compat.classes import is_derived
from vllm_slo.errors import ConfigError, VllmSLOError

logger = init_logger(__name__)

PLAIN_KV: Final = ("auto", "float16", "bfloat16")
"""Values of ``--kv-cache-dtype`` that trees work with."""

_FIELD: Final = "speculation.draft_model"
_SERVERS_FIELD: Final = "speculation.draft_servers"
_WITHOUT: Final = "serve it without a draft model"
_WITHOUT_SERVERS: Final = "serve it without draft servers"
_FULL_ATTENTION: Final = ("full_attention", "attention")
_TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("vocab.json", "vocab.txt", "tekken.json"),
)


def check_draft(vllm_config: VllmConfig, config: SpeculationConfig) -> None:
    """Refuse an engine, or a draft model, with which trees fail or are wrong.

    If only some of several draft models cannot be read, they are left out instead. Draft servers
    are checked when they connect. Needs no weights; reads the configuration and the tokenizer of
    each draft model. Data parallelism (without draft servers), tensor parallelism, LoRA and
    structured output are supported.

    Args:
        vllm_config: of the engine, complete.
        config: names the draft models.

    Raises:
        ConfigError: one line: the field or flag, what is wrong, what to do.
    """
    check_flags(vllm_config, config)
    _check_engine(vllm_config)
    target = vllm_config.model_config
    if config.draft_servers is not None:
        _check_single(vllm_config)
        _check_model(target, "the served model", _WITHOUT_SERVERS, _SERVERS_FIELD)
        return
    _check_model(target, "the served model", _WITHOUT)
    unread = []
    for name in config.pool:
        try:
            draft = _read_draft(vllm_config, name)
        except _UnreadDraftError as error:
            unread.append(error)
            continue
        _check_model(draft, f"the draft model {draft.model!r}", "use another draft")
        _check_experts(vllm_config, draft)
        _check_vocabulary(target, draft)
    if len(unread) == len(config.pool):
        raise unread[0]


def refuse(error: VllmSLOError) -> NoReturn:
    """End the start of an engine, with one line in the log: vLLM shows only tracebacks of what a
    worker raises.

    Raises:
        VllmSLOError: the error.
    """
    logger.critical("vllm-slo: error: %s", error)
    raise error


class _UnreadDraftError(ConfigError):
    """A draft model whose configuration cannot be read: beside others it is left out."""


# --- flags ---------------------------------------------------------------------------------------


def check_flags(vllm_config: VllmConfig, config: SpeculationConfig) -> None:
    """Refuse an engine that lacks some of the flags that trees need.

    Raises:
        ConfigError: names the flag that is missing or has another value, and the value it needs.
    """
    if config.source is None:
        raise ConfigError(f"{_FIELD}: not set; name one with --draft-model or in the YAML file")
    spec, proposer = vllm_config.speculative_config, proposer_of(config)
    if spec is None or spec.method != "custom_class" or spec.model != proposer:
        raise _missing(config, "speculative-config", f'\'{{"model": "{proposer}", ...}}\'')
    if not is_derived(vllm_config.parallel_config.worker_cls, TREE_WORKER_NAMES):
        raise _missing(config, "worker-cls", TREE_WORKER)
    if not is_derived(vllm_config.scheduler_config.scheduler_cls, SCHEDULER_NAMES):
        raise _missing(config, "scheduler-cls", SCHEDULER)
    if spec.num_speculative_tokens < config.max_nodes:
        raise ConfigError(
            f"num_speculative_tokens: {spec.num_speculative_tokens} is below "
            f"speculation.max_nodes ({config.max_nodes}); raise the first or lower the second"
        )


def _missing(config: SpeculationConfig, flag: str, value: str) -> ConfigError:
    who, ours = "a draft model needs", "--draft-model D"
    if config.draft_servers is not None:
        who, ours = "draft servers need", f"--draft-servers {config.draft_servers}"
    return ConfigError(
        f"--{flag}: {who} --{flag} {value}; 'vllm-slo serve MODEL {ours}' sets all flags"
    )


# --- the engine ----------------------------------------------------------------------------------


def _check_engine(vllm_config: VllmConfig) -> None:
    _check_platform(vllm_config)
    _check_runner(vllm_config)
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    scheduler = vllm_config.scheduler_config
    refused = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        "--enable-dbo": parallel.use_ubatching,
        "--enable-prompt-embeds": vllm_config.model_config.enable_prompt_embeds,
        "--kv-sharing-fast-prefill": cache.kv_sharing_fast_prefill,
    }
    for flag, asked in refused.items():
        if asked:
            raise ConfigError(f"{flag}: does not work with a draft model; remove one of the two")
    if cache.cache_dtype not in PLAIN_KV:
        raise ConfigError(
            f"--kv-cache-dtype {cache.cache_dtype}: trees need a KV cache that is not quantised; "
            "set --kv-cache-dtype bfloat16, or serve without a draft model"
        )
    for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
        tokens = getattr(scheduler, name)
        if tokens is not None and tokens < scheduler.max_num_seqs:
            raise ConfigError(
                f"{flag_of(name)}: {tokens} tokens a step are fewer than the "
                f"{scheduler.max_num_seqs} requests of a batch; raise it or lower --max-num-seqs"
            )


def _check_runner(vllm_config: VllmConfig) -> None:
    """Refuse vLLM's V2 model runner: its scheduler's messages are not those that trees need."""
    if not vllm_config.use_v2_model_runner:
        return
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        cause, fix = "--attention-config: hisparse_config", "remove it"
    elif getattr(vllm_config, "watermark_config", None) is not None:
        cause, fix = "--watermark-config", "remove it"
    elif envs.VLLM_USE_V2_MODEL_RUNNER:
        cause, fix = "VLLM_USE_V2_MODEL_RUNNER=1", "unset it"
    else:
        cause, fix = "VLLM_USE_V2_MODEL_RUNNER", "set it to 0"
    raise ConfigError(
        f"{cause}: trees need vLLM's V1 model runner; {fix}, or serve without a draft model"
    )


def _check_experts(vllm_config: VllmConfig, draft: ModelConfig) -> None:
    """Refuse a mixture of experts whose passes all engines would have to make together."""
    engines = vllm_config.parallel_config.data_parallel_size
    if draft.is_moe and engines > 1:
        raise ConfigError(
            f"{_FIELD}: the draft model {draft.model!r} is a mixture of experts, which "
            f"--data-parallel-size {engines} would make draft in step; use a dense draft"
        )


def _check_single(vllm_config: VllmConfig) -> None:
    """Refuse several engines: draft servers have one address to connect to."""
    engines = vllm_config.parallel_config.data_parallel_size
    if engines > 1:
        raise ConfigError(
            f"--data-parallel-size {engines}: draft servers draft for one engine; remove it, or "
            f"{_WITHOUT_SERVERS}"
        )


def _check_platform(vllm_config: VllmConfig) -> None:
    if current_platform.is_cpu():
        return
    if not current_platform.is_cuda():
        raise ConfigError(f"{_FIELD}: trees run on CPU and CUDA alone; {_WITHOUT}")
    backend = vllm_config.attention_config.backend
    if backend is None or backend.name != "TRITON_ATTN":
        name = "not set" if backend is None else backend.name
        raise ConfigError(
            f"--attention-backend: is {name}; on CUDA a draft model needs TRITON_ATTN"
        )


# --- models --------------------------------------------------------------------------------------


def _check_model(model: ModelConfig, who: str, fix: str, field: str = _FIELD) -> None:
    for what, applies in _UNSUPPORTED.items():
        if applies(model):
            raise ConfigError(f"{field}: {who} {what}, which trees cannot verify; {fix}")


def _slides(model: ModelConfig) -> bool:
    if model.get_sliding_window() is None:
        return model.rswa_window is not None
    kinds = _layer_types(model) or ("sliding_attention",)
    return "sliding_attention" in kinds or model.rswa_window is not None


def _has_other_layers(model: ModelConfig) -> bool:
    checked = (*_FULL_ATTENTION, "sliding_attention")
    return any(kind not in checked for kind in _layer_types(model))


def _layer_types(model: ModelConfig) -> tuple[str, ...]:
    return tuple(getattr(model.hf_text_config, "layer_types", None) or ())


_UNSUPPORTED: Final[dict[str, Callable[[ModelConfig], bool]]] = {
    "is an encoder-decoder model": lambda m: m.is_encoder_decoder,
    "is a pooling model": lambda m: m.runner_type == "pooling",
    "is a multimodal model": lambda m: m.is_multimodal_model or m.uses_mrope,
    "is a diffusion model": lambda m: m.is_diffusion,
    "has state-space layers": lambda m: m.is_hybrid or m.is_attention_free or m.has_inner_state,
    "has latent attention (MLA)": lambda m: m.use_mla,
    "has sliding-window layers": _slides,
    "has chunked attention": lambda m: m.attention_chunk_size is not None,
    "has layers other than full attention": _has_other_layers,
    "has ALiBi": lambda m: m.uses_alibi,
    "has layers that share their KV cache": lambda m: bool(
        getattr(m.hf_text_config, "num_kv_shared_layers", 0)
    ),
}


def _read_draft(vllm_config: VllmConfig, name: str) -> ModelConfig:
    target = vllm_config.model_config
    check_draft_folder(name, target.model, target.tokenizer)
    try:
        return draft_model_config(vllm_config, name)
    except Exception as error:
        # vLLM puts a list after the sentence with the reason.
        reason = one_line(error).partition(" [type=")[0].partition(". ")[0]
        raise _UnreadDraftError(f"{_FIELD}: cannot read {name!r}: {reason}") from error


def one_line(error: Exception) -> str:
    """The first line of vLLM's message; pydantic puts lines before it, or names a field apart."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        if first["type"] != "value_error":
            return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {first['input']!r}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("Value error, ")]
    return (reasons or lines or [type(error).__name__])[0].removeprefix("Value error, ")


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


# --- vocabularies --------------------------------------------------------------------------------


def _check_vocabulary(target: ModelConfig, draft: ModelConfig) -> None:
    """Compare sizes, and the ids of tokens where the draft has a tokenizer of its own."""
    check_vocabulary(
        draft.model,
        draft.get_vocab_size(),
        target.get_vocab_size(),
        token_ids(target, draft.model),
        token_ids(target, target.tokenizer),
    )


def token_ids(target: ModelConfig, name: str) -> dict[str, int]:
    """Ids of a tokenizer's tokens; empty where there is no tokenizer that can be loaded.

    Args:
        target: the served model, which says how tokenizers are loaded.
        name: name or folder of the tokenizer.
    """
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return {}
    try:
        tokenizer = get_tokenizer(
            name,
            tokenizer_mode=target.tokenizer_mode,
            trust_remote_code=target.trust_remote_code,
        )
        return dict(tokenizer.get_vocab())
    except Exception:  # noqa: BLE001 - sizes were compared; a draft may have no tokenizer
        return {}
