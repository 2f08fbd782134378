# SPDX-License-Identifier: Apache-2.0
"""The import law: which part of vllm_slo may import which, read from the sources.

Every import counts: inside functions, under TYPE_CHECKING, relative, and
``import_module("...")`` with a literal name.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "vllm_slo"

POLICY = {"vllm_slo.core", "vllm_slo.slo", "vllm_slo.config", "vllm_slo.errors"}
DRAFT_LINK = {"vllm_slo.draft_socket", "vllm_slo.draft_wire"}

# Module prefix -> the local prefixes it may import, besides itself. The longest prefix decides.
LOCAL_LAW: dict[str, set[str]] = {
    "vllm_slo": {"vllm_slo"},  # the public names, loaded lazily
    "vllm_slo.errors": set(),
    "vllm_slo.core": {"vllm_slo.errors"},
    "vllm_slo.slo_fields": {"vllm_slo.errors"},
    "vllm_slo.slo": {"vllm_slo.core.types", "vllm_slo.errors", "vllm_slo.slo_fields"},
    "vllm_slo.access_config": {"vllm_slo.errors", "vllm_slo.slo", "vllm_slo.slo_fields"},
    "vllm_slo.access": {"vllm_slo.access_config", "vllm_slo.errors", "vllm_slo.slo"},
    "vllm_slo.config": {
        "vllm_slo.access_config",
        "vllm_slo.core.types",
        "vllm_slo.errors",
        "vllm_slo.slo",
        "vllm_slo.yaml_nodes",
    },
    "vllm_slo.http_slo": {
        "vllm_slo.config",
        "vllm_slo.errors",
        "vllm_slo.slo",
        "vllm_slo.slo_fields",
    },
    "vllm_slo.api_errors": set(),
    "vllm_slo.verdicts": {"vllm_slo.slo"},
    "vllm_slo.live": set(),
    "vllm_slo.yaml_nodes": set(),
    "vllm_slo.house_style": set(),
    "vllm_slo.ports": set(),
    "vllm_slo.profiles": {"vllm_slo.core", "vllm_slo.errors"},
    "vllm_slo.serve_args": {"vllm_slo.config", "vllm_slo.errors", "vllm_slo.tiny"},
    "vllm_slo.tiny": {"vllm_slo.errors"},
    "vllm_slo.draft_wire": {"vllm_slo.errors"},
    "vllm_slo.draft_socket": {"vllm_slo.draft_wire", "vllm_slo.errors"},
    "vllm_slo.bench": POLICY
    | {"vllm_slo.house_style", "vllm_slo.ports", "vllm_slo.profiles"}
    | {"vllm_slo.serve_args", "vllm_slo.tiny"},
    "vllm_slo.engine": POLICY
    | DRAFT_LINK
    | {
        "vllm_slo.access",
        "vllm_slo.api_errors",
        "vllm_slo.http_slo",
        "vllm_slo.live",
        "vllm_slo.profiles",
        "vllm_slo.serve_args",
        "vllm_slo.slo_fields",
        "vllm_slo.tiny",
        "vllm_slo.verdicts",
    },
    # What an HTTP request asks for, and what becomes of it, is nothing to the scheduler.
    "vllm_slo.engine.choice_groups": {"vllm_slo.engine.views", "vllm_slo.verdicts"},
    "vllm_slo.engine.gate": POLICY
    | {"vllm_slo.access", "vllm_slo.engine.plugin", "vllm_slo.verdicts"},
    "vllm_slo.engine.http_exchange": POLICY
    | {
        "vllm_slo.access",
        "vllm_slo.engine.gate",
        "vllm_slo.engine.http_messages",
        "vllm_slo.engine.http_outcome",
        "vllm_slo.http_slo",
        "vllm_slo.verdicts",
    },
    "vllm_slo.engine.http_messages": {"vllm_slo.api_errors"},
    "vllm_slo.engine.http_models": {
        "vllm_slo.engine.http_messages",
        "vllm_slo.http_slo",
        "vllm_slo.slo",
        "vllm_slo.slo_fields",
    },
    "vllm_slo.engine.http_outcome": {"vllm_slo.slo"},
    "vllm_slo.engine.cpu_alias": set(),
    "vllm_slo.router": POLICY
    | {
        "vllm_slo.api_errors",
        "vllm_slo.http_slo",
        "vllm_slo.live",
        "vllm_slo.serve_args",
        "vllm_slo.verdicts",
    },
    "vllm_slo.router.draft_fleet": {
        "vllm_slo.draft_socket",
        "vllm_slo.ports",
        "vllm_slo.errors",
        "vllm_slo.router",
    },
    "vllm_slo.router.replica": POLICY
    | {
        "vllm_slo.router",
        "vllm_slo.engine.cpu_alias",
        "vllm_slo.engine.lifeline",
        "vllm_slo.engine.plugin",
        "vllm_slo.engine.state",
        "vllm_slo.http_slo",
    },
    "vllm_slo.router.draft_server": POLICY
    | DRAFT_LINK
    | {"vllm_slo.router.draft_fleet", "vllm_slo.engine.draft_engine"},
    "vllm_slo.sim": POLICY
    | {
        "vllm_slo.access",
        "vllm_slo.profiles",
        "vllm_slo.engine.scheduler",
        "vllm_slo.engine.recording",
        "vllm_slo.bench.errors",
        "vllm_slo.bench.traces",
        "vllm_slo.house_style",
        "vllm_slo.yaml_nodes",
    },
    "vllm_slo.cli": {"vllm_slo"},
}

ENGINE_HOMES = {
    "vllm_slo.engine",
    "vllm_slo.tiny",
    "vllm_slo.sim.harness",
    "vllm_slo.sim.twin",
    "vllm_slo.sim.baselines",
    "vllm_slo.router.replica",
}

# Foreign package -> the only modules (with all below them) that may import it.
HOMES: dict[str, set[str]] = {
    "vllm": ENGINE_HOMES,
    "torch": ENGINE_HOMES,
    "ray": {"vllm_slo.router"},
    "sklearn": {"vllm_slo.engine.length_regressor"},
}

# Modules that may import the standard library and these foreign packages only.
CLOSED: dict[str, set[str]] = {
    "vllm_slo": set(),
    "vllm_slo.errors": set(),
    "vllm_slo.core": {"numpy", "numba"},
    "vllm_slo.slo": {"pydantic", "yaml"},
    "vllm_slo.access_config": {"pydantic"},
    "vllm_slo.access": set(),
    "vllm_slo.config": {"pydantic", "yaml"},
    "vllm_slo.profiles": {"numpy"},
    "vllm_slo.http_slo": {"msgspec"},
    "vllm_slo.api_errors": set(),
    "vllm_slo.verdicts": set(),
    "vllm_slo.engine.gate": {"vllm", "wrapt"},
    "vllm_slo.engine.http_exchange": {"starlette"},
    "vllm_slo.engine.http_messages": {"starlette"},
    "vllm_slo.engine.http_models": {"starlette"},
    "vllm_slo.engine.http_outcome": set(),
    "vllm_slo.live": {"prometheus_client"},
    "vllm_slo.draft_wire": {"msgspec"},
    "vllm_slo.draft_socket": {"zmq"},
    "vllm_slo.engine.draft_link": {"zmq"},
    "vllm_slo.serve_args": {"yaml"},
    "vllm_slo.yaml_nodes": {"yaml"},
    "vllm_slo.house_style": {"rich"},
    "vllm_slo.engine.cpu_alias": set(),
}


@dataclass(frozen=True)
class Import:
    """``module`` imports ``target``; ``name`` is the last part of a ``from`` import, or ""."""

    module: str
    target: str
    line: int
    name: str = ""

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_local_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import in ``source``, in file order of the syntax tree, with absolute targets."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module, is_package=is_package)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                target = full if base.startswith("vllm_slo") and is_local_module(full) else base
                yield Import(module, target, node.lineno, alias.name)
        elif isinstance(node, ast.Call) and literal_import(node) is not None:
            yield Import(module, literal_import(node) or "", node.lineno)


def absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    package = module.split(".") if is_package else module.split(".")[:-1]
    base = package[: len(package) - (node.level - 1)]
    return ".".join([*base, node.module] if node.module else base)


def literal_import(call: ast.Call) -> str | None:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    if name not in {"import_module", "__import__"} or not call.args:
        return None
    argument = call.args[0]
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    return None


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def longest_prefix(module: str, prefixes: dict[str, set[str]]) -> str | None:
    return max((p for p in prefixes if within(module, p)), key=len, default=None)


def breach(found: Import) -> str | None:
    """Why ``found`` breaks the law, or None."""
    root = found.target.split(".")[0]
    if root == "vllm_slo":
        return local_breach(found)
    if root in HOMES and not any(within(found.module, home) for home in HOMES[root]):
        return f"{found}: {root} only in {sorted(HOMES[root])}"
    # "vllm_slo" stands for its __init__ alone, not for every module without a rule of its own.
    closed = longest_prefix(found.module, CLOSED)
    if closed is None or (closed == "vllm_slo" and found.module != "vllm_slo"):
        return None
    if root not in sys.stdlib_module_names | CLOSED[closed]:
        return (
            f"{found}: {closed} may import, besides the standard library, {sorted(CLOSED[closed])}"
        )
    return None


def local_breach(found: Import) -> str | None:
    part = longest_prefix(found.module, LOCAL_LAW)
    if part is None or (part == "vllm_slo" and found.module != "vllm_slo"):
        return f"{found}: LOCAL_LAW says nothing about {found.module}"
    if within(found.target, part) and part != "vllm_slo":
        return None
    if not any(within(found.target, allowed) for allowed in LOCAL_LAW[part]):
        return f"{found}: {part} may import {sorted(LOCAL_LAW[part])}"
    if found.name.startswith("_") and not found.name.startswith("__"):
        return f"{found}: {found.name} is private to {found.target}"
    return None


def test_the_package_keeps_the_import_law() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 10
    found = [
        imported
        for path in files
        for imported in imports_of(
            path.read_text(encoding="utf-8"), module_of(path), is_package=path.stem == "__init__"
        )
    ]
    breaches = {reason for imported in found if (reason := breach(imported))}
    assert not breaches, "\n".join(sorted(breaches))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vllm_slo.core.admission", "import torch"),
        ("vllm_slo.core.admission", "def f():\n    from vllm.utils import x"),
        ("vllm_slo.core.admission", "import pydantic"),
        ("vllm_slo.core.admission", "from vllm_slo.slo import SLO"),
        ("vllm_slo.core.admission", "from ..slo import SLO"),
        ("vllm_slo.core.admission", "from vllm_slo import slo"),
        ("vllm_slo.core.admission", "from vllm_slo import LLM"),
        ("vllm_slo.core.admission", "if TYPE_CHECKING:\n    from vllm_slo.engine import views"),
        ("vllm_slo.core.admission", "importlib.import_module('torch')"),
        ("vllm_slo.core.admission", "__import__('vllm')"),
        ("vllm_slo.slo", "from vllm_slo.core.admission import plan"),
        ("vllm_slo.slo", "from vllm_slo.config import SLOConfig"),
        ("vllm_slo.config", "import vllm"),
        ("vllm_slo.errors", "from vllm_slo.core import types"),
        ("vllm_slo", "import torch"),
        ("vllm_slo.cli", "import vllm"),
        ("vllm_slo.bench.run", "import torch"),
        ("vllm_slo.bench.run", "from vllm_slo.engine.llm import LLM"),
        ("vllm_slo.engine.scheduler", "import ray"),
        ("vllm_slo.engine.steering", "from sklearn.linear_model import SGDRegressor"),
        ("vllm_slo.engine.scheduler", "from vllm_slo.core.admission import _helper"),
        ("vllm_slo.engine.cpu_alias", "import vllm"),
        ("vllm_slo.engine.http_exchange", "import vllm"),
        ("vllm_slo.engine.gate", "from vllm_slo.engine.http_exchange import Exchange"),
        ("vllm_slo.engine.http_outcome", "from vllm_slo.engine.http_exchange import Exchange"),
        ("vllm_slo.verdicts", "from vllm_slo.engine.gate import Caller"),
        ("vllm_slo.engine.cpu_alias", "from vllm_slo.errors import ConfigError"),
        ("vllm_slo.sim.trace", "import vllm"),
        ("vllm_slo.sim.harness", "from vllm_slo.engine.views import view"),
        ("vllm_slo.router.front", "import torch"),
        ("vllm_slo.nowhere", "import vllm_slo.errors"),
    ],
)
def test_a_breach_is_found(module: str, source: str) -> None:
    assert any(breach(imported) for imported in imports_of(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vllm_slo.core.admission", "import math, numpy as np\nfrom numba import njit"),
        ("vllm_slo.core.admission", "from vllm_slo.core.types import _Private"),
        ("vllm_slo.core.admission", "from ..errors import ConfigError"),
        ("vllm_slo.core.admission", "from . import types"),
        ("vllm_slo.slo", "from vllm_slo.core.types import Tier"),
        ("vllm_slo.config", "import yaml\nfrom vllm_slo.slo import SLO"),
        ("vllm_slo.engine.scheduler", "import torch, vllm.v1\nfrom vllm_slo import errors"),
        ("vllm_slo.sim.harness", "import vllm\nfrom vllm_slo.engine.scheduler import Scheduler"),
        ("vllm_slo.router.front", "import ray\nfrom ray import serve"),
        ("vllm_slo.bench.run", "import openai\nfrom vllm_slo.core.attainment import goodput"),
        ("vllm_slo.cli", "from vllm_slo.engine.llm import LLM"),
    ],
)
def test_a_lawful_import_passes(module: str, source: str) -> None:
    assert not [breach(imported) for imported in imports_of(source, module) if breach(imported)]
