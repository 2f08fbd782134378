# SPDX-License-Identifier: Apache-2.0
"""Whether the installed vLLM has every seam that will be used, as it is expected.

vLLM does not promise to keep these names. The probe looks at classes and functions alone and takes
about a tenth of a second. Each process runs it before it serves. The engine looks for what the
scheduler uses, a worker for what trees use, the API server for what reads requests.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import zip_longest
from types import FunctionType
from typing import Any, NamedTuple

from vllm_slo.engine.compat.version import SUPPORTED, vllm_version
from vllm_slo.errors import IncompatibleVLLMError


class Seam(NamedTuple):
    """A name of vLLM that this package relies on.

    Attributes:
        owner: the class, or the module, that has it; a dotted name.
        name: a method, a function, a class variable, or what instances hold.
        use: what it is used for.
        takes: the parameters that are passed to it; None: it is not called.
        called_by: the method of the same class that calls it; "": nothing is known.
        older: its name in an older version that is supported, with other parameters; "": the same.
    """

    owner: str
    name: str
    use: str
    takes: tuple[str, ...] | None = None
    called_by: str = ""
    older: str = ""


def check(seams: Iterable[Seam], subclasses: Iterable[type] = ()) -> None:
    """Refuse a vLLM that lacks a seam.

    Args:
        seams: the names that are used.
        subclasses: classes of ours; what they override must be called as they expect.

    Raises:
        IncompatibleVLLMError: one line that names the first seam that is not as expected, its use,
            the installed version and the fix.
    """
    for seam in seams:
        if problem := fault_of(seam):
            raise _incompatible(f"{problem}, which is needed for {seam.use}")
    for subclass in subclasses:
        if problem := fault_of_overrides(subclass):
            raise _incompatible(problem)


@contextmanager
def imports() -> Iterator[None]:
    """Where names of vLLM are imported: a missing one is told in one line.

    Raises:
        IncompatibleVLLMError: the import of one of them fails; one line that names it.
    """
    try:
        yield
    except ImportError as error:
        if isinstance(error, IncompatibleVLLMError) or not (error.name or "").startswith("vllm."):
            raise
        raise _incompatible(str(error).partition(" (")[0]) from error


def _incompatible(problem: str) -> IncompatibleVLLMError:
    return IncompatibleVLLMError(
        f"vLLM {vllm_version()} does not fit: {problem}; install vLLM {SUPPORTED}"
    )


def fault_of(seam: Seam) -> str | None:
    """What is wrong with a seam; None if it is as expected."""
    try:
        owner = resolve(seam.owner)
    except (ImportError, AttributeError):
        return f"there is no {seam.owner}"
    member = inspect.getattr_static(owner, seam.name, None)
    if member is None and seam.older and hasattr(owner, seam.older):
        return None
    if member is None and not (isinstance(owner, type) and holds(owner, seam.name)):
        return f"{seam.owner} has no {seam.name}"
    if seam.called_by and seam.name not in _names_in(getattr(owner, seam.called_by, None)):
        return f"{seam.owner}.{seam.called_by} does not call {seam.name}"
    if seam.takes is None:
        return None
    function = inspect.unwrap(getattr(member, "__func__", member))  # also of class methods
    if not isinstance(function, FunctionType):
        return f"{seam.owner}.{seam.name} is not a function"
    return _fault_of_call(f"{seam.owner}.{seam.name}", function, seam.takes)


def _fault_of_call(name: str, function: FunctionType, passed: tuple[str, ...]) -> str | None:
    """Why a function cannot be called with these parameters."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [p.name for p in parameters]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if unknown := next((one for one in passed if one not in names and not takes_any), None):
        return f"{name} has no parameter {unknown}"
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for p in parameters:
        required = p.default is p.empty and p.kind not in optional
        if required and p.name not in ("self", "cls", *passed):
            return f"{name} needs the parameter {p.name}"
    return None


def fault_of_overrides(subclass: type) -> str | None:
    """Which method of a subclass vLLM calls with a parameter that the subclass does not take."""
    for name, ours in vars(subclass).items():
        theirs = inspect.unwrap(getattr(super(subclass, subclass), name, None) or ours)
        if theirs is ours or not isinstance(theirs, FunctionType) or name.startswith("__"):
            continue
        taken = list(inspect.signature(ours).parameters.values())
        if any(p.kind is p.VAR_POSITIONAL for p in taken):
            continue
        for mine, passed in zip_longest(taken, inspect.signature(theirs).parameters):
            if passed is not None and (mine is None or mine.name != passed):
                owner = f"{theirs.__module__}.{theirs.__qualname__}"
                return f"{owner} has a parameter {passed} that is not known"
    return None


def holds(owner: type, name: str) -> bool:
    """Whether instances of a class hold a name: a field, a slot, or what its methods assign."""
    for base in owner.__mro__:
        if name in {*getattr(base, "__annotations__", ()), *getattr(base, "__slots__", ())}:
            return True
        for member in vars(base).values():
            if name in _names_in(member) and _assigns(inspect.unwrap(member), name):
                return True
    return False


def _assigns(function: FunctionType, name: str) -> bool:
    return any(
        step.opname == "STORE_ATTR" and step.argval == name
        for step in dis.get_instructions(function)
    )


def _names_in(function: Any) -> tuple[str, ...]:
    function = inspect.unwrap(function)
    return function.__code__.co_names if isinstance(function, FunctionType) else ()


def resolve(dotted: str) -> Any:
    """The module or the class of a dotted name."""
    try:
        return import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return getattr(import_module(module), name)
