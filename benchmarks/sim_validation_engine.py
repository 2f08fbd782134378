# SPDX-License-Identifier: Apache-2.0
"""One real engine of ``sim_validation.py``, in a process of its own on one core.

``python sim_validation_engine.py FD``: FD is a socket on which a parent asks and is answered, in
Python's pickles (`multiprocessing.connection`). The first message is an `EngineSetup`. The process
steps vLLM's engine core as long as it has requests, and sleeps otherwise.

Answers end where the workload says, by a stop token that the scheduler cannot foresee.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from vllm_slo.config.profiles import ProfileReport
from vllm_slo.core.step_time.model import BatchShape, Sample
from vllm_slo.sim.jobs import STOP_TOKEN, answer_token, own_text

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the whole process is bound to its core
    "OMP_NUM_THREADS": "1",
}
MAX_CONTEXT: Final = 1024
"""Prompt and answer of one request, tokens."""
MAX_MODEL_LEN: Final = 2048
"""The profile's chunks reach half of it (a live step may hold several prompts)."""
MAX_SEQS: Final = 64
STEP_TOKENS: Final = 2048
BLOCK_SIZE: Final = 32
STATE_INTERVAL_S: Final = 0.02
"""Shortest time between two states that a busy replica tells (`Conditions.state_interval_s`)."""
WARMUP: Final = ((16, 12), (64, 12), (300, 12), (900, 12), (16, 540))
"""(prompt, answer) tokens. First steps are slow, and the scheduler remembers the last 512 steps."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """An engine.

    Attributes:
        arguments: of ``vllm.EngineArgs``, beyond those that all engines have.
        slo_config: of vllm-slo's scheduler; None: vLLM's own schedules.
        core: on which the process runs.
        tells_state: whether it tells its state after steps.
    """

    arguments: Mapping[str, Any]
    slo_config: Mapping[str, Any] | None
    core: int
    tells_state: bool = False


class Asked(NamedTuple):
    """A request before it is sent."""

    name: str
    prompt: list[int]
    output_tokens: int
    application: str


class LiveStep(NamedTuple):
    """One step.

    Attributes:
        shape: ``spec_steps``: passes of vLLM's draft model after it.
        took_s: from ``schedule`` to the end of ``update_from_output``, as a profile counts it.
        scheduling_s: what the scheduler took of it.
        gap_s: from the step before it, in which the process took in requests and gave out tokens;
            0 if the engine was idle.
        drafting: (tokens, seconds) of each pass of the draft of trees.
        ended_s: on the machine's monotonic clock.
    """

    shape: BatchShape
    took_s: float
    scheduling_s: float
    gap_s: float
    drafting: tuple[tuple[int, float], ...]
    ended_s: float = 0.0

    @property
    def sample(self) -> Sample:
        """The step without the passes of a draft of trees."""
        return self.shape, self.took_s - sum(seconds for _, seconds in self.drafting)


@dataclass(slots=True)
class Record:
    """What an engine notes of a run.

    Attributes:
        tried, accepted: application -> drafted tokens that were looked at (none behind one that was
            refused), and those of them that were right. Of trees, the best guesses.
        preemptions: requests that lost their memory.
        cached_tokens: prompt tokens that were in the prefix cache.
        deliveries_s: from the planned arrival of a request until this process had it, of requests
            that found the engine idle.
    """

    steps: list[LiveStep] = field(default_factory=list)
    tried: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    accepted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    preemptions: int = 0
    cached_tokens: int = 0
    deliveries_s: list[float] = field(default_factory=list)


class Profiled(NamedTuple):
    """A profile, and every step from which it was made."""

    report: ProfileReport
    steps: tuple[LiveStep, ...]


class Recorder:
    """Over a scheduler class: ends answers at their length, and records steps.

    Times as in ``vllm_slo.engine.telemetry.recording``, so that they compare with a profile's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lengths: dict[str, int] = {}
        self.applications: dict[str, str] = {}
        self.record = Record()
        self._began_s = self._scheduled_s = self._ended_s = self._gap_s = 0.0
        self._is_busy = False
        spec = self.vllm_config.speculative_config  # type: ignore[attr-defined]
        self._drafts_chains = spec is not None and spec.method != "custom_class"

    @property
    def steps(self) -> list[Sample]:
        """Shapes and times, as the profile's measurement reads them."""
        return _Samples(self.record)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As the scheduler's; the time of a step begins here."""
        self._began_s = time.perf_counter()
        self._gap_s = self._began_s - self._ended_s if self._is_busy else 0.0
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._scheduled_s = time.perf_counter()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As the scheduler's; the step's time ends here."""
        begun_s = time.perf_counter()
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        self._ended_s = ended_s = time.perf_counter()
        self._is_busy = self.has_requests()  # type: ignore[attr-defined]
        if scheduler_output.total_num_scheduled_tokens:
            scheduling_s = self._scheduled_s - self._began_s + ended_s - begun_s
            took_s = ended_s - self._began_s
            self._note(scheduler_output, model_runner_output, took_s, scheduling_s)
        return outputs

    def _note(self, output: Any, done: Any, took_s: float, scheduling_s: float) -> None:
        from vllm_slo.engine.speculation import messages
        from vllm_slo.engine.telemetry.recording import shape_of

        trees = messages.of(output).parents
        shape, record = shape_of(output), self.record
        passes = output.num_spec_tokens_to_schedule if self._drafts_chains else 0
        drafting = tuple((tokens, s) for _, tokens, s in messages.drafting_of(done).passes)
        shape = replace(shape, spec_steps=passes)
        record.steps.append(
            LiveStep(shape, took_s, scheduling_s, self._gap_s, drafting, time.monotonic())
        )
        record.preemptions += len(output.preempted_req_ids or ())
        record.cached_tokens += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            given = done.sampled_token_ids[done.req_id_to_index[name]]
            parents = trees.get(name) or range(-1, len(drafts) - 1)
            tried, accepted = best_guesses(drafts, parents, given)
            record.tried[self.applications[name]] += tried
            record.accepted[self.applications[name]] += accepted

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> Any:
        """As the scheduler's, with the stop token where the workload ends the answer."""
        if new_token_ids:
            made, length = request.num_output_tokens, self.lengths[request.request_id]
            new_token_ids = [
                answer_token(place, length) for place in range(made, made + len(new_token_ids))
            ]
        return super()._update_request_with_output(  # type: ignore[misc]
            request, new_token_ids, is_stale
        )


