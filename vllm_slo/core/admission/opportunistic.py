# SPDX-License-Identifier: Apache-2.0
"""Who begins without a promise: as many as keep their TPOT together by typical step times.

A request that asks for a TPOT and no TTFT loses nothing by waiting, but begun beside too many
others it loses its TPOT, and they theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from vllm_slo.core.admission.program import Speculated, tokens_of_step

Sustainable: TypeAlias = Callable[[float], tuple[float, Speculated]]
"""A TPOT -> how many requests typical steps keep it for, and what decoding is then like."""

SHARE = 0.7
"""Of what typical steps bear. They vary, and what trees yield does; who has begun cannot be sent
back."""


class Pace(NamedTuple):
    """What a running request asks of the steps.

    Attributes:
        tpot_s: seconds per token.
        prompt: tokens of prompt for one of the answer. When it ends, another like it is let in, so
            over time a prompt is computed for each answer.
    """

    tpot_s: float
    prompt: float


def has_headroom(running: Sequence[Pace], one: Pace, sustainable: Sustainable) -> bool:
    """Whether ``one`` more may begin beside those that are ``running``; always if nobody is."""
    if not running:
        return True
    paces = [*running, one]
    tightest_s = min(pace.tpot_s for pace in paces)
    most, speculated = sustainable(tightest_s)
    step_s = tightest_s * speculated.tokens_out
    asked = 0.0
    for pace in paces:
        tokens = step_s / pace.tpot_s
        asked += tokens_of_step(tokens, speculated) + tokens * pace.prompt
    return asked <= SHARE * most * speculated.tokens_in
