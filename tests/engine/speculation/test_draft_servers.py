# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of draft servers: real scheduler objects in virtual time, drafters of known
skill and speed; no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import pytest

pytest.importorskip("vllm")

from prometheus_client import generate_latest
from virtual_drafters import Drafter, RemoteEngine

from vllm_slo import SLO
from vllm_slo.core.speculation.proportional_fairness import PRIOR
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.sim.harness import EngineShape

FLAT = StepTimeModel(((0.0, 0.0, 0.040), (0.001, 0.0, 0.020)), max_tokens=8192)
"""A step takes 40 ms; beyond twenty tokens each further one costs a millisecond."""
STEEP = StepTimeModel(((0.0, 0.0, 0.016), (0.0012, 0.0, 0.004)), max_tokens=2048)
"""Ten tokens for the price of one, then each costs."""


def run_all(engine: RemoteEngine, count: int, tokens: int = 40, slo: SLO | None = None) -> float:
    """Seconds in which ``count`` requests that come at once are done."""
    names = [f"r{i}" for i in range(count)]
    for name in names:
        engine.add(name, 16, tokens, slo)
    engine.run()
    assert {engine.outcomes[name].finish_reason for name in names} == {"stop"}
    assert {len(engine.outcomes[name].token_ids) for name in names} == {tokens}
    return engine.clock.now_s


def start(engine: RemoteEngine, count: int, tokens: int = 300) -> None:
    """So many requests, until they are drafted for."""
    for i in range(count):
        engine.add(f"r{i}", 16, tokens)
    for _ in range(4):
        engine.step()


# --- what it is good for -------------------------------------------------------------------------


def test_few_requests_end_much_sooner() -> None:
    took_s = run_all(RemoteEngine(FLAT, {"a": Drafter()}), 2)
    assert took_s < 0.6 * 40 * 0.040


def test_without_drafters_answers_are_as_before() -> None:
    engine = RemoteEngine(FLAT, {"a": Drafter(there=False)})
    took_s = run_all(engine, 2)
    assert took_s == pytest.approx(40 * 0.040 + FLAT.predict_s(32) - 0.040, rel=0.01)
    assert not any(engine.granted())
    assert b"drafter_up{" not in generate_latest(engine.scheduler.parts.metrics.registry)


def test_a_drafter_that_costs_more_than_it_brings_is_hardly_asked() -> None:
    engine = RemoteEngine(FLAT, {"a": Drafter(honest=0.1, token_s=0.02)})
    took_s = run_all(engine, 4, 200)
    asked = [bool(grants) for grants in engine.granted()]
    assert mean(asked[40:]) < 0.1
    assert took_s < 1.15 * 200 * 0.040


def test_one_that_was_slow_for_a_while_is_tried_again() -> None:
    engine = RemoteEngine(FLAT, {"a": Drafter(token_s=0.05)}, speculation={"max_depth": 2})
    start(engine, 2, 450)
    for _ in range(40):
        engine.step()
    assert not any(engine.granted(20))
    engine.drafters["a"].token_s = 0.002
    for _ in range(200):
        engine.step()
    assert all(engine.granted(20))


# --- who is asked, and for how much --------------------------------------------------------------


def test_no_step_verifies_more_than_it_has_room_for() -> None:
    shape = EngineShape(
        max_model_len=512, max_num_seqs=16, max_num_batched_tokens=40, block_size=32
    )
    engine = RemoteEngine(FLAT, {"a": Drafter(), "b": Drafter()}, shape=shape)
    run_all(engine, 16)
    sizes = [sum(1 + grant.tokens for grant in grants.values()) for grants in engine.granted()]
    assert 0 < max(sizes) <= 40
    assert max(output.total_num_scheduled_tokens for output, _ in engine.seen_trees) <= 40


def test_where_tokens_cost_the_budget_is_what_pays() -> None:
    """Ten tokens ride along; eight requests have two to spare, and more only where it pays."""
    engine = RemoteEngine(STEEP, {"a": Drafter(honest=0.3), "b": Drafter(honest=0.3)})
    start(engine, 8)
    for _ in range(100):
        engine.step()
    sizes = [sum(grant.tokens for grant in grants.values()) for grants in engine.granted(40)]
    assert max(sizes) <= 4


def test_requests_are_spread_by_the_room_that_drafters_have() -> None:
    engine = RemoteEngine(FLAT, {"a": Drafter(max_sessions=4), "b": Drafter(max_sessions=8)})
    start(engine, 9)
    homes = list(engine.drafting._homes.values())
    assert (homes.count("a"), homes.count("b")) == (3, 6)


def test_more_requests_than_sessions_are_not_all_drafted_for() -> None:
    engine = RemoteEngine(FLAT, {"a": Drafter(max_sessions=2)})
    start(engine, 5)
    assert {len(grants) for grants in engine.granted(1)} == {2}
    engine.run()
    assert all(len(outcome.token_ids) == 300 for outcome in engine.outcomes.values())


