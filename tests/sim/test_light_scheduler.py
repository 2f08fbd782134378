# SPDX-License-Identifier: Apache-2.0
"""The light scheduler decides what vLLM's scheduler object decides: every step, every instant."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.request import Request

from vllm_slo.core.step_time.model import BatchShape
from vllm_slo.engine.telemetry.recording import shape_of
from vllm_slo.sim import virtual_replicas as replicas
from vllm_slo.sim.cluster import Simulation
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import Hardware, load_hardware
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.sim.jobs import Job, JobResult, Round, RoundResult, Stage
from vllm_slo.sim.light_scheduler import LightOutput, LightScheduler, LightSLOScheduler, _Step
from vllm_slo.sim.systems import OURS, System, speculating, system
from vllm_slo.sim.workload import make_jobs

pytestmark = [pytest.mark.slow, pytest.mark.versions]

SEEDS = 20
DRAFTED_SEEDS = 5
DRAFTS = (1, 3, 8)
POLICIES = ("slo", "fcfs", "priority")
STEP_LIMIT = 600
"""Where a comparison ends at the latest; an idle engine looks for work every millisecond."""


class Setting(NamedTuple):
    """How one scenario is made small: its lengths are divided, what it runs on is shrunk."""

    hardware: str
    prompt_divisor: int
    answer_divisor: int
    kv_tokens: int
    rate: float
    jobs: int = 12


SETTINGS = {
    "chatbot": Setting("a100-opt-13b", 6, 10, 768, 60.0),
    "coder": Setting("a100-opt-13b", 6, 2, 704, 60.0),
    "summarizer": Setting("a100-opt-13b", 6, 8, 832, 60.0),
    "mixed": Setting("a100-opt-13b", 6, 8, 768, 60.0),
    "toolllm": Setting("a100-toolllama-7b", 6, 6, 1024, 20.0, 8),
    "reasoning": Setting("a100-qwen-1.5b", 2, 150, 448, 120.0),
}
BUDGETS = (48, 128, 512, 2048)
"""Tokens of a step, by seed: most prompts are chunked under the first two."""
LONGEST_PROMPT, LONGEST_STAGE = 320, 40


def small(setting: Setting) -> Hardware:
    """Room for a handful of requests; the longest one is sure to fit."""
    return replace(
        load_hardware(setting.hardware).with_draft_step(0.001),
        kv_tokens=setting.kv_tokens,
        max_model_len=setting.kv_tokens,
        max_num_seqs=8,
    )


def trace(scenario: str, seed: int) -> list[Job]:
    """A scenario's jobs with short prompts and answers; objectives as slack as the scenario's."""
    setting = SETTINGS[scenario]
    full, hardware = load_hardware(setting.hardware), small(setting)
    jobs = make_jobs(scenario, full, rate=setting.rate, count=setting.jobs, seed=seed)
    return [_shortened(job, setting, full, hardware) for job in jobs]


def _shortened(job: Job, setting: Setting, full: Hardware, hardware: Hardware) -> Job:
    rounds: list[Round] = []
    context = asked = 0
    for one in job.rounds:
        slowdown = one.ttft_s / full.zero_load_ttft_s(one.prompt_tokens, asked)
        asked += one.prompt_tokens + one.output_tokens
        prompt = min(max(one.prompt_tokens // setting.prompt_divisor, 1), LONGEST_PROMPT)
        stages = tuple(
            Stage(min(max(s.tokens // setting.answer_divisor, 1), LONGEST_STAGE), s.tpot_s)
            for s in one.stages
        )
        answer = sum(stage.tokens for stage in stages)
        if context + prompt + answer > hardware.kv_tokens:
            break
        ttft_s = slowdown * hardware.zero_load_ttft_s(prompt, context)
        rounds.append(Round(prompt, stages, ttft_s, one.wait_s / 10))
        context += prompt + answer
    return replace(job, rounds=tuple(rounds))


def system_of(policy: str, seed: int, drafts: int = 0) -> System:
    budget = BUDGETS[seed % len(BUDGETS)]
    plain = replace(OURS, token_budget=budget) if policy == "slo" else system(policy, budget)  # type: ignore[arg-type]
    return speculating(plain, drafts) if drafts else plain


# A run, written down.


class CutShortError(Exception):
    """The comparison is long enough."""


class Seen(NamedTuple):
    """One step: what it gave whom, in order, how many drafts of whom it verified, whom it
    preempted, its shape, when it was over."""

    tokens: tuple[tuple[str, int], ...]
    drafts: tuple[tuple[str, int], ...]
    preempted: tuple[str, ...]
    shape: BatchShape | None
    done_s: float


@dataclass
class Record:
    """Everything that happened in one simulation."""

    steps: list[Seen]
    results: list[JobResult]
    history: list[SchedulerOutput]
    counts: Counter[str] = field(default_factory=Counter)


def run(jobs: Sequence[Job], one: System, hardware: Hardware, conditions: Conditions) -> Record:
    """A simulation on one replica, step by step."""
    simulation = Simulation(jobs, one, hardware, conditions, None)
    engine = simulation.replicas[0].engine  # type: ignore[attr-defined]
    engine.keep_history = True
    steps: list[Seen] = []
    engine.step = spied(engine, steps)
    with suppress(CutShortError):
        simulation.run()
    return Record(steps, simulation.results(), engine.history)


def spied(engine: VirtualEngine, steps: list[Seen]) -> Callable[[], SchedulerOutput]:
    step = engine.step

    def wrapped() -> SchedulerOutput:
        output = step()
        shape = output.batch if isinstance(output, LightOutput) else shape_of(output)
        steps.append(
            Seen(
                tuple(output.num_scheduled_tokens.items()),
                tuple(sorted((i, len(d)) for i, d in output.scheduled_spec_decode_tokens.items())),
                tuple(sorted(output.preempted_req_ids or ())),
                shape if output.num_scheduled_tokens else None,
                engine.clock.now_s,
            )
        )
        if len(steps) >= STEP_LIMIT:
            raise CutShortError
        return output

    return wrapped


def first_difference(light: Record, real: Record) -> str | None:
    """Where two runs part, or None."""
    for number, (ours, theirs) in enumerate(zip(light.steps, real.steps, strict=False)):
        for name, one, other in zip(Seen._fields, ours, theirs, strict=True):
            if one != other:
                return f"step {number}, {name}: {one} != {other}"
    if len(light.steps) != len(real.steps):
        return f"steps: {len(light.steps)} != {len(real.steps)}"
    for one, other in zip(light.results, real.results, strict=True):
        if one != other:
            return f"result of {one.job.job_id}: {one.rounds} != {other.rounds}"
    return None


def both(
    policy: str, scenario: str, seed: int, conditions: Conditions | None = None, drafts: int = 0
) -> tuple[Record, Record]:
    """One trace under the light scheduler and under the real scheduler object."""
    conditions = conditions or Conditions()
    jobs, hardware = trace(scenario, seed), small(SETTINGS[scenario])
    light, real = (
        run(jobs, system_of(policy, seed, drafts), hardware, replace(conditions, exact=exact))
        for exact in (False, True)
    )
    count(real, jobs)
    return light, real


def count(record: Record, jobs: Sequence[Job]) -> None:
    """What the real scheduler went through, so that a test can insist on it."""
    counts = record.counts
    counts["cut short"] = len(record.steps) >= STEP_LIMIT
    lengths = {
        f"{number}.{place}": one.prompt_tokens
        for number, job in enumerate(jobs)
        for place, one in enumerate(job.rounds)
    }
    for output in record.history:
        counts["steps"] += 1
        counts["drafts"] += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        counts["preempted"] += len(output.preempted_req_ids or ())
        counts["resumed"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        for new in output.scheduled_new_reqs:
            left = lengths[new.req_id]
            counts["hits"] += new.num_computed_tokens > 0
            counts["chunked"] += output.num_scheduled_tokens[new.req_id] < left
    for result in record.results:
        counts["tool rounds"] += len(result.rounds) - 1
        for one in result.rounds:
            counts["finished"] += one.finished
            counts[f"promised {one.promised}"] += 1


# The light scheduler is held to the real one.


@pytest.fixture(scope="module")
def compared() -> dict[tuple[str, str], Counter[str]]:
    """(policy, scenario) -> what the real scheduler went through."""
    return {}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scenario", SETTINGS)
def test_step_for_step(
    scenario: str, policy: str, compared: dict[tuple[str, str], Counter[str]]
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        light, real = both(policy, scenario, seed)
        difference = first_difference(light, real)
        assert difference is None, f"seed {seed}: {difference}"
        counts += real.counts
    compared[policy, scenario] = counts


def test_nothing_is_missing_from_what_was_compared(
    compared: dict[tuple[str, str], Counter[str]],
) -> None:
    if len(compared) < len(POLICIES) * len(SETTINGS):
        pytest.skip("not every scenario was compared in this run")
    for policy in POLICIES:
        counts = sum((compared[policy, scenario] for scenario in SETTINGS), Counter[str]())
        assert counts["steps"] > len(SETTINGS) * SEEDS * 30
        assert counts["preempted"] and counts["resumed"] and counts["chunked"]
        assert compared[policy, "toolllm"]["tool rounds"]
        assert compared[policy, "toolllm"]["hits"]
        if policy == "slo":
            assert counts["promised True"] and counts["promised False"]
        else:
            assert counts["promised None"] == counts["finished"]
            assert all(compared[policy, s]["cut short"] == 0 for s in SETTINGS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scenario", SETTINGS)
def test_step_for_step_with_drafts(scenario: str, policy: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(DRAFTED_SEEDS):
        conditions = Conditions(seed=seed, acceptance=dict.fromkeys(SETTINGS, 0.2 + 0.15 * seed))
        drafts = DRAFTS[seed % len(DRAFTS)]
        light, real = both(policy, scenario, seed, conditions, drafts)
        difference = first_difference(light, real)
        assert difference is None, f"seed {seed}: {difference}"
        counts += real.counts
    assert counts["drafts"] > counts["steps"] / 4


def test_noise_and_bias_fall_on_both_alike() -> None:
    for policy in POLICIES:
        light, real = both(policy, "mixed", 3, Conditions(bias=1.2, noise=0.2, seed=5))
        assert first_difference(light, real) is None


def test_a_request_that_fills_the_context_to_its_last_token() -> None:
    hardware = replace(small(SETTINGS["mixed"]), max_model_len=96)
    jobs = [
        Job(f"j{i}", "mixed", 0.001 * i, (Round(96 - answer, (Stage(answer, 0.1),), 1.0),))
        for i, answer in enumerate((1, 2, 16, 40))
    ]
    for policy in POLICIES:
        light, real = (
            run(jobs, system_of(policy, 1), hardware, Conditions(exact=exact))
            for exact in (False, True)
        )
        assert first_difference(light, real) is None
        assert all(result.rounds[0].finished for result in light.results)


# Rougher traffic than any scenario's: priorities at random, clients that go away.


def rough(
    cls: type[AsyncScheduler], policy: str, seed: int, model: Path, method: str | None = None
) -> Record:
    """Requests by the step; a third of the prompts begin alike, a tenth of them are aborted."""
    rng = random.Random(seed)
    spec: dict[str, Any] = (
        {} if method is None else {"speculative_config": speculation(method, seed, model)}
    )
    engine = VirtualEngine(
        cls,
        model,
        load_hardware("a100-opt-13b").step_time.predict_shape_s,
        EngineShape(
            rng.choice((20, 28, 40)), 16, rng.choice((3, 8)), rng.choice((16, 40, 256)), 256
        ),
        enable_prefix_caching=seed % 4 > 0,
        scheduling_policy=policy,
        seed=seed,
        **spec,
    )
    steps: list[Seen] = []
    step = spied(engine, steps)
    for number in range(16):
        head = [5] * rng.choice((0, 0, 40))
        prompt = [*head, *(rng.randrange(3, 2000) for _ in range(rng.randint(1, 110)))]
        engine.add(
            f"r{number}",
            prompt,
            rng.randint(1, 50),
            max_tokens=rng.choice((20, 50)),
            priority=rng.randrange(4),
            acceptance=0.7,
        )
        for _ in range(rng.randrange(4)):
            step()
        if rng.random() < 0.1:
            engine.abort(f"r{rng.randrange(number + 1)}")
    with suppress(CutShortError):
        while engine.busy:
            step()
    results = [
        JobResult(
            Job(name, "rough", seen.arrival_s, ()),
            (RoundResult(seen.arrival_s, tuple(seen.token_times_s), seen.finish_reason == "stop"),),
        )
        for name, seen in engine.outcomes.items()
    ]
    return Record(steps, results, engine.history)


def speculation(method: str, seed: int, model: Path) -> dict[str, Any]:
    """vLLM's configuration of drafts: from the prompt, or by a model with slots of its own."""
    own = {"prompt_lookup_max": 4} if method == "ngram" else {"model": str(model)}
    return {"method": method, "num_speculative_tokens": DRAFTS[seed % len(DRAFTS)], **own}


