# SPDX-License-Identifier: Apache-2.0
"""The light twin: vLLM's scheduler object with a shorter ``schedule`` and ``update_from_output``.

Queues, requests, KV-cache manager, prefix cache, preemption and freeing are vLLM's own; left out is
what a simulation of plain text requests never uses (drafts, LoRA, encoders, connectors, messages to
workers, events), and the KV-cache manager is asked only where its answer is not known beforehand: a
decode step that stays within its block and completes none changes nothing there. A test holds the
twin to the real scheduler, step for step.

With ``harness`` and ``baselines`` one of the three files of ``sim`` that import vLLM.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from vllm_slo.core.step_time import BatchShape
from vllm_slo.engine.scheduler import Scheduler


class LightOutput(SchedulerOutput):
    """What one step runs, as far as a simulation cares.

    Attributes:
        batch: shape of the step.
        sampling: requests that sample a token in it, in the order in which they were scheduled.
    """

    batch: BatchShape
    sampling: list[Request]


class _Step:
    """One step while it is being filled."""

    __slots__ = ("budget", "context", "pairs", "requests", "sampling", "tokens")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tokens: dict[str, int] = {}
        self.requests: list[Request] = []
        self.sampling: list[Request] = []
        self.context = 0
        self.pairs = 0


class LightScheduler(AsyncScheduler):
    """vLLM's scheduler, step by step and without overlap, at a fraction of its cost.

    Args:
        received_kv: requests bring the KV of their prompts along (the decoding side of
            disaggregated serving over an ideal link): their prefill costs one token.
    """

    running: list[Request]
    waiting: RequestQueue
    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]

    def __init__(self, *args: Any, received_kv: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        if len(managers) != 1 or self.num_spec_tokens or self.lora_config or self.connector:
            raise ValueError(
                "the light twin knows one kind of attention, no drafts, no LoRA and no connector"
            )
        self._blocks = managers[0].req_to_blocks
        self._cached = managers[0].num_cached_block
        self._block_size = managers[0].block_size
        self._caching = self.cache_config.enable_prefix_caching
        self._hook = (
            type(self)._reserve_prefill_lookahead is not AsyncScheduler._reserve_prefill_lookahead
        )
        self._received_kv = received_kv

    # Scheduling.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.current_step += 1
        step = _Step(self.max_num_scheduled_tokens)
        if self._schedule_running(step) and (self.waiting or self.kv_holding_waiting):
            self._schedule_waiting(step)
        self._apply(step)
        output: LightOutput = LightOutput.make_empty()
        output.num_scheduled_tokens = step.tokens
        output.total_num_scheduled_tokens = self.max_num_scheduled_tokens - step.budget
        output.preempted_req_ids = self.reset_preempted_req_ids
        output.finished_req_ids = self.finished_req_ids
        self.reset_preempted_req_ids, self.finished_req_ids = set(), set()
        output.batch = BatchShape(
            len(step.requests) if self._received_kv else output.total_num_scheduled_tokens,
            0,
            step.context,
            len(step.requests),
            step.pairs,
        )
        output.sampling = step.sampling
        return output

    def _schedule_running(self, step: _Step) -> bool:
        """Give the running requests their tokens; False when one had to be preempted."""
        running, blocks, cached = self.running, self._blocks, self._cached
        size, caching, hook = self._block_size, self._caching, self._hook
        longest = self.max_model_len - 1
        tokens, add = step.tokens, step.requests.append
        intact = True
        index = 0
        while index < len(running) and step.budget > 0:
            request = running[index]
            computed = request.num_computed_tokens
            known = len(request._all_token_ids)
            new = min(known - computed, step.budget, longest - computed)
            if hook:
                new = self._reserve_prefill_lookahead(request, computed, new)
            if new <= 0:
                index += 1
                continue
            request_id = request.request_id
            end = computed + new
            if end > size * len(blocks[request_id]) or (
                caching and min(end, known) // size > cached.get(request_id, 0)
            ):
                before = len(running)
                found, index = self._allocate(step, request, new, index)
                intact = intact and before == len(running)
                if not found:
                    break
            tokens[request_id] = new
            add(request)
            step.budget -= new
            index += 1
        return intact

    def _allocate(self, step: _Step, request: Request, new: int, index: int) -> tuple[bool, int]:
        """Blocks for a running request, from preempted ones if need be; (found, its index)."""
        while self.kv_cache_manager.allocate_slots(request, new) is None:
            if self.policy == SchedulingPolicy.PRIORITY:
                victim = max(self.running, key=lambda r: (r.priority, r.arrival_time))
                place = self.running.index(victim)
                del self.running[place]
                index -= place < index
                if victim.request_id in step.tokens:
                    step.budget += step.tokens.pop(victim.request_id)
                    step.requests.remove(victim)
            else:
                victim = self.running.pop()
            self._preempt_request(victim, time.monotonic())
            if victim is request:
                return False, index
        return True, index

    def _schedule_waiting(self, step: _Step) -> None:
        manager = self.kv_cache_manager
        while step.budget > 0 and len(self.running) < self.max_num_active_reqs:
            queue = self.kv_holding_waiting or self.waiting
            if not queue:
                return
            request = queue.peek_request()
            found, computed, request.shared_prefix_boundary, _ = self._get_local_prefix_cache_hit(
                request
            )
            new = min(request.num_tokens - computed, step.budget)
            if self._hook:
                new = self._reserve_prefill_lookahead(request, computed, new)
            if new == 0:
                return
            allocated = manager.allocate_slots(
                request,
                new,
                num_new_computed_tokens=computed,
                new_computed_blocks=found,
                full_sequence_must_fit=self.scheduler_reserve_full_isl,
                has_scheduled_reqs=bool(self.running),
            )
            if allocated is None:
                return
            queue.pop_request()
            self.deferred_waiting.discard(request)
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = computed
            if computed + new < request.num_tokens:
                self._inflight_prefills.add(request)
            step.tokens[request.request_id] = new
            step.requests.append(request)
            step.budget -= new

    def _apply(self, step: _Step) -> None:
        """Count what was scheduled: shape of the step, progress of its requests."""
        context = pairs = 0
        sample = step.sampling.append
        for request, new in zip(step.requests, step.tokens.values(), strict=True):
            computed = request.num_computed_tokens
            after = computed + new
            if new == 1:
                context += computed
                pairs += after
            elif self._received_kv:
                context += after - 1
                pairs += after
            else:
                context += computed
                pairs += new * computed + new * (new + 1) // 2
            request.num_computed_tokens = after
            if after >= len(request._all_token_ids):
                if request.is_prefill_chunk:
                    request.is_prefill_chunk = False
                    self._inflight_prefills.discard(request)
                sample(request)
            else:
                request.is_prefill_chunk = True
        step.context, step.pairs = context, pairs

    # Output.

    def update_from_output(
        self, scheduler_output: LightOutput, model_runner_output: list[int]
    ) -> dict[int, EngineCoreOutputs]:
        """As vLLM's; ``model_runner_output`` has one token for each request of ``sampling``, and
        what comes back tells of requests that finished only."""
        ended: list[EngineCoreOutput] = []
        gone: set[Request] = set()
        update, live = self._update_request_with_output, self.requests
        for request, token in zip(scheduler_output.sampling, model_runner_output, strict=True):
            if request.request_id not in live:
                continue
            _, stopped = update(request, [token])
            if stopped:
                reason = request.get_finished_reason()
                params, _ = self._free_request(request)
                gone.add(request)
                ended.append(
                    EngineCoreOutput(
                        request_id=request.request_id,
                        new_token_ids=[token],
                        finish_reason=reason,
                        stop_reason=request.stop_reason,
                        kv_transfer_params=params,
                    )
                )
        if gone:
            self.running = [request for request in self.running if request not in gone]
        return {0: EngineCoreOutputs(outputs=ended)} if ended else {}

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        token = new_token_ids[0]
        request._output_token_ids.append(token)
        every = request._all_token_ids
        every.append(token)
        known = len(every)
        size = self._block_size
        if self._caching:
            if known % size == 0:
                request.update_block_hashes()
            if request.num_computed_tokens // size > self._cached.get(request.request_id, 0):
                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        params = request.sampling_params
        if token in params.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = token
            return new_token_ids, True
        if known >= self.max_model_len or len(request._output_token_ids) >= request.max_tokens:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return new_token_ids, True
        return new_token_ids, False


class LightSLOScheduler(Scheduler, LightScheduler):
    """Our scheduler over the light twin: the very same steering and policies."""

    def batch_shape(self, output: SchedulerOutput) -> BatchShape:
        return output.batch if isinstance(output, LightOutput) else super().batch_shape(output)
