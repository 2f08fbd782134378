# SPDX-License-Identifier: Apache-2.0
"""The costs of a chain of draft models: times of passes, acceptance between models, and rounds.

They are the terms of SpecRouter's equation 7 (section 4.2).

In a round of a chain the first model guesses a window of tokens. Each further model verifies the
tokens of the one before it in a single pass, keeps those that it accepts and adds a token of its
own. Rounds follow until the last model has produced as many tokens as are proposed to the target.

Unlike in the paper, each model runs in every round, because a verifier adds a token even to a guess
that it rejects; acceptance decides how many rounds it takes. The rounds of a batch end with its
slowest request, so the same chain takes more rounds in a large batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from vllm_slo.core.arrays import Floats, Floats2D, Floats3D, Ints, Ints2D
from vllm_slo.core.jit import jit
from vllm_slo.core.speculation.draft_shape import FIRST_GUESS
from vllm_slo.core.speculation.pass_times import seconds_of

MAX_WINDOW = 8
"""Most tokens that the first model of a chain guesses in a round."""
LEANS_ON = 8.0
"""Trials that f(SimScore) counts for in an edge's acceptance."""
FARTHEST = 0.01
"""Least distance of acceptance and similarity from 0 and 1."""


# --- how often models agree ---------------------------------------------------------------------


class Trials(NamedTuple):
    """What `Edges` knows of n models, the target among them.

    Attributes:
        counts: (2, n, n) guesses of a model that another one tried, and accepted.
        scores: (n, n) similarities, NaN where none was measured.
        prior: (n, n) acceptance that is assumed without.
        fit: (2,) f is the sigmoid of the first plus the second times logit(SimScore).
    """

    counts: Floats3D
    scores: Floats2D
    prior: Floats2D
    fit: Floats


@jit
def alphas_of(trials: Trials) -> Floats:
    """`Edges.alphas`."""
    counts, scores, prior, fit = trials
    result = np.empty(scores.shape)
    for i in range(len(scores)):
        for j in range(len(scores)):
            guess = prior[i, j]
            if not np.isnan(scores[i, j]):
                kept = min(max(scores[i, j], FARTHEST), 1.0 - FARTHEST)
                x = fit[0] + fit[1] * np.log(kept / (1.0 - kept))
                guess = 1.0 / (1.0 + np.exp(-x))
            share = (counts[1, i, j] + LEANS_ON * guess) / (counts[0, i, j] + LEANS_ON)
            result[i, j] = min(max(share, FARTHEST), 1.0 - FARTHEST)
    return result


class Edges:
    """alpha(i, j): how often model j accepts a guess of model i; the target is the last model.

    It is the share of accepted guesses, blended with f(SimScore), which counts for `LEANS_ON`
    trials. f is a sigmoid of logit(SimScore), shared by all edges and fitted to observed
    acceptance; it begins as the identity, as in equation 2. Without a SimScore an edge between
    models of the pool is assumed to have acceptance `PRIOR`, as an edge that is assumed to be worse
    than it is would never be tried. An edge to the target is assumed to have `FIRST_GUESS`, as in
    trees.

    Args:
        models: of the pool; the target is the next place.

    Attributes:
        trials: what was learnt.
    """

    PRIOR = 0.8
    MEMORY = 150.0
    """Trials after which an old one counts for 1/e."""
    SHARE = 0.05
    """Weight of a score in the mean of its edge."""
    RATE = 0.05
    """Step of the fit of f for the error of `MANY` trials or more; in proportion for fewer."""
    MANY = 32.0

    def __init__(self, models: int) -> None:
        shape = models + 1, models + 1
        self.trials = Trials(
            np.zeros((2, *shape)),
            np.full(shape, np.nan),
            np.full(shape, self.PRIOR),
            np.array([0.0, 1.0]),
        )
        self.trials.prior[:, models] = FIRST_GUESS

    def observe_similarity(self, i: int, j: int, score: float) -> None:
        """Learn 1 - total variation distance of two models' next-token distributions (equation 6),
        averaged over some places; NaN is ignored."""
        if not 0.0 <= score <= 1.0:
            return
        scores = self.trials.scores
        mean = scores[i, j]
        scores[i, j] = score if math.isnan(mean) else mean + self.SHARE * (score - mean)

    def observe_acceptance(self, i: int, j: int, tried: int, accepted: int) -> None:
        """Learn that model j verified ``tried`` guesses of model i, none behind a rejected one, and
        accepted ``accepted`` of them."""
        if not 0 <= accepted <= tried or not tried:
            return
        counts = self.trials.counts[:, i, j]
        counts += tried, accepted
        counts *= min(self.MEMORY / counts[0], 1.0)
        if not math.isnan(self.trials.scores[i, j]):
            self._fit(_logit(self.trials.scores[i, j]), tried, accepted / tried)

    def _fit(self, x: float, tried: int, share: float) -> None:
        """A step of logistic regression of the accepted share on ``x``, logit(SimScore)."""
        bend, slope = self.trials.fit.tolist()
        error = share - 1.0 / (1.0 + math.exp(-bend - slope * x))
        rate = self.RATE * min(tried / self.MANY, 1.0)
        self.trials.fit[0] = min(max(bend + rate * error, -3.0), 3.0)
        self.trials.fit[1] = min(max(slope + rate * error * x, 0.1), 3.0)

    def alphas(self) -> Floats:
        """(models + 1, models + 1) alpha(i, j), in (0, 1)."""
        return alphas_of(self.trials)

    def alpha(self, i: int, j: int) -> float:
        """alpha(i, j)."""
        return float(self.alphas()[i, j])

    def similarity(self, i: int, j: int) -> float:
        """SimScore(i, j); NaN where none was measured."""
        return float(self.trials.scores[i, j])


