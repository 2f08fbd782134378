# SPDX-License-Identifier: Apache-2.0
"""A virtual engine: vLLM's real scheduler, made-up tokens, a clock that a step-time function moves.

The one file of ``sim`` that imports vLLM.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_slo.core.clock import VirtualClock
from vllm_slo.core.step_time import (
    BatchShape,
    OnlineCorrection,
    StepTimeEstimator,
    StepTimeModel,
)
from vllm_slo.engine.recording import shape_of
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.slo import SLO

STOP_TOKEN = 2
StepTime = Callable[[BatchShape], float]


@dataclass
class Outcome:
    """One request as its client saw it; times in seconds of the virtual clock."""

    arrival_s: float
    slo: SLO | None
    token_times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    report: dict[str, Any] | None = None


@dataclass
class EngineShape:
    """Size of the virtual engine: KV blocks, tokens per block, seats, tokens per step."""

    num_blocks: int = 10_000
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096


class VirtualEngine:
    """Runs a scheduler class step by step.

    Args:
        scheduler_cls: vLLM's or ours.
        model: folder with a ``config.json``; no weights are read.
        step_time: the true time of a step by its shape, seconds.
        shape: the engine's size.
        believed: the step-time model our scheduler is given; None: it learns from the prior.
        margin: margin on it until live steps have shown one.
        overlap: schedule each step while the one before it runs, as async scheduling does.
        slo_config: our configuration, inline.
        engine_args: further arguments of vLLM's ``EngineArgs``.
    """

    def __init__(
        self,
        scheduler_cls: type[AsyncScheduler],
        model: str | Path,
        step_time: StepTime,
        shape: EngineShape | None = None,
        *,
        believed: StepTimeModel | None = None,
        margin: float = 1.0,
        overlap: bool = False,
        slo_config: dict[str, Any] | None = None,
        **engine_args: Any,
    ) -> None:
        shape = shape or EngineShape()
        self.clock = VirtualClock()
        self.step_time = step_time
        self.overlap = overlap
        self.keep_history = True
        self.outcomes: dict[str, Outcome] = {}
        self.lengths: dict[str, int] = {}
        self.history: list[SchedulerOutput] = []
        self.scheduler_s = 0.0
        """Wall-clock seconds spent in the scheduler so far."""
        self._flight: deque[tuple[SchedulerOutput, list[str], float]] = deque()
        self._free_s = 0.0
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=shape.max_model_len,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            block_size=shape.block_size,
            additional_config={"slo_config": slo_config or {}},
            **engine_args,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = shape.num_blocks
        spec = FullAttentionSpec(
            block_size=shape.block_size, num_kv_heads=1, head_size=32, dtype=torch.bfloat16
        )
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = (
            get_request_block_hasher(shape.block_size, hash_fn)
            if config.cache_config.enable_prefix_caching
            else None
        )
        estimator = StepTimeEstimator(believed)
        estimator.correction = OnlineCorrection(margin)
        ours = {"clock": self.clock, "step_time": estimator}
        self.config = config
        self.scheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=shape.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=shape.block_size,
            log_stats=True,
            **(ours if issubclass(scheduler_cls, Scheduler) else {}),
        )

    def add(
        self,
        request_id: str,
        prompt: Sequence[int] | int,
        output_tokens: int,
        slo: SLO | None = None,
        *,
        max_tokens: int | None = None,
        priority: int = 0,
        arrival_s: float | None = None,
    ) -> Request:
        """Send a request now: a prompt (or its length) and the output length only we know."""
        ids = list(prompt) if not isinstance(prompt, int) else self._prompt(request_id, prompt)
        params = SamplingParams(
            max_tokens=max_tokens or output_tokens,
            stop_token_ids=[STOP_TOKEN],
            extra_args=slo.to_extra_args() if slo else None,
        )
        arrival_s = self.clock.now_s if arrival_s is None else arrival_s
        request = Request(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling_params=params,
            pooling_params=None,
            arrival_time=arrival_s,
            priority=priority,
            block_hasher=self._hasher,
        )
        self.outcomes[request_id] = Outcome(arrival_s, slo)
        self.lengths[request_id] = output_tokens
        self.scheduler.add_request(request)
        return request

    @staticmethod
    def _prompt(request_id: str, length: int) -> list[int]:
        seed = sum(ord(c) * 31**i for i, c in enumerate(request_id)) % 99991
        return [3 + (seed * (place + 7)) % 1000 for place in range(length)]

    def abort(self, request_id: str) -> None:
        """The client went away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def busy(self) -> bool:
        """Whether there is anything to schedule or to wait for."""
        return bool(self._flight) or self.scheduler.has_requests()

    def step(self) -> SchedulerOutput:
        """Schedule one step and process the output that is due: its own, or with ``overlap`` the
        one before it. The clock ends up where the engine would be asked again."""
        begun_s = time.perf_counter()
        output = self.scheduler.schedule()
        self.scheduler_s += time.perf_counter() - begun_s
        if self.keep_history:
            self.history.append(output)
        sampling = [
            request_id
            for request_id in output.num_scheduled_tokens
            if not self.scheduler.requests[request_id].is_prefill_chunk
        ]
        took_s = self.step_time(shape_of(output)) if output.num_scheduled_tokens else 0.0
        self._free_s = max(self._free_s, self.clock.now_s) + took_s
        self._flight.append((output, sampling, self._free_s))
        if not self.overlap or len(self._flight) > 1 or not output.num_scheduled_tokens:
            self._finish_one()
        return output

    def drain(self) -> None:
        """Process every output still in flight."""
        while self._flight:
            self._finish_one()

    def _finish_one(self) -> None:
        output, sampling, done_s = self._flight.popleft()
        self.clock.advance(max(done_s - self.clock.now_s, 0.0))
        chosen = set(sampling)
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: place for place, request_id in enumerate(ids)},
            sampled_token_ids=[[self._token(i)] if i in chosen else [] for i in ids],
        )
        begun_s = time.perf_counter()
        results = self.scheduler.update_from_output(output, result)
        self.scheduler_s += time.perf_counter() - begun_s
        for outputs in results.values():
            for one in outputs.outputs:
                seen = self.outcomes[one.request_id]
                seen.token_times_s += [self.clock.now_s] * len(one.new_token_ids)
                seen.token_ids += one.new_token_ids
                if one.finish_reason is not None:
                    seen.finish_reason = str(one.finish_reason)
                    seen.stop_reason = one.stop_reason
                    seen.report = (one.kv_transfer_params or {}).get("vllm_slo")

    def _token(self, request_id: str) -> int:
        request = self.scheduler.requests.get(request_id)
        made = request.num_output_tokens if request else 0
        return STOP_TOKEN if made + 1 >= self.lengths[request_id] else 3 + made % 1000

    def run(self, limit: int = 1_000_000) -> None:
        """Step until everything has finished.

        Raises:
            RuntimeError: that takes more than ``limit`` steps.
        """
        for _ in range(limit):
            if not self.busy:
                return
            if self.scheduler.has_requests():
                output = self.step()
                if not output.num_scheduled_tokens and not self._flight:
                    self.clock.advance(0.001)
            else:
                self.drain()
        raise RuntimeError(f"not finished after {limit} steps")
