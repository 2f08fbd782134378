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

from vllm_slo.core.speculation.tree_budget import node_floor, worthwhile_nodes
from vllm_slo.core.speculation.tree_selection import needed_tokens, select_trees
from vllm_slo.core.step_time.model import StepTimeModel
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
        tpot_s: the objective.
        owed: A(r) of a step that takes no time; see ``needed_tokens``.
    """

    pace_s: float
    tpot_s: float
    owed: float


def tpot_needs(view: DecodeView, start_s: float, left: int) -> TPOTNeeds:
    """What a TPOT asks of a step that begins at ``start_s``.

    Args:
        view: the request before that step, a token a step being expected.
        left: tokens of its answer still to come, at most; at least 1.
    """
    beyond = max(view.window_left - left, 0.0)
    pace_s = (view.window_end_s - beyond * view.tpot_s - start_s) / min(view.window_left, left)
    # Counted from when its next token is due: one is owed by then.
    owed = needed_tokens(start_s - view.due_s, 0.0, view.tpot_s, -1)
    return TPOTNeeds(pace_s, view.tpot_s, owed)


class TPOTLimit(NamedTuple):
    """How long a step may be for a request that decodes.

    Attributes:
        limit_s: longest step, a token a step being expected.
        tpot_s: how much longer, for each token besides that one to count on.
        place: in the candidates; -1: it has no candidates.
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
        multiple: tokens of a step are brought to a multiple of it as far as there are nodes.
    """

    roots: int
    others: int
    planned: int
    context: int
    max_tokens: int
    limit_s: float
    deadline_s: float
    limits: Callable[[], Sequence[TPOTLimit]]
    multiple: int = 1


class CandidateTrees:
    """The candidates of all requests that one step could verify, as flat arrays.

    Args:
        offsets, parents: as `select_trees` takes them.
        chances: calibrated path probabilities.
        worths: what nodes yield for what they cost, `node_worths`.
        limits: (n,) most nodes of each request.

    Attributes:
        pace_s: (n,) seconds per token at which a TPOT is still kept; infinite without.
        promised: (n,) whether its TPOT is promised.
    """

    def __init__(
        self,
        offsets: Ints,
        parents: NDArray[np.int32],
        chances: Floats,
        worths: Floats,
        limits: Ints,
    ) -> None:
        requests = len(limits)
        self.offsets = offsets
        self.parents = parents
        self.chances = chances
        self.worths = worths
        self.limits = limits
        self.pace_s = np.full(requests, INFINITY)
        self.promised = np.zeros(requests, dtype=np.bool_)
        self._sizes = np.diff(offsets)
        self._owed = np.full(requests, -INFINITY)
        self._rate = np.zeros(requests)

    def part(self, place: int) -> slice:
        """Where the nodes of one request lie."""
        return slice(int(self.offsets[place]), int(self.offsets[place + 1]))

    def require(self, place: int, needs: TPOTNeeds, *, promised: bool) -> None:
        """Note what the TPOT of one request asks of the step."""
        self.pace_s[place], self._owed[place] = needs.pace_s, needs.owed
        self._rate[place] = 1.0 / needs.tpot_s
        self.promised[place] = promised

    def required(self, step_s: float) -> Floats:
        """(n,) A(r) of a step that takes so long; -inf where nothing is needed or helps."""
        found: Floats = self._owed + step_s * self._rate
        return found

    def behind(self, step_s: float) -> int:
        """How many requests need more than a token of a step that takes so long."""
        return int(np.count_nonzero(self.required(step_s) > 1.0))

    def select(
        self, nodes: int, step_s: float, slo_floor: float, *, throughput: bool = True
    ) -> Marks:
        """At most ``nodes`` nodes for a step that takes so long: first what objectives need, no
        node of a smaller path probability than ``slo_floor`` among them; then the worthiest."""
        return select_trees(
            self.offsets,
            self.chances,
            self.parents,
            self.required(step_s),
            np.full(len(self.limits), len(self.chances)),
            budget=len(self.limits) + nodes,
            most=self.limits,
            worth=self.worths,
            throughput_phase=throughput,
            slo_floor=slo_floor,
        )

    def gains(self, taken: Bools) -> Floats:
        """(n,) expected tokens of the nodes that are ``taken``."""
        gains: Floats = np.add.reduceat(np.where(taken, self.chances, 0.0), self.offsets[:-1])
        return gains

    def counts(self, taken: Bools) -> Ints:
        """(n,) how many nodes are ``taken``."""
        counts: Ints = np.add.reduceat(taken.astype(np.int64), self.offsets[:-1])
        return counts

    def leave_out(self, granted: Bools) -> None:
        """Only the ``granted`` requests take part in the step."""
        self.limits = np.where(granted, self.limits, 0)

    def likely(self) -> Floats:
        """Worths of the nodes that could be taken, descending."""
        open_nodes = np.repeat(self.limits > 0, self._sizes)
        found: Floats = np.sort(self.worths[open_nodes])[::-1]
        return found


class StepNodes(NamedTuple):
    """The nodes that a step verifies.

    Attributes:
        marks: as ``select_trees`` answers.
        hoped: expected tokens of those that would pay if there were room for all of them.
    """

    marks: Marks
    hoped: float


EPS_S = 1e-9
ENOUGH = 0.98
"""Of what TPOTs ask, from which on a step that gives more tokens is better than a shorter one."""
LEVELS = 8
"""Parts by which the nodes of a step are cut down where somebody's TPOT suffers from them."""