def test_a_request_stays_where_it_is_until_its_drafter_is_gone() -> None:
    engine = RemoteEngine(FLAT, {"a": Drafter(), "b": Drafter()})
    start(engine, 6)
    before = dict(engine.drafting._homes)
    for _ in range(20):
        engine.step()
    assert engine.drafting._homes == before
    engine.drafters["a"].up = False
    engine.step()  # it is asked before anybody knows
    for _ in range(10):
        engine.step()
    assert set(engine.drafting._homes.values()) == {"b"}
    assert engine.by_drafter(9)["a"] == 0
    moved = [name for name, home in before.items() if home == "a"]
    assert moved
    assert all(set(moved) <= set(grants) for grants in engine.granted(5))
    engine.drafters["a"].up = True
    engine.step()
    engine.add("new", 16, 40)
    for _ in range(4):
        engine.step()
    assert engine.drafting._homes["new"] == "a"


def test_a_drafter_that_vanished_is_forgotten() -> None:
    engine = RemoteEngine(FLAT, {"a": Drafter(), "b": Drafter()})
    start(engine, 4)
    engine.drafters["b"].there = False
    engine.step()
    engine.step()
    assert set(engine.drafting.clients.views()) == {"a"}
    assert set(engine.drafting._homes.values()) == {"a"}
    engine.run()


def test_a_text_longer_than_a_drafter_takes_moves_on() -> None:
    engine = RemoteEngine(FLAT, {"a": Drafter(max_model_len=40), "b": Drafter()})
    start(engine, 2, 60)
    assert sorted(engine.drafting._homes.values()) == ["a", "b"]
    while engine.busy:
        long = [n for n, r in engine.scheduler.requests.items() if r.num_tokens >= 40]
        engine.step()
        assert {engine.drafting._homes.get(name, "b") for name in long} <= {"b"}
    assert all(len(outcome.token_ids) == 60 for outcome in engine.outcomes.values())


def test_who_wants_no_speculation_is_not_drafted_for() -> None:
    engine = RemoteEngine(FLAT, {"a": Drafter()})
    engine.add("silent", 16, 40, SLO(speculation="off"))
    engine.add("other", 16, 40)
    engine.run()
    assert not any("silent" in grants for grants in engine.granted())
    assert any("other" in grants for grants in engine.granted())


def test_no_draft_is_longer_than_what_is_still_to_come() -> None:
    """One token of the step at hand and one of the next come without drafts."""
    engine = RemoteEngine(FLAT, {"a": Drafter(honest=0.5)}, speculation={"max_depth": 5})
    request = engine.add("r", 16, 30)
    grants = []
    while engine.busy:
        left = 30 - request.num_output_tokens - 2
        engine.step()
        grants += [(grant.tokens, left) for grant in engine.granted(1)[0].values()]
    assert len(engine.outcomes["r"].token_ids) == 30
    assert all(tokens <= left for tokens, left in grants)
    assert any(tokens == left for tokens, left in grants)


# --- GoodSpeed -----------------------------------------------------------------------------------


def test_acceptances_converge_to_what_drafters_are_worth() -> None:
    engine = RemoteEngine(FLAT, {"a": Drafter(honest=0.85), "b": Drafter(honest=0.5)})
    start(engine, 8, 480)
    for _ in range(150):
        engine.step()
    views = engine.drafting.clients.views()
    assert views["a"].acceptance == pytest.approx(0.85, abs=0.08)
    assert views["b"].acceptance == pytest.approx(0.5, abs=0.08)
    assert views["a"].goodput > views["b"].goodput


def test_drafts_are_credited_to_who_drafted_them() -> None:
    """Also where the request has another drafter by the time they are verified."""
    engine = RemoteEngine(FLAT, {"a": Drafter(), "b": Drafter()})
    start(engine, 2)
    observed, observe = {}, engine.drafting.clients.observe

    def observing(client: str, ratios: Sequence[float], tokens: int) -> None:
        observed[client] = len(ratios)
        observe(client, ratios, tokens)

    engine.drafting.clients.observe = observing  # type: ignore[method-assign]
    assert set(engine.drafting._homes.values()) == {"a", "b"}
    for name in engine.drafting._homes:
        engine.drafting._homes[name] = "b"
    engine.step()
    assert observed["a"] > 0 and observed["b"] > 0
    observed.clear()
    engine.accepted.clear()
    output = engine.step()
    offered = [len(drafts) for drafts in output.scheduled_spec_decode_tokens.values()]
    assert len(offered) == 2, "nothing that came was passed over"
    looked_at = [min(n + 1, most) for n, most in zip(engine.accepted, offered, strict=True)]
    assert observed == {"b": sum(looked_at)}


