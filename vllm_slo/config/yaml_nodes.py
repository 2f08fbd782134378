# SPDX-License-Identifier: Apache-2.0
"""What YAML's parser knows and its values have lost: lines, and keys that are there twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import yaml


def line_of(node: yaml.Node | None, loc: Sequence[int | str]) -> int | None:
    """Line, from 1, of the deepest part of ``loc`` that the tree holds; None without a tree."""
    line = None
    for part in loc:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
            continue
        if not isinstance(node, yaml.MappingNode):
            break
        found = [(k, v) for k, v in node.value if getattr(k, "value", None) == part]
        if not found:
            break
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    return line


def refuse_duplicates(
    node: yaml.Node | None, origin: object, error: Callable[[str], Exception], depth: int = 4
) -> None:
    """Raise ``error`` where a mapping holds a key twice: YAML would keep the last one silently.

    ``depth`` covers every mapping that a valid file can hold and bounds aliases that form a cycle.
    """
    if not isinstance(node, yaml.MappingNode) or depth == 0:
        return
    seen: set[str] = set()
    for key, value in node.value:
        name = str(key.value)
        if name in seen:
            line = key.start_mark.line + 1
            raise error(f"{origin}:{line}: {name}: the key is there twice; keep one")
        seen.add(name)
        refuse_duplicates(value, origin, error, depth - 1)
