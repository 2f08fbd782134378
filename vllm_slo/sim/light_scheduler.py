# SPDX-License-Identifier: Apache-2.0
"""The light scheduler: vLLM's scheduler with a shorter ``schedule`` and ``update_from_output``.

Queues, requests, KV-cache manager, prefix cache, preemption and freeing are vLLM's own. It leaves
out what a simulation of text requests never uses: LoRA, encoders, connectors, messages to workers,
events. It calls the KV-cache manager only if the answer is not known beforehand: a decode step that
stays within its block and completes none changes nothing there. Drafts are chains of a fixed
length, which a request may cut, as vLLM's own methods make them. A test compares the light
scheduler with the real one, step by step.

``harness``, ``baselines``, ``virtual_draft`` and this file are the only files of ``sim`` that
import vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from vllm_slo.core.step_time.model import BatchShape
from vllm_slo.engine.compat.version import is_at_least
from vllm_slo.engine.scheduler import Scheduler

YIELDING_ENDS_NO_STEP = is_at_least((0, 33))
"""Whether vLLM goes on with the running requests behind one that was preempted for them."""


class LightOutput(SchedulerOutput):
    """One step, reduced to what a simulation reads.

    ``sampling``: requests that sample a token in it, in the order in which they were scheduled.
    """

    batch: BatchShape
    sampling: list[Request]


class LightResult:
    """Sampled tokens of a step, in the form of vLLM's ``ModelRunnerOutput``.

    ``sampled_token_ids`` has a list for each request of ``sampling``.
    """

    def __init__(self, sampling: Sequence[Request], sampled_token_ids: list[list[int]]) -> None:
        self._sampling = sampling
        self.sampled_token_ids = sampled_token_ids

    @cached_property
    def req_id_to_index(self) -> Mapping[str, int]:
        return {request.request_id: place for place, request in enumerate(self._sampling)}


class _Step:
    """One step while it is being filled.

    ``inputs`` is the free space in vLLM's input buffers, where a draft model needs slots, too.
    """

    __slots__ = (
        "budget", "context", "drafts", "inputs", "pairs", "prefills", "requests", "sampling",
        "tokens",
    )  # fmt: skip

    def __init__(self, budget: int, inputs: int) -> None:
        self.budget = budget
        self.inputs = inputs
        self.tokens: dict[str, int] = {}
        self.drafts: dict[str, list[int]] = {}
        self.prefills = False
        self.requests: list[Request] = []
        self.sampling: list[Request] = []
        self.context = 0
        self.pairs = 0


class LightScheduler(AsyncScheduler):
    """vLLM's scheduler without overlap of steps, at a fraction of its cost.

    ``received_kv``: requests arrive with the KV of their prompts, so their prefill costs one token
    (the decode side of disaggregated serving over an ideal link).
    """

    running: list[Request]
    waiting: RequestQueue
    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]

    def __init__(self, *args: Any, received_kv: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        spec = self.vllm_config.speculative_config
        if (
            len(managers) != 1
            or self.lora_config
            or self.connector
            or self.dynamic_sd_lookup
            or self.num_prefill_lookahead > 1
            or (spec is not None and received_kv)
        ):
            raise ValueError(
                "the light scheduler supports one kind of attention and drafts of one length, "
                "but no LoRA and no connector"
            )
        self._draft_slots = 0 if spec is None else spec.max_num_new_slots_for_drafting
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
        step = _Step(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        if self._schedule_running(step) and (self.waiting or self.kv_holding_waiting):
            self._schedule_waiting(step)
        self._apply(step)
        output: LightOutput = LightOutput.make_empty()
        output.num_scheduled_tokens = step.tokens
        output.scheduled_spec_decode_tokens = step.drafts
        output.num_spec_tokens_to_schedule = self.num_spec_tokens
        output.total_num_scheduled_tokens = self.max_num_scheduled_tokens - step.budget
        output.preempted_req_ids = self.reset_preempted_req_ids
        output.finished_req_ids = self.finished_req_ids
        self.reset_preempted_req_ids, self.finished_req_ids = set(), set()
        output.batch = BatchShape(
            len(step.requests) if self._received_kv else output.total_num_scheduled_tokens,
            max(map(len, step.drafts.values()), default=0),
            step.context,
            len(step.requests),
            step.pairs,
        )
        output.sampling = step.sampling
        return output

    def _schedule_running(self, step: _Step) -> bool:
        """Give the running requests their tokens; False if a request had to be preempted."""
        running, blocks, cached = self.running, self._blocks, self._cached
        size, caching, hook = self._block_size, self._caching, self._hook
        longest, slots, ahead = self.max_model_len - 1, self._draft_slots, self.num_lookahead_tokens
        tokens, add = step.tokens, step.requests.append
        intact = True
        index = 0
        while index < len(running) and step.budget > 0 and step.inputs > slots:
            request = running[index]
            computed = request.num_computed_tokens
            known = len(request._all_token_ids)
            drafted = request.spec_token_ids
            new = min(
                known + len(drafted) - computed,
                step.budget,
                step.inputs - slots,
                longest - computed,
            )
            if hook:
                new = self._reserve_prefill_lookahead(request, computed, new)
            if new <= 0:
                index += 1
                continue
            request_id = request.request_id
            end = computed + new
            if min(end + ahead, longest + 1) > size * len(blocks[request_id]) or (
                caching and min(end, known) // size > cached.get(request_id, 0)
            ):
                before = len(running)
                allocated, index = self._allocate(step, request, new, index)
                intact = intact and before == len(running)
                if not allocated:
                    if self.policy == SchedulingPolicy.PRIORITY and YIELDING_ENDS_NO_STEP:
                        continue
                    break
            tokens[request_id] = new
            add(request)
            step.budget -= new
            step.inputs -= new + slots
            step.prefills |= request.is_prefill_chunk
            if drafted:
                if end > known:
                    step.drafts[request_id] = drafted[: end - known]
                request.spec_token_ids = []
            index += 1
        return intact

    def _allocate(self, step: _Step, request: Request, new: int, index: int) -> tuple[bool, int]:
        """Allocate blocks for a running request, preempting others if needed.

        Returns whether it got them, and its index in ``running`` now.
        """
        allocate, ahead = self.kv_cache_manager.allocate_slots, self.num_lookahead_tokens
        while allocate(request, new, num_lookahead_tokens=ahead) is None:
            if self.policy == SchedulingPolicy.PRIORITY:
                victim = max(self.running, key=lambda r: (r.priority, r.arrival_time))
                place = self.running.index(victim)
                del self.running[place]
                index -= place < index
                if victim.request_id in step.tokens:
                    restored = step.tokens.pop(victim.request_id)
                    step.budget += restored
                    step.inputs += restored + self._draft_slots
                    step.drafts.pop(victim.request_id, None)
                    step.requests.remove(victim)
            else:
                victim = self.running.pop()
            self._preempt_request(victim, time.monotonic())
            if victim is request:
                return False, index
        return True, index

    def _schedule_waiting(self, step: _Step) -> None:
        manager, slots = self.kv_cache_manager, self._draft_slots
        beside = bool(step.requests)
        while step.budget > 0 and len(self.running) < self.max_num_active_reqs:
            queue = self.kv_holding_waiting or self.waiting
            if not queue or step.inputs <= slots:
                return
            request = queue.peek_request()
            cached, computed, request.shared_prefix_boundary, _ = self._get_local_prefix_cache_hit(
                request
            )
            room = min(step.budget, step.inputs - slots)
            padded = self._padded(request, computed, step, beside)
            if padded > room:
                return
            new = padded or min(request.num_tokens - computed, room)
            if self._hook:
                new = self._reserve_prefill_lookahead(request, computed, new)
            if new == 0:
                return
            allocated = manager.allocate_slots(
                request,
                new,
                num_new_computed_tokens=computed,
                new_computed_blocks=cached,
                num_lookahead_tokens=self.num_lookahead_tokens,
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
            step.inputs -= new + slots
            if padded:
                step.drafts[request.request_id] = [-1] * self.num_spec_tokens

    def _padded(self, request: Request, computed: int, step: _Step, beside: bool) -> int:
        """Tokens of a waiting request that vLLM pads to a row of drafts; 0 if it does not.

        It pads a request that has only its last token to compute. ``beside``: running requests are
        in the step, too.
        """
        drafts = self.num_spec_tokens
        decodes = request.num_tokens - computed == 1 and not step.prefills
        if not drafts or not decodes or not (beside or computed):
            return 0
        return 1 + drafts if computed + drafts + 2 <= self.max_model_len else 0

    def _apply(self, step: _Step) -> None:
        """Add up the shape of the step and advance its requests."""
        context = pairs = 0
        sample = step.sampling.append
        placeholders = [-1] * self.num_spec_tokens
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
                request.spec_token_ids = placeholders
                sample(request)
            else:
                request.is_prefill_chunk = True
        step.context, step.pairs = context, pairs

    # Output.

    def update_from_output(
        self, scheduler_output: LightOutput, model_runner_output: LightResult
    ) -> dict[int, EngineCoreOutputs]:
        """As vLLM's, but only finished requests have an output."""
        ended: list[EngineCoreOutput] = []
        finished: set[Request] = set()
        update, live = self._update_request_with_output, self.requests
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request, tokens in zip(
            scheduler_output.sampling, model_runner_output.sampled_token_ids, strict=True
        ):
            if request.request_id not in live:
                continue
            if request.request_id in drafts and request.num_computed_tokens > 0:
                rejected = len(drafts[request.request_id]) + 1 - len(tokens)
                request.num_computed_tokens -= rejected
            _, stopped = update(request, tokens)
            if stopped:
                reason = request.get_finished_reason()
                params, _ = self._free_request(request)
                finished.add(request)
                ended.append(
                    EngineCoreOutput(
                        request_id=request.request_id,
                        new_token_ids=tokens,
                        finish_reason=reason,
                        stop_reason=request.stop_reason,
                        kv_transfer_params=params,
                    )
                )
        if finished:
            self.running = [request for request in self.running if request not in finished]
        return {0: EngineCoreOutputs(outputs=ended)} if ended else {}

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        output, every = request._output_token_ids, request._all_token_ids
        size, before, stopped = self._block_size, len(every), False
        for number, token in enumerate(new_token_ids, 1):
            output.append(token)
            every.append(token)
            if stopped := self._stops(request, token):
                del new_token_ids[number:]
                break
        if self._caching:
            if len(every) // size > before // size:
                request.update_block_hashes()
            # Tokens after a stop were computed but do not count.
            computed = min(request.num_computed_tokens, len(every) - 1)
            if computed // size > self._cached.get(request.request_id, 0):
                self.kv_cache_manager.cache_blocks(request, computed)
        return new_token_ids, stopped

    def _stops(self, request: Request, token: int) -> bool:
        """Whether a request ends with its last token."""
        if token in request.sampling_params.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = token
            return True
        longest = len(request._all_token_ids) >= self.max_model_len
        if longest or len(request._output_token_ids) >= request.max_tokens:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return True
        return False


class LightSLOScheduler(Scheduler, LightScheduler):
    """vllm-slo's scheduler over the light scheduler: the same controller and policies."""

    def batch_shape(self, output: SchedulerOutput) -> BatchShape:
        return output.batch if isinstance(output, LightOutput) else super().batch_shape(output)
