# SPDX-License-Identifier: Apache-2.0
"""Best effort in the order that the configuration names: the real scheduler, virtual time."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from vllm_slo import SLO
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.errors import ConfigError
from vllm_slo.sim.harness import EngineShape, Outcome, VirtualEngine

pytestmark = pytest.mark.slow

MODEL = StepTimeModel(((0.0, 0.002, 0.016), (0.0002, 0.002, 0.004)), max_tokens=2048)
DRAFTS = 4
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3}
ORDERS = ("fcfs", "lp_sjf", "las", "laps_sd")

Make = Callable[..., VirtualEngine]


@pytest.fixture
def engine(config_folder: Path) -> Make:
    def make(order: str, *, places: int = 1, drafts: bool = True, **options: Any) -> VirtualEngine:
        chosen = {"order": order, **options.pop("best_effort", {})}
        shape = {"max_num_seqs": places, "max_num_batched_tokens": 512, **options.pop("shape", {})}
        if drafts:
            options["speculative_config"] = SPECULATIVE
        return VirtualEngine(
            Scheduler,
            config_folder,
            MODEL.predict_shape_s,
            EngineShape(**shape),
            believed=MODEL,
            slo_config={"best_effort": chosen, "ageing_s": 3600.0, **options.pop("config", {})},
            **options,
        )

    return make


def declared(tokens: int) -> SLO:
    return SLO(tier="best_effort", expected_output_tokens=tokens)


def latency_s(outcome: Outcome) -> float:
    return outcome.token_times_s[-1] - outcome.arrival_s


def mean_s(engine: VirtualEngine) -> float:
    return sum(map(latency_s, engine.outcomes.values())) / len(engine.outcomes)


def ended(engine: VirtualEngine) -> list[str]:
    last = {name: outcome.token_times_s[-1] for name, outcome in engine.outcomes.items()}
    return sorted(last, key=lambda name: last[name])


def mixed(engine: VirtualEngine, count: int = 24) -> None:
    """Requests of very different lengths and acceptances, all at once."""
    rng = random.Random(0)
    for n in range(count):
        tokens = rng.choice((12, 40, 150, 400))
        acceptance = rng.choice((0.1, 0.5, 0.9))
        engine.add(
            f"r{n}", rng.randint(20, 90), tokens, declared(tokens), max_tokens=500,
            acceptance=acceptance,
        )  # fmt: skip
    engine.run()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("places", [1, 4])
def test_every_request_ends_with_all_its_tokens(engine: Make, order: str, places: int) -> None:
    one = engine(order, places=places)
    mixed(one)
    for name, outcome in one.outcomes.items():
        assert outcome.finish_reason == "stop"
        assert len(outcome.token_ids) == one.lengths[name]
        assert outcome.token_ids[:-1] == [3 + n % 1000 for n in range(one.lengths[name] - 1)]


@pytest.mark.parametrize("places", [1, 4])
def test_short_requests_wait_less_where_their_work_is_perceived(engine: Make, places: int) -> None:
    found = {}
    for order in ORDERS:
        mixed(one := engine(order, places=places))
        found[order] = mean_s(one)
    assert found["laps_sd"] < 0.75 * found["fcfs"]
    assert found["laps_sd"] < 0.9 * found["las"]


FORESEEN: dict[str, Any] = {"preempt_known": True}
PAPER: dict[str, Any] = {"stable_rounds": 3}


def test_foretold_work_is_served_shortest_first_before_any_round_of_its_own(engine: Make) -> None:
    """One request has shown what rounds are like; the others have the same acceptance rate."""
    lengths = {"a": 90, "b": 15, "c": 300, "d": 40}
    for known in ({}, FORESEEN):
        one = engine("laps_sd", best_effort=known)
        one.add("first", 30, 40, declared(40), acceptance=0.5)
        one.step()
        one.step()
        for name, tokens in lengths.items():
            one.add(name, 30, tokens, declared(tokens), acceptance=0.5)
        one.run()
        assert [name for name in ended(one) if name != "first"] == sorted(
            lengths, key=lengths.__getitem__
        )


def test_who_turns_out_to_accept_little_gives_way_to_what_is_shorter(engine: Make) -> None:
    """By its length "hard" comes first; its own rounds tell that it takes longer than "easy"."""
    order = {}
    for known in (FORESEEN, {**FORESEEN, "preempt_known": False}):
        one = engine("laps_sd", best_effort=known)
        one.add("first", 30, 60, declared(60), acceptance=0.6)
        one.step()
        one.step()
        one.add("hard", 30, 120, declared(120), acceptance=0.02)
        one.add("easy", 30, 125, declared(125), acceptance=0.95)
        one.run()
        order[known["preempt_known"]] = ended(one)[1:]
    assert order == {True: ["easy", "hard"], False: ["hard", "easy"]}


def test_foreseen_work_never_waits_longer_than_by_length_alone(engine: Make) -> None:
    mixed(foreseen := engine("laps_sd", best_effort=FORESEEN))
    mixed(by_length := engine("lp_sjf"))
    mixed(paper := engine("laps_sd", best_effort=PAPER))
    assert mean_s(foreseen) < mean_s(by_length)
    assert mean_s(foreseen) < 0.95 * mean_s(paper)


def test_with_one_place_a_newcomer_has_it_until_its_work_is_known(engine: Make) -> None:
    """The long one began alone and gives way; it is known by then, and so is its remainder."""
    one = engine("laps_sd", best_effort=PAPER)
    one.add("long", 30, 300, declared(300), acceptance=0.5)
    for _ in range(40):
        one.step()
    one.add("short", 30, 20, declared(20), acceptance=0.5)
    one.run()
    assert ended(one) == ["long", "short"]  # it was known, and left its place: not taken again

    one = engine("laps_sd", best_effort={**PAPER, "preempt_known": True})
    one.add("long", 30, 300, declared(300), acceptance=0.5)
    for _ in range(40):
        one.step()
    one.add("short", 30, 20, declared(20), acceptance=0.5)
    one.run()
    assert ended(one) == ["short", "long"]

    one = engine("laps_sd", best_effort={"stable_rounds": 500})
    one.add("long", 30, 300, declared(300), acceptance=0.5)
    for _ in range(40):
        one.step()
    one.add("short", 30, 20, declared(20), acceptance=0.5)
    one.run()
    assert ended(one) == ["short", "long"]


def test_the_acceptance_rate_decides_between_equal_lengths(engine: Make) -> None:
    """Three of equal length; who accepts most goes first once that is known."""
    one = engine("laps_sd", best_effort={"stable_rounds": 10, "first_queue_s": 1.0})
    for name, acceptance in (("low", 0.02), ("high", 0.98), ("middle", 0.7)):
        one.add(name, 30, 250, declared(250), acceptance=acceptance)
    one.run()
    assert ended(one) == ["high", "middle", "low"]
    one = engine("lp_sjf")
    for name, acceptance in (("low", 0.02), ("high", 0.98), ("middle", 0.7)):
        one.add(name, 30, 250, declared(250), acceptance=acceptance)
    one.run()
    assert ended(one) == ["low", "high", "middle"]


def test_without_drafts_a_declared_length_is_perceived_at_once(engine: Make) -> None:
    one = engine("laps_sd", drafts=False)
    for name, tokens in (("a", 200), ("b", 30), ("c", 90)):
        one.add(name, 30, tokens, declared(tokens))
    one.run()
    assert ended(one) == ["b", "c", "a"]


def test_who_outgrew_what_was_foretold_is_about_to_end(engine: Make) -> None:
    """As far as is known it has little left: nobody takes its place for something longer."""
    one = engine("laps_sd", best_effort={"preempt_known": True})
    one.add("more", 30, 90, declared(40), max_tokens=500, acceptance=0.5)
    while len(one.outcomes["more"].token_ids) <= 40:
        one.step()
    one.add("long", 30, 300, declared(300), acceptance=0.5)
    one.run()
    assert ended(one) == ["more", "long"]
    assert not any("more" in (output.preempted_req_ids or ()) for output in one.history)


def test_lengths_are_learnt_from_what_ended(engine: Make) -> None:
    """Classes of which nothing is declared: after some of each the short class goes first."""
    classes = {"classes": {"brief": {"tier": "best_effort"}, "essay": {"tier": "best_effort"}}}
    one = engine("lp_sjf", config=classes)
    for n in range(10):
        one.add(f"b{n}", 20, 10, SLO(slo_class="brief", tier="best_effort"), max_tokens=300)
        one.add(f"e{n}", 20, 120, SLO(slo_class="essay", tier="best_effort"), max_tokens=300)
    one.run()
    one.add("e", 20, 120, SLO(slo_class="essay", tier="best_effort"), max_tokens=300)
    one.add("b", 20, 10, SLO(slo_class="brief", tier="best_effort"), max_tokens=300)
    one.run()
    assert ended(one)[-2:] == ["b", "e"]


def test_requests_that_carry_no_slo_are_ordered_too(engine: Make) -> None:
    one = engine("las", drafts=False)
    one.add("long", 30, 300)
    for _ in range(60):
        one.step()
    one.add("short", 30, 10)
    one.run()
    assert ended(one) == ["short", "long"]
    one = engine("fcfs", drafts=False)
    one.add("long", 30, 300)
    for _ in range(60):
        one.step()
    one.add("short", 30, 10)
    one.run()
    assert ended(one) == ["long", "short"]


@pytest.mark.parametrize("order", ORDERS)
def test_promises_come_before_any_order(engine: Make, order: str) -> None:
    """Eight best-effort requests fill the engine; promised ones come all the time."""
    one = engine(order, places=8)
    for n in range(12):
        one.add(f"b{n}", 60, 200, declared(200), acceptance=0.5)
    promised = []
    for n in range(10):
        for _ in range(12):
            one.step()
        one.add(f"p{n}", 60, 20, SLO(ttft_ms=800, tpot_ms=80), acceptance=0.5)
        promised.append(one.outcomes[f"p{n}"])
    one.run()
    assert all(outcome.report and outcome.report["attained"] for outcome in promised)
    assert all(outcome.finish_reason == "stop" for outcome in one.outcomes.values())


@pytest.mark.parametrize("order", ["las", "laps_sd"])
def test_memory_is_taken_from_the_lower_queue(engine: Make, order: str) -> None:
    """There are places for all but blocks for two: short ones come as the long ones run."""
    one = engine(order, places=8, drafts=False, shape={"num_blocks": 45})
    for n in range(2):
        one.add(f"long{n}", 60, 200)
    for _ in range(60):
        one.step()
    for n in range(4):
        one.add(f"short{n}", 120, 8)
    one.run()
    assert set(ended(one)[:4]) == {f"short{n}" for n in range(4)}


@pytest.mark.parametrize("order", ["las", "laps_sd"])
def test_nothing_starves_beside_newcomers_without_end(engine: Make, order: str) -> None:
    """There is always a newcomer, and its work is never known."""
    one = engine(order, config={"ageing_s": 4.0}, best_effort={"stable_rounds": 500})
    one.add("long", 30, 150)
    steps = 0
    while one.outcomes["long"].finish_reason is None:
        if len(one.scheduler.requests) < 3:
            one.add(f"s{steps}", 20, 12)
        one.step()
        steps += 1
        assert one.clock.now_s < 300.0


def test_learning_lengths_without_the_library_is_refused(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ConfigError, match=r"best_effort\.output_length.*vllm-slo\[lengths\]"):
        engine("laps_sd", best_effort={"output_length": "learnt"})


def test_a_place_lost_and_got_again_unseen_is_kept_anew(engine: Make) -> None:
    """Two who were let in took each other's place for ever, as neither's rounds were forgotten."""
    one = engine("las", places=4, drafts=False)
    one.add("r0", 50, 40, declared(40))
    one.add("r1", 50, 40, declared(40))
    for _ in range(8):
        one.step()
    order, request = one.scheduler.parts.best_effort, one.scheduler.requests["r0"]
    assert order.rank([request])[0].progress_s > 0.0
    one.scheduler.running.remove(request)
    one.scheduler._preempt_request(request, 0.0, drop_stale_output=False)
    one.scheduler.waiting.remove_request(request)
    request.status = RequestStatus.RUNNING
    assert order.rank([request])[0].progress_s == 0.0


def test_what_was_foreseen_is_compared_with_what_came(engine: Make) -> None:
    one = engine("laps_sd", best_effort={**PAPER, "output_length": "learnt"})
    mixed(one)
    metrics = one.scheduler.parts.metrics
    ratio, error = "vllm_slo:foreseen_service_ratio", "vllm_slo:output_length_error_ratio"
    count = metrics.registry.get_sample_value(f"{ratio}_count", {"engine": "0"})
    total = metrics.registry.get_sample_value(f"{ratio}_sum", {"engine": "0"})
    assert count and total and 0.8 < total / count < 1.25
    said = {"engine": "0", "source": "declared"}
    assert metrics.registry.get_sample_value(f"{error}_count", said) == 24
    assert metrics.registry.get_sample_value(f"{error}_sum", said) == 0.0
