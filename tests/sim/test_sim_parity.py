# SPDX-License-Identifier: Apache-2.0
"""The simulator and the live engine make the same plans for one trace.

The live engine is vLLM's own, in a process of its own: real weights, real tokens, real blocks. Only
its time is virtual: the scheduler's clock stands still but for each step's modelled time, as the
simulator's does. Run as a script, this file is that process.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
from patience import patience

pytest.importorskip("vllm")

from hermetic import python_path
from live_server import UNIPROC, environment
from model_config import CONFIG
from support_folder import SUPPORT
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_slo import SLO
from vllm_slo.core.clock import VirtualClock
from vllm_slo.core.step_time.estimator import OnlineCorrection, StepTimeEstimator
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.telemetry.recording import shape_of
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.sim.light_scheduler import LightScheduler, LightSLOScheduler

pytestmark = pytest.mark.versions

ROOFLINE = StepTimeModel(
    ((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192, pair_s=1e-8
)
BLOCKS, BLOCK_SIZE, SEATS, STEP_TOKENS, MAX_LEN = 28, 32, 8, 64, 512
SLO_CONFIG = {"classes": {"chat": {"ttft_ms": 900, "tpot_ms": 60}}}
SLOS = (
    SLO(slo_class="chat"),
    SLO(ttft_ms=400, tpot_ms=45),
    SLO(ttft_ms=2500, tpot_ms=150),
    SLO(ttft_ms=1200),
    SLO(tpot_ms=80),
    SLO(ttft_ms=1, tpot_ms=1),  # out of reach
    SLO(ttft_ms=1, on_unattainable="decline"),
    SLO(tier="best_effort"),
    None,
)
STOPS = list(range(0, 2048, 60))
"""One token in sixty ends an answer, so that its length is the model's to say."""
SEED, REQUESTS = 1, 36
LIMIT = 200_000


@dataclass(frozen=True)
class Ask:
    """One request of the trace; how long its answer gets is up to the model."""

    name: str
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    slo: SLO | None
    priority: int


def trace(seed: int) -> list[Ask]:
    """Mixed objectives, faster than they can be served; some prompts begin alike."""
    rng = random.Random(seed)
    head = tuple(rng.randrange(300, 2000) for _ in range(100))
    asks, now_s = [], 0.0
    for number in range(REQUESTS):
        now_s += rng.expovariate(14.0) + (1.5 if number == REQUESTS - 6 else 0.0)
        body = tuple(rng.randrange(300, 2000) for _ in range(rng.randint(8, 180)))
        asks.append(
            Ask(
                f"r{number}",
                now_s,
                head + body if rng.random() < 0.3 else body,
                rng.randint(4, 60),
                rng.choice(SLOS),
                rng.randrange(4),
            )
        )
    return asks


@dataclass
class Plan:
    """One step: when it was planned, what it gave whom in order, whom it preempted."""

    at_s: float
    tokens: list[tuple[str, int]]
    preempted: list[str]


def plan_of(output: SchedulerOutput, at_s: float) -> Plan:
    """The live engine puts a suffix after each name; it goes here."""
    return Plan(
        at_s,
        [(name.split("-")[0], tokens) for name, tokens in output.num_scheduled_tokens.items()],
        sorted(name.split("-")[0] for name in output.preempted_req_ids or ()),
    )


class Engine(Protocol):
    """What ``drive`` needs of either engine."""

    clock: VirtualClock

    def send(self, ask: Ask) -> None: ...

    def has_requests(self) -> bool: ...

    def step(self) -> bool:
        """Whether anything was computed."""


def drive(engine: Engine, asks: Sequence[Ask]) -> None:
    """Requests go in when their time has come and no step is running."""
    left = list(asks)
    for _ in range(LIMIT):
        while left and left[0].at_s <= engine.clock.now_s:
            engine.send(left.pop(0))
        if engine.has_requests():
            if not engine.step():
                engine.clock.advance(0.001)
        elif left:
            engine.clock.advance(left[0].at_s - engine.clock.now_s)
        else:
            return
    raise RuntimeError(f"not finished after {LIMIT} steps")


# The live engine, in a process of its own.


