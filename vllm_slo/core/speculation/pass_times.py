# SPDX-License-Identifier: Apache-2.0
"""The times of a draft model's passes, by their number of tokens."""

from __future__ import annotations

import math

import numpy as np

from vllm_slo.core.arrays import Floats, Floats2D
from vllm_slo.core.jit import jit

TOKENS, SECONDS, COUNT, LAST = 0, 1, 2, 3
"""Rows of a table of a model's passes, by octave of size: mean tokens, mean time, passes seen, time
of the last one."""
OCTAVES = 20
"""Columns of that table: passes of up to 2^20 tokens."""
OUTLIER = 2.0
"""A pass that takes more than so many mean times of its size was held up, by the machine or by
compilation, unless the one before it took as long. If one takes less than the mean over this, those
before it were held up. A model's first pass mostly is."""


@jit
def seconds_of(known: Floats2D, tokens: float) -> float:
    """`PassTimes.pass_s`, of the table ``known`` (4, OCTAVES)."""
    least = 1.0
    for octave in range(known.shape[1]):
        if known[COUNT, octave] > 1.0:
            least = 2.0
    first, last, time_s = -1, -1, known[SECONDS, 0]
    for octave in range(known.shape[1]):
        if known[COUNT, octave] < least:
            continue
        size, time_s = known[TOKENS, octave], known[SECONDS, octave]
        if tokens <= size:
            if last >= 0:
                part = (size - tokens) / (size - known[TOKENS, last])
                time_s -= part * (time_s - known[SECONDS, last])
            return float(time_s)
        if first < 0:
            first = octave
        last = octave
    if last > first:
        size, smallest = known[TOKENS, last], known[TOKENS, first]
        slope_s = (time_s - known[SECONDS, first]) / (size - smallest)
        time_s += slope_s * (tokens - size)
    return float(time_s)


@jit
def _note_pass(known: Floats2D, tokens: int, took_s: float, share: float) -> None:
    """Add one pass to the table ``known`` (4, OCTAVES). Where a larger size would then be faster
    than a smaller one, the other sizes are corrected, as this pass is the newest."""
    octave = min(int(np.log2(tokens)), known.shape[1] - 1)
    seen = known[COUNT, octave]
    part = max(share, 1.0 / (seen + 1.0))
    expected_s, before_s = took_s, known[LAST, octave]
    if seen > 0.0:
        expected_s = known[SECONDS, octave]
    elif known[COUNT].max() > 1.0:
        expected_s = seconds_of(known, float(tokens))
    known[LAST, octave] = took_s
    if took_s > OUTLIER * expected_s:
        if before_s <= OUTLIER * expected_s:
            return
        took_s, part = min(took_s, before_s), 1.0
    elif OUTLIER * took_s < expected_s:
        part = 1.0
    known[COUNT, octave] = seen + 1.0
    known[TOKENS, octave] += max(share, 1.0 / (seen + 1.0)) * (tokens - known[TOKENS, octave])
    known[SECONDS, octave] += part * (took_s - known[SECONDS, octave])
    for other in range(known.shape[1]):
        if other < octave:
            known[SECONDS, other] = min(known[SECONDS, other], known[SECONDS, octave])
        elif known[COUNT, other] > 0.0:
            known[SECONDS, other] = max(known[SECONDS, other], known[SECONDS, octave])


class PassTimes:
    """T_i of one model: the time of a pass by its number of tokens.

    Args:
        known: (4, OCTAVES) the table to use, see `TOKENS`.

    Attributes:
        is_known: whether `ENOUGH` passes were measured.
    """

    FIRST_S = 0.002
    """Seconds of a pass before any was measured."""
    SHARE = 0.1
    """Weight of a pass in the mean of its octave."""
    ENOUGH = 3
    """Passes after which times are known: the first is not typical, and another may be held up."""
    MANY = 64
    """Tokens of a pass from which on the cost of one more token is known."""

    def __init__(self, known: Floats) -> None:
        self._known = known
        self._known[:] = 0.0
        self._known[SECONDS, 0] = self.FIRST_S
        self._passes = 0
        self.is_known = False

    def observe(self, tokens: int, took_s: float) -> None:
        """Learn the time of a pass over so many tokens; an impossible time is ignored."""
        if tokens >= 1 and 0.0 < took_s < math.inf:
            _note_pass(self._known, tokens, took_s, self.SHARE)
            self._passes += 1
            self.is_known = self._passes >= self.ENOUGH

    def pass_s(self, tokens: float) -> float:
        """Seconds of a pass: linear between measured sizes, and constant below the smallest. Above
        the largest it goes on as from the smallest to the largest. A size that was measured once
        counts only where none was measured twice."""
        return seconds_of(self._known, float(tokens))

    @property
    def token_s(self) -> float:
        """Seconds of one more token in a large pass, as of a prompt; 0 before one was measured."""
        seen = self._known[:, self._known[COUNT] > 0.0]
        if not seen.size or seen[TOKENS, -1] < self.MANY:
            return 0.0
        tokens, seconds, *_ = seen[:, -1] - (seen[:, 0] if seen.shape[1] > 1 else 0.0)
        return float(seconds / tokens)
