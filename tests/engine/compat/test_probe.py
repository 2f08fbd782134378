# SPDX-License-Identifier: Apache-2.0
"""The probe: each name of vLLM that is used is listed, and a name that is missing is told."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm_slo.engine
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.compat import probe, seams
from vllm_slo.engine.compat.probe import Seam
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.worker.model_runner import TreeRunner
from vllm_slo.errors import IncompatibleVLLMError
from vllm_slo.sim.harness import VirtualEngine

pytestmark = pytest.mark.versions

GROUPS = (seams.SCHEDULING, seams.TREES, seams.SERVING)
ALL = tuple(seam for group in GROUPS for seam in group)
ENGINE = Path(vllm_slo.engine.__file__).parent


def named(seam: Seam) -> str:
    return f"{seam.owner.rpartition('.')[2]}.{seam.name}"


def test_this_vllm_has_every_seam() -> None:
    probe.check(ALL, [Scheduler, TreeRunner])
    assert len({(seam.owner, seam.name) for seam in ALL}) == len(ALL)


def rename(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let a name of a class, or of a module, be another one, as a new version of vLLM might."""
    for base in getattr(owner, "__mro__", (owner,)):
        for kind in ("__annotations__", "__slots__"):
            if name in vars(base).get(kind, ()):
                left = vars(base)[kind]
                left = {k: left[k] for k in left if k != name} if kind[2] == "a" else ()
                monkeypatch.setattr(base, kind, left)
        if name in vars(base):
            monkeypatch.delattr(base, name)
        for member in [] if isinstance(base, ModuleType) else list(vars(base).values()):
            function = inspect.unwrap(member)
            if isinstance(function, FunctionType) and name in function.__code__.co_names:
                names = [f"{name}_renamed" if n == name else n for n in function.__code__.co_names]
                monkeypatch.setattr(
                    function, "__code__", function.__code__.replace(co_names=tuple(names))
                )


@pytest.mark.parametrize("seam", ALL, ids=named)
def test_a_seam_that_is_gone_is_told_with_its_use(
    monkeypatch: pytest.MonkeyPatch, seam: Seam
) -> None:
    with monkeypatch.context() as patch:
        for name in filter(None, (seam.name, seam.older)):
            rename(patch, probe.resolve(seam.owner), name)
        with pytest.raises(IncompatibleVLLMError) as caught:
            probe.check([seam])
    told = str(caught.value)
    assert f"{seam.owner} has no {seam.name}, which is needed for {seam.use}; " in told
    assert "\n" not in told
    probe.check([seam])


class Theirs:
    """A class as it might be in another version of vLLM."""

    held: int

    def __init__(self) -> None:
        self.made = 1
        self._read(self.never_made)  # type: ignore[attr-defined]

    def schedule(self, throttle: bool = False) -> None:
        self._hook(1, 2)

    def _hook(self, request: int, tokens: int, *, more: int = 0) -> None: ...

    def _read(self, value: int) -> None: ...

    @staticmethod
    def free(blocks: list[int]) -> None: ...


HERE = f"{__name__}.Theirs"


@pytest.mark.parametrize(
    ("seam", "fault"),
    [
        (Seam(HERE, "made", "x"), None),
        (Seam(HERE, "held", "x"), None),
        (Seam(HERE, "never_made", "x"), f"{HERE} has no never_made"),
        (Seam(HERE, "moved", "x", older="made"), f"{HERE} has no moved"),
        (Seam(HERE, "moved", "x", older="free"), None),
        (Seam(f"{__name__}.Gone", "made", "x"), f"there is no {__name__}.Gone"),
        (Seam("vllm.gone.Gone", "made", "x"), "there is no vllm.gone.Gone"),
        (Seam(HERE, "_hook", "x", ("request", "tokens")), None),
        (Seam(HERE, "_hook", "x", ("request", "tokens", "more")), None),
        (Seam(HERE, "_hook", "x", ("request",)), f"{HERE}._hook needs the parameter tokens"),
        (Seam(HERE, "free", "x", ("block",)), f"{HERE}.free has no parameter block"),
        (Seam(HERE, "free", "x", ("blocks",)), None),
        (Seam(HERE, "made", "x", ()), f"{HERE}.made is not a function"),
        (Seam(HERE, "_hook", "x", called_by="schedule"), None),
        (Seam(HERE, "_read", "x", called_by="schedule"), f"{HERE}.schedule does not call _read"),
        (Seam(HERE, "_read", "x", called_by="gone"), f"{HERE}.gone does not call _read"),
    ],
)
def test_what_is_wrong_with_a_seam(seam: Seam, fault: str | None) -> None:
    assert probe.fault_of(seam) == fault


