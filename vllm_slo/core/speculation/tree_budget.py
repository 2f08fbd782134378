# SPDX-License-Identifier: Apache-2.0
"""How many draft nodes a step verifies, and how deep and wide trees are to be.

AdaServe's budget B is the largest batch that hardware profiling allows (section 3, footnote 1), and
its depth a clipped fraction of it (equation 8), with constants found by grid search. Here both
follow from the step-time model. The budget is the one with most tokens per second among those
within the tightest slack. Depth and width are those with most tokens per second, where the draft's
own passes count. Where no node pays, nothing is drafted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from vllm_slo.core.admission.program import PLAIN, Speculated
from vllm_slo.core.arrays import Floats, Floats2D, Floats3D, Ints
from vllm_slo.core.jit import jit
from vllm_slo.core.step_time.budget import Lines, step_seconds_compiled, whole_tokens_within
from vllm_slo.core.step_time.model import StepTimeModel

SHORTEST_S = 1e-9
TREE = 8
"""Most nodes of a tree that an objective is assumed to need."""
DEPTH_BESIDE_PROMPTS = 3
"""Greatest depth of a tree while prompts wait. Steps then last as long as the latest request
allows. Its drafts are mostly seldom accepted. Passes for deeper trees would take time from it and
from the prompts. Measured: "Trees beside prompts" in benchmarks/results/ablation.md."""

NEEDED = 1.5
"""A promised TPOT shorter than so many steps without drafts needs drafts. Otherwise prompts get at
least a third of the time of steps that last as long as it allows. Measured in the virtual time of
AdaServe's scenario: 1.0 attains 90%, 1.1 95%, 1.2 and 1.5 97%."""


def needs_drafts(tpot_s: float, plain_s: float) -> bool:
    """Whether a promised TPOT counts on drafts.

    Args:
        tpot_s: the shortest of those that are promised.
        plain_s: seconds of a step of all requests without drafts, with the margin of promises.
    """
    return tpot_s < NEEDED * plain_s


def prompts_fill(room: int, seats: int, blocks: int, waiting: Iterable[tuple[int, int]]) -> bool:
    """Whether prompts have more tokens than a step has room for.

    Args:
        room: tokens that the running requests leave of the step; negative: more than it has.
        seats: requests that may begin.
        blocks: free KV blocks.
        waiting: (prompt tokens, KV blocks) of those that wait, in serving order. The first that
            finds no seat or no memory ends the count.
    """
    for tokens, needed in itertools.islice(waiting, max(seats, 0)):
        if room < 0 or needed > blocks:
            break
        room, blocks = room - tokens, blocks - needed
    return room < 0


def depth_and_width(
    active: int,
    *,
    verifier_tokens: int,
    speculator_tokens: int,
    min_depth: int,
    max_depth: int,
    max_width: int,
) -> tuple[int, int]:
    """(d, w) of the candidate trees of ``active`` requests: AdaServe's equations 8 and 9 (section
    5.2), with c1 = c2 = 0.

    Args:
        active: requests; 0 counts as 1.
        verifier_tokens: B1, tokens that the target verifies in a step.
        speculator_tokens: B2, tokens that the draft model processes in one of its steps.
        min_depth, max_depth: D_min and D_max.
        max_width: W_max.
    """
    n = max(active, 1)
    depth, width = verifier_tokens // n - 1, speculator_tokens // n
    return max(min(depth, max_depth), min_depth), max(min(width, max_width), 1)


@jit
def _most_per_second(
    chances: Floats, room: int, roots: int, others: int, roots_s: float, lines: Lines
) -> int:
    """`worthwhile_nodes`, given the seconds that the roots cost."""
    tokens = float(roots)
    start_s = step_seconds_compiled(lines, others + roots, 0.0)
    best, nodes = tokens / max(roots_s, SHORTEST_S), 0
    for node in range(room):
        tokens += chances[node]
        took_s = roots_s + step_seconds_compiled(lines, others + roots + node + 1.0, 0.0) - start_s
        rate = tokens / max(took_s, SHORTEST_S)
        if rate > best:
            best, nodes = rate, node + 1
    return nodes


@jit
def _merge(ranked: Floats, count: int, values: Floats) -> int:
    """Merge ``values`` into the ``count`` descending values of ``ranked``; the new count."""
    for value in values:
        place = count
        while place > 0 and ranked[place - 1] < value:
            ranked[place] = ranked[place - 1]
            place -= 1
        ranked[place] = value
        count += 1
    return count


