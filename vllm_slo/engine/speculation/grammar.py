# SPDX-License-Identifier: Apache-2.0
"""Structured output over trees: the grammar walks every branch and comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

Masks = NDArray[np.int32]


def constrains_now(manager: StructuredOutputManager, request: Request) -> bool:
    """Whether the grammar applies to the request's next token, rather than after its reasoning."""
    return manager._get_constraint_bounds(request, ()).constraint_start == 0


def _grammar(request: Request) -> Any:
    structured = request.structured_output_request
    return None if structured is None else structured.grammar


def _descend(
    request: Request,
    tokens: Sequence[int],
    parents: Sequence[int],
    visit: Callable[[int], None],
) -> None:
    """Call ``visit`` at each node that the grammar allows, the grammar standing behind it."""
    grammar = _grammar(request)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)

    def below(parent: int) -> None:
        for node in children.get(parent, ()):
            if not grammar.validate_tokens([tokens[node]]):
                continue
            grammar.accept_tokens(request.request_id, [tokens[node]])
            visit(node)
            if not grammar.is_terminated():
                below(node)
            grammar.rollback(1)

    below(-1)


def allowed(request: Request, tokens: Sequence[int], parents: Sequence[int]) -> set[int]:
    """The nodes that the request's grammar allows, their paths included."""
    found: set[int] = set()
    _descend(request, tokens, parents, found.add)
    return found


def masks(
    manager: StructuredOutputManager,
    request: Request,
    tokens: Sequence[int],
    parents: Sequence[int],
) -> Masks:
    """vLLM's bit masks of the tokens allowed at the root and at each node, [nodes + 1, words]."""
    name = request.request_id
    requests = {name: request}

    def here() -> Masks:
        row = manager.grammar_bitmask(requests, [name], {})
        assert row is not None
        found: Masks = row[0].copy()
        return found

    root = here()
    rows = np.tile(root, (len(tokens) + 1, 1))

    def keep(node: int) -> None:
        rows[node + 1] = here()

    if tokens:
        _descend(request, tokens, parents, keep)
    return rows
