# SPDX-License-Identifier: Apache-2.0
"""The table of vLLM's features says what its tests say, and names every one of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from docs_blocks import ROOT

PAGE = (ROOT / "docs/reference/features.md").read_text(encoding="utf-8")
FEATURES = ROOT / "tests/engine/features"
A_TEST = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def rows_of_tests() -> dict[str, tuple[str, ...]]:
    """Test -> the words of its ``@row``."""
    found = {}
    for path in sorted(FEATURES.glob("test_*.py")):
        for name, function in functions(path).items():
            for call in function.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "row":
                    found[f"{path.name}::{name}"] = tuple(map(ast.literal_eval, call.args))
    return found


def rows_of_page() -> dict[str, tuple[str, ...]]:
    """Test -> the feature, and the first words of the other cells: what is before a colon."""
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and (test := A_TEST.fullmatch(cells[-1])):
            feature, *words = cells[:-1]
            short = tuple(word.partition(":")[0] for word in words)
            found["::".join(test.groups())] = (feature, *short)
    return found


def test_every_row_is_what_its_test_says() -> None:
    assert len(rows_of_tests()) > 20
    assert rows_of_page() == rows_of_tests()


@pytest.mark.parametrize("name", sorted({"::".join(found) for found in A_TEST.findall(PAGE)}))
def test_every_named_test_exists(name: str) -> None:
    file, _, function = name.partition("::")
    (path,) = (ROOT / "tests").rglob(file)
    assert function in functions(path)
