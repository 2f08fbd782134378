# SPDX-License-Identifier: Apache-2.0
"""vLLM's own chains of drafts, shortened by SLO: the real scheduler on a virtual clock, and real
engines in fp32 (``tree_engine.py``) that must say what they say without drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from lossless import beyond_vllms_own_fault, differing, told
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_slo import SLO, tiny
from vllm_slo.core.attainment import worst_window_tpot_s
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.speculation import chain_lengths, chains
from vllm_slo.sim.harness import EngineShape, VirtualEngine

pytestmark = pytest.mark.versions

MOST = 5
LOOKUP = {"method": "ngram", "num_speculative_tokens": MOST, "prompt_lookup_max": 3}
DRAFT = {
    "method": "draft_model",
    "model": str(tiny.path("draft")),
    "num_speculative_tokens": MOST,
}
METHODS = pytest.mark.parametrize("method", [LOOKUP, DRAFT], ids=["ngram", "draft_model"])
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlap"])
FLAT_S, TOKEN_S = 0.030, 0.0005
BELIEVED = StepTimeModel(((0.0, 0.0, FLAT_S), (TOKEN_S, 0.0, 0.022)))
"""Sixteen tokens for the price of one."""
CLASSES: dict[str, dict[str, Any]] = {
    "tight": {"tpot_ms": 25.0},
    "close": {"tpot_ms": 33.0},
    "steady": {"tpot_ms": 45.0},
    "loose": {"tpot_ms": 200.0},
    "silent": {"tpot_ms": 100.0, "speculation": "off"},
}


class Engine(VirtualEngine):
    """The virtual engine with drafts of which ``accepted`` come true.

    Attributes:
        drafts: request -> how many drafts each of its steps verified.
    """

    def __init__(
        self,
        method: dict[str, Any] | None,
        pass_s: float = 0.0,
        cls: type[AsyncScheduler] = Scheduler,
        *,
        kv_s: float = 0.0,
        **more: Any,
    ) -> None:
        ours = cls is Scheduler
        if method is not None:
            more["speculative_config"] = method
        self.true = StepTimeModel(((0.0, pass_s, FLAT_S), (TOKEN_S, pass_s, 0.022)), kv_s)
        super().__init__(
            cls,
            tiny.path("target"),
            lambda shape: self.true.predict_s(shape.tokens, shape.context_tokens, shape.spec_steps),
            EngineShape(max_model_len=4096, max_num_seqs=64),
            believed=replace(BELIEVED, kv_s=kv_s) if ours else None,
            slo_config={"classes": CLASSES} if ours else None,
            **more,
        )
        self.drafts: dict[str, list[int]] = defaultdict(list)

    def ask(self, names: Iterable[str], accepted: float = 0.8, tokens: int = 120) -> None:
        """Requests named by class and number."""
        for name in names:
            kind = name.split("-")[0]
            slo = SLO(slo_class=kind) if kind in CLASSES else None
            self.add(name, 20, tokens, slo, acceptance=accepted)

    def step(self) -> SchedulerOutput:
        output = super().step()
        for name, tokens in output.num_scheduled_tokens.items():
            if name not in {new.req_id for new in output.scheduled_new_reqs}:
                drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
                assert tokens >= 1 + drafts
                self.drafts[name].append(drafts)
        return output

    def read_prompts(self, count: int) -> float:
        """Seconds that best-effort prompts take beside what decodes."""
        for _ in range(30):
            self.step()
        begun_s = self.clock.now_s
        self.drafts.clear()
        for number in range(count):
            self.add(f"prompt-{number}", 1500, 1)
        while len(self.finished) < count:
            self.step()
        return self.clock.now_s - begun_s

    def mean(self, kind: str) -> float:
        """Drafts verified of a request of a class in a step."""
        counts = [n for name, each in self.drafts.items() for n in each if name.startswith(kind)]
        return float(np.mean(counts))

    def promised(self, kind: str) -> list[bool]:
        return [
            outcome.promised_in_time
            for name, outcome in self.outcomes.items()
            if name.startswith(kind)
        ]


@pytest.mark.parametrize("method", [None, LOOKUP, DRAFT], ids=["none", "ngram", "draft_model"])
def test_prompts_leave_free_tokens_to_drafts(method: dict[str, Any] | None) -> None:
    """A prompt that is in no hurry is spread over free tokens only where there are no drafts."""
    engine = Engine(method)
    engine.ask(["loose-0"])
    for _ in range(10):
        engine.step()
    engine.add("prompt", 100, 5, SLO(ttft_ms=9000))
    steps = 0
    while "prompt" not in engine.outcomes or not engine.outcomes["prompt"].token_ids:
        steps += engine.step().num_scheduled_tokens.get("prompt", 0) > 0
    assert steps == 1 if method else steps > 3


def names(kind: str, count: int) -> list[str]:
    return [f"{kind}-{number}" for number in range(count)]


# --- promises -------------------------------------------------------------------------------------


@OVERLAP
@METHODS
def test_drafts_keep_a_pace_that_no_plain_step_keeps(method: dict[str, Any], overlap: bool) -> None:
    """A step takes 30 ms, the objective is 25 ms per token: with drafts it is kept."""
    engine = Engine(method, overlap=overlap)
    engine.ask(["warm-0", "warm-1", "loose-0"], tokens=400)  # some drafts, to learn from
    engine.run()
    engine.ask(names("tight", 6))
    engine.run()
    assert engine.promised("tight").count(True) >= 5
    kept = [
        worst_window_tpot_s(outcome.token_times_s, 10) <= 0.0255
        for outcome in engine.outcomes.values()
        if outcome.promised_in_time
    ]
    assert kept.count(False) <= 1, "drafts are luck: a window of ten may fail"
    plain = Engine(None, overlap=overlap)
    plain.ask(names("tight", 6))
    plain.run()
    assert not any(plain.promised("tight"))


@METHODS
def test_beside_prompts_only_who_hurries_verifies_drafts(method: dict[str, Any]) -> None:
    engine = Engine(method)
    engine.ask([*names("steady", 4), *names("loose", 24)], tokens=1000)
    engine.read_prompts(10)
    assert engine.mean("steady") > 1
    assert engine.mean("loose") < 0.2


def test_drafts_spare_prompts_the_reading_of_long_contexts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading a context of 2000 tokens takes as long as computing four. A draft that is accepted
    leaves out a step of its request. So with drafts that no TPOT needs, answers end sooner, and no
    fewer of the prompts beside them are promised."""
    end_s, promised = [], []
    for spares in (True, False):
        if not spares:
            monkeypatch.setattr(chain_lengths, "sparing_length", lambda *_, **__: 1)
        engine = Engine(DRAFT, pass_s=0.003, kv_s=1e-6)
        for _ in range(8):
            engine.scheduler.parts.workload.lengths.observe("loose", 200)
        for name in names("loose", 16):
            engine.add(name, 2000, 200, SLO(slo_class="loose"), acceptance=0.8)
        for _ in range(60):
            engine.step()
        begun_s = engine.clock.now_s
        for number in range(20):
            while engine.clock.now_s < begun_s + 0.6 * number:
                engine.step()
            engine.add(f"prompt-{number}", 1200, 1, SLO(ttft_ms=2000))
        engine.run()
        end_s.append(engine.clock.now_s - begun_s)
        promised.append(engine.promised("prompt").count(True))
    assert end_s[0] < 0.95 * end_s[1]
    assert promised[0] >= promised[1]


