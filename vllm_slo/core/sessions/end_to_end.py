# SPDX-License-Identifier: Apache-2.0
"""TTFT and TPOT for an answer whose last token has a deadline."""

from __future__ import annotations

from vllm_slo.core.sessions.rounds import RoundPace
from vllm_slo.core.types import INFINITY

SHORTEST_S = 1e-6
"""Seconds per token, fewer than any engine takes: the pace of an answer that is late already."""


def end_to_end_pace(
    budget_s: float, lone_prefill_s: float, lone_token_s: float, tokens: float
) -> RoundPace:
    """Divide a time for a whole answer between its prompt and its tokens.

    Both get the same multiple of what they take on an engine without other work.

    Args:
        budget_s: from arrival to the last token, seconds, above 0.
        lone_prefill_s: to the first token on an engine without other work, seconds, above 0.
        lone_token_s: for each further token there, seconds, above 0.
        tokens: how long the answer will be, at least 1.
    """
    further = max(tokens - 1.0, 0.0)
    if further == 0.0:
        return RoundPace(budget_s, INFINITY)
    stretch = budget_s / (lone_prefill_s + further * lone_token_s)
    return RoundPace(stretch * lone_prefill_s, stretch * lone_token_s)


def pace_of_rest(
    end_s: float, last_token_s: float, window_s: float, in_window: int, left: int
) -> float:
    """The time per token, in seconds, that ends an answer in time once it has begun; at least
    `SHORTEST_S`.

    A TPOT holds for its window as a whole. Tokens that came fast would let the rest of the window
    be slower, so the pace is also taken from the start of the window.

    Args:
        end_s: when the whole answer is to have come.
        last_token_s: when its last token came.
        window_s: when the open window of its TPOT began.
        in_window: tokens in that window so far.
        left: tokens to come, at least 1.
    """
    by_last = (end_s - last_token_s) / left
    by_window = (end_s - window_s) / (in_window + left)
    return max(min(by_last, by_window), SHORTEST_S)
