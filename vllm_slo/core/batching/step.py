# SPDX-License-Identifier: Apache-2.0
"""What one engine step may do: SLOs-Serve's batch formation (section 3.2.2, algorithm 2).

A step takes as long as the tightest promise allows, and no longer; its tokens go, in this order, to

1. decodes whose next token would be late if they waited for the step after this one,
2. promised prefills by earliest deadline, as far as their deadlines ask for it now,
3. the other promised decodes by earliest due time,
4. the rest of the promised prefills,
5. best effort, in the order given.

Algorithm 2 fixes the step at the tightest TPOT. Here a request that is ahead of its schedule lends
its slack, and one that fell behind spreads the catching up over the rest of its window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_slo.core.batching.decodes import EPS_S, Decodes, Part
from vllm_slo.core.batching.prompt_pace import SMALLEST_CHUNK, UNPACED, PromptPace, prompt_pace
from vllm_slo.core.step_time.model import StepTimeModel, chunk_pairs
from vllm_slo.core.types import INFINITY, BestEffortView, DecodeView, PrefillView, StepPlan

PATIENT_STEPS = 3
"""A decode whose next token is due after so many steps of all decodes may be left out, when the
shortest step is sought. Measured: with 2 an end-to-end promise among equally urgent answers was
broken by 1%, with 6 short TPOTs were given up (tests of sessions and of batches)."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds that do not come from promises.

    Attributes:
        max_step_tokens: most tokens of one step.
        best_effort_tokens: tokens kept for best effort before any promised prefill.
        best_effort_step_s: longest step that best effort alone may cause; see
            ``RecentObjectives``.
        seats: waiting requests that may start in this step.
        spread_prompts: whether prompts are spread over the free tokens of steps, see
            ``prompt_pace``; not where drafts are verified in these tokens.
    """

    max_step_tokens: int
    best_effort_tokens: int = 0
    best_effort_step_s: float = INFINITY
    seats: int = 1 << 30
    spread_prompts: bool = True


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
    limit = decodes.limit_s(start_s, *_shortest_s(start_s, decodes, model))
    batch.set_limits(limit, _meet_next_deadline(batch, limit, decodes, prefills))
    # Decodes that must be in this step, and those that may wait for the next.
    urgent, patient = decodes.parted(start_s + 2 * min(batch.limit_s, batch.longest_s) - EPS_S)
    batch.grant_decodes(urgent, forced=True)
    kept = batch.reserve(
        min(limits.best_effort_tokens, sum(b.remaining_tokens for b in best_effort))
    )
    if limits.spread_prompts:
        batch.pace = _prompt_pace(batch, decodes, prefills, best_effort)
    held = batch.grant_prefills(prefills, may_start, patient.tokens)
    batch.grant_decodes(patient, forced=False)
    batch.grant_prefills(prefills, may_start, 0, held)
    batch.release(kept)
    batch.grant_best_effort(best_effort, kept)
    if kept:  # tokens that best effort could not use, for want of a seat
        batch.grant_lacking(patient)
        batch.grant_prefills(prefills, may_start, 0, held)
    if held and not batch.used:  # an empty step would gain nothing by holding back
        batch.grant_prefills(prefills, lambda _: True, 0)
    return batch.plan()


def _shortest_s(start_s: float, decodes: Decodes, model: StepTimeModel) -> tuple[float, float]:
    """Seconds of a step of those decodes that cannot wait for `PATIENT_STEPS`, and of all."""
    tokens, context, pairs = decodes.load()
    all_s = model.predict_s(tokens, context, pairs=pairs)
    tokens, context, pairs = decodes.load_before(start_s + PATIENT_STEPS * all_s)
    return model.predict_s(tokens, context, pairs=pairs), all_s


def _prompt_pace(
    batch: _Batch,
    decodes: Decodes,
    prefills: Sequence[PrefillView],
    best_effort: Sequence[BestEffortView],
) -> PromptPace:
    """`prompt_pace` beside all that may decode in this step."""
    tokens, context, pairs = decodes.load()
    prompts = []
    for request in best_effort:
        if request.decoding:
            tokens += request.remaining_tokens
            context += request.context_tokens
            pairs += chunk_pairs(request.remaining_tokens, request.context_tokens)
        else:
            prompts.append(request)
    load = tokens, context, pairs
    return prompt_pace(batch.start_s, load, prefills, prompts, batch.model)


def _meet_next_deadline(
    batch: _Batch,
    limit: float,
    decodes: Decodes,
    prefills: Sequence[PrefillView],
) -> float:
    """Shorten the step where that lets the most urgent prefills end in time.

    If the step would overrun a deadline, it ends there, provided that it can then hold what is
    still due. A deadline that cannot be met at all shortens no step.
    """
    model = batch.model
    decoding, context, decode_pairs = decodes.load()
    due = ahead = pairs = 0
    for prefill in prefills:
        due += prefill.remaining_tokens
        ahead += prefill.context_tokens
        pairs += chunk_pairs(prefill.remaining_tokens, prefill.context_tokens)
        left = prefill.deadline_s - batch.start_s
        full = min(limit, model.predict_s(batch.limits.max_step_tokens, ahead + context))
        if left >= 2 * full:
            break
        needed = model.predict_s(due + decoding, ahead + context, pairs=pairs + decode_pairs)
        following = model.predict_s(decoding + 1, ahead + context)
        if needed > left + EPS_S:  # with the decodes that cannot wait for the step after
            tokens, held, more = decodes.load_before(prefill.deadline_s + max(left, following))
            needed = model.predict_s(due + tokens, ahead + held, pairs=pairs + more)
        # Ends in this step only if the next one would come too late for it.
        if needed <= left + EPS_S and left < full + following:
            limit = min(limit, max(left, needed))
    return limit


class _Batch:
    """The step while it is being filled."""

    def __init__(self, start_s: float, model: StepTimeModel, limits: StepLimits) -> None:
        self.start_s = start_s
        self.model = model
        self.limits = limits
        self.limit_s = INFINITY
        self.deadline_s = INFINITY
        self.pace = UNPACED
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

    def headroom(self, limit_s: float, context: int, granted: int = 0) -> int:
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

    def grant_decodes(self, decodes: Part, *, forced: bool) -> None:
        """Grant one decode step each, by due time where not all fit.

        ``forced`` ones are granted beyond the limit, up to the engine's own: all of them slightly
        late is better than some of them far too late.
        """
        limit = INFINITY if forced else self.limit_s
        tokens, context, pairs = decodes.tokens, decodes.context_tokens, decodes.pairs
        after = self.used + self.reserved + tokens
        if after <= self.limits.max_step_tokens and (
            forced
            or self.model.predict_s(after, self.context + context, pairs=self.pairs + pairs)
            <= limit
        ):
            self.tokens.update(decodes.grants())
            self.used += tokens
            self.context += context
            self.pairs += pairs
            return
        for request_id, tokens, context in decodes.by_due():
            fits = self.fits_decode(limit, tokens, context)
            self.add(request_id, tokens if fits else 0, context)

    def grant_lacking(self, decodes: Part) -> None:
        """Grant those a decode step that have none so far, as far as they fit."""
        for request_id, tokens, context in decodes.by_due():
            if not self.tokens[request_id] and self.fits_decode(self.limit_s, tokens, context):
                self.add(request_id, tokens, context)

    def grant_prefills(
        self,
        prefills: Sequence[PrefillView],
        may_start: Callable[[PrefillView], bool],
        spared: int,
        held: frozenset[str] | None = None,
    ) -> frozenset[str]:
        """Grant prefill by earliest deadline; returns the requests whose first token is held back.

        With ``spared`` > 0 that many tokens are left for further decodes, as far as the deadlines
        do not need them by the end of this step. A second call then grants the rest.
        """
        holding = set() if held is None else set(held)
        urgent_only = spared > 0 and held is None
        demanded = self._demanded(prefills) if urgent_only else 0
        granted = 0
        for prefill in prefills:
            already = self.tokens.get(prefill.request_id, 0)
            left = prefill.remaining_tokens - already
            want = min(left, self.pace.promised)
            if want <= 0 or (prefill.starts and not already and self.seats <= 0):
                self.add(prefill.request_id, 0, 0)
                continue
            most = self.headroom(self.limit_s, prefill.context_tokens, already)
            if urgent_only:
                most = min(most, max(most - spared, demanded - granted))
            give = min(want, most)
            if 0 < give == left and self._ends_early(prefill, may_start, holding):
                give -= 1
            if give > 0 and not already and prefill.starts:
                self.seats -= 1
            granted += give
            self.pace = self.pace._replace(promised=self.pace.promised - max(give, 0))
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
        """Prefill tokens that this step must do to stay on a straight line to each deadline.

        A prompt that is due before the next step ends must be done now: its deadline would cut that
        step in two.
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
        """Grant what is left, in order; a decode is granted whole or not at all.

        ``kept`` tokens may fill the step up to its limit. Further ones may fill it only up to the
        limits of best effort.
        """
        for request in requests:
            give = (
                0 if request.starts and self.seats <= 0 else self._best_effort_share(request, kept)
            )
            if give and request.starts:
                self.seats -= 1
            kept -= give
            self.add(request.request_id, give, request.context_tokens)

    def _best_effort_share(self, request: BestEffortView, kept: int) -> int:
        wanted, context = request.remaining_tokens, request.context_tokens
        limit = min(self.limit_s, self.limits.best_effort_step_s)
        # A step that would be empty otherwise gets some tokens, however tight the limits.
        least, longest = (kept, self.limit_s) if self.used else (SMALLEST_CHUNK, INFINITY)
        if request.decoding:
            fits = self.fits_decode(longest if least > 0 else limit, wanted, context)
            return wanted if fits else 0
        give = min(self.headroom(limit, context), wanted, self.pace.best_effort)
        if give < min(least, wanted):
            give = max(give, min(self.headroom(longest, context), least, wanted))
        self.pace = self.pace._replace(best_effort=max(self.pace.best_effort - give, 0))
        return give

    def plan(self) -> StepPlan:
        predicted = self.model.predict_s(self.used, self.context, pairs=self.pairs)
        predicted = predicted if self.used else 0.0
        return StepPlan(self.used, self.tokens, predicted, self.limit_s, self.deadline_s)
