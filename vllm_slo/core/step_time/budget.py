# SPDX-License-Identifier: Apache-2.0
"""How many tokens fit into a time: SLOs-Serve's time2bs, for plain Python and for compiled code.

This is the inverse of a step's time without attention; `core.step_time.model` has the equation.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from vllm_slo.core.jit import jit

ROUNDING: Final = 1e-9
"""Tokens. A quotient that lies so little below a whole number is that number."""


class Lines(NamedTuple):
    """The two lines of a step-time model: ``k * tokens + c * draft_steps + b``, in seconds.

    The higher of the two is the time of a step.

    Attributes:
        k1, k2: seconds per token.
        c1, c2: seconds per step of the draft model.
        b1, b2: seconds.
    """

    k1: float
    c1: float
    b1: float
    k2: float
    c2: float
    b2: float


def step_seconds(lines: Lines, tokens: float, draft_steps: float) -> float:
    """Seconds of a step of so many tokens, with so many steps of the draft model."""
    first = lines.k1 * tokens + lines.c1 * draft_steps + lines.b1
    second = lines.k2 * tokens + lines.c2 * draft_steps + lines.b2
    return max(first, second)


def tokens_within(lines: Lines, time_s: float, most: float, draft_steps: float) -> float:
    """Tokens of the largest step that takes at most ``time_s`` seconds, not rounded.

    The result is at most ``most``, and 0 where not even an empty step fits.
    """
    tokens = most
    first_s = time_s - lines.c1 * draft_steps - lines.b1
    second_s = time_s - lines.c2 * draft_steps - lines.b2
    if first_s < lines.k1 * tokens:
        tokens = first_s / lines.k1 if lines.k1 > 0.0 else 0.0
    if second_s < lines.k2 * tokens:
        tokens = second_s / lines.k2 if lines.k2 > 0.0 else 0.0
    return max(tokens, 0.0)


step_seconds_compiled = jit(step_seconds)
tokens_within_compiled = jit(tokens_within)


@jit
def whole_tokens_within(lines: Lines, time_s: float, most: float, draft_steps: float) -> int:
    """`tokens_within` in whole tokens."""
    return int(tokens_within_compiled(lines, time_s, most, draft_steps) + ROUNDING)
