# SPDX-License-Identifier: Apache-2.0
"""Structured output over trees: the grammar follows every branch and is rolled back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_slo.core.arrays import Parents
from vllm_slo.engine.compat.structured_output import (
    constraint_start,
    grammar_of,
    grammar_output,
    next_token_mask,
)
from vllm_slo.engine.speculation import messages

Masks = Parents


def constrains_now(manager: StructuredOutputManager, request: Request) -> bool:
    """Whether the grammar applies to the request's next token, rather than after its reasoning."""
    return constraint_start(manager, request) == 0


def _descend(
    request: Request,
    tokens: Sequence[int],
    parents: Sequence[int],
    visit: Callable[[int], None],
) -> None:
    """Call ``visit`` at each node that the grammar allows, with the grammar's state after it."""
    grammar = grammar_of(request)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)

    def below(parent: int) -> None:
        for node in children.get(parent, ()):
            if not grammar.validate_tokens([tokens[node]]):
                continue
            grammar.accept_tokens(request.request_id, [tokens[node]])
            try:
                visit(node)
                if not grammar.is_terminated():
                    below(node)
            finally:
                grammar.rollback(1)

    below(-1)


def allowed(request: Request, tokens: Sequence[int], parents: Sequence[int]) -> set[int]:
    """The nodes that the request's grammar allows, their paths included."""
    nodes: set[int] = set()
    _descend(request, tokens, parents, nodes.add)
    return nodes


def masks(
    manager: StructuredOutputManager,
    request: Request,
    tokens: Sequence[int],
    parents: Sequence[int],
) -> Masks:
    """vLLM's bit masks of the tokens allowed at the root and at each node, [nodes + 1, words]."""
    rows = np.tile(next_token_mask(manager, request), (len(tokens) + 1, 1))

    def keep(node: int) -> None:
        rows[node + 1] = next_token_mask(manager, request)

    if tokens:
        _descend(request, tokens, parents, keep)
    return rows


def _structured(requests: Mapping[str, Request], output: SchedulerOutput) -> list[str]:
    """The requests of a step that sample under a grammar."""
    if not output.has_structured_output_requests:
        return []
    return [
        name
        for name in output.num_scheduled_tokens
        if (request := requests.get(name))
        and request.use_structured_output
        and not request.is_prefill_chunk
    ]


def step_masks(
    manager: StructuredOutputManager, requests: Mapping[str, Request], output: SchedulerOutput
) -> GrammarOutput | None:
    """The bit masks of a step that trees were attached to. Each structured request has a row for
    its root, and one for each node of its tree."""
    names = _structured(requests, output)
    if not names:
        return None
    tokens, parents = output.scheduled_spec_decode_tokens, messages.of(output).parents
    rows = [masks(manager, requests[n], tokens.get(n, ()), parents.get(n, ())) for n in names]
    return grammar_output(names, rows, [len(tokens.get(name, ())) for name in names])


def root_masks(
    manager: StructuredOutputManager, requests: Mapping[str, Request], output: SchedulerOutput
) -> GrammarOutput | None:
    """As `step_masks` where these cannot be made: each node has the mask of its root. Of the tokens
    that come of it `messages.keep_first_tokens` keeps those that the root's mask was made for."""
    names = _structured(requests, output)
    if not names:
        return None
    counts = [len(output.scheduled_spec_decode_tokens.get(name, ())) for name in names]
    rows = [
        np.tile(next_token_mask(manager, requests[name]), (count + 1, 1))
        for name, count in zip(names, counts, strict=True)
    ]
    messages.of(output).unmasked = frozenset(names)
    return grammar_output(names, rows, counts)
