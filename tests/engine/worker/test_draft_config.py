# SPDX-License-Identifier: Apache-2.0
"""A draft model leaves the configuration of the served model as it is."""

from __future__ import annotations

import json
import shutil
from dataclasses import is_dataclass
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import EngineArgs
from vllm.config import VllmConfig

from vllm_slo import tiny
from vllm_slo.config.model import SLOConfig
from vllm_slo.config.serve_args import tree_arguments
from vllm_slo.config.speculation import DRAFT_KEY
from vllm_slo.engine.speculation.draft_check import check_draft, draft_model_config
from vllm_slo.engine.worker.proposers.lm import config_with
from vllm_slo.errors import ConfigError

DENSE = str(tiny.path("draft"))
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def dump(value: Any) -> Any:
    """All fields of a configuration, those of its parts included."""
    if is_dataclass(value) or hasattr(value, "to_dict"):
        return type(value).__name__, {name: dump(part) for name, part in vars(value).items()}
    if isinstance(value, dict):
        return {name: dump(part) for name, part in value.items()}
    return [dump(part) for part in value] if isinstance(value, list | tuple) else repr(value)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The built-in target as a mixture of experts, without weights."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    shutil.copytree(tiny.path("target"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, **EXPERTS}))
    return str(folder)


def engine(target: str, draft: str, **given: Any) -> VllmConfig:
    trees = tree_arguments(SLOConfig.from_additional_config({DRAFT_KEY: draft}).speculation, ())
    ours = {"scheduler_cls": "vllm_slo.Scheduler", "additional_config": {DRAFT_KEY: draft}}
    return EngineArgs(
        target, dtype="float32", max_model_len=256, **{**ours, **trees, **given}
    ).create_engine_config()


def check(config: VllmConfig, draft: str) -> None:
    check_draft(config, SLOConfig.from_additional_config({DRAFT_KEY: draft}).speculation)


@pytest.mark.parametrize("engines", [1, 2])
def test_the_served_models_configuration_stays(experts: str, engines: int) -> None:
    """Experts of several engines work together: they need to know of each other's tokens."""
    config = engine(experts, DENSE, data_parallel_size=engines)
    check(config, DENSE)
    before = dump(config)
    draft = config_with(config, draft_model_config(config, DENSE))
    assert dump(config) == before
    assert config.parallel_config.is_moe_model is True
    assert draft.parallel_config.is_moe_model is False, "a dense draft runs by itself"
    assert draft.model_config.model == DENSE
    registry = draft.compilation_config.static_forward_context
    assert registry is config.compilation_config.static_forward_context, "one KV cache for both"


def test_a_draft_of_experts_is_refused_where_engines_would_have_to_wait(experts: str) -> None:
    check(engine(experts, experts), experts)
    with pytest.raises(ConfigError, match=r"is a mixture of experts, .* use a dense draft$"):
        check(engine(experts, experts, data_parallel_size=2), experts)
