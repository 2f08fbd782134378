# SPDX-License-Identifier: Apache-2.0
"""Each place in ``vllm_slo.engine`` that calls into ``vllm_slo.core``, and a way to watch it.

The list is mypy's, see `core_calls_plugin`. `wired` gives the functions of the engine code that is
the same but for these places, where it first tells who watches.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

import core_calls_plugin

import vllm_slo
from vllm_slo import engine

Span = tuple[int, int, int, int]
ROOT: Final = Path(vllm_slo.__file__).parent.parent
MYPY = sys.executable, "-m", "mypy"
CONFIG = f"""[mypy]
plugins = {core_calls_plugin.__file__}
check_untyped_defs = True
ignore_missing_imports = True
[mypy-vllm.*,torch.*,ray.*,numba.*,transformers.*,scipy.*,sklearn.*]
follow_imports = skip
"""


@dataclass(frozen=True, order=True)
class CoreCall:
    """A call into the policies, a property that is read, or ``in``.

    Attributes:
        module: of the engine.
        function: that has the call in it; "" for the module's own code.
        span: first line and column, and last ones.
        called: full name of what is called.
    """

    module: str
    function: str
    span: Span
    called: str

    def __str__(self) -> str:
        return f"{self.place}, line {self.span[0]}: {self.called.removeprefix('vllm_slo.core.')}"

    @property
    def place(self) -> str:
        return f"{self.module.removeprefix('vllm_slo.engine.')}:{self.function}"

    @contextmanager
    def watched(self, happens: Callable[[], None], *, after: bool = False) -> Iterator[None]:
        """``happens`` is called before each call, or after it; see `wired`."""
        _WATCHERS[self, after] = happens
        try:
            yield
        finally:
            del _WATCHERS[self, after]


@functools.cache
def core_calls() -> tuple[CoreCall, ...]:
    """All calls of the engine into the policies."""
    with tempfile.TemporaryDirectory() as folder:
        config, listed = Path(folder, "mypy.ini"), Path(folder, "calls")
        config.write_text(CONFIG, encoding="utf-8")
        done = subprocess.run(
            [*MYPY, "--config-file", config, "--cache-dir", os.devnull, "-p", engine.__name__],
            cwd=ROOT,
            env={**os.environ, core_calls_plugin.LIST: str(listed)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        spans: dict[str, dict[Span, str]] = defaultdict(dict)
        for line in listed.read_text(encoding="utf-8").splitlines():
            path, first, column, last, end, called = line.split("\t")
            spans[path][int(first), int(column), int(last), int(end)] = called
    return tuple(
        sorted(call for path, found in spans.items() for call in _calls_in(Path(path), found))
    )


def _calls_in(path: Path, spans: dict[Span, str]) -> Iterator[CoreCall]:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)

    def visit(node: ast.AST, function: str) -> Iterator[CoreCall]:
        if isinstance(node, _CALLS) and (called := spans.get(_span(node))) is not None:
            yield CoreCall(module, function, _span(node), called)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return visit(ast.parse(path.read_text(encoding="utf-8")), "")


_CALLS = ast.Call | ast.Attribute | ast.Compare


def _span(node: Any) -> Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


# --- watching ------------------------------------------------------------------------------------

_WATCHERS: dict[tuple[CoreCall, bool], Callable[[], None]] = {}
_PAUSED: list[None] = []
_OF_ALL: list[Callable[[], None]] = []
_REACHED: Final = "__reached__"


@contextmanager
def all_watched(happens: Callable[[], None]) -> Iterator[None]:
    """``happens`` is called before each call of `wired`."""
    _OF_ALL.append(happens)
    try:
        yield
    finally:
        _OF_ALL.remove(happens)


@contextmanager
def unwatched() -> Iterator[None]:
    """Nobody is told of calls meanwhile: a test makes them."""
    _PAUSED.append(None)
    try:
        yield
    finally:
        _PAUSED.pop()


class _Wire(ast.NodeTransformer):
    """``f(x)`` becomes ``__reached__(number, f, x)``, and ``a.b`` ``__reached__(number, a).b``."""

    def __init__(self, numbers: dict[Span, int]) -> None:
        self._numbers = numbers

    def visit(self, node: ast.AST) -> ast.AST:
        number = self._numbers.get(_span(node)) if isinstance(node, _CALLS) else None
        self.generic_visit(node)
        if number is None:
            return node
        if isinstance(node, ast.Call):
            node.args[:0] = [ast.Constant(number), node.func]
            node.func = ast.Name(_REACHED, ast.Load())
        elif isinstance(node, ast.Attribute):
            node.value = _reached_of(number, node.value)
        elif isinstance(node, ast.Compare):
            node.left = _reached_of(number, node.left)
        return node


def _reached_of(number: int, value: ast.expr) -> ast.Call:
    arguments = [ast.Constant(number), ast.Constant(None), value]
    return ast.Call(ast.Name(_REACHED, ast.Load()), arguments, [])


@contextmanager
def wired(calls: Iterable[CoreCall]) -> Iterator[None]:
    """Tell who watches these calls when they are made.

    The functions of the engine that gc knows get other code meanwhile. Code that runs at the import
    of a module is left as it is.
    """
    numbered = list(calls)

    def reached(number: int, call: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Any:
        for happens in () if _PAUSED else _OF_ALL:
            happens()
        _tell(numbered[number], after=False)
        done = args[0] if call is None else call(*args, **kwargs)
        _tell(numbered[number], after=True)
        return done

    codes: dict[tuple[str, str, int], CodeType] = {}
    for name in sorted({call.module for call in numbered}):
        module = importlib.import_module(name)
        vars(module)[_REACHED] = reached
        numbers = {call.span: n for n, call in enumerate(numbered) if call.module == name}
        path = str(module.__file__)
        tree = _Wire(numbers).visit(ast.parse(Path(path).read_text(encoding="utf-8")))
        codes |= _codes(compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True))
    gc.unfreeze()  # or gc would not know the functions of modules that tests were collected from
    stock = {
        function: function.__code__
        for function in gc.get_objects()
        if type(function) is FunctionType and _key(function.__code__) in codes
    }
    for function, code in stock.items():
        function.__code__ = codes[_key(code)]
    try:
        yield
    finally:
        for function, code in stock.items():
            function.__code__ = code


def _tell(call: CoreCall, *, after: bool) -> None:
    happens = _WATCHERS.get((call, after))
    if happens is not None and not _PAUSED:
        happens()


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> dict[tuple[str, str, int], CodeType]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    found = {_key(code): code}
    for one in inner:
        found |= _codes(one)
    return found
