# SPDX-License-Identifier: Apache-2.0
"""The token budget line: what an engine can process by a given time beside what it decodes.

Source: SLOs-Serve, section 3.2.2 and equation (3). A step is as long as the tightest TPOT of those
that decode allows. What they draw is taken off; the rest is there for prompts.

Everything here is compiled. ``counts`` is always (L,), the requests that decode in each tier.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from vllm_slo.core.arrays import Floats2D, Ints
from vllm_slo.core.jit import jit
from vllm_slo.core.step_time.budget import Lines, step_seconds_compiled, whole_tokens_within

EPS: Final = 1e-6
"""Tokens, or blocks: differences below it are rounding."""
WHOLE_STEPS: Final = 1e-9
"""Steps: a number of steps that lies so little below a whole number is that number."""
TPOT: Final = 0
WEIGHT: Final = 1
"""Rows of ``tiers`` (2, L): seconds per token, and what a token costs in tokens of a prompt. It is
more than 1, since the KV of its request is read."""
SHORTEST_STEP_S: Final = 1e-9
"""Seconds: no step is shorter, whatever TPOT is asked for."""


class Engine(NamedTuple):
    """What one step holds.

    Attributes:
        lines: its time by its tokens.
        most_tokens: tokens of the largest step.
        share: of every step's tokens, what promises may use.
    """

    lines: Lines
    most_tokens: float
    share: float


class PrefillWait(NamedTuple):
    """When a prompt could be done.

    Attributes:
        sustainable: whether decoding beside it can go on for ever.
        seconds: until it is computed; 0 where decoding leaves nothing for prompts.
    """

    sustainable: bool
    seconds: float


@jit
def step_tokens(time_s: float, engine: Engine) -> float:
    """Tokens of one step of ``time_s`` seconds that promises may use."""
    return whole_tokens_within(engine.lines, time_s, engine.most_tokens, 0.0) * engine.share


@jit
def longest_step_s(counts: Ints, tiers: Floats2D, engine: Engine) -> float:
    """Seconds of the longest step that keeps the tightest TPOT, or of the fullest step."""
    step_s = step_seconds_compiled(engine.lines, engine.most_tokens, 0.0)
    for tier in range(len(counts)):
        if counts[tier] > 0:
            step_s = min(step_s, tiers[TPOT, tier])
    return float(max(step_s, SHORTEST_STEP_S))


@jit
def processed_by(time_s: float, step_s: float, engine: Engine) -> float:
    """Tokens processed from now until ``time_s`` in steps of at most ``step_s`` seconds."""
    whole = math.floor(time_s / step_s + WHOLE_STEPS)
    rest_s = max(time_s - whole * step_s, 0.0)
    return whole * step_tokens(step_s, engine) + step_tokens(rest_s, engine)


@jit
def decode_rate(counts: Ints, tiers: Floats2D) -> float:
    """Tokens per second that decoding takes out of the budget."""
    rate = 0.0
    for tier in range(len(counts)):
        if counts[tier] > 0:
            rate += counts[tier] * tiers[WEIGHT, tier] / tiers[TPOT, tier]
    return rate


@jit
def prefill_budget(
    since_s: float, until_s: float, counts: Ints, tiers: Floats2D, engine: Engine
) -> float:
    """Tokens that are left for prompts between two instants: equation (3)."""
    step_s = longest_step_s(counts, tiers, engine)
    tokens = processed_by(until_s, step_s, engine) - processed_by(since_s, step_s, engine)
    return tokens - decode_rate(counts, tiers) * (until_s - since_s)


@jit
def is_sustainable(counts: Ints, tiers: Floats2D, engine: Engine) -> bool:
    """Whether decoding can go on for ever."""
    step_s = longest_step_s(counts, tiers, engine)
    return step_tokens(step_s, engine) >= decode_rate(counts, tiers) * step_s - EPS


@jit
def cut_tokens(spare: float, counts: Ints, tiers: Floats2D, engine: Engine) -> float:
    """Tokens lost by a step that must end at a given instant, with ``spare`` tokens in hand.

    Cutting one step in two pays its fixed cost twice. With a whole step to spare none is cut.
    """
    step_s = longest_step_s(counts, tiers, engine)
    whole = step_tokens(step_s, engine)
    if spare >= whole:
        return 0.0
    return max(whole - 2.0 * step_tokens(0.5 * step_s, engine), 0.0)


@jit
def prefill_wait(backlog: float, counts: Ints, tiers: Floats2D, engine: Engine) -> PrefillWait:
    """When ``backlog`` tokens of prompts are computed beside what decodes."""
    if not is_sustainable(counts, tiers, engine):
        return PrefillWait(False, 0.0)
    rate = prefill_budget(0.0, 1.0, counts, tiers, engine)
    return PrefillWait(True, backlog / rate if rate > 0.0 else 0.0)
