# SPDX-License-Identifier: Apache-2.0
"""The import law: the contracts of import-linter in pyproject.toml, and what they cannot say."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CLOSED: dict[str, set[str]] = {
    "vllm_slo.arguments": set(),
    "vllm_slo.check": {"yaml"},
    "vllm_slo.cli": set(),
    "vllm_slo.completion": {"shtab"},
    "vllm_slo.config": {"numpy", "pydantic", "yaml"},
    "vllm_slo.core": {"numba", "numpy"},
    "vllm_slo.engine.compat.api_server": set(),
    "vllm_slo.engine.gate": {"vllm", "wrapt"},
    "vllm_slo.engine.http.exchange": {"starlette"},
    "vllm_slo.engine.http.messages": {"starlette"},
    "vllm_slo.engine.http.models": {"starlette"},
    "vllm_slo.engine.http.outcome": set(),
    "vllm_slo.engine.serving.cpu_alias": set(),
    "vllm_slo.engine.speculation.draft_link": {"zmq"},
    "vllm_slo.engine.speculation.draft_peer": set(),
    "vllm_slo.engine.speculation.servers_report": set(),
    "vllm_slo.errors": set(),
    "vllm_slo.live": {"prometheus_client"},
    "vllm_slo.slo": {"msgspec", "pydantic"},
    "vllm_slo.traces": {"backports", "msgspec", "pydantic", "yaml"},
    "vllm_slo.wire": {"msgspec", "zmq"},
}
"""Module or package -> the foreign packages that it may import."""
ALONE = {"vllm_slo.engine.serving.cpu_alias", "vllm_slo.errors"}
"""Modules that import nothing of this package: they are loaded before anything else can be."""


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """What import-linter says of the package in a folder."""
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name in it or "") of every import in a file; relative ones begin with a dot."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            [name, *_] = node.args
            if isinstance(name, ast.Constant):
                yield str(name.value), ""


def breaches(folder: Path) -> list[str]:
    """What breaks the law beside the contracts."""
    found = []
    for path in sorted((folder / "vllm_slo").rglob("*.py")):
        module = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        homes = [home for home in CLOSED if f"{module}.".startswith(f"{home}.")]
        for target, name in imports_of(path):
            root, said = target.split(".")[0], f"{module} imports {target} {name}"
            if root == "vllm_slo" and module in ALONE:
                found.append(said)
            if root == "vllm_slo" and name.startswith("_") and not name.startswith("__"):
                found.append(f"{said}: it is private")
            foreign = root not in {*sys.stdlib_module_names, "vllm_slo"}
            if foreign and any(root not in CLOSED[home] for home in homes):
                found.append(said)
    return found


def test_the_package_keeps_the_import_law() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout
    assert not breaches(ROOT)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources, to be broken."""
    sources = shutil.ignore_patterns("*.pyc", "*.safetensors")
    shutil.copytree(ROOT / "vllm_slo", tmp_path / "vllm_slo", ignore=sources)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def add(folder: Path, name: str, text: str) -> None:
    with (folder / "vllm_slo" / name).open("a", encoding="utf-8") as file:
        file.write(f"\n{text}\n")


def test_the_contracts_find_what_they_forbid(copy: Path) -> None:
    """One breach of each kind, all at once: every run reads the whole package."""
    forbidden = {
        "core/batching/step.py": "def later():\n    from vllm.utils import math_utils",
        "core/lengths/forecast.py": "from vllm_slo.core.admission import program",
        "bench/errors.py": "from vllm_slo.engine.serving import llm",
        "engine/telemetry/series.py": "from vllm_slo.engine.speculation import servers_report",
        "live/merge.py": "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from vllm_slo.live.page import page",
        "live/page.py": "from vllm_slo.live.merge import merged",
        "router/front.py": "import torch",
        "engine/gate.py": "from ..engine.scheduling import length_regressor\nimport sklearn",
    }
    for name, text in forbidden.items():
        add(copy, name, text)
    said = lint(copy).stdout
    broken = {line.partition(" BROKEN")[0] for line in said.splitlines() if " BROKEN" in line}
    assert broken >= {
        "Imports point down only, in the engine",
        "Imports point down only, in the policies",
        "No circles",
        "Policies know no engine, no server and no configuration",
        "vLLM and torch stay in their homes",
        "scikit-learn stays in the length regressor",
        "Benchmarks are clients",
        "Few modules outside know the engine",
    }, said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("core/types.py", "import pydantic"),
        ("core/types.py", "import importlib\nimportlib.import_module('torch')"),
        ("slo/model.py", "def later():\n    import yaml"),
        ("engine/http/outcome.py", "from starlette import types"),
        ("engine/serving/cpu_alias.py", "from vllm_slo.errors import ConfigError"),
        ("router/front.py", "from vllm_slo.core.admission.program import _processed_by"),
    ],
)
def test_what_the_contracts_cannot_say_is_found(name: str, text: str, copy: Path) -> None:
    add(copy, name, text)
    assert len(breaches(copy)) == 1
