# SPDX-License-Identifier: Apache-2.0
"""Each call into a policy, and each call into a part of the scheduler, fails once: no request is
lost, no token, no block and no promise, and the next requests are planned as before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from depth import DEPTH
from fault_injection import Fault, Site, counted, sites

pytest.importorskip("vllm")

from test_scheduler_invariants import ROOFLINE, AnyToken, CheckedEngine
from virtual_trees import SPECULATION, TreeEngine
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

from vllm_slo import SLO, tiny
from vllm_slo.engine.scheduling.containment import Containment
from vllm_slo.engine.speculation import messages
from vllm_slo.engine.telemetry import recording
from vllm_slo.sim.harness import EngineShape, Outcome, VirtualEngine
from vllm_slo.slo.keys import GROUP_KEY
from vllm_slo.slo.model import Stage
from vllm_slo.slo.verdicts import Declined, Invalid, Quoted, unpack

pytestmark = pytest.mark.slow

CONTAINED: dict[str, Any] = {"options": {"contains_faults": True}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
DRAFT = {"method": "draft_model", "model": str(tiny.path("draft")), "num_speculative_tokens": 4}
SMALL = EngineShape(40, 16, 6, 256, 1024)
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
    """

    def __init__(self, engine: VirtualEngine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.tokens: dict[str, int] = {}
        self.asks: dict[str, SLO | None] = {}
        self.gone: set[str] = set()

    @property
    def parts(self) -> Any:
        return self.engine.scheduler.parts

    def add(self, name: str, prompt: int, output: int, slo: SLO | None, **options: Any) -> str:
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
        self.add("tight", 90, 10, SLO(ttft_ms=3000, tpot_ms=200, tenant="one"))
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
        session: dict[str, Any] = {"session_id": self.name, "session_e2e_ms": 60_000}
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

    def play(self) -> None:
        """All of it, until the engine has nothing to do."""
        engine = self.engine
        self.arrive()
        engine.scheduler.promise_now(f"{self.name}-tpot")
        for step in range(STEPS):
            if step == 4:
                self.arrive_later()
            if step == 8:
                for name in self.gone:
                    engine.abort(name)
            if step == 12:
                session: dict[str, Any] = {"session_id": self.name, "session_last": True}
                self.add("last round", 30, 6, SLO(ttft_ms=5000, **session))
            if not self.turn():
                if step > 12:
                    break
                engine.clock.advance(0.1)
        engine.drain()

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
            assert kept, f"{name}: a promise was broken silently: {report}"

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
        assert not any(left.values()), {name: what for name, what in left.items() if what}


class QuotingEngine(CheckedEngine):
    """A request that waits for a quote is in no queue."""

    def check(self) -> None:
        if self.scheduler.parts.quotes._asking:
            self.check_blocks()
        else:
            super().check()


def plain(folder: Path, **options: Any) -> VirtualEngine:
    return QuotingEngine(folder, shape=SMALL, slo_config=CONFIG, **CONTAINED, **options)


def trees() -> VirtualEngine:
    config = {name: value for name, value in CONFIG.items() if name != "speculation"}
    return TreeEngine(
        ROOFLINE,
        shape=EngineShape(40 + 2 * SPECULATION["draft_tokens"], 32, 6, 256, 512),
        slo_config=config,
        speculation={"share": "tenants"},
        contains_faults=True,
    )


KINDS: dict[str, Callable[[Path], VirtualEngine]] = {
    "plain": plain,
    "overlapped": lambda folder: plain(folder, overlap=True),
    "looked up": lambda folder: plain(folder, speculative_config=NGRAM),
    "drafted": lambda folder: plain(folder, overlap=True, speculative_config=DRAFT),
    "trees": lambda _: trees(),
}


def injectable() -> list[Site]:
    """All calls but those of what contains the faults, and those that virtual engines make."""
    of_engines = Site(messages, "of"), Site(messages.DraftTrees, "none")
    exempt = (Containment, recording)
    return [site for site in sites() if site.owner not in exempt and site not in of_engines]


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_fails_once(config_folder: Path, kind: str) -> None:
    engine, calls = KINDS[kind](config_folder), Counter[Site]()
    with counted(calls, injectable()):
        run = Run(engine, "counted")
        run.play()
    run.check()
    assert not run.parts.containment.failures
    assert sum(bool(o.report and o.report["promised"]) for o in engine.outcomes.values()) > 4
    wrong: dict[str, str] = {}
    for number, (site, count) in enumerate(sorted(calls.items(), key=lambda one: str(one[0]))):
        for first in which_calls(kind, site, count):
            try:
                play_with(engine, site, first, f"{number}.{first}")
            except Exception as error:  # noqa: BLE001 (all are reported at the end)
                wrong[f"{site} ({first} of {count})"] = f"{type(error).__name__}: {error}"[:300]
                engine = KINDS[kind](config_folder)
    assert not wrong, "\n".join(f"{site}: {what}" for site, what in wrong.items())


def which_calls(kind: str, site: Site, count: int) -> Iterable[int]:
    """Which of the ``count`` calls of a site fail. Besides what concerns drafts, engines that only
    differ in their drafts are alike."""
    if DEPTH > 1:
        return range(1, count + 1, 1 + count // 10)
    if kind == "plain":
        return {1, 1 + count // 2}
    drafts = "speculation" in f"{getattr(site.owner, '__module__', '')}{site}"
    return (1 + count // 2,) if drafts or kind == "overlapped" else ()


def play_with(engine: VirtualEngine, site: Site, first: int, name: str) -> None:
    """One run in which one call of a site fails, and a request after it."""
    held = engine.scheduler.parts.containment
    before, run = held.failures, Run(engine, name)
    with Fault(site, first).injected() as fault:
        run.play()
    run.check()
    assert held.failures - before == fault.raised
    last = Run(engine, f"{name} after")
    after = last.add("easy", 20, 5, EASY)
    turns = 0
    while last.turn():
        turns += 1
        assert turns < STEPS, "the next request does not end"
    last.check()
    report = engine.outcomes[after].report
    assert report is not None and report["promised"], f"the next request: {report}"
    for outcome in [*run.tokens, after]:
        engine.forget(outcome)
    engine.history.clear()
