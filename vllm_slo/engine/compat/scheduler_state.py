# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler as the parts of ours see it: its queues, its limits, and two things it can do.

What our scheduler overrides is named in `vllm_slo.engine.scheduler`, and what it replaces for one
step in `vllm_slo.engine.scheduling.apply_plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import LoRAConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


def reserve_lookahead(scheduler: Scheduler, tokens: int) -> None:
    """Have vLLM keep KV slots for so many draft tokens behind a request's last one, also where it
    has worked out already how many blocks a step with drafts takes (from 0.32 on)."""
    scheduler.num_lookahead_tokens = tokens
    if isinstance(getattr(scheduler, "_spec_decode_step_blocks", None), int):
        slots = 1 + scheduler.num_spec_tokens + tokens if scheduler.num_spec_tokens else 0
        scheduler._spec_decode_step_blocks = sum(
            -(-slots // kind.block_size)
            for kind in scheduler.kv_cache_manager.coordinator.single_type_managers
            if not isinstance(kind.kv_cache_spec, MambaSpec)
        )


def await_tokens(scheduler: AsyncScheduler) -> None:
    """Have a request's next token scheduled when the last is known, as vLLM's `Scheduler` does.

    A pipeline without async scheduling takes steps while others run, and no request is in two.
    """
    synchronous = super(AsyncScheduler, scheduler)
    for name in ("_update_after_schedule", "_update_request_with_output"):
        setattr(scheduler, name, getattr(synchronous, name))


class SchedulerState:
    """Reads a vLLM scheduler. What it holds changes with every step, so nothing is copied."""

    __slots__ = ("_scheduler",)

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    # Requests.

    @property
    def requests(self) -> Mapping[str, Request]:
        """All live requests by id, in the order in which they arrived."""
        return self._scheduler.requests

    @property
    def running(self) -> list[Request]:
        return self._scheduler.running

    @property
    def waiting(self) -> RequestQueue:
        """The requests that wait and hold no KV blocks."""
        return self._scheduler.waiting

    @property
    def waiting_with_blocks(self) -> RequestQueue:
        """The requests that wait and hold KV blocks: loads under way, sessions that go on."""
        return self._scheduler.kv_holding_waiting

    @property
    def any_waits(self) -> bool:
        return bool(self._scheduler.waiting) or bool(self._scheduler.kv_holding_waiting)

    @property
    def any_prefills(self) -> bool:
        """Whether the prompt of a running request is not computed to its end."""
        return bool(self._scheduler._inflight_prefills)

    @property
    def awaiting_input(self) -> int:
        """Requests that keep a seat while they wait for the next part of their prompt."""
        return int(self._scheduler.num_waiting_for_streaming_input)

    @property
    def in_last_step(self) -> set[str]:
        """Ids of the requests that were in the last step."""
        return self._scheduler.prev_step_scheduled_req_ids

    def can_continue(self, request: Request) -> bool:
        """Whether a blocked request (a load, a grammar, a part of a prompt) may go on now. vLLM
        asks this while it schedules; it then changes the request's status."""
        return bool(self._scheduler._handle_blocked_waiting_request(request))

    def skips(self, request: Request) -> bool:
        """Whether vLLM leaves a running request out of the next step, whatever is planned: its last
        token is on its way already, or its turn to decode comes later (pipeline parallelism)."""
        scheduler = self._scheduler
        computed, in_flight = request.num_computed_tokens, request.num_output_placeholders
        if in_flight:
            certain = computed + 1 - in_flight  # tokens there will be if no draft is accepted
            if certain + 1 >= request.num_prompt_tokens + request.max_tokens:
                return True
        if computed + scheduler.num_sampled_tokens_per_step >= scheduler.max_model_len:
            return True
        return bool(scheduler.current_step + 1 < request.next_decode_eligible_step)

    def frees_blocks(self, request: Request) -> bool:
        """Whether vLLM may free a request's KV blocks now: none of them is being transferred."""
        return bool(self._scheduler._request_blocks_can_be_freed(request))

    def finish(self, request: Request, stop_reason: str) -> None:
        """End a request that never got a token; its client is told ``stop_reason``."""
        request.stop_reason = stop_reason
        self._scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def preempt(self, request: Request, timestamp: float) -> None:
        """Take a running request's KV, and put it back into the waiting queue.

        ``timestamp``: of the event that vLLM notes, on the monotonic clock.
        """
        scheduler = self._scheduler
        scheduler.running.remove(request)
        scheduler._preempt_request(
            request, timestamp, drop_stale_output=scheduler.requires_kv_delivery
        )

    def set_aside(self, request: Request) -> None:
        """Take a waiting request out of its queue: no step is to serve it."""
        self._scheduler.waiting.remove_request(request)
        self._scheduler.deferred_waiting.discard(request)

    # Limits.

    @property
    def max_running(self) -> int:
        """Requests that may hold a seat at the same time."""
        return int(self._scheduler.max_num_active_reqs)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and answer."""
        return int(self._scheduler.max_model_len)

    @property
    def block_size(self) -> int:
        return int(self._scheduler.block_size)

    @property
    def lookahead_tokens(self) -> int:
        """KV slots that vLLM reserves for drafts behind a request's last token."""
        return int(self._scheduler.num_lookahead_tokens)

    @property
    def draft_slots(self) -> int:
        """Input tokens that the draft model needs for each request of a step beside its own."""
        spec = self._scheduler.vllm_config.speculative_config
        return 0 if spec is None else int(spec.max_num_new_slots_for_drafting)

    @property
    def max_input_tokens(self) -> int:
        """Input tokens of one step, those of the draft model included."""
        return int(self._scheduler.scheduler_config.max_num_batched_tokens)

    @property
    def divides_inputs(self) -> bool:
        """Whether one step may compute a part of the tokens of an image."""
        return not self._scheduler.scheduler_config.disable_chunked_mm_input

    @property
    def num_spec_tokens(self) -> int:
        """Drafts of a request that a step verifies at most."""
        return int(self._scheduler.num_spec_tokens)

    @property
    def connector(self) -> KVConnectorBase_V1 | None:
        """Where KV may come from that was computed elsewhere; None: from nowhere."""
        return self._scheduler.connector

    @property
    def lora_config(self) -> LoRAConfig | None:
        """How many LoRAs a step can hold; None without LoRA."""
        return self._scheduler.lora_config

    @property
    def structured_output(self) -> StructuredOutputManager:
        """Grammars, the tokenizer and the reasoning parser of the engine."""
        return self._scheduler.structured_output_manager

    @property
    def vllm_config(self) -> Any:
        return self._scheduler.vllm_config
