# SPDX-License-Identifier: Apache-2.0
"""What one engine step may do: SLOs-Serve's batch formation (section 3.2.2, algorithm 2).

A step takes as long as the tightest promise allows, and no longer; its tokens go, in this order, to

1. decodes whose next token would be late if they waited for the step after this one,
2. promised prefills by earliest deadline, as far as their deadlines ask for it now,
3. the other promised decodes by earliest due time,
4. the rest of the promised prefills,
5. best effort, in the order given.

Algorithm 2 fixes the step at the tightest TPOT; here a request that is ahead of its schedule
lends its slack, and one that fell behind spreads the catching up over the rest of its window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_slo.core.batching.decodes import EPS_S, NONE, Decodes
from vllm_slo.core.step_time.model import StepTimeModel, chunk_pairs
from vllm_slo.core.types import INFINITY, BestEffortView, DecodeView, PrefillView, StepPlan

SMALLEST_CHUNK = 64
"""Prefill tokens that best effort gets in a step that nobody else uses, at the least."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds that do not come from promises.

    Attributes:
        max_step_tokens: most tokens of one step.
        best_effort_tokens: tokens kept for best effort before any promised prefill.
        best_effort_step_s: longest step that best effort alone may cause, so that a request that
            arrives in its midst can still be promised something.
        seats: waiting requests that may start in this step.
        best_effort_prompt_s: longest step that prompts of best effort may cause beyond the tokens
            kept for them; 0 while they stand back (see ``Pressure``).
    """

    max_step_tokens: int
    best_effort_tokens: int = 0
    best_effort_step_s: float = INFINITY
    seats: int = 1 << 30
    best_effort_prompt_s: float = INFINITY


def plan_step(
    start_s: float,
    decodes: Decodes | Sequence[DecodeView],
    prefills: Sequence[PrefillView],
    best_effort: Sequence[BestEffortView],
    model: StepTimeModel,
    limits: StepLimits,
    *,
    may_start: Callable[[PrefillView], bool] = lambda _: True,
) -> StepPlan:
    """Grant the tokens of one step.

    Args:
        start_s: when the step begins.
        decodes: promised requests that decode, in any order.
        prefills: promised requests before their first token, by deadline.
        best_effort: everything else that could use tokens, in serving order.
        model: step times with the margin that promises are to keep.
        limits: see ``StepLimits``.
        may_start: whether a prefill may finish now although its deadline is later.

    Returns:
        A grant for each request named in the three sequences.
    """
    decodes = decodes if isinstance(decodes, Decodes) else Decodes.of(decodes)
    batch = _Batch(start_s, model, limits)
    decoding, context, pairs = decodes.load()
    shortest = model.predict_s(decoding, context, pairs=pairs)
    limit = decodes.limit_s(start_s, shortest)
    batch.set_limits(limit, _meet_next_deadline(batch, limit, decodes, prefills))
    urgent, patient = _split_by_urgency(batch, decodes)
    batch.grant_decodes(urgent, forced=True)
    kept = batch.reserve(
        min(limits.best_effort_tokens, sum(b.remaining_tokens for b in best_effort))
    )
    held = batch.grant_prefills(prefills, may_start, patient.load()[0])
    batch.grant_decodes(patient, forced=False)
    batch.grant_prefills(prefills, may_start, 0, held)
    batch.release(kept)
    batch.grant_best_effort(best_effort, kept)
    if kept:  # what best effort could not use after all, for want of a seat
        batch.grant_decodes(_without_tokens(batch, patient), forced=False)
        batch.grant_prefills(prefills, may_start, 0, held)
    if held and not batch.used:  # nobody is held back for the sake of nothing
        batch.grant_prefills(prefills, lambda _: True, 0)
    return batch.plan()


def _meet_next_deadline(
    batch: _Batch,
    limit: float,
    decodes: Decodes,
    prefills: Sequence[PrefillView],
) -> float:
    """Shorten the step where that lets the most urgent prefills end in time.

    A deadline that the step would overrun asks for a step that ends at it, provided such a step
    can hold what is still due by then; one that cannot be met at all is left to its fate.
    """
    model = batch.model
    decoding, context, _ = decodes.load()
    due = ahead = pairs = 0
    for prefill in prefills:
        due += prefill.remaining_tokens
        ahead += prefill.context_tokens
        pairs += chunk_pairs(prefill.remaining_tokens, prefill.context_tokens)
        left = prefill.deadline_s - batch.start_s
        full = min(limit, model.predict_s(batch.limits.max_step_tokens, ahead + context))
        if left >= 2 * full:
            break
        needed = model.predict_s(due + decoding, ahead + context, pairs=pairs + ahead + context)
        if needed > left + EPS_S:  # with the decodes that cannot wait for the step after
            tokens, held, more = decodes.due_before(prefill.deadline_s + full).load()
            needed = model.predict_s(due + tokens, ahead + held, pairs=pairs + ahead + more)
        # Ends in this step only if the next one would come too late for it.
        following = model.predict_s(decoding + 1, ahead + context)
        if needed <= left + EPS_S and left < full + following:
            limit = min(limit, max(left, needed))
    return limit


def _split_by_urgency(batch: _Batch, decodes: Decodes) -> tuple[Decodes, Decodes]:
    """Decodes that must be in this step, and those that may wait for the next."""
    next_end = batch.start_s + 2 * min(batch.limit_s, batch.longest_s) - EPS_S
    mask = decodes.due_s < next_end
    urgent = decodes.where(mask)
    return urgent, NONE if urgent is decodes else decodes.where(~mask)


def _without_tokens(batch: _Batch, decodes: Decodes) -> Decodes:
    """Those that have no tokens in the step so far."""
    lacking = [not batch.tokens[name] for name in decodes.request_ids]
    return decodes.where(np.array(lacking, dtype=np.bool_))


class _Batch:
    """The step while it is being filled."""

    def __init__(self, start_s: float, model: StepTimeModel, limits: StepLimits) -> None:
        self.start_s = start_s
        self.model = model
        self.limits = limits
        self.limit_s = INFINITY
        self.deadline_s = INFINITY
        self.longest_s = model.predict_s(min(limits.max_step_tokens, model.max_tokens))
        self.tokens: dict[str, int] = {}
        self.used = 0
        self.reserved = 0
        self.context = 0
        self.pairs = 0.0
        self.seats = limits.seats

    def set_limits(self, limit_s: float, with_deadlines_s: float) -> None:
        self.limit_s = with_deadlines_s
        if with_deadlines_s < limit_s:
            self.deadline_s = with_deadlines_s

    def reserve(self, tokens: int) -> int:
        """Keep tokens out of reach of the promises until ``release``."""
        self.reserved += tokens
        return tokens

    def release(self, tokens: int) -> None:
        self.reserved -= tokens

    def fits_decode(self, limit_s: float, tokens: int, context: int) -> bool:
        """Whether a decode step of ``tokens`` tokens can join."""
        after = self.used + self.reserved + tokens
        if after > self.limits.max_step_tokens:
            return False
        if limit_s == INFINITY:
            return True
        pairs = self.pairs + chunk_pairs(tokens, context)
        return self.model.predict_s(after, self.context + context, pairs=pairs) <= limit_s

    def room(self, limit_s: float, context: int, granted: int = 0) -> int:
        """Tokens a chunk may have that follows ``context`` computed and ``granted`` tokens."""
        taken = self.used + self.reserved
        most = self.limits.max_step_tokens - taken
        if most <= 0 or limit_s == INFINITY:
            return max(most, 0)
        others = self.context - context - granted if granted else self.context
        return min(
            most,
            self.model.chunk_to_fit(limit_s, context + granted, taken, others, pairs=self.pairs),
        )

    def add(self, request_id: str, tokens: int, context: int) -> None:
        """Grant tokens; a request granted twice in one step keeps the sum."""
        before = self.tokens.get(request_id, 0)
        self.tokens[request_id] = before + tokens
        if tokens:
            self.used += tokens
            self.pairs += chunk_pairs(tokens, context + before)
            if not before:
                self.context += context

    def grant_decodes(self, decodes: Decodes, *, forced: bool) -> None:
        """One decode step each, by due time where not all fit. Forced ones are granted beyond the
        limit, up to the engine's own: all of them being slightly late beats some being far too
        late."""
        limit = INFINITY if forced else self.limit_s
        tokens, context, pairs = decodes.load()
        after = self.used + self.reserved + tokens
        if after <= self.limits.max_step_tokens and (
            forced
            or self.model.predict_s(after, self.context + context, pairs=self.pairs + pairs)
            <= limit
        ):
            self.tokens.update(zip(decodes.request_ids, decodes.tokens.tolist(), strict=True))
            self.used += tokens
            self.context += context
            self.pairs += pairs
            return
        for request_id, tokens, context in decodes.by_due():
            fits = self.fits_decode(limit, tokens, context)
            self.add(request_id, tokens if fits else 0, context)

    def grant_prefills(
        self,
        prefills: Sequence[PrefillView],
        may_start: Callable[[PrefillView], bool],
        spared: int,
        held: frozenset[str] | None = None,
    ) -> frozenset[str]:
        """Prefill by earliest deadline; returns the requests whose first token is held back.

        With ``spared`` > 0 only what the deadlines ask for by the end of this step is granted where
        that leaves room for ``spared`` tokens of further decodes; the rest comes in a second call.
        """
        holding = set() if held is None else set(held)
        urgent_only = spared > 0 and held is None
        demanded = self._demanded(prefills) if urgent_only else 0
        granted = 0
        for prefill in prefills:
            already = self.tokens.get(prefill.request_id, 0)
            want = prefill.remaining_tokens - already
            if prefill.context_tokens == 0 and not already and self.seats <= 0:
                self.add(prefill.request_id, 0, 0)
                continue
            room = self.room(self.limit_s, prefill.context_tokens, already)
            if urgent_only:
                room = min(room, max(room - spared, demanded - granted))
            give = min(want, room)
            if give == want and give > 0 and self._ends_early(prefill, may_start, holding):
                give -= 1
            if give > 0 and not already and prefill.context_tokens == 0:
                self.seats -= 1
            granted += give
            self.add(prefill.request_id, max(give, 0), prefill.context_tokens)
        return frozenset(holding)

    def _ends_early(
        self,
        prefill: PrefillView,
        may_start: Callable[[PrefillView], bool],
        holding: set[str],
    ) -> bool:
        """Whether the last token of this prefill is to wait for a later step."""
        if prefill.request_id in holding:
            return True
        end = self.start_s + min(self.limit_s, self.longest_s)
        if prefill.deadline_s < end + min(self.limit_s, self.longest_s) - EPS_S:
            return False
        if may_start(prefill):
            return False
        holding.add(prefill.request_id)
        return True

    def _demanded(self, prefills: Sequence[PrefillView]) -> int:
        """Prefill tokens of this step that stay on a straight line to each deadline.

        What is due before the next step ends is demanded whole: it would cut that step in two.
        """
        step = min(self.limit_s, self.longest_s)
        most, total = 0.0, 0
        for prefill in prefills:
            total += prefill.remaining_tokens
            left = prefill.deadline_s - self.start_s
            share = 1.0 if left < 2 * step else step / left
            most = max(most, total * share)
        return math.ceil(most - 1e-9)

    def grant_best_effort(self, requests: Sequence[BestEffortView], kept: int) -> None:
        """What is left, in order; a decode is granted whole or not at all.

        ``kept`` tokens may fill the step up to its limit, the others as far as best effort may.
        """
        for request in requests:
            starts = request.context_tokens == 0 and not request.decoding
            give = 0 if starts and self.seats <= 0 else self._best_effort_share(request, kept)
            if give and starts:
                self.seats -= 1
            kept -= give
            self.add(request.request_id, give, request.context_tokens)

    def _best_effort_share(self, request: BestEffortView, kept: int) -> int:
        wanted, context = request.remaining_tokens, request.context_tokens
        limit = min(self.limit_s, self.limits.best_effort_step_s)
        # A step that would be empty without it is best effort's, however tight the limits.
        least, longest = (kept, self.limit_s) if self.used else (SMALLEST_CHUNK, INFINITY)
        if request.decoding:
            fits = self.fits_decode(longest if least > 0 else limit, wanted, context)
            return wanted if fits else 0
        limit = min(limit, self.limits.best_effort_prompt_s)
        give = min(self.room(limit, context), wanted)
        if give < min(least, wanted):
            give = max(give, min(self.room(longest, context), least, wanted))
        return give

    def plan(self) -> StepPlan:
        predicted = self.model.predict_s(self.used, self.context, pairs=self.pairs)
        predicted = predicted if self.used else 0.0
        return StepPlan(self.used, self.tokens, predicted, self.limit_s, self.deadline_s)


class RecentObjectives:
    """The objectives seen of late, for how long a step of best effort alone may take.

    A request that arrives in the midst of such a step loses what is left of it. With steps of a
    quarter of the tightest TTFT, or twice the tightest TPOT if that is longer, it can still be
    promised something; longer ones would process best effort a little faster.

    Args:
        memory_s: how long an objective is remembered.
    """

    GRID = 1.25
    """Objectives are remembered by octaves of this ratio, so that there are few of them."""

    def __init__(self, memory_s: float = 60.0) -> None:
        self._memory_s = memory_s
        self._ttft: dict[int, float] = {}
        self._tpot: dict[int, float] = {}

    def add(self, ttft_s: float, tpot_s: float, now_s: float) -> None:
        """Note that a request with these objectives (infinite: none) arrived."""
        for seen, objective_s in ((self._ttft, ttft_s), (self._tpot, tpot_s)):
            if 0.0 < objective_s < INFINITY:
                seen[math.floor(math.log(objective_s, self.GRID))] = now_s

    def responsive_step_s(self, now_s: float, shortest_s: float, tpots: float = 2.0) -> float:
        """Longest step for best effort alone; objectives below ``shortest_s`` cannot be kept by
        any step and do not count. Infinite when nothing asks for less. ``tpots`` times the
        tightest TPOT are allowed whatever TTFTs are."""
        ttft = self._tightest(self._ttft, now_s, shortest_s)
        tpot = self._tightest(self._tpot, now_s, shortest_s)
        if ttft == INFINITY:
            return 2.0 * tpot
        return max(0.25 * ttft, tpots * tpot if tpot < INFINITY else 0.0)

    def _tightest(self, seen: dict[int, float], now_s: float, shortest_s: float) -> float:
        for octave in [o for o, at_s in seen.items() if at_s < now_s - self._memory_s]:
            del seen[octave]
        return min((t for o in seen if (t := self.GRID**o) > shortest_s), default=INFINITY)


class Pressure:
    """How hard promises press on best effort, and on drafting: what they lacked of late.

    Prompts of best effort stand back while promises press. In the midst of such a prompt's step an
    arrival loses time that its deadline may not have, and a prompt whose KV is dropped for a
    promise's sake is computed again: under overload that work is the first not to be done. Answers
    that have begun go on.

    Args:
        hold_s: how long one refusal for want of time counts; half of the blocks that promises were
            short of are forgotten in this time.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._refused_s = self._late_s = -INFINITY
        self._blocks = 0.0
        self._noted_s = 0.0

    def refused(self, now_s: float, *, ttft: bool) -> None:
        """Note that a request could not be promised for want of time, and whether it has a TTFT."""
        self._refused_s = now_s
        if ttft:
            self._late_s = now_s

    def first_tokens_late(self, now_s: float) -> bool:
        """Whether somebody's TTFT could not be promised of late."""
        return now_s - self._late_s < self._hold_s

    def short_of(self, blocks: float, now_s: float) -> None:
        """Note that promises were short of so many KV blocks, or took them from best effort."""
        self._blocks = self.blocks(now_s) + blocks
        self._noted_s = now_s

    def prompt_step_s(self, now_s: float, shortest_s: float, *, promises: bool) -> float:
        """Longest step that prompts of best effort may cause: after a refusal none beside live
        ``promises``, and what is nearly free (``shortest_s``: a step of one token) without."""
        if now_s - self._refused_s >= self._hold_s:
            return INFINITY
        return 0.0 if promises else 1.5 * shortest_s

    def blocks(self, now_s: float) -> float:
        """KV blocks that best effort is to leave free when it starts a request."""
        return float(self._blocks * 0.5 ** (max(now_s - self._noted_s, 0.0) / self._hold_s))

    def fits_in_memory(
        self,
        ranked: Sequence[BestEffortView],
        free_blocks: int,
        now_s: float,
        *,
        ageing_s: float,
        promises: bool,
    ) -> list[BestEffortView]:
        """Best effort for which there is memory: what live ``promises`` leave of it, or, for the
        first of those that have waited longer than ``ageing_s``, what there is. Tokens planned for
        one that cannot start would be taken from those who hold the memory it waits for."""
        spare = free_blocks - (self.blocks(now_s) if promises else 0.0)
        aged = next((r for r in ranked if now_s - r.waiting_since_s > ageing_s), None)
        return [
            request
            for request in ranked
            if not request.needed_blocks
            or request.needed_blocks <= (free_blocks if request is aged else spare)
        ]


