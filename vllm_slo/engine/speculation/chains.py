# SPDX-License-Identifier: Apache-2.0
"""Draft lengths by SLO for vLLM's own chains of drafts: ``ngram``, ``draft_model``, ``eagle``, ...

vLLM's proposers give every request the same number of drafts. Here each request keeps the first few
of its drafts before a step is planned (``propose``): as many as its objective needs, and as the
step has room for; see `chain_lengths`. That is safe with every method and runner: a request may
have fewer drafts in vLLM, too: after a lookup that finds less, by a grammar, by the token budget.
Asynchronous scheduling stays as it is in vLLM. There drafts are placeholders in one list that all
requests share. So a request gets a slice of its own, and the list is never changed.

A draft that is not verified was drafted in vain. vLLM 0.32 lets a step say how far ahead its
proposer drafts (``SchedulerOutput.num_spec_tokens_to_schedule``, made for "dynamic speculative
decoding"). It is lowered (``attach``) to the longest length that is planned, but only where vLLM
supports that and where it saves passes of a model:

* Methods that draft token by token with a model. Others assert the full number (``ngram_gpu``,
  ``suffix``, ``medusa``), draft all tokens at once, or look drafts up at no cost (``ngram``).
* The V1 model runner without full CUDA graphs. Those are captured for one length, and the V2 runner
  captures graphs for the lengths configured at its start.
* No data parallelism: ranks must not draft in different numbers of passes.
* No schedule of lengths by batch size that the user has configured.

With full CUDA graphs, a step whose drafts are not all of full length runs without them. Beside
prompts that is so anyway. In other steps lengths change only for a clear gain.

Nothing is trimmed while steps are left to vLLM (`Controller.active`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.admission.program import Speculated
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling import request_facts
from vllm_slo.engine.scheduling.decode_model import TokenYields, WayToDecode
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.responsive_steps import ResponsiveSteps
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.step_schedule import StepSchedule
from vllm_slo.engine.speculation.chain_costs import ChainCosts, label_of
from vllm_slo.engine.speculation.chain_lengths import ChainLengths
from vllm_slo.engine.speculation.no_speculation import wants_no_drafts
from vllm_slo.engine.speculation.tenants import TenantShares, Verified
from vllm_slo.engine.telemetry.speculation_metrics import SpeculationMetrics

PROBE_EVERY = 4
"""Steps after which one request, each in turn, verifies a draft at least. Otherwise the acceptance
of requests without drafts would never be learnt."""
TRY_EVERY = 64
"""Steps after which the draft makes one pass more or less, so that the time of a pass is learnt."""
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
        output: the step.
        planned: request -> tokens to verify of it; those that start are left out.
        passes: of the draft.
        drafting_s: seconds that they are estimated to take.
        verifying_s: predicted seconds of the step without them, uncorrected; 0 if it computes
            prompts.
    """

    output: SchedulerOutput
    planned: dict[str, int]
    passes: int
    drafting_s: float
    verifying_s: float


