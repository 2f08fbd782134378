# SPDX-License-Identifier: Apache-2.0
"""How many tokens of each request a step verifies: draft lengths by SLO.

Source: SLOs-Serve, section 3.2.3 and appendix D. A request of which ``sl`` tokens are verified (its
last token and ``sl - 1`` drafts) gets Acc(sl) = (1 - a^sl) / (1 - a) tokens from the step where
each draft is accepted with probability a, so its step may take TPOT * Acc(sl). Requests come in
tiers of one TPOT; the lengths sl_1..sl_L are chosen so that prompts get most tokens per second::

    max (Time2BS(T, sl) - sum_l n_l sl_l) / T     with   T = min_l TPOT_l * Acc(sl_l)

Whichever tier binds and whatever its length, T is then known, and the best lengths of the others
are the smallest that last for T: so binding tier and length are enumerated. A tier that lasts
longer than T with a single token takes part in some steps only: T / TPOT_l tokens of each on
average.

Where no prompt is to be computed, the same constraint holds and the tokens that come out per second
are maximised, sum_l n_l Acc(sl_l) over the time of the step that verifies sum_l n_l sl_l tokens.
There the lengths of the tiers compete for the tokens that ride along for free, a knapsack of few
items; it is solved by branch and bound, for each number of draft passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.jit import jit
from vllm_slo.core.step_time.budget import (
    Lines,
    step_seconds_compiled,
    tokens_within_compiled,
)
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY, DecodeView

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_TIERS = 5
MAX_NODES = 4096
"""Nodes of one search; beyond it the best lengths found so far are taken."""
EVENED_OUT = 16.0
"""Tokens over which what drafts yield is close to its mean."""
GRID = 1.15
"""Ratio of neighbouring working TPOTs of requests that fell behind, so that there are few."""
SHORTEST_S = 1e-9
EPS = 1e-9


class Tier(NamedTuple):
    """Requests that decode at one pace.

    Attributes:
        requests: how many, at least 1.
        tpot_s: seconds per token that each must keep, above 0; infinite where none is asked for.
        acceptance: chance of a draft to be accepted, those before it being accepted; in [0, 1].
    """

    requests: int
    tpot_s: float
    acceptance: float


@dataclass(frozen=True, slots=True)
class LengthPlan:
    """How a step is best spent.

    Attributes:
        lengths: tokens verified of each request of a tier, at least 1; one less is drafted.
        step_s: the longest step that keeps every TPOT on average (T); infinite without any.
        prompt_tokens: what such a step has left for prompts; below 0, what it lacks.
        per_second: what was maximised: prompt tokens or output tokens, per second.
        feasible: whether every TPOT is kept; if not, these lengths miss them by least.
    """

    lengths: tuple[int, ...]
    step_s: float
    prompt_tokens: float
    per_second: float
    feasible: bool

    @property
    def draft_steps(self) -> int:
        """Passes of the draft that these lengths take."""
        return max(self.lengths, default=1) - 1


def _engine(
    model: StepTimeModel,
    requests: int,
    context_tokens: int,
    draft_step_s: float,
    most: float,
    least_passes: int,
) -> Floats:
    """(8,) step times as compiled code takes them, for ``requests`` that read ``context_tokens``
    together: the higher of two lines, each of seconds per token, per pass of the draft and
    besides, the tokens of the largest step, and the passes that every step makes.

    Each token is charged the query-key pairs of a request of average length.
    """
    (k1, c1, b1), (k2, c2, b2) = model.terms
    pairs_s = model.pair_s * context_tokens / max(requests, 1)
    reading_s = model.kv_s * context_tokens
    return np.array(
        [
            *(k1 + pairs_s, c1 + draft_step_s, b1 + reading_s),
            *(k2 + pairs_s, c2 + draft_step_s, b2 + reading_s),
            min(most, model.max_tokens),
            least_passes,
        ]
    )


def expected_tokens(acceptance: float, length: float) -> float:
    """Acc(sl): tokens that a step yields on average of which ``length`` are verified."""
    if acceptance >= 1.0:
        return float(length)
    return float((1.0 - acceptance**length) / (1.0 - acceptance))


@jit
def _time_s(engine: Floats, tokens: float, passes: float) -> float:
    """Seconds of a step of so many tokens for which so many passes of the draft are made."""
    lines = Lines(engine[0], engine[1], engine[2], engine[3], engine[4], engine[5])
    return float(max(step_seconds_compiled(lines, tokens, max(passes, engine[7])), SHORTEST_S))


@jit
def _tokens_within(engine: Floats, time_s: float, passes: float) -> float:
    """`tokens_within`, in a step for which so many passes of the draft are made."""
    lines = Lines(engine[0], engine[1], engine[2], engine[3], engine[4], engine[5])
    return tokens_within_compiled(lines, time_s, engine[6], max(passes, engine[7]))


@jit
def _drawn(counts: Ints, spans: Floats, step_s: float, lengths: Ints) -> float:
    """Tokens that tiers draw from a step of ``step_s`` by the smallest lengths that last for it;
    below 0: some tier has none. ``lengths`` are raised to them from what lasts for less."""
    drawn = 0.0
    for tier in range(len(counts)):
        length = lengths[tier]
        while length < spans.shape[1] and spans[tier, length - 1] < step_s:
            length += 1
        lengths[tier] = length
        span = spans[tier, length - 1]
        if span < step_s:
            return -1.0
        # Who lasts for more than this step with one token takes part in some steps only.
        drawn += counts[tier] * (step_s / span if length == 1 else float(length))
    return drawn


@jit
def _for_prompts(
    counts: Ints, spans: Floats, engine: Floats, lengths: Ints
) -> tuple[float, float, bool]:
    """Fill in the ``lengths`` that leave prompts most tokens per second.

    Returns:
        T, the tokens left, and whether every TPOT is kept; if none can be, the plan is the one
        whose decodes overrun T by the smallest factor.
    """
    tried = np.empty(len(counts), dtype=np.int64)
    found, best, least = False, 0.0, np.inf
    step_s, left = np.inf, engine[6]
    for tier in range(len(counts)):
        tried[:] = 1
        for place in range(spans.shape[1]):
            span = spans[tier, place]
            drawn = -1.0 if span == np.inf else _drawn(counts, spans, span, tried)
            if drawn < 0.0:
                break  # nor is any longer step in everybody's reach
            passes = tried.max() - 1
            budget = _tokens_within(engine, span, passes) - drawn
            kept = budget >= -1e-9
            overrun = max(_time_s(engine, drawn, passes) / span, drawn / engine[6])
            if (kept and (not found or budget / span > best)) or (not found and overrun < least):
                found, best, least = kept, budget / span, overrun
                step_s, left = span, budget
                lengths[:] = tried
    return step_s, left, found or step_s == np.inf


@jit
def _smallest(counts: Ints, spans: Floats, engine: Floats, passes: int, lengths: Ints) -> bool:
    """Fill in the smallest ``lengths``, none above ``passes + 1``, with which a step of everybody
    keeps every TPOT; whether there are any. All others that do are at least as long."""
    lengths[:] = 1
    while True:
        tokens = 0.0
        for tier in range(len(counts)):
            tokens += counts[tier] * lengths[tier]
        step_s = _time_s(engine, tokens, passes)
        settled = True
        for tier in range(len(counts)):
            while spans[tier, lengths[tier] - 1] < step_s:
                if lengths[tier] > passes:
                    return False
                lengths[tier] += 1
                settled = False
        if settled:
            return bool(tokens <= engine[6])


@jit
def _rate(counts: Ints, yields: Floats, spans: Floats, engine: Floats, lengths: Ints) -> float:
    """Output tokens per second of a step of everybody; below 0 if it does not keep every TPOT."""
    tokens, gives, limit_s = 0.0, 0.0, np.inf
    for tier in range(len(counts)):
        tokens += counts[tier] * lengths[tier]
        gives += counts[tier] * yields[tier, lengths[tier] - 1]
        limit_s = min(limit_s, spans[tier, lengths[tier] - 1])
    step_s = _time_s(engine, tokens, lengths.max() - 1)
    return gives / step_s if step_s <= limit_s and tokens <= engine[6] else -1.0


@jit
def _climb(counts: Ints, yields: Floats, spans: Floats, engine: Floats, lengths: Ints) -> float:
    """Raise one of the ``lengths`` after another as long as more comes out; the rate in the end."""
    best = _rate(counts, yields, spans, engine, lengths)
    while True:
        chosen = -1
        for tier in range(len(counts)):
            if lengths[tier] < yields.shape[1]:
                lengths[tier] += 1
                rate = _rate(counts, yields, spans, engine, lengths)
                lengths[tier] -= 1
                if rate > best:
                    best, chosen = rate, tier
        if chosen < 0:
            return best
        lengths[chosen] += 1


@jit
def _worths(
    counts: Ints, yields: Floats, lows: Ints, passes: int, price: float, worths: Floats
) -> float:
    """What tiers can be worth at most at a ``price`` per token; the sum.

    A tier of length s is worth n (Acc(s) - price s). ``worths`` (2, L + 1) is filled in for each
    tier together with those after it: what they are worth, and what is lost of that where at least
    one of them has the full length, ``passes + 1``.
    """
    worths[0, len(counts)], worths[1, len(counts)] = 0.0, np.inf
    for tier in range(len(counts) - 1, -1, -1):
        length = lows[tier]
        while length <= passes and yields[tier, length] - yields[tier, length - 1] > price:
            length += 1
        worth = counts[tier] * (yields[tier, length - 1] - price * length)
        full = counts[tier] * (yields[tier, passes] - price * (passes + 1))
        worths[0, tier] = worths[0, tier + 1] + worth
        worths[1, tier] = min(worths[1, tier + 1], worth - full)
    return float(worths[0, 0])


@jit
def _cross(engine: Floats, passes: int, most: float) -> float:
    """Tokens, at most ``most``, at which the higher of the two lines changes; 0 if it does not."""
    if engine[0] == engine[3]:
        return 0.0
    offset_s = (engine[4] - engine[1]) * max(passes, engine[7]) + engine[5] - engine[2]
    return float(min(max(offset_s / (engine[0] - engine[3]), 0.0), most))


@jit
def _spare(engine: Floats, passes: int, price: float, rate: float, most: float) -> float:
    """max over N <= ``most`` of price N - rate time(N); N is at an end or where the lines cross."""
    best = -rate * _time_s(engine, 0.0, passes)
    for size in (_cross(engine, passes, most), most):
        best = max(best, price * size - rate * _time_s(engine, size, passes))
    return best


@jit
def _marginal(counts: Ints, yields: Floats, lows: Ints, passes: int, size: float) -> float:
    """What the last token gives where ``size`` of them go to whom they give most."""
    lengths = lows.copy()
    used = 0.0
    for tier in range(len(counts)):
        used += counts[tier] * lows[tier]
    last = 1.0
    while used < size:
        last, chosen = 0.0, -1
        for tier in range(len(counts)):
            if lengths[tier] <= passes:
                gain = yields[tier, lengths[tier]] - yields[tier, lengths[tier] - 1]
                if gain > last:
                    last, chosen = gain, tier
        if chosen < 0:
            return 0.0
        lengths[chosen] += 1
        used += counts[chosen]
    return last


@jit
def _price(
    counts: Ints,
    yields: Floats,
    engine: Floats,
    passes: int,
    lows: Ints,
    rate: float,
    most: float,
    worths: Floats,
) -> tuple[float, float]:
    """The price of a token under which least seems possible, and the `_spare` at that price;
    ``worths`` is filled in. Minus infinity: nothing beats ``rate``.

    Lengths of N tokens beat ``rate`` if tokens out - rate time(N) > 0. That is at most what each
    tier is worth by itself at a price, and `_spare`: convex in the price, and least at the slope of
    a line or where as many tokens are worth their price as the step holds, or as ride for free.
    """
    best, price = np.inf, 0.0
    for turn in range(4):
        if turn < 2:
            tried = rate * engine[3 * turn]
        else:
            size = most if turn == 2 else _cross(engine, passes, most)
            tried = _marginal(counts, yields, lows, passes, size)
        bound = _worths(counts, yields, lows, passes, tried, worths)
        bound += _spare(engine, passes, tried, rate, most)
        if bound - worths[1, 0] <= 0.0:
            return tried, -np.inf
        if bound < best:
            best, price = bound, tried
    _worths(counts, yields, lows, passes, price, worths)
    return price, _spare(engine, passes, price, rate, most)


@jit
def _search(
    counts: Ints,
    yields: Floats,
    spans: Floats,
    engine: Floats,
    passes: int,
    lows: Ints,
    rate: float,
    lengths: Ints,
) -> float:
    """Fill in ``lengths``, the greatest of them ``passes + 1``, that yield more than ``rate``, if
    there are any: branch and bound over the tiers. The rate they yield, or ``rate``."""
    tiers = len(counts)
    limit_s, worths = spans[:, passes].min(), np.empty((2, tiers + 1))
    most = _tokens_within(engine, limit_s, passes)
    price, spare = _price(counts, yields, engine, passes, lows, rate, most, worths)
    if spare == -np.inf:
        return rate
    tokens, gives, needs = np.zeros(tiers), np.zeros(tiers), np.zeros(tiers + 1)
    limits, spares, full = np.full(tiers, limit_s), np.full(tiers, spare), np.zeros(tiers)
    for tier in range(tiers - 1, -1, -1):
        needs[tier] = needs[tier + 1] + counts[tier] * lows[tier]
    tried = lows.copy()
    tried[0] -= 1
    tier, nodes = 0, 0
    while tier >= 0 and nodes < MAX_NODES:
        nodes += 1
        tried[tier] += 1
        length = tried[tier]
        if length > passes + 1:
            tier -= 1
            continue
        size = tokens[tier] + counts[tier] * length
        given = gives[tier] + counts[tier] * yields[tier, length - 1]
        reached = full[tier] > 0 or length > passes
        bound = given - price * size + spares[tier] + worths[0, tier + 1]
        if bound <= 1e-12 * given:
            if length > 1 and yields[tier, length - 1] - yields[tier, length - 2] <= price:
                tier -= 1  # longer ones are worth less and less
            continue
        limit_s = min(limits[tier], spans[tier, length - 1])
        most = _tokens_within(engine, limit_s, passes)
        lost = 0.0 if reached else worths[1, tier + 1]
        if size + needs[tier + 1] > most or bound - lost <= 1e-12 * given:
            continue
        if tier < tiers - 1:
            tier += 1
            tokens[tier], gives[tier], limits[tier], full[tier] = size, given, limit_s, reached
            spares[tier] = _spare(engine, passes, price, rate, most)
            tried[tier] = lows[tier] - 1
        elif given / _time_s(engine, size, passes) > rate:
            rate = given / _time_s(engine, size, passes)
            lengths[:] = tried
    return rate


@jit
def _for_tokens(
    counts: Ints, yields: Floats, spans: Floats, engine: Floats, lengths: Ints
) -> float:
    """Fill in the ``lengths`` at which most tokens come out per second while every TPOT is kept by
    a step of everybody; that rate, or -1 if none are."""
    lows = np.ones(len(counts), dtype=np.int64)
    best = -1.0
    for passes in range(yields.shape[1]):
        if _smallest(counts, spans, engine, passes, lows):
            if best < 0.0:
                lengths[:] = lows
                best = _climb(counts, yields, spans, engine, lengths)
            best = _search(counts, yields, spans, engine, passes, lows, best, lengths)
    return best


@jit
def _plan(
    counts: Ints,
    tpots: Floats,
    chances: Floats,
    engine: Floats,
    longest: int,
    prompts: bool,
    lengths: Ints,
) -> tuple[float, float, float, bool]:
    """`plan_lengths` in arrays: (step_s, prompt_tokens, per_second, feasible)."""
    yields, spans = np.empty((len(counts), longest)), np.empty((len(counts), longest))
    for tier in range(len(counts)):
        chance, total = 1.0, 0.0
        for place in range(longest):
            total += chance
            chance *= chances[tier]
            yields[tier, place] = total
            spans[tier, place] = tpots[tier] * total
    if not prompts:
        rate = _for_tokens(counts, yields, spans, engine, lengths)
        if rate >= 0.0:
            step_s, tokens = np.inf, 0.0
            for tier in range(len(counts)):
                step_s = min(step_s, spans[tier, lengths[tier] - 1])
                tokens += counts[tier] * lengths[tier]
            left = _tokens_within(engine, step_s, lengths.max() - 1) - tokens
            return step_s, left, rate, True
    step_s, left, kept = _for_prompts(counts, spans, engine, lengths)
    took_s = step_s if step_s < np.inf else _time_s(engine, left, 0.0)
    return step_s, left, left / took_s, kept


def plan_lengths(
    tiers: Sequence[Tier],
    model: StepTimeModel,
    longest: int,
    *,
    prompts: bool,
    context_tokens: int = 0,
    draft_step_s: float = 0.0,
    least_passes: int = 0,
    most_tokens: int = 1 << 30,
    most_s: float = INFINITY,
) -> LengthPlan:
    """Tokens to verify of each request in a step, by tier.

    Args:
        tiers: who decodes; ``MAX_TIERS`` of them are planned for quickly.
        model: step times. Its seconds per draft step count once for each pass of the draft.
        longest: most tokens of one request, at least 1.
        prompts: whether prompts are to be computed: the step's time is then theirs as far as no
            TPOT needs it, and requests without a TPOT draw nothing. Otherwise as many tokens as
            possible are to come out; if a step of everybody keeps the TPOTs at no length, requests
            take part in as few steps as they can, as beside prompts.
        context_tokens: KV tokens that these requests read in a step.
        draft_step_s: seconds of one pass of the draft that are not in ``model``.
        least_passes: passes that are made even where nothing is drafted: the draft reads what the
            target has read.
        most_tokens: tokens of the largest step.
        most_s: seconds of the longest step that prompts may cause, whatever TPOTs allow; a step
            that decodes make longer ignores it.
    """
    if not tiers:
        return LengthPlan((), INFINITY, float(most_tokens), 0.0, True)
    if prompts and most_s < INFINITY:  # as a tier of nobody that would lag behind
        nobody = Tier(0, most_s, 0.0)
        bounded = plan_lengths(
            [*tiers, nobody],
            model,
            longest,
            prompts=True,
            context_tokens=context_tokens,
            draft_step_s=draft_step_s,
            least_passes=least_passes,
            most_tokens=most_tokens,
        )
        if bounded.feasible:
            return replace(bounded, lengths=bounded.lengths[:-1])
    counts = np.array([tier.requests for tier in tiers])
    engine = _engine(
        model, int(counts.sum()), context_tokens, draft_step_s, most_tokens, least_passes
    )
    lengths = np.ones(len(tiers), dtype=np.int64)
    step_s, left, per_second, feasible = _plan(
        counts,
        np.array([tier.tpot_s for tier in tiers]),
        np.array([tier.acceptance for tier in tiers]),
        engine,
        longest,
        prompts,
        lengths,
    )
    return LengthPlan(tuple(lengths.tolist()), step_s, left, per_second, feasible)


def with_draft_steps(model: StepTimeModel, steps: int) -> StepTimeModel:
    """The same engine where every step drafts in so many passes, whatever its shape says."""
    (k1, c1, b1), (k2, c2, b2) = model.terms
    return StepTimeModel(
        ((k1, 0.0, b1 + c1 * steps), (k2, 0.0, b2 + c2 * steps)),
        model.kv_s,
        model.max_tokens,
        model.pair_s,
    )


# --- who is in which tier ------------------------------------------------------------------------


@jit
def _fastest_s(engine: Floats, others: float, acceptance: float, longest: int) -> float:
    """Seconds per token of one request at its best length, the others verifying one token each."""
    best, gives, chance = np.inf, 0.0, 1.0
    for length in range(1, longest + 1):
        gives += chance
        chance *= acceptance
        best = min(best, _time_s(engine, others + length, length - 1.0) / gives)
    return best


def fastest_pace_s(
    acceptance: float,
    requests: int,
    model: StepTimeModel,
    longest: int,
    *,
    context_tokens: int = 0,
    draft_step_s: float = 0.0,
    least_passes: int = 0,
) -> float:
    """Seconds per token that one of ``requests`` can be brought to by drafts of its own; the other
    arguments are those of `plan_lengths`."""
    engine = _engine(model, requests, context_tokens, draft_step_s, model.max_tokens, least_passes)
    return _fastest_s(engine, requests - 1.0, acceptance, longest)


def working_tpot_s(start_s: float, decode: DecodeView, fastest_s: float) -> float:
    """Seconds per token to plan a request by: its TPOT is strengthened where it fell behind.

    Behind its schedule it needs the pace that still keeps its window (`decode_limit_s` of
    `core.batching.step` spreads lateness in the same way), rounded down to the next of few values.
    A window that no pace of ``fastest_s`` or more can save is given up: the request goes on at its
    TPOT and hurries nobody.

    Args:
        start_s: when the step begins.
        decode: the request, one token of it being expected of the step.
        fastest_s: the least that can be reached, see `fastest_pace_s`.
    """
    tpot_s = decode.tpot_s
    pace_s = (decode.window_end_s - start_s) / decode.window_left
    if tpot_s == INFINITY or pace_s >= tpot_s:
        return tpot_s
    if pace_s < fastest_s:
        return max(tpot_s, fastest_s)
    steps = math.ceil(math.log(tpot_s / pace_s) / math.log(GRID) - EPS)
    return max(tpot_s / GRID**steps, fastest_s)


def gather_tiers(paces: Sequence[tuple[float, float]]) -> tuple[list[Tier], list[int]]:
    """At most ``MAX_TIERS`` tiers of requests given as (working TPOT, acceptance), and which of
    them each request is in.

    Neighbours that differ least are merged: their tier keeps the tighter TPOT, so nobody is
    planned for more loosely than he asked, and their mean acceptance.
    """
    groups: dict[tuple[float, float], int] = {}
    for pace in paces:
        groups[pace] = groups.get(pace, 0) + 1
    tiers = [Tier(groups[pace], *pace) for pace in sorted(groups)]
    places = list(range(len(tiers)))
    while len(tiers) > MAX_TIERS:
        at = min(range(len(tiers) - 1), key=lambda i: _unlike(tiers[i], tiers[i + 1]))
        tiers[at : at + 2] = [_merged(tiers[at], tiers[at + 1])]
        places = [place - (place > at) for place in places]
    place_of = dict(zip(sorted(groups), places, strict=True))
    return tiers, [place_of[pace] for pace in paces]


def _unlike(one: Tier, other: Tier) -> float:
    """How much is lost by treating two tiers, the second no tighter, as one."""
    apart = abs(one.acceptance - other.acceptance)
    return apart if one.tpot_s == other.tpot_s else apart + math.log(other.tpot_s / one.tpot_s)


def _merged(one: Tier, other: Tier) -> Tier:
    requests = one.requests + other.requests
    mean = (one.requests * one.acceptance + other.requests * other.acceptance) / requests
    return Tier(requests, one.tpot_s, mean)


# --- what a step may be stretched for -------------------------------------------------------------


def counted_tokens(start_s: float, decode: DecodeView, hoped: float, sure_s: float) -> float:
    """Tokens of one request's step that its TPOT may be stretched for, from 1 to ``hoped``.

    A step may accept nothing. Where steps without drafts keep the TPOT, a step is stretched only so
    far that they could still save the window if it yields a single token. Where nothing but drafts
    keeps it, luck evens out over the steps that are left: the fewer, the less is counted on.

    Args:
        start_s: when the step begins.
        decode: the request, one token of it being expected of the step.
        hoped: what the step yields on average.
        sure_s: seconds of a step of everybody without drafts.
    """
    left = decode.window_left
    pace_s = min((decode.window_end_s - start_s) / left, decode.tpot_s)
    if sure_s < decode.tpot_s:
        return max(min(hoped, left - (left - 1.0) * sure_s / pace_s), 1.0)
    return 1.0 + min((left - 1.0) / EVENED_OUT, 1.0) * (hoped - 1.0)


def stretched_s(start_s: float, decode: DecodeView, counted: float) -> float:
    """Longest step that keeps a request's TPOT if it yields ``counted`` tokens; see
    `core.batching.step.decode_limit_s`."""
    left_s = decode.window_end_s - start_s
    slack_s = left_s - (decode.window_left - counted) * decode.tpot_s
    return max(slack_s, left_s * counted / decode.window_left)


# --- what is learnt ------------------------------------------------------------------------------


class AcceptanceEstimator:
    """How likely a draft of each class is accepted, those before it being accepted.

    What counts are trials: an accepted draft is one, and so is the first rejected one; those behind
    it were never tried. Old trials are forgotten exponentially. A class of few trials is believed
    to be like all others, and all others at first like ``prior``.

    Args:
        prior: guess before any trial.
        memory: trials after which an old one counts for 1/e.
    """

    LEAST, MOST = 0.02, 0.98
    PRIOR_TRIALS = 8.0
    """Trials that the first guess counts for."""
    SHARED_TRIALS = 32.0
    """Trials of its own that a class needs to count as much as all classes together."""

    def __init__(self, prior: float = 0.6, memory: float = 400.0) -> None:
        self._prior = prior
        self._memory = memory
        self._all = 0.0, 0.0
        self._classes: dict[str, tuple[float, float]] = {}

    def observe(self, slo_class: str, accepted: int, tried: int) -> None:
        """Take in one step of one request: of ``tried`` drafts so many were accepted.

        Raises:
            ValueError: more were accepted than tried, or fewer than none.
        """
        if not 0 <= accepted <= tried:
            raise ValueError(f"acceptance: {accepted} of {tried} drafts cannot have been accepted")
        if tried:
            keep = math.exp(-tried / self._memory)
            hits, trials = self._classes.get(slo_class, (0.0, 0.0))
            self._classes[slo_class] = keep * hits + accepted, keep * trials + tried
            hits, trials = self._all
            self._all = keep * hits + accepted, keep * trials + tried

    def acceptance(self, slo_class: str | None = None) -> float:
        """Of a class, or of all together, within [LEAST, MOST]."""
        hits, trials = self._all
        hits += self.PRIOR_TRIALS * self._prior
        found = hits / (trials + self.PRIOR_TRIALS)
        if slo_class in self._classes:
            hits, trials = self._classes[slo_class]
            found = (hits + self.SHARED_TRIALS * found) / (trials + self.SHARED_TRIALS)
        return min(max(found, self.LEAST), self.MOST)


class DraftPassTime:
    """What one more pass of the draft adds to a step, as a share of the step without drafts.

    vLLM's own proposers do not say how long they took, so this is the slope of step times over the
    number of passes. Until steps have drafted in different numbers of passes, and enough of them,
    it stays near a first guess.

    Args:
        first_guess: share before anything was seen.
    """

    PRIOR = 8.0
    """Steps, one pass off the others, that the first guess counts for."""
    REMEMBERED = 200
    """Steps of each number of passes."""
    DEAREST = 2.0
    """Steps without drafts that a pass may cost at most: what took longer was held up by something
    else, and a mean would not forget it for thousands of steps."""

    def __init__(self, first_guess: float = 0.05) -> None:
        self._first_guess = first_guess
        self._seen: dict[int, tuple[int, float]] = {}

    def observe(self, passes: int, ratio: float) -> None:
        """Take in a step that computed no prompts: how often it took what it takes without
        drafts."""
        count, mean = self._seen.get(passes, (0, 0.0))
        count = min(count + 1, self.REMEMBERED)
        ratio = min(ratio, 1.0 + self.DEAREST * passes)
        self._seen[passes] = count, mean + (ratio - mean) / count

    def share(self) -> float:
        """Of the time of a step without drafts; at least 0."""
        total = sum(count for count, _ in self._seen.values())
        if len(self._seen) < 2:
            return self._first_guess
        middle = sum(count * passes for passes, (count, _) in self._seen.items()) / total
        above = sum(
            count * mean * (passes - middle) for passes, (count, mean) in self._seen.items()
        )
        spread = sum(count * (passes - middle) ** 2 for passes, (count, _) in self._seen.items())
        return max((above + self.PRIOR * self._first_guess) / (spread + self.PRIOR), 0.0)


def warm_up() -> None:
    """Compile the hot loops now instead of in the first step."""
    model = StepTimeModel.prior()
    for prompts in (True, False):
        plan_lengths([Tier(1, 0.1, 0.5)], model, 2, prompts=prompts)
    fastest_pace_s(0.5, 1, model, 2)
