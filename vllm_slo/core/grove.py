# SPDX-License-Identifier: Apache-2.0
"""The trees of one step: what each request could verify, what it needs, how much the step takes.

AdaServe's two selections (section 4.3, steps 2 and 3) with a budget that is no constant: as many
nodes as pay, as far as the objectives of all requests of the step leave time for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.step_time import StepTimeModel
from vllm_slo.core.tree_budget import node_floor, worthwhile_nodes
from vllm_slo.core.tree_selection import needed_tokens, select_trees
from vllm_slo.core.types import INFINITY, DecodeView

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Marks: TypeAlias = NDArray[np.int8]
Bools: TypeAlias = NDArray[np.bool_]


class TPOTNeeds(NamedTuple):
    """What a decoding request's TPOT asks of a step.

    Attributes:
        pace_s: seconds per token at which it is still kept, to the end of the window by which it
            is judged, or of the answer, whichever comes first.
        tokens: A(r), tokens that the step must yield, over that window.
    """

    pace_s: float
    tokens: float


def tpot_needs(view: DecodeView, start_s: float, end_s: float, left: int) -> TPOTNeeds:
    """What a TPOT asks of a step from ``start_s`` to ``end_s``.

    Args:
        view: the request before that step, a token a step being expected.
        left: tokens of its answer still to come, at most; at least 1.
    """
    beyond = max(view.window_left - left, 0.0)
    pace_s = (view.window_end_s - beyond * view.tpot_s - start_s) / min(view.window_left, left)
    # Counted from when its next token is due: one is owed by then.
    owed = needed_tokens(start_s - view.due_s, end_s - start_s, view.tpot_s, -1)
    return TPOTNeeds(pace_s, owed)


class TPOTLimit(NamedTuple):
    """How long a step may be for a request that decodes.

    Attributes:
        limit_s: longest step, a token a step being expected.
        tpot_s: how much longer, for each token besides that one to count on.
        place: in the grove; -1: it has no candidates.
    """

    limit_s: float
    tpot_s: float
    place: int


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The step that trees are to join.

    Attributes:
        roots: requests that decode in it.
        others: tokens of prompts in it, for the price of a node.
        planned: tokens that are granted already, nodes left out.
        context: KV tokens that are read.
        max_tokens: most tokens of a step.
        limit_s: longest step that its plan allows.
        deadline_s: longest step that a prompt's deadline allows.
        limits: asked for where that is too short for the nodes that would pay.
    """

    roots: int
    others: int
    planned: int
    context: int
    max_tokens: int
    limit_s: float
    deadline_s: float
    limits: Callable[[], Sequence[TPOTLimit]]


class Grove:
    """The candidates of all requests that one step could verify, as flat arrays.

    Args:
        offsets, parents: as `select_trees` takes them.
        chances: calibrated path probabilities.
        limits: (n,) most nodes of each request.
        share: of the tokens that a tree is expected to yield, what to count on.

    Attributes:
        required: (n,) A(r); -inf where nothing is needed, or nothing helps.
        pace_s: (n,) seconds per token at which a TPOT is still kept; infinite without.
        promised: (n,) whether its TPOT is promised.
        needed: nodes that objectives need.
        needed_gains: (n,) expected tokens of these.
    """

    def __init__(
        self,
        offsets: Ints,
        parents: NDArray[np.int32],
        chances: Floats,
        limits: Ints,
        share: float = 1.0,
    ) -> None:
        requests = len(limits)
        self.offsets = offsets
        self._sizes = np.diff(offsets)
        self.parents = parents
        self.chances = chances
        self.limits = limits
        self.share = share
        self.required = np.full(requests, -INFINITY)
        self.pace_s = np.full(requests, INFINITY)
        self.promised = np.zeros(requests, dtype=np.bool_)
        self.needed = 0
        self._slo_floor = 0.0
        self.needed_gains = np.zeros(requests)

    def part(self, place: int) -> slice:
        """Where the nodes of one request lie."""
        return slice(int(self.offsets[place]), int(self.offsets[place + 1]))

    @property
    def wanting(self) -> bool:
        """Whether an objective needs more of the step than a token."""
        return bool(self.required.max() > 1.0)

    def require(self, place: int, needs: TPOTNeeds, *, promised: bool) -> None:
        """Note what the TPOT of one request asks of the step."""
        self.pace_s[place], self.required[place] = needs
        self.promised[place] = promised

    def select_needed(
        self, budget: int, roots: int, ahead: float, model: StepTimeModel, step_s: float
    ) -> Marks:
        """The nodes that objectives need: SLO-customised selection.

        Args:
            budget: most tokens of the step.
            roots: requests that run.
            ahead: tokens that a step yields at best.
            model: expected step times.
            step_s: the step's time without nodes.
        """
        behind = int(np.count_nonzero(self.required > 1.0))
        self._slo_floor = node_floor(behind, roots, ahead, model, step_s)
        chosen = self._select(budget, throughput=False)
        self.needed = int(np.count_nonzero(chosen))
        self.needed_gains = self.gains(chosen > 0)
        return chosen

    def select(self, nodes: int) -> Marks:
        """Both selections, of ``nodes`` nodes."""
        return self._select(len(self.limits) + nodes, throughput=True)

    def _select(self, budget: int, *, throughput: bool) -> Marks:
        return select_trees(
            self.offsets,
            self.chances,
            self.parents,
            self.required,
            np.full(len(self.limits), len(self.chances)),
            budget=budget,
            most=self.limits,
            throughput_phase=throughput,
            slo_floor=self._slo_floor,
        )

    def gains(self, taken: Bools) -> Floats:
        """(n,) expected tokens of the nodes that are ``taken``."""
        gains: Floats = np.add.reduceat(np.where(taken, self.chances, 0.0), self.offsets[:-1])
        return gains

    def hurries(self) -> list[TPOTLimit]:
        """Requests that keep a TPOT without its being promised."""
        places = np.flatnonzero(~self.promised & (self.pace_s < INFINITY)).tolist()
        return [TPOTLimit(self.pace_s[n].item(), self.pace_s[n].item(), n) for n in places]

    def sure_gains(self, taken: Bools) -> Floats:
        """(n,) tokens besides the roots' to count on, of the nodes that are ``taken``."""
        gains: Floats = np.maximum(self.share * (1.0 + self.gains(taken)) - 1.0, 0.0)
        return gains

    def leave_out(self, granted: Bools) -> None:
        """Only the ``granted`` requests take part in the step."""
        self.limits = np.where(granted, self.limits, 0)

    def likely(self) -> Floats:
        """Path probabilities of the nodes that could be taken, descending."""
        open_nodes = np.repeat(self.limits > 0, self._sizes)
        found: Floats = np.sort(self.chances[open_nodes])[::-1]
        return found


