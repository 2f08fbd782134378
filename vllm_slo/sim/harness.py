# SPDX-License-Identifier: Apache-2.0
"""A virtual engine: a real scheduler, made-up tokens, and a clock that steps move.

A step takes the scheduler's time (given or measured), then the time of its batch and of the draft's
passes. With drafts (``speculative_config`` in ``engine_args``) a request accepts each drafted token
with its own probability a, if it accepted the ones before. With the verifier's own token a step of
k drafts yields (1 - a^(k+1)) / (1 - a) tokens on average: SLOs-Serve's Acc(sl) (section 3.2.3),
where sl = k + 1 tokens are verified.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from vllm.config import CacheConfig, VllmConfig
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

from vllm_slo.core.attainment import DEFAULT_WINDOW_TOKENS
from vllm_slo.core.clock import VirtualClock
from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.core.step_time.estimator import OnlineCorrection, StepTimeEstimator, horizon_of
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.telemetry.recording import shape_of
from vllm_slo.sim.baselines import ShedEDF
from vllm_slo.sim.jobs import STOP_TOKEN, answer_token, own_text
from vllm_slo.sim.light_scheduler import LightOutput, LightResult, LightScheduler
from vllm_slo.sim.virtual_draft import DraftModel, VirtualDraft
from vllm_slo.slo.access import Seal
from vllm_slo.slo.keys import QUOTE_KEY, TICKET_KEY
from vllm_slo.slo.model import SLO

# The rest of the simulator and the benchmarks take vLLM's and vllm-slo's scheduler from here.
__all__ = ["AsyncScheduler", "EngineShape", "Outcome", "Scheduler", "VirtualEngine"]

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
    acceptance: float = 0.0
    """Probability that the next drafted token is accepted."""

    @property
    def promised_in_time(self) -> bool:
        """Whether it was promised what it asked for, not a later time."""
        report = self.report
        return report is not None and report["promised"] and not report["late"]


class KnownEnds:
    """The ends of stages, which a simulation knows beforehand.

    ``ends``: request id -> number of the last token of each of its stages but the last.
    """

    def __init__(self) -> None:
        self.ends: dict[str, tuple[int, ...]] = {}

    def check(self, slo: SLO) -> None:
        """Accept every objective: all ends are known."""

    def first_stage(self, request: Request, slo: SLO) -> int:
        return 0

    def end_of(self, request: Request, slo: SLO, stage: int, tokens: int, new: int) -> int | None:
        before = request.num_output_tokens - new
        number = self.ends[request.request_id][stage] - before
        return number if number <= new else None

    def has_stopped(self, request: Request) -> bool:
        return False


@dataclass
class EngineShape:
    """Size of the virtual engine, in vLLM's words."""

    num_blocks: int = 10_000
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096


def _config(
    scheduler_cls: type[AsyncScheduler],
    model: str | Path,
    shape: EngineShape,
    slo_config: dict[str, Any] | None,
    engine_args: Mapping[str, Any],
) -> VllmConfig:
    """vLLM's configuration of an engine of that size, without weights or a tokenizer."""
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=shape.max_model_len,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        block_size=shape.block_size,
        scheduler_cls=scheduler_cls,
        additional_config={"slo_config": slo_config or {}},
        **engine_args,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = shape.num_blocks
    return config


