# SPDX-License-Identifier: Apache-2.0
"""How many tokens of each request a step verifies: draft lengths by SLO.

Source: SLOs-Serve, section 3.2.3 and appendix D. A request of which ``sl`` tokens are verified (its
last token and ``sl - 1`` drafts) gets Acc(sl) = (1 - a^sl) / (1 - a) tokens on average from the
step, where a is the chance of a draft to be accepted if those before it are. So its step may take
TPOT * Acc(sl). Requests come in tiers of one TPOT. The lengths sl_1..sl_L are chosen so that
prompts get most tokens per second::

    max (Time2BS(T, sl) - sum_l n_l sl_l) / T     with   T = min_l TPOT_l * Acc(sl_l)

Once a tier and its length bind, T is known, and the best lengths of the other tiers are the
smallest that last for T. So the binding tier and its length are enumerated, which is exact. A tier
that lasts longer than T with a single token takes part in some steps only: it draws T / TPOT_l
tokens for each of its requests on average.

Without prompts the same constraint holds, and the output tokens per second are maximised: sum_l n_l
Acc(sl_l) over the time of the step that verifies sum_l n_l sl_l tokens. That is a knapsack of few
items, since tokens up to a step's memory-bound time are free. A greedy search solves it for each
number of draft passes. Against an exact search (branch and bound) it lost 0.0003% of the rate on
average over 40,000 random cases like those that are served, and more than 1% in one of them; over
15,600 cases of arbitrary shape in which a step holds only 64 tokens, 0.02% and more than 1% in 87.

Compiled functions that call each other stay in this file: numba's cache on disk notices a change of
the file that a function is in, and of no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_slo.core.arrays import Floats, Floats2D, Ints
from vllm_slo.core.jit import jit
from vllm_slo.core.speculation.tiers import Tier
from vllm_slo.core.step_time.budget import (
    Lines,
    step_seconds_compiled,
    tokens_within_compiled,
)
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY

SHORTEST_S = 1e-9
FALLS = 2
"""Drafts in a row that may lower the rate before the greedy search of one number of passes ends.
One loses more than 1% in three times as many random cases, more than two gain nothing."""
WORTH_A_PASS = 0.95
"""Share of the best rate so far below which no further number of passes is searched. 0.9 finds the
same, 0.99 loses five times as much."""


@dataclass(frozen=True, slots=True)
class LengthPlan:
    """The lengths of a step.

    Attributes:
        lengths: tokens verified of each request of a tier, at least 1; one less is drafted.
        step_s: the longest step that keeps every TPOT on average (T); infinite without any.
        prompt_tokens: tokens of such a step that are left for prompts; below 0, those it lacks.
        per_second: the rate that was maximised: prompt tokens or output tokens, per second.
        feasible: whether every TPOT is kept; if not, no other lengths miss them by less.
    """

    lengths: tuple[int, ...]
    step_s: float
    prompt_tokens: float
    per_second: float
    feasible: bool


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


@jit
def _time_s(engine: Floats, tokens: float, passes: float) -> float:
    """Seconds of a step of so many tokens for which so many passes of the draft are made."""
    lines = Lines(engine[0], engine[1], engine[2], engine[3], engine[4], engine[5])
    return float(max(step_seconds_compiled(lines, tokens, max(passes, engine[7])), SHORTEST_S))


@jit
def _tokens_within(engine: Floats, time_s: float, passes: float) -> float:
    """Time2BS, not rounded: tokens of the largest step within ``time_s``; 0 if there is none."""
    lines = Lines(engine[0], engine[1], engine[2], engine[3], engine[4], engine[5])
    return tokens_within_compiled(lines, time_s, engine[6], max(passes, engine[7]))


@jit
def _drawn(counts: Ints, spans: Floats2D, step_s: float, lengths: Ints) -> float:
    """Raise ``lengths`` to the smallest at which every tier keeps its TPOT in a step of ``step_s``;
    the tokens that they draw from it, or -1 if a tier has no such length."""
    drawn = 0.0
    for tier in range(len(counts)):
        length = lengths[tier]
        while length < spans.shape[1] and spans[tier, length - 1] < step_s:
            length += 1
        lengths[tier] = length
        span = spans[tier, length - 1]
        if span < step_s:
            return -1.0
        # A tier that lasts longer than this step with one token takes part in some steps only.
        drawn += counts[tier] * (step_s / span if length == 1 else float(length))
    return drawn


@jit
def _for_prompts(
    counts: Ints, spans: Floats2D, engine: Floats, lengths: Ints
) -> tuple[float, float, bool]:
    """Fill in the ``lengths`` that leave most tokens per second to prompts.

    Returns:
        T, the tokens left, and whether every TPOT is kept; if none can be, the plan is the one
        whose decodes overrun T by the smallest factor.
    """
    tried = np.empty(len(counts), dtype=np.int64)
    feasible, best, least_overrun = False, 0.0, np.inf
    step_s, left = np.inf, engine[6]
    for tier in range(len(counts)):
        tried[:] = 1
        for place in range(spans.shape[1]):
            span = spans[tier, place]
            drawn = -1.0 if span == np.inf else _drawn(counts, spans, span, tried)
            if drawn < 0.0:
                break  # some tier cannot last for this step, nor for a longer one
            passes = tried.max() - 1
            budget = _tokens_within(engine, span, passes) - drawn
            kept = budget >= -1e-9
            overrun = max(_time_s(engine, drawn, passes) / span, drawn / engine[6])
            if (kept and (not feasible or budget / span > best)) or (
                not feasible and overrun < least_overrun
            ):
                feasible, best, least_overrun = kept, budget / span, overrun
                step_s, left = span, budget
                lengths[:] = tried
    return step_s, left, feasible or step_s == np.inf


@jit
def _settle(counts: Ints, spans: Floats2D, engine: Floats, passes: int, lengths: Ints) -> bool:
    """Raise ``lengths``, none above ``passes + 1``, to the smallest at which a step of all tiers
    keeps every TPOT; whether there are such lengths."""
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
def _rate(counts: Ints, yields: Floats2D, engine: Floats, passes: int, lengths: Ints) -> float:
    """Output tokens per second of a step of all tiers for which ``passes`` are made."""
    tokens, gives = 0.0, 0.0
    for tier in range(len(counts)):
        tokens += counts[tier] * lengths[tier]
        gives += counts[tier] * yields[tier, lengths[tier] - 1]
    return gives / _time_s(engine, tokens, passes)


@jit
def _fill(
    counts: Ints, yields: Floats2D, spans: Floats2D, engine: Floats, passes: int, lengths: Ints
) -> float:
    """Add drafts to settled ``lengths``, each time to the tier whose next draft is likeliest to be
    accepted, until that does not pay any more; keep the best lengths, and return their rate."""
    tried, other, following = lengths.copy(), lengths.copy(), lengths.copy()
    best = _rate(counts, yields, engine, passes, lengths)
    falls = 0
    while falls < FALLS:
        likeliest = 0.0
        for tier in range(len(counts)):
            if tried[tier] > passes:
                continue
            chance = yields[tier, tried[tier]] - yields[tier, tried[tier] - 1]
            if chance > likeliest:
                other[:] = tried
                other[tier] += 1
                if _settle(counts, spans, engine, passes, other):
                    likeliest = chance
                    following[:] = other
        if likeliest == 0.0:
            break
        tried[:] = following
        rate = _rate(counts, yields, engine, passes, tried)
        falls += 1
        if rate > best:
            best, falls = rate, 0
            lengths[:] = tried
    return best


@jit
def _exchange(
    counts: Ints,
    yields: Floats2D,
    spans: Floats2D,
    engine: Floats,
    passes: int,
    lengths: Ints,
    best: float,
) -> None:
    """Improve settled ``lengths``, whose rate is ``best``: add a draft to one tier, or take one
    from another, or both, whichever raises the rate most, until nothing does."""
    other, following = lengths.copy(), lengths.copy()
    tiers = len(counts)
    while True:
        before = best
        for up in range(tiers + 1):  # the last place stands for no tier
            for down in range(tiers + 1):
                if (up < tiers and lengths[up] > passes) or (down < tiers and lengths[down] == 1):
                    continue
                other[:] = lengths
                if up < tiers:
                    other[up] += 1
                if down < tiers:
                    other[down] -= 1
                if _settle(counts, spans, engine, passes, other):
                    rate = _rate(counts, yields, engine, passes, other)
                    if rate > best * (1.0 + 1e-12):
                        best = rate
                        following[:] = other
        if best == before:
            return
        lengths[:] = following


@jit
def _for_tokens(
    counts: Ints, yields: Floats2D, spans: Floats2D, engine: Floats, lengths: Ints
) -> float:
    """Fill in ``lengths`` at which most tokens come out per second while a step of all tiers keeps
    every TPOT; that rate, or -1 if no lengths keep them."""
    best = -1.0
    tried = np.empty(len(counts), dtype=np.int64)
    for passes in range(yields.shape[1]):
        tried[:] = 1
        if _settle(counts, spans, engine, passes, tried):
            rate = _fill(counts, yields, spans, engine, passes, tried)
            if rate < WORTH_A_PASS * best:
                break
            _exchange(counts, yields, spans, engine, passes, tried, rate)
            rate = _rate(counts, yields, engine, tried.max() - 1, tried)
            if rate > best:
                best = rate
                lengths[:] = tried
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
        tiers: of the requests that decode, see `tiers.gather_tiers`.
        model: step times. Its seconds per draft step count once for each pass of the draft.
        longest: most tokens of one request, at least 1.
        prompts: whether prompts are to be computed. If so, the step's time is theirs as far as no
            TPOT needs it, and requests without a TPOT draw nothing. If not, output tokens per
            second are maximised; where a step of all requests keeps the TPOTs at no length,
            requests take part in as few steps as they can, as beside prompts.
        context_tokens: KV tokens that these requests read in a step.
        draft_step_s: seconds of one pass of the draft that are not in ``model``.
        least_passes: passes that are made even where nothing is drafted: the draft reads what the
            target has read.
        most_tokens: tokens of the largest step.
        most_s: seconds of the longest step that prompts may cause, whatever TPOTs allow. It is
            ignored where decoding alone takes longer.
    """
    if not tiers:
        return LengthPlan((), INFINITY, float(most_tokens), 0.0, True)
    if prompts and most_s < INFINITY:  # a tier without requests bounds T
        bounded = plan_lengths(
            [*tiers, Tier(0, most_s, 0.0)],
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


@jit
def _fastest_s(engine: Floats, others: float, acceptance: float, longest: int) -> float:
    """Seconds per token of one request at its best length, beside ``others`` of one token each."""
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
    """Seconds per token that drafts can bring one of ``requests`` to if the others have none. The
    other arguments are those of `plan_lengths`."""
    engine = _engine(model, requests, context_tokens, draft_step_s, model.max_tokens, least_passes)
    return _fastest_s(engine, requests - 1.0, acceptance, longest)
