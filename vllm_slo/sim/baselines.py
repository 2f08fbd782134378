# SPDX-License-Identifier: Apache-2.0
"""Simple policies to compare with: each is a small patch of vLLM's scheduler."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request, RequestStatus

from vllm_slo.core.clock import Clock
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.sim.light_scheduler import LightScheduler


class PrefillFirst(LightScheduler):
    """Prefill first: no request decodes while a prompt can be computed (vLLM's old default)."""

    max_num_active_reqs: int

    def schedule(self, throttle_prefills: bool = False) -> Any:
        prefills = [r for r in self.running if r.is_prefill_chunk]
        decodes = [r for r in self.running if not r.is_prefill_chunk]
        can_start = bool(self.waiting) and len(self.running) < self.max_num_active_reqs
        if not (prefills or can_start):
            return super().schedule(throttle_prefills)
        most = self.max_num_active_reqs
        self.max_num_active_reqs = most - len(decodes)
        self.running = prefills
        output = super().schedule(throttle_prefills)
        self.running = decodes + self.running
        self.max_num_active_reqs = most
        if output.num_scheduled_tokens:
            return output
        return super().schedule(throttle_prefills)


class ShedEDF(LightScheduler):
    """Drop requests that can no longer meet their TTFT; start the others by earliest deadline.

    ``step_time``: predicts how long a prompt takes, with its safety factor.
    """

    def __init__(self, *args: Any, clock: Clock, step_time: StepTimeModel, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropped: list[str] = []
        """Requests dropped since this list was last emptied."""
        self._clock = clock
        self._step_time = step_time

    def schedule(self, throttle_prefills: bool = False) -> Any:
        if self.waiting:
            now_s = self._clock.epoch_s()
            late = {r.request_id for r in self.waiting if self._late(r, now_s)}
            if late:
                self.finish_requests(late, RequestStatus.FINISHED_ABORTED)
                self.dropped += sorted(late)
            self.waiting = FCFSRequestQueue(sorted(self.waiting, key=self._deadline_s))
        return super().schedule(throttle_prefills)

    def _deadline_s(self, request: Request) -> float:
        """A request's deadline for its first token; 0 for preempted requests, which go first."""
        if request.num_output_tokens:
            return 0.0
        extra = request.sampling_params.extra_args or {}
        return request.arrival_time + float(extra.get("slo_ttft_ms", float("inf"))) / 1e3

    def _late(self, request: Request, now_s: float) -> bool:
        if request.num_output_tokens:
            return False
        left_s = self._deadline_s(request) - now_s
        tokens = request.num_prompt_tokens
        if self._step_time.predict_s(tokens) <= left_s:
            return False
        _, cached, _ = self.kv_cache_manager.coordinator.find_longest_cache_hit(
            request.block_hashes, tokens - 1
        )
        return self._step_time.predict_s(tokens - cached) > left_s