def nodes_of_step(
    candidates: CandidateTrees,
    load: StepLoad,
    expected: StepTimeModel,
    promise: StepTimeModel,
) -> StepNodes:
    """The nodes of a step: those that objectives need, and those that pay, or fewer of them where
    everybody's TPOT is served better by a shorter step.

    A step may be longer than somebody's TPOT where its trees yield the tokens to make up for it,
    by typical step times and what the trees are expected to yield: what a step falls short of, the
    next ones make up for. Where it falls short of more than a little, that number of nodes is taken
    which gives most of the pace that is asked for, nobody's counting for more than enough; of
    equals the largest. No prompt misses its deadline for them.

    Args:
        candidates: the candidates.
        load: the step.
        expected: typical step times, drafting included.
        promise: those to promise by.
    """
    likely = candidates.likely()
    room = max(load.max_tokens - load.planned, 0)
    paying = worthwhile_nodes(likely, load.roots, load.others, load.context, expected, room)
    hoped = float(likely[:paying].sum())
    step = _Step(candidates, load, expected)
    most = min(max(paying, step.needed(paying)), room)
    bound = room
    if load.limit_s < INFINITY:
        within = promise.time_to_tokens(load.limit_s, load.context) - load.planned
        soonest = promise.time_to_tokens(load.deadline_s, load.context) - step.used
        bound = min(room, max(soonest, within, 0) if step.limits else max(within, 0))
    most = step.rounded(min(most, bound), bound)
    if step.served(most) >= ENOUGH * step.asked and step.broken(most) <= step.broken(0):
        return StepNodes(step.marks(most), hoped)
    levels = {step.rounded(most * part // LEVELS, most) for part in range(LEVELS + 1)}
    best = max(sorted(levels, reverse=True), key=lambda n: (-step.broken(n), step.served(n)))
    return StepNodes(step.marks(best), hoped)


class _Step:
    """What a step of so many nodes is like.

    Attributes:
        limits: of the promised requests; none where the plan allows any step.
        asked: TPOTs that are to be kept.
    """

    def __init__(self, candidates: CandidateTrees, load: StepLoad, expected: StepTimeModel) -> None:
        self.candidates = candidates
        self.load = load
        self.expected = expected
        self.used = load.roots + load.others
        self._marks: dict[int, Marks] = {}
        self._hurries = np.flatnonzero(~candidates.promised & (candidates.pace_s < INFINITY))
        self.limits = load.limits() if load.limit_s < INFINITY else ()
        limits_s, tpots_s, places = np.asarray(self.limits, dtype=np.float64).reshape(-1, 3).T
        self._limits = np.maximum(limits_s, 0.0), tpots_s, places.astype(np.int64)
        self.asked = float(len(self._hurries) + len(self.limits))

    def marks(self, nodes: int) -> Marks:
        """At most so many nodes."""
        if nodes not in self._marks:
            self._marks[nodes] = self._select(nodes, throughput=True)
        return self._marks[nodes]

    def rounded(self, nodes: int, bound: int) -> int:
        """So many nodes, or a few more, such that the step's tokens are a multiple of what they
        are to be; fewer where ``bound`` leaves no room for that."""
        multiple = self.load.multiple
        more = nodes + -(self.used + nodes) % multiple
        return more if more <= bound else max(more - multiple, 0)

    def needed(self, nodes: int) -> int:
        """How many nodes objectives need of a step with so many."""
        return int(np.count_nonzero(self._select(nodes, throughput=False)))

    def _select(self, nodes: int, *, throughput: bool) -> Marks:
        candidates, load = self.candidates, self.load
        step_s = self.expected.predict_s(self.used + nodes, load.context)
        floor = node_floor(candidates.behind(step_s), load.roots, self.expected, step_s)
        most = nodes if throughput else load.max_tokens
        return candidates.select(most, step_s, floor, throughput=throughput)

    def served(self, nodes: int) -> float:
        """Shares of what each TPOT asks that such a step gives, summed; at most ``asked``."""
        if not self.asked:
            return 0.0
        gains, step_s = self._outcome(nodes)
        hurries = self._hurries
        paces = (1.0 + gains[hurries]) * self.candidates.pace_s[hurries] / step_s
        shares = self._allowed_s(gains) / step_s
        return float(np.minimum(paces, 1.0).sum() + np.minimum(shares, 1.0).sum())

    def broken(self, nodes: int) -> int:
        """Promised TPOTs that such a step does not keep."""
        gains, step_s = self._outcome(nodes)
        return int(np.count_nonzero(self._allowed_s(gains) < step_s - EPS_S))

    def _outcome(self, nodes: int) -> tuple[Floats, float]:
        """What such a step yields of each request besides a token, and the seconds it takes."""
        taken = self.marks(nodes) > 0
        tokens = self.used + int(np.count_nonzero(taken))
        return self.candidates.gains(taken), self.expected.predict_s(tokens, self.load.context)

    def _allowed_s(self, gains: Floats) -> Floats:
        """Longest step that each promised request allows."""
        limits_s, tpots_s, places = self._limits
        # Place -1, of those without candidates, is the zero that is appended.
        allowed: Floats = limits_s + np.append(gains, 0.0)[places] * tpots_s
        return allowed
