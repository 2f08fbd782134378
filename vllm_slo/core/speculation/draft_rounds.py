# SPDX-License-Identifier: Apache-2.0
"""How long a step waits for draft servers, and how many tokens they draft for it altogether.

GoodSpeed (equation 5) divides a verification budget C among its clients, and profiles C. Here a
round costs the time, too, that is spent waiting for its drafts; a client drafts as many tokens in
it as it can. So both are chosen together: for each of some waits the budget that `verify_budget`
finds, and of all waits that with which most promises are kept and, of equals, most tokens come out
per second, those of clients that got little counting for more. Not to draft is one of them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.speculation.proportional_fairness import grant_tokens, verify_budget
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

FIRST_TOKEN_S = 0.002
"""Seconds of a draft token before any was measured."""
SHARE = 0.1
"""Of each round in what is known of a drafter's times; of the first ones more."""
LATE = 2.0
"""What did not come in time is taken to take so many times as long as it was waited for."""
OUTLIER = 4.0
"""A token is taken for at most so many times what is known: a new text is read whole at first."""
DOUBT = 0.01
"""Share of what is known of a drafter beyond the first guess that is doubted more with each step in
which it is not asked: what was too dear once is tried again, and believed again when it still is.
"""
EPS_S = 1e-9


class DraftTimes:
    """How long one drafter takes: what its answers take on their way, and each token of the
    longest draft.

    Attributes:
        link_s: seconds beyond drafting.
        token_s: seconds of each token.
    """

    def __init__(self) -> None:
        self.link_s = 0.0
        self.token_s = FIRST_TOKEN_S
        self._trust = 1.0
        self._rounds = 0

    def observe(self, wait_s: float, draft_s: float | None, tokens: int) -> None:
        """Take in a round.

        Args:
            wait_s: until the answer was there, or was waited for no longer.
            draft_s: of these, spent on drafting; None: the answer did not come.
            tokens: of its longest draft, or of the longest that was asked for.
        """
        self._trust, self._rounds = 1.0, self._rounds + 1
        share = max(SHARE, 1.0 / (1.0 + self._rounds))
        if draft_s is None:
            took_s = LATE * wait_s - self.link_s
        else:
            took_s = min(draft_s, wait_s)
            self.link_s += share * (wait_s - took_s - self.link_s)
        if tokens:
            each_s = min(max(took_s, 0.0) / tokens, OUTLIER * self.token_s)
            self.token_s += share * (each_s - self.token_s)

    def rest(self) -> None:
        """It was not asked in a step."""
        self._trust *= 1.0 - DOUBT

    def ahead_s(self, depth: int) -> Floats:
        """(depth,) seconds until drafts of 1, 2, .. tokens are there."""
        first_s = min(FIRST_TOKEN_S, self.token_s)
        token_s = first_s + self._trust * (self.token_s - first_s)
        ahead = np.arange(1.0, depth + 1.0, dtype=np.float64)
        return np.asarray(self._trust * self.link_s + token_s * ahead, dtype=np.float64)

    def within(self, wait_s: float, depth: int) -> int:
        """Tokens of a draft, at most ``depth``, that are there in time."""
        return int(np.count_nonzero(self.ahead_s(depth) <= wait_s + EPS_S))


class Crowd(NamedTuple):
    """The requests that are drafted for.

    Attributes:
        weights: (n,) w_i U'(X_i) of their clients; see `proportional_fairness.grant_tokens`.
        acceptances: (n,) a_i of their clients.
        drafting_s: (n, depths) seconds until drafts of 1, 2, .. tokens are there.
        most: (n,) draft tokens of each that could be of use.
        paces_s: (n,) seconds per token that a promise asks for; infinite without one.
        plain_s: seconds of a step without drafts. Who keeps its pace with such steps gets longer
            ones for no drafts, which may fail to come.
    """

    weights: Floats
    acceptances: Floats
    drafting_s: Floats
    most: Ints
    paces_s: Floats
    plain_s: float

    def bearable_s(self, drafts: Ints) -> Floats:
        """(n,) longest steps that keep promises, on average, with so many drafts."""
        hurried = self.paces_s < self.plain_s
        found: Floats = self.paces_s * np.where(hurried, self.tokens(drafts), 1.0)
        return found

    def within(self, wait_s: float) -> Ints:
        """(n,) draft tokens of each, at most, that are there in time."""
        in_time = np.count_nonzero(self.drafting_s <= wait_s + EPS_S, axis=1)
        found: Ints = np.minimum(self.most, in_time)
        return found

    def tokens(self, drafts: Ints) -> Floats:
        """(n,) mu(S, a): tokens that come out of a step on average that verifies so many drafts."""
        chances = np.minimum(self.acceptances, 1.0 - 1e-9)
        found: Floats = (1.0 - chances ** (drafts + 1.0)) / (1.0 - chances)
        return found


