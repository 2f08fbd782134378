# SPDX-License-Identifier: Apache-2.0
"""The drop-in scheduler: vLLM's own, which finds its queues and limits as a plan wants them.

`Scheduler` holds no policy. It tells a `Controller` what arrives, runs and ends, asks it for the
plan of each step, and arranges what vLLM's ``schedule()`` reads (order of ``running``, the waiting
queue, ``max_num_scheduled_tokens``, the tokens of each request) before calling it. vLLM keeps
blocks, prefix cache, encoder inputs, connectors, LoRA and speculation. While no live request
carries an SLO, nothing is arranged and the scheduler is vLLM's, decision for decision; but for a
minute after an SLO, steps of prompts are kept short enough for the next one (`ResponsiveSteps`).

Each call of ours is in a block of `Containment`. The code behind such a block is what is done if
the block fails: the engine goes on, and vLLM schedules the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_slo.core.clock import Clock, SystemClock
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.step_time.estimator import StepTimeEstimator
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.engine.compat.scheduler_state import (
    SchedulerState,
    await_tokens,
    reserve_lookahead,
)
from vllm_slo.engine.compat.seams import check_scheduling
from vllm_slo.engine.composition import assemble
from vllm_slo.engine.scheduling import request_facts
from vllm_slo.engine.scheduling.apply_plan import applied
from vllm_slo.engine.scheduling.obstacles import check_model, is_synchronous_pipeline
from vllm_slo.engine.scheduling.stage_marks import StageMarks
from vllm_slo.engine.scheduling.step_schedule import StepSchedule
from vllm_slo.engine.speculation import grammar, messages
from vllm_slo.engine.speculation.messages import speculation_of, without_scratch
from vllm_slo.engine.telemetry.recording import shape_of
from vllm_slo.errors import VllmSLOError
from vllm_slo.slo.access import Seal
from vllm_slo.slo.verdicts import REPORT_KEY, pack_report

logger = init_logger(__name__)

UNKNOWN_STATE = ReplicaState(StepTimeModel.prior())
"""Without seats, so that a front counts on no promise here."""


class Scheduler(AsyncScheduler):
    """Multi-SLO scheduler for ``--scheduler-cls vllm_slo.Scheduler``.

    Subclasses vLLM's ``AsyncScheduler`` so that async scheduling stays on where vLLM turns it on.
    It behaves the same without; in a pipeline without, it behaves as vLLM's ``Scheduler``.

    Five keywords that vLLM does not use inject time, the step times to begin with, the ends of
    stages and the seal of internal keys: ``clock``, ``step_time``, ``stage_marks`` and ``seal``;
    ``contains_faults=False`` raises what policies raise, as tests and simulations need it (see
    `Containment`).

    Attributes:
        parts: the owners of its state, for those who look into it.

    Raises:
        ConfigError: the configuration in ``--additional-config`` cannot be used.
        IncompatibleVLLMError: this vLLM lacks a name that is used.
        ProfileError: the configured step-time profile belongs to another engine.
    """

    running: list[Request]
    waiting: RequestQueue
    kv_holding_waiting: RequestQueue
    max_num_scheduled_tokens: int
    num_spec_tokens: int

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *args: Any,
        clock: Clock | None = None,
        step_time: StepTimeEstimator | None = None,
        stage_marks: StageMarks | None = None,
        seal: Seal | None = None,
        contains_faults: bool = True,
        **kwargs: Any,
    ) -> None:
        self._step: StepSchedule | None = None
        self._in_step = False
        try:
            check_scheduling(Scheduler)
            check_model(vllm_config)
            trees = speculation_of(vllm_config)
            if trees is not None:
                longest = vllm_config.model_config.max_model_len
                kv_cache_config = without_scratch(kv_cache_config, trees, longest)
            super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
            if is_synchronous_pipeline(vllm_config):
                await_tokens(self)
            if trees is not None:
                # vLLM reserves nothing for proposers of others. Here the draft reads a step's last
                # token, which the target will see in the next one.
                reserve_lookahead(self, 1)
            self._state = SchedulerState(self)
            self.parts = assemble(
                self._state,
                self.kv_cache_manager,
                clock or SystemClock(),
                self.max_num_scheduled_tokens,
                trees,
                step_time=step_time,
                marks=stage_marks,
                seal=seal,
                contains_faults=contains_faults,
            )
        except VllmSLOError as error:
            # vLLM shows only tracebacks of what goes wrong here, in two processes.
            logger.critical("vllm-slo: error: %s", error)
            raise
        self._controller = self.parts.controller
        self._speculation = self.parts.speculation
        self._recorder = self.parts.recorder
        self._containment = self.parts.containment

    # A step.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        plan = self._plan()
        output = self._schedule(throttle_prefills, plan)
        self._send(output, plan)
        return output

    def _plan(self) -> StepSchedule | None:
        """The plan of the step, and the drafts for it; None: vLLM schedules alone."""
        controller, speculation = self._controller, self._speculation
        containment = self._containment
        stood_aside = containment.stands_aside
        if containment.begin_step():
            with containment.planning:
                controller.begin_step()
                speculation.propose(active=controller.active)
                plan = controller.plan() if self._pause_state == PauseState.UNPAUSED else None
                speculation.select(plan)
                return plan
            self._drop_drafts()
            with containment.planning:
                self.parts.recovery.without_plan()
        else:
            if not stood_aside:
                self._drop_drafts()
            with containment.planning:
                self.parts.recovery.without_promises(containment.retry_after_s)
                controller.begin_step()
        return None

    def _drop_drafts(self) -> None:
        """Verify no drafts in this step: they may be chosen in part, or be out of date."""
        for request in self.running:
            request.spec_token_ids = []

    def _schedule(self, throttle_prefills: bool, plan: StepSchedule | None) -> SchedulerOutput:
        """vLLM's ``schedule()`` with the plan applied, and drafts padded as speculation has it."""
        padding, self.num_spec_tokens = self.num_spec_tokens, self._speculation.draft_padding
        self._in_step = True
        try:
            with ExitStack() as arranged:
                if plan is not None:
                    with self._containment.planning:
                        arranged.enter_context(applied(self, plan, self._state))
                        self._step = plan
                return super().schedule(throttle_prefills)
        finally:
            self.num_spec_tokens = padding
            self._step, self._in_step = None, False

    # What vLLM asks, in this order, of the tokens of each request it looks at. All of it is decided
    # by the tokens granted, so whoever is asked first cuts; cutting again changes nothing.

    def _granted(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Tokens that a request may have in this step, of those that vLLM would give it."""
        granted = None if self._step is None else self._step.tokens.get(request.request_id)
        if granted is None or granted >= num_new_tokens:
            return num_new_tokens
        # A waiting request's last token, padded by vLLM to a row of drafts: all of it or none.
        padded = (
            request.status != RequestStatus.RUNNING
            and num_new_tokens > request.num_tokens - num_computed_tokens
        )
        if not granted or padded:
            return num_new_tokens if granted else 0
        if request.mm_features and self.scheduler_config.disable_chunked_mm_input:
            computed, wanted, granted = num_computed_tokens, granted, num_new_tokens
            with self._containment.planning:
                return request_facts.whole_inputs(request, computed, wanted, num_new_tokens)
        return granted

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        cached = num_new_local_computed_tokens, num_external_computed_tokens
        computed = request.num_computed_tokens + sum(cached)
        granted = self._granted(request, computed, num_new_tokens)
        split = super()._mamba_block_aligned_split
        if not 0 < granted < num_new_tokens:
            return split(request, granted, *cached)
        # As in an engine whose steps are that short: such a chunk may end within a block, and the
        # next one goes on to its end. Else a prompt would wait for a step with time for a block.
        budget, self.max_num_scheduled_tokens = self.max_num_scheduled_tokens, granted
        try:
            return split(request, granted, *cached)
        finally:
            self.max_num_scheduled_tokens = budget

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kw: Any
    ) -> Any:
        granted = self._granted(request, num_computed_tokens, num_new_tokens)
        return super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, granted, *args, **kw
        )

    def _send(self, output: SchedulerOutput, plan: StepSchedule | None) -> None:
        """Send with a step what the worker must know of drafts; note that it is on its way."""
        with self._containment.planning:
            shape = self.batch_shape(output)
            if not self._containment.stands_aside:
                shape = self._speculation.attach(output, shape)
            self._controller.on_scheduled(output, shape, plan)
        if self._speculation.verifies_trees:
            with self._containment.planning:
                messages.attach_chains(output)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        if self._step is not None:
            num_new_tokens = self._granted(request, num_computed_tokens, num_new_tokens)
            if not num_new_tokens:
                return 0
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def batch_shape(self, output: SchedulerOutput) -> BatchShape:
        """What a step runs, as far as its duration is concerned."""
        return shape_of(output)

    def get_request_counts(self) -> tuple[int, int]:
        """As vLLM's (running, waiting), but quotes wait, too: so steps go on until all are
        answered. While vLLM schedules they do not count: it asks how many there are before it cuts
        a long prompt, and quotes are not served."""
        running, waiting = super().get_request_counts()
        if self._in_step:
            return running, waiting
        with self._containment.single:
            return running, waiting + self._controller.answers_waiting
        return running, waiting + 1  # a step more than needed

    # What comes back.

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        controller, speculation = self._controller, self._speculation
        if speculation.verifies_trees:
            with self._containment.single:
                messages.keep_first_tokens(scheduler_output, model_runner_output)
        with self._containment.planning:
            drafting_s = speculation.drafting_s(scheduler_output, model_runner_output)
            controller.on_output(scheduler_output, drafting_s)
            speculation.observe(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        with self._containment.planning:
            controller.on_updated(scheduler_output, model_runner_output)
        with self._containment.single:
            for part in messages.drafting_of(model_runner_output).failed:
                self._containment.count(part)
        if self._recorder is not None:
            with self._containment.single:
                self._recorder.note_tokens(outputs, self.parts.clock.now_s)
        with self._containment.single:
            self._report_ahead(outputs)
        with self._containment.single:
            self.parts.endings.tell(outputs)
        return outputs

    def _report_ahead(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Put the report into each output that may turn out to be a request's last.

        vLLM's API server looks for stop strings, and ends a request before this scheduler hears.
        """
        if not self._controller.may_stop:
            return
        for output in (output for group in outputs.values() for output in group.outputs):
            if output.finish_reason is None and output.request_id in self._controller.may_stop:
                report = self._controller.report_now(output.request_id)
                output.kv_transfer_params = {REPORT_KEY: report}

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """As vLLM's; of a tree, one row for the root and one for each node."""
        if not self._speculation.verifies_trees:
            return super().get_grammar_bitmask(scheduler_output)
        with self._containment.single:
            return self._speculation.tree_masks(scheduler_output)
        return grammar.root_masks(self._state.structured_output, self.requests, scheduler_output)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """As vLLM's; trees become candidates of the next step."""
        with self._containment.single:
            if self._speculation.receive(draft_token_ids):
                return
        super().update_draft_token_ids(draft_token_ids)  # finds no drafts in trees

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        is_live = request.request_id in self.requests
        super().add_request(request)
        if is_live:
            return
        with self._containment.single:
            self._controller.on_arrival(request)
            return
        with self._containment.single:
            self.parts.recovery.lost_arrival(request)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        blocks: Sequence[KVCacheBlock] = ()
        with self._containment.single:
            blocks = self.parts.sessions.blocks_of(request)
        kv_params, ec_params = super()._free_request(request, delay_free_blocks)
        report = self._report_of_end(request, blocks)
        with self._containment.single:
            self._speculation.forget(request.request_id)
        if not self.requests:
            with self._containment.single:
                self._controller.on_empty()
        if report is not None:
            kv_params = {**(kv_params or {}), REPORT_KEY: report}
        with self._containment.single:
            if request_facts.wants_report_in_stop_reason(request):
                request.stop_reason = pack_report(report, request.stop_reason)
        return kv_params, ec_params

    def set_pause_state(self, pause_state: PauseState) -> None:
        """As vLLM's; promises of requests that do not run on meanwhile are withdrawn."""
        super().set_pause_state(pause_state)
        if pause_state != PauseState.UNPAUSED:
            with self._containment.single:
                self._controller.on_pause(everybody=pause_state == PauseState.PAUSED_ALL)

    def shutdown(self) -> None:
        """As vLLM's; what is recorded is written to its end."""
        if self._recorder is not None:
            with self._containment.single:
                self._recorder.close()
        super().shutdown()

    def _report_of_end(
        self, request: Request, blocks: Sequence[KVCacheBlock]
    ) -> dict[str, Any] | None:
        """Stop tracking a request; its report, None without an SLO."""
        with self._containment.single:
            return self._controller.on_end(request, blocks)
        with self._containment.single:
            return self.parts.recovery.lost_end(request)
        return None

    # For those who embed it.

    def promise_now(self, request_id: str) -> bool:
        """Decide at once, between two steps, whether a waiting request can be promised its
        objectives; otherwise the next ``schedule()`` does."""
        if not self._containment.stands_aside:
            with self._containment.single:
                return self._controller.promise_now(request_id)
        return False

    def state(self) -> ReplicaState:
        """What a front needs to know to plan with this engine."""
        with self._containment.single:
            return self.parts.reports.state()
        return UNKNOWN_STATE
