# SPDX-License-Identifier: Apache-2.0
import os

# Read by vLLM when it is first imported, so they are set before anything else.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # engines of several workers must not share one core
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import fcntl
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

# pytest has the time limits, and what numba compiles at first takes longer than any example.
settings.register_profile("here", settings(), deadline=None)
settings.load_profile("here")

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


GATE, ROOM = Path(__file__), Path(__file__).with_name("live_server.py")


@contextmanager
def a_place_in_the_room(kind: int) -> Iterator[None]:
    """Hold the room's lock, shared or exclusive; who waits holds the gate, so nobody passes it."""
    with GATE.open() as gate, ROOM.open() as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, kind)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # a child may have inherited the open file


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup() -> Generator[None]:
    with a_place_in_the_room(fcntl.LOCK_SH):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Of tests that run side by side, one marked ``alone`` has the machine to itself."""
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with a_place_in_the_room(kind):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None]:
    with a_place_in_the_room(fcntl.LOCK_SH):
        return (yield)


FIRST = ["test_llm.py", "test_tree_lossless.py", "test_replicas.py", "test_replica.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that workers end together; tests that wait for others last.

    Engines of this process before all: vLLM on CPU cannot start one once numba has been loaded.
    """
    places = {name: place for place, name in enumerate(FIRST)}
    waits = {item.path.name for item in items if item.get_closest_marker("alone")}
    items.sort(key=lambda item: places.get(item.path.name, len(FIRST) + (item.path.name in waits)))