class _Samples(list[Sample]):
    """The steps of a record as samples; clearing it clears the record."""

    def __init__(self, record: Record) -> None:
        super().__init__(step.sample for step in record.steps)
        self._record = record

    def clear(self) -> None:
        super().clear()
        self._record.steps.clear()


def best_guesses(
    tokens: Sequence[int], parents: Sequence[int], given: Sequence[int]
) -> tuple[int, int]:
    """How many best guesses of a tree were looked at, and how many of them were right.

    Args:
        tokens: drafted.
        parents: of each, -1 for the root; the children of a node come in the order of the draft's
            confidence.
        given: tokens of the step: the accepted ones and one more.
    """
    tried = right = 0
    at = -1
    for token in given:
        children = [node for node, above in enumerate(parents) if above == at]
        if not children:
            break
        tried += 1
        right += tokens[children[0]] == token
        found = [node for node in children if tokens[node] == token]
        if not found:
            break
        at = found[0]
    return tried, right


def start_engine(setup: EngineSetup) -> Any:
    """vLLM's engine in this process."""
    from vllm import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler as Stock
    from vllm.v1.engine.llm_engine import LLMEngine

    base: Any = Stock
    config: dict[str, Any] = {}
    if setup.slo_config is not None:
        from vllm_slo.engine.scheduler import Scheduler as Ours

        base, config = Ours, {"additional_config": dict(setup.slo_config)}
    arguments = EngineArgs(
        **{
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_SEQS,
            "max_num_batched_tokens": STEP_TOKENS,
            "block_size": BLOCK_SIZE,
            "enforce_eager": True,
            "gpu_memory_utilization": 0.1,  # vLLM demands that share of the memory to be free
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "async_scheduling": False,
            "scheduler_cls": type("Recorded", (Recorder, base), {}),
            **config,
            **setup.arguments,
        }
    )
    return LLMEngine.from_engine_args(arguments)