def rank_best_effort(
    requests: Iterable[BestEffortView], now_s: float, ageing_s: float, starved: str | None = None
) -> list[BestEffortView]:
    """Serving order: the ``starved`` (``StarvationGuard.starved``); answers that have begun, those
    that lost their place too, since fewer at a time end sooner; the others. Of either, those first
    that have waited longer than ``ageing_s``, then those that decode, then as given."""
    return sorted(
        requests,
        key=lambda r: (
            r.request_id != starved,
            not r.begun,
            now_s - r.waiting_since_s <= ageing_s,
            not r.decoding,
        ),
    )


def preemptions(
    needed_blocks: int, free_blocks: int, victims: Sequence[tuple[str, int]]
) -> tuple[str, ...]:
    """Best-effort requests whose KV must go so that promises find ``needed_blocks``.

    Args:
        needed_blocks: blocks that promised requests are about to take.
        free_blocks: blocks nobody holds.
        victims: (request id, blocks it would free), in the order in which they are to give way.

    Returns:
        The shortest prefix of ``victims`` that frees enough; all of them if that is too little.
    """
    chosen: list[str] = []
    for request_id, blocks in victims:
        if free_blocks >= needed_blocks:
            break
        chosen.append(request_id)
        free_blocks += blocks
    return tuple(chosen)
