# SPDX-License-Identifier: Apache-2.0
"""What must hold after every step, whatever mixture of requests the scheduler is given."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from depth import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from vllm_slo import SLO, tiny
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.scheduling.stage_marks import AnswerMarks
from vllm_slo.sim.harness import STOP_TOKEN, EngineShape, Outcome, VirtualEngine
from vllm_slo.sim.jobs import own_text
from vllm_slo.slo.keys import INTERNAL_KEYS

pytestmark = pytest.mark.versions

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
SLOS = (
    SLO(ttft_ms=600, tpot_ms=50),
    SLO(ttft_ms=3000, tpot_ms=150, value=3.0),
    SLO(ttft_ms=1500),
    SLO(tpot_ms=80),
    SLO(ttft_ms=1, tpot_ms=1),  # out of reach
    SLO(ttft_ms=200, tpot_ms=40, on_unattainable="decline"),
    SLO(ttft_ms=1, on_unattainable="decline"),
    SLO(ttft_ms=900, tpot_ms=60, tier="best_effort"),
    SLO(tier="best_effort"),
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
REASONS = {"expired", "prefill", "decode", "memory", "seats", "quota"}
"""Why a request can be declined."""
INVALID: tuple[dict[str, Any], ...] = (
    {"slo_ttft_ms": -1},
    {"slo_tpot_ms": float("nan")},
    {"slo_ttft_ms": "fast"},
    {"slo_class": "no-such-class"},
    {"slo_speed": 3},
    {"slo_ttft_ms": 9000, "slo_ticket": "7"},  # without a seal
    {"slo_ttft_ms": 9000, "slo_group": "g", "slo_seal": "0"},
)


class AnyToken(StructuredOutputGrammar):
    """A grammar that accepts everything."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        pass

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        pass


