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
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.admission import PLAIN, Speculated
from vllm_slo.core.jit import jit
from vllm_slo.core.step_time import StepTimeModel

Floats = NDArray[np.float64]

FIRST_GUESS = 0.6
"""Chance of the best guess at each depth before any tree was drafted."""
SHORTEST_S = 1e-9
TREE = 8
"""Nodes of a tree that is to help an objective, more or less."""


class Lines(NamedTuple):
    """A step-time model without attention, as compiled code takes it: the higher of two lines."""

    k1: float
    b1: float
    k2: float
    b2: float

    @classmethod
    def of(cls, model: StepTimeModel) -> Lines:
        """The lines of a model, draft steps left out."""
        (k1, _, b1), (k2, _, b2) = model.terms
        return cls(k1, b1, k2, b2)


@jit
def _time_s(lines: Lines, tokens: float) -> float:
    """Seconds of a step of so many tokens."""
    return max(lines.k1 * tokens + lines.b1, lines.k2 * tokens + lines.b2)


@jit
def _tokens_within(lines: Lines, time_s: float, most: int) -> int:
    """Tokens of the largest step that takes no longer than ``time_s``."""
    tokens = float(most)
    for k, b in ((lines.k1, lines.b1), (lines.k2, lines.b2)):
        if k * tokens > time_s - b + 1e-12:
            tokens = (time_s - b) / k if k > 0.0 else 0.0
    return int(max(tokens + 1e-9, 0.0))


@jit
def _most_per_second(
    chances: Floats, room: int, roots: int, others: int, roots_s: float, lines: Lines
) -> int:
    """`worthwhile_nodes`, given what the roots cost."""
    tokens = float(roots)
    start_s = _time_s(lines, others + roots)
    best, found = tokens / max(roots_s, SHORTEST_S), 0
    for node in range(room):
        tokens += chances[node]
        took_s = roots_s + _time_s(lines, others + roots + node + 1.0) - start_s
        rate = tokens / max(took_s, SHORTEST_S)
        if rate > best:
            best, found = rate, node + 1
    return found


@jit
def _likeliest(known: Floats, count: int, more: Floats) -> int:
    """Merge ``more`` into the ``count`` descending values of ``known``; how many it then has."""
    for value in more:
        place = count
        while place > 0 and known[place - 1] < value:
            known[place] = known[place - 1]
            place -= 1
        known[place] = value
        count += 1
    return count


@jit
def _fastest_depth(
    chances: Floats,
    use: float,
    active: int,
    behind: int,
    reading_s: float,
    pass_s: float,
    lines: Lines,
    path_tokens: float,
) -> tuple[float, int]:
    """(tokens per second, depth) at best, of typical ``chances`` (depths, width)."""
    deepest, width = chances.shape
    best, found = 0.0, 0
    likely, paths, count = np.empty(deepest * width), np.empty(deepest * width), 0
    for depth in range(deepest):
        for rank in range(width):
            place = count
            while place > 0 and likely[place - 1] < chances[depth, rank]:
                likely[place], paths[place] = likely[place - 1], paths[place - 1]
                place -= 1
            likely[place], paths[place] = chances[depth, rank], 1.0 if rank else 0.0
            count += 1
        drafting_s = reading_s + (depth + 1) * pass_s
        hoped, extra = 1.0, 0.0
        for node in range(count):
            hoped += use * likely[node]
            extra += 1.0 + path_tokens * paths[node]
            took_s = _time_s(lines, active + behind * extra) + drafting_s
            rate = hoped / max(took_s, SHORTEST_S)
            if rate > best:
                best, found = rate, depth + 1
    return best, found


@jit
def _sustained(
    chances: Floats,
    share: float,
    tpot_s: float,
    lines: Lines,
    most_tokens: int,
    drafting_s: Floats,
) -> tuple[float, int, int, float]:
    """`sustained_trees`: (requests, depth, nodes, tokens out)."""
    most, found, size, gives = float(_tokens_within(lines, tpot_s, most_tokens)), 0, 0, 1.0
    likely, count = np.empty(chances.size), 0
    for depth in range(chances.shape[0]):
        count = _likeliest(likely, count, chances[depth])
        hoped = 1.0
        for node in range(min(count, TREE)):
            hoped += likely[node]
            tokens = max(share * hoped, 1.0)
            left_s = tpot_s * tokens - drafting_s[depth]
            requests = _tokens_within(lines, left_s, most_tokens) / (2.0 + node)
            if requests > most:
                most, found, size, gives = requests, depth + 1, node + 1, tokens
    return most, found, size, gives


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
    roots_s = model.predict_s(roots, context)
    return _most_per_second(chances, room, roots, others, roots_s, Lines.of(model))


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


class Shape(NamedTuple):
    """What is drafted for each request: so many tokens ahead, so many candidates for each."""

    depth: int
    width: int


