# SPDX-License-Identifier: Apache-2.0
"""How much speculation pays: the nodes of a step, and how far ahead the draft is to guess.

AdaServe's budget B is the largest batch that hardware profiling allows (section 3, footnote 1), and
its depth a clipped fraction of it (equation 8), with constants found by grid search. Here both
follow from the step-time model: of all budgets within the tightest slack the one that yields most
tokens per second, and of all depths the one at which that rate is highest, the draft's own passes
counted. Where nothing pays, nothing is drafted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.admission.program import PLAIN, Speculated
from vllm_slo.core.jit import jit
from vllm_slo.core.step_time.budget import Lines, step_seconds_compiled, whole_tokens_within
from vllm_slo.core.step_time.model import StepTimeModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

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
