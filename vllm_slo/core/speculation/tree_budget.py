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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.admission.program import PLAIN, Speculated
from vllm_slo.core.jit import jit
from vllm_slo.core.step_time.budget import Lines, step_seconds_compiled, whole_tokens_within
from vllm_slo.core.step_time.model import StepTimeModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FIRST_GUESS = 0.6
"""Chance of the best guess at each depth before any tree was drafted."""
SHORTEST_S = 1e-9
TREE = 8
"""Nodes of a tree that is to help an objective, more or less."""


@jit
def _most_per_second(
    chances: Floats, room: int, roots: int, others: int, roots_s: float, lines: Lines
) -> int:
    """`worthwhile_nodes`, given what the roots cost."""
    tokens = float(roots)
    start_s = step_seconds_compiled(lines, others + roots, 0.0)
    best, found = tokens / max(roots_s, SHORTEST_S), 0
    for node in range(room):
        tokens += chances[node]
        took_s = roots_s + step_seconds_compiled(lines, others + roots + node + 1.0, 0.0) - start_s
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


class Verifying(NamedTuple):
    """The step that is to verify trees, as compiled code takes it.

    Attributes:
        active: requests that decode in it.
        behind: how many of them have trees.
        reading_s: seconds that reading their KV tokens takes.
        use: share of the nodes that would pay which there is room for.
        path_tokens: what another path of a tree costs besides its nodes, in tokens.
    """

    active: int
    behind: int
    reading_s: float
    use: float
    path_tokens: float


@jit
def _add_layer(likely: Floats, paths: Floats, count: int, layer: Floats, width: int) -> int:
    """Merge the best of a layer into the ``count`` descending values of ``likely``, noting in
    ``paths`` whether each is on a path of its own; how many it then has."""
    for rank in range(width):
        place = count
        while place > 0 and likely[place - 1] < layer[rank]:
            likely[place], paths[place] = likely[place - 1], paths[place - 1]
            place -= 1
        likely[place], paths[place] = layer[rank], 1.0 if rank else 0.0
        count += 1
    return count


@jit
def _verify(
    likely: Floats,
    paths: Floats,
    count: int,
    step: Verifying,
    lines: Lines,
    hoped: Floats,
    took_s: Floats,
) -> None:
    """Tokens ``hoped`` for of a tree of the 1, 2, .. ``count`` likeliest nodes, and the seconds
    that the step with such trees takes."""
    tokens, extra = 1.0, 0.0
    for node in range(count):
        tokens += step.use * likely[node]
        extra += 1.0 + step.path_tokens * paths[node]
        hoped[node] = tokens
        took_s[node] = (
            step_seconds_compiled(lines, step.active + step.behind * extra, 0.0) + step.reading_s
        )


@jit
def fastest_shapes(
    chances: Floats,
    owner: Ints,
    widths: Ints,
    drafting_s: Floats,
    least: int,
    step: Verifying,
    lines: Lines,
) -> Floats:
    """The depth and width at which most tokens come out per second, for each way to draft.

    Args:
        chances: (models, depths, width) typical path probabilities of what each model guesses.
        owner: (W,) whose guesses each way to draft yields.
        widths: (w,) widths to choose from, ascending.
        drafting_s: (W, w, deepest) seconds until trees of each width are 1, 2, .. deep.
        least: shallowest depth allowed.
        step: the step that verifies them.
        lines: its time.

    Returns:
        (W, 4) depth, width, tokens of a request with a tree, seconds of the step with the drafting.
    """
    result, best = np.zeros((len(owner), 4)), np.zeros(len(owner))
    deepest = min(drafting_s.shape[2], chances.shape[1])
    most = deepest * chances.shape[2]
    likely, paths = np.empty(most), np.empty(most)
    hoped, took_s = np.empty(most), np.empty(most)
    for model in range(len(chances)):
        for w in range(len(widths)):
            count = 0
            for depth in range(deepest):
                count = _add_layer(likely, paths, count, chances[model, depth], widths[w])
                if depth + 1 < least:
                    continue
                _verify(likely, paths, count, step, lines, hoped, took_s)
                for way in range(len(owner)):
                    draft_s = drafting_s[way, w, depth]
                    if owner[way] != model or (
                        hoped[count - 1] <= best[way] * (took_s[0] + draft_s)
                    ):
                        continue
                    for node in range(count):
                        seconds = max(took_s[node] + draft_s, SHORTEST_S)
                        if hoped[node] > best[way] * seconds:
                            best[way] = hoped[node] / seconds
                            result[way, 0], result[way, 1] = depth + 1, widths[w]
                            result[way, 2], result[way, 3] = hoped[node], seconds
    return result