def on_virtual_time(base: type[StockScheduler]) -> type[StockScheduler]:
    """``base``, but a step takes what the model says, and each plan is noted."""

    class OnVirtualTime(base):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.time = VirtualClock()
            self.free_s = 0.0
            self.plans: list[Plan] = []
            if issubclass(base, Scheduler):
                estimator = StepTimeEstimator(ROOFLINE)
                estimator.correction = OnlineCorrection(1.0)
                kwargs |= {"clock": self.time, "step_time": estimator}
            super().__init__(*args, **kwargs)

        def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
            output = super().schedule(throttle_prefills)
            self.plans.append(plan_of(output, self.time.now_s))
            return output

        def update_from_output(self, output: SchedulerOutput, result: Any) -> Any:
            took_s = ROOFLINE.predict_shape_s(shape_of(output)) if self.plans[-1].tokens else 0.0
            self.free_s = max(self.free_s, self.time.now_s) + took_s
            self.time.advance(max(self.free_s - self.time.now_s, 0.0))
            return super().update_from_output(output, result)

    return OnVirtualTime


class Live:
    """vLLM's engine, step by step in this process."""

    def __init__(self, base: type[StockScheduler], policy: str, model: Path) -> None:
        arguments = EngineArgs(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_LEN,
            max_num_seqs=SEATS,
            max_num_batched_tokens=STEP_TOKENS,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=BLOCKS,
            gpu_memory_utilization=0.2,
            async_scheduling=False,
            scheduling_policy=policy,  # type: ignore[arg-type]
            scheduler_cls=on_virtual_time(base),
            additional_config={"slo_config": SLO_CONFIG},
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.clock: VirtualClock = self.scheduler.time
        self.answers: dict[str, list[int]] = {}
        self.times_s: dict[str, list[float]] = {}
        self.promised: dict[str, str | None] = {}
        assert self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks == BLOCKS

    def send(self, ask: Ask) -> None:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=ask.max_tokens,
            stop_token_ids=STOPS,
            detokenize=False,
            extra_args=ask.slo.to_extra_args() if ask.slo else None,
        )
        prompt = {"prompt_token_ids": list(ask.prompt)}
        self.engine.add_request(
            ask.name, prompt, params, arrival_time=ask.at_s, priority=ask.priority
        )
        self.times_s[ask.name] = []

    def has_requests(self) -> bool:
        return bool(self.scheduler.has_requests())

    def step(self) -> bool:
        for output in self.engine.step():
            name, said = output.request_id.split("-")[0], list(output.outputs[0].token_ids)
            new = len(said) - len(self.answers.get(name, ()))
            self.times_s[name] += [self.clock.now_s] * new
            self.answers[name] = said
            if output.finished:
                report = (output.kv_transfer_params or {}).get("vllm_slo")
                self.promised[name] = promise_in(report)
        return bool(self.scheduler.plans[-1].tokens)


def promise_in(report: dict[str, Any] | None) -> str | None:
    """What a request was promised by its report: "in time", "late" or "none"."""
    if report is None:
        return None
    return ("late" if report["late"] else "in time") if report["promised"] else "none"


LIVE: dict[str, tuple[type[StockScheduler], str]] = {
    "stock": (StockScheduler, "fcfs"),
    "stock priority": (AsyncScheduler, "priority"),
    "ours": (Scheduler, "fcfs"),
}
"""Name -> scheduler and policy. Ours comes last: once numba is there, no engine starts on CPU."""


