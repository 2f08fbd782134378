# SPDX-License-Identifier: Apache-2.0
"""The draft nodes of one step: candidates of each request, its needs, and how many nodes fit.

AdaServe's two selections (section 4.3, steps 2 and 3). The budget is not a constant: a step gets as
many nodes as pay, as far as the objectives of all its requests leave time for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_slo.core.arrays import Bools, Floats, Ints, Marks, Parents
from vllm_slo.core.speculation.tree_budget import node_floor, worthwhile_nodes
from vllm_slo.core.speculation.tree_selection import select_trees
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY, DecodeView


class TPOTNeeds(NamedTuple):
    """What the TPOT of a decoding request needs from a step.

    Attributes:
        pace_s: most seconds per token that keep it to the end of the window by which it is judged,
            or of the answer, whichever comes first.
        tpot_s: the objective.
        owed: A(r) of a step that takes no time: the tokens that it must yield for the TPOT to be
            kept (AdaServe, equations 2 and 3).
    """

    pace_s: float
    tpot_s: float
    owed: float


def tpot_needs(view: DecodeView, start_s: float, left: int) -> TPOTNeeds:
    """What a TPOT needs from a step that begins at ``start_s``.

    Args:
        view: the request before that step, one token of it being expected of each step; its TPOT
            is finite.
        left: most tokens of its answer still to come, at least 1.
    """
    beyond = max(view.window_left - left, 0.0)
    pace_s = (view.window_end_s - beyond * view.tpot_s - start_s) / min(view.window_left, left)
    # Equation 3, with time counted from when the next token is due; one token is owed by then.
    owed = (start_s - view.due_s) / view.tpot_s + 1.0
    return TPOTNeeds(pace_s, view.tpot_s, owed)


class TPOTLimit(NamedTuple):
    """How long a step may be for a decoding request.

    Attributes:
        limit_s: longest step that is expected to yield one token of it.
        tpot_s: seconds that a step may take longer for each further token to count on.
        place: of the request among the candidates; -1: it has none.
    """

    limit_s: float
    tpot_s: float
    place: int


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The step that draft nodes are added to.

    Attributes:
        roots: requests that decode in it.
        others: tokens of prompts in it, for the price of a node.
        planned: tokens of the step without nodes.
        context: KV tokens that it reads.
        max_tokens: most tokens of a step.
        limit_s: longest step that its plan allows.
        deadline_s: longest step that a prompt's deadline allows.
        limits: called for the limits of promised requests where ``limit_s`` is finite.
        multiple: the tokens of a step are made a multiple of it, as far as there are nodes.
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
    """The candidate nodes of the n requests of one step, as flat arrays.

    Args:
        offsets, parents: as `select_trees` takes them.
        chances: (N,) calibrated path probabilities.
        worths: (N,) tokens that nodes yield for their cost, `node_worths`.
        limits: (n,) most nodes of each request.

    Attributes:
        pace_s: (n,) most seconds per token that keep its TPOT; infinite without one.
        promised: (n,) whether its TPOT is promised.
    """

    def __init__(
        self,
        offsets: Ints,
        parents: Parents,
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
        """The nodes of one request."""
        return slice(int(self.offsets[place]), int(self.offsets[place + 1]))

    def require(self, place: int, needs: TPOTNeeds, *, promised: bool) -> None:
        """Note what the TPOT of one request needs from the step."""
        self.pace_s[place], self._owed[place] = needs.pace_s, needs.owed
        self._rate[place] = 1.0 / needs.tpot_s
        self.promised[place] = promised

    def required(self, step_s: float) -> Floats:
        """(n,) A(r) of a step of ``step_s``; -inf where nothing is needed."""
        tokens: Floats = self._owed + step_s * self._rate
        return tokens

    def behind(self, step_s: float) -> int:
        """How many requests need more than one token from a step of ``step_s``."""
        return int(np.count_nonzero(self.required(step_s) > 1.0))

    def select(
        self, nodes: int, step_s: float, slo_floor: float, *, throughput: bool = True
    ) -> Marks:
        """Select at most ``nodes`` nodes for a step of ``step_s``: first those that objectives need
        and whose path probability is at least ``slo_floor``, then those of most worth."""
        return select_trees(
            self.offsets,
            self.chances,
            self.parents,
            self.required(step_s),
            budget=len(self.limits) + nodes,
            most=self.limits,
            worth=self.worths,
            throughput_phase=throughput,
            slo_floor=slo_floor,
        )

    def gains(self, taken: Bools) -> Floats:
        """(n,) expected tokens of each request's nodes that are ``taken`` (N,)."""
        gains: Floats = np.add.reduceat(np.where(taken, self.chances, 0.0), self.offsets[:-1])
        return gains

    def counts(self, taken: Bools) -> Ints:
        """(n,) how many of each request's nodes are ``taken`` (N,)."""
        counts: Ints = np.add.reduceat(taken.astype(np.int64), self.offsets[:-1])
        return counts

    def leave_out(self, granted: Bools) -> None:
        """Let only the ``granted`` (n,) requests have nodes."""
        self.limits = np.where(granted, self.limits, 0)

    def likely(self) -> Floats:
        """Worths of the nodes of requests with a limit above 0, descending."""
        is_open = np.repeat(self.limits > 0, self._sizes)
        worths: Floats = np.sort(self.worths[is_open])[::-1]
        return worths


EPS_S = 1e-9
ENOUGH = 0.98
"""Share of the paces that TPOTs need from which on a step is not shortened for them."""
LEVELS = 8
"""Numbers of nodes that are compared where a TPOT suffers from them: eighths of all that pay."""


