# SPDX-License-Identifier: Apache-2.0
"""What trees need of vLLM's structured output (``vllm/v1/structured_output``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


def constraint_start(manager: StructuredOutputManager, request: Request) -> int:
    """After how many more tokens the grammar applies; 0: to the next one."""
    if hasattr(manager, "_get_constraint_bounds"):
        return int(manager._get_constraint_bounds(request, ()).constraint_start)
    return int(manager._get_constraint_start(request, ()))  # vLLM 0.31


def grammar_of(request: Request) -> Any:
    """The request's grammar, which keeps the state after its last token; None without one."""
    structured = request.structured_output_request
    return None if structured is None else structured.grammar


def next_token_mask(manager: StructuredOutputManager, request: Request) -> NDArray[np.int32]:
    """Bit mask of the tokens that the grammar allows next, in its state now, [words]."""
    rows = manager.grammar_bitmask({request.request_id: request}, [request.request_id], {})
    assert rows is not None
    return rows[0].copy()


def grammar_output(
    names: list[str], masks: Sequence[NDArray[np.int32]], drafts: list[int]
) -> GrammarOutput:
    """The bit masks of a step.

    Args:
        names: the requests that have a grammar.
        masks: of each request, [1 + its draft tokens, words].
        drafts: how many draft tokens each request has.
    """
    if "num_acceptable_drafts" in GrammarOutput.__dataclass_fields__:
        return GrammarOutput(names, np.concatenate(masks), drafts)
    return GrammarOutput(names, np.concatenate(masks))  # vLLM 0.31
