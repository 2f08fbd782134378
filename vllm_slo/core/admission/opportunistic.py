# SPDX-License-Identifier: Apache-2.0
"""Requests that begin without a promise: as many as typical steps keep their TPOT for together.

A request that asks for a TPOT and no TTFT loses nothing by waiting. If it begins beside too many
others, it loses its TPOT, and so do they.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from vllm_slo.core.admission.program import Speculated, tokens_of_step

Sustainable: TypeAlias = Callable[[float], tuple[float, Speculated]]
"""A TPOT -> how many requests typical steps keep it for, and what decoding is then like."""

HEADROOM_SHARE: Final = 0.7
"""Of the tokens that typical steps have for decoding, how much such requests may take together. A
request that has begun cannot be sent back, while steps and what trees yield vary. The value is a
choice. With a larger one more requests begin and more of them lose their TPOT; with a smaller one
they wait longer for their first token."""


class Pace(NamedTuple):
    """What a running request asks of the steps.

    Attributes:
        tpot_s: seconds per token.
        prompt: tokens of its prompt for each token of its answer. When it ends, another like it may
            begin, so over time a prompt is computed for each answer.
    """

    tpot_s: float
    prompt: float


def has_headroom(running: Sequence[Pace], newcomer: Pace, sustainable: Sustainable) -> bool:
    """Whether a request may begin beside those that run; always where none runs."""
    if not running:
        return True
    paces = [*running, newcomer]
    tightest_s = min(pace.tpot_s for pace in paces)
    requests, speculated = sustainable(tightest_s)
    step_s = tightest_s * speculated.tokens_out
    asked = 0.0
    for pace in paces:
        tokens = step_s / pace.tpot_s
        asked += tokens_of_step(tokens, speculated) + tokens * pace.prompt
    return asked <= HEADROOM_SHARE * requests * speculated.tokens_in
