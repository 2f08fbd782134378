# SPDX-License-Identifier: Apache-2.0
import fcntl
import gc
import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hermetic
import patience
import pytest
from depth import DEPTH, examples
from hypothesis import HealthCheck, settings
from model_config import CONFIG

hermetic.prepare()
# Read by vLLM when it is first imported, which is after this file was read.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
if "PYTEST_XDIST_WORKER" in os.environ:  # engines of several workers must not share one core
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
hermetic.watch()

# pytest has the time limits. What numba compiles at first takes longer than any example, and a
# machine may be slow.
settings.register_profile(
    "here",
    settings(),
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("here")


@pytest.fixture(scope="session")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's config.json and no weights, for the virtual engine."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


# --- time-outs -----------------------------------------------------------------------------------

TIMEOUTS = ("timeout", "session_timeout")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Time-outs as long as this machine and these depths need."""
    if is_worker(config):
        for name in TIMEOUTS:
            setattr(config.option, name, config.workerinput[name])  # type: ignore[attr-defined]
        return
    for name in TIMEOUTS:
        asked = getattr(config.option, name, None)  # 0: no limit
        seconds = float(config.getini(name)) if asked is None else asked
        setattr(config.option, name, DEPTH * patience.patience(seconds))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand these time-outs to the workers, which do not see options that were changed here."""
    node.workerinput |= {name: getattr(node.config.option, name) for name in TIMEOUTS}


def pytest_report_header() -> str:
    slower = patience.slowness()
    return (
        f"machine: time-outs are {slower:.1f} times the reference machine's ({patience.VARIABLE})"
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # what is left at the end is taken down as ever
    if not is_worker(config):
        hermetic.clean_up()


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


# --- files outside -------------------------------------------------------------------------------


def fail_for_files_elsewhere() -> None:
    if found := hermetic.opened_elsewhere():
        pytest.fail(
            f"opened files outside the repository: {', '.join(found)}\n"
            "A test makes what it needs, or is marked real_data.",
            pytrace=False,
        )


def pytest_collection_finish() -> None:
    if found := hermetic.opened_elsewhere():
        raise pytest.UsageError(f"collecting opened files outside the repository: {found}")
    gc.freeze()  # collecting made a million objects that stay


# --- one test at a time where it must be ----------------------------------------------------------

GATE, ROOM = Path(__file__), Path(patience.__file__)


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
    hermetic.reset_logging()
    with a_place_in_the_room(fcntl.LOCK_SH):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Of tests that run side by side, one marked ``alone`` has the machine to itself."""
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with a_place_in_the_room(kind):
        done = yield
        fail_for_files_elsewhere()
        return done


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None]:
    with a_place_in_the_room(fcntl.LOCK_SH):
        done = yield
        fail_for_files_elsewhere()
        return done


FIRST = ["test_llm.py", "test_tree_lossless.py", "test_replicas.py", "test_replica.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, so that workers end together; tests that wait for others last.

    Engines of this process before all: vLLM on CPU cannot start one once numba has been loaded.
    """
    left_out = set()
    if not os.environ.get(hermetic.DATA_VARIABLE):
        left_out.add("real_data")
    if DEPTH == 1:
        left_out.add("deep")
    without = {item for item in items if any(map(item.get_closest_marker, left_out))}
    config.hook.pytest_deselected(items=list(without))
    items[:] = [item for item in items if item not in without]
    places = {name: place for place, name in enumerate(FIRST)}
    waits = {item.path.name for item in items if item.get_closest_marker("alone")}
    items.sort(key=lambda item: places.get(item.path.name, len(FIRST) + (item.path.name in waits)))
    for item in items:
        scaled = [
            pytest.mark.timeout(DEPTH * patience.patience(mark.args[0]), **mark.kwargs)
            for mark in item.iter_markers("timeout")
        ]
        if scaled:
            item.add_marker(scaled[0], append=False)