@pytest.mark.parametrize(
    ("takes", "fault"),
    [
        ("self, request, tokens, *, more=0", None),
        ("self, *args, **kwargs", None),
        ("self, request, *args, **kwargs", None),
        ("self, request, tokens, *, more=0, own=1", None),
        ("self, request, tokens", f"{HERE}._hook has a parameter more that is not known"),
        (
            "self, request, count, *, more=0",
            f"{HERE}._hook has a parameter tokens that is not known",
        ),
        (
            "self, tokens, request, *, more=0",
            f"{HERE}._hook has a parameter request that is not known",
        ),
    ],
)
def test_an_override_takes_what_vllm_passes(takes: str, fault: str | None) -> None:
    scope: dict[str, Any] = {"Theirs": Theirs}
    exec(f"class Ours(Theirs):\n    def _hook({takes}): ...\n    def new(self): ...", scope)
    assert probe.fault_of_overrides(scope["Ours"]) == fault
    if fault is not None:
        with pytest.raises(IncompatibleVLLMError, match=fault):
            probe.check([], [scope["Ours"]])


def test_a_scheduler_looks_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, config_folder: Path
) -> None:
    def made() -> VirtualEngine:
        return VirtualEngine(Scheduler, config_folder, StepTimeModel.prior().predict_shape_s)

    with monkeypatch.context() as patch:
        patch.setattr(seams, "SCHEDULING", (Seam(HERE, "gone", "a test"),))
        seams.check_scheduling.cache_clear()
        with pytest.raises(IncompatibleVLLMError, match="has no gone, which is needed for a test"):
            made()
    made()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import vllm.gone", "No module named 'vllm.gone'; install vLLM 0.31 to 0.33"),
        ("from vllm.config import Gone", "cannot import name 'Gone' from 'vllm.config'; install"),
    ],
)
def test_a_module_that_has_moved_is_told(code: str, told: str) -> None:
    with pytest.raises(IncompatibleVLLMError, match=re.escape(told)), probe.imports():
        exec(code)


def test_a_library_that_is_missing_is_not_vllms_fault() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library"), probe.imports():
        import_module("no_such_library")


def attributes(folder: str) -> set[str]:
    """Every name that the modules of a folder read of, or write to, an object."""
    files = ENGINE.glob("*.py") if folder == "." else (ENGINE / folder).rglob("*.py")
    trees = (ast.parse(path.read_text()) for path in files)
    return {
        node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }


def members(owner: Any) -> set[str]:
    """Every name that a class of vLLM, or an instance, may have."""
    found = {name for name in dir(owner) if not name.startswith("__")}
    for base in owner.__mro__:
        found |= {*getattr(base, "__annotations__", ())}
        for function in map(inspect.unwrap, vars(base).values()):
            if isinstance(function, FunctionType):
                found |= {n for n in function.__code__.co_names if probe.holds(owner, n)}
    return found


OTHERS = {
    # Fields of the configuration, which vLLM documents.
    *("cache_config", "model_config", "observability_config", "parallel_config", "vllm_config"),
    *("scheduler_config", "block_size", "dtype", "kv_cache_dtype", "is_encoder_decoder"),
    *("max_model_len", "max_num_batched_tokens", "load_config", "speculative_config"),
    # Names of objects of ours, or of other classes, that the class in question has as well.
    *("num_computed_tokens", "num_prompt_tokens", "session_id", "reset", "clear", "free", "model"),
    *(
        "shutdown",
        "add_request",
        "device",
        "has_unfinished_requests",
        "kv_cache",
        "block_ids",
        "rswa_prefix_lens",
    ),
}


@pytest.mark.parametrize(
    ("owner", "folders"),
    [
        ("vllm.v1.core.sched.scheduler.Scheduler", (".", "compat", "scheduling", "speculation")),
        ("vllm.v1.request.Request", (".", "compat", "scheduling", "speculation", "telemetry")),
        ("vllm.v1.core.kv_cache_manager.KVCacheManager", ("compat",)),
        ("vllm.v1.core.block_pool.BlockPool", ("compat", "scheduling")),
        ("vllm.v1.core.sched.output.SchedulerOutput", ("scheduling", "speculation", "telemetry")),
        ("vllm.v1.structured_output.StructuredOutputManager", ("compat", "scheduling")),
        ("vllm.v1.worker.gpu_model_runner.GPUModelRunner", ("compat", "worker")),
        ("vllm.v1.worker.gpu_input_batch.InputBatch", ("compat", "worker")),
        ("vllm.v1.worker.block_table.BlockTable", ("compat",)),
        ("vllm.v1.sample.metadata.SamplingMetadata", ("worker",)),
        ("vllm.v1.attention.backend.CommonAttentionMetadata", ("worker",)),
        ("vllm.v1.worker.utils.AttentionGroup", ("compat", "worker")),
    ],
)
def test_what_is_read_of_vllm_is_listed(owner: str, folders: tuple[str, ...]) -> None:
    listed = {name for seam in ALL for name in (seam.name, seam.older)}
    read = set().union(*map(attributes, folders))
    assert read & members(probe.resolve(owner)) <= listed | OTHERS
