# SPDX-License-Identifier: Apache-2.0
"""How many tokens of each decoding request the next step verifies, where chains are drafted.

The length of a request counts its last token and the drafts that it keeps. Lengths are planned by
the pace that each TPOT asks for (`core.speculation.draft_lengths`). Then they are cut where the
step would end too late for a request that can still keep its TPOT window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from vllm.v1.request import Request

from vllm_slo.core.batching.step import PATIENT_STEPS
from vllm_slo.core.speculation.acceptance import expected_tokens
from vllm_slo.core.speculation.draft_lengths import (
    LengthPlan,
    fastest_pace_s,
    plan_lengths,
)
from vllm_slo.core.speculation.sparing_length import sparing_length
from vllm_slo.core.speculation.tiers import Tier, gather_tiers
from vllm_slo.core.speculation.window_odds import WindowOdds
from vllm_slo.core.speculation.window_pace import STEP_TIME_MARGIN, stretched_s, working_tpot_s
from vllm_slo.core.types import INFINITY, DecodeView
from vllm_slo.engine.scheduling import request_views
from vllm_slo.engine.scheduling.decode_model import TokenYields
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.responsive_steps import ResponsiveSteps
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.speculation.chain_costs import ChainCosts
from vllm_slo.engine.speculation.no_speculation import wants_no_drafts
from vllm_slo.engine.speculation.tenants import TenantShares

WORTH_GRAPHS = 1.1
"""Output tokens per second that other lengths must promise, over those of full drafts, for a step
to run without full CUDA graphs."""


class _Paced(NamedTuple):
    """A decoding request that keeps a TPOT, before a step.

    Attributes:
        view: what is due of it.
        acceptance: of its drafts.
        fastest_s: seconds per token at the fastest pace that it can be given.
    """

    view: DecodeView
    acceptance: float
    fastest_s: float

    def can_be_saved(self, start_s: float) -> bool:
        """Whether it can still keep its window."""
        return self.view.window_end_s - start_s >= self.view.window_left * self.fastest_s


class ChainLengths:
    """Chooses the lengths of each step.

    Args:
        responsive: how long a step may be that no promise limits.
        tenants: whose drafts are verified beyond those that objectives need; None: the likeliest.
        yields: tokens that steps are expected to yield; this sets those in flight.
        most: drafts of a request at most.
        lowers: whether a step may say how far ahead to draft.
        keeps_graphs: whether only steps of full drafts run with full CUDA graphs.
        max_step_tokens: tokens of one step at most.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        clock: StepClock,
        responsive: ResponsiveSteps,
        costs: ChainCosts,
        tenants: TenantShares | None,
        yields: TokenYields,
        *,
        most: int,
        lowers: bool,
        keeps_graphs: bool,
        max_step_tokens: int,
    ) -> None:
        self._tracker = tracker
        self._clock = clock
        self._responsive = responsive
        self._costs = costs
        self._tenants = tenants
        self._yields = yields
        self._longest = most + 1
        self._lowers = lowers
        self._least_passes = 1 if lowers else 0
        self._keeps_graphs = keeps_graphs
        self._max_step_tokens = max_step_tokens
        self._paced: dict[str, _Paced] = {}
        self._fastest_s: dict[float, float] = {}
        self._odds = self._urgent_odds = WindowOdds(np.ones(self._longest))
        self._stretched_s = self._full_pass_s = 0.0
        self._verifying = costs.base

    def choose(
        self, decoding: Sequence[Request], skips: Sequence[bool], *, prompts: bool, probed: int
    ) -> list[int]:
        """Tokens to verify of each decoding request; there is one at least.

        Args:
            decoding: the requests.
            skips: whether each is to verify no draft.
            prompts: whether the step's time is the prompts' as far as no TPOT needs it.
            probed: place of a request that is to verify a draft at least; -1: none.
        """
        self._paced.clear()
        self._fastest_s.clear()
        context = sum(request.num_computed_tokens for request in decoding)
        clock, costs = self._clock, self._costs
        self._stretched_s = self._responsive.longest_s(clock.promise_model)
        self._verifying = costs.without_passes(
            clock.plain_promise_model if self._lowers else clock.promise_model
        )
        self._full_pass_s = costs.full_pass_s(clock.plain_promise_model, clock.margin)
        tiers, places = gather_tiers([self._pace(r, len(decoding), context) for r in decoding])
        plan = plan_lengths(
            tiers,
            costs.without_passes(clock.plain_promise_model),
            self._longest,
            prompts=prompts,
            context_tokens=context,
            draft_step_s=costs.pass_s(clock.margin),
            least_passes=self._least_passes,
            most_tokens=self._max_step_tokens,
            most_s=self._stretched_s,
        )
        planned: Sequence[int] = plan.lengths
        if prompts and self._least_passes:
            planned = self._sparing(tiers, planned, context)
        if self._keeps_graphs and not prompts and not self._beats_full_length(plan, tiers, context):
            planned = [self._longest] * len(tiers)
        lengths = [1 if skip else planned[place] for skip, place in zip(skips, places, strict=True)]
        if probed >= 0 and not skips[probed]:
            lengths[probed] = max(lengths[probed], 2)
        if self._tenants is not None:
            lengths = self._divided(self._tenants, decoding, skips, lengths)
        self._odds = self._find_odds(decoding, lengths, context)
        self._urgent_odds = self._find_urgent_odds(lengths, context)
        return self._in_time(decoding, lengths, context)

    def _sparing(self, tiers: Sequence[Tier], lengths: Sequence[int], context: int) -> list[int]:
        """Lengths beside prompts: none is shorter than the one that takes least time from them,
        where requests are taken to have contexts of one length."""
        requests = max(sum(tier.requests for tier in tiers), 1)
        model, each = self._verifying, context / requests
        token_s = max(slope for slope, _, _ in model.terms) + model.pair_s * each
        pass_s = self._full_pass_s / requests
        return [
            max(
                length,
                sparing_length(
                    tier.acceptance,
                    self._longest,
                    token_s=token_s,
                    reading_s=model.kv_s * each,
                    pass_s=pass_s,
                ),
            )
            for tier, length in zip(tiers, lengths, strict=True)
        ]

    def expected(self, request: Request) -> float | None:
        """Tokens that the step is to yield of a request, with the drafts that it was left; None: it
        has no objective to plan for."""
        paced = self._paced.get(request.request_id)
        if paced is None:
            return None
        return self._counted(self._clock.start_s, paced, 1 + len(request.spec_token_ids))

    def spare_s(self, request: Request) -> float:
        """As in `DecodeView`, of a request that has an objective to plan for."""
        paced = self._paced[request.request_id]
        return self._urgent_odds.spare_s(self._clock.start_s, paced.view, paced.acceptance)

    def _divided(
        self,
        tenants: TenantShares,
        decoding: Sequence[Request],
        skips: Sequence[bool],
        lengths: Sequence[int],
    ) -> list[int]:
        """Lengths with the same sum, where the drafts that no objective needs are divided among
        tenants. None is longer than the longest was, so that the draft makes no further pass."""
        drafts = [length - 1 for length in lengths]
        names = [request.request_id for request in decoding]
        least = [n if name in self._paced else 0 for name, n in zip(names, drafts, strict=True)]
        most = [0 if skip else max(drafts) for skip in skips]
        return [1 + n for n in tenants.divide(names, sum(drafts), least, most)]

    def _find_odds(
        self, decoding: Sequence[Request], lengths: Sequence[int], context: int
    ) -> WindowOdds:
        """The odds of TPOT windows in steps of 1, 2, .. tokens of each request whose window needs
        them. The other requests keep to ``lengths``."""
        start_s = self._clock.start_s
        plain_s = STEP_TIME_MARGIN * self._step_s(len(decoding), 1, context)
        paced = [self._paced.get(request.request_id) for request in decoding]
        needy = [
            p is not None and p.view.window_end_s - start_s < plain_s * p.view.window_left
            for p in paced
        ]
        counts = np.where(needy, self._longest, lengths)
        step_s = [
            self._step_s(int(np.minimum(counts, n).sum()), n, context)
            for n in range(1, self._longest + 1)
        ]
        return WindowOdds(np.array(step_s))

    def _find_urgent_odds(self, lengths: Sequence[int], context: int) -> WindowOdds:
        """The odds in steps of those alone that cannot wait for `PATIENT_STEPS` steps of all, whose
        contexts are taken to be of one length."""
        all_s = self._step_s(sum(lengths), max(lengths), context)
        soon_s = self._clock.start_s + PATIENT_STEPS * all_s
        urgent = max(sum(paced.view.due_s < soon_s for paced in self._paced.values()), 1)
        part = context * urgent // len(lengths)
        return WindowOdds(
            np.array([self._step_s(n * urgent, n, part) for n in range(1, self._longest + 1)])
        )

    def _step_s(self, tokens: int, length: int, context: int) -> float:
        """Seconds of a step that verifies so many tokens, at most ``length`` of a request, if the
        steps before and after it draft as much."""
        passes_s = max(length - 1, 1) * self._full_pass_s
        return self._verifying.predict_s(tokens, context) + passes_s

    def _in_time(self, decoding: Sequence[Request], lengths: list[int], context: int) -> list[int]:
        """Lengths cut until the step ends in time for each request that can still keep its window.
        ``plan_lengths`` knows paces, not how much of its window a request has left."""
        start_s = self._clock.start_s
        found = ((at, self._paced.get(r.request_id)) for at, r in enumerate(decoding))
        hurried = [(at, p) for at, p in found if p is not None and p.can_be_saved(start_s)]
        for longest in range(max(lengths), 0, -1):
            cut = [min(length, longest) for length in lengths]
            took_s = self._step_s(sum(cut), longest, context)
            if all(took_s <= self._limit_s(start_s, p, cut[at]) for at, p in hurried):
                return cut
        surest = max(self._odds.surest_length(start_s, p.view, p.acceptance) for _, p in hurried)
        return [min(length, surest) for length in lengths]

    def _limit_s(self, start_s: float, paced: _Paced, length: int) -> float:
        """Seconds of the longest step that a request allows if ``length`` of its tokens are
        verified."""
        return stretched_s(start_s, paced.view, self._counted(start_s, paced, length))

    def _counted(self, start_s: float, paced: _Paced, length: int) -> float:
        """Tokens of a request that a step which verifies ``length`` of them may be stretched for.
        Prompts that arrive during the step wait for its end, so these bound it, too."""
        counted = self._odds.counted_tokens(start_s, paced.view, paced.acceptance, length)
        return min(counted, max(self._stretched_s / paced.view.tpot_s, 1.0))

    def _pace(self, request: Request, requests: int, context: int) -> tuple[float, float]:
        """(seconds per token to plan a request by, acceptance of its drafts)."""
        tracked = self._tracker.get(request.request_id)
        acceptance = 0.0 if wants_no_drafts(tracked) else self._costs.acceptance_of(tracked)
        if tracked is None or not _is_planned_for(tracked):
            return INFINITY, acceptance
        if acceptance not in self._fastest_s:
            self._fastest_s[acceptance] = fastest_pace_s(
                acceptance,
                requests,
                self._costs.without_passes(self._clock.plain_promise_model),
                self._longest,
                context_tokens=context,
                draft_step_s=self._costs.pass_s(self._clock.margin),
                least_passes=self._least_passes,
            )
        view, fastest_s = self._view(tracked, acceptance), self._fastest_s[acceptance]
        self._paced[request.request_id] = _Paced(view, acceptance, fastest_s)
        return working_tpot_s(self._clock.start_s, view, fastest_s), acceptance

    def _view(self, tracked: SLORequest, acceptance: float) -> DecodeView:
        """A decoding request before the step, which is expected to yield a token of it. Some of its
        drafts in flight will be rejected."""
        name, placeholders = tracked.request.request_id, tracked.request.num_output_placeholders
        if placeholders > 1:
            self._yields.in_flight[name] = expected_tokens(acceptance, placeholders)
        return request_views.decode_view(
            tracked,
            self._clock.start_s,
            self._clock.strength,
            self._yields.next_step.get(name, 1.0),
            self._yields.in_flight.get(name),
        )

    def _beats_full_length(self, plan: LengthPlan, tiers: Sequence[Tier], context: int) -> bool:
        """Whether the planned lengths yield so much more than full drafts that a step gives up its
        CUDA graphs for them."""
        longest = self._longest
        tokens = sum(tier.requests for tier in tiers) * longest
        took_s = self._clock.promise_model.predict_s(tokens, context)
        full = [expected_tokens(tier.acceptance, longest) for tier in tiers]
        if any(t.tpot_s * gives < took_s for t, gives in zip(tiers, full, strict=True)):
            return True
        gives = sum(t.requests * each for t, each in zip(tiers, full, strict=True))
        return plan.per_second > WORTH_GRAPHS * gives / took_s


def _is_planned_for(tracked: SLORequest) -> bool:
    holds = tracked.promised or tracked.holds_tpot
    return holds and tracked.tpot_s < INFINITY and tracked.decodes