class StepNodes(NamedTuple):
    """How many nodes a step verifies.

    Attributes:
        nodes: of all requests.
        hoped: expected tokens of those that would pay if there were room for all of them.
    """

    nodes: int
    hoped: float


def nodes_of_step(
    grove: Grove, load: StepLoad, expected: StepTimeModel, promise: StepTimeModel
) -> StepNodes:
    """How many nodes join a step: those that objectives need, and those that pay as far as no
    objective suffers.

    Args:
        grove: the candidates.
        load: the step.
        expected: typical step times, drafting included.
        promise: those to promise by.
    """
    likely = grove.likely()
    paying = worthwhile_nodes(
        likely, load.roots, load.others, load.context, expected, load.max_tokens - load.planned
    )
    room = max(load.max_tokens - load.planned, 0)
    calm = min(room, _unhurried(grove, load, min(grove.needed, room), expected))
    if load.limit_s < INFINITY:
        within = promise.time_to_tokens(load.limit_s, load.context) - load.planned
        calm = max(min(calm, within), 0)
    nodes = paying
    if paying > calm:
        nodes = _fairest(grove, load, likely, (paying, calm), expected, promise)
    return StepNodes(max(nodes, min(grove.needed, calm)), float(likely[:paying].sum()))


def _unhurried(grove: Grove, load: StepLoad, needed: int, expected: StepTimeModel) -> int:
    """Nodes beside which requests that hurry without a promise still keep their TPOT, by what the
    needed ones yield; where even these take too long, those that cost no time."""
    hurry_s = min(
        (limit_s * (1.0 + grove.needed_gains[place]) for limit_s, _, place in grove.hurries()),
        default=INFINITY,
    )
    if hurry_s == INFINITY:
        return load.max_tokens
    used = load.roots + load.others
    least_s = expected.predict_s(used + needed, load.context)
    return expected.time_to_tokens(max(hurry_s, least_s), load.context) - used


def _fairest(
    grove: Grove,
    load: StepLoad,
    likely: Floats,
    bounds: tuple[int, int],
    expected: StepTimeModel,
    promise: StepTimeModel,
) -> int:
    """How many nodes, from the first of the ``bounds`` down to the second, are best for everybody's
    TPOT: a step may be longer than one of them allows where its trees yield the tokens to make up
    for it.

    Where the second keeps every TPOT, so must the answer. Where it does not, plain steps are too
    slow for somebody: then as many as give most of the pace that is asked for. No prompt misses its
    deadline for them.
    """
    most, calm = bounds
    limits, hurries = load.limits(), grove.hurries()
    if not limits and load.limit_s < INFINITY:
        return calm
    used = load.roots + load.others

    def paces(nodes: int) -> list[float]:
        least = likely[nodes - 1] if nodes else INFINITY
        gains = grove.sure_gains(grove.chances >= least)
        tokens = used + nodes
        return [
            *_paces(limits, gains, promise.predict_s(tokens, load.context)),
            *_paces(hurries, gains, expected.predict_s(tokens, load.context)),
        ]

    levels = sorted({most, most * 3 // 4, most // 2, most // 4, calm}, reverse=True)
    soonest = promise.time_to_tokens(load.deadline_s, load.context) - used
    levels = [nodes for nodes in levels if calm <= nodes <= max(soonest, calm)]
    if min(paces(calm), default=1.0) >= 1.0:
        return next((nodes for nodes in levels if min(paces(nodes), default=1.0) >= 1.0), calm)
    return max(levels, key=lambda nodes: sum(min(pace, 1.0) for pace in paces(nodes)))


def _paces(limits: Sequence[TPOTLimit], gains: Floats, step_s: float) -> list[float]:
    """Of each TPOT's due, how much a step of ``step_s`` gives; ``gains``: tokens besides the
    roots'."""
    return [
        (max(limit_s, 0.0) + (gains[place] if place >= 0 else 0.0) * tpot_s) / step_s
        for limit_s, tpot_s, place in limits
    ]