def _block_hasher(config: CacheConfig, block_size: int) -> Callable[[Request], list[Any]] | None:
    """Hashes the blocks of a request for the prefix cache; None without one."""
    hash_fn = get_hash_fn_by_name(config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    if not config.enable_prefix_caching:
        return None
    return get_request_block_hasher(block_size, hash_fn)


class VirtualEngine:
    """Runs a scheduler class step by step.

    Args:
        scheduler_cls: vLLM's, vllm-slo's, or a light one.
        model: folder with a ``config.json``; no weights are read.
        step_time: the true time of a step by its shape, seconds.
        believed: the step-time model of vllm-slo's scheduler; None: it learns one from its prior.
        margin: safety factor on it until live steps have shown one.
        overlap: schedule each step while the one before it runs, as async scheduling does.
        draft: the draft model of an engine that verifies token trees, which never overlaps steps.
        overhead: seconds to schedule a step of so many requests. ``None``: no time.
            ``"measured"``: the time that it takes in this process.
        clock: None: a new one.
        seed: of which drafts are accepted.
        records: whether requests are recorded as ``slo_config`` says. A simulation of a server's
            configuration must not write into the server's file.
        options: further arguments of the scheduler class.
        engine_args: further arguments of vLLM's ``EngineArgs``.

    ``keep_history``: whether ``history`` keeps the output of every step.
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
        draft: DraftModel | None = None,
        slo_config: dict[str, Any] | None = None,
        overhead: Callable[[int], float] | Literal["measured"] | None = None,
        clock: VirtualClock | None = None,
        seed: int = 0,
        records: bool = False,
        options: Mapping[str, Any] | None = None,
        **engine_args: Any,
    ) -> None:
        shape = shape or EngineShape()
        if not records:
            slo_config = {k: v for k, v in (slo_config or {}).items() if k != "recording"}
        self.clock = clock or VirtualClock()
        self.step_time = step_time
        self.overlap = overlap
        self._draft_model = draft and VirtualDraft(
            draft, shape.max_num_batched_tokens, self._token_at, seed
        )
        self.keep_history = True
        self.outcomes: dict[str, Outcome] = {}
        self.lengths: dict[str, int] = {}
        self.finished: list[str] = []
        """Requests that have ended since this list was last emptied."""
        self._light = issubclass(scheduler_cls, LightScheduler)
        self._overhead = overhead
        self._rng = np.random.default_rng(seed)
        self.history: list[SchedulerOutput] = []
        self.scheduler_s = 0.0
        """Wall-clock seconds spent in the scheduler so far."""
        self.computed_tokens = 0
        """Tokens of all steps so far."""
        self._flight: deque[tuple[SchedulerOutput, list[str], float]] = deque()
        self._free_s = 0.0
        self.seal = Seal.from_environment() or Seal("virtual")
        self.stages = KnownEnds()
        self.config = _config(scheduler_cls, model, shape, slo_config, engine_args)
        self._hasher = _block_hasher(self.config.cache_config, shape.block_size)
        options = dict(options or {})
        if issubclass(scheduler_cls, Scheduler):
            horizon = horizon_of(
                (slo_config or {}).get("tpot_window_tokens", DEFAULT_WINDOW_TOKENS)
            )
            options["step_time"] = StepTimeEstimator(believed, horizon=horizon)
            options["step_time"].correction = OnlineCorrection(margin, horizon)
            options.setdefault("stage_marks", self.stages)
            options.setdefault("seal", self.seal)
            # A simulation must not take vLLM's decisions for ours.
            options.setdefault("contains_faults", False)
        if issubclass(scheduler_cls, Scheduler | ShedEDF):
            options["clock"] = self.clock
        spec = FullAttentionSpec(
            block_size=shape.block_size, num_kv_heads=1, head_size=32, dtype=torch.bfloat16
        )
        self.scheduler = scheduler_cls(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(
                num_blocks=shape.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=shape.block_size,
            log_stats=not self._light,
            **options,
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
        acceptance: float = 0.0,
        ticket: Ticket | None = None,
        stage_ends: Sequence[int] = (),
        quote: bool = False,
        stop: Sequence[str] = (),
    ) -> Request:
        """Send a request now.

        Args:
            request_id: unique among the live requests.
            prompt: token ids, or how many.
            output_tokens: length of the answer; the scheduler does not see it.
            max_tokens: the request's own limit; None: ``output_tokens``.
            arrival_s: on the virtual clock; None: now.
            acceptance: probability that a drafted token is accepted.
            ticket: of the front that sent the request; None: there is no front.
            stage_ends: see ``KnownEnds``.
        """
        ids = own_text(request_id, prompt) if isinstance(prompt, int) else list(prompt)
        asked: dict[str, Any] | None = slo.to_extra_args() if slo else None
        if asked and ticket:
            asked = self.seal.sealed({**asked, TICKET_KEY: str(ticket)})
        if quote:
            asked = self.seal.sealed({**(asked or {}), QUOTE_KEY: 1})
        params = SamplingParams(
            max_tokens=max_tokens or output_tokens,
            stop_token_ids=[STOP_TOKEN],
            stop=list(stop),
            extra_args=asked,
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
        self.outcomes[request_id] = Outcome(arrival_s, slo, acceptance=acceptance)
        self.lengths[request_id] = output_tokens
        self.stages.ends[request_id] = tuple(stage_ends)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request as if its client had disconnected."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def forget(self, request_id: str) -> Outcome:
        """Return the outcome of a request and remove everything about it."""
        del self.lengths[request_id], self.stages.ends[request_id]
        return self.outcomes.pop(request_id)

    def wait_until(self, time_s: float) -> None:
        """Advance the clock of an idle engine to ``time_s``; a busy engine is left alone."""
        if not self.busy and time_s > self.clock.now_s:
            self.clock.advance(time_s - self.clock.now_s)

    @property
    def live(self) -> int:
        return len(self.outcomes)

    @property
    def busy(self) -> bool:
        return bool(self._flight) or self.scheduler.has_requests()

    def step(self) -> SchedulerOutput:
        """Schedule one step and process the output that is due.

        That is the step's own output, or with ``overlap`` the one before it. The clock ends at the
        time of the next step.
        """
        output = self._timed(self.scheduler.schedule)
        if self.keep_history:
            self.history.append(output)
        took_s = 0.0
        if output.num_scheduled_tokens:
            if callable(self._overhead):
                self.clock.advance(self._overhead(len(output.num_scheduled_tokens)))
            shape = self._shape(output)
            self.computed_tokens += shape.tokens
            took_s = self.step_time(shape)
            if self._draft_model is not None:
                took_s += self._draft_model.work(output, self.scheduler.requests)
        sampling = [] if self._light else self._sampling(output)
        self._free_s = max(self._free_s, self.clock.now_s) + took_s
        self._flight.append((output, sampling, self._free_s))
        if not self.overlap or len(self._flight) > 1 or not output.num_scheduled_tokens:
            self._finish_one()
        return output

    def _shape(self, output: SchedulerOutput) -> BatchShape:
        """The shape of a step.

        After the target, vLLM's draft model does as many passes as the scheduler asks for, even if
        fewer drafts are verified in the next step. Those of a ``draft`` are counted apart.
        """
        shape = output.batch if isinstance(output, LightOutput) else shape_of(output)
        if self._draft_model is not None:
            return replace(shape, spec_steps=0)
        if self.config.speculative_config is None:
            return shape
        return replace(shape, spec_steps=output.num_spec_tokens_to_schedule)

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call the scheduler; its time is counted and, if overhead is measured, spent."""
        begun_s = time.perf_counter()
        answer = call(*arguments)
        took_s = time.perf_counter() - begun_s
        self.scheduler_s += took_s
        if self._overhead == "measured":
            self.clock.advance(took_s)
        return answer

    def _sampling(self, output: SchedulerOutput) -> list[str]:
        requests = self.scheduler.requests
        return [i for i in output.num_scheduled_tokens if not requests[i].is_prefill_chunk]

    def drain(self) -> None:
        """Process every output still in flight."""
        while self._flight:
            self._finish_one()

    def _finish_one(self) -> None:
        output, sampling, done_s = self._flight.popleft()
        self.clock.advance(max(done_s - self.clock.now_s, 0.0))
        result = self._light_result(output) if self._light else self._result(output, sampling)
        if self._draft_model is not None:
            self._draft_model.tell(result)
        for outputs in self._timed(self.scheduler.update_from_output, output, result).values():
            for request_output in outputs.outputs:
                seen = self.outcomes[request_output.request_id]
                if not self._light:
                    seen.token_times_s += [self.clock.now_s] * len(request_output.new_token_ids)
                    seen.token_ids += request_output.new_token_ids
                if request_output.finish_reason is not None:
                    self.finished.append(request_output.request_id)
                    seen.finish_reason = str(request_output.finish_reason)
                    seen.stop_reason = request_output.stop_reason
                    seen.report = (request_output.kv_transfer_params or {}).get("vllm_slo")
        if self._draft_model is not None:
            live, outcomes = self.scheduler.requests, self.outcomes
            made = {name: request.num_output_tokens for name, request in live.items()}
            best = {name: outcomes[name].acceptance for name in live}
            self.scheduler.update_draft_token_ids(self._draft_model.trees(made, best))

    def _result(self, output: SchedulerOutput, sampling: list[str]) -> ModelRunnerOutput:
        chosen = set(sampling)
        ids = list(output.num_scheduled_tokens)
        drafts = output.scheduled_spec_decode_tokens
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: place for place, request_id in enumerate(ids)},
            sampled_token_ids=[
                self._tokens(output, i, drafts.get(i, ())) if i in chosen else [] for i in ids
            ],
        )

    def _light_result(self, output: LightOutput) -> LightResult:
        """The sampled tokens of a light step; their times are noted here, not on its output."""
        now_s, drafts = self.clock.now_s, output.scheduled_spec_decode_tokens
        sampled = []
        for request in output.sampling:
            request_id = request.request_id
            times_s = self.outcomes[request_id].token_times_s
            made, length = len(times_s), self.lengths[request_id]
            if request_id in drafts:
                tokens = self._drawn(output, request_id, made, drafts[request_id])
                times_s += [now_s] * min(len(tokens), length - made, request.max_tokens - made)
            else:
                tokens = [answer_token(made, length)]
                times_s.append(now_s)
            sampled.append(tokens)
        return LightResult(output.sampling, sampled)

    def _token_at(self, request_id: str, place: int) -> int:
        """Output token number ``place`` of a request, from 0."""
        return answer_token(place, self.lengths[request_id])

    def _tokens(
        self, output: SchedulerOutput, request_id: str, drafted: Sequence[int]
    ) -> list[int]:
        request = self.scheduler.requests.get(request_id)
        made = request.num_output_tokens if request else 0
        return self._drawn(output, request_id, made, drafted)

    def _drawn(
        self, output: SchedulerOutput, request_id: str, made: int, drafted: Sequence[int]
    ) -> list[int]:
        """The accepted drafts after ``made`` tokens, and one more token."""
        if self._draft_model is not None:
            return self._draft_model.given(output, request_id, made)
        acceptance, accepted = self.outcomes[request_id].acceptance, 0
        while accepted < len(drafted) and self._rng.random() < acceptance:
            accepted += 1
        return [self._token_at(request_id, place) for place in range(made, made + accepted + 1)]

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
