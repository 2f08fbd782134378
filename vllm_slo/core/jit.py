# SPDX-License-Identifier: Apache-2.0
"""numba, with its on-disk cache where the file system allows one."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile ``function`` to machine code on first call; same signature, same results.

    The compiled code is kept beside the source or in numba's user cache. Where neither can be
    written (a read-only image without a home) it is compiled anew in each process.
    """
    try:
        return cast("Callable[P, R]", numba.njit(cache=True)(function))
    except RuntimeError:
        return cast("Callable[P, R]", numba.njit(function))
