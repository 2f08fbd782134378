# SPDX-License-Identifier: Apache-2.0
"""How likely drafts bring the tokens of a TPOT window in time.

A step of which ``length`` tokens are verified yields Y of them, P(Y >= n) = a^(n - 1), with a the
chance of a draft to be accepted. k such steps yield a sum of k independent Y; so they keep a window
that lacks n tokens with probability P(Y_1 + ... + Y_k >= n).

SLOs-Serve (3.2.3) plans by the mean of Y and tightens the TPOT of requests that fall behind. But a
promise holds for each window of a few tokens, in which luck does not even out. So steps are
stretched by the distribution here, and the mean only bounds them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vllm_slo.core.arrays import Floats
from vllm_slo.core.jit import jit
from vllm_slo.core.speculation.acceptance import expected_tokens
from vllm_slo.core.speculation.window_pace import STEP_TIME_MARGIN
from vllm_slo.core.types import DecodeView

MOST_TOKENS = 32
"""Tokens of a window up to which its odds are computed."""
DOUBT = 0.005
"""Probability of missing a window that is accepted: of 200 windows one may be lost by bad luck."""
ACCEPTANCES = 64
"""Acceptances are rounded down to a multiple of 1/64, so that the tables below are few."""
LEAST_COUNTED = 0.1
"""Least tokens that a step is stretched for, though its window may be missed."""
EPS = 1e-9


@jit
def _chances(acceptance: float, longest: int, most: int) -> Floats:
    """(longest, most + 1, most + 1): by length - 1, k and n, P(k steps yield at least n tokens)."""
    result = np.zeros((longest, most + 1, most + 1))
    for place in range(longest):
        have = np.zeros(most + 1)  # P(n tokens after k steps); the last entry: n or more
        have[0] = 1.0
        for step in range(most + 1):
            above = 0.0
            for n in range(most, -1, -1):
                above += have[n]
                result[place, step, n] = above if n > step else 1.0
            after = np.zeros(most + 1)
            for held in range(most + 1):
                reached = have[held]
                for given in range(1, place + 2):
                    ends = reached * (1.0 - acceptance) if given <= place else reached
                    after[min(held + given, most)] += ends
                    reached -= ends
            have = after
    return result


@lru_cache(maxsize=256)
def _kept_chances(place: int, longest: int) -> Floats:
    """`_chances` of the acceptance ``place`` / `ACCEPTANCES`; shared, so not to be changed."""
    return _chances(place / ACCEPTANCES, longest, MOST_TOKENS)


@lru_cache(maxsize=256)
def _sure_steps(place: int, longest: int) -> Floats:
    """(longest, MOST_TOKENS + 1): by length - 1 and n, the steps that yield n tokens surely."""
    doubted = _kept_chances(place, longest) < 1.0 - DOUBT
    steps: Floats = doubted.sum(axis=1).astype(np.float64)
    return steps


@lru_cache(maxsize=256)
def _long_windows(place: int, longest: int) -> tuple[Floats, Floats]:
    """(longest,) by length - 1: the mean number of steps for each token, and what is added times
    the square root of the tokens, so that `_sure_steps` is met at `MOST_TOKENS`."""
    acceptance, lengths = place / ACCEPTANCES, range(1, longest + 1)
    mean = np.array([1.0 / expected_tokens(acceptance, length) for length in lengths])
    luck = _sure_steps(place, longest)[:, MOST_TOKENS] - MOST_TOKENS * mean
    return mean, luck / math.sqrt(MOST_TOKENS)


class TreeTokens(NamedTuple):
    """Tokens of a request that a step may be stretched for if its tree is typical.

    Attributes:
        by_nodes: by the nodes that yield them.
        by_prompts: by prompts, at most as many.
    """

    by_nodes: float
    by_prompts: float


class WindowOdds:
    """How likely steps without prompts keep a window.

    Args:
        step_s: (L,) seconds of a step that verifies 1, 2, ... L tokens of each request.
        plain_s: seconds of a step without drafting; None: that of a single token.
    """

    def __init__(self, step_s: Floats, plain_s: float | None = None) -> None:
        self._step_s = step_s
        self._plain_s = float(step_s[0]) if plain_s is None else plain_s
        self._sure_s: dict[int, Floats] = {}

    @property
    def longest_s(self) -> float:
        """Seconds of a step that verifies most tokens."""
        return float(self._step_s[-1])

    def sure_s(self, acceptance: float, tokens: float) -> float:
        """Seconds after which ``tokens`` tokens have come with probability 1 - `DOUBT`, by steps of
        the best length. A fraction of a token counts as a whole one.

        Beyond `MOST_TOKENS` the mean number of steps grows with the tokens, and what luck may add
        to it with their square root, as the deviation of a sum of independent yields does.
        """
        place, wanted = math.floor(acceptance * ACCEPTANCES), math.ceil(tokens)
        if wanted > MOST_TOKENS:
            mean, luck = _long_windows(place, len(self._step_s))
            steps = wanted * mean + math.sqrt(wanted) * luck
            return float((steps * self._step_s).min())
        if place not in self._sure_s:
            steps = _sure_steps(place, len(self._step_s))
            self._sure_s[place] = (steps * self._step_s[:, None]).min(axis=0)
        return float(self._sure_s[place][wanted])

    def counted_tokens(
        self, start_s: float, decode: DecodeView, acceptance: float, length: int
    ) -> float:
        """Tokens of a request's step that it may be stretched for (`window_pace.stretched_s`).

        They are so few that the other tokens of the window surely come in the time left after a
        step that yields a single one. Where steps without drafts keep the TPOT, no draft is counted
        on for that: drafts are accepted and rejected in series more often than independent ones.
        Nor is it counted on tokens that follow, if the answer may end before they come: it is then
        judged by those that came. The result is at most the step's mean yield, and at least
        `LEAST_COUNTED`.

        Args:
            start_s: when the step begins.
            decode: the request before that step.
            acceptance: of its drafts.
            length: tokens verified of it in this step.
        """
        left = decode.window_left
        plain_s = STEP_TIME_MARGIN * float(self._step_s[0])
        luck = acceptance if plain_s > decode.tpot_s else 0.0
        rest_s = STEP_TIME_MARGIN * self.sure_s(luck, left - 1.0)
        counted = left - rest_s / _pace_s(start_s, decode)
        if decode.may_end and self._plain_s <= decode.tpot_s:
            counted = min(counted, 1.0)
        return max(min(counted, expected_tokens(acceptance, length)), LEAST_COUNTED)

    def spare_s(self, start_s: float, decode: DecodeView, acceptance: float) -> float:
        """Seconds of the longest step, from ``start_s`` on, that a request's window can spare.

        The step yields one token of the request. The other tokens of its window then surely come in
        time, by steps as these are. The result is negative if no step is short enough.
        """
        rest_s = STEP_TIME_MARGIN * self.sure_s(acceptance, max(decode.window_left - 1.0, 0.0))
        return decode.window_end_s - start_s - rest_s

    def tree_tokens(
        self, start_s: float, decode: DecodeView, acceptance: float, length: int
    ) -> TreeTokens:
        """What nodes and prompts may stretch a step for: both for `counted_tokens`.

        If they are less than one, the window depends on drafts. Nodes may then make the step as
        long as the one with the best odds, as they yield the tokens that are lacking.
        """
        counted = self.counted_tokens(start_s, decode, acceptance, length)
        if counted >= 1.0:
            return TreeTokens(counted, counted)
        return TreeTokens(max(counted, self.surest_tokens(start_s, decode, acceptance)), counted)

    def surest_tokens(self, start_s: float, decode: DecodeView, acceptance: float) -> float:
        """Tokens to count on, so that a step may last as long as one of `surest_length`.

        That is for a request whose window no step keeps surely. It gets the step with the best
        odds.
        """
        surest_s = float(self._step_s[self.surest_length(start_s, decode, acceptance) - 1])
        return surest_s / _pace_s(start_s, decode)

    def surest_length(self, start_s: float, decode: DecodeView, acceptance: float) -> int:
        """The length of steps that most likely keep a request's window; of equals the shortest.

        A window longer than `MOST_TOKENS` is judged by a part of it, at the same pace.
        """
        left_s, wanted = max(decode.window_end_s - start_s, 0.0), math.ceil(decode.window_left)
        if wanted > MOST_TOKENS:
            left_s, wanted = left_s * MOST_TOKENS / wanted, MOST_TOKENS
        steps = np.minimum(left_s / self._step_s, MOST_TOKENS).astype(np.int64)
        chances = _kept_chances(math.floor(acceptance * ACCEPTANCES), len(steps))
        return 1 + int(np.argmax(chances[np.arange(len(steps)), steps, wanted]))


def _pace_s(start_s: float, decode: DecodeView) -> float:
    """Seconds for each token that is left of a request's window, at most its TPOT."""
    return max(min((decode.window_end_s - start_s) / decode.window_left, decode.tpot_s), EPS)