class Verifying(NamedTuple):
    """The step that verifies trees, as compiled code takes it.

    Attributes:
        active: requests that decode in it.
        behind: how many of them have trees.
        reading_s: seconds that reading their KV tokens takes.
        path_tokens: cost of another path of a tree besides its nodes, in tokens.
    """

    active: int
    behind: int
    reading_s: float
    path_tokens: float


@jit
def _add_layer(likely: Floats, paths: Floats, count: int, layer: Floats, width: int) -> int:
    """Merge the ``width`` best values of a layer into the ``count`` descending values of
    ``likely``; the new count. ``paths`` is 1 for each value that starts a path of its own."""
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
    """Fill in the expected tokens of trees of the 1, 2, .. ``count`` likeliest nodes, ``hoped``,
    and the seconds ``took_s`` of the step with such trees."""
    tokens, extra = 1.0, 0.0
    for node in range(count):
        tokens += likely[node]
        extra += 1.0 + step.path_tokens * paths[node]
        hoped[node] = tokens
        took_s[node] = (
            step_seconds_compiled(lines, step.active + step.behind * extra, 0.0) + step.reading_s
        )


@jit
def fastest_shapes(
    chances: Floats3D,
    owner: Ints,
    widths: Ints,
    drafting_s: Floats3D,
    least: int,
    step: Verifying,
    lines: Lines,
) -> Floats:
    """The depth and width with most tokens per second, for each way to draft.

    Args:
        chances: (models, depths, width) typical path probabilities of each model's trees.
        owner: (W,) the model whose trees each way to draft yields.
        widths: (w,) allowed widths, ascending.
        drafting_s: (W, w, deepest) seconds until trees of each width are 1, 2, .. deep.
        least: least depth allowed.
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
    chances: Floats2D,
    share: float,
    tpot_s: float,
    lines: Lines,
    most_tokens: int,
    drafting_s: Floats,
) -> tuple[float, int, int, float]:
    """`sustained_trees`: (requests, depth, nodes, tokens out)."""
    most, best_depth, size, gives = (
        float(whole_tokens_within(lines, tpot_s, most_tokens, 0.0)),
        0,
        0,
        1.0,
    )
    likely, count = np.empty(chances.size), 0
    for depth in range(chances.shape[0]):
        count = _merge(likely, count, chances[depth])
        hoped = 1.0
        for node in range(min(count, TREE)):
            hoped += likely[node]
            tokens = max(share * hoped, 1.0)
            left_s = tpot_s * tokens - drafting_s[depth]
            requests = whole_tokens_within(lines, left_s, most_tokens, 0.0) / (2.0 + node)
            if requests > most:
                most, best_depth, size, gives = requests, depth + 1, node + 1, tokens
    return most, best_depth, size, gives


def worthwhile_nodes(
    chances: Floats, roots: int, others: int, context: int, model: StepTimeModel, most: int
) -> int:
    """How many of the best nodes raise the output tokens per second.

    The cost of a node is the time by which it makes this step longer, prompts included. The cost of
    the roots is the time of a step of their own. So nodes do not look cheap because a long prompt
    is in the step.

    Args:
        chances: (N,) path probabilities in descending order.
        roots: requests that decode in the step.
        others: other tokens of the step.
        context: KV tokens that the requests read.
        model: expected step times, drafting included.
        most: nodes that fit.
    """
    room = min(len(chances), max(most, 0))
    if not room or not roots:
        return 0
    roots_s = model.predict_s(roots, context)
    ranked = np.ascontiguousarray(chances)  # one memory layout, so that it is compiled for once
    return _most_per_second(ranked, room, roots, others, roots_s, model.lines())


def node_floor(behind: int, tokens: int, model: StepTimeModel, step_s: float) -> float:
    """The path probability f below which a node slows down the request that it is for.

    A node makes the step longer by dT for all requests. Its request, which gets one token at least,
    gains if f > dT / T. The price dT is that of nodes if each request that is ``behind`` gets
    `TREE` of them.

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
    """The trees with which most requests keep a TPOT at the same time.

    Args:
        chances: (depths, width) typical path probabilities.
        share: of the tokens expected by these that is counted on.
        tpot_s: the objective.
        model: step times without drafting.
        drafting_s: (depths,) seconds until a tree is 1, 2, .. deep.

    Returns:
        Tokens in and out of a step of one request, the seconds of drafting a step, and how many
        requests keep the TPOT; plain decoding where no tree is better.
    """
    most, depth, nodes, tokens = _sustained(
        np.ascontiguousarray(chances), share, tpot_s, model.lines(), model.max_tokens, drafting_s
    )
    if not nodes:
        return PLAIN, 0.0, most
    return Speculated(tokens, 1.0 + nodes), float(drafting_s[depth - 1]), most
