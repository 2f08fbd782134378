# SPDX-License-Identifier: Apache-2.0
"""A plugin of mypy that writes down each place where the engine calls into ``vllm_slo.core``.

mypy knows the type of each object, so it also finds the methods of an object that is in no import.
`core_calls` runs it, and reads one line a place: file, span, and the full name of what is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mypy.nodes import Decorator
from mypy.plugin import Plugin
from mypy.types import get_proper_type

LIST = "VLLMSLO_CORE_CALLS"
"""Environment variable: the file to write to."""
CALLED, CALLER = "vllm_slo.core.", "vllm_slo/engine/"


class CoreCalls(Plugin):
    """Writes as mypy asks what a call returns, and changes nothing."""

    def _noting(self, name: str, kept: str) -> Callable[[Any], Any] | None:
        if not name.startswith(CALLED):
            return None

        def note(context: Any) -> Any:
            node, path = context.context, context.api.path
            # A property that is compared with one of a protocol has no place, and is not read.
            if CALLER in path and node.line > 0:
                span = node.line, node.column, node.end_line, node.end_column
                with Path(os.environ[LIST]).open("a", encoding="utf-8") as file:
                    file.write("\t".join(map(str, (path, *span, name))) + "\n")
            return getattr(context, kept)

        return note

    def get_function_hook(self, fullname: str) -> Callable[[Any], Any] | None:
        if fullname == "builtins.len":
            return self._note_len
        return self._noting(fullname, "default_return_type")

    def _note_len(self, context: Any) -> Any:
        owner = getattr(get_proper_type(context.arg_types[0][0]), "type", None)
        note = owner and self._noting(f"{owner.fullname}.__len__", "default_return_type")
        return note(context) if note else context.default_return_type

    def get_method_hook(self, fullname: str) -> Callable[[Any], Any] | None:
        return self._noting(fullname, "default_return_type")

    def get_attribute_hook(self, fullname: str) -> Callable[[Any], Any] | None:
        """Of properties: to read one is a call."""
        found = self.lookup_fully_qualified(fullname)
        is_property = found is not None and isinstance(found.node, Decorator)
        return self._noting(fullname, "default_attr_type") if is_property else None


def plugin(_version: str) -> type[Plugin]:
    return CoreCalls
