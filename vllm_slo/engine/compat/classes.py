# SPDX-License-Identifier: Apache-2.0
"""Classes as vLLM's configuration holds them: by name, or themselves."""

from __future__ import annotations

import functools

from vllm.utils.import_utils import resolve_obj_by_qualname


@functools.cache
def is_derived(given: str | type | None, names: tuple[str, ...]) -> bool:
    """Whether a class, or the class of a dotted name, is one of ``names`` or derived from one.

    A class of ``names`` is not imported for that. A name that cannot be imported is none of them.
    """
    if given in names:
        return True
    if isinstance(given, str):
        try:
            given = resolve_obj_by_qualname(given)
        except (ImportError, AttributeError, ValueError):
            return False
    lineage = given.__mro__ if isinstance(given, type) else ()
    return any(f"{base.__module__}.{base.__qualname__}" in names for base in lineage)