def test_a_drafter_never_asked_is_taken_for_a_good_one() -> None:
    engine = RemoteEngine(FLAT, {"a": Drafter()})
    start(engine, 1)
    assert engine.drafting.clients.views()["a"].acceptance == pytest.approx(PRIOR, abs=0.1)


def test_the_better_drafter_is_granted_more() -> None:
    engine = RemoteEngine(STEEP, {"good": Drafter(honest=0.9), "bad": Drafter(honest=0.2)})
    start(engine, 8, 450)
    for _ in range(100):
        engine.step()
    granted = engine.by_drafter(60)
    assert granted["good"] > 2 * granted["bad"]


def test_a_request_counts_alike_wherever_it_is_drafted_for() -> None:
    """Six requests at one drafter, two at the other, of equal skill: each gets as much."""
    drafters = {"few": Drafter(max_sessions=2), "many": Drafter(max_sessions=6)}
    engine = RemoteEngine(STEEP, drafters)
    start(engine, 8, 450)
    for _ in range(200):
        engine.step()
    granted = engine.by_drafter(150)
    assert granted["many"] / 6 == pytest.approx(granted["few"] / 2, rel=0.25)


def test_a_slow_drafter_drafts_less_and_holds_up_nobody() -> None:
    """Alone the slow one would be waited for; beside a fast one it drafts what it can meanwhile."""
    fast, slow = Drafter(token_s=0.001), Drafter(token_s=0.008)
    engine = RemoteEngine(FLAT, {"fast": fast, "slow": slow})
    start(engine, 8, 450)
    for _ in range(120):
        engine.step()
    granted = engine.by_drafter(60)
    assert granted["fast"] > 2 * granted["slow"]
    fair = RemoteEngine(FLAT, {"fast": fast, "other": Drafter(token_s=0.001)})
    start(fair, 8, 450)
    for _ in range(120):
        fair.step()
    took_s = [e.clock.now_s for e in (engine, fair)]
    assert took_s[0] < 1.15 * took_s[1]


# --- promises ------------------------------------------------------------------------------------


def test_what_promises_need_comes_first() -> None:
    """A plain step is 40 ms and TPOTs are 25: of the drafts that pay for everybody else there are
    fewer."""
    engine = RemoteEngine(
        FLAT,
        {"a": Drafter(honest=0.9), "b": Drafter(honest=0.9)},
        slo_config={"tpot_window_tokens": 64},
    )
    start(engine, 4, 200)
    engine.run()
    urgent = SLO(tpot_ms=25.0)
    for i in range(2):
        engine.add(f"urgent{i}", 16, 200, urgent)
    for i in range(16):
        engine.add(f"free{i}", 16, 200)
    for _ in range(40):
        engine.step()
    assert all(engine.scheduler.parts.tracker.live[f"urgent{i}"].promised for i in range(2))
    shares = [
        (mean(g["urgent0"].tokens for g in [grants]), mean(g.tokens for n, g in grants.items()))
        for grants in engine.granted(20)
        if "urgent0" in grants
    ]
    assert len(shares) > 15
    assert mean(u for u, _ in shares) >= mean(everybody for _, everybody in shares)
    engine.run()
    paces = [
        (o.token_times_s[-1] - o.token_times_s[0]) / 199
        for name, o in engine.outcomes.items()
        if name.startswith("urgent")
    ]
    assert max(paces) < 0.0255


def test_a_promised_ttft_asks_nothing_of_drafts() -> None:
    engine = RemoteEngine(FLAT, {"a": Drafter()})
    engine.add("first", 16, 20)
    engine.run()
    engine.add("r", 16, 40, SLO(ttft_ms=1000.0))
    began_s = engine.clock.now_s
    engine.run()
    report = engine.outcomes["r"].report
    assert report and report["promised"] and report["attained"]
    assert engine.clock.now_s - began_s < 0.7 * 40 * 0.040


def test_drafts_are_waited_for_no_longer_than_configured() -> None:
    engine = RemoteEngine(
        FLAT,
        {"a": Drafter(link_s=0.5)},
        speculation={"draft_deadline_ms": 7.0, "min_depth": 2, "max_depth": 2},
    )
    took_s = run_all(engine, 2)
    assert took_s < 40 * 0.048
    deadlines = {step.deadline_s for _, step in engine.seen_trees if step.grants}
    assert deadlines == {0.007}


def test_drafts_are_waited_for_no_longer_than_a_promise_allows() -> None:
    """With 3.5 ms to spare in each step, a drafter that hangs breaks no promise."""
    engine = RemoteEngine(FLAT, {"a": Drafter(link_s=0.5)}, slo_config={"tpot_window_tokens": 1})
    engine.add("r", 16, 200, SLO(tpot_ms=43.5))
    engine.run()
    report = engine.outcomes["r"].report
    assert report and report["promised"] and report["attained"]
    assert any(engine.granted())
