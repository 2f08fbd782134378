# SPDX-License-Identifier: Apache-2.0
"""Simple policies to compare with: each is a small patch of vLLM's scheduler."""

from __future__ import annotations

from typing import Any, Final

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request, RequestStatus

from vllm_slo.core.clock import Clock
from vllm_slo.core.step_time.model import StepTimeModel, chunk_pairs
from vllm_slo.sim.light_scheduler import LightScheduler

NO_DEADLINE: Final = 10**12
"""Priority of a request without a TTFT; of others it is their deadline, ms since the epoch."""


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


class LatencyBudget(LightScheduler):
    """No prompt, and no batch work, makes a step longer than a latency budget. Answers with an
    objective always go on.

    This is the idea of HyGen (arXiv 2501.14808): online work first, and offline work in what is
    left of a budget that was found by profiling. Here online work is ordered by deadline.

    Args:
        step_time: predicts how long a step takes.
        budget_s: seconds of a step.
    """

    def __init__(
        self, *args: Any, step_time: StepTimeModel, budget_s: float, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._step_time, self._budget_s = step_time, budget_s
        self._tokens = self._context = self._pairs = 0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self._tokens = self._context = self._pairs = 0
        self.running.sort(key=lambda request: request.priority)
        return super().schedule(throttle_prefills)

    def _reserve_prefill_lookahead(self, request: Request, computed: int, new: int) -> int:
        decodes = bool(computed) and not request.is_prefill_chunk
        if not (decodes and request.priority < NO_DEADLINE):
            most = self._step_time.chunk_to_fit(
                self._budget_s, computed, self._tokens, self._context, pairs=self._pairs
            )
            if not self._tokens:
                most = max(most, 1)  # a budget shorter than any step stops nobody
            new = min(new, most)
        if new > 0:
            self._tokens += new
            self._context += computed
            self._pairs += chunk_pairs(new, computed)
        return new
