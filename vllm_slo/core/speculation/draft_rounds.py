# SPDX-License-Identifier: Apache-2.0
"""How long a step waits for draft servers, and how many tokens they draft for it altogether.

GoodSpeed (equation 5) divides a verification budget C among its clients, and profiles C. Here a
round also costs the time that is spent waiting for its drafts, during which a client drafts as many
tokens as it can. So both are chosen together: for each of some waits, `verify_budget` gives the
budget; the wait that keeps most promises is taken, and of equals the one with most tokens per
second, where the tokens of clients with a low goodput count for more. Not to draft is one of the
waits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_slo.core.arrays import Floats, Ints
from vllm_slo.core.speculation.proportional_fairness import grant_tokens, verify_budget
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY

FIRST_TOKEN_S = 0.002
"""Seconds of a draft token before any was measured."""
SHARE = 0.1
"""Weight of a round in the mean of a drafter's times; the first rounds weigh more."""
LATE = 2.0
"""Times the wait that an answer is assumed to take that did not come in time."""
OUTLIER = 4.0
"""Most that a round may seem to take for each token, in known times of a token: a drafter reads a
new text whole at first."""
DOUBT = 0.01
"""Share by which trust in a drafter's measured times shrinks in each step in which it is not asked.
So a drafter that was too slow once is tried again, and its times are trusted again if it still is.
"""
EPS_S = 1e-9


class DraftTimes:
    """How long one drafter takes to answer.

    Attributes:
        link_s: seconds of an answer that are not spent on drafting.
        token_s: seconds of each token of the longest draft.
    """

    def __init__(self) -> None:
        self.link_s = 0.0
        self.token_s = FIRST_TOKEN_S
        self._trust = 1.0
        self._rounds = 0

    def observe(self, wait_s: float, draft_s: float | None, tokens: int) -> None:
        """Learn from a round.

        Args:
            wait_s: seconds until the answer came, or until the wait ended.
            draft_s: seconds of these that were spent on drafting; None if no answer came.
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
        """The drafter was not asked in a step."""
        self._trust *= 1.0 - DOUBT

    def ahead_s(self, depth: int) -> Floats:
        """(depth,) seconds until drafts of 1, 2, .. tokens have come."""
        first_s = min(FIRST_TOKEN_S, self.token_s)
        token_s = first_s + self._trust * (self.token_s - first_s)
        ahead = np.arange(1.0, depth + 1.0, dtype=np.float64)
        return np.asarray(self._trust * self.link_s + token_s * ahead, dtype=np.float64)

    def within(self, wait_s: float, depth: int) -> int:
        """Tokens of a draft, at most ``depth``, that come within ``wait_s``."""
        return int(np.count_nonzero(self.ahead_s(depth) <= wait_s + EPS_S))


class Crowd(NamedTuple):
    """The n requests that are drafted for.

    Attributes:
        weights: (n,) w_i U'(X_i) of their clients; see `proportional_fairness.grant_tokens`.
        acceptances: (n,) a_i of their clients.
        drafting_s: (n, depths) seconds until drafts of 1, 2, .. tokens have come.
        most: (n,) most draft tokens of each that could be of use.
        paces_s: (n,) seconds per token that a promise asks for; infinite without one.
        plain_s: seconds of a step without drafts. No step is made longer at the expense of a
            request that keeps its pace with such steps, as its drafts may not come.
    """

    weights: Floats
    acceptances: Floats
    drafting_s: Floats
    most: Ints
    paces_s: Floats
    plain_s: float

    def longest_step_s(self, drafts: Ints) -> Floats:
        """(n,) seconds of the longest step that keeps each promise on average, with ``drafts``
        (n,) draft tokens."""
        needs_drafts = self.paces_s < self.plain_s
        longest: Floats = self.paces_s * np.where(needs_drafts, self.tokens(drafts), 1.0)
        return longest

    def within(self, wait_s: float) -> Ints:
        """(n,) most draft tokens of each that come within ``wait_s``."""
        in_time = np.count_nonzero(self.drafting_s <= wait_s + EPS_S, axis=1)
        useful: Ints = np.minimum(self.most, in_time)
        return useful

    def tokens(self, drafts: Ints) -> Floats:
        """(n,) mu(S, a): mean number of tokens that a step with ``drafts`` (n,) yields of each."""
        chances = np.minimum(self.acceptances, 1.0 - 1e-9)
        mean: Floats = (1.0 - chances ** (drafts + 1.0)) / (1.0 - chances)
        return mean


class DraftRound(NamedTuple):
    """What is to be drafted in a round.

    Attributes:
        wait_s: seconds to wait for drafts; 0: nothing is drafted.
        budget: draft tokens of all requests together.
        least: (n,) draft tokens of each that promises need.
        most: (n,) draft tokens of each that come in time.
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
    """Choose how long to wait for drafts, and how many to draft.

    The candidate waits are those after which the fastest drafter has one token more, and those
    after which the slowest has.

    Args:
        crowd: the requests, at least one.
        model: expected step times without drafting.
        room: most draft tokens of a step.
        context_tokens: KV tokens that the step reads.
        shallowest: least draft tokens of each request that can use them.
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
        candidate = _round(crowd, wait_s, model.besides(wait_s), room, context_tokens, shallowest)
        granted = grant_tokens(
            crowd.weights,
            crowd.acceptances,
            candidate.budget,
            least=candidate.least,
            most=candidate.most,
        )
        step_s = model.predict_s(len(none) + int(granted.sum()), context_tokens) + wait_s
        value = _worth(crowd, granted, step_s)
        if value > worth:
            worth, best = value, candidate
    return best


def _round(
    crowd: Crowd,
    wait_s: float,
    drafted: StepTimeModel,
    room: int,
    context_tokens: int,
    shallowest: int,
) -> DraftRound:
    """The round of one wait. Its step is no longer than the promises allow that can be kept with
    all drafts that come in time; ``least`` are the drafts that they need for it."""
    most, count = crowd.within(wait_s), len(crowd.most)
    longest_s = crowd.longest_step_s(most)
    kept = longest_s >= drafted.predict_s(count, context_tokens)
    budget = verify_budget(
        crowd.weights,
        crowd.acceptances,
        drafted,
        room,
        most=most,
        context_tokens=context_tokens,
        limit_s=float(longest_s[kept].min(initial=INFINITY)),
    )
    step_s = drafted.predict_s(count + budget, context_tokens)
    least = np.minimum(most, shallowest)
    for drafts in range(int(most.max(initial=0)), -1, -1):
        needed = kept & (crowd.longest_step_s(np.full(count, drafts)) < step_s)
        least = np.where(needed, np.maximum(least, np.minimum(drafts + 1, most)), least)
    return DraftRound(wait_s, max(budget, int(least.sum())), least, most)


def _worth(crowd: Crowd, drafts: Ints, step_s: float) -> tuple[int, float]:
    """How many promises a step with ``drafts`` keeps on average, and the weighted tokens per second
    that it yields."""
    promised = crowd.paces_s < INFINITY
    kept = np.count_nonzero(promised & (crowd.longest_step_s(drafts) >= step_s - EPS_S))
    return int(kept), float((crowd.weights * crowd.tokens(drafts)).sum()) / step_s