def _logit(score: float) -> float:
    kept = min(max(score, FARTHEST), 1.0 - FARTHEST)
    return math.log(kept / (1.0 - kept))


@jit
def lifted(typical: Floats2D, odds: float) -> Floats:
    """The path probabilities ``typical`` (depths, width) if the odds of each best guess after the
    one before it are multiplied by ``odds``. Its siblings share the rest as before."""
    result = typical.copy()
    above, above_now = 1.0, 1.0
    for depth in range(len(typical)):
        best, kept = typical[depth, 0], 0.0
        if best > 0.0:
            kept = min(best / above, 1.0 - FARTHEST)
        result[depth, 0] = above_now * kept * odds / (1.0 - kept + kept * odds)
        left, left_now = above - best, above_now - result[depth, 0]
        result[depth, 1:] *= left_now / left if left > FARTHEST else 0.0
        above, above_now = best, result[depth, 0]
    return result


# --- equation 7 ---------------------------------------------------------------------------------


@jit
def _yields(alphas: Floats, window: int, depth: int) -> Floats:
    """(levels, depth + 2) chance that a round yields at least 0, 1, 2, .. tokens of each model of a
    chain, if no limit cuts them; ``alphas``: how often each model is accepted by the next."""
    chance = np.zeros((len(alphas) + 1, depth + 2))
    chance[0, : window + 1] = 1.0
    for level in range(1, len(chance)):
        chance[level, 0] = 1.0
        kept = 1.0
        for count in range(1, depth + 2):
            chance[level, count] = kept * chance[level - 1, count - 1]
            kept *= alphas[level - 1]
    return chance


@jit
def _rounds(chance: Floats, requests: int) -> tuple[Floats, Floats]:
    """Mean rounds until one request has 0, 1, 2, .. tokens, and until all ``requests`` have;
    ``chance``: that a round yields at least 0, 1, 2, .. of them."""
    most = len(chance) - 1
    each, slowest = np.zeros(most), np.zeros(most)
    lacks = np.ones(most)  # the chance that a request has fewer tokens than that
    lacks[0] = 0.0
    for done in range(most - 1):
        for tokens in range(done + 1, most):
            each[tokens] += lacks[tokens]
            none, left, squared = 1.0, requests, 1.0 - lacks[tokens]
            while left:
                if left & 1:
                    none *= squared
                squared *= squared
                left >>= 1
            slowest[tokens] += 1.0 - none
        for tokens in range(most - 1, 0, -1):
            lacked = 0.0
            for got in range(1, tokens - done):
                lacked += (chance[got] - chance[got + 1]) * lacks[tokens - got]
            lacks[tokens] = lacked
    return each, slowest


