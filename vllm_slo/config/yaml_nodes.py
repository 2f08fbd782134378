# SPDX-License-Identifier: Apache-2.0
"""YAML with its lines and without duplicate keys, and hints for unknown keys."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import yaml


def parse(
    text: str, origin: object, error: Callable[[str], Exception]
) -> tuple[yaml.Node | None, Any]:
    """The tree of a YAML text and its values; ``error`` with the line is raised for a mistake."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as mistake:
        mark = getattr(mistake, "problem_mark", None)
        line = f"{origin}:{mark.line + 1}" if mark is not None else str(origin)
        problem = getattr(mistake, "problem", None) or "not valid YAML"
        raise error(f"{line}: broken YAML: {problem}") from mistake
    except (ValueError, RecursionError) as mistake:
        raise error(f"{origin}: broken YAML: {mistake}") from mistake
    _refuse_duplicates(node, origin, error)
    return node, data


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
        entry = next((kv for kv in node.value if getattr(kv[0], "value", None) == part), None)
        if entry is None:
            break
        line, node = entry[0].start_mark.line + 1, entry[1]
    return line


def _refuse_duplicates(
    root: yaml.Node | None, origin: object, error: Callable[[str], Exception]
) -> None:
    """Raise ``error`` where a mapping holds a key twice. YAML would silently keep the last one."""
    left, visited = [root], set[int]()
    while left:
        node = left.pop()
        if id(node) in visited:  # an alias
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            left += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            _refuse_duplicate_keys(node, origin, error)
            left += [value for _, value in reversed(node.value)]


def _refuse_duplicate_keys(
    node: yaml.MappingNode, origin: object, error: Callable[[str], Exception]
) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        name = str(key.value)
        if name in seen:
            line = key.start_mark.line + 1
            raise error(f"{origin}:{line}: {name}: duplicate key; keep one")
        seen.add(name)


def near(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word: the known one that is most like it, else all of them."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(names)
