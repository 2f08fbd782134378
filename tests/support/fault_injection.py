# SPDX-License-Identifier: Apache-2.0
"""Finds each call from the engine into the policies, and from the scheduler into its parts, and
makes one of them fail.

The calls are found by program, so a new one cannot be forgotten:

- each function and class of ``vllm_slo.core`` that a module of the engine imports: a `Site` in that
  module;
- each public method and property of such a class;
- each public method and property of the classes of ``engine.scheduling``, ``engine.telemetry`` and
  ``engine.speculation``, and each of their functions that another module of the engine imports.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

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

    @property
    def is_core(self) -> bool:
        """Whether it is called in the policies."""
        if isinstance(self.owner, type):
            return self.owner.__module__.startswith("vllm_slo.core")
        return getattr(getattr(self.owner, self.name), "__module__", "").startswith("vllm_slo.core")


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
    """Names of a module that it imports from the policies or from parts of the engine."""
    homes = ("vllm_slo.core", *HOMES)
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(homes):
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
def replaced(site: Site, happens: Callable[[], None]) -> Iterator[None]:
    """``happens`` is called before each call of the site."""

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


class Fault:
    """Raises at the calls of a site from the ``first`` on, ``times`` times.

    Attributes:
        raised: how often it did.
    """

    def __init__(self, site: Site, first: int = 1, times: float = 1) -> None:
        self._site = site
        self._first = first
        self._times = times
        self._calls = 0
        self.raised = 0

    def _happens(self) -> None:
        self._calls += 1
        if self._calls >= self._first and self.raised < self._times:
            self.raised += 1
            raise InjectedError(str(self._site))

    @contextmanager
    def injected(self) -> Iterator[Fault]:
        with replaced(self._site, self._happens):
            yield self


@contextmanager
def counted(calls: Counter[Site], among: list[Site]) -> Iterator[None]:
    """Count the calls of sites."""
    with ExitStack() as stack:
        for site in among:
            stack.enter_context(replaced(site, functools.partial(calls.update, [site])))
        yield