def live_main(seed: int, folder: Path) -> None:
    """Serve the trace with each of ``LIVE``; what happened goes to a JSON file in ``folder``."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    said = {}
    for name, (base, policy) in LIVE.items():
        live = Live(base, policy, folder)
        drive(live, trace(seed))
        said[name] = {
            "plans": [asdict(plan) for plan in live.scheduler.plans],
            "answers": live.answers,
            "times_s": live.times_s,
            "promised": live.promised,
        }
        live.engine.engine_core.shutdown()
    (folder / "said.json").write_text(json.dumps(said))


# The tests.


class Simulated:
    """The virtual engine, told how long the answers of the live one got."""

    def __init__(
        self, cls: type[StockScheduler], policy: str, folder: Path, lengths: dict[str, int]
    ) -> None:
        self.engine = VirtualEngine(
            cls,  # type: ignore[arg-type]
            folder,
            ROOFLINE.predict_shape_s,
            EngineShape(BLOCKS, BLOCK_SIZE, SEATS, STEP_TOKENS, MAX_LEN),
            believed=ROOFLINE,
            slo_config=SLO_CONFIG,
            scheduling_policy=policy,
        )
        self.clock = self.engine.clock
        self.plans: list[Plan] = []
        self.lengths = lengths

    def send(self, ask: Ask) -> None:
        self.engine.add(
            ask.name,
            ask.prompt,
            self.lengths[ask.name] or 1,  # nobody is asked for the answer of a declined request
            ask.slo,
            max_tokens=ask.max_tokens,
            priority=ask.priority,
            arrival_s=ask.at_s,
        )

    def has_requests(self) -> bool:
        return bool(self.engine.scheduler.has_requests())

    def step(self) -> bool:
        at_s = self.clock.now_s
        self.plans.append(plan_of(self.engine.step(), at_s))
        return bool(self.plans[-1].tokens)


def first_difference(simulated: Simulated, live: dict[str, Any]) -> str | None:
    """Where the simulator and the live engine part, or None."""
    plans = [
        Plan(p["at_s"], [(name, n) for name, n in p["tokens"]], p["preempted"])
        for p in live["plans"]
    ]
    for number, (ours, theirs) in enumerate(zip(simulated.plans, plans, strict=False)):
        if ours != theirs:
            return f"step {number}: {ours} != {theirs}"
    if len(simulated.plans) != len(plans):
        return f"{len(simulated.plans)} steps != {len(plans)}"
    for name, seen in simulated.engine.outcomes.items():
        if seen.token_times_s != live["times_s"][name]:
            return f"{name}: {seen.token_times_s} != {live['times_s'][name]}"
        promised = promise_in(seen.report)
        if promised != live["promised"][name]:
            return f"{name}: promised {promised} != {live['promised'][name]}"
    return None


class Said(NamedTuple):
    """Seed of the trace, folder of the model, and name -> what ``live_main`` wrote of it."""

    seed: int
    folder: Path
    engines: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What the live engines said about one trace."""
    folder = tmp_path_factory.mktemp("parity")
    done = subprocess.run(
        [sys.executable, __file__, str(SEED), str(folder)],
        capture_output=True,
        text=True,
        timeout=patience(280),
        check=False,
        env=environment()
        | UNIPROC
        | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": python_path(SUPPORT),
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Said(SEED, folder, json.loads((folder / "said.json").read_text()))


def simulated(said: Said, name: str, cls: type[StockScheduler]) -> Simulated:
    """The trace of ``said`` in the simulator, with the answer lengths of engine ``name``.

    An answer that its cap cuts off would have been longer, which the scheduler learns.
    """
    asks = trace(said.seed)
    caps = {ask.name: ask.max_tokens for ask in asks}
    lengths = {
        one: len(answer) + (len(answer) == caps[one])
        for one, answer in said.engines[name]["answers"].items()
    }
    engine = Simulated(cls, LIVE[name][1], said.folder, lengths)
    drive(engine, asks)
    return engine


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("stock", AsyncScheduler),
        ("stock", LightScheduler),
        ("stock priority", AsyncScheduler),
        ("stock priority", LightScheduler),
        ("ours", Scheduler),
        ("ours", LightSLOScheduler),
    ],
)
def test_the_simulator_plans_what_the_live_engine_plans(
    said: Said, name: str, cls: type[StockScheduler]
) -> None:
    assert first_difference(simulated(said, name, cls), said.engines[name]) is None


@pytest.mark.engine
def test_the_traces_are_worth_comparing(said: Said) -> None:
    asks = {ask.name: ask for ask in trace(said.seed)}
    for name, live in said.engines.items():
        steps = [dict(plan["tokens"]) for plan in live["plans"]]
        computed = sum(sum(step.values()) for step in steps)
        answers = live["answers"]
        assert set(answers) == set(asks)
        assert name == "ours" or any(plan["preempted"] for plan in live["plans"])
        assert any(1 < tokens < len(asks[r].prompt) for step in steps for r, tokens in step.items())
        assert any(0 < len(answers[r]) < asks[r].max_tokens for r in asks)  # it stopped by itself
        assert any(len(answers[r]) == asks[r].max_tokens for r in asks)
        assert max(map(len, steps)) >= SEATS - 2
        assert computed > 2000
    promised = Counter(said.engines["ours"]["promised"].values())
    assert min(promised[promise] for promise in ("in time", "late", "none", None)) > 1, promised
    assert not all(said.engines["ours"]["answers"].values())  # somebody was declined


class LeavesOneToken(LightScheduler):
    """Leaves one token of each step unused."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.max_num_scheduled_tokens = STEP_TOKENS - 1
        return super().schedule(throttle_prefills)


@pytest.mark.engine
def test_the_comparison_bites(said: Said) -> None:
    ours, stock = said.engines["ours"], said.engines["stock"]
    assert first_difference(simulated(said, "ours", LightScheduler), ours)
    assert first_difference(simulated(said, "stock", LeavesOneToken), stock)
    longest = max(stock["answers"], key=lambda name: len(stock["answers"][name]))
    stock["answers"][longest].pop()  # one token less than the model said
    try:
        assert first_difference(simulated(said, "stock", LightScheduler), stock)
    finally:
        stock["answers"][longest].append(0)


if __name__ == "__main__":
    live_main(int(sys.argv[1]), Path(sys.argv[2]))