@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_rough_traffic(policy: str, method: str | None, config_folder: Path) -> None:
    preempted = aborted = 0
    for seed in range(24 if method is None else 12):
        light, real = (
            rough(cls, policy, seed, config_folder, method)
            for cls in (LightScheduler, AsyncScheduler)
        )
        difference = first_difference(light, real)
        assert difference is None, f"seed {seed}: {difference}"
        preempted += sum(len(step.preempted) for step in real.steps)
        aborted += sum(not result.rounds[0].finished for result in real.results)
    assert preempted and aborted


@pytest.mark.parametrize(
    "options",
    [
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "num_speculative_tokens_per_batch_size": [(1, 8, 2), (9, 512, 1)],
            }
        },
        {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
            "options": {"received_kv": True},
        },
        {"enable_lora": True, "max_lora_rank": 8},
    ],
)
def test_what_the_twin_does_not_know_it_refuses(
    options: dict[str, Any], config_folder: Path
) -> None:
    with pytest.raises(ValueError, match="drafts of one length, but no LoRA"):
        VirtualEngine(LightScheduler, config_folder, lambda shape: 0.01, **options)


# The comparison bites: each of these is a mistake that a twin could make.


class ForgetsToCache(LightScheduler):
    """Computed blocks never enter the prefix cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            manager.cache_blocks = lambda *args, **kwargs: None


class PreemptsTheSecondLast(LightScheduler):
    """The last one to start stays, the one before gives way."""

    def _allocate(self, step: _Step, request: Request, *args: Any) -> tuple[bool, int]:
        running = self.running
        if len(running) > 1 and running[-2] is not request and request is not running[-1]:
            running[-2:] = reversed(running[-2:])
        return super()._allocate(step, request, *args)


class ForgetsWhoWasPreempted(LightScheduler):
    """Nobody is told."""

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.reset_preempted_req_ids.clear()


class OneTokenTooMany(LightScheduler):
    """A step may hold one token more than its budget."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scheduler_config.max_num_batched_tokens += 1
        self.max_num_scheduled_tokens += 1


