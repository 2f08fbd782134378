# SPDX-License-Identifier: Apache-2.0
"""What an engine with a draft model refuses: real configurations of vLLM, no engine, no weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import EngineArgs
from vllm.config import VllmConfig

from vllm_slo import Scheduler, tiny
from vllm_slo.config.class_names import TREE_PROPOSER
from vllm_slo.config.model import SLOConfig
from vllm_slo.config.serve_args import tree_arguments
from vllm_slo.config.speculation import DRAFT_KEY, SERVERS_KEY, SpeculationConfig
from vllm_slo.engine.speculation import draft_check
from vllm_slo.engine.speculation.draft_check import check_draft, check_flags
from vllm_slo.engine.worker.cpu import CPUTreeWorker
from vllm_slo.errors import ConfigError

TARGET, DRAFT = str(tiny.path("target")), str(tiny.path("draft"))
LAYERS = {"target": 6, "draft": 2}

SubclassedScheduler = type("SubclassedScheduler", (Scheduler,), {})
SubclassedWorker = type("SubclassedWorker", (CPUTreeWorker,), {})


def speculation(draft: str | list[str]) -> SpeculationConfig:
    return SLOConfig.from_additional_config({DRAFT_KEY: draft}).speculation


def engine(draft: str = DRAFT, target: str = TARGET, **given: Any) -> VllmConfig:
    """The configuration of an engine with every flag that a draft model sets, and others."""
    trees = tree_arguments(speculation(draft), ())
    fixed = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True}
    ours = {"scheduler_cls": "vllm_slo.Scheduler", "additional_config": {DRAFT_KEY: draft}}
    return EngineArgs(target, **{**fixed, **ours, **trees, **given}).create_engine_config()


def check(draft: str = DRAFT, target: str = TARGET, **given: Any) -> None:
    check_draft(engine(draft, target, **given), speculation(draft))


def refusal(draft: str = DRAFT, target: str = TARGET, **given: Any) -> str:
    config = engine(draft, target, **given)
    with pytest.raises(ConfigError) as caught:
        check_draft(config, speculation(draft))
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 400
    return said


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[..., str]:
    """Writes a copy of a built-in model without weights, its config.json edited."""

    def write(name: str = "draft", *, whole: bool = False, **edits: Any) -> str:
        copy = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny.path(name), copy, ignore=shutil.ignore_patterns("*.safetensors"))
        said = {} if whole else json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**said, **edits}))
        return str(copy)

    return write


# --- what is fine --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"data_parallel_size": 2},
        {"enable_lora": True, "max_num_batched_tokens": 8192},
        {"tensor_parallel_size": 2},
        {"kv_cache_dtype": "bfloat16"},
        {"scheduler_cls": "vllm_slo.engine.scheduler.Scheduler"},
        {"scheduler_cls": SubclassedScheduler},
        {"scheduler_cls": f"{__name__}.SubclassedScheduler"},
        {"worker_cls": "vllm_slo.engine.worker.CPUTreeWorker"},
        {"worker_cls": f"{__name__}.SubclassedWorker"},
        {"skip_tokenizer_init": True},
    ],
)
def test_it_passes(given: dict[str, Any]) -> None:
    check(**given)


def test_layers_that_only_may_have_windows_pass(folder_of: Callable[..., str]) -> None:
    full = ["full_attention"] * 2
    check(folder_of(sliding_window=64, layer_types=full))
    check(folder_of(sliding_window=None, layer_types=["sliding_attention"] * 2))
    check(folder_of(sliding_window=0))


def test_a_draft_without_a_tokenizer_passes(folder_of: Callable[..., str]) -> None:
    draft = Path(folder_of())
    for file in draft.iterdir():
        if file.name != "config.json":
            file.unlink()
    check(str(draft))


def test_a_draft_of_a_shorter_context_passes(folder_of: Callable[..., str]) -> None:
    check(folder_of(max_position_embeddings=128))


# --- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "flag", "value"),
    [
        ({"worker_cls": "auto"}, "worker-cls", "vllm_slo.engine.worker.TreeWorker"),
        ({"worker_cls": "no.such.Worker"}, "worker-cls", "vllm_slo.engine.worker.TreeWorker"),
        ({"scheduler_cls": None}, "scheduler-cls", "vllm_slo.Scheduler"),
        (
            {"scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler"},
            "scheduler-cls",
            "vllm_slo.Scheduler",
        ),
        ({"speculative_config": None}, "speculative-config", TREE_PROPOSER),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 30,
                    "prompt_lookup_max": 3,
                }
            },
            "speculative-config",
            TREE_PROPOSER,
        ),
    ],
)
def test_half_of_the_flags_are_refused(given: dict[str, Any], flag: str, value: str) -> None:
    said = refusal(**given)
    assert said.startswith(f"--{flag}: a draft model needs --{flag} ")
    assert value in said
    assert "'vllm-slo serve MODEL --draft-model D' sets all flags" in said


def test_fewer_tokens_than_nodes_are_refused() -> None:
    spec = {"method": "custom_class", "model": TREE_PROPOSER, "num_speculative_tokens": 23}
    assert refusal(speculative_config=spec) == (
        "num_speculative_tokens: 23 is below speculation.max_nodes (24); raise the first or lower "
        "the second"
    )
    check(speculative_config={**spec, "num_speculative_tokens": 25})


def test_flags_without_a_draft_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="draft_model: not set; name one with --draft-model"):
        check_flags(engine(), SpeculationConfig())


# --- the engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
    ],
)
def test_an_engine_of_another_kind_is_refused(given: dict[str, Any], flag: str) -> None:
    assert refusal(**given) == f"{flag}: does not work with a draft model; remove one of the two"


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("decode_context_parallel_size", 2, "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", 2, "--prefill-context-parallel-size"),
        ("enable_dbo", True, "--enable-dbo"),
        ("ubatch_size", 2, "--enable-dbo"),
    ],
)
def test_what_vllm_itself_may_refuse_is_refused(field: str, value: Any, flag: str) -> None:
    config = engine()
    setattr(config.parallel_config, field, value)
    with pytest.raises(ConfigError, match=f"^{flag}: does not work with a draft model"):
        check_draft(config, speculation(DRAFT))


def test_the_v2_model_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scheduler sends a resumed request as a new one, and what trees send goes unread."""
    config = engine()
    need = "trees need vLLM's V1 model runner; "
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ConfigError, match=f"^VLLM_USE_V2_MODEL_RUNNER=1: {need}unset it, or"):
        check_draft(config, speculation(DRAFT))
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    check_draft(config, speculation(DRAFT))
    config.watermark_config = object()
    with pytest.raises(ConfigError, match=f"^--watermark-config: {need}remove it, or"):
        check_draft(config, speculation(DRAFT))
    config.watermark_config = None
    config.attention_config.hisparse_config = object()
    with pytest.raises(ConfigError, match=f"^--attention-config: hisparse_config: {need}"):
        check_draft(config, speculation(DRAFT))
    config.attention_config.hisparse_config = None
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    with pytest.raises(ConfigError, match=f"^VLLM_USE_V2_MODEL_RUNNER: {need}set it to 0"):
        check_draft(config, speculation(DRAFT))


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2", "int8_per_token_head", "turboquant_4bit_nc"])
def test_a_quantised_kv_cache_is_refused(dtype: str) -> None:
    config = engine()
    config.cache_config.cache_dtype = dtype
    with pytest.raises(ConfigError, match=f"^--kv-cache-dtype {dtype}: .* set --kv-cache-dtype"):
        check_draft(config, speculation(DRAFT))


