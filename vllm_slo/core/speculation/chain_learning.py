# SPDX-License-Identifier: Apache-2.0
"""What is learnt of chains of models besides their costs: how predictions of them turned out, and
which is to be measured next.

SpecRouter re-measures what it does not use (section 4.2); the rest is ours. Nothing is drawn by
chance, and no clock is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

Chain: TypeAlias = tuple[int, ...]
"""Places in a pool of models, ascending; the empty one is plain decoding."""

NEVER = -math.inf


class Bias:
    """How steps with each chain turned out, against what was predicted of them. What steps of all
    chains take longer is the machine's, not the chain's at work.

    Args:
        chains: how many there are.
    """

    SHARE = 1 / 16
    """Of each step in the mean of what it took of its time."""
    TRUST = 32.0
    """Trees that it counts for in the mean of what they yielded that they yield what is
    predicted."""
    TREES = 256.0
    """Trees that those seen count for in that at most."""
    STEP_TREES = 4
    """Trees that those of one step count for at most: they have much in common."""
    MOST = 1.5

    def __init__(self, chains: int) -> None:
        self._usual = 1.0
        self._seconds = [1.0] * chains
        self._trees = [0.0] * chains
        self._tokens = [0.0] * chains
        self.factors = [1.0] * chains
        """What T_eff of each chain is to be multiplied by."""

    def observe(self, c: int, seconds: float, tokens: float, trees: int) -> None:
        """A step of ``trees`` requests took, and yielded, so many times what was predicted."""
        seconds = min(max(seconds, 1.0 / self.MOST), self.MOST)
        self._seconds[c] += self.SHARE * (seconds / self._usual - self._seconds[c])
        self._usual += self.SHARE * (seconds - self._usual)
        trees = min(trees, self.STEP_TREES)
        kept = min(self.TREES / (self._trees[c] + trees), 1.0)
        self._trees[c] = kept * (self._trees[c] + trees)
        self._tokens[c] = kept * (self._tokens[c] + trees * tokens)
        self._correct(c)

    def yielded(self, c: int) -> float:
        """Tokens that steps yield, over those predicted."""
        return (self.TRUST + self._tokens[c]) / (self.TRUST + self._trees[c])

    def age(self, share: float) -> None:
        """Let what was seen count for ``share`` of what it did."""
        for c in range(len(self.factors)):
            self._seconds[c] = 1.0 + share * (self._seconds[c] - 1.0)
            self._trees[c] *= share
            self._tokens[c] *= share
            self._correct(c)

    def _correct(self, c: int) -> None:
        factor = self._seconds[c] / self.yielded(c)
        self.factors[c] = min(max(factor, 1.0 / self.MOST), self.MOST)


class Mood:
    """How much further the texts of the moment can be guessed than is typical: a phrase that
    repeats itself is guessed right for long by every model, and what follows it by none.

    Attributes:
        odds: what those of a guess are to be multiplied by.
    """

    TREES = 8.0
    """After which an old one counts for 1/e."""
    MOST = 0.5
    """That one step counts for."""
    GAIN, RETURN = 5.0, 0.1
    FARTHEST = 2.5
    """Greatest logarithm of the odds, to either side."""
    CHANCE = 0.5
    """So much of it is taken for chance."""

    def __init__(self) -> None:
        self._lift = 0.0
        self.odds = 1.0

    def observe(self, tokens: float, expected: float, trees: int) -> None:
        """So many tokens came of each tree, and with this mood so many were expected."""
        rate = min(trees / self.TREES, self.MOST)
        off = (tokens - expected) / (1.0 + expected)
        lift = self._lift + rate * (self.GAIN * off - self.RETURN * self._lift)
        self._set(lift)

    def pass_step(self) -> None:
        """Nothing was guessed in a step, so nothing was seen: the mood wanes."""
        self._set(self._lift * (1.0 - self.RETURN))

    def renew(self, share: float) -> None:
        """Such a share of the texts has only begun: nothing is known of them."""
        self._set(self._lift * (1.0 - share))

    def _set(self, lift: float) -> None:
        self._lift = min(max(lift, -self.FARTHEST), self.FARTHEST)
        self.odds = math.exp(math.copysign(max(abs(self._lift) - self.CHANCE, 0.0), self._lift))


class Surprise:
    """Tells that texts are of another kind than before: a cumulative sum over trees of how far what
    they yield is off what was predicted (Page's test), to either side."""

    SLACK = 0.15
    """Share of the tokens that is not taken for a change."""
    ENOUGH = 10.0
    """Trees that yield nothing of what they should, or twice that."""
    QUIET = 64
    """Steps after a change in which no other is looked for."""

    def __init__(self) -> None:
        self._short = self._long = 0.0
        self._quiet = 0

    def observe(self, off: float, trees: int) -> bool:
        """Whether it is surprising by now that trees of a step yielded a share ``off`` more than
        predicted."""
        self._quiet -= 1
        if self._quiet > 0:
            return False
        self._short = max(self._short - trees * (off + self.SLACK), 0.0)
        self._long = max(self._long + trees * (off - self.SLACK), 0.0)
        if max(self._short, self._long) < self.ENOUGH:
            return False
        self._short = self._long = 0.0
        self._quiet = self.QUIET
        return True


class Probes:
    """Which chain is to be measured next beside the one at work, and the account that pays for it.

    What was never measured is so at once: each model, and chains that may be of use. Later the
    fastest of those that were not measured for long are, as soon as the account holds what that is
    expected to cost; ones that look hopeless wait twice as long each time.

    Args:
        chains: all of them, plain decoding first.

    Attributes:
        account_s: seconds that may be lost by measuring.
    """

    SHARE = 0.02
    """Of the time, for the account."""
    SAVED_STEPS = 64
    """Steps whose time the account holds at most."""
    STALE = 32
    """Steps until a chain at rest is to be measured anew."""
    PAUSE = 16
    """Least steps between two chains that are."""
    LOOK_EVERY = 4
    """Steps after which it is looked again who waits."""
    HOPELESS = 2.0
    """A chain that takes so many times longer than the fastest waits twice as long each time."""
    MOST_PATIENCE = 6
    PROMISING = 1.25
    """One that takes at most so many times longer, and was never measured, is so at once."""
    FIRST_TREES, FIRST_STEPS = 16, 12
    """Trees by which something is measured for the first time, and the most steps that takes."""
    TREES, STEPS = 8, 8
    """The same of later times; two steps are the least."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self.account_s = 0.0
        self._chains = chains
        # By chain what it measures: its edges, and what its last model proposes.
        self._measures = [{*itertools.pairwise(chain), chain[-1:] * 2} for chain in chains]
        self._measured = {what: NEVER for measures in self._measures for what in measures}
        self._patience = [0] * len(chains)
        self._step = 0
        self._pause = self._look = 0
        self._running, self._left, self._is_charged = 0, 0, False

    def pass_time(self, passed_s: float, step_s: float) -> None:
        """A step has passed; ``step_s``: what one takes."""
        self._step += 1
        most_s = self.SAVED_STEPS * step_s
        self.account_s = min(self.account_s + self.SHARE * passed_s, most_s)

    def note(self, c: int) -> None:
        """A step measures a chain."""
        for what in self._measures[c]:
            self._measured[what] = self._step

    def renew(self, model: int) -> None:
        """What a model proposes is to be measured as if for the first time."""
        self._measured[model, model] = NEVER
        self._look = 0

    def doubt(self) -> None:
        """All that was measured is out of date."""
        for what, step in self._measured.items():
            self._measured[what] = min(step, self._step - self.STALE - 1)
        self._patience = [0] * len(self._chains)
        self._pause = self._look = 0

    def next(
        self, time_s: Sequence[float], current: int, trees: int, cost_s: Callable[[int, int], float]
    ) -> tuple[int, bool]:
        """The chain to measure in this step and whether the account pays for it; 0: none.

        Args:
            time_s: T_eff of each chain; infinite: it is not to be had.
            current: the chain at work.
            trees: of a step.
            cost_s: what so many steps with a chain are expected to lose.
        """
        if not self._left or time_s[self._running] == math.inf:
            self._left = 0
            if self._step >= self._look:
                self._look = self._step + self.LOOK_EVERY
                self._begin(time_s, current, trees, cost_s)
        if not self._left:
            return 0, False
        self._left -= 1
        return self._running, self._is_charged

    def _begin(
        self, time_s: Sequence[float], current: int, trees: int, cost_s: Callable[[int, int], float]
    ) -> None:
        """Begin to measure a chain if one waits for it and may."""
        oldest = [min(self._measured[what] for what in measures) for measures in self._measures]
        others = [c for c in range(1, len(time_s)) if c != current and time_s[c] < math.inf]
        promising_s = self.PROMISING * time_s[current]
        for c in others:
            if oldest[c] == NEVER and (len(self._chains[c]) == 1 or time_s[c] < promising_s):
                steps = _steps(self.FIRST_TREES, trees, self.FIRST_STEPS)
                self._running, self._left, self._is_charged = c, steps, False
                return
        stale = [c for c in others if self._step - oldest[c] > self.STALE << self._patience[c]]
        if not stale or self._step < self._pause:
            return
        c, steps = min(stale, key=time_s.__getitem__), _steps(self.TREES, trees, self.STEPS)
        if cost_s(c, steps) <= self.account_s:
            hopeless = time_s[c] > self.HOPELESS * time_s[current]
            self._patience[c] = min(self._patience[c] + 1, self.MOST_PATIENCE) if hopeless else 0
            self._running, self._left, self._is_charged = c, steps, True
            self._pause = self._step + self.PAUSE


def _steps(trees: int, each: int, most: int) -> int:
    """Steps until there are so many trees, 2 to ``most``."""
    return min(max(-(-trees // each), 2), most)
