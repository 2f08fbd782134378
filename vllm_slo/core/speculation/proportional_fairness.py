# SPDX-License-Identifier: Apache-2.0
"""How many draft tokens each client may have verified: GoodSpeed's gradient scheduler.

Source: GoodSpeed, sections III-B and III-C. A client i is a draft server, or a tenant of one
server; each of its drafted tokens is accepted with probability a_i, those before it being accepted.
A round that verifies S_i of them yields mu(S_i, a_i) = (1 - a_i^(S_i + 1)) / (1 - a_i) tokens on
average, which is Acc(S_i + 1) of `core.speculation.acceptance`. The long-run goodputs x_i,
tokens per round, are to maximise sum_i w_i U(x_i), where U is log (proportional fairness) or, in
general, alpha-fair: U'(x) = x^-alpha. Acceptances and goodputs are smoothed::

    a_i <- (1 - eta) a_i + eta mean_j min(1, p(x_j) / q(x_j))       (equation 3)
    X_i <- (1 - beta) X_i + beta (accepted_i + 1)                   (equation 4)

and each round the integers S_i >= 0 with sum_i S_i <= C are those that maximise
sum_i w_i U'(X_i) mu(S_i, a_i) (equation 5). Token S + 1 of a client adds w_i U'(X_i) a_i^(S + 1),
less and less, so taking the best token again and again is exact. The paper profiles C; here it
follows from the step-time model (`verify_budget`).

Promises come first, and the rest is shared with proportional fairness. The drafts that a request's
objective needs are its floor. Floors are granted before anything is shared, whatever they gain; the
best tokens above the floors follow. Tokens of a promise count in the client's goodput, so a client
that got many by promises gets fewer of the rest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vllm_slo.core.arrays import Floats, Ints
from vllm_slo.core.jit import jit
from vllm_slo.core.speculation.tree_budget import worthwhile_nodes
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY

UNBOUNDED = 1 << 40
ETA = 0.05
"""Weight of the newest round in a client's acceptance."""
BETA = 0.02
"""Weight of the newest round in a client's goodput."""
PRIOR = 0.8
"""Acceptance of a client before its first round. It is rather high: a client whose guess is too low
to pay for verification would get no drafts, and its guess would never be corrected."""
FADING = 0.1
"""Share of eta with which acceptance returns to the prior in a round without drafts."""


@jit
def _grant(
    weights: Floats,
    acceptances: Floats,
    budget: int,
    least: Ints,
    most: Ints,
    price: float,
    granted: Ints,
) -> None:
    """Fill in ``granted``: floors in the order given, then the best token again and again, until no
    token gains anything."""
    left = budget
    chances = np.empty(len(weights))
    ranked = [(0.0, 0) for _ in range(0)]  # (-gain, place): equal gains go to the lower place
    for place in range(len(weights)):
        granted[place] = min(least[place], most[place], left)
        left -= granted[place]
        chances[place] = acceptances[place] ** (granted[place] + 1)
        gain = weights[place] * chances[place]
        if granted[place] < most[place] and chances[place] >= price and gain > 0.0:
            ranked.append((-gain, place))
    heapq.heapify(ranked)
    while left > 0 and len(ranked) > 0:
        place = ranked[0][1]
        granted[place] += 1
        left -= 1
        chances[place] *= acceptances[place]
        gain = weights[place] * chances[place]
        if granted[place] < most[place] and chances[place] >= price and gain > 0.0:
            heapq.heapreplace(ranked, (-gain, place))
        else:
            heapq.heappop(ranked)


def _column(name: str, values: ArrayLike, count: int, highest: float) -> Floats:
    """``values`` as (count,) numbers from 0 to ``highest``."""
    column = np.ascontiguousarray(values, dtype=np.float64)
    if column.shape != (count,):
        raise ValueError(f"{name}: shape {column.shape}, expected ({count},)")
    if count and not (column.min() >= 0.0 and column.max() <= highest):
        raise ValueError(f"{name}: must lie between 0 and {highest:g}")
    return column


def _limits(name: str, values: ArrayLike | None, count: int, default: int) -> Ints:
    """``values`` as (count,) whole numbers of at least 0."""
    if values is None:
        return np.full(count, default, dtype=np.int64)
    limits = np.ascontiguousarray(values, dtype=np.int64)
    if limits.shape != (count,) or (count and limits.min() < 0):
        raise ValueError(f"{name}: must be {count} whole numbers of at least 0")
    return limits