class DraftShape:
    """Chooses how far ahead to draft and how many candidates, from what trees have been like.

    Depths that were never drafted are taken to continue those above by ``FIRST_GUESS``; from time
    to time a deeper or a wider tree is tried, so that what is believed of it does not stay wrong.

    Args:
        max_depth, max_width: the largest tree there is.
        path_tokens: what another path of a tree costs the step besides its nodes, in tokens.
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

    def __init__(
        self, max_depth: int, max_width: int, path_tokens: float = 0.0, memory: float = 200.0
    ) -> None:
        self._chances = np.zeros((max_depth, max_width))
        self._chances[:, 0] = FIRST_GUESS ** np.arange(1, max_depth + 1)
        self._path_tokens = path_tokens
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
        passes_s: Mapping[int, float],
        model: StepTimeModel,
    ) -> Shape:
        """The trees with which each of the ``behind`` requests gets its tokens soonest, where only
        they have trees. Arguments as in ``choose``."""
        reading_s, lines = model.kv_s * context, Lines.of(model)
        best = 1.0 / max(model.predict_s(active, context), SHORTEST_S)
        found = Shape(0, min(passes_s))
        for width, pass_s in sorted(passes_s.items()):
            chances = np.ascontiguousarray(self._chances[:deepest, :width])
            rate, depth = _fastest_depth(
                chances, self._use, active, behind, reading_s, pass_s, lines, self._path_tokens
            )
            if rate > best:
                best, found = rate, Shape(depth, width)
        return found

    def choose(
        self,
        active: int,
        context: int,
        deepest: int,
        passes_s: Mapping[int, float],
        model: StepTimeModel,
    ) -> Shape:
        """The depth, 0 to ``deepest``, and the width at which most tokens come out per second.

        Args:
            active: requests that decode.
            context: KV tokens that they read.
            deepest: where equation 8 ends.
            passes_s: seconds of one pass of the draft, for each width to choose from.
            model: expected step times without drafting.
        """
        if not active or not deepest:
            return Shape(0, min(passes_s))
        depth, width = self.fastest(active, active, context, deepest, passes_s, model)
        self._chosen += 1
        if not depth:
            self._use = min(self._use + self.RECOVERY, 1.0)
        every = self.TRY_EVERY if depth else self.TRY_AGAIN
        if self._chosen % every == 0 and depth < deepest:
            return Shape(depth + 1, width)
        if depth and self._chosen % every == every // 2:
            return Shape(depth, max(passes_s))
        return Shape(depth, width)


def node_floor(behind: int, tokens: int, model: StepTimeModel, step_s: float) -> float:
    """Path probability below which a node slows down the very request that it is for.

    A node makes the step longer for everybody; each request that is ``behind`` gets about as many,
    ``TREE`` for the purpose of their price. One helps its request, which gets a token at least,
    where f > dT / T.

    Args:
        behind: requests that need nodes.
        tokens: tokens of the step without them.
        model: expected step times.
        step_s: the step's time.
    """
    if not behind:
        return 0.0
    longer_s = (model.predict_s(tokens + TREE * behind) - model.predict_s(tokens)) / TREE
    return min(longer_s / max(step_s, SHORTEST_S), 1.0)


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

    def share(self) -> float:
        """What to count on, of expected tokens; nothing until enough was seen."""
        if len(self._shares) < self.ENOUGH:
            return 0.0
        ranked = sorted(self._shares)
        return ranked[int((1.0 - self._quantile) * len(ranked))]


def sustained_trees(
    chances: Floats,
    share: float,
    tpot_s: float,
    model: StepTimeModel,
    pass_s: float = 0.0,
    *,
    drafting_s: Floats | None = None,
) -> tuple[Speculated, float, float]:
    """The trees with which most requests keep a TPOT together.

    Args:
        chances: (depths, width) typical path probabilities.
        share: of what these promise, what to count on.
        tpot_s: the objective.
        model: step times without drafting.
        pass_s: seconds of one pass of a draft that needs a pass for each depth.
        drafting_s: (depths,) seconds until a tree is 1, 2, .. deep, however it is drafted; instead
            of ``pass_s``.

    Returns:
        What decoding is like with them, the seconds a step then drafts, and how many requests keep
        the TPOT; plain decoding where no tree is better.
    """
    if drafting_s is None:
        drafting_s = _one_by_one(pass_s, len(chances))
    most, depth, nodes, tokens = _sustained(
        np.ascontiguousarray(chances), share, tpot_s, Lines.of(model), model.max_tokens, drafting_s
    )
    if not nodes:
        return PLAIN, 0.0, most
    return Speculated(tokens, 1.0 + nodes), float(drafting_s[depth - 1]), most


def _one_by_one(pass_s: float, depths: int) -> Floats:
    """Seconds until a tree is 1, 2, .. deep where each depth is a pass."""
    return np.array([pass_s * depth for depth in range(1, depths + 1)])
