# SPDX-License-Identifier: Apache-2.0
"""numba, loaded at the first call, with its on-disk cache where the file system allows one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
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

    call.compiled = compiled  # type: ignore[attr-defined]  # found by ``_compile`` in a caller
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
        compiled: Callable[P, R] = numba.njit(cache=True)(function)
    except RuntimeError:
        compiled = numba.njit(function)
    return compiled