def test_two_tokens_a_step_leave_more_room_for_prompts() -> None:
    """Figure 6 of SLOs-Serve: with two tokens a step it may take twice as long, and holds more than
    twice the prompt tokens."""
    took_s = []
    for method in (LOOKUP, None):
        engine = Engine(method)
        engine.ask([*names("steady", 4), *names("loose", 24)], tokens=3000)
        took_s.append(engine.read_prompts(10))
    assert took_s[0] < 0.6 * took_s[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_window_is_not_staked_on_luck(seed: int) -> None:
    """Steps without drafts keep 45 ms: then those with drafts do, in every window of ten tokens,
    however often nothing is accepted."""
    engine = Engine(LOOKUP, seed=seed)
    engine.ask([*names("steady", 8), *names("loose", 24)], 0.6, tokens=1000)
    engine.read_prompts(8)
    engine.run()
    assert all(engine.promised("steady"))
    for name, outcome in engine.outcomes.items():
        if name.startswith("steady"):  # a step may end at the very limit, and sums are rounded
            worst_s = worst_window_tpot_s(outcome.token_times_s)
            assert worst_s is not None
            assert worst_s <= 0.045 + 1e-9
    assert engine.mean("steady") > 0.5


@pytest.mark.parametrize("seed", range(3))
def test_prompts_leave_a_window_what_bad_luck_may_cost(seed: int) -> None:
    """A step takes 34 ms with the pass that the draft makes in any case, and 33 are asked for: the
    luck of one step is the reserve of the next, not time for prompts."""
    engine = Engine(DRAFT, pass_s=0.004, seed=seed)
    engine.ask(["warm-0", "warm-1", "loose-0"], 0.7, tokens=400)
    engine.run()
    engine.ask(names("close", 6), 0.7, tokens=1000)
    engine.read_prompts(12)
    engine.run()
    assert engine.promised("close").count(True) >= 5
    windows = [
        (times_s[i + 10] - times_s[i]) / 10 <= 0.0331
        for name, outcome in engine.outcomes.items()
        if name.startswith("close")
        for times_s in [outcome.token_times_s]
        for i in range(0, len(times_s) - 10, 10)
    ]
    assert windows.count(False) <= 2, "of 600"


def test_a_class_may_want_no_drafts() -> None:
    engine = Engine(LOOKUP)
    engine.ask([*names("silent", 3), *names("tight", 3), *names("other", 3)])
    engine.run()
    assert engine.mean("silent") == 0
    assert engine.mean("tight") > 1
    assert engine.mean("other") > 1


# --- what is learnt -------------------------------------------------------------------------------


@METHODS
def test_acceptance_is_learnt_by_class(method: dict[str, Any]) -> None:
    engine = Engine(method)
    engine.ask(names("tight", 8), 0.9, tokens=400)
    engine.ask(names("loose", 8), 0.3, tokens=400)
    engine.run()
    learnt = engine.scheduler.parts.speculation.acceptance
    assert learnt.acceptance("tight") == pytest.approx(0.9, abs=0.06)
    assert learnt.acceptance("loose") == pytest.approx(0.3, abs=0.08)
    read = engine.scheduler.parts.metrics.registry.get_sample_value
    for kind in ("tight", "loose"):
        labels = {"engine": "0", "slo_class": kind}
        assert read("vllm_slo:draft_acceptance_ratio", labels) == pytest.approx(
            learnt.acceptance(kind), abs=0.1
        )
        assert 0 <= read("vllm_slo:draft_length_tokens", labels) <= MOST


def test_a_dear_draft_guesses_less_far_ahead() -> None:
    """Where a pass takes as long as the target, all but the first are left out."""
    ahead = {}
    for pass_s in (0.0005, 0.030):
        engine = Engine(DRAFT, pass_s)
        engine.ask(names("loose", 4), 0.6, tokens=1200)
        engine.run()
        asked = [o.num_spec_tokens_to_schedule for o in engine.history if o.num_scheduled_tokens]
        ahead[pass_s] = float(np.mean(asked[len(asked) // 2 :]))
    assert ahead[0.030] < 1.5
    assert ahead[0.0005] > 3


# --- what is left to vLLM -------------------------------------------------------------------------


@OVERLAP
@METHODS
def test_without_objectives_vllm_is_alone(method: dict[str, Any], overlap: bool) -> None:
    ours, stock = (Engine(method, cls=cls, overlap=overlap) for cls in (Scheduler, AsyncScheduler))
    for engine in (ours, stock):
        engine.ask(names("any", 6))
        engine.run()
    assert ours.drafts == stock.drafts
    assert {o.num_spec_tokens_to_schedule for o in ours.history} == {MOST}
    assert [o.token_times_s for o in ours.outcomes.values()] == [
        o.token_times_s for o in stock.outcomes.values()
    ]


def test_every_draft_of_an_overlapping_step_is_of_the_step_before() -> None:
    """There alone the runner finds it. Requests without an objective sit steps out while others
    hurry; when the last of these ends, what they keep of older steps is no draft."""
    engine = Engine(DRAFT, overlap=True)
    lengths = engine.scheduler.parts.speculation
    assert isinstance(lengths, chains.Chains)
    lengths._only_of_last = True  # as where vLLM schedules asynchronously, not on CPU
    before: set[str] = set()
    late: set[str] = set()
    engine.ask(names("close", 6), tokens=30)
    engine.ask(names("free", 50), tokens=90)
    while engine.scheduler.has_requests():
        output = engine.step()
        stale = output.scheduled_spec_decode_tokens.keys() - before
        assert not stale, sorted(stale)
        late |= {*engine.scheduler.requests} - output.num_scheduled_tokens.keys()
        before = {*output.num_scheduled_tokens}
    assert any(name.startswith("free") for name in late), "some sat out"
    assert engine.mean("free") > 0, "and had drafts at other times"


def test_placeholders_of_all_requests_are_one_list_that_stays() -> None:
    engine = Engine(LOOKUP, overlap=True)
    shared = engine.scheduler._spec_token_placeholders
    engine.ask([*names("tight", 4), *names("silent", 4)])
    engine.run()
    assert shared == [-1] * MOST
    assert engine.mean("silent") == 0


def config(**said: Any) -> Any:
    """What ``may_lower_depth`` looks at."""
    spec = {
        "method": "draft_model",
        "parallel_drafting": False,
        "uses_dynamic_speculative_decoding": lambda: said.get("schedule", False),
        "use_multi_module_mtp": lambda: False,
        "uses_extract_hidden_states": lambda: said.get("extracts", False),
        "num_speculative_tokens": MOST,
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**spec | said.get("spec", {})),
        parallel_config=SimpleNamespace(data_parallel_size=said.get("ranks", 1)),
        use_v2_model_runner=said.get("v2", False),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: said.get("graphs", False))
        ),
    )


@pytest.mark.parametrize(
    "said",
    [
        {"schedule": True},
        {"ranks": 2},
        {"v2": True},
        {"graphs": True},
        {"spec": {"method": "ngram"}},
        {"spec": {"method": "ngram_gpu"}},
        {"spec": {"method": "suffix"}},
        {"spec": {"method": "medusa"}},
        {"spec": {"parallel_drafting": True}},
    ],
    ids=str,
)
def test_how_far_ahead_is_left_to_vllm_where_it_cannot_vary(said: dict[str, Any]) -> None:
    assert chains.may_lower_depth(config())
    assert not chains.may_lower_depth(config(**said))
    assert chains.trims(config(**said))


def test_what_drafts_nothing_is_not_trimmed() -> None:
    assert not chains.trims(config(extracts=True))
    assert not chains.trims(SimpleNamespace(speculative_config=None))


# --- real engines ---------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", [pytest.param("ngram", marks=pytest.mark.deep), "draft_model"])
def test_a_real_engine_says_what_it_says_without_drafts(method: str) -> None:
    """Requests of every kind, some with a tight TPOT, a loose one, no drafts, or no SLO."""
    found = told(method)
    assert len(found["said"]) >= 100
    assert beyond_vllms_own_fault(differing(found, told("plain"))) == []
    seen = found["seen"]
    assert min(seen["preempted"], seen["chunks"]) > 0
    assert len(seen["lengths"]) > 2, "drafts of many lengths"
    assert seen["tokens"] > 1.1 * sum(seen["lengths"].values()), "drafts were accepted"
    assert (len(seen["ahead"]) > 1) == (method == "draft_model")