@pytest.mark.parametrize("field", ["max_num_batched_tokens", "max_num_scheduled_tokens"])
def test_a_budget_smaller_than_the_batch_is_refused(field: str) -> None:
    config = engine(max_num_seqs=64, max_num_batched_tokens=64)
    check_draft(config, speculation(DRAFT))
    setattr(config.scheduler_config, field, 63)
    flag = f"--{field.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"^{flag}: 63 tokens a step .* 64 requests .*; raise it"):
        check_draft(config, speculation(DRAFT))


def test_on_cuda_the_backend_must_be_the_one_with_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    class Platform:
        is_cuda = staticmethod(lambda: True)
        is_cpu = staticmethod(lambda: False)

    chosen = {name: engine(attention_backend=name) for name in (None, "TRITON_ATTN", "FLASH_ATTN")}
    monkeypatch.setattr(draft_check, "current_platform", Platform)
    check_draft(chosen["TRITON_ATTN"], speculation(DRAFT))
    for name, said in ((None, "not set"), ("FLASH_ATTN", "FLASH_ATTN")):
        with pytest.raises(ConfigError, match=f"backend: is {said}; .* needs TRITON_ATTN"):
            check_draft(chosen[name], speculation(DRAFT))
    monkeypatch.setattr(Platform, "is_cuda", staticmethod(lambda: False))
    with pytest.raises(ConfigError, match="trees run on CPU and CUDA alone"):
        check_draft(chosen[None], speculation(DRAFT))