def nodes_of_step(
    candidates: CandidateTrees,
    load: StepLoad,
    expected: StepTimeModel,
    promise: StepTimeModel,
) -> Marks:
    """Select the nodes of a step: those that objectives need and those that pay, or fewer of them
    where a shorter step serves the TPOTs of all requests better.

    A step may be longer than a TPOT if its trees are expected to yield the tokens to make up for
    it, at typical step times; later steps make up for a small deficit. If the deficit is larger,
    several numbers of nodes are compared: fewest promised TPOTs are to be broken, then the sum of
    the shares of the paces that TPOTs need is to be highest, where no share counts for more than 1;
    of equals the largest number is taken. No prompt misses its deadline for nodes.

    Args:
        candidates: the candidate nodes.
        load: the step.
        expected: typical step times, drafting included.
        promise: step times that promises are made by.

    Returns:
        What `select_trees` returns.
    """
    likely = candidates.likely()
    room = max(load.max_tokens - load.planned, 0)
    paying = worthwhile_nodes(likely, load.roots, load.others, load.context, expected, room)
    step = _Step(candidates, load, expected)
    most = min(max(paying, step.needed(paying)), room)
    bound = room
    if load.limit_s < INFINITY:
        within = promise.time_to_tokens(load.limit_s, load.context) - load.planned
        soonest = promise.time_to_tokens(load.deadline_s, load.context) - step.used
        bound = min(room, max(soonest, within, 0) if step.limits else max(within, 0))
    most = step.rounded(min(most, bound), bound)
    if step.served(most) >= ENOUGH * step.asked and step.broken(most) <= step.broken(0):
        return step.marks(most)
    levels = {step.rounded(most * part // LEVELS, most) for part in range(LEVELS + 1)}
    best = max(sorted(levels, reverse=True), key=lambda n: (-step.broken(n), step.served(n)))
    return step.marks(best)


class _Step:
    """The outcome of a step for any number of nodes.

    Attributes:
        used: tokens of the step that the price of a node rests on, nodes left out.
        limits: of the promised requests; none where the plan allows a step of any length.
        asked: how many TPOTs are to be kept.
    """

    def __init__(self, candidates: CandidateTrees, load: StepLoad, expected: StepTimeModel) -> None:
        self.candidates = candidates
        self.load = load
        self.expected = expected
        self.used = load.roots + load.others
        self._marks: dict[int, Marks] = {}
        self._unpromised = np.flatnonzero(~candidates.promised & (candidates.pace_s < INFINITY))
        self.limits = load.limits() if load.limit_s < INFINITY else ()
        limits_s, tpots_s, places = np.asarray(self.limits, dtype=np.float64).reshape(-1, 3).T
        self._limits = np.maximum(limits_s, 0.0), tpots_s, places.astype(np.int64)
        self.asked = float(len(self._unpromised) + len(self.limits))

    def marks(self, nodes: int) -> Marks:
        """The selection of at most so many nodes."""
        if nodes not in self._marks:
            self._marks[nodes] = self._select(nodes, throughput=True)
        return self._marks[nodes]

    def rounded(self, nodes: int, bound: int) -> int:
        """``nodes`` raised until the step's tokens are a multiple of `StepLoad.multiple`; lowered
        where ``bound`` leaves no room for that."""
        multiple = self.load.multiple
        more = nodes + -(self.used + nodes) % multiple
        return more if more <= bound else max(more - multiple, 0)

    def needed(self, nodes: int) -> int:
        """How many nodes objectives need, at the time of a step with ``nodes`` of them."""
        return int(np.count_nonzero(self._select(nodes, throughput=False)))

    def _select(self, nodes: int, *, throughput: bool) -> Marks:
        candidates, load = self.candidates, self.load
        step_s = self.expected.predict_s(self.used + nodes, load.context)
        floor = node_floor(candidates.behind(step_s), load.roots, self.expected, step_s)
        most = nodes if throughput else load.max_tokens
        return candidates.select(most, step_s, floor, throughput=throughput)

    def served(self, nodes: int) -> float:
        """Sum over TPOTs of the share of the needed pace that the step gives; at most ``asked``."""
        if not self.asked:
            return 0.0
        gains, step_s = self._outcome(nodes)
        unpromised = self._unpromised
        paces = (1.0 + gains[unpromised]) * self.candidates.pace_s[unpromised] / step_s
        shares = self._allowed_s(gains) / step_s
        return float(np.minimum(paces, 1.0).sum() + np.minimum(shares, 1.0).sum())

    def broken(self, nodes: int) -> int:
        """How many promised TPOTs the step does not keep."""
        gains, step_s = self._outcome(nodes)
        return int(np.count_nonzero(self._allowed_s(gains) < step_s - EPS_S))

    def _outcome(self, nodes: int) -> tuple[Floats, float]:
        """(n,) expected tokens of each request besides the root's, and the seconds of the step."""
        taken = self.marks(nodes) > 0
        tokens = self.used + int(np.count_nonzero(taken))
        return self.candidates.gains(taken), self.expected.predict_s(tokens, self.load.context)

    def _allowed_s(self, gains: Floats) -> Floats:
        """Seconds of the longest step that each promised request allows."""
        limits_s, tpots_s, places = self._limits
        # Requests without candidates have place -1, which is the appended zero.
        allowed: Floats = limits_s + np.append(gains, 0.0)[places] * tpots_s
        return allowed
