# SPDX-License-Identifier: Apache-2.0
"""Policies that one would patch into vLLM, here over its light scheduler.

Each is what an operator could write in an afternoon; that is what makes them worth beating.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request, RequestStatus

from vllm_slo.core.clock import Clock
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.sim.light_scheduler import LightScheduler


class PrefillFirst(LightScheduler):
    """Prompts before tokens: while one can be computed, nobody decodes (vLLM's old default)."""

    max_num_active_reqs: int

    def schedule(self, throttle_prefills: bool = False) -> Any:
        prefills = [r for r in self.running if r.is_prefill_chunk]
        decodes = [r for r in self.running if not r.is_prefill_chunk]
        if not (prefills or self._can_start()):
            return super().schedule(throttle_prefills)
        seats = self.max_num_active_reqs
        self.max_num_active_reqs = seats - len(decodes)
        self.running = prefills
        output = super().schedule(throttle_prefills)
        self.running = decodes + self.running
        self.max_num_active_reqs = seats
        if output.num_scheduled_tokens:
            return output
        return super().schedule(throttle_prefills)

    def _can_start(self) -> bool:
        return bool(self.waiting) and len(self.running) < self.max_num_active_reqs


class ShedEDF(LightScheduler):
    """Drop what can no longer be in time, start the rest by earliest deadline.

    Args:
        clock: time.
        step_time: how long prompts take; with the margin that is to be kept.
    """

    def __init__(self, *args: Any, clock: Clock, step_time: StepTimeModel, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropped: list[str] = []
        """Requests dropped since somebody last emptied this list."""
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
        """Preempted requests first: they have begun to answer."""
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
