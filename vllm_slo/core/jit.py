# SPDX-License-Identifier: Apache-2.0
"""Functions that numba compiles, each for the types that it declares and for no others.

So all of them can be compiled before a server is ready (`compile_package`), and nothing is compiled
later: a call with other types is converted where that is exact (an ``int`` for a ``float``), and a
TypeError elsewhere.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, wraps
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple, ParamSpec, TypeVar, get_args, get_origin
from typing import get_type_hints as hints_of

from vllm_slo.core import kept_code

P = ParamSpec("P")
R = TypeVar("R")

JITTED: list[Any] = []
"""Every function of this decorator that has been imported."""


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile ``function``, and those of this decorator that it calls, at `compile_package` or on
    its first call.

    Its parameters are ``bool``, ``int``, ``float``, the contiguous arrays of `core.arrays`, and
    tuples and named tuples of these. The result takes and returns what ``function`` does. numba is
    not imported before: it is slow to load, and vLLM on CPU cannot start an engine inside a process
    that has it.
    """

    @cache
    def compiled() -> Callable[P, R]:
        return _compile(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return compiled()(*args, **kwargs)

    call.compiled = compiled  # type: ignore[attr-defined]  # `_compile` looks for it in callers
    JITTED.append(call)
    return call


class Compiled(NamedTuple):
    """What `compile_package` has done.

    Attributes:
        functions: how many functions are compiled.
        seconds: how long that took.
        folder: where their code is kept; None: nowhere, so that each process compiles it anew.
    """

    functions: int
    seconds: float
    folder: Path | None

    def complaint(self) -> str:
        """What a log says where code is kept nowhere, with the remedy."""
        tried = ", ".join(map(str, kept_code.candidates()))
        return (
            f"Compiled code cannot be kept, since none of {tried} can be written. So each process "
            f"compiles it when it starts, which took {self.seconds:.0f} s. Set NUMBA_CACHE_DIR to "
            "a folder that can be written."
        )


def compile_package(*names: str) -> Compiled:
    """Compile all functions of these packages, or load the code that is kept of them.

    Without kept code this takes up to a minute on a slow core; with it about a second, mostly to
    import numba. If several processes start at once, one compiles and the others wait for it.
    """
    began_s = perf_counter()
    for name in names:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
            importlib.import_module(module.name)
    wanted: list[Any] = [
        call
        for call in JITTED
        if any(f"{call.__module__}.".startswith(f"{name}.") for name in names)
    ]
    folder = kept_code.folder()
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(kept_code.locked(folder))
            kept_code.adopt_shipped(folder)
        for call in wanted:
            call.compiled()
    return Compiled(len(wanted), perf_counter() - began_s, folder)


def _compile(function: Callable[P, R]) -> Callable[P, R]:
    """Compile with the decorated functions among the globals compiled as well."""
    import numba

    scope: dict[str, Any] = function.__globals__
    for name in function.__code__.co_names:
        inner = getattr(scope.get(name), "compiled", None)
        if inner is not None:
            scope[name] = inner()
    digest = _DIGESTS[function] = _digest(function)
    signature = _signature(function)
    folder = kept_code.folder()
    compiled: Callable[P, R]
    if folder is None:
        compiled = numba.njit(signature)(function)
    else:
        function.__qualname__ += f"_{digest}"
        with kept_code.numba_keeps_in(folder):
            compiled = numba.njit(signature, cache=True)(function)
    return compiled


def _signature(function: Callable[..., Any]) -> tuple[Any, ...]:
    """numba's types of the parameters, as they are declared."""
    hints = hints_of(function, include_extras=True)
    code = function.__code__
    return tuple(_numba_type(hints.get(name)) for name in code.co_varnames[: code.co_argcount])


def _numba_type(declared: Any) -> Any:
    import numpy as np
    from numba import from_dtype, types

    scalars = {bool: types.boolean, int: types.int64, float: types.float64}
    if declared in scalars:
        return scalars[declared]
    if get_origin(declared) is Annotated:
        array, axes = get_args(declared)
        (scalar,) = get_args(get_args(array)[1])
        return types.Array(from_dtype(np.dtype(scalar)), axes, "C")
    fields: Sequence[str] | None = getattr(declared, "_fields", None)
    if fields is not None:
        hints = hints_of(declared, include_extras=True)
        members = [_numba_type(hints[field]) for field in fields]
        return types.BaseTuple.from_types(members, declared)
    if get_origin(declared) is tuple:
        return types.BaseTuple.from_types([_numba_type(one) for one in get_args(declared)])
    raise TypeError(f"{declared}: compiled functions do not take it, see core.jit")


_DIGESTS: dict[Callable[..., Any], str] = {}


def _digest(function: Callable[..., Any]) -> str:
    """Digest of all that the code of ``function`` comes from: its file, and what it takes from
    other files. It is part of the name under which code is kept on disk.

    numba drops kept code when the file of the function changes, but it first reads the code, with
    the types of its arguments. That fails if a named tuple among them has another name now, or
    another home. And numba does not notice other files: a function that is called, a named tuple
    that is taken, or a constant that is read. Everything that a function calls must have been
    compiled before.
    """
    scope: dict[str, Any] = function.__globals__
    file = inspect.getfile(function)
    parts = [Path(file).read_bytes()]
    for name in sorted({*function.__code__.co_names, *map(str, function.__annotations__.values())}):
        value = scope.get(name)
        source = getattr(value, "py_func", value if hasattr(value, "_fields") else None)
        if source is not None:
            parts.append(_DIGESTS.get(source, "").encode())
            home = inspect.getfile(source)
            if home != file:
                parts.append(Path(home).read_bytes())
        elif isinstance(value, int | float):
            parts.append(f"{name}={value!r}".encode())
    return sha256(b"".join(parts)).hexdigest()[:16]