@jit
def _learn_layers(
    typical: Floats,
    weights: Floats,
    guessed: Floats,
    memory: float,
    chances: Floats,
    depths: Ints,
    offsets: Ints,
) -> int:
    """Take trees into the ``typical`` (depths, width) path probabilities, the trees that each
    counts for and the share (depths,) of the first guess in the best; how deep they were. Further
    arguments as in `DraftShape.observe_nodes`."""
    most, width = typical.shape
    sums, trees = np.zeros((most, width)), np.zeros(most)
    ranks = np.zeros(most, dtype=np.int64)  # the widest layer of each depth
    layer, filled = np.zeros((most, width)), np.zeros(most, dtype=np.int64)
    for r in range(len(offsets) - 1):
        filled[:] = 0
        for node in range(offsets[r], offsets[r + 1]):
            depth, place = depths[node] - 1, 0
            if not 0 <= depth < most:
                continue
            count = filled[depth]
            for rank in range(count):
                place += layer[depth, rank] >= chances[node]
            for rank in range(min(count, width - 1), place, -1):
                layer[depth, rank] = layer[depth, rank - 1]
            if place < width:
                layer[depth, place] = chances[node]
                filled[depth] = min(count + 1, width)
        for depth in range(most):
            trees[depth] += filled[depth] > 0
            ranks[depth] = max(ranks[depth], filled[depth])
            for rank in range(filled[depth]):
                sums[depth, rank] += layer[depth, rank]
    deepest = 0
    for depth in range(most):
        for rank in range(ranks[depth]):
            deepest = depth + 1
            total = weights[depth, rank] + trees[depth]
            if rank == 0:
                guessed[depth] *= weights[depth, rank] / total
            known = typical[depth, rank] * weights[depth, rank] + sums[depth, rank]
            typical[depth, rank], weights[depth, rank] = known / total, min(total, memory)
    return deepest


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
    most, found, size, gives = (
        float(whole_tokens_within(lines, tpot_s, most_tokens, 0.0)),
        0,
        0,
        1.0,
    )
    likely, count = np.empty(chances.size), 0
    for depth in range(chances.shape[0]):
        count = _likeliest(likely, count, chances[depth])
        hoped = 1.0
        for node in range(min(count, TREE)):
            hoped += likely[node]
            tokens = max(share * hoped, 1.0)
            left_s = tpot_s * tokens - drafting_s[depth]
            requests = whole_tokens_within(lines, left_s, most_tokens, 0.0) / (2.0 + node)
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
    ranked = np.ascontiguousarray(chances)  # a view from behind would be compiled for once more
    return _most_per_second(ranked, room, roots, others, roots_s, model.lines())


