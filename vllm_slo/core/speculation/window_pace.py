# SPDX-License-Identifier: Apache-2.0
"""The pace that a TPOT window needs, and how long a step it allows.

A promised TPOT holds for each window of a few tokens. A request that is late in its window has to
decode faster for the rest of it; one whose step yields several tokens allows a longer step.
"""

from __future__ import annotations

import math
from typing import Final

from vllm_slo.core.types import INFINITY, DecodeView

STEP_TIME_MARGIN: Final = 1.1
"""Times its predicted length that a step may take, where later steps are to save a window. A
convention: no measurement of it is kept."""
SHORT_WINDOW: Final = 16
"""Most tokens of a short TPOT window. An answer may well end before it is full, and fewer tokens of
an ended answer do not tell what drafts yield. A convention: no measurement of it is kept."""
GRID: Final = 1.15
"""Ratio of neighbouring working TPOTs of late requests: they are rounded, so that there are few."""
EPS: Final = 1e-9


def working_tpot_s(start_s: float, decode: DecodeView, fastest_s: float) -> float:
    """Seconds per token to plan a request by: its TPOT, or less where the request is late.

    A late request needs the pace that still keeps its window (`limit_of` of
    `core.batching.step` spreads lateness in the same way), rounded down on the grid of `GRID`. A
    window that no pace of ``fastest_s`` or more can save is given up: its request goes on at its
    TPOT and makes no step shorter.

    Args:
        start_s: when the step begins.
        decode: the request before that step.
        fastest_s: the fastest pace that can be reached, `draft_lengths.fastest_pace_s`.
    """
    tpot_s = decode.tpot_s
    pace_s = (decode.window_end_s - start_s) / decode.window_left
    if tpot_s == INFINITY or pace_s >= tpot_s:
        return tpot_s
    if pace_s < fastest_s:
        return max(tpot_s, fastest_s)
    steps = math.ceil(math.log(tpot_s / pace_s) / math.log(GRID) - EPS)
    return max(tpot_s / GRID**steps, fastest_s)


def stretched_s(start_s: float, decode: DecodeView, counted: float) -> float:
    """Seconds of the longest step that keeps a request's TPOT if it yields ``counted`` tokens.

    With one token it is `core.batching.step.limit_of`.
    """
    left_s = decode.window_end_s - start_s
    slack_s = left_s - (decode.window_left - counted) * decode.tpot_s
    return max(slack_s, left_s * counted / decode.window_left)