class OneSeatTooMany(LightScheduler):
    """One request more than there are seats."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_num_active_reqs += 1


class WrongContext(LightScheduler):
    """The step's shape leaves out the token that each request is given."""

    def _apply(self, step: _Step) -> None:
        super()._apply(step)
        step.context -= 1


class ForgetsPairs(LightScheduler):
    """The step's shape has no attention products."""

    def _apply(self, step: _Step) -> None:
        super()._apply(step)
        step.pairs = 0


class StartsAfterPreemption(LightScheduler):
    """Somebody starts in the step in which somebody else lost his memory."""

    def _schedule_running(self, step: _Step) -> bool:
        super()._schedule_running(step)
        return True


class IgnoresPriorityInLine(LightScheduler):
    """Whoever came first starts first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waiting = FCFSRequestQueue()


class IgnoresPriorityOfVictims(LightScheduler):
    """The last one to start gives way, however urgent."""

    def _allocate(self, *args: Any) -> tuple[bool, int]:
        policy, self.policy = self.policy, SchedulingPolicy.FCFS
        try:
            return super()._allocate(*args)
        finally:
            self.policy = policy


class KeepsTokensOfVictims(LightScheduler):
    """What a preempted request had been given in this step is lost to the others."""

    def _allocate(self, step: _Step, *args: Any) -> tuple[bool, int]:
        budget = step.budget
        answer = super()._allocate(step, *args)
        step.budget = budget
        return answer


class KeepsWhatWasRejected(LightScheduler):
    """Rejected drafts count as computed."""

    def update_from_output(self, scheduler_output: LightOutput, *args: Any) -> Any:
        scheduler_output.scheduled_spec_decode_tokens = {}
        return super().update_from_output(scheduler_output, *args)


class ForgetsLookahead(LightScheduler):
    """The draft's own KV finds no slots."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_lookahead_tokens = 0


