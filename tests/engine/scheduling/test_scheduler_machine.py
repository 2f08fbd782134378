# SPDX-License-Identifier: Apache-2.0
"""A model-based test: hypothesis drives the real scheduler with random events, step by step.

What happens: requests of all kinds arrive (stamped by a clock that may have jumped), steps take as
long as predicted, no time at all, or far longer, clients leave, the engine is paused and resumed,
the prefix cache is reset, the machine sleeps, a front asks for promises, and in one of the tests
calls into the policies fail. The machine keeps books of its own, and after every event and every
step compares them with the scheduler's: see ``WatchedEngine.check``. At the end of each run
everything must end, and leave nothing behind.

A longer run, its counts shown::

    VLLMSLO_MACHINE_RUNS=2000 pytest -s --timeout 0 -o session_timeout=99999 \\
        tests/engine/scheduling/test_scheduler_machine.py
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from core_calls import all_watched, core_calls, unwatched, wired
from depth import examples
from fault_injection import InjectedError
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

pytest.importorskip("vllm")

from test_scheduler_invariants import INVALID, ROOFLINE, CheckedEngine, alone_s
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_slo import SLO, tiny
from vllm_slo.core.attainment import worst_window_tpot_s
from vllm_slo.core.clock import VirtualClock
from vllm_slo.core.routing.state_stream import StateDecoder, StateEncoder
from vllm_slo.core.step_time.model import BatchShape
from vllm_slo.engine.scheduling import request_facts
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.engine.scheduling.step_schedule import StepSchedule
from vllm_slo.engine.speculation.chains import Chains
from vllm_slo.sim.harness import STOP_TOKEN, EngineShape, Outcome
from vllm_slo.sim.jobs import own_text
from vllm_slo.slo.fields import SHORTEST_MS
from vllm_slo.slo.keys import GROUP_KEY

pytestmark = [pytest.mark.slow, pytest.mark.versions]

RUNS = int(os.environ.get("VLLMSLO_MACHINE_RUNS", examples(150)))
EVENTS = 40
"""Most events of one run."""
AGEING_S = 1.0
DAY_S = 86_400.0
LONGEST_TTFT_S = 6.0
PLAYED: Counter[str] = Counter()
"""What has happened in all runs."""

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
DRAFT = {"method": "draft_model", "model": str(tiny.path("draft")), "num_speculative_tokens": 4}
CLASSES: dict[str, dict[str, Any]] = {
    "chat": {"ttft_ms": 1500, "tpot_ms": 80, "expected_output_tokens": 20},
    "strict": {"ttft_ms": 300, "tpot_ms": 40, "value": 5.0, "on_unattainable": "decline"},
    "bulk": {"tier": "best_effort"},
}
VALID: tuple[SLO | dict[str, Any] | None, ...] = (
    None,
    None,
    SLO(ttft_ms=600, tpot_ms=50),
    SLO(ttft_ms=3000, tpot_ms=150, value=3.0, tenant="one"),
    SLO(ttft_ms=LONGEST_TTFT_S * 1e3, tpot_ms=1000, value=1e6, tenant="two"),
    SLO(ttft_ms=1500, expected_output_tokens=1),
    SLO(tpot_ms=80, expected_output_tokens=100_000),
    SLO(tpot_ms=45, speculation="off"),
    SLO(tpot_ms=60, on_unattainable="decline"),
    SLO(ttft_ms=1, tpot_ms=1),  # out of reach
    SLO(ttft_ms=5000, tpot_ms=0.5),
    SLO(tpot_ms=SHORTEST_MS),
    SLO(ttft_ms=200, tpot_ms=40, on_unattainable="decline"),
    SLO(ttft_ms=1, on_unattainable="decline"),
    SLO(ttft_ms=900, tpot_ms=60, tier="best_effort"),
    SLO(tier="best_effort", value=1e-3),
    SLO(ttft_ms=1500, session_id="job"),
    SLO(session_id="job", session_e2e_ms=4000, session_rounds=3, expected_output_tokens=20),
    SLO(session_id="tools", session_e2e_ms=6000, session_rounds=9, expected_output_tokens=9),
    SLO(ttft_ms=900, session_id="other", session_e2e_ms=2000, session_last=True),
    *(SLO(slo_class=name) for name in CLASSES),
    {"prefill_ddl": -10.0},  # from the arrival on, see ``WatchedEngine.submit``
    {"prefill_ddl": 2.0, "slo_tpot": 0.1},
)
ORDERS: tuple[dict[str, Any], ...] = (
    *({"order": order} for order in ("fcfs", "fcfs", "laps_sd", "las", "lp_sjf")),
    {"order": "laps_sd", "stable_rounds": 0, "preempt_known": True},
)


class JumpingClock(VirtualClock):
    """Its epoch reading can be set; the monotonic one only goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch_at_zero_s = 1e9

    def epoch_s(self) -> float:
        return self.epoch_at_zero_s + self.now_s


