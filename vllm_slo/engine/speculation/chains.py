# SPDX-License-Identifier: Apache-2.0
"""Draft lengths by SLO for vLLM's own chains of drafts: ``ngram``, ``draft_model``, ``eagle``, ...

vLLM's proposers give every request the same number of drafts. Here each request keeps the first few
of them before a step is planned (``propose``): as many as its objective needs and the step has room
for, see ``core.speculation.draft_lengths``. That is safe with every method and runner, as drafts of
any length happen anyway (a lookup that finds less, a grammar, a token budget). Asynchronous
scheduling stays as vLLM has it: there drafts are placeholders, one list for all requests, so a
request gets a slice of its own and the list is never changed.

A draft that nobody verifies was drafted in vain. vLLM 0.32 lets a step say how far ahead its
proposer is to guess (``SchedulerOutput.num_spec_tokens_to_schedule``, made for "dynamic speculative
decoding"); it is lowered (``attach``) to the longest length planned, but only where vLLM supports
that and where it saves passes of a model:

* methods that draft token by token with a model; others assert the full number (``ngram_gpu``,
  ``suffix``, ``medusa``), guess all at once, or look drafts up for nothing (``ngram``);
* the V1 model runner without full CUDA graphs: those are captured for one length, and the V2 runner
  captures graphs for the lengths configured at its start;
* no data parallelism: ranks must not draft in different numbers of passes;
* no schedule of lengths by batch size that the user has configured.

Where full CUDA graphs are on, a step whose drafts are not all of full length runs without them.
Beside prompts that is so anyway; otherwise lengths change only for a clear gain.

Nothing is trimmed while no live request carries an SLO.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.admission.program import Speculated
from vllm_slo.core.speculation.acceptance import expected_tokens
from vllm_slo.core.speculation.draft_lengths import (
    LengthPlan,
    fastest_pace_s,
    plan_lengths,
    warm_up,
)
from vllm_slo.core.speculation.tiers import Tier, gather_tiers
from vllm_slo.core.speculation.window_odds import WindowOdds
from vllm_slo.core.speculation.window_pace import (
    STEP_TIME_MARGIN,
    stretched_s,
    working_tpot_s,
)
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.core.types import INFINITY, DecodeView
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling import request_facts, request_views
from vllm_slo.engine.scheduling.decode_model import TokenYields, WayToDecode
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.responsive_steps import ResponsiveSteps
from vllm_slo.engine.scheduling.slo_request import UNLABELLED, SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.step_schedule import StepSchedule
from vllm_slo.engine.speculation.chain_costs import ChainCosts
from vllm_slo.engine.speculation.tenants import TenantShares, Verified
from vllm_slo.engine.telemetry.speculation_metrics import SpeculationMetrics

PROBE_EVERY = 4
"""Steps after which one request, each in turn, verifies a draft at least: what is never tried is
never learnt."""
TRY_EVERY = 64
"""Steps after which the draft makes one pass more or less, so that its price is known."""
STRETCHED_TPOTS = 1.0
"""Of the tightest TPOT: how long drafts may make a step though a TTFT is so tight that what arrives
in its midst would wait too long."""
WORTH_GRAPHS = 1.1
"""Output tokens per second that lengths must promise, over those of full drafts, for a step to run
without full CUDA graphs."""
STEP_BY_STEP = "draft_model", "eagle", "eagle3", "mtp"
LOOKED_UP = "ngram", "ngram_gpu", "suffix"
"""Methods that may find nothing to draft."""


def trims(config: VllmConfig) -> bool:
    """Whether this engine drafts chains whose lengths may be chosen."""
    spec = config.speculative_config
    return (
        spec is not None
        and bool(spec.num_speculative_tokens)
        and not spec.uses_extract_hidden_states()
    )


def may_lower_depth(config: VllmConfig) -> bool:
    """Whether a step may say how far ahead to draft, and saves time by that."""
    spec = config.speculative_config
    return (
        spec is not None
        and spec.method in STEP_BY_STEP
        and not spec.parallel_drafting
        and not spec.use_multi_module_mtp()
        and not spec.uses_dynamic_speculative_decoding()
        and config.parallel_config.data_parallel_size == 1
        and not config.use_v2_model_runner
        and not config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    )


class _Sent(NamedTuple):
    """A step on its way.

    Attributes:
        planned: request -> tokens to verify of it; those that start are left out.
        passes: of the draft.
        drafting_s: seconds that they are believed to take.
        verifying_s: what the step takes without them, uncorrected; 0 where it computes prompts.
    """

    planned: dict[str, int]
    passes: int
    drafting_s: float
    verifying_s: float


class _Paced(NamedTuple):
    """A decoding request that keeps a TPOT, before a step.

    Attributes:
        view: what is due of it.
        acceptance: of its drafts.
        fastest_s: seconds per token that it can be brought to.
    """

    view: DecodeView
    acceptance: float
    fastest_s: float

    def can_be_saved(self, start_s: float) -> bool:
        """Whether its window is not lost."""
        return self.view.window_end_s - start_s >= self.view.window_left * self.fastest_s


class Chains:
    """Chooses how many of its drafts each request keeps, and how far ahead to draft; a
    `Speculation`.

    Args:
        state: whose requests it reads; of these it sets ``spec_token_ids``.
        tracker: the requests that carry an SLO.
        clock: step times; it is told how long drafting takes.
        responsive: how long a step may be that best effort alone causes.
        metrics: where lengths are counted.
        tenants: whose drafts are verified beyond what objectives need; None: the likeliest.
        config: how TPOTs are judged.
        max_step_tokens: tokens of one step at most.

    Attributes:
        acceptance: what has been learnt of it, by class.
        draft_padding: placeholders of drafts that vLLM adds to a request that starts.
        yields: tokens that steps are expected to yield, of requests with a TPOT.
    """

    speculates = True

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        clock: StepClock,
        responsive: ResponsiveSteps,
        metrics: SpeculationMetrics,
        tenants: TenantShares | None,
        config: SLOConfig,
        max_step_tokens: int,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._clock = clock
        self._responsive = responsive
        self._metrics = metrics
        self._tenants = tenants
        self._max_step_tokens = max_step_tokens
        self.yields = TokenYields()
        vllm_config = state.vllm_config
        self._most = self.draft_padding = state.num_spec_tokens
        self._may_miss = vllm_config.speculative_config.method in LOOKED_UP
        self._lowers = may_lower_depth(vllm_config)
        self._costs = ChainCosts(
            state, tracker, clock, config, most=self._most, lowers=self._lowers
        )
        self.acceptance = self._costs.acceptance
        self._least_passes = 1 if self._lowers else 0
        self._graphs = vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        # The V1 runner finds the drafts of an asynchronous step in those of the step before it.
        self._only_of_last = (
            vllm_config.scheduler_config.async_scheduling and not vllm_config.use_v2_model_runner
        )
        self._was_active = False
        self._depth = self._most
        self._steps = 0
        self._waiting = 0
        self._computed_prompts = False
        self._planned: dict[str, int] = {}
        self._paced: dict[str, _Paced] = {}
        self._fastest_s: dict[float, float] = {}
        self._odds = WindowOdds(np.ones(self._most + 1))
        self._stretched_s = self._paid_s = 0.0
        self._verifying = self._costs.base
        self._flight: deque[_Sent] = deque()
        warm_up()
        self._odds.sure_s(0.5, 1.0)  # compiles it now instead of in the first step

    # Before a step is planned.

    def propose(self, *, active: bool) -> None:
        """Leave each request the drafts that the step is to verify; decide how far ahead to draft
        after it. Where steps are not planned (``active`` is false), nothing is trimmed."""
        self._costs.begin_step()
        self.yields.next_step.clear()
        self.yields.in_flight.clear()
        decoding = [r for r in self._state.running if request_facts.is_decoding(r)]
        if active:
            lengths = self._lengths(decoding)
        else:
            if self._was_active:
                self._drop_stale(decoding)
            lengths = [self._most + 1] * len(decoding)
            self._draft_ahead(self._most)
        self._was_active = active
        self._planned = dict(zip((r.request_id for r in decoding), lengths, strict=True))
        if active:
            for request, length in zip(decoding, lengths, strict=True):
                if len(request.spec_token_ids) >= length:
                    request.spec_token_ids = request.spec_token_ids[: length - 1]
                self._expect(request)

    def _lengths(self, decoding: Sequence[Request]) -> list[int]:
        """Tokens to verify of each decoding request."""
        prompts = self._prompts_wait(len(decoding))
        if not decoding:
            return []
        self._paced.clear()
        self._fastest_s.clear()
        context = sum(request.num_computed_tokens for request in decoding)
        steps = self._clock
        self._stretched_s = self._responsive.longest_s(steps.promise_model, STRETCHED_TPOTS)
        self._verifying = self._costs.without_passes(
            steps.plain_promise_model if self._lowers else steps.promise_model
        )
        self._paid_s = self._costs.full_pass_s(steps.plain_promise_model, steps.margin)
        tiers, places = gather_tiers([self._pace(r, len(decoding), context) for r in decoding])
        plan = plan_lengths(
            tiers,
            self._costs.without_passes(steps.plain_promise_model),
            self._most + 1,
            prompts=prompts,
            context_tokens=context,
            draft_step_s=self._costs.pass_s(steps.margin),
            least_passes=self._least_passes,
            most_tokens=self._max_step_tokens,
            most_s=self._stretched_s,
        )
        self._steps += 1
        chosen: Sequence[int] = plan.lengths
        if self._graphs and not prompts and not self._beats_full_length(plan, tiers, context):
            chosen = [self._most + 1] * len(tiers)
        lengths = [
            1 if self._skips_drafting(request) else chosen[place]
            for request, place in zip(decoding, places, strict=True)
        ]
        if self._steps % PROBE_EVERY == 0:
            probed = self._steps // PROBE_EVERY % len(decoding)
            if not self._skips_drafting(decoding[probed]):
                lengths[probed] = max(lengths[probed], 2)
        if self._tenants is not None:
            lengths = self._divided(self._tenants, decoding, lengths)
        self._odds = self._find_odds(decoding, lengths, context)
        lengths = self._in_time(decoding, lengths, context)
        self._draft_ahead(max(lengths) - 1 + self._trial())
        return lengths

    def _divided(
        self, tenants: TenantShares, decoding: Sequence[Request], lengths: Sequence[int]
    ) -> list[int]:
        """As many tokens of a step, what objectives do not need of them divided among tenants. No
        request gets more than the longest one, so that the draft makes no further pass."""
        drafts = [length - 1 for length in lengths]
        least = [
            n if request.request_id in self._paced else 0
            for request, n in zip(decoding, drafts, strict=True)
        ]
        most = [0 if self._skips_drafting(request) else max(drafts) for request in decoding]
        names = [request.request_id for request in decoding]
        return [1 + n for n in tenants.divide(names, sum(drafts), least, most)]

    def _find_odds(
        self, decoding: Sequence[Request], lengths: Sequence[int], context: int
    ) -> WindowOdds:
        """What steps do for windows in which those verify more that cannot do without; the others
        keep to these lengths."""
        start_s, most_s = (
            self._clock.start_s,
            STEP_TIME_MARGIN * self._step_s(len(decoding), 1, context),
        )
        needy = [
            one is not None and one.view.window_end_s - start_s < most_s * one.view.window_left
            for one in (self._paced.get(request.request_id) for request in decoding)
        ]
        counts = np.where(needy, self._most + 1, lengths)
        return WindowOdds(
            np.array(
                [
                    self._step_s(int(np.minimum(counts, n).sum()), n, context)
                    for n in range(1, self._most + 2)
                ]
            )
        )

    def _step_s(self, tokens: int, length: int, context: int) -> float:
        """Seconds of a step that verifies so many tokens, ``length`` of a request at most, where
        steps go on like that."""
        passes_s = max(length - 1, 1) * self._paid_s
        return self._verifying.predict_s(tokens, context) + passes_s

    def _in_time(self, decoding: Sequence[Request], lengths: list[int], context: int) -> list[int]:
        """Lengths cut until a step of everybody ends in time for each whose window can be saved:
        ``plan_lengths`` knows paces, not how much of its window a request has left."""
        start_s = self._clock.start_s
        found = ((at, self._paced.get(r.request_id)) for at, r in enumerate(decoding))
        hurried = [(at, one) for at, one in found if one is not None and one.can_be_saved(start_s)]
        for longest in range(max(lengths), 0, -1):
            cut = [min(length, longest) for length in lengths]
            took_s = self._step_s(sum(cut), longest, context)
            if all(took_s <= self._limit_s(start_s, one, cut[at]) for at, one in hurried):
                return cut
        surest = max(
            self._odds.surest_length(start_s, one.view, one.acceptance) for _, one in hurried
        )
        return [min(length, surest) for length in lengths]

    def _limit_s(self, start_s: float, one: _Paced, length: int) -> float:
        """Longest step that a request allows of which ``length`` tokens are verified."""
        return stretched_s(start_s, one.view, self._counted(start_s, one, length))

    def _counted(self, start_s: float, one: _Paced, length: int) -> float:
        """Tokens that a step may be stretched for that verifies ``length`` of a request. Prompts
        that arrive in its midst wait for its end."""
        counted = self._odds.counted_tokens(start_s, one.view, one.acceptance, length)
        return min(counted, max(self._stretched_s / one.view.tpot_s, 1.0))

    def _prompts_wait(self, decoding: int) -> bool:
        """Whether the step's time is to be the prompts' as far as possible: some are being
        computed, or may begin. Those that wait for a seat, or for memory, cannot use it."""
        state = self._state
        waiting = len(state.waiting) + len(state.waiting_with_blocks)
        arrived, self._waiting = waiting > self._waiting, waiting
        if len(state.running) > decoding:
            return True
        return waiting > 0 and (arrived or self._computed_prompts)

    def _pace(self, request: Request, requests: int, context: int) -> tuple[float, float]:
        """(seconds per token to plan a request by, acceptance of its drafts)."""
        tracked = self._tracker.get(request.request_id)
        acceptance = 0.0 if self._is_silent(tracked) else self._acceptance(tracked)
        if tracked is None or not self._is_planned_for(tracked):
            return INFINITY, acceptance
        if acceptance not in self._fastest_s:
            self._fastest_s[acceptance] = fastest_pace_s(
                acceptance,
                requests,
                self._costs.without_passes(self._clock.plain_promise_model),
                self._most + 1,
                context_tokens=context,
                draft_step_s=self._costs.pass_s(self._clock.margin),
                least_passes=self._least_passes,
            )
        view, fastest_s = self._view(tracked, acceptance), self._fastest_s[acceptance]
        self._paced[request.request_id] = _Paced(view, acceptance, fastest_s)
        return working_tpot_s(self._clock.start_s, view, fastest_s), acceptance

    def _view(self, tracked: SLORequest, acceptance: float) -> DecodeView:
        """A decoding request before the step, a token of it being expected. Of drafts in flight
        some will be rejected."""
        name, placeholders = tracked.request.request_id, tracked.request.num_output_placeholders
        if placeholders > 1:
            self.yields.in_flight[name] = expected_tokens(acceptance, placeholders)
        return request_views.decode_view(
            tracked,
            self._clock.start_s,
            self._clock.strength,
            self.yields.next_step.get(name, 1.0),
            self.yields.in_flight.get(name),
        )

    def _is_planned_for(self, tracked: SLORequest) -> bool:
        return (
            (tracked.promised or tracked.holds_tpot)
            and tracked.tpot_s < INFINITY
            and tracked.decodes
        )

    def _is_silent(self, tracked: SLORequest | None) -> bool:
        """Whether a request, or its class, wants nothing drafted."""
        return tracked is not None and tracked.slo.speculation == "off"

    def _skips_drafting(self, request: Request) -> bool:
        """Whether a request is to verify no draft, or has none but placeholders."""
        return self._is_stale(request) or self._is_silent(self._tracker.get(request.request_id))

    def _is_stale(self, request: Request) -> bool:
        """Whether its drafts are placeholders of a step that the runner has forgotten."""
        last = self._state.in_last_step
        return self._only_of_last and request.request_id not in last

    def _drop_stale(self, decoding: Sequence[Request]) -> None:
        """After the last step that was planned here, take the drafts of requests that it left out:
        vLLM would have them verified, and nobody knows what they are."""
        for request in decoding:
            if self._is_stale(request):
                request.spec_token_ids = []

    def _acceptance(self, tracked: SLORequest | None) -> float:
        return self.acceptance.acceptance(_label(tracked))

    def _beats_full_length(self, plan: LengthPlan, tiers: Sequence[Tier], context: int) -> bool:
        """Whether lengths yield so much more than full drafts do that graphs are given up for
        them."""
        longest = self._most + 1
        tokens = sum(tier.requests for tier in tiers) * longest
        took_s = self._clock.promise_model.predict_s(tokens, context)
        full = [expected_tokens(tier.acceptance, longest) for tier in tiers]
        if any(t.tpot_s * gives < took_s for t, gives in zip(tiers, full, strict=True)):
            return True
        gives = sum(t.requests * one for t, one in zip(tiers, full, strict=True))
        return plan.per_second > WORTH_GRAPHS * gives / took_s

    def _expect(self, request: Request) -> None:
        """Say how many tokens the step is to yield of a request with an objective."""
        one = self._paced.get(request.request_id)
        if one is not None:
            counted = self._counted(self._clock.start_s, one, 1 + len(request.spec_token_ids))
            self.yields.next_step[request.request_id] = counted

    # How far ahead to draft, and what promises may count on.

    def _draft_ahead(self, depth: int) -> None:
        """Draft so far ahead after the step, where that can be said. The first pass is made in any
        case: the draft has to read what the target has read."""
        if self._lowers:
            self._depth = min(max(depth, 1), self._most)
            self._clock.drafting(self._depth * self._costs.pass_s(), 0.0, self._depth)

    def _trial(self) -> int:
        """A pass more or less than planned, now and then."""
        if self._steps % TRY_EVERY:
            return 0
        return 1 if self._steps // TRY_EVERY % 2 else -1

    def plain(self) -> StepTimeModel:
        """Steps without drafts, for promises."""
        return self._costs.plain()

    def speculative(self, tpot_s: float) -> WayToDecode | None:
        """Decoding with drafts that keeps a TPOT, for promises to count on."""
        return self._costs.speculative(tpot_s)

    def sustainable(self, tpot_s: float) -> tuple[float, Speculated]:
        """How many requests keep a TPOT together, and with what drafts."""
        return self._costs.sustainable(tpot_s)

    # With a step.

    def select(self, _schedule: StepSchedule | None) -> None:
        """Lengths were chosen before the step was planned."""

    def attach(self, output: SchedulerOutput, shape: BatchShape) -> BatchShape:
        """Say with a step how far ahead to draft; its shape with the passes that it will make."""
        if not output.num_scheduled_tokens:
            return replace(shape, spec_steps=0)
        if self._depth < output.num_spec_tokens_to_schedule:
            output.num_spec_tokens_to_schedule = self._depth
            for name in output.num_scheduled_tokens:
                request = self._state.requests[name]
                if len(request.spec_token_ids) > self._depth:
                    request.spec_token_ids = request.spec_token_ids[: self._depth]
        passes = output.num_spec_tokens_to_schedule if self._lowers else 0
        self._costs.follow_base()
        drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        tokens = len(output.num_scheduled_tokens) + drafts
        self._computed_prompts = output.total_num_scheduled_tokens > tokens
        # Fits to live steps leave the passes out: of one number only they would learn nothing.
        shape = replace(shape, spec_steps=0 if self._clock.estimator.learn else passes)
        verifying_s = 0.0 if self._computed_prompts else self._costs.base.predict_shape_s(shape)
        self._flight.append(
            _Sent(self._planned, passes, passes * self._costs.pass_s(), verifying_s)
        )
        return shape

    # After a step.

    def receive(self, _drafts: DraftTokenIds) -> bool:
        """vLLM takes its drafts itself."""
        return False

    def grammar_output(
        self, output: SchedulerOutput, as_vllm: Callable[[SchedulerOutput], GrammarOutput | None]
    ) -> GrammarOutput | None:
        """As vLLM's."""
        return as_vllm(output)

    def drafting_s(self, output: SchedulerOutput, _done: ModelRunnerOutput) -> float:
        """Seconds that the drafting of a step is believed to have taken beyond what its shape
        says."""
        return self._flight[0].drafting_s if output.num_scheduled_tokens and self._flight else 0.0

    def observe(self, output: SchedulerOutput, done: ModelRunnerOutput) -> None:
        """Learn from a step: which drafts were accepted, and how long it took."""
        if not output.num_scheduled_tokens or not self._flight:
            return
        sent = self._flight.popleft()
        if self._lowers and sent.verifying_s:
            took_s = self._clock.verified_s + sent.drafting_s
            self._costs.observe_passes(sent.passes, took_s / sent.verifying_s)
        drafts, invalid = output.scheduled_spec_decode_tokens, output.num_invalid_spec_tokens or {}
        verified: dict[str, list[int]] = {}
        round_: list[Verified] = []
        for name, length in sent.planned.items():
            index = done.req_id_to_index.get(name)
            given = [] if index is None else done.sampled_token_ids[index]
            if given and name in self._state.requests:
                offered = len(drafts.get(name, ())) - invalid.get(name, 0)
                round_.append(Verified(name, offered, min(len(given) - 1, offered)))
                verified.setdefault(_label(self._tracker.get(name)), []).append(offered)
                self._learn(name, len(given), offered, length if self._may_miss else 1 + offered)
        if self._tenants is not None:
            self._tenants.observe(round_)
        for label, counts in verified.items():
            self._metrics.draft_lengths(
                label,
                tokens=sum(counts) / len(counts),
                acceptance=self.acceptance.acceptance(label),
            )

    def _learn(self, name: str, given: int, offered: int, length: int) -> None:
        """Learn from ``given`` tokens of a request: the accepted ones of ``offered`` drafts, and
        one more, where ``length`` tokens were to be verified."""
        tracked = self._tracker.get(name)
        label = _label(tracked)
        accepted = min(given - 1, offered)
        self.acceptance.observe(label, accepted, min(accepted + 1, offered))
        if length > 1 and not self._is_silent(tracked):
            self._costs.observe_drafts(name, label, given, length)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._costs.forget(request_id)


def _label(tracked: SLORequest | None) -> str:
    return UNLABELLED if tracked is None else tracked.slo_class
