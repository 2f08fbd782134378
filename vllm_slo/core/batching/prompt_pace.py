# SPDX-License-Identifier: Apache-2.0
"""How much of the prompts one step computes, beside decodes.

A step reads the weights, whatever it computes. Until computing takes longer than reading them, a
token of a prompt costs no time: these are the free tokens of a step. A step without a prompt leaves
them unused. So a prompt that is spread over many steps takes less of the engine's time than one
that is computed in a few. That time goes to the decodes beside it, whose requests end sooner and
give back their KV memory.

Sarathi-Serve (OSDI 2024) cuts prompts into chunks to bound the time of a step. Here the chunk
follows from the deadline: what the free tokens of the steps until then cannot compute is computed
now, and the rest in free tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from vllm_slo.core.step_time.model import StepTimeModel, chunk_pairs
from vllm_slo.core.types import BestEffortView, PrefillView

MOST_STEPS: Final = 16
"""Steps over which a prompt is spread, more or less, however far its deadline is. The value is a
choice: with more, prompts cost a little less, and first tokens come later."""
SPARED_STEPS: Final = 2
"""Steps before a deadline on which a prompt does not count: the one that is cut to end there, and
one that new arrivals make longer. Measured: with 1, promises break (results/ablation.md)."""
SMALLEST_CHUNK: Final = 64
"""Tokens of a prompt of best effort that one step computes at the least, if there is time. The
value is a choice: so few tokens hardly make a step longer than one token does, as long as reading
the weights takes most of its time. A larger one computes such a prompt in fewer steps, and an
arrival waits longer."""


class PromptPace(NamedTuple):
    """Tokens of prompts for one step.

    Attributes:
        promised: of promised prompts.
        best_effort: of prompts of best effort.
    """

    promised: int
    best_effort: int


UNPACED: Final = PromptPace(1 << 30, 1 << 30)


def free_tokens(model: StepTimeModel) -> float:
    """Tokens of a step that takes no longer than one of a single token: where the two lines of the
    model meet, 0 if they do not."""
    (k1, _, b1), (k2, _, b2) = sorted(model.terms)
    return max((b1 - b2) / (k2 - k1), 0.0) if k2 > k1 else 0.0


def prompt_pace(
    start_s: float,
    decodes: tuple[int, int, int],
    prefills: Sequence[PrefillView],
    best_effort: Sequence[BestEffortView],
    model: StepTimeModel,
) -> PromptPace:
    """How many tokens of prompts a step computes that begins at ``start_s``.

    Args:
        start_s: when the step begins.
        decodes: (tokens, context tokens, query-key pairs) of all that decode in it. Without any,
            nothing is gained by waiting.
        prefills: promised prompts, by deadline.
        best_effort: prompts without a promise for which there is memory. Each adds a chunk. So the
            more of them wait, and the longer they are, the faster they are computed.
        model: step times with the margin that promises are to keep.
    """
    tokens, context, pairs = decodes
    if not tokens:
        return UNPACED
    free = max(free_tokens(model) - tokens, 0.0)
    chunks = others = 0.0
    for request in best_effort:
        chunk = max(free, SMALLEST_CHUNK, request.remaining_tokens / MOST_STEPS)
        chunks += chunk
        others += min(chunk, request.remaining_tokens)
    token_s = max(term[0] for term in model.terms)
    total = cached = own = 0
    now = 0.0
    for prefill in prefills:
        total += prefill.remaining_tokens
        attended = prefill.context_tokens + prefill.remaining_tokens
        step_s = model.predict_s(
            tokens + others + free, context + attended, pairs=pairs + free * attended
        )
        left_s = prefill.deadline_s - start_s
        steps = min(left_s / step_s - SPARED_STEPS, MOST_STEPS)
        # Each further step costs what it takes beyond the tokens that it spares the first one.
        cached += prefill.context_tokens
        own += chunk_pairs(prefill.remaining_tokens, prefill.context_tokens)
        at_once_s = model.predict_s(tokens + total, context + cached, pairs=pairs + own)
        each_s = step_s - token_s * free - model.pair_s * free * attended
        if each_s > 0.0:
            steps = min(steps, (left_s - at_once_s) / each_s)
        now = max(now, total - free * max(math.floor(steps), 0))
    return PromptPace(math.ceil(now + free), math.ceil(chunks))
