# SPDX-License-Identifier: Apache-2.0
"""Virtual engines that contain faults, and what is played on them: together they come to every call
of the scheduler into the policies.

For tests beside ``test_scheduler_invariants``, of which this takes the checks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from core_calls import unwatched
from fault_injection import Fault, Site
from test_scheduler_invariants import ROOFLINE, AnyToken, CheckedEngine
from virtual_drafters import Drafter, RemoteEngine
from virtual_trees import SPECULATION, TreeEngine
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from vllm_slo import SLO, tiny
from vllm_slo.core.lengths.forecast import LengthQuery
from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduling.containment import FIRST_ASIDE_S
from vllm_slo.engine.scheduling.controller import Controller
from vllm_slo.engine.scheduling.slo_request import UNCLASSED, UNLABELLED
from vllm_slo.engine.speculation import tenants
from vllm_slo.engine.speculation.messages import DraftingReport
from vllm_slo.engine.telemetry.state import SOCKET_VARIABLE
from vllm_slo.engine.telemetry.tracing import RequestSpans
from vllm_slo.sim.harness import EngineShape, Outcome, VirtualEngine
from vllm_slo.slo.keys import GROUP_KEY
from vllm_slo.slo.model import Stage
from vllm_slo.slo.verdicts import Declined, Invalid, Quoted, unpack

CONTAINED: dict[str, Any] = {"options": {"contains_faults": True}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
DRAFT = {"method": "draft_model", "model": str(tiny.path("draft")), "num_speculative_tokens": 4}
SMALL = EngineShape(40, 16, 6, 256, 1024)
LONG_STEPS = EngineShape(40, 16, 6, 1024, 1024)
EASY = SLO(ttft_ms=60_000, tpot_ms=10_000)
QUOTA = {"promised_tokens_per_s": 1000, "burst_tokens": 5000}
CONFIG: dict[str, Any] = {
    "ageing_s": 1.0,
    "best_effort": {"order": "laps_sd", "first_queue_s": 0.1},
    "quotas": {"default": QUOTA, "tenants": {"one": QUOTA}},
    "speculation": {"share": "tenants"},
    "classes": {"chat": {"ttft_ms": 4000, "tpot_ms": 300}},
}
STAGES = (Stage(300, "</think>"), Stage(500))
STEPS = 600
"""More than any run takes."""


class Run:
    """A mixture of requests of all kinds on an engine that contains faults, to the end.

    Args:
        engine: used again and again: what one fault leaves behind shows in the next run.
        name: of the run, the first part of each request's name.

    Attributes:
        last: step before which the last thing happens.
        failed: faults that belong to the run.
        as_foreseen: whether steps take as long as promises count on.
    """

    last, as_foreseen = 12, True

    def __init__(self, engine: VirtualEngine, name: str) -> None:
        self.engine: Any = engine
        self.name = name
        self.tokens: dict[str, int] = {}
        self.asks: dict[str, SLO | None] = {}
        self.steps = self.failed = 0
        self.gone: set[str] = set()

    @property
    def parts(self) -> Any:
        return self.engine.scheduler.parts

    def add(
        self, name: str, prompt: int | list[int], output: int, slo: SLO | None, **options: Any
    ) -> str:
        name = f"{self.name}-{name}"
        self.tokens[name], self.asks[name] = output, slo
        self.engine.add(name, prompt, output, slo, **options)
        return name

    def add_raw(self, name: str, extra: dict[str, Any] | None, *, structured: bool = False) -> None:
        """A request with raw ``extra_args``."""
        engine, name = self.engine, f"{self.name}-{name}"
        params = SamplingParams(
            max_tokens=8,
            extra_args=extra,
            structured_outputs=StructuredOutputsParams(regex="a+") if structured else None,
        )
        prompt, hasher = [*range(5, 45)], engine._hasher
        request = Request(
            name, prompt, params, None, arrival_time=engine.clock.now_s, block_hasher=hasher
        )
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = AnyToken()
        engine.outcomes[name] = Outcome(engine.clock.now_s, None)
        engine.lengths[name] = self.tokens[name] = 8
        engine.stages.ends[name] = ()
        self.asks[name] = None
        engine.scheduler.add_request(request)

    def arrive(self) -> None:
        """The first requests."""
        seal = self.engine.seal
        self.add("chat", 60, 12, SLO(slo_class="chat"), stop=["so"])
        tight = SLO(ttft_ms=3000, tpot_ms=200, tenant="one")
        self.add("tight", 90, 10, tight, ticket=Ticket("front", 1))
        self.add("plain", 100, 20, None)
        self.add("late", 60, 5, SLO(ttft_ms=1, on_unattainable="decline"))
        self.add("quote", 50, 5, EASY, quote=True)
        self.add("quote without", 50, 5, None, quote=True)
        self.add_raw("invalid", {"slo_ttft_ms": -1})
        declines = SLO(ttft_ms=2000, on_unattainable="decline").to_extra_args()
        for number in range(2):
            self.add_raw(f"choice{number}", seal.sealed({**declines, GROUP_KEY: self.name}))
        self.add("bulk", 150, 15, SLO(tier="best_effort"))
        self.add("tpot", 40, 14, SLO(tpot_ms=150))

    def arrive_later(self) -> None:
        """Requests that find others running."""
        session: dict[str, Any] = {"session_id": self.name, "session_e2e_ms": 600_000}
        self.add("staged", 50, 12, SLO(stages=STAGES), stage_ends=(6,))
        self.add("round", 40, 6, SLO(ttft_ms=5000, session_rounds=2, **session))
        self.add("whole", 40, 8, SLO(e2e_ms=30_000))
        self.add("one token", 30, 1, SLO(ttft_ms=5000))
        self.add("more", 200, 12, None)
        self.gone.add(self.add("gone", 80, 30, SLO(ttft_ms=9000, tpot_ms=900)))
        self.add_raw("structured", EASY.to_extra_args(), structured=True)

    def turn(self) -> bool:
        """One turn of the engine's loop; False: it has nothing to do."""
        engine = self.engine
        if not engine.scheduler.has_requests():
            was_busy = engine.busy
            engine.drain()
            return was_busy
        output = engine.step()
        if not output.num_scheduled_tokens:
            engine.clock.advance(0.001)
        engine.scheduler.state()
        return True

    def happen(self, step: int) -> None:
        """What happens before a step."""
        if step == 0:
            self.arrive()
            self.engine.scheduler.promise_now(f"{self.name}-tpot")
        if step == 4:
            self.arrive_later()
        if step == 8:
            for name in self.gone:
                self.engine.abort(name)
        if step == self.last:
            session: dict[str, Any] = {"session_id": self.name, "session_last": True}
            self.add("last round", 30, 6, SLO(ttft_ms=5000, **session))

    def play(self) -> None:
        """All of it, until the engine has nothing to do."""
        for step in range(STEPS):
            self.happen(step)
            if not self.turn():
                if step > self.last:
                    break
                self.engine.clock.advance(0.1)
        self.engine.drain()

    def check(self) -> None:
        """Every client has what it is to have, and nothing is left."""
        for name, count in self.tokens.items():
            self.check_outcome(name, self.engine.outcomes[name], count)
        self.check_left()

    def check_outcome(self, name: str, outcome: Outcome, count: int) -> None:
        asked, verdict = self.asks[name], unpack(outcome.stop_reason)
        if name in self.gone:
            return
        if outcome.finish_reason == "abort":
            assert not outcome.token_ids, f"{name}: ended after {len(outcome.token_ids)} tokens"
            if "quote" in name:
                assert isinstance(verdict, Quoted), f"{name}: {outcome}"
            elif "invalid" in name:
                assert isinstance(verdict, Invalid), f"{name}: {outcome}"
            else:
                assert isinstance(verdict, Declined), f"{name}: {outcome}"
                assert asked is None or asked.on_unattainable == "decline", name
            return
        assert "quote" not in name, f"{name} was served"
        assert outcome.finish_reason is not None, f"{name} is lost"
        assert len(outcome.token_ids) == count, f"{name}: {outcome}"
        if asked is not None:
            report = outcome.report
            assert report is not None, f"{name} has no report"
            kept = report["attained"] is not False or not report["promised"] or report["reason"]
            assert kept or not self.as_foreseen, f"{name}: a promise was broken silently: {report}"

    def check_left(self) -> None:
        scheduler, parts = self.engine.scheduler, self.parts
        pool = scheduler.kv_cache_manager.block_pool
        left = {
            "requests": scheduler.requests,
            "running": scheduler.running,
            "waiting": [*scheduler.waiting, *scheduler.kv_holding_waiting],
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "tracked": parts.tracker.live,
            "unpromised": parts.tracker.unpromised,
            "served": parts.guard.since_s,
            "refused": parts.endings.refused,
            "untold": parts.endings.untold,
            "quotes": parts.quotes._asking,
            "groups": parts.controller._groups._members,
            "lost": parts.recovery._lost,
        }
        if parts.quotas is not None:
            left["paid"] = parts.quotas._paid
        if parts.best_effort is not None:
            left["known"] = parts.best_effort._known
        if parts.recorder is not None:
            left["recorded"] = [*parts.recorder._live, *parts.recorder._paces]
        assert not any(left.values()), {name: what for name, what in left.items() if what}


