# SPDX-License-Identifier: Apache-2.0
"""How much speculation pays: the nodes of a step, and how far ahead the draft is to guess.

AdaServe's budget B is the largest batch that hardware profiling allows (section 3, footnote 1), and
its depth a clipped fraction of it (equation 8), with constants found by grid search. Here both
follow from the step-time model: of all budgets within the tightest slack the one that yields most
tokens per second, and of all depths the one at which that rate is highest, the draft's own passes
counted. Where nothing pays, nothing is drafted.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.admission import PLAIN, Speculated
from vllm_slo.core.step_time import StepTimeModel

Floats = NDArray[np.float64]

FIRST_GUESS = 0.6
"""Chance of the best guess at each depth before any tree was drafted."""
SHORTEST_S = 1e-9
TREE = 8
"""Nodes of a tree that is to help an objective, more or less."""


def step_times(model: StepTimeModel, tokens: Floats) -> Floats:
    """Seconds of steps of so many tokens, attention left out, (n,)."""
    (k1, _, b), (m1, _, d) = model.terms
    times: Floats = np.maximum(k1 * tokens + b, m1 * tokens + d)
    return times


def worthwhile_nodes(
    chances: Floats, roots: int, others: int, context: int, model: StepTimeModel, most: int
) -> int:
    """How many of the best nodes raise the tokens that come out per second.

    A node costs what it makes this step longer, prompts included; the roots cost what a step of
    their own would. So nodes do not look cheap merely because a long prompt is in the step.

    Args:
        chances: (N,) path probabilities in descending order.
        roots: requests that decode in the step.
        others: tokens of the step that are not theirs.
        context: KV tokens that the requests read.
        model: expected step times, drafting included.
        most: nodes for which there is room.
    """
    room = min(len(chances), max(most, 0))
    if not room or not roots:
        return 0
    nodes = np.arange(room + 1, dtype=np.float64)
    tokens = roots + np.concatenate(([0.0], np.cumsum(chances[:room])))
    extra = step_times(model, others + roots + nodes)
    times = model.predict_s(roots, context) + extra - extra[0]
    return int(np.argmax(tokens / np.maximum(times, SHORTEST_S)))


class DraftTimes:
    """What drafting costs: seconds of a pass, by how many beams are in it, and of a prompt's token.

    Args:
        first_s: guess at a pass before any was measured.
    """

    SHARE = 0.1
    """Of each observation."""
    MANY = 64
    """Prompt tokens from which on a step tells what one costs."""

    def __init__(self, first_s: float = 0.002) -> None:
        self._first_s = first_s
        self._passes: dict[int, float] = {}
        self.token_s = 0.0

    def pass_s(self, beams: int) -> float:
        """Seconds of one pass; sizes never seen cost what the nearest seen one does."""
        if not self._passes:
            return self._first_s
        octave = max(beams, 1).bit_length()
        return self._passes[min(self._passes, key=lambda seen: (abs(seen - octave), -seen))]

    def observe(self, passes: int, beams: int, prompt_tokens: int, took_s: float) -> None:
        """Take in one step's drafting."""
        if passes < 1 or not took_s > 0.0:
            return
        if prompt_tokens >= self.MANY:
            cost_s = max(took_s - passes * self.pass_s(beams), 0.0) / prompt_tokens
            self.token_s += self.SHARE * (cost_s - self.token_s) if self.token_s else cost_s
            return
        took_s = max(took_s - prompt_tokens * self.token_s, 0.0) / passes
        octave = max(beams, 1).bit_length()
        known = self._passes.setdefault(octave, took_s)
        self._passes[octave] = known + self.SHARE * (took_s - known)


