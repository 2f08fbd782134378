# SPDX-License-Identifier: Apache-2.0
import os

# Read by vLLM when it is first imported, so they are set before anything else.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import json
from pathlib import Path

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's config.json and no weights, for the virtual engine."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines of this process first: vLLM on CPU cannot start one once numba has been loaded."""
    items.sort(key=lambda item: item.path.name != "test_llm.py")