class Engine:
    """The engine core and the scheduler within it, driven in real time.

    Args:
        parent: gets ``("ended", name, times, finished, report)`` of every request, times on the
            machine's monotonic clock, and ``("state", state, taken_s)``.
    """

    def __init__(self, setup: EngineSetup, parent: Connection) -> None:
        self._engine = start_engine(setup)
        self._core = self._engine.engine_core
        self._scheduler = self._core.engine_core.scheduler
        self._parent = parent
        self._tells_state = setup.tells_state
        self._told_s = 0.0
        self._prepared: dict[str, Any] = {}
        self._times_s: dict[str, list[float]] = {}

    # What the parent asks.

    def profile(self, time_limit_s: float) -> Profiled:
        """Measure step times as ``vllm-slo profile --quick`` does."""
        from vllm_slo.core.step_time.fit import fit
        from vllm_slo.engine.scheduling.step_time_profile import profile_key
        from vllm_slo.engine.serving.profile_measurement import measure

        self._scheduler.lengths = defaultdict(lambda: MAX_MODEL_LEN)
        llm = SimpleNamespace(llm_engine=self._engine)
        samples = measure(llm, quick=True, time_limit_s=time_limit_s)
        key = profile_key(self._engine.vllm_config)
        steps, self._scheduler.record = self._scheduler.record.steps, Record()
        return Profiled(ProfileReport(key, fit(samples), tuple(samples)), tuple(steps))

    def warm_up(self) -> None:
        """Run requests without objectives to their end."""
        warm = [
            Asked(f"warm-{n}", own_text(f"warm-{n}", prompt), answer, "warm-up")
            for n, (prompt, answer) in enumerate(WARMUP)
        ]
        self.prepare(warm)
        for one in warm:
            self.add(one.name, time.time(), None)
        while self._scheduler.has_requests():
            self._core.get_output()
        self._times_s.clear()
        self._scheduler.record = Record()
        gc.collect()
        gc.freeze()  # as vLLM does once its engine has started

    def prepare(self, requests: Sequence[Asked]) -> None:
        """Do everything about requests that can be done before they arrive; a new record begins."""
        from vllm import SamplingParams

        tasks = self._engine.get_supported_tasks()
        longest = self._engine.vllm_config.model_config.max_model_len
        self._prepared = {}
        for one in requests:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=longest - len(one.prompt),
                stop_token_ids=[STOP_TOKEN],
                ignore_eos=True,
                detokenize=False,
            )
            self._prepared[one.name] = self._engine.input_processor.process_inputs(
                one.name, {"prompt_token_ids": one.prompt}, params, tasks
            )
        self._scheduler.lengths = {one.name: one.output_tokens for one in requests}
        self._scheduler.applications = {one.name: one.application for one in requests}
        self._scheduler.record = Record()

    def add(self, name: str, arrived_epoch_s: float, extra: dict[str, Any] | None) -> None:
        """Send a request with its planned arrival time, even if the current step delayed it."""
        request = self._prepared[name]
        request.arrival_time = arrived_epoch_s
        request.sampling_params.extra_args = extra
        self._times_s[name] = []
        if not self._scheduler.has_requests():
            self._scheduler.record.deliveries_s.append(time.time() - arrived_epoch_s)
        self._core.add_request(request)

    def record(self) -> Record:
        """What was recorded since `prepare`."""
        record: Record = self._scheduler.record
        record.tried, record.accepted = dict(record.tried), dict(record.accepted)
        return record

    # Running.

    def serve(self) -> None:
        """Answer the parent and step the engine until the parent closes the connection."""
        while True:
            while self._parent.poll(0.0 if self._scheduler.has_requests() else None):
                try:
                    what, *arguments = self._parent.recv()
                except EOFError:
                    return
                answer = getattr(self, what)(*arguments)
                if what != "add":
                    self._parent.send(("done", answer))
            self._step()

    def _step(self) -> None:
        outputs = self._core.get_output().outputs
        now_s = time.monotonic()
        for output in outputs:
            times_s = self._times_s[output.request_id]
            times_s += [now_s] * len(output.new_token_ids)
            if output.finish_reason is not None:
                report = (output.kv_transfer_params or {}).get("vllm_slo")
                finished = str(output.finish_reason) == "stop"
                del self._times_s[output.request_id]
                self._parent.send(("ended", output.request_id, times_s, finished, report))
        busy = self._scheduler.has_requests()
        if self._tells_state and (not busy or now_s >= self._told_s + STATE_INTERVAL_S):
            self._told_s = now_s
            self._parent.send(("state", self._scheduler.state(), now_s))


def main() -> None:
    """Serve one parent."""
    parent = Connection(int(sys.argv[1]))
    setup: EngineSetup = parent.recv()
    os.sched_setaffinity(0, {setup.core})
    engine = Engine(setup, parent)
    engine.warm_up()
    parent.send(("done", None))
    engine.serve()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    # What is unpickled here and there belongs to a module of this name.
    from sim_validation_engine import main as run

    run()