def grant_tokens(
    weights: ArrayLike,
    acceptances: ArrayLike,
    budget: int,
    *,
    least: ArrayLike | None = None,
    most: ArrayLike | None = None,
    price: float = 0.0,
) -> Ints:
    """The S that maximise sum_i w_i mu(S_i, a_i) with sum S <= ``budget`` (equation 5), exactly.

    Args:
        weights: (n,) w_i U'(X_i), finite and at least 0.
        acceptances: (n,) a_i, in [0, 1].
        budget: C, draft tokens to be verified; below 0: none.
        least: (n,) floors, granted first whatever they gain. If they exceed the budget, they are
            granted in the order given until it is used up.
        most: (n,) caps, of the floors as well; default no limit.
        price: least gain of a token that pays for its verification, in tokens: a^(S + 1), not
            weighted; see `core.speculation.tree_budget.node_floor`. Floors are granted at any
            price.

    Returns:
        (n,) draft tokens. A token that gains nothing is not granted; of equal gains the lower index
        is granted. The first call compiles where numba's cache is empty, which takes some seconds.

    Raises:
        ValueError: shapes differ, or a number is out of range; the message names the argument.
    """
    values = np.ascontiguousarray(weights, dtype=np.float64)
    count = values.size
    granted = np.zeros(count, dtype=np.int64)
    _grant(
        _column("weights", values, count, float(np.finfo(np.float64).max)),
        _column("acceptances", acceptances, count, 1.0),
        max(budget, 0),
        _limits("least", least, count, 0),
        _limits("most", most, count, UNBOUNDED),
        float(price),
        granted,
    )
    return granted


def verify_budget(
    weights: ArrayLike,
    acceptances: ArrayLike,
    model: StepTimeModel,
    room: int,
    *,
    most: ArrayLike | None = None,
    others: int = 0,
    context_tokens: int = 0,
    limit_s: float = INFINITY,
) -> int:
    """C: the number of draft tokens that maximises sum_i w_i mu(S_i, a_i) / step time of n + C.

    So the grants of `grant_tokens` within it are best per second, not only per round. Tokens that
    make the step no longer are all in it. Floors are not: a caller that has floors grants at least
    their sum.

    Args:
        weights: (n,) as for `grant_tokens`.
        acceptances: (n,) a_i. Each row decodes one token besides its drafts.
        model: expected step times.
        room: most draft tokens.
        most: (n,) caps.
        others: further tokens of the step, of prompts.
        context_tokens: KV tokens that the step reads.
        limit_s: longest step allowed.

    Raises:
        ValueError: as `grant_tokens`.
    """
    values, chances = np.asarray(weights, np.float64), np.asarray(acceptances, np.float64)
    if limit_s < INFINITY:
        fits = model.time_to_tokens(limit_s, context_tokens) - values.size - others
        room = min(room, fits)
    granted = grant_tokens(values, chances, room, most=most)
    if not granted.any():
        return 0
    owner = np.repeat(np.arange(values.size), granted)
    place = 1 + np.arange(owner.size) - np.repeat(np.cumsum(granted) - granted, granted)
    gains = np.sort(values[owner] * chances[owner] ** place)[::-1] / values.mean()
    return worthwhile_nodes(gains, values.size, others, context_tokens, model, room)


def jain_index(values: ArrayLike) -> float:
    """Jain's index of fairness, (sum x)^2 / (n sum x^2), of values at least 0: 1 where all are
    equal, 1/n where all but one are 0, and 1 where all are 0."""
    column = np.asarray(values, dtype=np.float64)
    squares = float(column.size * (column**2).sum())
    return float(column.sum() ** 2 / squares) if squares > 0.0 else 1.0


def alpha_fair(goodput: float, alpha: float) -> float:
    """U(x), where U'(x) = x^-alpha: x for 0, log x for 1, x^(1 - alpha) / (1 - alpha) else.

    Args:
        goodput: x, above 0.
        alpha: at least 0; the greater, the more the least served count.
    """
    if alpha == 1.0:
        return math.log(goodput)
    return float(goodput ** (1.0 - alpha) / (1.0 - alpha))


@dataclass(frozen=True, slots=True)
class ClientView:
    """One client, as metrics show it.

    Attributes:
        acceptance: a_i, smoothed.
        granted: S_i of the last round it took part in.
        goodput: X_i, smoothed tokens per round.
        utility: w_i U(X_i).
    """

    acceptance: float
    granted: int
    goodput: float
    utility: float


@dataclass(slots=True)
class _Client:
    weight: float
    acceptance: float
    goodput: float = 1.0
    granted: int = 0