class QuotingEngine(CheckedEngine):
    """A request that waits for a quote is in no queue."""

    def check(self) -> None:
        if self.scheduler.parts.quotes._asking:
            self.check_blocks()
        else:
            super().check()


class Crowded(Run):
    """Best effort has all memory and seats when promises come, and some cannot be kept."""

    last = 40

    def happen(self, step: int) -> None:
        if step == 0:
            for number in range(5):
                self.add(f"plain{number}", 60, 40, None)
        if step == 6:
            self.gone.add(self.add_session())
            self.add("first", 90, 10, SLO(ttft_ms=3000, tpot_ms=300))
            self.add("second", 90, 40, SLO(ttft_ms=3000, tpot_ms=300))
            self.add("hasty", 40, 12, SLO(e2e_ms=200))
            self.add("large", 400, 8, SLO(ttft_ms=9000), max_tokens=600)
            self.add("quote", 300, 300, EASY, quote=True)
        if step == self.last:
            for name in self.gone:
                self.engine.abort(name)

    def add_session(self) -> str:
        """A request whose prompt comes in parts."""
        name = f"{self.name}-session"
        self.tokens[name], self.asks[name] = 3, None
        self.engine.stages.ends[name] = ()
        self.engine.send(name, 20, 3, None, resumable=True)
        return name


