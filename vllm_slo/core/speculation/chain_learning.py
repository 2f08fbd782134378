# SPDX-License-Identifier: Apache-2.0
"""What the choice of a chain learns besides costs: how predictable the texts are, and which chain
is to be measured next.

SpecRouter re-measures the chains that it does not use (section 4.2); the rest is ours. Nothing is
random, and no clock is read. "Measured" below means seconds per token of `ModelChains` in the
virtual-time worlds of tests/core/speculation/test_model_chain.py and variants of them, on average
over 20 or more worlds and 8 or more seeds each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

Chain: TypeAlias = tuple[int, ...]
"""Places in a pool of models, ascending; the empty one is plain decoding."""

NEVER: Final = -math.inf


class Predictability:
    """How much further the current texts can be guessed than is typical.

    Every model guesses a phrase right that repeats itself, and none guesses the text after it. So
    the odds of all guesses are raised after steps that yield more than expected, and lowered
    after steps that yield less. Measured: without it texts of phrases take 35% longer, and all
    worlds 3% on average.

    Attributes:
        odds: factor by which the odds of each guess differ from typical ones.
    """

    GAIN: Final = 0.625
    """Change of the logarithm of the odds for each tree, if it yields 100% more than expected.
    Measured: 0.4 takes 6% longer in texts of phrases, 1.0 takes 4% less, and both change the mean
    by less than 0.4%."""
    FADE: Final = 0.1
    """Share by which the logarithm returns to 0 in a step without trees. Otherwise steps that yield
    little could stop drafting for long. Measured: it does not change the mean."""
    LIMIT: Final = 2.5
    """Most that a step changes the logarithm for 100%, and its greatest absolute value. Without the
    latter bound the mean is the same."""

    def __init__(self) -> None:
        self._logarithm = 0.0
        self.odds = 1.0

    def observe(self, tokens: float, expected: float, trees: int) -> None:
        """Learn from a step with ``trees`` trees, which yielded ``tokens`` tokens each where
        ``expected`` were expected at the current odds."""
        excess = (tokens - expected) / (1.0 + expected)
        self._set(self._logarithm + min(trees * self.GAIN, self.LIMIT) * excess)

    def renew(self, share: float) -> None:
        """A share of the texts has just begun; these are typical."""
        self._set(self._logarithm * (1.0 - share))

    def pass_step(self) -> None:
        """A step had no trees."""
        self.renew(self.FADE)

    def _set(self, logarithm: float) -> None:
        self._logarithm = min(max(logarithm, -self.LIMIT), self.LIMIT)
        self.odds = math.exp(self._logarithm)


class Probes:
    """Decides which chain is measured next beside the current one, and keeps an account of the time
    that this costs.

    A model that was never measured is measured at once. Another chain is due for a probe when it
    was not measured for some time. The fastest of those that are due is measured as soon as the
    account holds the loss that is expected.

    Args:
        chains: all chains, plain decoding first.

    Attributes:
        account_s: seconds that may be lost by probes.
    """

    SHARE: Final = 0.01
    """Share of the time that the account gets. Measured: 0.02 takes 0.2% longer, 0.005 as long."""
    SAVED_STEPS: Final = 64
    """Steps whose time the account holds at most. A convention, not measured."""
    STALE: Final = 32
    """Steps after which a chain may be measured anew. Measured: 64 takes as long."""
    TREES: Final = 4
    """Trees of a probe, which takes two steps at least. Measured: 8 takes 1% longer."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self.account_s = 0.0
        self._chains = chains
        # What each chain measures: the edges between its models, and its last model's proposals.
        self._measures = [{*itertools.pairwise(chain), chain[-1:] * 2} for chain in chains]
        self._measured = {part: NEVER for parts in self._measures for part in parts}
        self._step = 0
        self._probed, self._left, self._is_charged = 0, 0, False

    def pass_time(self, passed_s: float, step_s: float) -> None:
        """A step has passed; ``step_s`` is what a step takes."""
        self._step += 1
        most_s = self.SAVED_STEPS * step_s
        self.account_s = min(self.account_s + self.SHARE * passed_s, most_s)

    def note(self, c: int) -> None:
        """The current step measures a chain."""
        for part in self._measures[c]:
            self._measured[part] = self._step

    def next(
        self, time_s: Sequence[float], current: int, trees: int, cost_s: Callable[[int, int], float]
    ) -> tuple[int, bool]:
        """The chain that this step is to measure, or 0, and whether the account pays for it.

        Args:
            time_s: T_eff of each chain; infinite where it cannot be chosen.
            current: the current chain.
            trees: of a step.
            cost_s: seconds that a number of steps with a chain is expected to lose.
        """
        if not self._left or time_s[self._probed] == math.inf:
            self._left = 0
            self._begin(time_s, current, trees, cost_s)
        if not self._left:
            return 0, False
        self._left -= 1
        return self._probed, self._is_charged

    def _begin(
        self, time_s: Sequence[float], current: int, trees: int, cost_s: Callable[[int, int], float]
    ) -> None:
        """Begin a probe if a chain is due for one."""
        steps = max(-(-self.TREES // trees), 2)
        oldest = [min(self._measured[part] for part in parts) for parts in self._measures]
        stale = [
            c
            for c in range(1, len(time_s))
            if c != current and time_s[c] < math.inf and self._step - oldest[c] > self.STALE
        ]
        if not stale:
            return
        unknown = [c for c in stale if oldest[c] == NEVER and len(self._chains[c]) == 1]
        c = unknown[0] if unknown else min(stale, key=time_s.__getitem__)
        if unknown or cost_s(c, steps) <= self.account_s:
            self._probed, self._left, self._is_charged = c, steps, not unknown