class DraftRound(NamedTuple):
    """What is to be drafted.

    Attributes:
        wait_s: how long; 0: nothing is drafted.
        budget: draft tokens of all.
        least: (n,) those that promises need.
        most: (n,) those that are there in time.
    """

    wait_s: float
    budget: int
    least: Ints
    most: Ints


def plan_round(
    crowd: Crowd,
    model: StepTimeModel,
    *,
    room: int,
    context_tokens: int = 0,
    shallowest: int = 0,
) -> DraftRound:
    """How long to draft, and how much.

    The waits looked at are those after which the fastest drafter has one token more, and those
    after which the slowest has.

    Args:
        crowd: for whom; at least one.
        model: expected step times without drafting.
        room: draft tokens of a step there is room for.
        context_tokens: KV tokens that the step reads.
        shallowest: draft tokens of each at least, where there is use for them.
    """
    none = np.zeros(len(crowd.most), dtype=np.int64)
    best, worth = DraftRound(0.0, 0, none, none), (-1, 0.0)
    waits = np.concatenate((crowd.drafting_s.min(axis=0), crowd.drafting_s.max(axis=0)))
    if shallowest:
        deepest = min(shallowest, crowd.drafting_s.shape[1])
        waits = waits[waits >= crowd.drafting_s[:, deepest - 1].max() - EPS_S]
    else:
        worth = _worth(crowd, none, crowd.plain_s)
    for wait_s in np.unique(waits).tolist():
        found = _round(crowd, wait_s, model.besides(wait_s), room, context_tokens, shallowest)
        granted = grant_tokens(
            crowd.weights, crowd.acceptances, found.budget, least=found.least, most=found.most
        )
        step_s = model.predict_s(len(none) + int(granted.sum()), context_tokens) + wait_s
        value = _worth(crowd, granted, step_s)
        if value > worth:
            worth, best = value, found
    return best


def _round(
    crowd: Crowd,
    wait_s: float,
    drafted: StepTimeModel,
    room: int,
    context_tokens: int,
    shallowest: int,
) -> DraftRound:
    """The budget of a round that is waited for so long, and what promises need of it: no step is
    longer than they allow with all the drafts that they may have."""
    most, count = crowd.within(wait_s), len(crowd.most)
    bearable_s = crowd.bearable_s(most)
    kept = bearable_s >= drafted.predict_s(count, context_tokens)
    budget = verify_budget(
        crowd.weights,
        crowd.acceptances,
        drafted,
        room,
        most=most,
        context_tokens=context_tokens,
        limit_s=float(bearable_s[kept].min(initial=INFINITY)),
    )
    step_s = drafted.predict_s(count + budget, context_tokens)
    least = np.minimum(most, shallowest)
    for drafts in range(int(most.max(initial=0)), -1, -1):
        needed = kept & (crowd.bearable_s(np.full(count, drafts)) < step_s)
        least = np.where(needed, np.maximum(least, np.minimum(drafts + 1, most)), least)
    return DraftRound(wait_s, max(budget, int(least.sum())), least, most)


def _worth(crowd: Crowd, drafts: Ints, step_s: float) -> tuple[int, float]:
    """Promises that a step with so many drafts keeps on average, and the tokens per second that
    come out of it, weighted."""
    promised = crowd.paces_s < INFINITY
    kept = np.count_nonzero(promised & (crowd.bearable_s(drafts) >= step_s - EPS_S))
    return int(kept), float((crowd.weights * crowd.tokens(drafts)).sum()) / step_s