class DraftDepth:
    """Chooses how far ahead to draft, from what trees have been like.

    Depths that were never drafted are taken to continue those above by ``FIRST_GUESS``; from time
    to time one is tried, so that what is believed of it does not stay wrong.

    Args:
        max_depth, max_width: the largest tree there is.
        memory: trees after which an old one counts for 1/e.
    """

    PRIOR = 16.0
    """Trees that the first guess counts for."""
    USE_SHARE = 0.05
    RECOVERY = 0.004
    """Of the use, in each step that drafts nothing."""
    TRY_EVERY = 32
    TRY_AGAIN = 256
    """Steps until a draft that does not pay is tried: it first has to catch up."""

    def __init__(self, max_depth: int, max_width: int, memory: float = 200.0) -> None:
        self._chances = np.zeros((max_depth, max_width))
        self._chances[:, 0] = FIRST_GUESS ** np.arange(1, max_depth + 1)
        self._memory = memory
        self._seen = np.zeros(max_depth)
        self._chosen = 0
        self._use = 1.0

    @property
    def typical(self) -> Floats:
        """(depths, width) mean path probabilities of what is drafted now, by depth and rank."""
        return self._chances

    def observe(self, chances: Floats, depth: int, width: int) -> None:
        """Take in candidates: (n, depth * width) path probabilities, layer by layer."""
        count = len(chances)
        if not count:
            return
        layers = -np.sort(-chances.reshape(count, depth, width), axis=2)
        self._seen[:depth] += count
        first = count / (self._seen[:depth] + self.PRIOR)
        share = np.maximum(1.0 - np.exp(-count / self._memory), first)
        known = self._chances[:depth, :width]
        known += share[:, None] * (layers.mean(axis=0) - known)
        for below in range(depth, len(self._chances)):
            if not self._seen[below]:
                self._chances[below] = FIRST_GUESS * self._chances[below - 1]

    def used(self, share: float) -> None:
        """Tell what share of the nodes that would have paid a step had room for: objectives may
        leave less, and what is not verified is drafted in vain."""
        self._use += self.USE_SHARE * (min(share, 1.0) - self._use)

    def fastest(
        self,
        active: int,
        behind: int,
        context: int,
        deepest: int,
        width: int,
        pass_s: float,
        model: StepTimeModel,
    ) -> int:
        """The depth at which each of the ``behind`` requests gets its tokens soonest, where only
        they have trees. Arguments as in ``choose``."""
        reading_s = model.kv_s * context
        best, depth = 1.0 / max(model.predict_s(active, context), SHORTEST_S), 0
        for d in range(1, deepest + 1):
            chances = np.sort(self._chances[:d, :width], axis=None)[::-1]
            tokens = 1.0 + self._use * np.cumsum(chances)
            nodes: Floats = np.arange(1.0, len(chances) + 1.0, dtype=np.float64)
            batches: Floats = np.asarray(active + behind * nodes)
            times = step_times(model, batches) + reading_s + d * pass_s
            rate = float((tokens / np.maximum(times, SHORTEST_S)).max())
            if rate > best:
                best, depth = rate, d
        return depth

    def choose(
        self,
        active: int,
        context: int,
        deepest: int,
        width: int,
        pass_s: float,
        model: StepTimeModel,
    ) -> int:
        """The depth, 0 to ``deepest``, at which most tokens come out per second.

        Args:
            active: requests that decode.
            context: KV tokens that they read.
            deepest: where equation 8 ends.
            width: candidates that are drafted for each token ahead.
            pass_s: seconds of one pass of the draft.
            model: expected step times without drafting.
        """
        if not active or not deepest:
            return 0
        depth = self.fastest(active, active, context, deepest, width, pass_s, model)
        self._chosen += 1
        if not depth:
            self._use = min(self._use + self.RECOVERY, 1.0)
        every = self.TRY_EVERY if depth else self.TRY_AGAIN
        tries = depth < deepest and self._chosen % every == 0
        return depth + 1 if tries else depth


def node_floor(
    behind: int, tokens: int, expected: float, model: StepTimeModel, step_s: float
) -> float:
    """Path probability below which a node slows down the very request that it is for.

    A node makes the step longer for everybody; each request that is ``behind`` gets about as many,
    ``TREE`` for the purpose of their price. One helps its request where f / E > dT / T.

    Args:
        behind: requests that need nodes.
        tokens: tokens of the step without them.
        expected: tokens that such a request gets from the step.
        model: expected step times.
        step_s: the step's time.
    """
    if not behind:
        return 0.0
    longer_s = (model.predict_s(tokens + TREE * behind) - model.predict_s(tokens)) / TREE
    return min(expected * longer_s / max(step_s, SHORTEST_S), 1.0)


class MeasuredTrees:
    """How much of what trees were expected to yield they did yield, on the safe side.

    A TPOT is judged over a window of tokens, so it is windows that are looked at: a single step may
    accept nothing.

    Args:
        window: tokens over which a TPOT is judged.
        quantile: share of the windows that yield at least that much.
    """

    ENOUGH = 16
    """Windows before anything is known."""
    REMEMBERED = 256

    def __init__(self, window: int, quantile: float) -> None:
        self._window = window
        self._quantile = quantile
        self._open: dict[str, tuple[float, int]] = {}
        self._shares: deque[float] = deque(maxlen=self.REMEMBERED)

    def observe(self, request_id: str, hoped: float, tokens: int) -> None:
        """A step yielded ``tokens`` tokens of a request where ``hoped`` were expected, its root's
        included."""
        expected, had = self._open.get(request_id, (0.0, 0))
        expected, had = expected + hoped, had + tokens
        if expected >= self._window:
            self._shares.append(had / expected)
            expected, had = 0.0, 0
        self._open[request_id] = expected, had

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._open.pop(request_id, None)

    def share(self, unknown: float = 0.0) -> float:
        """What to count on, of expected tokens; ``unknown`` until enough was seen."""
        if len(self._shares) < self.ENOUGH:
            return unknown
        ranked = sorted(self._shares)
        return ranked[int((1.0 - self._quantile) * len(ranked))]


def sustained_trees(
    chances: Floats,
    share: float,
    tpot_s: float,
    model: StepTimeModel,
    pass_s: float,
) -> tuple[Speculated, float, float]:
    """The trees with which most requests keep a TPOT together.

    Args:
        chances: (depths, width) typical path probabilities.
        share: of what these promise, what to count on.
        tpot_s: the objective.
        model: step times without drafting.
        pass_s: seconds of one pass of the draft.

    Returns:
        What decoding is like with them, the seconds a step then drafts, and how many requests keep
        the TPOT; plain decoding where no tree is better.
    """
    most = float(model.time_to_tokens(tpot_s))
    found, drafting_s = PLAIN, 0.0
    for depth in range(1, len(chances) + 1):
        likely = np.sort(chances[:depth], axis=None)[::-1][:TREE]
        yields = np.maximum(share * (1.0 + np.cumsum(likely)), 1.0).tolist()
        for nodes, tokens in enumerate(yields, 1):
            left_s = tpot_s * tokens - depth * pass_s
            requests = model.time_to_tokens(left_s) / (1 + nodes)
            if requests > most:
                most, found, drafting_s = requests, Speculated(tokens, 1.0 + nodes), depth * pass_s
    return found, drafting_s, most
