# SPDX-License-Identifier: Apache-2.0
"""The predicted step of each chain of draft models: SpecRouter's equation 7 (section 4.2).

A pool holds draft models, the cheapest first; the served model is the target. A chain is an
ascending tuple of places in the pool, and the empty one is plain decoding. The proposal of a chain
is the continuation by its last model: a model alone drafts a tree, and behind others it verifies
their guesses. So chains that end in the same model propose the same tokens, at different costs.

The time per token of a chain is the time of drafting and of the target's pass, over the tokens that
they yield. It is computed for every chain, depth, width and window.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from vllm_slo.core.arrays import Bools, Floats, Floats2D, Floats3D, Ints, Ints2D
from vllm_slo.core.jit import jit
from vllm_slo.core.speculation.chain_costs import (
    Edges,
    drafting_times,
    lifted,
)
from vllm_slo.core.speculation.chain_learning import Chain
from vllm_slo.core.speculation.draft_shape import DraftShape
from vllm_slo.core.speculation.pass_times import OCTAVES, PassTimes
from vllm_slo.core.speculation.tree_budget import Verifying, fastest_shapes
from vllm_slo.core.step_time.budget import Lines, step_seconds_compiled
from vllm_slo.core.step_time.model import StepTimeModel


class DraftLoad(NamedTuple):
    """The requests to draft for.

    Attributes:
        active: requests that decode.
        context: KV tokens that they read.
        deepest: greatest depth of a tree.
        widths: allowed widths of a tree, ascending.
        behind: how many of the requests need more tokens than others to keep an objective.
        min_depth: least depth of a tree, where a model is available.
        begun: how many of the requests get drafts for the first time.
        verifying_s: seconds that verifying trees adds to a step besides their tokens.
    """

    active: int
    context: int
    deepest: int
    widths: tuple[int, ...] = (1,)
    behind: int = 0
    min_depth: int = 0
    begun: int = 0
    verifying_s: float = 0.0


class DraftingTimes(NamedTuple):
    """Predicted times of drafting.

    Attributes:
        load: that they are for: requests, widths and depth.
        widths: (w,) of these.
        drafting_s, windows: see `drafting_times`; row 0 is the first chain that drafts.
    """

    load: tuple[int, tuple[int, ...], int]
    widths: Ints
    drafting_s: Floats
    windows: Ints


class Forecast(NamedTuple):
    """The prediction of each chain with its best trees; lists by chain.

    Attributes:
        time_s: T_eff, seconds per token; infinite where the chain cannot be chosen.
        trees: [depth, width, tokens of a request with a tree, seconds of the step, seconds of
            drafting, window]; the last two as in `DraftingTimes`.
        drafting: times of drafting.
    """

    time_s: list[float]
    trees: list[list[float]]
    drafting: DraftingTimes


@jit
def _fastest(
    shapes: Floats3D,
    odds: float,
    raised: Floats3D,
    owner: Ints,
    is_open: Bools,
    widths: Ints,
    drafting_s: Floats3D,
    windows: Ints2D,
    least: int,
    active: int,
    behind: int,
    reading_s: float,
    path_tokens: float,
    verifying_s: float,
    k1: float,
    c1: float,
    b1: float,
    k2: float,
    c2: float,
    b2: float,
) -> Floats2D:
    """(C + 1, 7) a forecast: `Forecast.trees` and the seconds per token, plain decoding first.

    It is one call of plain arguments: between steps code has to be read from memory again, and
    that which takes named tuples apart is long.

    Args:
        shapes: (models, depths, width) typical path probabilities.
        odds: by which the odds of each guess differ from typical ones.
        raised: as ``shapes``; becomes the same at these odds.
        owner: (C,) the last model of each chain that drafts.
        is_open: (C + 1,) whether all models of each chain are available.
        widths, drafting_s, windows: see `DraftingTimes`.
        least: least depth allowed.
        active, behind, reading_s, path_tokens: see `Verifying`.
        verifying_s: see `DraftLoad`.
        k1, c1, b1, k2, c2, b2: see `Lines`.
    """
    step = Verifying(active, behind, reading_s, path_tokens)
    lines = Lines(k1, c1, b1, k2, c2, b2)
    for model in range(len(shapes)):
        raised[model] = lifted(shapes[model], odds)
    result = np.zeros((len(owner) + 1, 7))
    result[0, 1], result[0, 2] = widths[0], 1.0
    result[0, 3] = step_seconds_compiled(lines, active, 0.0) + reading_s
    costs_s = drafting_s + verifying_s
    result[1:, :4] = fastest_shapes(raised, owner, widths, costs_s, least, step, lines)
    for c in range(len(result)):
        depth = int(result[c, 0])
        if depth:
            w = 0
            while widths[w] < result[c, 1]:
                w += 1
            result[c, 4] = drafting_s[c - 1, w, depth - 1]
            result[c, 5] = windows[c - 1, depth - 1]
        may_be = is_open[c] and result[c, 2] > 0.0 and (c > 0 or least == 0)
        result[c, 6] = result[c, 3] / result[c, 2] if may_be else np.inf
    return result


class ChainForecasts:
    """Predicts chains from what was learnt of the models of a pool.

    Args:
        models: of the pool.
        max_depth, max_width: of the largest tree.
        path_tokens: what another path of a tree costs the target besides its nodes, in tokens.
        most_beams: most beams of one pass of a model.

    Attributes:
        chains: all chains, plain decoding first.
        shapes: what the trees of each model are typically like.
        times: T_i of each model.
        edges: alpha(i, j).
        available: whether each model may be chosen.
        is_open: whether all models of each chain are available.
    """

    TREES = 400.0
    """Trees after which an old one counts for 1/e in the typical shape of a model's trees.
    Measured: 1000 is as good; 32 takes 0.6% longer, and 9% in one world. `Predictability` follows
    what changes sooner."""
    REFRESH = 8
    """Steps after which the times of drafting are computed anew. Passes weigh little in what is
    known of them (`PassTimes.SHARE`), so the times move slowly."""

    def __init__(
        self, models: int, max_depth: int, max_width: int, path_tokens: float, most_beams: int
    ) -> None:
        self.chains: list[Chain] = [
            chain
            for length in range(models + 1)
            for chain in itertools.combinations(range(models), length)
        ]
        self.edges = Edges(models)
        drafting, size = self.chains[1:], (models, max_depth, max_width)
        self._places = np.array([[*c, *[-1] * (models - len(c))] for c in drafting], dtype=np.int64)
        self._owner = np.array([chain[-1] for chain in drafting], dtype=np.int64)
        self._may_be = np.ones(len(self.chains), dtype=np.bool_)
        self._passes = np.zeros((models, 4, OCTAVES))
        self._typical, self._raised = np.empty(size), np.empty(size)
        self.times = [PassTimes(passes) for passes in self._passes]
        self.shapes = [DraftShape(chances, memory=self.TREES) for chances in self._typical]
        self.available = [True] * models
        self.is_open = [True] * len(self.chains)
        self._max_depth = max_depth
        self._path_tokens = path_tokens
        self._most_beams = most_beams
        self._drafting: DraftingTimes | None = None
        self._age = 0
        self._odds = 1.0

    def drop(self, model: int) -> None:
        """Close all chains with a model."""
        self.available[model] = False
        self.is_open = [all(self.available[place] for place in chain) for chain in self.chains]
        self._may_be[:] = self.is_open
        self._drafting = None

    def drafting_s(self, chain: Chain, requests: int, width: int) -> Floats:
        """(max_depth,) seconds until trees of a chain that drafts are 1, 2, .. deep; infinite at
        depths that it is not for."""
        row = self.chains.index(chain) - 1
        times_s, _ = drafting_times(
            self._places[row : row + 1],
            self.edges.alphas(),
            self._passes,
            max(requests, 1),
            self._most_beams,
            np.array([width]),
            self._max_depth,
        )
        result: Floats = times_s[0, 0]
        return result

    def forecast(self, load: DraftLoad, model: StepTimeModel, odds: float) -> Forecast:
        """The prediction of each chain if all requests have trees.

        Args:
            load: the requests.
            model: expected step times without drafting.
            odds: by which the odds of each guess differ from typical ones.
        """
        self._odds = odds
        return self.with_trees(load.active, self._drafting_times(load), load, model)

    def with_trees(
        self, behind: int, drafting: DraftingTimes, load: DraftLoad, model: StepTimeModel
    ) -> Forecast:
        """The prediction of each chain if ``behind`` of the requests have trees, by the odds and
        times of drafting of the last `forecast`."""
        first, second = model.terms
        trees: list[list[float]] = _fastest(
            self._typical,
            self._odds,
            self._raised,
            self._owner,
            self._may_be,
            drafting.widths,
            drafting.drafting_s,
            drafting.windows,
            min(load.min_depth, drafting.drafting_s.shape[2]),
            load.active,
            behind,
            model.kv_s * load.context,
            self._path_tokens,
            load.verifying_s,
            *first,
            *second,
        ).tolist()
        return Forecast([tree.pop() for tree in trees], trees, drafting)

    def of_trees(
        self,
        c: int,
        depth: int,
        width: int,
        drafting: DraftingTimes,
        load: DraftLoad,
        model: StepTimeModel,
    ) -> tuple[float, float]:
        """(tokens of a request, seconds of the step) of chain number ``c`` with trees of one depth
        and width for all requests, by the shapes of the last `forecast`."""
        w = load.widths.index(width)
        _, _, tokens, step_s = fastest_shapes(
            self._raised,
            self._owner[c - 1 : c],
            np.array([width]),
            drafting.drafting_s[c - 1 : c, w : w + 1, :depth] + load.verifying_s,
            depth,
            self._verifying(load.active, load, model),
            model.lines(),
        )[0].tolist()
        return tokens, step_s

    def _drafting_times(self, load: DraftLoad) -> DraftingTimes:
        """Times of drafting; computed anew under another load, after `REFRESH` steps, and until all
        models are known."""
        of = load.active, load.widths, load.deepest
        drafting, self._age = self._drafting, self._age + 1
        if drafting is not None and drafting.load == of and self._age < self.REFRESH:
            return drafting
        for place, shape in enumerate(self.shapes):
            if shape.is_guess:
                shape.assume(self.edges.alpha(place, len(self.shapes)))
        widths, deepest = np.array(load.widths), min(load.deepest, self._max_depth)
        times_s, windows = drafting_times(
            self._places,
            self.edges.alphas(),
            self._passes,
            load.active,
            self._most_beams,
            widths,
            deepest,
        )
        self._drafting = DraftingTimes(of, widths, times_s, windows)
        self._age = 0 if all(times.is_known for times in self.times) else self.REFRESH
        return self._drafting

    def _verifying(self, behind: int, load: DraftLoad, model: StepTimeModel) -> Verifying:
        reading_s = model.kv_s * load.context
        return Verifying(load.active, behind, reading_s, self._path_tokens)
