# SPDX-License-Identifier: Apache-2.0
"""The live half of ``sim_validation.py``: the workload, and the real engine that serves it."""

from __future__ import annotations

import gc
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from vllm_slo.bench.demo_load import CLASSES as DEMO_CLASSES
from vllm_slo.bench.workload import WorkloadOptions, synthetic
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.config import profiles
from vllm_slo.core.step_time.model import BatchShape, Sample
from vllm_slo.sim.cluster import slo_of
from vllm_slo.sim.hardware import Hardware, load_hardware
from vllm_slo.sim.jobs import STOP_TOKEN, Job, JobResult, Round, RoundResult, Stage, own_text

MAX_CONTEXT: Final = 1024
"""Prompt and answer of one request, tokens."""
MAX_MODEL_LEN: Final = 2048
"""The profile's chunks reach half of it (a live step may hold several prompts)."""
MAX_SEQS: Final = 64
STEP_TOKENS: Final = 2048
BLOCK_SIZE: Final = 32
KV_TOKENS: Final = 32_768
ENGINE: Final[Mapping[str, Any]] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": MAX_SEQS,
    "max_num_batched_tokens": STEP_TOKENS,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": KV_TOKENS // BLOCK_SIZE + 1,  # one of them is vLLM's null block
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,  # vLLM demands that share of the memory to be free
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}
CLASSES: Final = tuple(spec for spec in DEMO_CLASSES if spec.ttft_slowdown is not None)
WARMUP: Final = ((16, 12), (64, 12), (300, 12), (900, 12), (16, 540))
"""(prompt, answer) tokens. First steps are slow, and the scheduler remembers the last 512 steps."""


def hardware_of(profile: Path) -> Hardware:
    """The engine of the live runs, as the simulator knows it."""
    return load_hardware(
        profile,
        kv_tokens=KV_TOKENS,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_MODEL_LEN,
        frontend_s=0.0,
    )


def make_jobs(hardware: Hardware, load: float, duration_s: float, seed: int) -> list[Job]:
    """The demo's classes with an objective, Poisson; objectives relative to zero load.

    ``load``: offered tokens over what the engine could process if it did nothing but prefill.
    """
    lengths = (64, 128, 256, 512, 960)
    zero = ZeroLoad(
        tuple((n, hardware.zero_load_ttft_s(n)) for n in lengths), hardware.zero_load_tpot_s()
    )
    token_s = (zero.ttft_s(lengths[-1]) - zero.ttft_s(128)) / (lengths[-1] - 128)
    shares = sum(spec.share for spec in CLASSES)
    tokens = sum(s.share / shares * (s.prompt.mean + s.output.mean) for s in CLASSES)
    rate = load / (token_s * tokens * MAX_CONTEXT / 2048)
    options = WorkloadOptions(
        rate=rate, duration_s=duration_s, seed=seed, classes=CLASSES, max_context=MAX_CONTEXT
    )
    return [
        Job(
            one.request_id,
            one.slo_class,
            one.at_s,
            (
                Round(
                    one.prompt_tokens,
                    (Stage(one.output_tokens, one.tpot_slo_s or 0.0),),
                    one.ttft_slo_s or 0.0,
                ),
            ),
        )
        for one in synthetic(options, zero).requests
    ]


def read_jobs(path: Path) -> list[Job]:
    """Jobs as ``json.dumps([asdict(job) ...])`` wrote them."""

    def one_round(data: dict[str, Any]) -> Round:
        return Round(**{**data, "stages": tuple(Stage(**stage) for stage in data["stages"])})

    return [
        Job(**{**data, "rounds": tuple(one_round(one) for one in data["rounds"])})
        for data in json.loads(path.read_text())
    ]


class Recorder:
    """Over a scheduler class: ends answers at their length, notes shape and time of each step.

    Times as in ``vllm_slo.engine.telemetry.recording``, so that they compare with a profile's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lengths: dict[str, int] = {}
        self.steps: list[Sample] = []
        self._began_s = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As the scheduler's; the time of a step begins here."""
        self._began_s = time.perf_counter()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As the scheduler's; the step's time ends here."""
        from vllm_slo.engine.telemetry.recording import shape_of

        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        took_s = time.perf_counter() - self._began_s
        if scheduler_output.total_num_scheduled_tokens:
            self.steps.append((shape_of(scheduler_output), took_s))
        return outputs

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> Any:
        """As the scheduler's, with the stop token where the workload ends the answer."""
        if new_token_ids:
            last = request.num_output_tokens + 1 >= self.lengths[request.request_id]
            new_token_ids = [STOP_TOKEN if last else STOP_TOKEN + 1]
        return super()._update_request_with_output(  # type: ignore[misc]
            request, new_token_ids, is_stale
        )


def measure_profile(model: str, out: Path, time_limit_s: float) -> None:
    """Profile the step times of the engine.

    The coarser grid leaves more of the time to batches of decodes with contexts.
    """
    from vllm_slo.engine.serving.profile import profile

    profiles.save(profile(model, quick=True, time_limit_s=time_limit_s, **ENGINE), out)


def start_engine(model: str, ours: bool, profile: Path) -> Any:
    """vLLM's engine in this process."""
    from vllm import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler as Stock
    from vllm.v1.engine.llm_engine import LLMEngine

    base: Any = Stock
    config: dict[str, Any] = {}
    if ours:
        from vllm_slo.engine.scheduler import Scheduler as Ours

        base = Ours
        classes: dict[str, Any] = {spec.name: {} for spec in CLASSES}
        config = {"slo_config": {"profile": str(profile), "classes": classes}}
    recorded: Any = type("Recorded", (Recorder, base), {})
    arguments = EngineArgs(
        model,
        scheduler_cls=recorded,
        async_scheduling=False,
        additional_config=config,
        **ENGINE,
    )
    return LLMEngine.from_engine_args(arguments)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request in the engine's form, and the tokens of its answer."""

    request: Any
    output_tokens: int


