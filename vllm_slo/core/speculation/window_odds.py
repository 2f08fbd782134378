# SPDX-License-Identifier: Apache-2.0
"""How likely drafts bring the tokens of a TPOT window in time: luck within a window is not even.

A step of which ``length`` tokens are verified yields Y of them, P(Y >= n) = a^(n - 1), with a the
chance of a draft to be accepted. What k such steps yield is a sum of k independent Y; a window that
lacks n tokens is kept by k steps with probability P(Y_1 + ... + Y_k >= n). SLOs-Serve (3.2.3) plans
by the mean of Y and tightens the TPOT of requests that fall behind; a promise holds for each
window of a few tokens, so steps are stretched by the distribution here, and the mean only bounds
them.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.jit import jit
from vllm_slo.core.speculation.draft_lengths import expected_tokens
from vllm_slo.core.types import DecodeView

Floats = NDArray[np.float64]

MOST_TOKENS = 32
"""Tokens of a window that are looked ahead over; longer ones are taken for several in a row."""
DOUBT = 0.005
"""Probability of missing a window that counts as none."""
ACCEPTANCES = 64
"""Acceptances are rounded down to one of so many."""
SURE = 1.1
"""What steps may take over what is predicted, where they are to save a window."""
LEAST_COUNTED = 0.1
"""Tokens that a step is stretched for though its window may be missed as it is."""
EPS = 1e-9


@jit
def _chances(acceptance: float, longest: int, most: int) -> Floats:
    """(longest, most + 1, most + 1): P(k steps of a length yield at least n tokens)."""
    found = np.zeros((longest, most + 1, most + 1))
    for place in range(longest):
        have = np.zeros(most + 1)  # P(so many tokens after k steps), the last: or more
        have[0] = 1.0
        for step in range(most + 1):
            above = 0.0
            for n in range(most, -1, -1):
                above += have[n]
                found[place, step, n] = above if n > step else 1.0
            after = np.zeros(most + 1)
            for held in range(most + 1):
                reached = have[held]
                for given in range(1, place + 2):
                    ends = reached * (1.0 - acceptance) if given <= place else reached
                    after[min(held + given, most)] += ends
                    reached -= ends
            have = after
    return found


@lru_cache(maxsize=256)
def _kept_chances(place: int, longest: int) -> Floats:
    """`_chances` of one of the ``ACCEPTANCES``; not to be changed."""
    return _chances(place / ACCEPTANCES, longest, MOST_TOKENS)


@lru_cache(maxsize=256)
def _sure_steps(place: int, longest: int) -> Floats:
    """(longest, MOST_TOKENS + 1): steps of a length that surely yield so many tokens."""
    doubted = _kept_chances(place, longest) < 1.0 - DOUBT
    found: Floats = doubted.sum(axis=1).astype(np.float64)
    return found


class WindowOdds:
    """What steps without prompts do for windows.

    Args:
        step_s: (L,) seconds of a step that verifies 1, 2, ... L tokens of everybody.
    """

    def __init__(self, step_s: Floats) -> None:
        self._step_s = step_s
        self._sure_s: dict[int, Floats] = {}

    def sure_s(self, acceptance: float, tokens: float) -> float:
        """Seconds in which so many tokens surely come, by steps of the best length.

        Fractions count as a whole token.
        """
        place = math.floor(acceptance * ACCEPTANCES)
        if place not in self._sure_s:
            steps = _sure_steps(place, len(self._step_s))
            self._sure_s[place] = (steps * self._step_s[:, None]).min(axis=0)
        sure_s = self._sure_s[place]
        whole, rest = divmod(math.ceil(tokens), MOST_TOKENS)
        return float(whole * sure_s[MOST_TOKENS] + sure_s[rest])

    def counted_tokens(
        self, start_s: float, decode: DecodeView, acceptance: float, length: int
    ) -> float:
        """Tokens of a request's step that its TPOT may be stretched for (``stretched_s`` of
        `core.speculation.draft_lengths`): if it yields a single one, the others surely come in the
        time left; without any luck where steps without drafts keep the TPOT, as drafts are accepted
        and rejected in series more often than independent ones would be. At most what it yields on
        average, at least ``LEAST_COUNTED``.

        Args:
            start_s: when the step begins.
            decode: the request, one token of it being expected of the step.
            acceptance: of its drafts.
            length: tokens verified of it in this step.
        """
        left = decode.window_left
        pace_s = min((decode.window_end_s - start_s) / left, decode.tpot_s)
        plain_s = SURE * float(self._step_s[0])
        luck = acceptance if plain_s > decode.tpot_s else 0.0
        rest_s = SURE * self.sure_s(luck, left - 1.0)
        counted = left - rest_s / max(pace_s, EPS)
        return max(min(counted, expected_tokens(acceptance, length)), LEAST_COUNTED)

    def surest_length(self, start_s: float, decode: DecodeView, acceptance: float) -> int:
        """Length of steps that most likely keep a request's window, the shortest of several; a long
        window is asked for its pace."""
        left_s, wanted = max(decode.window_end_s - start_s, 0.0), math.ceil(decode.window_left)
        if wanted > MOST_TOKENS:
            left_s, wanted = left_s * MOST_TOKENS / wanted, MOST_TOKENS
        steps = np.minimum(left_s / self._step_s, MOST_TOKENS).astype(np.int64)
        chances = _kept_chances(math.floor(acceptance * ACCEPTANCES), len(steps))
        return 1 + int(np.argmax(chances[np.arange(len(steps)), steps, wanted]))
