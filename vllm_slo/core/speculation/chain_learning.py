# SPDX-License-Identifier: Apache-2.0
"""What the choice of a chain learns besides costs: how predictable the texts are, and which chain
is to be measured next.

SpecRouter re-measures the chains that it does not use (section 4.2); the rest is ours. Nothing is
random, and no clock is read. Evidence ages by the number of trees that were verified since, not by
steps, of which a large batch needs fewer. "Measured" below means seconds per token in the worlds of
benchmarks/chain_learning.py; its table has the intervals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

Chain: TypeAlias = tuple[int, ...]
"""Places in a pool of models, ascending; the empty one is plain decoding."""

NEVER: Final = -(1 << 62)
"""Trees that a chain was measured at which never was."""


class Predictability:
    """How much further the current texts can be guessed than is typical.

    Every model guesses a phrase right that repeats itself, and none guesses the text after it. So
    the odds of all guesses are raised after steps that yield more than expected, and lowered
    after steps that yield less.

    Attributes:
        odds: factor by which the odds of each guess differ from typical ones.
    """

    GAIN: Final = 0.625
    """Change of the logarithm of the odds for each tree, if it yields 100% more than expected.
    Measured: without it tokens take 1% longer; half and twice the value are as good."""
    LIMIT: Final = 2.5
    """Most that a step changes the logarithm for 100%, and its greatest absolute value. Measured: 5
    takes 1.2% longer, 1 as long."""

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

    def _set(self, logarithm: float) -> None:
        self._logarithm = min(max(logarithm, -self.LIMIT), self.LIMIT)
        self.odds = math.exp(self._logarithm)


class Probes:
    """Decides which chain is measured next beside the current one, and pays for that from an
    account. Plain decoding is one of them: what trees cost shows in steps without them.

    A model whose passes were hardly measured is measured at once, `FIRST` times at most. Another
    chain is due for a probe if `STALE` trees were verified since it was measured. Of these the one
    with the shortest time per token for its age comes first. Its probe begins as soon as the
    account holds the loss that is expected of it, and empties the account. A probe takes two steps:
    the first may have to read what its models missed.

    Args:
        chains: all chains, plain decoding first.

    Attributes:
        account_s: seconds that may be lost by probes.
    """

    SHARE: Final = 0.01
    """Share of the time that the account gets: what staying up to date may cost. Measured: 0.005
    takes 0.2% less time on recorded guesses. But with it one of eighty made-up worlds stays for
    800 steps with a chain that is 1.6 times as slow as another: its first impression was bad."""
    STALE: Final = 128
    """Trees after which a chain may be measured anew. Measured: 32 to 2048 are as good."""
    RARELY: Final = 32
    """Plain decoding is due again after so many times `STALE`, once it was probed `FIRST` times.
    What it shows hardly changes. Under load its probes cost little time, but objectives need the
    drafts. Measured: if it is probed as often as other chains, that takes 3% of the goodput of
    AdaServe's workload in virtual time (benchmarks/adaserve_virtual.py)."""
    STEPS: Final = 2
    """Steps of a probe."""
    CHEAPER: Final = 0.8
    """A probe that could not be paid for is priced anew if plain steps take so many times as long
    as then, since fewer requests decode. A convention, not measured."""
    FIRST: Final = 4
    """Probes of a model that the account does not pay for. A model that reports no passes would
    otherwise be probed for ever."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self.account_s = 0.0
        # What each chain measures: the edges between its models, and its last model's proposals.
        self._measures = [{*itertools.pairwise(chain), chain[-1:] * 2} for chain in chains]
        self._measured = {part: NEVER for parts in self._measures for part in parts}
        self._untried = [self.FIRST] * len(chains)
        self._trees = 0
        self._due = 0
        self._price_s = self._priced_s = 0.0
        self._probed, self._left = 0, 0

    def note(self, c: int, trees: int) -> None:
        """A step measures a chain by so many trees; plain decoding counts as trees of its root."""
        self._trees += trees
        for part in self._measures[c]:
            self._measured[part] = self._trees

    def next(
        self,
        passed_s: float,
        time_s: Sequence[float],
        current: int,
        unknown: Sequence[int],
        cost_s: Callable[[int, int], float],
    ) -> int | None:
        """The chain that this step is to measure; None: the current one.

        Args:
            passed_s: seconds since the last step.
            time_s: T_eff of each chain; infinite where it cannot be chosen.
            current: the current chain.
            unknown: chains of one model each whose passes were hardly measured.
            cost_s: seconds that a number of steps with a chain is expected to lose.
        """
        self.account_s += self.SHARE * passed_s
        if self._left and time_s[self._probed] < math.inf:
            self._left -= 1
            return self._probed
        for c in unknown:
            if c != current and self._untried[c] and time_s[c] < math.inf:
                self._untried[c] -= 1
                self._probed, self._left = c, self.STEPS - 1
                return c
        self._left = 0
        is_priced = time_s[0] >= self.CHEAPER * self._priced_s  # by the load of now
        if self._trees < self._due or (self.account_s < self._price_s and is_priced):
            return None
        return self._begun(time_s, current, cost_s)

    def _lasts(self, c: int) -> int:
        """Trees for which a measurement of a chain is good."""
        is_rare = c == 0 and not self._untried[0]
        return self.STALE * self.RARELY if is_rare else self.STALE

    def _begun(
        self, time_s: Sequence[float], current: int, cost_s: Callable[[int, int], float]
    ) -> int | None:
        """The chain of a probe that begins now, if one does; notes when to look again."""
        oldest = [min(self._measured[part] for part in parts) for parts in self._measures]
        others = [c for c in range(len(time_s)) if c != current and time_s[c] < math.inf]
        due = {c: oldest[c] + self._lasts(c) for c in others}
        stale = [c for c in others if self._trees >= due[c]]
        self._price_s = 0.0
        if not stale:
            self._due = min(due.values(), default=self._trees + self.STALE)
            return None
        c = min(stale, key=lambda c: time_s[c] / (self._trees - oldest[c]))
        self._price_s, self._priced_s = cost_s(c, self.STEPS), time_s[0]
        if self._price_s > self.account_s:
            return None
        self.account_s = self._price_s = 0.0
        self._untried[c] = max(self._untried[c] - 1, 0)
        self._probed, self._left = c, self.STEPS - 1
        return c