@dataclass(frozen=True)
class Ask:
    """A request as it is sent: the words only the model knows end after ``length`` tokens."""

    prompt: int
    length: int
    max_tokens: int
    slo: SLO | dict[str, Any] | None
    stamped_ago_s: float = 0.0
    shares_prefix: bool = False
    structured: bool = False
    priority: int = 0
    group: str | None = None

    @property
    def extra(self) -> dict[str, Any] | None:
        return self.slo.to_extra_args() if isinstance(self.slo, SLO) else self.slo

    @property
    def valid(self) -> bool:
        return self.slo not in INVALID


def _keeps_ttft(tracked: SLORequest) -> bool:
    """Whether a promise that is not a late one goes on, unbroken."""
    return tracked.promised and tracked.late is None and not tracked.broken


class WatchedEngine(CheckedEngine):
    """The virtual engine, with books of its own beside the scheduler's.

    Attributes:
        asks: every request ever sent, by name.
        slower: how much longer than predicted steps take.
        skipped: request -> steps in a row in which it held a place, had aged and got nothing.
        beside: the most requests that were live in one of these steps.
        faults: how many calls into the policies have failed. After the first of them the books of a
            request may lag for a step, or end with a report that says so, but never differ in what
            is live, in tokens and in blocks.
        fails_in: calls into the policies until one fails; 0: none does.
    """

    def __init__(self, model: Path, *, default_class: str | None = None, **options: Any) -> None:
        config = {**options.pop("slo_config"), "classes": CLASSES}
        if default_class is not None:
            config["default_class"] = default_class
        super().__init__(model, slo_config=config, **options)
        parts = self.scheduler.parts
        self.default = default_class is not None
        self.keep_history = False
        self.epoch = self.clock = parts.clock.clock = JumpingClock()
        self.asks: dict[str, Ask] = {}
        self.arrived_s: dict[str, float] = {}
        self.slower = 1.0
        self.step_time = self._slowed
        self.skipped: Counter[str] = Counter()
        self.beside: Counter[str] = Counter()
        self.empty = 0
        self.ended_promised = 0
        self.said: dict[str, int] = {}
        self.judged: set[str] = set()
        self.faults = self.fails_in = 0
        self.plan: StepSchedule | None = None
        self._shape = unwatched()(self._shape)  # type: ignore[method-assign]
        self._on_end, parts.controller.on_end = parts.controller.on_end, self._note_end
        self._plan, parts.controller.plan = parts.controller.plan, self._note_plan

    def call(self) -> None:
        """The scheduler calls into a policy."""
        if self.fails_in:
            self.fails_in -= 1
            if not self.fails_in:
                self.faults += 1
                PLAYED["faults"] += 1
                raise InjectedError("a test says so")

    def _slowed(self, shape: BatchShape) -> float:
        return self.slower * ROOFLINE.predict_shape_s(shape)

    def _note_plan(self) -> StepSchedule | None:
        self.plan = self._plan()
        return self.plan

    def _note_end(
        self, request: Request, blocks: Sequence[KVCacheBlock] = ()
    ) -> dict[str, Any] | None:
        tracked = self.scheduler.parts.tracker.get(request.request_id)
        report = self._on_end(request, blocks)
        self.ended_promised += tracked is not None and _keeps_ttft(tracked)
        return report

    # What the machine does.

    def submit(self, ask: Ask) -> str:
        """Send a request; its name."""
        name = f"r{len(self.asks)}"
        shared = own_text("shared", 2000)[: ask.prompt * 3 // 4] if ask.shares_prefix else []
        stamped_s = self.clock.epoch_s() - ask.stamped_ago_s
        extra = ask.extra
        if extra and "prefill_ddl" in extra:
            extra = {**extra, "prefill_ddl": stamped_s + extra["prefill_ddl"]}
        if ask.group is not None:
            extra = self.seal.sealed({**(extra or {}), GROUP_KEY: ask.group})
        params = SamplingParams(
            max_tokens=ask.max_tokens,
            stop_token_ids=[STOP_TOKEN],
            extra_args=extra,
            structured_outputs=StructuredOutputsParams(regex="a+") if ask.structured else None,
        )
        request = Request(
            name,
            shared + own_text(name, ask.prompt - len(shared)),
            params,
            None,
            arrival_time=stamped_s,
            priority=ask.priority,
            block_hasher=self._hasher,
        )
        if request.structured_output_request is not None:
            self.grammars.append(Future())
            request.structured_output_request.grammar = self.grammars[-1]
        self.asks[name] = ask
        self.outcomes[name] = Outcome(self.clock.now_s, None)
        self.lengths[name] = ask.length
        self.arrived_s[name] = self.clock.now_s - min(max(ask.stamped_ago_s, 0.0), DAY_S)
        self.scheduler.add_request(request)
        PLAYED["requests"] += 1
        return name

    def turn(self) -> None:
        PLAYED["steps"] += 1
        before = self.progress()
        super().turn()
        stuck = self.busy and not self._is_paused() and self.progress() == before
        self.empty = self.empty + 1 if stuck and not self._all_blocked() else 0
        assert self.empty < 100, f"nothing happens: {list(self.scheduler.requests)}"

    def progress(self) -> tuple[int, int]:
        """What grows while requests are served."""
        computed = sum(r.num_computed_tokens for r in self.scheduler.requests.values())
        return computed, sum(len(o.token_ids) for o in self.outcomes.values())

    def step(self) -> SchedulerOutput:
        self.plan = None
        held = {r.request_id for r in self.scheduler.running}
        served_s = dict(self.scheduler.parts.guard.since_s)
        output = super().step()
        PLAYED["preempted"] += len(output.preempted_req_ids or ())
        if self.plan is not None:
            self.check_grants(self.plan, output)
            self.check_share(self.plan, output, held, served_s)
        if not self._is_paused() and not self.faults:
            assert not self.scheduler.parts.endings.refused
        return output

    def abort(self, request_id: str) -> None:
        tokens = len(self.outcomes[request_id].token_ids)
        super().abort(request_id)
        self.said[request_id] = tokens

    def _is_paused(self) -> bool:
        return self.scheduler.pause_state != PauseState.UNPAUSED

    def _all_blocked(self) -> bool:
        return all(request_facts.is_blocked(r) for r in self.scheduler.requests.values())

    # What must hold.

    def check(self) -> None:
        super().check()
        self.check_free_list()
        self.check_requests()
        self.check_promises()

    def check_free_list(self) -> None:
        """Each block is free or held, in one place; who computed tokens has blocks for them."""
        manager = self.scheduler.kv_cache_manager
        pool, size = manager.block_pool, self.shape.block_size
        free = [b.block_id for b in pool.free_block_queue.get_all_free_blocks()]
        assert sorted(free) == [b.block_id for b in pool.blocks[1:] if b.ref_cnt == 0]
        for name, request in self.scheduler.requests.items():
            (held,) = manager.get_block_ids(name)
            assert len(set(held)) == len(held), f"{name} has a block twice"
            assert len(held) * size >= request.num_computed_tokens, name
            assert (
                request.num_computed_tokens
                or request.status != RequestStatus.PREEMPTED
                or (not held)
            ), f"{name} was preempted and holds blocks"

    def check_requests(self) -> None:
        """Every request ever sent is live, or has ended once; each token was said once."""
        live = set(self.scheduler.requests)
        told = Counter(self.finished)
        assert not told or max(told.values()) == 1, f"told twice: {told.most_common(1)}"
        to_tell = {
            r.request_id for r in self.scheduler.parts.endings.untold
        }  # with the next output
        ended = told.keys() | self.aborted | to_tell
        assert not live & ended
        assert live | ended == self.asks.keys(), "a request is lost"
        for name, outcome in self.outcomes.items():
            if name in live:
                request = self.scheduler.requests[name]
                assert outcome.token_ids == list(request.output_token_ids), name
            elif (said := self.said.setdefault(name, len(outcome.token_ids))) is not None:
                assert len(outcome.token_ids) == said, f"{name} speaks after its end"

    def check_promises(self) -> None:
        """The books of ``RequestTracker`` agree with the requests and with the counters."""
        parts, live = self.scheduler.parts, self.scheduler.requests
        tracked = parts.tracker.live
        follows = {n for n in live if self.asks[n].valid and (self.asks[n].extra or self.default)}
        assert set(tracked) == follows or (self.faults and set(tracked) <= follows)
        promised = {name for name, one in tracked.items() if one.promised}
        in_time = {name for name in promised if _keeps_ttft(tracked[name])}
        assert parts.tracker.unpromised == len(tracked) - len(promised)
        assert not promised & set(parts.guard.since_s), "a promise among those who wait"
        made = self.counted("admissions", outcome="promised")
        made += self.counted("admissions", outcome="promised_later")
        made -= self.counted("admissions", outcome="moved")
        broken = self.counted("promises_broken")
        dropped = made - broken - self.ended_promised - len(in_time)
        assert abs(dropped) <= self.faults, "a promise was dropped"
        for name, one in tracked.items():
            assert one.was_promised or one.late is not None or not one.promised
            late = one.first_token_s is not None and one.first_token_s > one.deadline_s
            told = one.broken or one.late is not None or not one.promised
            assert self.faults or told or not late, f"{name} is late, and that was not counted"
        if parts.best_effort is not None and not self.faults:
            assert set(parts.best_effort._known) == set(live)

    def counted(self, series: str, **labels: str) -> float:
        """Sum of a counter's samples that have these labels."""
        counter = getattr(self.scheduler.parts.metrics, f"_{series.removeprefix('promises_')}")
        return sum(
            sample.value
            for family in counter._series.collect()
            for sample in family.samples
            if sample.name.endswith("_total") and labels.items() <= sample.labels.items()
        )

    def check_grants(self, plan: StepSchedule, output: SchedulerOutput) -> None:
        """No step above its budget, nobody above what was granted."""
        started = {r.req_id for r in output.scheduled_new_reqs} | {
            r.request_id for r in plan.waiting
        }
        assert output.total_num_scheduled_tokens <= plan.token_budget
        for name, tokens in output.num_scheduled_tokens.items():
            granted = plan.tokens.get(name)
            assert granted is not None, f"{name} was not planned"
            padding = (
                self.scheduler.parts.speculation.draft_padding if granted and name in started else 0
            )
            assert tokens <= granted + padding, f"{name}: {tokens} of {granted} tokens"

    def check_share(
        self,
        plan: StepSchedule,
        output: SchedulerOutput,
        held: set[str],
        served_s: dict[str, float],
    ) -> None:
        """Who holds a place and has aged gets its share before long, whatever is promised. (In
        another order than that of arrival only who has no place ages.)"""
        parts, scheduled = self.scheduler.parts, output.num_scheduled_tokens
        aged_s = parts.clock.now_s - AGEING_S
        for name, since_s in served_s.items():
            waits = name in held and name not in scheduled and since_s < aged_s
            waits = waits and name in self.scheduler.requests and bool(scheduled)
            self.skipped[name] = self.skipped[name] + 1 if waits else 0
            beside = max(self.beside[name], len(self.scheduler.requests))
            self.beside[name] = beside if waits else 0
        planned_for = parts.controller._planner._starts.is_planned_for
        live = parts.tracker.live.values()
        with unwatched():
            kept = [one.tpot_s for one in live if one.promised or planned_for(one)]
        fullest = parts.clock.promise_model.time_to_tokens(min(kept, default=60.0))
        share = parts.config.best_effort_token_share * fullest
        if share < 1.0 or fullest < 2 * len(kept):
            self.skipped.clear()  # steps that keep these TPOTs have no room for a share
        if parts.best_effort is None:
            long = {n: k for n, k in self.skipped.items() if k > 2 * self.beside[n] + 5}
            assert not long, long

    def expected_tokens(self, name: str) -> list[int]:
        return super().expected_tokens(name)[: self.asks[name].max_tokens]

    def check_outcomes(self) -> None:
        """Everything has ended as it should, and left nothing behind."""
        for name in self.asks.keys() - self.judged:
            self.judged.add(name)
            self.check_end(name)
        scheduler, parts = self.scheduler, self.scheduler.parts
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == (
            self.shape.num_blocks - 1
        )
        left: dict[str, Any] = {
            "requests": scheduler.requests,
            "running": scheduler.running,
            "waiting": [*scheduler.waiting, *scheduler.kv_holding_waiting],
            "deferred": scheduler.deferred_waiting,
            "prefills": scheduler._inflight_prefills,
            "step": scheduler._step,
            "tracked": parts.tracker.live,
            "unpromised": parts.tracker.unpromised,
            "served": parts.guard.since_s,
            "ended": parts.endings.untold,
            "refused": parts.endings.refused,
            "steps": parts.clock._flight,
            "active": parts.controller.active,
        }
        if parts.best_effort is not None:
            left["known"] = parts.best_effort._known
        if isinstance(parts.speculation, Chains):
            left["drafts"] = parts.speculation._flight
        assert not any(left.values()), {name: what for name, what in left.items() if what}
        reasons = [str(self.outcomes[n].stop_reason) for n in self.finished]
        told = sum(reason.startswith("slo_declined:") for reason in reasons)
        declined = self.counted("admissions", outcome="declined")
        assert abs(declined - told) <= self.faults
        if not self.faults:
            self.check_groups()

    def check_groups(self) -> None:
        """The choices of one request are declined together or not at all."""
        answers: dict[str, set[bool]] = {}
        for name in self.finished:
            group = self.asks[name].group
            if group is not None:
                declined = str(self.outcomes[name].stop_reason).startswith("slo_declined:")
                answers.setdefault(group, set()).add(declined)
                PLAYED["declined choices"] += declined
        assert all(len(one) == 1 for one in answers.values()), answers

    def check_end(self, name: str) -> None:
        """One request that has ended."""
        ask, outcome = self.asks[name], self.outcomes[name]
        expected = self.expected_tokens(name)
        reason = str(outcome.stop_reason)
        if name in self.aborted:
            PLAYED["aborted"] += 1
            assert outcome.finish_reason is None
            assert outcome.token_ids == expected[: len(outcome.token_ids)], name
        elif not ask.valid and not (self.faults and outcome.finish_reason != "abort"):
            PLAYED["invalid"] += 1
            assert (outcome.finish_reason, outcome.token_ids) == ("abort", [])
            assert reason.startswith("slo_invalid:")
        elif outcome.finish_reason == "abort":
            PLAYED["declined"] += 1
            assert not outcome.token_ids
            assert self.may_be_declined(ask), name
            kind, wait_ms, why = reason.split(":")
            assert kind == "slo_declined" and int(wait_ms) >= 1 and why
        else:
            PLAYED[str(outcome.finish_reason)] += 1
            assert outcome.token_ids == expected, name
            ended = "stop" if ask.length <= ask.max_tokens else "length"
            assert outcome.finish_reason == ended, name
            self.check_report(name)

    @staticmethod
    def may_be_declined(ask: Ask) -> bool:
        slo = ask.slo
        return isinstance(slo, SLO) and "decline" in (
            slo.on_unattainable,
            CLASSES.get(slo.slo_class or "", {}).get("on_unattainable"),
        )

    def check_report(self, name: str) -> None:
        """What the client was told is what it saw."""
        ask, outcome = self.asks[name], self.outcomes[name]
        assert (outcome.report is not None) == bool(ask.extra or self.default), name
        if outcome.report is None:
            return
        report = outcome.report
        if self.faults:
            kept = report["attained"] is not False or not report["promised"]
            told = report["reason"] is not None or report["ttft_ms"] is not None
            assert kept or told, f"{name}: broken silently"
            return
        ttft_s = outcome.token_times_s[0] - self.arrived_s[name]
        assert outcome.report["ttft_ms"] == pytest.approx(ttft_s * 1e3, abs=1e-2)
        worst_s = worst_window_tpot_s(outcome.token_times_s, 10)
        if worst_s is None:
            assert outcome.report["tpot_ms"] is None
        else:
            assert outcome.report["tpot_ms"] == pytest.approx(worst_s * 1e3, abs=1e-2)
        late = outcome.report["late"]
        PLAYED["late"] += late
        PLAYED["promised"] += outcome.report["promised"] and not late
        PLAYED["attained"] += outcome.report["attained"] is True


SHAPES = st.builds(
    EngineShape,
    num_blocks=st.sampled_from([25, 50, 1000]),
    block_size=st.just(16),
    max_num_seqs=st.sampled_from([1, 3, 32]),
    max_num_batched_tokens=st.sampled_from([48, 128, 1024]),
    max_model_len=st.just(1024),
)
AGES_S = st.sampled_from([0.0, 0.0, 0.0, 0.02, 0.5, -0.5, 3600.0, -3600.0, 1e12, -1e12])


class SchedulerMachine(RuleBasedStateMachine):
    """Everything that can happen to a scheduler.

    Args:
        model: folder with a ``config.json``.
        fails: whether calls into the policies fail, too.
    """

    def __init__(self, model: Path, *, fails: bool = False) -> None:
        super().__init__()
        self.model = model
        self.fails = fails
        self.engine: WatchedEngine

    @initialize(
        shape=SHAPES,
        overlap=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        share=st.sampled_from([0.0, 0.05, 0.3]),
        order=st.sampled_from(ORDERS),
        drafts=st.sampled_from([None, None, NGRAM, DRAFT]),
        tenants=st.booleans(),
        default_class=st.sampled_from([None, None, "chat"]),
        calls=st.integers(1, 150),
    )
    def start(
        self,
        shape: EngineShape,
        overlap: bool,
        policy: str,
        caching: bool,
        share: float,
        order: dict[str, Any],
        drafts: dict[str, Any] | None,
        tenants: bool,
        default_class: str | None,
        calls: int,
    ) -> None:
        PLAYED["runs"] += 1
        self.engine = WatchedEngine(
            self.model,
            shape=shape,
            overlap=overlap,
            scheduling_policy=policy,
            enable_prefix_caching=caching,
            default_class=default_class,
            slo_config={
                "best_effort_token_share": share,
                "ageing_s": AGEING_S,
                "best_effort": {"first_queue_s": 0.1, **order},
                "speculation": {"share": "tenants" if tenants else "throughput"},
            },
            options={"contains_faults": self.fails},
            **({} if drafts is None else {"speculative_config": drafts}),
        )
        self.longest = (shape.num_blocks - 1) * shape.block_size - 10
        self.watching = ExitStack()
        if self.fails:
            self.watching.enter_context(all_watched(self.engine.call))
            self.engine.fails_in = calls

    @rule(
        count=st.integers(1, 6),
        slo=st.sampled_from(VALID),
        prompt=st.integers(1, 400),
        length=st.integers(1, 50),
        most=st.integers(1, 60),
        stamped_ago_s=AGES_S,
        shares_prefix=st.booleans(),
        structured=st.sampled_from([False, False, False, True]),
        priority=st.integers(0, 2),
        as_choices=st.booleans(),
    )
    def arrive(self, count: int, prompt: int, most: int, as_choices: bool, **asked: Any) -> None:
        most = min(most, self.longest - 1)
        prompt = min(prompt, self.longest - most)
        group = f"g{len(self.engine.asks)}" if as_choices and count > 1 else None
        for _ in range(count):
            self.engine.submit(Ask(prompt, max_tokens=most, group=group, **asked))
            self.engine.check()

    @rule(slo=st.sampled_from(INVALID))
    def arrive_invalid(self, slo: dict[str, Any]) -> None:
        self.engine.submit(Ask(20, 5, 5, dict(slo)))
        self.engine.check()

    @rule(
        count=st.integers(1, 12),
        slower=st.sampled_from([1.0, 1.0, 1.0, 1.0, 0.0, 0.3, 1.3, 3.0, 30.0]),
    )
    def steps(self, count: int, slower: float) -> None:
        self.engine.slower = slower
        for _ in range(count):
            self.engine.turn()
        self.engine.slower = 1.0

    @rule()
    def work(self) -> None:
        for _ in range(30):
            if not self.engine.busy:
                break
            self.engine.turn()

    @rule(seconds=st.sampled_from([1e-6, 0.01, 0.3, 2.0, 60.0]))
    def sleep(self, seconds: float) -> None:
        self.engine.clock.advance(seconds)

    @rule(seconds=st.sampled_from([-3600.0, -0.5, 0.5, 3600.0, -1e9, 1e9]))
    def jump(self, seconds: float) -> None:
        """The epoch clock is set."""
        self.engine.epoch.epoch_at_zero_s += seconds

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(place=st.integers(0, 1000), all_of_them=st.sampled_from([False] * 9 + [True]))
    def leave(self, place: int, all_of_them: bool) -> None:
        names = list(self.engine.scheduler.requests)
        for name in names if all_of_them else [names[place % len(names)]]:
            self.engine.abort(name)

    @rule(state=st.sampled_from([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]))
    def pause(self, state: PauseState) -> None:
        self.engine.scheduler.set_pause_state(state)

    @precondition(lambda self: self.engine._is_paused())
    @rule()
    def resume(self) -> None:
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    @rule(running_too=st.booleans())
    def reset_prefix_cache(self, running_too: bool) -> None:
        self.engine.scheduler.reset_prefix_cache(running_too)
        self.engine.check()

    @precondition(lambda self: self.engine.grammars)
    @rule()
    def compile_grammars(self) -> None:
        self.engine.compile_all()

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(place=st.integers(0, 1000))
    def front_asks(self, place: int) -> None:
        names = list(self.engine.scheduler.requests)
        self.engine.scheduler.promise_now(names[place % len(names)])
        self.engine.check()

    @precondition(lambda self: self.fails)
    @rule(calls=st.integers(1, 150))
    def a_call_fails(self, calls: int) -> None:
        """One of the next calls into the policies."""
        self.engine.fails_in = calls

    @rule()
    def look(self) -> None:
        scheduler = self.engine.scheduler
        with unwatched():
            state = scheduler.state()
            assert state == scheduler.state()
            read = StateDecoder().read(StateEncoder().line(state))
            assert read.state is not None
            assert (read.state.decoding, read.state.running) == (state.decoding, state.running)
        assert state.running + state.waiting == len(scheduler.requests)
        promised = sum(t.promised for t in scheduler.parts.tracker.live.values())
        assert len(state.committed) + sum(state.decoding.values()) == promised
        self.engine.check()

    def teardown(self) -> None:
        """Once nothing new comes everything ends, and a newcomer is served as if nothing had been.

        Not where an event has failed: hypothesis then tears down, too.
        """
        if not hasattr(self, "engine"):
            return
        self.watching.close()
        if sys.exc_info()[0] is not None:
            return
        engine = self.engine
        engine.fails_in = 0
        engine.clock.advance(engine.scheduler.parts.containment.retry_after_s)
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.compile_all()
        live = [engine.asks[name] for name in engine.scheduler.requests]
        work = sum(alone_s(ask.prompt + ask.max_tokens, ask.max_tokens) for ask in live)
        engine.run_all(engine.clock.now_s + 5 * work + LONGEST_TTFT_S + 10 * AGEING_S)
        engine.check_outcomes()
        last = engine.submit(Ask(5, 5, 5, SLO(ttft_ms=1e6, tpot_ms=1e6)))
        engine.run_all(engine.clock.now_s + 10.0)
        engine.check_outcomes()
        assert engine.outcomes[last].report["promised"], engine.outcomes[last].report


def play_machine(folder: Path, runs: int, *, fails: bool) -> None:
    PLAYED.clear()
    factory: Any = partial(SchedulerMachine, folder, fails=fails)
    run_state_machine_as_test(
        factory,
        settings=settings(
            max_examples=runs,
            stateful_step_count=EVENTS,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    sys.stdout.write(f"{dict(PLAYED)}\n")


def test_scheduler_under_random_events(config_folder: Path) -> None:
    play_machine(config_folder, RUNS, fails=False)
    for kind in ("promised", "late", "attained", "preempted", "declined", "invalid", "aborted"):
        assert PLAYED[kind] > RUNS / 10, f"hardly anything was {kind}: {PLAYED}"


def test_scheduler_under_random_events_and_faults(config_folder: Path) -> None:
    runs = max(RUNS // 3, 1)
    with wired(core_calls()):
        play_machine(config_folder, runs, fails=True)
    assert PLAYED["faults"] > runs / 5  # many runs have few events
