# SPDX-License-Identifier: Apache-2.0
"""The drop-in scheduler: vLLM's own, steered.

``Scheduler`` holds no policy. It tells ``Steering`` what arrives, runs and ends, asks it what
one step may do, and nudges the four things vLLM's ``schedule()`` reads (order of ``running``, the
waiting queue, ``max_num_scheduled_tokens``, the tokens of each request) before calling it. vLLM
keeps blocks, prefix cache, encoder inputs, connectors, LoRA and speculation. While no live request
carries an SLO, nothing is nudged and the scheduler is vLLM's, decision for decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_slo.core.clock import Clock, SystemClock
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.step_time.estimator import StepTimeEstimator
from vllm_slo.core.step_time.model import BatchShape
from vllm_slo.engine.scheduling import request_views
from vllm_slo.engine.scheduling.controller import Steering
from vllm_slo.engine.scheduling.stage_marks import StageMarks
from vllm_slo.engine.scheduling.step_planner import Nudge
from vllm_slo.engine.speculation import chains as draft_lengths
from vllm_slo.engine.speculation.chains import DraftLengths
from vllm_slo.engine.speculation.messages import (
    DraftTrees,
    drafting_of,
    speculation_of,
    without_scratch,
)
from vllm_slo.engine.speculation.trees import Speculation
from vllm_slo.engine.telemetry.recording import shape_of
from vllm_slo.errors import VllmSLOError
from vllm_slo.slo.access import Seal
from vllm_slo.slo.verdicts import REPORT_KEY, pack_report

logger = init_logger(__name__)


class Scheduler(AsyncScheduler):
    """Multi-SLO scheduler for ``--scheduler-cls vllm_slo.Scheduler``.

    Subclasses vLLM's ``AsyncScheduler`` so that async scheduling stays on where vLLM turns it on;
    it behaves the same without. Four keywords that vLLM does not use inject time, the step times
    to begin with, the ends of stages and the seal of internal keys: ``clock``, ``step_time``,
    ``stage_marks`` and ``seal``.

    Raises:
        ConfigError: the configuration in ``--additional-config`` cannot be used.
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
        **kwargs: Any,
    ) -> None:
        self._nudge: Nudge | None = None
        self._stalled = False
        self._in_step = False
        try:
            trees = speculation_of(vllm_config)
            if trees is not None:
                kv_cache_config = without_scratch(kv_cache_config, trees)
            super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
            if trees is not None:
                # vLLM reserves nothing for proposers of others. Here the draft reads a step's last
                # token, which the target will see in the next one.
                self.num_lookahead_tokens = 1
            self._steering = Steering(self, clock or SystemClock(), step_time, stage_marks, seal)
        except VllmSLOError as error:
            # vLLM shows only tracebacks of what goes wrong here, in two processes.
            logger.critical("vllm-slo: error: %s", error)
            raise
        self._speculation = None if trees is None else Speculation(self, self._steering, trees)
        chains = trees is None and draft_lengths.trims(vllm_config) and self._steering.can_promise
        self._lengths = DraftLengths(self, self._steering) if chains else None

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if not known:
            self._steering.on_arrival(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        steering = self._steering
        begun = steering.begin_step()
        if self._speculation is not None:
            self._speculation.plant()
        if self._lengths is not None:
            self._lengths.trim()
        if not steering.active or self._pause_state != PauseState.UNPAUSED:
            output = self._schedule(throttle_prefills, None)
        else:
            nudge = steering.plan()
            if self._stalled:
                # Nothing of the last plan could be done: vLLM serves who runs, and frees memory.
                nudge = None
            output = self._schedule(throttle_prefills, nudge)
            planned = nudge is not None and nudge.token_budget > 0
            self._stalled = planned and not output.num_scheduled_tokens
        shape = self.batch_shape(output)
        if self._lengths is not None:
            shape = self._lengths.sent(output, shape)
        steering.on_scheduled(output, shape, begun)
        return output

    def _schedule(self, throttle_prefills: bool, nudge: Nudge | None) -> SchedulerOutput:
        """vLLM's ``schedule()`` as the plan wants it, with the trees of the step."""
        if self._speculation is not None:
            self._speculation.fill(nudge)
        with self._without_placeholders(), self._without_quotes(), self._steered(nudge):
            output = super().schedule(throttle_prefills)
        if self._speculation is not None:
            self._speculation.send(output)
        return output

    @contextmanager
    def _without_placeholders(self) -> Iterator[None]:
        """vLLM pads requests to a row of drafts; a tree is as large as it is."""
        nodes = self.num_spec_tokens
        self.num_spec_tokens = self.draft_padding
        try:
            yield
        finally:
            self.num_spec_tokens = nodes

    @contextmanager
    def _without_quotes(self) -> Iterator[None]:
        """vLLM asks how many there are before it cuts a long prompt; quotes are not served."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def get_request_counts(self) -> tuple[int, int]:
        """As vLLM's (running, waiting), but quotes wait, too: so steps go on until all are
        answered, and no others follow."""
        running, waiting = super().get_request_counts()
        return running, waiting + (0 if self._in_step else self._steering.quotes_waiting)

    def set_aside(self, request: Request) -> None:
        """Take a request that has just come out of the queue: no step is to serve it."""
        self.waiting.remove_request(request)
        self.deferred_waiting.discard(request)

    @property
    def draft_padding(self) -> int:
        """Placeholders of drafts that vLLM adds to a request that starts."""
        return self.num_spec_tokens if self._speculation is None else 0

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """As vLLM's; of a tree, one row for the root and one for each node."""
        if self._speculation is None:
            return super().get_grammar_bitmask(scheduler_output)
        return self._speculation.grammar_output(scheduler_output)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """As vLLM's; trees become candidates of the next step."""
        if self._speculation is not None and isinstance(draft_token_ids, DraftTrees):
            self._speculation.offer(draft_token_ids)
        else:
            super().update_draft_token_ids(draft_token_ids)

    def batch_shape(self, output: SchedulerOutput) -> BatchShape:
        """What a step runs, as far as its duration is concerned; drafting trees is told apart."""
        shape = shape_of(output)
        return shape if self._speculation is None else replace(shape, spec_steps=0)

    @contextmanager
    def _steered(self, nudge: Nudge | None) -> Iterator[None]:
        """vLLM's state as the plan wants it, put back afterwards with what vLLM changed kept."""
        if nudge is None:
            yield
            return
        for request in nudge.preempt:
            self.running.remove(request)
            self._preempt_request(
                request, nudge.timestamp, drop_stale_output=self.requires_kv_delivery
            )
        if nudge.running is not None:
            self.running = nudge.running
        queue, holding = self.waiting, self.kv_holding_waiting
        tokens = self.max_num_scheduled_tokens
        offered = nudge.waiting
        self.waiting = FCFSRequestQueue(offered)
        self.kv_holding_waiting = FCFSRequestQueue()
        self.max_num_scheduled_tokens = nudge.token_budget
        self._nudge = nudge
        try:
            yield
        finally:
            self._nudge = None
            left = set(self.waiting)
            self.max_num_scheduled_tokens = tokens
            given = set(offered)
            returned = [r for r in self.waiting if r not in given]
            # Put aside with blocks: they began to load, or cannot go on yet.
            aside = [*self.kv_holding_waiting]
            self.waiting, self.kv_holding_waiting = queue, holding
            if taken := [r for r in offered if r not in left]:
                queue.remove_requests(taken)
                holding.remove_requests(taken)
            for request in reversed(aside):
                holding.prepend_request(request)
            for request in reversed(returned):
                queue.prepend_request(request)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """vLLM's per-request token hook, asked for each running and waiting request it looks at."""
        if self._nudge is not None:
            granted = self._nudge.tokens.get(request.request_id)
            # A waiting request's last token, padded by vLLM to a row of drafts: all of it or none.
            padded = (
                request.status != RequestStatus.RUNNING
                and num_new_tokens > request.num_tokens - num_computed_tokens
            )
            if granted is not None and granted < num_new_tokens and not (padded and granted):
                num_new_tokens = granted
                if num_new_tokens == 0:
                    return 0
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        drafting_s = drafting_of(model_runner_output).seconds
        if self._lengths is not None:
            drafting_s += self._lengths.drafting_s(scheduler_output)
        self._steering.on_output(scheduler_output, drafting_s)
        if self._speculation is not None:
            self._speculation.observe(scheduler_output, model_runner_output)
        if self._lengths is not None:
            self._lengths.observe(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._steering.on_updated(scheduler_output)
        if self._steering.tracked:
            self._report_ahead(outputs)
        for request in self._steering.take_ended():
            if request.client_index not in outputs:
                outputs[request.client_index] = EngineCoreOutputs()
            outputs[request.client_index].outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ABORT,
                    stop_reason=request.stop_reason,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs

    def _report_ahead(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Put the report into each output that may turn out to be a request's last.

        vLLM's API server looks for stop strings, and ends a request before this scheduler hears.
        """
        for output in (one for group in outputs.values() for one in group.outputs):
            request = self.requests.get(output.request_id)
            if (
                request is not None
                and output.finish_reason is None
                and request_views.may_stop(request)
            ):
                report = self._steering.report_now(request.request_id)
                if report is not None:
                    output.kv_transfer_params = {REPORT_KEY: report}

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        new_token_ids, stopped = super()._update_request_with_output(
            request, new_token_ids, is_stale
        )
        if self._steering.active:
            self._steering.on_tokens(request, len(new_token_ids))
        return new_token_ids, stopped

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        blocks = self._steering.sessions.blocks_of(request)
        kv_params, ec_params = super()._free_request(request, delay_free_blocks)
        report = self._steering.on_end(request, blocks)
        if self._speculation is not None:
            self._speculation.forget(request.request_id)
        if self._lengths is not None:
            self._lengths.forget(request.request_id)
        if not self.requests:
            self._steering.on_empty()
        if report is not None:
            kv_params = {**(kv_params or {}), REPORT_KEY: report}
        if request_views.wants_report_in_stop_reason(request):
            request.stop_reason = pack_report(report, request.stop_reason)
        return kv_params, ec_params

    def promise_now(self, request_id: str) -> bool:
        """Decide at once, between two steps, whether a waiting request can be promised its
        objectives; otherwise the next ``schedule()`` does."""
        return self._steering.promise_now(request_id)

    def state(self) -> ReplicaState:
        """What a front needs to know to plan with this engine."""
        return self._steering.state()

    def end_request(self, request: Request, stop_reason: str) -> None:
        """Finish a request that never got a token; its client is told ``stop_reason``."""
        request.stop_reason = stop_reason
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