class CheckedEngine(VirtualEngine):
    """A virtual engine with our scheduler; every step is checked."""

    def __init__(self, model: Path, **options: Any) -> None:
        options.setdefault("believed", ROOFLINE)
        super().__init__(Scheduler, model, ROOFLINE.predict_shape_s, **options)
        self.shape = options.get("shape") or EngineShape()
        self.aborted: set[str] = set()
        self.preemptions = 0
        self.grammars: list[Future[StructuredOutputGrammar]] = []
        self._update = self.scheduler.update_from_output
        self.scheduler.update_from_output = self._update_verified

    def send(
        self,
        name: str,
        prompt: int,
        output: int,
        extra: dict[str, Any] | None,
        *,
        structured: bool = False,
        resumable: bool = False,
        priority: int = 0,
        lora: int = 0,
    ) -> Request:
        """Like ``add``, with raw ``extra_args``."""
        params = SamplingParams(
            max_tokens=output,
            stop_token_ids=[STOP_TOKEN],
            extra_args=extra,
            structured_outputs=StructuredOutputsParams(regex="a+") if structured else None,
        )
        request = Request(
            name,
            own_text(name, prompt),
            params,
            None,
            arrival_time=self.clock.now_s,
            priority=priority,
            block_hasher=self._hasher,
            resumable=resumable,
            lora_request=LoRARequest(f"lora{lora}", lora, "/x") if lora else None,
        )
        if request.structured_output_request is not None:
            self.grammars.append(Future())
            request.structured_output_request.grammar = self.grammars[-1]
        self.outcomes.setdefault(name, Outcome(self.clock.now_s, None))
        self.lengths[name] = output
        self.scheduler.add_request(request)
        return request

    def compile_all(self) -> None:
        """Every grammar is ready."""
        while self.grammars:
            self.grammars.pop().set_result(AnyToken())

    def _update_verified(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Speculation: as if some of the scheduled drafts had been right."""
        for place, name in enumerate(result.req_ids):
            drafts = output.scheduled_spec_decode_tokens.get(name)
            request = self.scheduler.requests.get(name)
            if drafts and request and result.sampled_token_ids[place]:
                made = request.num_output_tokens
                count = 1 + (made * 7 + len(name)) % (len(drafts) + 1)
                result.sampled_token_ids[place] = self.expected_tokens(name)[made : made + count]
        return self._update(output, result)

    def abort(self, request_id: str) -> None:
        if request_id in self.scheduler.requests:
            self.aborted.add(request_id)
        super().abort(request_id)
        self.check()

    def step(self) -> SchedulerOutput:
        output = super().step()
        scheduled = output.num_scheduled_tokens
        self.preemptions += len(output.preempted_req_ids or ())
        assert output.total_num_scheduled_tokens == sum(scheduled.values())
        assert output.total_num_scheduled_tokens <= self.shape.max_num_batched_tokens
        assert all(tokens > 0 for tokens in scheduled.values())
        new = [r.req_id for r in output.scheduled_new_reqs]
        named = [*new, *output.scheduled_cached_reqs.req_ids]
        assert Counter(named) == Counter(list(scheduled))
        self.check()
        return output

    def check(self) -> None:
        """Requests are in one place each, blocks belong to them, limits hold."""
        s = self.scheduler
        queues = (s.running, s.waiting, s.kv_holding_waiting)
        places = [r.request_id for queue in queues for r in queue]
        assert Counter(places) == Counter(list(s.requests))
        assert len(s.running) <= self.shape.max_num_seqs
        assert all(r.status == RequestStatus.RUNNING for r in s.running)
        waiting = [*s.waiting, *s.kv_holding_waiting]
        assert all(r.status < RequestStatus.FINISHED_STOPPED for r in waiting)
        assert all(r.status != RequestStatus.RUNNING for r in waiting)
        assert s.max_num_scheduled_tokens == self.shape.max_num_batched_tokens
        self.check_blocks()
        parts = s.parts
        assert set(parts.tracker.live) <= set(s.requests)
        assert set(parts.guard.since_s) <= set(s.requests)

    def check_blocks(self) -> None:
        manager, pool = self.scheduler.kv_cache_manager, self.scheduler.kv_cache_manager.block_pool
        holders = Counter(
            block
            for name in self.scheduler.requests
            for group in manager.get_block_ids(name)
            for block in group
        )
        for block in pool.blocks[1:]:
            assert block.ref_cnt == holders[block.block_id], f"block {block.block_id}"
        assert pool.get_num_free_blocks() + len(holders) == pool.num_gpu_blocks - 1

    def expected_tokens(self, name: str) -> list[int]:
        length = self.lengths[name]
        return [*(3 + made % 1000 for made in range(length - 1)), STOP_TOKEN]

    def check_outcomes(self) -> None:
        """Everything has ended as it should, and left nothing behind."""
        assert not self.scheduler.requests
        self.check()
        for name, outcome in self.outcomes.items():
            expected = self.expected_tokens(name)
            if name in self.aborted:
                assert outcome.token_ids == expected[: len(outcome.token_ids)]
            elif outcome.finish_reason == "abort":
                assert not outcome.token_ids
                self.check_refusal(outcome)
            else:
                assert outcome.finish_reason == "stop", name
                assert outcome.token_ids == expected, name
                assert outcome.token_times_s == sorted(outcome.token_times_s)
        parts = self.scheduler.parts
        assert not parts.controller.active
        for left in (
            parts.tracker.live,
            parts.guard.since_s,
            parts.endings.untold,
            parts.endings.refused,
        ):
            assert not left

    @staticmethod
    def check_refusal(outcome: Outcome) -> None:
        reason = str(outcome.stop_reason)
        if outcome.slo is None:
            assert reason.startswith("slo_invalid:")
        else:
            assert outcome.slo.on_unattainable == "decline"
            kind, wait_ms, why = reason.split(":")
            assert kind == "slo_declined"
            assert int(wait_ms) >= 1
            assert why in REASONS

    def run_all(self, limit_s: float) -> None:
        """Step to the end, which must come by the virtual time ``limit_s``."""
        while self.busy:
            assert self.clock.now_s <= limit_s, f"unfinished: {list(self.scheduler.requests)}"
            self.turn()
        self.drain()

    def turn(self) -> None:
        """One turn of the engine's loop."""
        if self.scheduler.has_requests():
            output = self.step()
            if not output.num_scheduled_tokens:
                self.clock.advance(0.001)
        elif self.busy:
            self.drain()
        else:
            self.clock.advance(0.01)


Make = Callable[..., CheckedEngine]


@pytest.fixture(scope="module")
def make(config_folder: Path) -> Make:
    def engine(**options: Any) -> CheckedEngine:
        return CheckedEngine(config_folder, **options)

    return engine


def alone_s(prompt: int, output: int) -> float:
    """Time a request takes when served alone."""
    return ROOFLINE.predict_s(prompt) + output * ROOFLINE.predict_s(1, prompt + output)


def play_mix(engine: CheckedEngine, rng: random.Random, count: int, rate: float) -> None:
    """A mixture of all kinds, arriving at ``rate`` per second, with aborts; then to the end."""
    limit = (engine.shape.num_blocks - 1) * engine.shape.block_size - 1
    now, work, arrivals, aborts = 0.0, 0.0, [], []
    for i in range(count):
        now += rng.expovariate(rate)
        prompt = rng.randint(1, min(300, limit - 1))
        output = rng.randint(1, min(60, limit - prompt))
        work += 3 * alone_s(prompt, output)
        arrivals.append((now, f"r{i}", prompt, output))
        if rng.random() < 0.15:
            aborts.append((now + rng.uniform(0, 1), f"r{i}"))
    aborts.sort()
    last = now
    while arrivals or engine.busy:
        while arrivals and arrivals[0][0] <= engine.clock.now_s:
            _, name, prompt, output = arrivals.pop(0)
            send_one(engine, rng, name, prompt, output)
        while aborts and aborts[0][0] <= engine.clock.now_s:
            if aborts[0][1] in engine.outcomes:
                engine.abort(aborts[0][1])
            aborts.pop(0)
        engine.turn()
        if rng.random() < 0.3:
            engine.compile_all()
        # Everything one after the other, and the latest deadline anybody asked for.
        assert engine.clock.now_s < last + work + 10.0, list(engine.scheduler.requests)
    engine.drain()
    engine.check_outcomes()


def send_one(
    engine: CheckedEngine, rng: random.Random, name: str, prompt: int, output: int
) -> None:
    kind, priority = rng.random(), rng.randrange(3)
    if kind < 0.1:
        engine.send(name, prompt, output, dict(rng.choice(INVALID)), priority=priority)
        return
    slo = rng.choice(SLOS) if kind < 0.8 else None
    engine.send(
        name,
        prompt,
        output,
        slo.to_extra_args() if slo else None,
        priority=priority,
        structured=rng.random() < 0.15,
        lora=rng.randrange(3) if engine.config.lora_config else 0,
    )
    engine.outcomes[name].slo = slo


BEST_EFFORT: list[dict[str, Any]] = [
    *({"order": order} for order in ("fcfs", "laps_sd", "las", "lp_sjf")),
    {"order": "laps_sd", "stable_rounds": 0, "preempt_known": True},
]


@pytest.mark.slow
@settings(max_examples=examples(25))
@example(  # two who were let in took the one seat from each other for ever
    seed=263, rate=15.0, blocks=25, seats=1, step_tokens=32, overlap=False, policy="fcfs",
    caching=False, share=0.0, extras=LORA, order={"order": "fcfs"},
)  # fmt: skip
@given(
    seed=st.integers(0, 10**6),
    rate=st.sampled_from([3.0, 15.0, 200.0]),
    blocks=st.sampled_from([25, 50, 1000]),
    seats=st.sampled_from([1, 3, 32]),
    step_tokens=st.sampled_from([32, 128, 1024]),
    overlap=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    share=st.sampled_from([0.0, 0.05, 0.3]),
    extras=st.sampled_from([{}, {"speculative_config": NGRAM}, LORA]),
    order=st.sampled_from(BEST_EFFORT),
)
def test_any_mixture_of_requests(
    make: Make,
    seed: int,
    rate: float,
    blocks: int,
    seats: int,
    step_tokens: int,
    overlap: bool,
    policy: str,
    caching: bool,
    share: float,
    extras: dict[str, Any],
    order: dict[str, Any],
) -> None:
    engine = make(
        shape=EngineShape(blocks, 16, seats, step_tokens, 1024),
        overlap=overlap,
        scheduling_policy=policy,
        enable_prefix_caching=caching,
        slo_config={
            "best_effort_token_share": share,
            "ageing_s": 1.0,
            "best_effort": {"first_queue_s": 0.1, **order},
        },
        **extras,
    )
    play_mix(engine, random.Random(seed), 25, rate)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_tight_memory_and_few_seats_preempt_without_losing_a_token(
    make: Make, overlap: bool, policy: str
) -> None:
    preemptions = promised = 0
    for seed in range(3):
        engine = make(
            shape=EngineShape(40, 16, 6, 256, 1024), overlap=overlap, scheduling_policy=policy
        )
        play_mix(engine, random.Random(seed), 50, 12.0)
        preemptions += engine.preemptions
        promised += sum(bool(o.report and o.report["promised"]) for o in engine.outcomes.values())
    assert preemptions > 5
    assert promised > 10


# Refusals.


@pytest.mark.parametrize("overlap", [False, True])
def test_declined_requests_are_told_when_to_come_back(make: Make, overlap: bool) -> None:
    engine = make(overlap=overlap)
    slo = SLO(ttft_ms=1, on_unattainable="decline")
    for i in range(5):
        engine.add(f"declined{i}", 100, 10, slo)
        engine.add(f"good{i}", 100, 10)
    engine.run_all(limit_s=5.0)
    engine.check_outcomes()
    for i in range(5):
        declined = engine.outcomes[f"declined{i}"]
        assert declined.finish_reason == "abort"
        assert str(declined.stop_reason).startswith("slo_declined:")
        assert engine.outcomes[f"good{i}"].finish_reason == "stop"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("extra", INVALID, ids=lambda e: next(iter(e)))
def test_an_invalid_slo_ends_its_own_request_only(
    make: Make, overlap: bool, extra: dict[str, Any]
) -> None:
    engine = make(overlap=overlap)
    engine.add("before", 100, 20, SLO(ttft_ms=1000, tpot_ms=100))
    engine.add("plain", 100, 20)
    engine.step()
    engine.send("bad", 100, 20, extra)
    engine.add("after", 100, 20)
    engine.run_all(limit_s=5.0)
    engine.check_outcomes()
    bad = engine.outcomes["bad"]
    assert bad.finish_reason == "abort"
    assert str(bad.stop_reason).startswith("slo_invalid:")
    internal = (key for key in extra if key in INTERNAL_KEYS)  # nobody here has sealed them
    assert next(internal, next(iter(extra))).removeprefix("slo_") in str(bad.stop_reason)
    good = [engine.outcomes[name] for name in ("before", "plain", "after")]
    assert all(outcome.finish_reason == "stop" for outcome in good)


def test_an_invalid_slo_is_refused_on_an_idle_engine(make: Make) -> None:
    engine = make()
    engine.send("bad", 10, 5, {"slo_ttft_ms": -1})
    engine.run_all(limit_s=1.0)
    engine.check_outcomes()
    assert engine.outcomes["bad"].finish_reason == "abort"


def test_an_invalid_request_may_be_aborted_before_it_is_refused(make: Make) -> None:
    engine = make()
    engine.send("bad", 10, 5, {"slo_ttft_ms": -1})
    engine.abort("bad")
    engine.add("good", 10, 5)
    engine.run_all(limit_s=1.0)
    engine.check_outcomes()


def test_nothing_is_kept_of_an_invalid_request_whose_client_left_during_a_pause(make: Make) -> None:
    engine = make()
    engine.send("bad", 10, 5, {"slo_ttft_ms": -1})
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.turn()
    engine.abort("bad")
    engine.check_outcomes()


# Nothing starves.


@pytest.mark.parametrize("overlap", [False, True])
def test_objectives_out_of_reach_do_not_stop_the_engine(make: Make, overlap: bool) -> None:
    engine = make(overlap=overlap)
    engine.add("dreamer", 100, 20, SLO(ttft_ms=5000, tpot_ms=1))
    engine.add("plain", 100, 20)
    engine.run_all(limit_s=2.0)
    engine.check_outcomes()


def test_a_stream_of_dreams_does_not_starve_the_rest(make: Make) -> None:
    engine = make()
    for i in range(40):
        engine.add(f"dreamer{i}", 100, 20, SLO(ttft_ms=5000, tpot_ms=0.5))
        engine.add(f"plain{i}", 100, 20)
        for _ in range(5):
            engine.turn()
    engine.run_all(limit_s=60.0)
    engine.check_outcomes()


@pytest.mark.parametrize("overlap", [False, True])
def test_best_effort_gets_its_share_of_an_engine_full_of_promises(
    make: Make, overlap: bool
) -> None:
    engine = make(overlap=overlap, slo_config={"best_effort_token_share": 0.1, "ageing_s": 0.5})
    engine.add("patient", 200, 5)
    sent = 0
    while engine.outcomes["patient"].finish_reason is None:
        while sent * 0.05 <= engine.clock.now_s:
            engine.add(f"busy{sent}", 500, 40, SLO(ttft_ms=2000, tpot_ms=100))
            sent += 1
        engine.turn()
        assert engine.clock.now_s < 20.0
    assert sum(bool(t.promised) for t in engine.scheduler.parts.tracker.live.values()) > 3
    for name in list(engine.scheduler.requests):
        engine.abort(name)
    engine.run_all(limit_s=engine.clock.now_s + 1.0)
    engine.check_outcomes()


def test_best_effort_finishes_once_load_allows(make: Make) -> None:
    engine = make(
        shape=EngineShape(60, 16, 4, 256, 1024), slo_config={"best_effort_token_share": 0.0}
    )
    for i in range(6):
        engine.add(f"patient{i}", 150, 30)
    for i in range(30):
        engine.add(f"busy{i}", 100, 30, SLO(ttft_ms=1000, tpot_ms=60))
        for _ in range(10):
            engine.turn()
    engine.run_all(limit_s=engine.clock.now_s + 36 * alone_s(150, 30) + 2.0)
    engine.check_outcomes()


# What vLLM makes wait for other things than tokens.


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("slo", [None, SLO(ttft_ms=2000, tpot_ms=100), SLO(tier="best_effort")])
def test_structured_output_starts_when_its_grammar_is_ready(
    make: Make, overlap: bool, slo: SLO | None
) -> None:
    engine = make(overlap=overlap)
    extra = slo.to_extra_args() if slo else None
    waiting = engine.send("grammar", 50, 10, extra, structured=True)
    for i in range(4):
        engine.add(f"busy{i}", 100, 400, SLO(ttft_ms=1000, tpot_ms=60))
    for _ in range(5):
        engine.turn()
    assert waiting.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    engine.compile_all()
    ready_s = engine.clock.now_s
    while engine.outcomes["grammar"].finish_reason is None:
        engine.turn()
        assert engine.clock.now_s < ready_s + 3.0
    assert engine.outcomes["grammar"].finish_reason == "stop"
    assert all(engine.outcomes[f"busy{i}"].finish_reason is None for i in range(4))
    engine.run_all(limit_s=60.0)
    engine.check_outcomes()


def test_structured_output_with_an_slo_alone_on_the_engine(make: Make) -> None:
    engine = make()
    slo = SLO(ttft_ms=2000, tpot_ms=100)
    engine.send("grammar", 50, 10, slo.to_extra_args(), structured=True)
    engine.turn()
    engine.compile_all()
    engine.run_all(limit_s=3.0)
    engine.check_outcomes()
    assert engine.outcomes["grammar"].report["promised"]


def test_a_promise_that_waits_for_its_grammar_leaves_no_engine_idle(make: Make) -> None:
    """It may need nearly all the memory that there is."""
    engine = make(shape=EngineShape(num_blocks=25, block_size=16, max_num_seqs=1))
    slo = SLO(ttft_ms=3000, tpot_ms=100)
    engine.send("grammar", 330, 10, slo.to_extra_args(), structured=True)
    engine.add("plain", 40, 5, None)
    for _ in range(6):
        engine.turn()
    assert engine.scheduler.parts.tracker.live["grammar"].promised
    assert engine.outcomes["plain"].finish_reason == "stop"
    engine.compile_all()
    engine.run_all(limit_s=5.0)
    engine.check_outcomes()
    assert engine.outcomes["grammar"].report["attained"]


def test_a_broken_grammar_ends_its_request_while_slo_traffic_runs(make: Make) -> None:
    engine = make()
    engine.send("grammar", 50, 10, None, structured=True)
    for i in range(4):
        engine.add(f"busy{i}", 100, 200, SLO(ttft_ms=1000, tpot_ms=60))
    engine.grammars[0].set_exception(ValueError("no such grammar"))
    for _ in range(10):
        engine.turn()
    assert engine.outcomes["grammar"].finish_reason == "error"
    engine.run_all(limit_s=60.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_session_with_streaming_input_goes_on_while_slo_traffic_runs(
    make: Make, overlap: bool
) -> None:
    engine = make(overlap=overlap)
    for i in range(4):
        engine.add(f"busy{i}", 100, 600, SLO(ttft_ms=1000, tpot_ms=60))
    engine.add("plain", 100, 600)
    session = engine.send("session", 40, 5, None, resumable=True)
    for _ in range(3):
        said = len(engine.outcomes["session"].token_ids)
        since_s = engine.clock.now_s
        while len(engine.outcomes["session"].token_ids) < said + 5:
            engine.turn()
            assert engine.clock.now_s < since_s + 2.0
        assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        engine.send("session", 30, 5, None, resumable=True)
    engine.abort("session")
    assert all(engine.outcomes[f"busy{i}"].finish_reason is None for i in range(4))
    engine.run_all(limit_s=120.0)


def test_a_prompt_that_comes_in_parts_has_no_objectives(make: Make) -> None:
    classes = {"chat": {"ttft_ms": 500}}
    engine = make(slo_config={"classes": classes, "default_class": "chat"})
    engine.send("own", 40, 5, {"slo_ttft_ms": 500.0}, resumable=True)
    engine.send("session", 40, 5, None, resumable=True)
    engine.turn()
    assert not engine.scheduler.parts.tracker.live
    engine.turn()
    assert engine.outcomes["own"].stop_reason == (
        "slo_invalid:slo: the prompt comes in parts; leave objectives out"
    )


def test_who_is_waited_for_does_not_wait(make: Make) -> None:
    """Nothing is kept for a session whose client has to send the next part."""
    engine = make(slo_config={"ageing_s": 0.5})
    parts = engine.scheduler.parts
    for i in range(4):
        engine.add(f"busy{i}", 100, 600, SLO(ttft_ms=1000, tpot_ms=60))
    session = engine.send("session", 40, 5, None, resumable=True)
    while session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        engine.turn()
    engine.add("plain", 100, 600)
    until_s = engine.clock.now_s + 2.0
    while engine.clock.now_s < until_s:
        engine.turn()
        assert "session" not in parts.guard.since_s
        assert parts.guard.starved != "session"
    engine.abort("session")
    engine.run_all(limit_s=120.0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("slo", [None, SLO(ttft_ms=1000, tpot_ms=100)])
def test_prompts_of_one_token_start_with_speculation_on(
    make: Make, overlap: bool, slo: SLO | None
) -> None:
    # vLLM pads such a start to a full row of drafts, and starts it with all of them or not.
    engine = make(overlap=overlap, speculative_config=NGRAM)
    for i in range(4):
        engine.add(f"busy{i}", 100, 400, SLO(ttft_ms=1000, tpot_ms=60))
    engine.add("plain", 100, 400)
    for _ in range(4):
        engine.turn()
    for i in range(3):
        engine.add(f"short{i}", 1, 10, slo)
    started_s = engine.clock.now_s
    while any(engine.outcomes[f"short{i}"].finish_reason is None for i in range(3)):
        engine.turn()
        assert engine.clock.now_s < started_s + 2.0
    assert engine.outcomes["plain"].finish_reason is None
    engine.run_all(limit_s=60.0)
    engine.check_outcomes()


# Whatever clients say.

TIMES = st.floats(0.0, 1e8) | st.sampled_from([5e-324, 1e-3, 1.0, 50.0, 1e3, 86_400_000.0])
MARKS = st.text(max_size=4) | st.sampled_from(["\ud800", "a\udfff", "\n\n"])
STAGES = st.lists(st.fixed_dictionaries({"until": MARKS, "tpot_ms": TIMES}), max_size=3)
WHOLE = st.integers(-(2**63), 2**64 - 1)  # what vLLM lets into extra_args
SAID = st.fixed_dictionaries(
    {},
    optional={
        "slo_ttft_ms": TIMES,
        "slo_tpot_ms": TIMES,
        "slo_stages": STAGES.map(lambda stages: json.dumps([*stages, {}])),
        "slo_session_id": st.sampled_from("ab"),
        "slo_session_e2e_ms": TIMES,
        "slo_session_rounds": st.integers(1, 10_000),
        "slo_session_last": st.booleans(),
        "slo_value": st.floats(0.0, 1e6),
        "slo_tier": st.sampled_from(["guaranteed", "best_effort"]),
        "slo_on_unattainable": st.sampled_from(["best_effort", "decline"]),
        "slo_expected_output_tokens": st.integers(1, 10_000_000),
        "slo_tenant": st.sampled_from("ab"),
        "prefill_ddl": st.floats(-10.0, 10.0),
        "slo_tpot": st.floats(0.0, 10.0),
        "slo_quote": st.just(1),
        "slo_age_ms": st.floats() | st.text(max_size=3),
        "slo_ticket": WHOLE | st.none() | st.sampled_from(["7", "a:3", "x"]),
        "slo_group": st.sampled_from("ab") | WHOLE,
        "slo_each": st.just(1),
        "slo_exempt": st.just(1),
    },
)


@pytest.mark.slow
@given(asked=st.lists(st.tuples(SAID, st.booleans(), st.integers(0, 5)), min_size=1, max_size=8))
@example(asked=[({"slo_tpot_ms": 5e-324}, False, 0)])
@example(asked=[({"slo_stages": '[{"until": "\\ud800", "tpot_ms": 50}, {}]'}, False, 0)])
def test_whatever_is_said_everybody_is_served_or_told(
    config_folder: Path, asked: list[tuple[dict[str, Any], bool, int]]
) -> None:
    tokenizer = Tokenizer.from_file(str(tiny.path("target") / "tokenizer.json"))
    marks = AnswerMarks(SimpleNamespace(tokenizer=tokenizer, reasoner_cls=None))
    engine = CheckedEngine(config_folder, options={"stage_marks": marks})
    engine.add("honest", 100, 40, SLO(ttft_ms=1000, tpot_ms=60))
    for number, (extra, sealed, turns) in enumerate(asked):
        engine.send(f"r{number}", 20, 10, engine.seal.sealed(extra) if sealed else extra)
        for _ in range(turns):
            engine.turn()
    engine.run_all(limit_s=60.0)
    assert engine.outcomes["honest"].finish_reason == "stop"
    for outcome in engine.outcomes.values():
        told = str(outcome.stop_reason).startswith(("slo_invalid:", "slo_declined:", "slo_quote:"))
        assert (outcome.finish_reason == "abort") == told


# Pauses.


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_pause_and_resume_with_slo_requests_live(
    make: Make, overlap: bool, state: PauseState
) -> None:
    engine = make(overlap=overlap)
    rng = random.Random(3)
    for i in range(6):
        engine.add(f"old{i}", 100, 40, rng.choice(SLOS[:4]))
    for _ in range(4):
        engine.turn()
    engine.scheduler.set_pause_state(state)
    engine.add("new", 50, 20, SLO(ttft_ms=400, tpot_ms=50))
    engine.add("new-plain", 50, 20)
    engine.send("new-bad", 50, 20, INVALID[0])
    made = Counter({name: len(o.token_ids) for name, o in engine.outcomes.items()})
    for _ in range(30):
        output = engine.step()
        if state == PauseState.PAUSED_ALL:
            assert not output.num_scheduled_tokens
        assert not any(name.startswith("new") for name in output.num_scheduled_tokens)
        if not output.num_scheduled_tokens:
            engine.clock.advance(0.01)
    if state == PauseState.PAUSED_NEW:
        assert any(len(engine.outcomes[f"old{i}"].token_ids) > made[f"old{i}"] for i in range(6))
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run_all(limit_s=60.0)
    engine.check_outcomes()
    assert engine.outcomes["new-plain"].finish_reason == "stop"


def test_reset_of_the_prefix_cache_with_slo_requests_live(make: Make) -> None:
    for overlap in (False, True):
        engine = make(overlap=overlap)
        for i in range(8):
            engine.add(f"r{i}", 100, 40, SLOS[i % 4])
        for turn in range(40):
            engine.turn()
            if turn % 10 == 9:
                assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
                engine.check()
        engine.run_all(limit_s=60.0)
        engine.check_outcomes()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_promises_that_wait_for_memory_do_not_stop_those_that_hold_it(
    make: Make, policy: str
) -> None:
    engine = make(
        shape=EngineShape(25, 16, 3, 32, 1024),
        scheduling_policy=policy,
        enable_prefix_caching=False,
        slo_config={"best_effort_token_share": 0.0, "ageing_s": 1.0},
    )
    play_mix(engine, random.Random(193), 25, 15.0)
