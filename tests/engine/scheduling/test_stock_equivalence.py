# SPDX-License-Identifier: Apache-2.0
"""With no SLO on any request ours is vLLM's scheduler: every decision, output and block compared.

Two engines get one script, step for step: the real ``AsyncScheduler`` and ours.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from vllm_slo import SLO
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import STOP_TOKEN, EngineShape, Outcome, VirtualEngine

pytestmark = [pytest.mark.slow, pytest.mark.versions]

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
SMALL = EngineShape(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=128, max_model_len=2048)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


# The traffic: what happens before which step.


@dataclass(frozen=True)
class Ask:
    """One request as a client sends it; ``length`` is the output length only the model knows."""

    name: str
    prompt: tuple[int, ...]
    length: int
    max_tokens: int
    priority: int = 0
    structured: bool = False
    lora: int = 0
    resumable: bool = False
    extra: tuple[tuple[str, Any], ...] = ()


class Op(NamedTuple):
    """``kind`` names a method of ``TracedEngine``."""

    kind: str
    args: tuple[Any, ...]


Script = dict[int, list[Op]]


def prompt_of(rng: random.Random, shared: list[tuple[int, ...]], longest: int) -> tuple[int, ...]:
    """A prompt that often begins like an earlier one."""
    body = tuple(rng.randrange(3, 2000) for _ in range(rng.randint(1, longest)))
    if shared and rng.random() < 0.6:
        return rng.choice(shared) + body[: longest // 4 + 1]
    shared.append(body)
    return body


@dataclass
class Traffic:
    """What a script is drawn from: shares are per request, rates per step."""

    requests: int = 30
    steps: int = 40
    prompt: int = 200
    output: int = 30
    priorities: int = 1
    structured: float = 0.0
    grammar_errors: float = 0.0
    loras: int = 0
    aborts: float = 0.0
    pauses: int = 0
    resets: int = 0
    throttled: float = 0.0
    sessions: int = 0
    strange_extra: bool = True

    def script(self, seed: int) -> Script:
        rng = random.Random(seed)
        script: Script = defaultdict(list)
        shared: list[tuple[int, ...]] = []
        for i in range(self.requests):
            at = rng.randrange(self.steps)
            ask = self._ask(rng, f"r{i}", prompt_of(rng, shared, self.prompt))
            script[at].append(Op("submit", (ask,)))
            if ask.structured:
                broken = rng.random() < self.grammar_errors
                script[at + rng.randint(0, 12)].append(Op("compiled", (ask.name, broken)))
            if rng.random() < self.aborts:
                script[at + rng.randint(0, 40)].append(Op("abort", (ask.name,)))
        self._add_control(rng, script)
        for i in range(self.sessions):
            self._add_session(rng, script, f"s{i}")
        return script

    def _ask(self, rng: random.Random, name: str, prompt: tuple[int, ...]) -> Ask:
        length = rng.randint(1, self.output)
        return Ask(
            name,
            prompt,
            length,
            max_tokens=rng.choice((length, length + 5, max(length // 2, 1))),
            priority=rng.randrange(self.priorities),
            structured=rng.random() < self.structured,
            lora=rng.randrange(self.loras + 1),
            extra=(("unrelated", 1),) if self.strange_extra and rng.random() < 0.3 else (),
        )

    def _add_control(self, rng: random.Random, script: Script) -> None:
        for _ in range(self.pauses):
            at = rng.randrange(self.steps)
            state = rng.choice((PauseState.PAUSED_NEW, PauseState.PAUSED_ALL))
            script[at].append(Op("pause", (state,)))
            script[at + rng.randint(1, 8)].append(Op("pause", (PauseState.UNPAUSED,)))
        for _ in range(self.resets):
            script[rng.randrange(self.steps)].append(Op("reset", (rng.random() < 0.7,)))
        for at in range(self.steps):
            if rng.random() < self.throttled:
                script[at].append(Op("throttle", (True,)))
                script[at + rng.randint(1, 5)].append(Op("throttle", (False,)))

    def _add_session(self, rng: random.Random, script: Script, name: str) -> None:
        at = rng.randrange(self.steps // 2)
        for _ in range(rng.randint(2, 4)):
            prompt = tuple(rng.randrange(3, 2000) for _ in range(rng.randint(1, 60)))
            ask = Ask(name, prompt, rng.randint(1, 12), 20, resumable=True)
            script[at].append(Op("submit", (ask,)))
            at += rng.randint(0, 15)
        last = dataclasses.replace(ask, resumable=False)
        script[at].append(Op("submit", (last,)))


# The engine: VirtualEngine plus what the script may ask for, with everything said written down.


class FakeGrammar(StructuredOutputGrammar):
    """Accepts every token and fills its row of the mask with their number."""

    def __init__(self) -> None:
        self.accepted = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.accepted += len(tokens)
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[:2]

    def rollback(self, num_tokens: int) -> None:
        self.accepted -= num_tokens

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        bitmask[batch_index].fill_(self.accepted)

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        self.accepted = 0


class FakeBackend:
    """As much of a grammar backend as making the mask needs."""

    @staticmethod
    def allocate_token_bitmask(rows: int) -> torch.Tensor:
        return torch.zeros((rows, 4), dtype=torch.int32)


class TracedEngine(VirtualEngine):
    """A virtual engine that follows a script; ``said`` holds what came out in this step."""

    def __init__(self, cls: type[AsyncScheduler], model: Path, **options: Any) -> None:
        options.setdefault("shape", SMALL)
        super().__init__(cls, model, ROOFLINE.predict_shape_s, believed=ROOFLINE, **options)
        scheduler = self.scheduler
        scheduler.structured_output_manager.backend = FakeBackend()
        # Upstream reports new blocks only where the worker zeroes them; always compared here.
        scheduler.needs_kv_cache_zeroing = True
        self.said: list[Any] = []
        self.grammars: dict[str, Future[FakeGrammar]] = {}
        self.throttled = False
        self._schedule = scheduler.schedule
        self._update = scheduler.update_from_output
        scheduler.schedule = self._schedule_as_told
        scheduler.update_from_output = self._update_and_note

    def submit(self, ask: Ask) -> None:
        if not ask.resumable and ask.name in self.outcomes and ask.name[0] != "s":
            raise ValueError(ask.name)
        params = SamplingParams(
            max_tokens=ask.max_tokens,
            stop_token_ids=[STOP_TOKEN],
            extra_args=dict(ask.extra) or None,
            structured_outputs=StructuredOutputsParams(regex="a+") if ask.structured else None,
        )
        request = Request(
            request_id=ask.name,
            prompt_token_ids=list(ask.prompt),
            sampling_params=params,
            pooling_params=None,
            arrival_time=self.clock.now_s,
            priority=ask.priority,
            block_hasher=self._hasher,
            lora_request=LoRARequest(f"lora{ask.lora}", ask.lora, "/x") if ask.lora else None,
            resumable=ask.resumable,
        )
        if request.structured_output_request is not None:
            self.grammars[ask.name] = Future()
            request.structured_output_request.grammar = self.grammars[ask.name]
        session = ask.name[0] == "s"
        if session and not ask.resumable and ask.name not in self.scheduler.requests:
            return
        self.outcomes.setdefault(ask.name, Outcome(self.clock.now_s, None))
        self.lengths[ask.name] = ask.length
        self.scheduler.add_request(request)

    def compiled(self, name: str, broken: bool) -> None:
        if broken:
            self.grammars[name].set_exception(ValueError("no such grammar"))
        else:
            self.grammars[name].set_result(FakeGrammar())

    def pause(self, state: PauseState) -> None:
        self.scheduler.set_pause_state(state)

    def reset(self, running_too: bool) -> None:
        try:
            self.said.append(("reset", self.scheduler.reset_prefix_cache(running_too)))
        except RuntimeError as error:  # vLLM cannot while an idle session holds blocks.
            self.said.append(("reset", str(error)))

    def throttle(self, on: bool) -> None:
        self.throttled = on

    def _schedule_as_told(self) -> SchedulerOutput:
        output = self._schedule(throttle_prefills=self.throttled)
        mask = self.scheduler.get_grammar_bitmask(output)
        # The harness calls this between scheduling and the output, so both are noted here.
        self.said += [plain(output), plain(mask)]
        return output

    def _update_and_note(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        for place, name in enumerate(result.req_ids):
            drafts = output.scheduled_spec_decode_tokens.get(name)
            if drafts and result.sampled_token_ids[place]:
                result.sampled_token_ids[place] = self._verified(name, len(drafts))
        outputs = self._update(output, result)
        self.said.append(plain(outputs))
        if self.scheduler.num_spec_tokens and not self.overlap:
            self._draft(output)
        return outputs

    def _verified(self, name: str, drafts: int) -> list[int]:
        """As if some of the drafts had been right."""
        request = self.scheduler.requests.get(name)
        made = request.num_output_tokens if request else 0
        count = 1 + (made * 7 + len(name)) % (drafts + 1)
        stop = self.lengths[name] - 1
        return [STOP_TOKEN if m >= stop else 3 + m % 1000 for m in range(made, made + count)]

    def _draft(self, output: SchedulerOutput) -> None:
        names = [n for n in output.num_scheduled_tokens if n in self.scheduler.requests]
        made = [self.scheduler.requests[n].num_output_tokens for n in names]
        self.scheduler.update_draft_token_ids(
            DraftTokenIds(names, [[9] * (m % (self.scheduler.num_spec_tokens + 1)) for m in made])
        )

    def turn(self, ops: list[Op]) -> list[Any]:
        """One turn of the engine's loop: what the script says, then a step if there is work."""
        self.said = []
        for op in ops:
            getattr(self, op.kind)(*op.args)
        if self.scheduler.has_requests() or self.scheduler.pause_state != PauseState.UNPAUSED:
            if not self.step().num_scheduled_tokens:
                self.clock.advance(0.001)
        else:
            self.drain()
        return [*self.said, state_of(self)]


