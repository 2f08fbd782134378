# SPDX-License-Identifier: Apache-2.0
"""Functions are compiled for the types that they declare, and code that is kept on disk is made
anew when what it comes from changes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from vllm_slo.core import kept_code
from vllm_slo.core.arrays import Floats2D
from vllm_slo.core.jit import jit

CALLEE = """
from typing import NamedTuple
from vllm_slo.core.jit import jit

FACTOR = {factor}
LIMIT = {limit}

class Pair(NamedTuple):
    {first}: float
    {second}: float

class {own}(NamedTuple):
    value: float

@jit
def scaled(x: float):
    return FACTOR * x

@jit
def value_of(x: {own}):
    return x.value
"""
CALLER = """
from __future__ import annotations
from kept_callee import LIMIT, Pair, scaled
from vllm_slo.core.jit import jit

@jit
def between(x: float):
    return scaled(x) + 1.0

@jit
def outermost(x: float):
    return between(x)

@jit
def limited(x: float):
    return min(x, LIMIT)

@jit
def first(pair: Pair):
    return pair.a
"""


@jit
def weighed(table: Floats2D, weight: float) -> float:
    return float(table.sum() * weight)


def test_a_call_with_other_types_is_converted_or_refused_and_never_compiled() -> None:
    table, half = np.ones((2, 3)), np.float32(0.5)
    call: Any = weighed
    assert weighed(table, 2) == 12.0  # an int for a float
    assert call(table, half) == 3.0
    assert weighed(table[:1], 1.0) == 3.0
    for other in (table.T, table[0], table.astype(np.float32), np.broadcast_to(1.0, (2, 3))):
        with pytest.raises(TypeError, match="No matching definition"):
            call(other, 1.0)
    dispatcher = call.compiled()
    assert len(dispatcher.signatures) == 1


def test_a_type_that_cannot_be_compiled_is_named() -> None:
    @jit
    def count(text: str) -> int:
        return len(text)

    with pytest.raises(TypeError, match=r"<class 'str'>: compiled functions do not take it"):
        count("a")


class Kept:
    """Two modules, the second of which calls the first, and the code that numba keeps of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(
        self,
        factor: float,
        limit: float = 9.0,
        fields: tuple[str, str] = ("a", "b"),
        own: str = "Own",
    ) -> None:
        """Write the first module, and import both as a new process would."""
        names = {"first": fields[0], "second": fields[1], "own": own}
        text = CALLEE.format(factor=factor, limit=limit, **names)
        (self.folder / "kept_callee.py").write_text(text)
        for name in ("kept_caller", "kept_callee"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        self.callee: ModuleType = importlib.import_module("kept_callee")
        self.caller: ModuleType = importlib.import_module("kept_caller")

    def call(self, name: str, argument: Any) -> tuple[float, bool]:
        """What a function of the second module answers, and whether its code was on disk."""
        function: Callable[[Any], float] = getattr(self.caller, name)
        result = function(argument)
        compiled: Any = function.compiled()  # type: ignore[attr-defined]
        return result, sum(compiled.stats.cache_hits.values()) > 0


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(kept_code, "folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "kept_caller.py").write_text(CALLER)
    yield Kept(tmp_path)
    for name in ("kept_caller", "kept_callee"):
        sys.modules.pop(name, None)


def test_a_caller_of_a_caller_notices_another_file(kept: Kept) -> None:
    kept.load(2.0)
    assert kept.call("outermost", 3.0) == (7.0, False)
    kept.load(2.0)
    assert kept.call("outermost", 3.0) == (7.0, True)
    kept.load(5.0)
    assert kept.call("outermost", 3.0) == (16.0, False)
    kept.load(5.0)
    assert kept.call("outermost", 3.0) == (16.0, True)


def test_a_constant_of_another_file_is_noticed(kept: Kept) -> None:
    kept.load(2.0, limit=4.0)
    assert kept.call("limited", 7.0) == (4.0, False)
    kept.load(2.0, limit=6.0)
    assert kept.call("limited", 7.0) == (6.0, False)


def test_a_named_tuple_of_another_file_is_noticed(kept: Kept) -> None:
    kept.load(2.0)
    assert kept.call("first", kept.callee.Pair(a=1.0, b=8.0)) == (1.0, False)
    kept.load(2.0, fields=("b", "a"))
    assert kept.call("first", kept.callee.Pair(a=1.0, b=8.0)) == (1.0, False)


def test_a_named_tuple_that_was_renamed_keeps_no_code_from_loading(kept: Kept) -> None:
    kept.load(2.0)
    assert kept.callee.value_of(kept.callee.Own(3.0)) == 3.0
    kept.load(2.0, own="Other")
    assert kept.callee.value_of(kept.callee.Other(4.0)) == 4.0
