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
import math
from typing import NamedTuple

import numpy as np

from vllm_slo.core.arrays import Floats, Ints
from vllm_slo.core.speculation.chain_costs import (
    OCTAVES,
    Edges,
    PassTimes,
    drafting_times,
    lifted,
    look_ahead,
)
from vllm_slo.core.speculation.chain_learning import Chain
from vllm_slo.core.speculation.draft_shape import DraftShape
from vllm_slo.core.speculation.tree_budget import Verifying, fastest_shapes
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
    """

    active: int
    context: int
    deepest: int
    widths: tuple[int, ...] = (1,)
    behind: int = 0
    min_depth: int = 0
    begun: int = 0


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
        trees: [depth, width, tokens of a request with a tree, seconds of the step].
        drafting: times of drafting.
    """

    time_s: list[float]
    trees: list[list[float]]
    drafting: DraftingTimes


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
        use: share of the nodes that would pay for which steps have room.
        fresh: mean tokens of a request that a step adds, which each model has to read.
    """

    TREES = 32.0
    """Trees after which an old one counts for 1/e in the typical shape of a model's trees.
    Measured: 200 takes 0.2% longer, which is within the noise."""

    def __init__(
        self, models: int, max_depth: int, max_width: int, path_tokens: float, most_beams: int
    ) -> None:
        self.chains: list[Chain] = [
            chain
            for length in range(models + 1)
            for chain in itertools.combinations(range(models), length)
        ]
        self._passes = np.zeros((models, 3, OCTAVES))
        self.times = [PassTimes(passes) for passes in self._passes]
        self.shapes = [DraftShape(max_depth, max_width, memory=self.TREES) for _ in self.times]
        self.edges = Edges(models)
        self.available = [True] * models
        self.is_open = [True] * len(self.chains)
        self.use = 1.0
        self.fresh = 1.0
        self._max_depth = max_depth
        self._path_tokens = path_tokens
        self._most_beams = most_beams
        drafting = self.chains[1:]
        self._places = np.array([[*c, *[-1] * (models - len(c))] for c in drafting], dtype=np.int64)
        self._owner = np.array([chain[-1] for chain in drafting], dtype=np.int64)
        self._typical = np.zeros((models, max_depth, max_width))
        self._drafting: DraftingTimes | None = None
        # By current chain and turn: the rows of `DraftingTimes` that a step computes anew.
        self._turns = [
            [np.array(sorted({row, current} - {-1})) for row in range(len(drafting))]
            for current in range(-1, len(drafting))
        ]
        self._turn = 0

    def drop(self, model: int) -> None:
        """Close all chains with a model."""
        self.available[model] = False
        self.is_open = [all(self.available[place] for place in chain) for chain in self.chains]
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
            self.fresh,
            self._most_beams,
            np.array([width]),
            self._max_depth,
        )
        result: Floats = times_s[0, 0]
        return result

    def forecast(
        self, load: DraftLoad, model: StepTimeModel, odds: float, current: int
    ) -> Forecast:
        """The prediction of each chain if all requests have trees.

        Args:
            load: the requests.
            model: expected step times without drafting.
            odds: by which the odds of each guess differ from typical ones.
            current: the chain whose times of drafting are computed anew.
        """
        alphas = self.edges.alphas()
        for place, shape in enumerate(self.shapes):
            if shape.is_guess:
                shape.assume(float(alphas[place, -1]))
            self._typical[place] = lifted(shape.typical, odds)
        drafting = self._drafting_times(load, alphas, current)
        return self.with_trees(load.active, drafting, load, model)

    def with_trees(
        self, behind: int, drafting: DraftingTimes, load: DraftLoad, model: StepTimeModel
    ) -> Forecast:
        """The prediction of each chain if ``behind`` of the requests have trees, by the shapes and
        times of drafting of the last `forecast`."""
        least = min(load.min_depth, drafting.drafting_s.shape[2])
        trees: list[list[float]] = fastest_shapes(
            self._typical,
            self._owner,
            drafting.widths,
            drafting.drafting_s,
            least,
            self._verifying(behind, load, model),
            model.lines(),
        ).tolist()
        trees.insert(0, [0.0, load.widths[0], 1.0, model.predict_s(load.active, load.context)])
        time_s = [
            seconds / tokens if is_open and tokens else math.inf
            for (_, _, tokens, seconds), is_open in zip(trees, self.is_open, strict=True)
        ]
        if least:
            time_s[0] = math.inf
        return Forecast(time_s, trees, drafting)

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
            self._typical,
            self._owner[c - 1 : c],
            np.array([width]),
            drafting.drafting_s[c - 1 : c, w : w + 1, :depth],
            depth,
            self._verifying(load.active, load, model),
            model.lines(),
        )[0].tolist()
        return tokens, step_s

    def _drafting_times(self, load: DraftLoad, alphas: Floats, current: int) -> DraftingTimes:
        """Times of drafting. Under an unchanged load a step computes those of the current chain and
        of one other chain, in turn, and keeps the rest."""
        drafting, of = self._drafting, (load.active, load.widths, load.deepest)
        learnt = self._places, alphas, self._passes, load.active, self.fresh, self._most_beams
        self._turn = (self._turn + 1) % len(self._places)
        if drafting is None or drafting.load != of:
            widths, deepest = np.array(load.widths), min(load.deepest, self._max_depth)
            drafting = DraftingTimes(of, widths, *drafting_times(*learnt, widths, deepest))
            self._drafting = drafting
        else:
            rows = self._turns[current][self._turn]
            look_ahead(rows, *learnt, drafting.widths, drafting.drafting_s, drafting.windows)
        return drafting

    def _verifying(self, behind: int, load: DraftLoad, model: StepTimeModel) -> Verifying:
        reading_s = model.kv_s * load.context
        return Verifying(load.active, behind, reading_s, self.use, self._path_tokens)