def prepare(
    engine: Any, name: str, prompt: list[int], output_tokens: int, extra: dict[str, Any] | None
) -> Prepared:
    """Everything about a request that can be done before it arrives."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=MAX_MODEL_LEN - len(prompt),
        stop_token_ids=[STOP_TOKEN],
        ignore_eos=True,
        detokenize=False,
        extra_args=extra,
    )
    request = engine.input_processor.process_inputs(
        name, {"prompt_token_ids": prompt}, params, engine.get_supported_tasks()
    )
    return Prepared(request, output_tokens)


@dataclass(slots=True)
class Replay:
    """The engine core and the scheduler within it, driven in real time."""

    core: Any
    scheduler: Any

    @classmethod
    def of(cls, engine: Any) -> Replay:
        """Drive the engine core of an in-process ``LLMEngine``."""
        client = engine.engine_core
        return cls(client, client.engine_core.scheduler)

    def add(self, one: Prepared, arrived_epoch_s: float) -> None:
        """Send a request with its planned arrival time, even if the current step delayed it."""
        one.request.arrival_time = arrived_epoch_s
        self.scheduler.lengths[one.request.request_id] = one.output_tokens
        self.core.add_request(one.request)

    def warm_up(self, requests: Sequence[Prepared]) -> None:
        """Run requests without objectives to their end, and drop their steps."""
        for one in requests:
            self.add(one, time.time())
        while self.scheduler.has_requests():
            self.core.get_output()
        self.scheduler.steps.clear()
        gc.collect()
        gc.freeze()  # as vLLM does once its engine has started

    def run(self, requests: Sequence[tuple[float, Prepared]]) -> dict[str, dict[str, Any]]:
        """Send each request at its time (seconds, rising); returns the results by name."""
        seen: dict[str, dict[str, Any]] = {
            one.request.request_id: {"times_s": [], "finished": False, "promised": None}
            for _, one in requests
        }
        left = deque(requests)
        begun_s, epoch_s = time.monotonic() + 0.1, time.time() + 0.1
        while left or self.scheduler.has_requests():
            now_s = time.monotonic() - begun_s
            while left and left[0][0] <= now_s:
                arrival_s, one = left.popleft()
                self.add(one, epoch_s + arrival_s)
            if not self.scheduler.has_requests():
                time.sleep(max(left[0][0] - now_s, 0.0))
                continue
            outputs = self.core.get_output().outputs
            now_s = time.monotonic() - begun_s
            for output in outputs:
                note(seen[output.request_id], output, now_s)
        return seen


def note(seen: dict[str, Any], output: Any, now_s: float) -> None:
    """Record an output of the engine core at its request."""
    seen["times_s"] += [now_s] * len(output.new_token_ids)
    if output.finish_reason is not None:
        seen["finished"] = str(output.finish_reason) == "stop"
        report = (output.kv_transfer_params or {}).get("vllm_slo")
        seen["promised"] = report and report["promised"]


def replay(model: str, jobs: Sequence[Job], ours: bool, profile: Path, out: Path) -> None:
    """Serve the jobs in real time; writes ``out`` (JSON)."""
    engine = start_engine(model, ours, profile)
    one = Replay.of(engine)
    one.warm_up(
        [
            prepare(engine, f"warm-{n}", own_text(f"warm-{n}", prompt), answer, None)
            for n, (prompt, answer) in enumerate(WARMUP)
        ]
    )
    requests = []
    for number, job in enumerate(jobs):
        (asked,) = job.rounds
        # The simulator's prompts, so that both find the same in their prefix caches: nothing.
        prompt = own_text(f"{number}.0", asked.prompt_tokens)
        slo = slo_of(job, 0)
        extra = slo.to_extra_args() if slo else None
        requests.append(
            (job.arrival_s, prepare(engine, job.job_id, prompt, asked.output_tokens, extra))
        )
    seen = one.run(requests)
    cache = engine.vllm_config.cache_config
    steps = [[*asdict(shape).values(), took_s] for shape, took_s in one.scheduler.steps]
    data = {
        "kv_tokens": (cache.num_gpu_blocks - 1) * cache.block_size,
        "requests": seen,
        "steps": steps,
    }
    out.write_text(json.dumps(data))
    engine.engine_core.shutdown()


@dataclass(frozen=True, slots=True)
class Live:
    """One live run: its jobs and the steps that served them."""

    results: tuple[JobResult, ...]
    steps: tuple[Sample, ...]


def read_live(path: Path, jobs: Sequence[Job]) -> Live:
    """Read a file that ``replay`` wrote."""
    data = json.loads(path.read_text())
    if data["kv_tokens"] != KV_TOKENS:
        raise SystemExit(f"the engine had {data['kv_tokens']} KV tokens, not {KV_TOKENS}")
    results = []
    for job in jobs:
        seen = data["requests"][job.job_id]
        times_s = tuple(seen["times_s"])
        got = RoundResult(job.arrival_s, times_s, seen["finished"], seen["promised"])
        results.append(JobResult(job, (got,)))
    steps = tuple((BatchShape(*map(int, row[:5])), float(row[5])) for row in data["steps"])
    return Live(tuple(results), steps)
