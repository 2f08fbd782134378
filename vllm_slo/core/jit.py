# SPDX-License-Identifier: Apache-2.0
"""numba, loaded at the first call, with its on-disk cache where the file system allows one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from hashlib import sha256
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile ``function``, and those of this decorator that it calls, on its first call.

    The result takes and returns what ``function`` does. numba is not imported before that call: it
    is slow to load, and vLLM 0.32 on CPU cannot start an engine inside a process that has it.
    """

    @cache
    def compiled() -> Callable[P, R]:
        return _compile(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return compiled()(*args, **kwargs)

    call.compiled = compiled  # type: ignore[attr-defined]  # `_compile` looks for it in callers
    return call


def _compile(function: Callable[P, R]) -> Callable[P, R]:
    """Compile with the decorated functions among the globals compiled as well.

    The code is kept beside the source or in numba's user cache; where neither can be written (a
    read-only image without a home) it is compiled anew in each process.
    """
    import numba

    scope: dict[str, Any] = function.__globals__
    for name in function.__code__.co_names:
        inner = getattr(scope.get(name), "compiled", None)
        if inner is not None:
            scope[name] = inner()
    try:
        digest = _DIGESTS[function] = _digest(function)
        function.__qualname__ += f"_{digest}"
        compiled: Callable[P, R] = numba.njit(cache=True)(function)
    except (OSError, RuntimeError):
        compiled = numba.njit(function)
    return compiled


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