class GradientScheduler:
    """Divides the verification budget of each round among clients (section III-C).

    A new client starts with the acceptance ``prior`` and a goodput of 1, the least that a round can
    yield. So no client of its weight and acceptance comes before it, and it is served at once.

    In a round without drafts a client's acceptance returns to ``prior`` a little. So a client whose
    drafts were rejected is tried again, as long as the prior is worth the price of a token.

    Args:
        eta: weight of the newest round in a_i, in (0, 1]; the smaller, the steadier and slower.
        beta: weight of the newest round in X_i, in (0, 1]; below eta (assumption 3).
        alpha: fairness: 0 the most tokens, 1 proportional, towards infinity max-min.
        prior: acceptance of new clients, in (0, 1).

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self, *, eta: float = ETA, beta: float = BETA, alpha: float = 1.0, prior: float = PRIOR
    ) -> None:
        for name, share in (("eta", eta), ("beta", beta)):
            if not 0.0 < share <= 1.0:
                raise ValueError(f"{name}: must be above 0 and at most 1, not {share}")
        if not 0.0 <= alpha < math.inf:
            raise ValueError(f"alpha: must be finite and at least 0, not {alpha}")
        if not 0.0 < prior < 1.0:
            raise ValueError(f"prior: must lie between 0 and 1, not {prior}")
        self._eta, self._beta, self._alpha, self._prior = eta, beta, alpha, prior
        self._clients: dict[str, _Client] = {}

    def add(self, client: str, weight: float = 1.0) -> None:
        """Add a client; a known one keeps its state and gets the weight.

        Args:
            client: its name.
            weight: w_i, above 0: how much its tokens count.
        """
        if not 0.0 < weight < math.inf:
            raise ValueError(f"weight: must be finite and above 0, not {weight}")
        state = self._clients.setdefault(client, _Client(weight, self._prior))
        state.weight = weight

    def forget(self, client: str) -> None:
        """Remove a client; an unknown one is ignored."""
        self._clients.pop(client, None)

    def observe(self, client: str, ratios: Sequence[float], tokens: int) -> None:
        """Learn from a client's round, once for all its requests (equations 3 and 4).

        It is not called for a round that the client takes no part in. A round whose drafts did not
        come in time has no ratios, and the tokens that were decoded without drafts.

        Args:
            client: a known one.
            ratios: p(x_j) / q(x_j) of each verified draft token, accepted or not, or the mean of
                min(1, p / q); under greedy sampling 1 where the target agrees, else 0.
            tokens: that the round yielded: accepted ones and the one sampled after them; at least
                1.

        Raises:
            ValueError: the client is unknown, or a number is out of range; the message names it.
                Nothing changes.
        """
        state = self._state(client)
        for ratio in ratios:
            if not 0.0 <= ratio < math.inf:
                raise ValueError(f"ratios: must be finite and at least 0, not {ratio}")
        if not 1 <= tokens < math.inf:
            raise ValueError(f"tokens: must be finite and at least 1, not {tokens}")
        if len(ratios):
            accepted, share = sum(min(1.0, r) for r in ratios) / len(ratios), self._eta
        else:
            accepted, share = self._prior, self._eta * FADING
        state.acceptance = (1.0 - share) * state.acceptance + share * accepted
        state.goodput = (1.0 - self._beta) * state.goodput + self._beta * tokens

    def gradient(self, clients: Iterable[str]) -> Floats:
        """(n,) w_i U'(X_i) of each, as `grant_tokens` and `verify_budget` take them."""
        states = [self._state(client) for client in clients]
        return np.array([state.weight * state.goodput**-self._alpha for state in states])

    def acceptances(self, clients: Iterable[str]) -> Floats:
        """(n,) a_i of each."""
        return np.array([self._state(client).acceptance for client in clients])

    def grants(
        self,
        clients: Sequence[str],
        budget: int,
        *,
        least: ArrayLike | None = None,
        most: ArrayLike | None = None,
        price: float = 0.0,
    ) -> Ints:
        """(n,) draft tokens of each in the next round: equation 5 above the floors.

        Args:
            clients: of the round. A tenant with several requests is named once for each.
            budget, least, most, price: as `grant_tokens` takes them.

        Raises:
            ValueError: as `grant_tokens`, or a client is unknown.
        """
        granted = grant_tokens(
            self.gradient(clients),
            self.acceptances(clients),
            budget,
            least=least,
            most=most,
            price=price,
        )
        for client in clients:
            self._clients[client].granted = 0
        for client, tokens in zip(clients, granted.tolist(), strict=True):
            self._clients[client].granted += tokens
        return granted

    def views(self) -> dict[str, ClientView]:
        """Every client, in the order in which they were added."""
        return {
            client: ClientView(
                state.acceptance,
                state.granted,
                state.goodput,
                state.weight * alpha_fair(state.goodput, self._alpha),
            )
            for client, state in self._clients.items()
        }

    def _state(self, client: str) -> _Client:
        state = self._clients.get(client)
        if state is None:
            raise ValueError(f"client: {client!r} is unknown")
        return state
