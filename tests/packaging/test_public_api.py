# SPDX-License-Identifier: Apache-2.0
"""The public API: its names, their documentation, and what importing them costs."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from importlib.metadata import entry_points, version

import pytest

import vllm_slo

PUBLIC = ["LLM", "SLO", "SLOConfig", "Scheduler", "__version__", "errors", "tiny"]
HEAVY = ["torch", "vllm", "ray"]


def modules_loaded_by(statement: str) -> set[str]:
    """Which of HEAVY a fresh interpreter has loaded after ``statement``."""
    report = f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    code = f"import json, sys\n{statement}\n{report}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_public_names() -> None:
    assert sorted(vllm_slo.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(vllm_slo))


def test_a_private_or_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        vllm_slo.NoSuchName  # noqa: B018 - the access is what is tested


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(vllm_slo, name)
    documentation = inspect.getdoc(value)
    assert documentation
    # A class without its own text inherits one, and a dataclass is given its signature.
    assert "__doc__" in vars(value)
    assert not documentation.startswith(f"{name}(")


@pytest.mark.parametrize("name", ["LLM", "SLO", "SLOConfig", "Scheduler"])
def test_public_methods_are_documented(name: str) -> None:
    own = vars(getattr(vllm_slo, name))
    functions = {
        key: getattr(value, "__func__", value)
        for key, value in own.items()
        if not key.startswith("_") and callable(getattr(value, "__func__", value))
    }
    assert not [key for key, function in functions.items() if not inspect.getdoc(function)]


def test_every_error_descends_from_one_and_is_documented() -> None:
    kinds = [
        value
        for value in vars(vllm_slo.errors).values()
        if inspect.isclass(value) and value.__module__ == "vllm_slo.errors"
    ]
    assert {"VllmSLOError", "InvalidSLOError", "ConfigError", "ProfileError"} <= {
        kind.__name__ for kind in kinds
    }
    for kind in kinds:
        assert issubclass(kind, vllm_slo.errors.VllmSLOError)
        assert vars(kind).get("__doc__")


@pytest.mark.parametrize(
    "statement",
    [
        "import vllm_slo",
        "from vllm_slo import SLO",
        "from vllm_slo import SLOConfig",
        "from vllm_slo import errors",
        "from vllm_slo import tiny",
        "import vllm_slo.cli",
        "import vllm_slo.engine.serving.cpu_alias",
    ],
)
def test_neither_torch_nor_vllm_nor_ray_is_loaded(statement: str) -> None:
    assert modules_loaded_by(statement) == set()


def test_vllm_finds_the_scheduler_by_its_public_name() -> None:
    import_utils = importlib.import_module("vllm.utils.import_utils")
    resolved = import_utils.resolve_obj_by_qualname("vllm_slo.Scheduler")
    assert resolved is vllm_slo.Scheduler


def test_version_is_that_of_the_distribution() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", vllm_slo.__version__)
    assert version("vllm-slo") == vllm_slo.__version__


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("console_scripts", "vllm-slo", "vllm_slo.cli:main"),
        ("vllm.general_plugins", "slo", "vllm_slo.engine.serving.plugin:register"),
        ("vllm.platform_plugins", "slo", "vllm_slo.engine.serving.cpu_alias:register"),
    ],
)
def test_entry_points_load(group: str, name: str, value: str) -> None:
    (entry,) = entry_points(group=group, name=name)
    assert entry.value == value
    assert callable(entry.load())