class Paying(Run):
    """Tenants that cannot pay for all, and answers that outgrow what was paid."""

    def happen(self, step: int) -> None:
        if step == 0:
            self.engine.clock.advance(60.0)
            self.add("plain", 40, 60, None)
            for number in range(3):
                slo = SLO(ttft_ms=9000, tpot_ms=500, tenant="one")
                self.add(f"r{number}", 50, 60, slo, max_tokens=100)
            self.add("dear", 300, 8, SLO(ttft_ms=9000, tenant="one"))
        if step == 8:
            self.gone = {f"{self.name}-r0"}
            self.engine.abort(f"{self.name}-r0")


class Tight(Run):
    """TPOTs that drafts are needed for, answers long enough to use them, and steps that take longer
    than was foreseen."""

    last, as_foreseen = 24, False

    def happen(self, step: int) -> None:
        if step == 0:
            for number, tpot_ms in enumerate((19, 21, 25, 40)):
                self.add(f"r{number}", 30, 90, SLO(ttft_ms=9000, tpot_ms=tpot_ms, tenant="one"))
            self.add("plain", 30, 40, None)
            brief = SLO(tpot_ms=30, tier="best_effort", expected_output_tokens=3)
            self.add("asked", 30, 20, brief)
        if step == 3:
            self.add_raw("form", EASY.to_extra_args(), structured=True)
        if step == 6:
            self.arrive_later()
        if step in (12, 20, 24):
            self.engine.clock.advance(0.04)


class Paused(Tight):
    """The engine is paused while late promises have their turn."""

    def happen(self, step: int) -> None:
        super().happen(step)
        if step == 20:
            self.engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)


