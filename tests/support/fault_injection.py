# SPDX-License-Identifier: Apache-2.0
"""Finds each call from the scheduler into its parts, and makes one call fail: one of these, or one
of the calls into the policies (`core_calls`).

The calls are found by program, so a new one cannot be forgotten: each public method and property of
the classes of ``engine.scheduling``, ``engine.telemetry`` and ``engine.speculation``, and each of
their functions that another module of the engine imports.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from core_calls import CoreCall

HOMES = ("vllm_slo.engine.scheduling", "vllm_slo.engine.speculation", "vllm_slo.engine.telemetry")
"""Packages of the scheduler's parts."""
BUILDING = ("vllm_slo.engine.composition",)
"""Modules that run at start only, where a fault is fatal as it should be."""


class InjectedError(RuntimeError):
    """What an injected call raises."""


@dataclass(frozen=True)
class Site:
    """A call that may fail: an attribute of a module or of a class."""

    owner: Any
    name: str

    def __str__(self) -> str:
        owner = self.owner
        home = owner.__name__ if isinstance(owner, ModuleType) else owner.__qualname__
        return f"{home.removeprefix('vllm_slo.')}.{self.name}"

    @contextmanager
    def watched(self, happens: Callable[[], None]) -> Iterator[None]:
        """``happens`` is called before each call."""
        with _replaced(self, happens):
            yield


def modules() -> list[ModuleType]:
    """The modules of the engine that the scheduler's process runs while it serves."""
    names = ["vllm_slo.engine.scheduler"]
    for home in HOMES:
        package = importlib.import_module(home)
        names += [one.name for one in pkgutil.iter_modules(package.__path__, f"{home}.")]
    return [importlib.import_module(name) for name in sorted(names) if name not in BUILDING]


def sites() -> list[Site]:
    """All calls that may fail."""
    found: dict[Site, None] = {}
    for module in modules():
        for name in _imported(module):
            thing = getattr(module, name)
            if isinstance(thing, ModuleType):
                found |= dict.fromkeys(
                    Site(thing, attribute) for attribute in _attributes_called(module, name)
                )
            elif callable(thing):
                if isinstance(thing, type):
                    found |= dict.fromkeys(_methods(thing))
                if not _is_exception(thing):
                    found[Site(module, name)] = None
        if module.__name__.startswith(HOMES):
            for thing in vars(module).values():
                if isinstance(thing, type) and thing.__module__ == module.__name__:
                    found |= dict.fromkeys(_methods(thing))
    return list(found)


def _imported(module: ModuleType) -> Iterator[str]:
    """Names of a module that it imports from parts of the engine."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(HOMES):
            yield from (alias.asname or alias.name for alias in node.names)


def _attributes_called(module: ModuleType, name: str) -> set[str]:
    """What a module calls as ``name.attribute()``."""
    return {
        node.func.attr
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == name
    }


def _is_exception(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, BaseException)


def _methods(cls: type) -> Iterator[Site]:
    if (
        getattr(cls, "_is_protocol", False)
        or _is_exception(cls)
        or not cls.__module__.startswith("vllm_slo.")
    ):
        return
    for name, thing in vars(cls).items():
        special = name.startswith("_") and name not in ("__len__", "__contains__", "__iter__")
        kinds = (staticmethod, classmethod, property)
        if not special and (inspect.isfunction(thing) or isinstance(thing, kinds)):
            yield Site(cls, name)


class _Class:
    """In place of a class that a module calls; else it is the class."""

    def __init__(self, cls: Any, call: Callable[..., Any]) -> None:
        self._cls = cls
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cls, name)

    def __instancecheck__(self, thing: Any) -> bool:
        return isinstance(thing, self._cls)


@contextmanager
def _replaced(site: Site, happens: Callable[[], None]) -> Iterator[None]:

    def before(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call, updated=())
        def calling(*args: Any, **kwargs: Any) -> Any:
            happens()
            return call(*args, **kwargs)

        return calling

    stock = inspect.getattr_static(site.owner, site.name)
    made: Any
    if isinstance(stock, property):
        assert stock.fget is not None
        made = property(before(stock.fget))
    elif isinstance(stock, staticmethod | classmethod):
        made = type(stock)(before(stock.__func__))
    elif isinstance(stock, type):
        made = _Class(stock, before(stock))
    else:
        made = before(stock)
    setattr(site.owner, site.name, made)
    try:
        yield
    finally:
        setattr(site.owner, site.name, stock)


Call = Site | CoreCall


class Fault:
    """Raises at a call from its ``first`` time on, ``times`` times; ``after`` a policy has done its
    work, or before.

    Attributes:
        raised: how often it did.
    """

    def __init__(
        self, call: Call, first: int = 1, times: float = 1, *, after: bool = False
    ) -> None:
        self.call = call
        self._first = first
        self.times = times
        self._after = {"after": True} if after else {}
        self._calls = 0
        self.raised = 0

    def _happens(self) -> None:
        self._calls += 1
        if self._calls >= self._first and self.raised < self.times:
            self.raised += 1
            raise InjectedError(str(self.call))

    @contextmanager
    def injected(self) -> Iterator[Fault]:
        with self.call.watched(self._happens, **self._after):
            yield self


@contextmanager
def counted(calls: Counter[Call], among: Iterable[Call]) -> Iterator[None]:
    """Count how often each of these calls is made."""
    with ExitStack() as stack:
        for call in among:
            stack.enter_context(call.watched(functools.partial(calls.update, [call])))
        yield
