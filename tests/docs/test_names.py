# SPDX-License-Identifier: Apache-2.0
"""Files, modules and code that the documentation names exist."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import docs_blocks
import pytest
from docs_blocks import ROOT

PAGES = [
    *docs_blocks.pages(),
    *(ROOT / name for name in ("CONTRIBUTING.md", "docker/README.md", "patches/README.md")),
    *(path for path in sorted((ROOT / "examples").iterdir()) if path.is_file()),
]
FOLDERS = "benchmarks/results|docker|docs|examples|patches|tests|vllm_slo"
A_PATH = re.compile(rf"(?<![\w./-])((?:{FOLDERS})/\w[\w./*-]*\w)")
A_SCRIPT = re.compile(r"(?<![\w./-])(benchmarks/\w+\.py)")
A_NAME = re.compile(r"(?<![\w./-])(vllm_slo(?:\.[A-Za-z_]\w*)+)(?!/)")
OLD_AND_NEW = re.compile(r"^\| `(vllm_slo\.[\w.]+)` \| `(vllm_slo\.[\w.]+)` \|$", re.MULTILINE)


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or a word in the source of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.is_file():
            words = re.findall(r"\w+", module.read_text(encoding="utf-8"))
            return set(parts[length : length + 1]) <= set(words)
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_on_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = {found for pattern in (A_PATH, A_SCRIPT) for found in pattern.findall(text)}
    missing = [path for path in paths if not any(ROOT.glob(path))]
    assert not missing + [name for name in A_NAME.findall(text) if not is_there(name)]


def test_names_that_do_not_exist_are_noticed() -> None:
    assert is_there("vllm_slo.Scheduler") and is_there("vllm_slo.engine.worker.TreeWorker")
    assert is_there("vllm_slo.core.admission.program.plan_admission")
    assert not is_there("vllm_slo.engine.steering") and not is_there("vllm_slo.engine.gate.Gate")
    assert A_PATH.findall("`vllm_slo/engine/steering.py`.") == ["vllm_slo/engine/steering.py"]


def test_names_that_moved_are_where_the_changelog_says() -> None:
    moved = OLD_AND_NEW.findall((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert len(moved) >= 10
    assert all(is_there(new) and not is_there(old) for old, new in moved if old != new)


def test_a_step_is_the_schedulers_own_code() -> None:
    """The methods on the page on architecture are those of the scheduler, line for line."""
    source = (ROOT / "vllm_slo" / "engine" / "scheduler.py").read_text(encoding="utf-8")
    lines = source.splitlines()
    methods = {
        node.name: textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    }
    shown = [
        block.text.rstrip()
        for block in docs_blocks.blocks_of(ROOT / "docs" / "architecture.md")
        if block.language == "python"
    ]
    assert shown == [methods[name] for name in ("schedule", "_plan", "update_from_output")]