# --- models --------------------------------------------------------------------------------------

MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "vocab_size": 2048,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 16,
}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "vocab_size": 2048,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_target_positions": 448,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edits", "what"),
    [
        ({"sliding_window": 64}, "has sliding-window layers"),
        (
            {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
            "has sliding-window layers",
        ),
        ({"attention_chunk_size": 64}, "has chunked attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "has layers other than full"),
        ({"num_kv_shared_layers": 1}, "has layers that share their KV cache"),
        (MLA, "has latent attention (MLA)"),
    ],
)
@pytest.mark.parametrize("name", ["target", "draft"])
def test_an_attention_without_trees_is_refused(
    name: str, edits: dict[str, Any], what: str, folder_of: Callable[..., str]
) -> None:
    if "layer_types" in edits:
        first, others = edits["layer_types"]
        edits = {**edits, "layer_types": [first, *[others] * (LAYERS[name] - 1)]}
    folder = folder_of(name, **edits)
    if name == "target":
        said, who, fix = (
            refusal(target=folder),
            "the served model",
            "serve it without a draft model",
        )
    else:
        said, who, fix = refusal(folder), f"the draft model {folder!r}", "use another draft"
    assert said.startswith(f"speculation.draft_model: {who} {what}")
    assert said.endswith(f", which trees cannot verify; {fix}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "what"),
    [
        (MAMBA, "has state-space layers"),
        (WHISPER, "is an encoder-decoder model"),
    ],
)
def test_a_draft_of_another_kind_is_refused(
    config: dict[str, Any], what: str, folder_of: Callable[..., str]
) -> None:
    folder = folder_of("draft", whole=True, **config)
    assert f"the draft model {folder!r} {what}, which" in refusal(folder)


def test_a_pooling_target_is_refused() -> None:
    assert "the served model is a pooling model" in refusal(runner="pooling", convert="embed")


@pytest.mark.parametrize(
    ("fact", "what"),
    [
        ("is_encoder_decoder", "is an encoder-decoder model"),
        ("is_diffusion", "is a diffusion model"),
        ("is_multimodal_model", "is a multimodal model"),
        ("uses_mrope", "is a multimodal model"),
        ("is_hybrid", "has state-space layers"),
        ("is_attention_free", "has state-space layers"),
        ("has_inner_state", "has state-space layers"),
        ("use_mla", "has latent attention"),
        ("uses_alibi", "has ALiBi"),
    ],
)
def test_what_vllm_says_of_a_model_is_heeded(
    fact: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine()
    vars(config.model_config).pop(fact, None)
    monkeypatch.setattr(type(config.model_config), fact, True)
    with pytest.raises(ConfigError, match=f"the served model {what}"):
        check_draft(config, speculation(DRAFT))


# --- the draft model -----------------------------------------------------------------------------


def test_a_draft_that_cannot_be_read_is_refused(
    folder_of: Callable[..., str], tmp_path: Path
) -> None:
    assert "there is no folder '/no/such/draft'" in refusal("/no/such/draft")
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in refusal(str(tmp_path / "empty"))
    folder = folder_of(architectures=["NoSuchForCausalLM"])
    assert refusal(folder) == (
        f"speculation.draft_model: cannot read {folder!r}: Model architectures "
        "['NoSuchForCausalLM'] are not supported for now"
    )
    assert "cannot read 'no-such-org/no-such-model': " in refusal("no-such-org/no-such-model")


def test_one_of_several_that_cannot_be_read_is_left_out(folder_of: Callable[..., str]) -> None:
    """It may be out of reach for now; what is wrong for good is refused beside others, too."""
    folder = folder_of(architectures=["NoSuchForCausalLM"])
    check_draft(engine(), speculation([DRAFT, folder]))
    with pytest.raises(ConfigError, match="cannot read"):
        check_draft(engine(), speculation([folder, "no-such-org/no-such-model"]))
    with pytest.raises(ConfigError, match="has a vocabulary of 1024 tokens"):
        check_draft(engine(), speculation([DRAFT, folder_of(vocab_size=1024)]))


@pytest.mark.slow
def test_broken_or_unknown_configurations_are_refused(folder_of: Callable[..., str]) -> None:
    """vLLM asks twice."""
    folder = folder_of(model_type="no-such-type")
    assert "has model type `no-such-type` but" in refusal(folder)
    (Path(folder) / "config.json").write_text("{")
    assert f"cannot read {folder!r}: " in refusal(folder)


def test_another_vocabulary_is_refused(folder_of: Callable[..., str]) -> None:
    folder = folder_of(vocab_size=1024)
    assert refusal(folder) == (
        f"speculation.draft_model: {folder!r} has a vocabulary of 1024 tokens, the served model of "
        "2048; use a draft of the same family"
    )


def test_a_vocabulary_size_that_only_vllm_can_read_is_compared() -> None:
    config = engine()
    object.__setattr__(config.model_config.model_arch_config, "vocab_size", 1024)
    with pytest.raises(ConfigError, match=r"has a vocabulary of 2048 tokens, .* of 1024;"):
        check_draft(config, speculation(DRAFT))


def test_other_ids_of_tokens_are_refused(folder_of: Callable[..., str]) -> None:
    folder = folder_of()
    path = Path(folder) / "tokenizer.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    ids = said["model"]["vocab"]
    ids["return"], ids["self"] = ids["self"], ids["return"]
    path.write_text(json.dumps(said), encoding="utf-8")
    assert f"to {folder!r} token '" in refusal(folder)


def test_ids_that_only_vllm_can_read_are_compared(folder_of: Callable[..., str]) -> None:
    """A unigram tokenizer lists its tokens in their order."""
    folder = folder_of()
    path = Path(folder) / "tokenizer.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    names = sorted(said["model"]["vocab"], key=said["model"]["vocab"].__getitem__)
    names[300], names[301] = names[301], names[300]
    said["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [[name, -1.0] for name in names]}
    path.write_text(json.dumps(said), encoding="utf-8")
    assert f"to {folder!r} token '" in refusal(folder)


# --- draft servers -------------------------------------------------------------------------------


def served(**given: Any) -> str:
    """What is said of an engine with draft servers; "" if it passes."""
    servers = {SERVERS_KEY: "tcp://127.0.0.1:5700"}
    config = SLOConfig.from_additional_config(servers).speculation
    trees = tree_arguments(config, ())
    fixed = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True}
    ours = {"scheduler_cls": "vllm_slo.Scheduler", "additional_config": servers}
    target = given.pop("target", TARGET)
    arguments = EngineArgs(target, **{**fixed, **ours, **trees, **given})
    try:
        check_draft(arguments.create_engine_config(), config)
    except ConfigError as error:
        return str(error)
    return ""


def test_an_engine_with_draft_servers_passes_without_a_draft_model() -> None:
    assert served() == ""
    assert served(tensor_parallel_size=2) == ""


def test_what_draft_servers_do_not_serve_is_refused(folder_of: Callable[..., str]) -> None:
    assert served(data_parallel_size=2).startswith("--data-parallel-size 2: draft servers draft")
    assert served(pipeline_parallel_size=2).startswith("--pipeline-parallel-size: does not work")
    assert served(worker_cls="auto") == (
        "--worker-cls: draft servers need --worker-cls vllm_slo.engine.worker.TreeWorker; "
        "'vllm-slo serve MODEL --draft-servers tcp://127.0.0.1:5700' sets all flags"
    )
    spec = {"method": "custom_class", "model": TREE_PROPOSER, "num_speculative_tokens": 24}
    assert served(speculative_config=spec).startswith("--speculative-config: draft servers need")
    windows = folder_of("target", sliding_window=64)
    assert served(target=windows).startswith(
        "speculation.draft_servers: the served model has sliding-window layers"
    )
