# SPDX-License-Identifier: Apache-2.0
"""Loads scripts of the folder ``benchmarks`` as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> Any:
    """A script as a module; scripts that it imports are loaded before it.

    The test file is skipped if the benchmarks are not there, as in an installed package.
    """
    path = FOLDER / f"{name}.py"
    if not path.is_file():
        pytest.skip("the benchmarks are not here", allow_module_level=True)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