class ForgetsDraftSlots(LightScheduler):
    """The draft's own inputs find no slots."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._draft_slots = 0


class NeverPads(LightScheduler):
    """A resumed request starts without a row of drafts."""

    def _padded(self, *args: Any) -> int:
        return 0


class AlwaysPads(LightScheduler):
    """Prompts beside it make no difference to how a resumed request starts."""

    def _padded(self, request: Request, computed: int, step: _Step, beside: bool) -> int:
        step.prefills = False
        return super()._padded(request, computed, step, beside)


class IgnoresThePlan(LightSLOScheduler):
    """Tokens per request are not what was planned."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hook = False


class LearnsNothing(LightSLOScheduler):
    """The step-time model is told of empty steps."""

    def batch_shape(self, output: SchedulerOutput) -> BatchShape:
        return BatchShape(0)


@pytest.mark.parametrize(
    ("policy", "scenario", "broken", "where"),
    [
        ("fcfs", "toolllm", ForgetsToCache, "tokens"),
        ("fcfs", "summarizer", OneTokenTooMany, "tokens"),
        ("fcfs", "chatbot", WrongContext, "shape"),
        ("fcfs", "chatbot", ForgetsPairs, "shape"),
        ("priority", "mixed", IgnoresPriorityInLine, "tokens"),
        ("slo", "mixed", IgnoresThePlan, "tokens"),
        ("slo", "toolllm", LearnsNothing, "tokens|done_s|steps|result"),
    ],
)
def test_a_broken_twin_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    scenario: str,
    broken: type[AsyncScheduler],
    where: str,
) -> None:
    _, real = replicas.SCHEDULERS[policy]
    monkeypatch.setitem(replicas.SCHEDULERS, policy, (broken, real))
    differences = (first_difference(*both(policy, scenario, seed)) for seed in range(SEEDS))
    found = next(filter(None, differences))
    assert any(part in found for part in where.split("|")), found