class Refitted(Tight):
    """The step times are fitted anew, with what a pass of the draft takes and without."""

    def happen(self, step: int) -> None:
        super().happen(step)
        if step in (8, 16):
            times = self.parts.clock.estimator
            (k1, _, b1), second = times.base.terms
            times.base = replace(times.base, terms=((k1, 0.001 * (step == 8), b1), second))

    def play(self) -> None:
        """There are more tenants than are remembered."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tenants, "MOST_TENANTS", 1)
            super().play()


class Probing(Run):
    """Steps were slow for long, so what could be kept by now is refused, until it is tried."""

    last = 3

    def happen(self, step: int) -> None:
        engine = self.engine
        if step == 0:
            engine.step_time = lambda shape: 8.0 * ROOFLINE.predict_shape_s(shape)
            self.add("slow", 30, 80, None)
        if step == 1:
            for _ in range(STEPS):
                if not self.turn():
                    break
            engine.step_time = ROOFLINE.predict_shape_s
            engine.clock.advance(3600.0)
            self.add("tried", 30, 20, SLO(ttft_ms=9000, tpot_ms=60))


class Failing(Tight):
    """One draft after the other fails for good."""

    def happen(self, step: int) -> None:
        super().happen(step)
        if step in (14, 20):
            self.engine.fail = {(step - 14) // 6: "out of memory"}


class Drafted(Tight):
    """Draft servers come and go."""

    def happen(self, step: int) -> None:
        super().happen(step)
        drafters = self.engine.drafters
        if step == 10:
            drafters["a"].up = False
        if step in (9, 12, 15, 18, 21):
            drafters["b"].there = step % 2 == 0
        if step == self.last:
            drafters["a"].up = drafters["b"].there = True


class Foretold(Run):
    """Answers whose lengths were learnt from prompts like theirs."""

    def happen(self, step: int) -> None:
        if step == 0:
            for number, (prompt, tokens) in enumerate(templated(3)):
                self.add(f"r{number}", prompt, min(tokens, 30), None, max_tokens=400)
        if step == 2:
            prompt, _ = templated(1)[0]
            self.add("longer", prompt, 90, None, max_tokens=400)
            self.add("asked", prompt, 8, EASY, max_tokens=400)


class Recovering(Run):
    """Planning fails now and then beside what is tried, until it stands aside for a while."""

    last = 70

    def happen(self, step: int) -> None:
        super().happen(step)
        if step == 0:
            self.add("long", 40, 120, SLO(tpot_ms=2_000))
        if step == 40:
            self.add("quote aside", 40, 5, EASY, quote=True)
            self.add("aside", 40, 5, EASY)
            self.engine.scheduler.state()
        if step == 50:
            self.engine.clock.advance(FIRST_ASIDE_S)

    def turn(self) -> bool:
        failing = self.steps in (2, 6) or 20 <= self.steps < 40
        self.steps += 1
        if not failing:
            return super().turn()
        with Fault(Site(Controller, "plan")).injected() as fault:
            on = super().turn()
        self.failed += fault.raised
        return on


def plain(folder: Path, **options: Any) -> VirtualEngine:
    options.setdefault("shape", SMALL)
    options.setdefault("slo_config", CONFIG)
    return QuotingEngine(folder, **CONTAINED, **options)


def watched(folder: Path) -> VirtualEngine:
    """One whose state is told to a front, and whose requests are traced and recorded."""
    recording = {"path": str(Path(tempfile.mkdtemp(dir=folder), "requests.jsonl"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOCKET_VARIABLE, str(folder / "nobody-listens"))
        engine = plain(folder, slo_config={**CONFIG, "recording": recording}, records=True)
    engine.scheduler.parts.outcomes._spans = RequestSpans()
    return engine


def with_graphs(folder: Path) -> VirtualEngine:
    """One whose steps of full drafts are the fastest, as with CUDA graphs."""
    engine = plain(folder, speculative_config=DRAFT)
    engine.scheduler.parts.speculation._lengths._keeps_graphs = True
    return engine


def probing(folder: Path) -> VirtualEngine:
    """One that has made enough steps to know how fast they can be."""
    engine = plain(folder)
    engine.add("before", 30, 80)
    engine.run()
    engine.forget("before")
    return engine


def crowded(folder: Path, **options: Any) -> VirtualEngine:
    config = {"ageing_s": 0.5, "classes": CONFIG["classes"]}
    return QuotingEngine(folder, shape=SMALL, slo_config=config, **CONTAINED, **options)


def paying(folder: Path) -> VirtualEngine:
    quota = {"promised_tokens_per_s": 10, "burst_tokens": 250}
    config = {**CONFIG, "quotas": {"tenants": {"one": quota}}}
    engine = QuotingEngine(folder, shape=SMALL, slo_config=config, **CONTAINED)
    for _ in range(20):  # so far answers are short
        engine.scheduler.parts.workload.lengths.observe(UNCLASSED, 10, cut_off=False)
    return engine


def foretold(folder: Path) -> VirtualEngine:
    order = {"order": "laps_sd", "output_length": "learnt", "first_queue_s": 0.1}
    config = {"best_effort": order, "ageing_s": 1.0}
    shape = EngineShape(200, 16, 6, 256, 1024)
    engine = QuotingEngine(folder, shape=shape, slo_config=config, **CONTAINED)
    for prompt, tokens in templated(300):
        query = LengthQuery(UNLABELLED, len(prompt), 400, None, prompt)
        engine.scheduler.parts.best_effort.lengths.observe(query, tokens)
    return engine


def templated(count: int) -> list[tuple[list[int], int]]:
    """Prompts of two kinds, and how long their answers are."""
    rng = np.random.default_rng(0)
    return [
        ([*range(100 + 500 * kind, 130 + 500 * kind)], (20, 80)[kind])
        for kind in rng.integers(2, size=count).tolist()
    ]


def tree_engine(
    cls: type[TreeEngine] = TreeEngine,
    *arguments: Any,
    model: StepTimeModel = ROOFLINE,
    speculation: dict[str, Any] | None = None,
    **options: Any,
) -> TreeEngine:
    config = {name: value for name, value in CONFIG.items() if name != "speculation"}
    return cls(
        model,
        *arguments,
        shape=EngineShape(60 + 2 * SPECULATION["draft_tokens"], 32, 6, 256, 512),
        slo_config=config,
        speculation={"share": "tenants", **(speculation or {})},
        contains_faults=True,
        **options,
    )


class Pool(TreeEngine):
    """Two drafts that say how alike they are."""

    def _work(self, output: Any) -> DraftingReport:
        report = super()._work(output)
        report.similarities = [(0, 1, 0.8), (1, 2, 0.6)]
        return report


class Scenario(NamedTuple):
    """An engine, what is played on it, and how often before anything is tried.

    Attributes:
        once: whether a run leaves its engine in another state for good.
        promises: whether anything is promised.
    """

    engine: Callable[[Path], Any]
    run: type[Run] = Run
    before: int = 0
    once: bool = False
    promises: bool = True

    def begin(self, folder: Path) -> Any:
        """A new engine. What it asks of a step's shape is not the scheduler's call."""
        engine = self.engine(folder)
        engine._shape = unwatched()(engine._shape)
        for number in range(self.before):
            self.run(engine, f"before{number}").play()
        return engine


POOL: dict[str, Any] = {
    "model": StepTimeModel(((0.0, 0.0, 0.100), (0.0004, 0.0, 0.090)), max_tokens=8192),
    "honest": (0.55, 0.85),
    "pass_s": (0.001, 0.016),
    "agree": {(0, 1): 0.75},
    "speculation": {"max_depth": 8, "max_width": 1},
}
SCENARIOS = {
    "plain": Scenario(watched),
    "overlapped": Scenario(lambda folder: plain(folder, overlap=True)),
    "looked up": Scenario(lambda folder: plain(folder, speculative_config=NGRAM)),
    "drafted": Scenario(lambda folder: plain(folder, overlap=True, speculative_config=DRAFT)),
    "without promises": Scenario(
        lambda folder: plain(folder, enable_chunked_prefill=False, shape=LONG_STEPS),
        promises=False,
    ),
    "crowded": Scenario(crowded, Crowded),
    "paying": Scenario(paying, Paying),
    "foretold": Scenario(foretold, Foretold),
    "probing": Scenario(probing, Probing),
    "recovering": Scenario(plain, Recovering),
    "tight drafts": Scenario(with_graphs, Refitted),
    "trees": Scenario(lambda _: tree_engine()),
    "tight trees": Scenario(lambda _: tree_engine(), Tight, before=2),
    "pool": Scenario(lambda _: tree_engine(Pool, **POOL), Paused, before=1),
    "failing pool": Scenario(lambda _: tree_engine(Pool, **POOL), Failing, once=True),
    "draft servers": Scenario(
        lambda _: tree_engine(RemoteEngine, {"a": Drafter(), "b": Drafter()}), Drafted
    ),
}