class DraftShape:
    """What a model's trees have been like: the path probabilities of their nodes, typically.

    Depths that were never drafted are taken to continue those above as the last ones did; those
    that are not drafted now, as they did when they were.

    Args:
        max_depth, max_width: the largest tree there is.
        memory: trees after which an old one counts for 1/e.
    """

    PRIOR = 16.0
    """Trees that the first guess counts for."""
    LEAST = 8.0
    """Trees that what is long past counts for."""
    NEGLIGIBLE = 0.02
    """Share of the first guess in what is typical from which on it is left alone."""
    HARDLY = 0.003
    """Difference between chances that makes none."""

    def __init__(self, max_depth: int, max_width: int, memory: float = 200.0) -> None:
        self._chances = np.zeros((max_depth, max_width))
        self._weights = np.full((max_depth, max_width), self.PRIOR)
        self._assumed = 0.0
        self._guess: Floats = np.zeros(max_depth)
        self._guessed = np.ones(max_depth)
        self._memory = memory
        self._deepest = 0
        self.assume(FIRST_GUESS)

    @property
    def typical(self) -> Floats:
        """(depths, width) mean path probabilities of what is drafted now, by depth and rank."""
        return self._chances

    def assume(self, chance: float) -> None:
        """Let the first guess be that the best guess at each depth is accepted so often, wherever
        it still counts for something. A guess that is hardly another changes nothing."""
        if abs(chance - self._assumed) < self.HARDLY:
            return
        self._assumed = chance
        guess: Floats = np.power(chance, np.arange(1.0, len(self._chances) + 1.0))
        self._chances[:, 0] += self._guessed * (guess - self._guess)
        self._guess = guess

    @property
    def is_guess(self) -> bool:
        """Whether the first guess still counts for something."""
        return bool(self._guessed[0] > self.NEGLIGIBLE)

    def observe(self, chances: Floats, depth: int, width: int) -> None:
        """Take in candidates: (n, depth * width) path probabilities, layer by layer."""
        count, size = len(chances), depth * width
        depths = np.tile(np.repeat(np.arange(1, depth + 1), width), count)
        self.observe_nodes(chances.ravel(), depths, np.arange(0, count * size + 1, size))

    def observe_nodes(self, chances: Floats, depths: Ints, offsets: Ints) -> None:
        """Take in candidates of any form.

        Of each depth it is the mean over the trees that are so deep, the nodes of a depth ranked by
        what they are worth; a rank that some of these trees lack counts as nothing.

        Args:
            chances: (N,) path probabilities.
            depths: (N,) of the nodes, 1 for a child of the root.
            offsets: (n+1,) where each tree's nodes begin.
        """
        before = self._chances[:, 0].copy()
        deepest = _learn_layers(
            self._chances,
            self._weights,
            self._guessed,
            self._memory,
            chances,
            depths,
            offsets,
        )
        if 0 < deepest < self._deepest and before[deepest - 1] > self.NEGLIGIBLE:
            self._chances[deepest:] *= self._chances[deepest - 1, 0] / before[deepest - 1]
        self._deepest = max(self._deepest, deepest)
        if 0 < self._deepest < len(self._chances):
            self._guessed[self._deepest :] = 0.0
            last = self._chances[self._deepest - 1]
            above = self._chances[self._deepest - 2, 0] if self._deepest > 1 else 1.0
            goes_on = min(last[0] / max(above, SHORTEST_S), 1.0)
            beyond = np.arange(1, len(self._chances) - self._deepest + 1)
            self._chances[self._deepest :] = last * goes_on ** beyond[:, None]

    def age(self, share: float) -> None:
        """Nothing was drafted for long: let what was seen count for ``share`` of what it did, and
        the first guess for the rest."""
        self._chances[:, 0] += (1.0 - share) * (self._guess - self._chances[:, 0])
        self._guessed = 1.0 - share * (1.0 - self._guessed)
        self._forget(share)

    def doubt(self) -> None:
        """Let what was seen hardly count beside what is seen next."""
        self._forget(0.0)

    def _forget(self, share: float) -> None:
        np.maximum(self._weights * share, self.LEAST, out=self._weights)


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
    drafting_s: Floats,
) -> tuple[Speculated, float, float]:
    """The trees with which most requests keep a TPOT together.

    Args:
        chances: (depths, width) typical path probabilities.
        share: of what these promise, what to count on.
        tpot_s: the objective.
        model: step times without drafting.
        drafting_s: (depths,) seconds until a tree is 1, 2, .. deep.

    Returns:
        What decoding is like with them, the seconds a step then drafts, and how many requests keep
        the TPOT; plain decoding where no tree is better.
    """
    most, depth, nodes, tokens = _sustained(
        np.ascontiguousarray(chances), share, tpot_s, model.lines(), model.max_tokens, drafting_s
    )
    if not nodes:
        return PLAIN, 0.0, most
    return Speculated(tokens, 1.0 + nodes), float(drafting_s[depth - 1]), most