# What is compared.


def plain(value: Any) -> Any:
    """Anything vLLM hands out, as nested tuples that compare by content and order.

    Dicts keep their order, which is the order of the batch; sets have none. Wall-clock times are
    left out, everything else stays.
    """
    if isinstance(value, EngineCoreEvent):
        return EngineCoreEventType(value.type).name
    if isinstance(value, EngineCoreOutputs):
        # Its own timestamp is the wall clock's.
        return tuple((f, plain(getattr(value, f))) for f in fields_of(value) if f != "timestamp")
    if isinstance(value, SamplingParams):
        return repr(value)
    if isinstance(value, dict):
        return tuple((key, plain(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return ("set", *sorted(map(repr, value)))
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return tuple(map(plain, value.tolist()))
    if value is None or isinstance(value, (str, int, float, bytes)):
        return value
    names = fields_of(value)
    return (type(value).__name__, *((name, plain(getattr(value, name))) for name in names))


def fields_of(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [f.name for f in dataclasses.fields(value)]
    if hasattr(value, "__struct_fields__"):
        return list(value.__struct_fields__)
    if type(value).__module__.startswith("vllm"):
        return sorted(vars(value))
    raise TypeError(f"cannot compare a {type(value)}")


def state_of(engine: VirtualEngine) -> Any:
    """Queues in order, each request's progress, and every block's place in the free list."""
    s = engine.scheduler
    pool = s.kv_cache_manager.block_pool
    requests = [
        (
            name,
            r.status.name,
            r.num_computed_tokens,
            r.num_output_placeholders,
            r.num_preemptions,
            tuple(r.spec_token_ids),
            tuple(r.all_token_ids),
            s.kv_cache_manager.get_block_ids(name),
        )
        for name, r in s.requests.items()
    ]
    return (
        "state",
        ("clock", engine.clock.now_s),
        ("running", tuple(r.request_id for r in s.running)),
        ("waiting", tuple(r.request_id for r in s.waiting)),
        ("kv_holding", tuple(r.request_id for r in s.kv_holding_waiting)),
        ("deferred", tuple(sorted(r.request_id for r in s.deferred_waiting))),
        ("free", tuple(b.block_id for b in pool.free_block_queue.get_all_free_blocks())),
        ("cached", len(pool.cached_block_hash_to_block)),
        ("requests", tuple(requests)),
    )


def first_difference(ours: Any, stock: Any, path: str = "") -> str | None:
    """Where two plain values part, or None."""
    if ours == stock and type(ours) is type(stock):
        return None
    if isinstance(ours, tuple) and isinstance(stock, tuple) and len(ours) == len(stock):
        for place, (one, other) in enumerate(zip(ours, stock, strict=True)):
            label = f"{path}/{ours[0] if place == 1 and isinstance(ours[0], str) else place}"
            found = first_difference(one, other, label)
            if found is not None:
                return found
    return f"{path}: ours {str(ours)[:300]} != stock {str(stock)[:300]}"


@dataclass
class Seen:
    """What a comparison went through, so that a test can insist on it."""

    steps: int = 0
    difference: str | None = None
    counts: Counter[str] = field(default_factory=Counter)


def compare(ours: TracedEngine, stock: TracedEngine, script: Script, limit: int = 3000) -> Seen:
    """Drive both through the script until all is done, or until they part."""
    seen, last = Seen(), max(script)
    while seen.steps <= last or ours.busy or stock.busy:
        ops = script.get(seen.steps, [])
        said, expected = ours.turn(ops), stock.turn(ops)
        seen.difference = first_difference(tuple(said), tuple(expected), f"step {seen.steps}")
        if seen.difference is not None:
            return seen
        seen.steps += 1
        if seen.steps > limit:
            raise RuntimeError(f"not finished after {limit} steps")
    count(ours, seen.counts)
    return seen


def count(engine: TracedEngine, counts: Counter[str]) -> None:
    for output in engine.history:
        counts["hits"] += sum(r.num_computed_tokens > 0 for r in output.scheduled_new_reqs)
        counts["resumed"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        counts["preempted"] += len(output.preempted_req_ids or ())
        counts["spec"] += len(output.scheduled_spec_decode_tokens)
        counts["structured"] += output.has_structured_output_requests
        counts["scheduled"] += len(output.num_scheduled_tokens)
    for outcome in engine.outcomes.values():
        counts[str(outcome.finish_reason)] += 1


Run = Callable[..., Seen]


@pytest.fixture(scope="module")
def run(config_folder: Path) -> Iterator[Run]:
    def drive(script: Script, cls: type[AsyncScheduler] = Scheduler, **options: Any) -> Seen:
        ours = TracedEngine(cls, config_folder, **options)
        stock = TracedEngine(AsyncScheduler, config_folder, **options)
        return compare(ours, stock, script)

    return drive


def total(run: Run, traffic: Traffic, seeds: int, **options: Any) -> Counter[str]:
    """Compare over many seeds, with and without overlap."""
    counts: Counter[str] = Counter()
    for seed in range(seeds):
        for overlap in (False, True):
            seen = run(traffic.script(seed), overlap=overlap, **options)
            assert seen.difference is None, f"seed {seed}, overlap {overlap}: {seen.difference}"
            counts += seen.counts
    assert counts["scheduled"] > 100
    return counts


TIGHT = EngineShape(num_blocks=30, max_num_seqs=8, max_num_batched_tokens=128, max_model_len=400)


def test_plain_mix(run: Run) -> None:
    counts = total(run, Traffic(), 4)
    assert counts["stop"] and counts["length"]
    assert counts["stop"] + counts["length"] == 4 * 2 * 30


def test_memory_so_short_that_requests_are_preempted(run: Run) -> None:
    # No hits in the way: every resumed request computes its tokens again.
    traffic = Traffic(prompt=100, output=100)
    counts = total(run, traffic, 3, shape=TIGHT, enable_prefix_caching=False)
    assert counts["preempted"] > 20 and counts["resumed"] > 20


def test_prefix_caching(run: Run) -> None:
    assert total(run, Traffic(), 3, enable_prefix_caching=True)["hits"] > 20
    assert total(run, Traffic(), 1, enable_prefix_caching=False)["hits"] == 0


def test_prefix_caching_when_cached_blocks_must_go(run: Run) -> None:
    counts = total(run, Traffic(prompt=120, output=60), 3, shape=TIGHT)
    assert counts["hits"] and counts["preempted"] > 10


def test_priority_policy(run: Run) -> None:
    traffic = Traffic(prompt=100, output=100, priorities=3, aborts=0.1)
    counts = total(run, traffic, 3, shape=TIGHT, scheduling_policy="priority")
    assert counts["preempted"] > 20


def test_structured_output_waits_for_its_grammar(run: Run) -> None:
    traffic = Traffic(structured=0.5, grammar_errors=0.3, aborts=0.1)
    counts = total(run, traffic, 3)
    assert counts["structured"] and counts["error"]


def test_aborts(run: Run) -> None:
    counts = total(run, Traffic(aborts=0.6, output=60), 3, shape=TIGHT)
    assert counts["None"] > 20


@pytest.mark.parametrize("threshold", [0, 40])
def test_long_prompts(run: Run, threshold: int) -> None:
    traffic = Traffic(requests=12, prompt=1500, output=20)
    total(run, traffic, 2, long_prefill_token_threshold=threshold)


def test_pause_and_resume(run: Run) -> None:
    total(run, Traffic(pauses=6, sessions=3, aborts=0.2), 4)


def test_reset_of_the_prefix_cache(run: Run) -> None:
    counts = total(run, Traffic(resets=8), 3)
    assert counts["resumed"]


def test_sessions_with_streaming_input(run: Run) -> None:
    counts = total(run, Traffic(sessions=6, requests=15), 3, shape=TIGHT)
    assert counts["scheduled"]


def test_lora_slots(run: Run) -> None:
    total(run, Traffic(loras=3), 2, enable_lora=True, max_loras=1, max_lora_rank=8)


def test_throttled_prefills(run: Run) -> None:
    total(run, Traffic(throttled=0.3), 2)


def test_speculative_decoding(run: Run) -> None:
    counts = total(run, Traffic(), 2, speculative_config=NGRAM)
    assert counts["spec"] > 100
    traffic = Traffic(prompt=100, output=100, structured=0.2, aborts=0.1)
    counts = total(run, traffic, 2, shape=TIGHT, speculative_config=NGRAM)
    assert counts["spec"] > 100 and counts["preempted"] > 10


@settings(max_examples=examples(15))
@given(
    seed=st.integers(0, 10**6),
    blocks=st.sampled_from([30, 60, 400]),
    seats=st.sampled_from([1, 3, 16]),
    step_tokens=st.sampled_from([16, 64, 512]),
    overlap=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    threshold=st.sampled_from([0, 24]),
)
def test_everything_at_once(
    run: Run,
    seed: int,
    blocks: int,
    seats: int,
    step_tokens: int,
    overlap: bool,
    policy: str,
    caching: bool,
    threshold: int,
) -> None:
    traffic = Traffic(
        requests=20,
        prompt=150,
        output=60,
        priorities=3,
        structured=0.2,
        grammar_errors=0.1,
        aborts=0.2,
        pauses=2,
        resets=2,
        throttled=0.05,
        # An idle session keeps its seat; with one seat nobody else would ever run.
        sessions=0 if seats == 1 else 1,
    )
    seen = run(
        traffic.script(seed),
        overlap=overlap,
        shape=EngineShape(blocks, 16, seats, step_tokens, 400),
        scheduling_policy=policy,
        enable_prefix_caching=caching,
        long_prefill_token_threshold=threshold,
    )
    assert seen.difference is None


# After SLO traffic.


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_stock_again_after_slo_traffic_has_gone(
    config_folder: Path, overlap: bool, policy: str
) -> None:
    options: dict[str, Any] = {
        "overlap": overlap,
        "scheduling_policy": policy,
        "enable_prefix_caching": False,
        "shape": TIGHT,
    }
    ours = TracedEngine(Scheduler, config_folder, **options)
    rng = random.Random(5)
    for i in range(40):
        slo = rng.choice(
            (SLO(ttft_ms=800, tpot_ms=60), SLO(ttft_ms=50, on_unattainable="decline"), None)
        )
        ours.add(f"before{i}", rng.randint(1, 150), rng.randint(1, 60), slo, priority=i % 3)
        ours.step()
    ours.run()
    assert any(o.report and o.report["promised"] for o in ours.outcomes.values())
    assert not ours.scheduler.requests
    ours.clock.advance(61.0)  # its objectives are remembered for a minute

    stock = TracedEngine(AsyncScheduler, config_folder, **options)
    stock.clock.advance(ours.clock.now_s)
    script = Traffic(prompt=100, output=80, priorities=3, aborts=0.1, structured=0.2).script(9)
    sort_free_blocks(ours)
    for step in range(4000):
        ops = script.get(step, [])
        said, expected = ours.turn(ops), stock.turn(ops)
        difference = first_difference(tuple(said), tuple(expected), f"step {step}")
        assert difference is None
        if step > max(script) and not ours.busy and not stock.busy:
            break
    assert not stock.busy
    assert any(o.preempted_req_ids for o in stock.history)


def sort_free_blocks(engine: VirtualEngine) -> None:
    """Which free block is which is no decision: put them in the order of a new engine."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    blocks = pool.free_block_queue.get_all_free_blocks()
    assert len(blocks) == pool.num_gpu_blocks - 1
    assert all(block.ref_cnt == 0 for block in blocks)
    pool.free_block_queue = FreeKVCacheBlockQueue(sorted(blocks, key=lambda b: b.block_id))


# The comparison bites.


class Reversed(Scheduler):
    """Serves the running requests in the wrong order."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.running.reverse()
        return super().schedule(throttle_prefills)


class OneTokenLess(Scheduler):
    """Leaves one token of each step unused."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.max_num_scheduled_tokens = 127
        return super().schedule(throttle_prefills)


class ForgetsThrottling(Scheduler):
    """Does not pass on an argument."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        return super().schedule()


class WrongVictim(Scheduler):
    """Puts a preempted request at the end of the line."""

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.waiting.remove_request(request)
        self.waiting.add_request(request)


class SilentEvents(Scheduler):
    """Loses the events of each output."""

    def update_from_output(self, *args: Any) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(*args)
        for one in outputs.values():
            for output in one.outputs:
                output.events = None
        return outputs


class TakesBlocks(Scheduler):
    """Keeps one block back."""

    def add_request(self, request: Request) -> None:
        if request.request_id == "r0":
            self.kv_cache_manager.block_pool.get_new_blocks(1)
        super().add_request(request)


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        (Reversed, "num_scheduled_tokens|scheduled_cached_reqs"),
        (OneTokenLess, "num_scheduled_tokens"),
        (ForgetsThrottling, "scheduled"),
        (WrongVictim, "waiting"),
        (SilentEvents, "events"),
        (TakesBlocks, "kv_cache_usage|block_ids"),
    ],
)
def test_a_broken_scheduler_is_found_out(run: Run, broken: type[Scheduler], where: str) -> None:
    traffic = Traffic(prompt=100, output=100, throttled=0.3)
    seen = run(traffic.script(0), broken, shape=TIGHT, overlap=True)
    assert seen.difference is not None
    assert any(name in seen.difference for name in where.split("|")), seen.difference