class Chains:
    """Chooses how many of its drafts each request keeps, and how far ahead to draft; a
    `Speculation`. It sets ``spec_token_ids`` of requests.

    Args:
        responsive: how long a step may be that no promise limits.
        tenants: whose drafts are verified beyond those that objectives need; None: the likeliest.
        max_step_tokens: tokens of one step at most.

    Attributes:
        acceptance: what has been learnt of it, by class.
        draft_padding: placeholders of drafts that vLLM adds to a request that starts.
        yields: tokens that steps are expected to yield, of requests with a TPOT.
    """

    speculates = True
    verifies_trees = False

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
        self._metrics = metrics
        self._tenants = tenants
        self.yields = TokenYields()
        vllm_config = state.vllm_config
        self._most = self.draft_padding = state.num_spec_tokens
        self._may_miss = vllm_config.speculative_config.method in LOOKED_UP
        self._lowers = may_lower_depth(vllm_config)
        self._costs = ChainCosts(
            state, tracker, clock, config, most=self._most, lowers=self._lowers
        )
        self.acceptance = self._costs.acceptance
        self._lengths = ChainLengths(
            *(tracker, clock, responsive, self._costs, tenants, self.yields),
            most=self._most,
            lowers=self._lowers,
            keeps_graphs=vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs(),
            max_step_tokens=max_step_tokens,
        )
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
        self._flight: deque[_Sent] = deque()

    # Before a step is planned.

    def propose(self, *, active: bool) -> None:
        """As `Speculation.propose`. Nothing is trimmed where steps are not planned."""
        self._costs.begin_step()
        self.yields.next_step.clear()
        self.yields.spare_s.clear()
        self.yields.in_flight.clear()
        decoding = [r for r in self._state.running if request_facts.is_decoding(r)]
        if active:
            lengths = self._choose_lengths(decoding)
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
                expected = self._lengths.expected(request)
                if expected is not None:
                    self.yields.next_step[request.request_id] = expected
                    self.yields.spare_s[request.request_id] = self._lengths.spare_s(request)

    def _choose_lengths(self, decoding: Sequence[Request]) -> list[int]:
        """Tokens to verify of each decoding request; decides how far ahead to draft, too."""
        prompts = self._prompts_wait(len(decoding))
        if not decoding:
            return []
        self._steps += 1
        turn, rest = divmod(self._steps, PROBE_EVERY)
        skips = [
            self._is_stale(r) or wants_no_drafts(self._tracker.get(r.request_id)) for r in decoding
        ]
        lengths = self._lengths.choose(
            decoding, skips, prompts=prompts, probed=-1 if rest else turn % len(decoding)
        )
        self._draft_ahead(max(lengths) - 1 + self._trial())
        return lengths

    def _prompts_wait(self, decoding: int) -> bool:
        """Whether the step's time is to be the prompts' as far as possible, as some are being
        computed, or may begin. Prompts that wait for a seat or for memory cannot use it."""
        state = self._state
        waiting = len(state.waiting) + len(state.waiting_with_blocks)
        arrived, self._waiting = waiting > self._waiting, waiting
        if len(state.running) > decoding:
            return True
        return waiting > 0 and (arrived or self._computed_prompts)

    def _is_stale(self, request: Request) -> bool:
        """Whether the drafts of a request are placeholders of a step that the runner has
        forgotten."""
        last = self._state.in_last_step
        return self._only_of_last and request.request_id not in last

    def _drop_stale(self, decoding: Sequence[Request]) -> None:
        """After the last step that was planned here, remove the drafts of the requests that it left
        out. vLLM would have them verified, but their tokens are not known any more."""
        for request in decoding:
            if self._is_stale(request):
                request.spec_token_ids = []

    # How far ahead to draft, and what promises may count on.

    def _draft_ahead(self, depth: int) -> None:
        """Draft so far ahead after the step, where a step can say so. The first pass is always
        made, as the draft has to read what the target has read."""
        if self._lowers:
            self._depth = min(max(depth, 1), self._most)
            self._clock.drafting(self._depth * self._costs.pass_s(), 0.0, self._depth)

    def _trial(self) -> int:
        """A pass more or less than planned, now and then."""
        if self._steps % TRY_EVERY:
            return 0
        return 1 if self._steps // TRY_EVERY % 2 else -1

    def plain(self) -> StepTimeModel:
        return self._costs.plain()

    def speculative(self, tpot_s: float) -> WayToDecode | None:
        return self._costs.speculative(tpot_s)

    def sustainable(self, tpot_s: float) -> tuple[float, Speculated]:
        return self._costs.sustainable(tpot_s)

    def spread(self) -> float:
        return self._costs.spread()

    # With a step.

    def select(self, _schedule: StepSchedule | None) -> None:
        """Lengths were chosen before the step was planned."""

    def attach(self, output: SchedulerOutput, shape: BatchShape) -> BatchShape:
        """As `Speculation.attach`. The shape has the draft's passes that the step will make."""
        if not output.num_scheduled_tokens:
            return replace(shape, spec_steps=0)
        if self._depth < output.num_spec_tokens_to_schedule:
            # No request may keep a draft that is not drafted, so the step is lowered last.
            for name in output.num_scheduled_tokens:
                request = self._state.requests[name]
                if len(request.spec_token_ids) > self._depth:
                    request.spec_token_ids = request.spec_token_ids[: self._depth]
            output.num_spec_tokens_to_schedule = self._depth
        passes = output.num_spec_tokens_to_schedule if self._lowers else 0
        self._costs.follow_base()
        drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        tokens = len(output.num_scheduled_tokens) + drafts
        self._computed_prompts = output.total_num_scheduled_tokens > tokens
        # Step times that are fitted to live steps leave the passes out. Most steps make equally
        # many of them, so nothing could be learnt of their cost.
        shape = replace(shape, spec_steps=0 if self._clock.estimator.learn else passes)
        verifying_s = 0.0 if self._computed_prompts else self._costs.base.predict_shape_s(shape)
        self._flight.append(
            _Sent(output, self._planned, passes, passes * self._costs.pass_s(), verifying_s)
        )
        return shape

    # After a step.

    def receive(self, _drafts: DraftTokenIds) -> bool:
        """vLLM takes its drafts itself."""
        return False

    def tree_masks(self, _output: SchedulerOutput) -> GrammarOutput | None:
        return None

    def drafting_s(self, output: SchedulerOutput, _done: ModelRunnerOutput) -> float:
        """Seconds that the drafting of a step is estimated to have taken beyond what its shape
        says. vLLM's proposers do not report them."""
        sent = self._sent(output)
        return 0.0 if sent is None else sent.drafting_s

    def _sent(self, output: SchedulerOutput) -> _Sent | None:
        """What is known of the oldest step on its way, if that is ``output``."""
        while self._flight and self._flight[0].output is not output:
            self._flight.popleft()  # its end was never heard of
        return self._flight[0] if self._flight else None

    def observe(self, output: SchedulerOutput, done: ModelRunnerOutput) -> None:
        sent = self._sent(output) if output.num_scheduled_tokens else None
        if sent is None:
            return
        self._flight.popleft()
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
                verified.setdefault(label_of(self._tracker.get(name)), []).append(offered)
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
        """Learn from the ``given`` tokens of a request: its accepted drafts and one token more.

        Args:
            name: of the request.
            given: its new tokens.
            offered: drafts that were verified.
            length: tokens that were to be verified.
        """
        tracked = self._tracker.get(name)
        label = label_of(tracked)
        accepted = min(given - 1, offered)
        self.acceptance.observe(label, accepted, min(accepted + 1, offered))
        if length > 1 and not wants_no_drafts(tracked):
            self._costs.observe_drafts(name, label, given, length)

    def forget(self, request_id: str) -> None:
        self._costs.forget(request_id)