@jit
def _all_rounds_s(
    known: Floats2D, requests: int, rounds: float, first: float, read: float
) -> float:
    """Seconds of a model's passes in all ``rounds``, which read ``read`` tokens of a request: the
    ``first`` in a round of all requests, the others in rounds of the requests that need them."""
    took_s = seconds_of(known, requests * first)
    if rounds > 1.0 and read > first:
        took_s += (rounds - 1.0) * seconds_of(known, requests * (read - first) / (rounds - 1.0))
    return took_s


@jit
def _rounds_s(
    known: Floats3D, chain: Ints, alphas: Floats, requests: int, window: int, depth: int
) -> Floats:
    """(depth,) seconds until each of ``requests`` has 1, 2, .. tokens of the last model of a chain
    of several models, with guesses in windows of ``window`` tokens.

    A request that has its tokens takes no part in further rounds, and no more is guessed than it
    needs: if it needs x tokens of the last model, the model before it adds at most x - 1, and so
    on. So a model runs in a round as if that many fewer of its tokens were needed.
    """
    top = len(chain) - 1
    chance = _yields(alphas, window, depth)
    each, slowest = _rounds(chance[top], requests)
    guess_s, took_s = np.zeros(depth + 1), np.zeros(depth)
    for room in range(1, depth - top + 1):
        guess_s[room] = _all_rounds_s(known[chain[0]], requests, slowest[room], 1.0, each[room])
    for level in range(1, top + 1):
        first = 1.0
        for room in range(1, depth - top + level + 1):
            read = each[room]
            for guessed in range(1, min(room, window + level)):
                read += chance[level - 1, guessed] * each[room - guessed]
            took_s[room + top - level - 1] += _all_rounds_s(
                known[chain[level]], requests, slowest[room], first, read
            )
            first += chance[level - 1, room]
    for left in range(top + 1, depth + 1):
        for step in range(min(window, left - top)):
            took_s[left - 1] += guess_s[left - top - step]
    return took_s


@jit
def drafting_times(
    chains: Ints2D,
    alphas: Floats2D,
    known: Floats3D,
    requests: int,
    most_beams: int,
    widths: Ints,
    deepest: int,
) -> tuple[Floats, Ints]:
    """The time of drafting with each chain.

    A model alone needs a pass for each token of depth, over one beam for each token of width. The
    last of several models has the siblings of its tokens without further cost. A chain of several
    models cannot draft fewer tokens than it has models: some would have nothing to do.

    Args:
        chains: (C, models) places in the pool, -1 behind the last.
        alphas: (models + 1, models + 1) alpha(i, j).
        known: (models, 4, OCTAVES) tables of their passes, see `pass_times.TOKENS`.
        requests: drafted for together.
        most_beams: of one pass.
        widths: (w,) of the trees.
        deepest: greatest depth.

    Returns:
        (C, w, deepest) seconds until trees of each width are 1, 2, .. deep; (C, deepest) the window
        of the first model that takes least time, 1 where there is no choice.
    """
    result = np.empty((len(chains), len(widths), deepest))
    windows = np.empty((len(chains), deepest), dtype=np.int64)
    for c in range(len(chains)):
        chain = chains[c][chains[c] >= 0]
        result[c] = np.inf
        windows[c] = 1
        if len(chain) == 1:
            model = known[chain[0]]
            first_s = seconds_of(model, requests)
            for w in range(len(widths)):
                each_s = seconds_of(model, min(requests * widths[w], most_beams))
                for depth in range(deepest):
                    result[c, w, depth] = first_s + depth * each_s
        else:
            agree = np.empty(len(chain) - 1)
            for level in range(len(agree)):
                agree[level] = alphas[chain[level], chain[level + 1]]
            for window in range(1, min(MAX_WINDOW, deepest - len(agree)) + 1):
                took_s = _rounds_s(known, chain, agree, requests, window, deepest)
                for depth in range(len(agree), deepest):
                    if took_s[depth] < result[c, 0, depth]:
                        result[c, :, depth], windows[c, depth] = took_s[depth], window
    return result, windows