@pytest.mark.parametrize(
    ("policy", "method", "broken"),
    [
        ("fcfs", None, ForgetsToCache),
        ("fcfs", None, PreemptsTheSecondLast),
        ("fcfs", None, OneSeatTooMany),
        ("fcfs", None, ForgetsWhoWasPreempted),
        ("priority", None, StartsAfterPreemption),
        ("priority", None, IgnoresPriorityInLine),
        ("priority", None, IgnoresPriorityOfVictims),
        ("priority", None, KeepsTokensOfVictims),
        ("fcfs", "ngram", KeepsWhatWasRejected),
        ("fcfs", "draft_model", ForgetsLookahead),
        ("fcfs", "draft_model", ForgetsDraftSlots),
        ("fcfs", "ngram", NeverPads),
        ("fcfs", "ngram", AlwaysPads),
    ],
)
def test_rough_traffic_finds_a_broken_twin_out(
    policy: str, method: str | None, broken: type[AsyncScheduler], config_folder: Path
) -> None:
    differences = (
        first_difference(
            rough(broken, policy, seed, config_folder, method),
            rough(AsyncScheduler, policy, seed, config_folder, method),
        )
        for seed in range(24)
    )
    assert next(filter(None, differences))


@pytest.mark.parametrize("scenario", SETTINGS)
def test_nobody_waits_for_an_idle_engine(scenario: str) -> None:
    """Best effort may have to stand back, but no engine sits idle while somebody waits."""
    worst = 0
    for seed in range(6):
        jobs, hardware = trace(scenario, seed), small(SETTINGS[scenario])
        simulation = Simulation(jobs, system_of("slo", seed), hardware, Conditions(), None)
        (replica,) = simulation.replicas
        assert isinstance(replica, replicas.Colocated)
        engine = replica.engine
        step, idle = engine.step, 0

        def watched(engine: Any = engine, step: Any = step) -> Any:
            nonlocal idle, worst
            output = step()
            waits = engine.scheduler.waiting and not engine.scheduler.running
            idle = idle + 1 if waits and not output.num_scheduled_tokens else 0
            worst = max(worst, idle)
            return output

        engine.step = watched
        simulation.run()
    assert worst <= 5, f"{worst} empty steps with nothing running and requests waiting"
