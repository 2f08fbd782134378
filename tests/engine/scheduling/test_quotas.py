# SPDX-License-Identifier: Apache-2.0
"""Quotas of promised tokens: the bucket, prices, values, and a tenant that wants everything."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm_slo import SLO
from vllm_slo.core.admission.quota import TokenBucket, relative_values, token_weight
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.scheduling.quotas import OTHERS
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.slo.verdicts import Declined, unpack, unpack_quote

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
ENDLESS = {"promised_tokens_per_s": 1e-6}

# --- the bucket ----------------------------------------------------------------------------------

amounts = st.floats(0.0, 2_000.0, allow_nan=False)
bucket_events = st.lists(
    st.tuples(st.sampled_from(["take", "draw", "back"]), amounts, st.floats(-0.5, 5.0)), max_size=60
)


@given(st.floats(0.1, 500.0), st.floats(1.0, 1_000.0), bucket_events)
def test_never_more_than_rate_and_burst(
    rate: float, burst: float, events: list[tuple[str, float, float]]
) -> None:
    bucket, now_s, began_s, latest_s = TokenBucket(rate, burst), 100.0, 100.0, 100.0
    assert bucket.level(now_s) == burst
    out = credit = 0.0
    held: list[float] = []
    for kind, tokens, pause_s in events:
        now_s += pause_s  # a clock may go back
        latest_s = max(latest_s, now_s)
        before = bucket.level(now_s)
        assert -burst - 1e-6 <= before <= burst + 1e-6
        if kind == "take":
            given_out = bucket.take(tokens, now_s)
            assert given_out == (before >= tokens)
            if given_out:
                out += tokens
                held.append(tokens)
        elif kind == "draw":
            kept = bucket.draw(tokens, now_s)
            assert kept == (before - tokens >= -burst)
            drawn = before - bucket.level(now_s)
            assert drawn <= tokens + 1e-6
            out, credit = out + drawn, credit + drawn
        elif held:
            back = held.pop()
            bucket.give_back(back, now_s)
            out -= back
        bound = burst + rate * (latest_s - began_s)
        assert out <= bound + burst + 1e-6 * bound
        assert credit > 0.0 or out <= bound + 1e-6 * bound
    # What is left, what is out and what never fitted in: nothing comes from nowhere.
    assert bucket.level(now_s) + out <= burst + rate * (latest_s - began_s) + 1e-3


@given(st.floats(0.1, 500.0), st.floats(1.0, 1_000.0), amounts, amounts)
def test_who_waits_as_told_gets_it_and_no_sooner(
    rate: float, burst: float, spent: float, wanted: float
) -> None:
    bucket = TokenBucket(rate, burst)
    bucket.draw(spent, 0.0)
    wait_s = bucket.wait_s(wanted, 0.0)
    if wanted > burst:
        assert wait_s == math.inf
        return
    early = wait_s * 0.999 - 1e-3
    assert early <= 0.0 or not bucket.take(wanted, early)
    assert bucket.take(wanted, wait_s * (1.0 + 1e-9) + 1e-9)


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1.0), (1.0, 0.0), (math.inf, 1.0), (1.0, -1.0)])
def test_a_bucket_that_could_not_work_is_refused(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        TokenBucket(rate, burst)


# --- what a token costs --------------------------------------------------------------------------


@given(
    st.floats(1e-5, 1e-2), st.floats(0.0, 0.1), st.floats(0.0, 0.1), st.integers(1, 8192),
    st.floats(1e-4, 20.0),
)  # fmt: skip
def test_streams_that_fill_short_steps_pay_for_full_ones(
    slope: float, fixed: float, floor: float, most: int, tpot_s: float
) -> None:
    model = StepTimeModel(((0.0, 0.0, floor), (slope, 0.0, fixed)), max_tokens=8192)
    weight = token_weight(model, tpot_s, most)
    assert weight >= 1.0
    full_s = model.predict_s(most)
    if model.predict_s(1) <= tpot_s < full_s:
        fitting = model.time_to_tokens(tpot_s)
        # As many streams as a step holds, each with a token every TPOT, pay for all of its time.
        assert fitting * weight / tpot_s >= most / full_s * (1 - 1e-9)
    if tpot_s >= full_s:
        assert weight == 1.0


def test_a_tighter_tpot_is_dearer() -> None:
    weights = [token_weight(ROOFLINE, tpot_s, 2048) for tpot_s in (1.0, 0.1, 0.05, 0.03, 0.021)]
    assert weights == sorted(weights)
    assert weights[0] == 1.0
    assert weights[-1] == pytest.approx(0.021 * 2048 / 0.8292 / 27, rel=0.01)


# --- what a value is worth -----------------------------------------------------------------------

asked = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(1e-6, 1e6), st.floats(0.1, 10.0)),
    min_size=1,
    max_size=12,
)


def worths(rows: list[tuple[str, float, float]]) -> list[float]:
    return relative_values([o for o, _, _ in rows], [v for _, v, _ in rows], [u for *_, u in rows])


@given(asked)
def test_no_value_is_above_the_operators_own(rows: list[tuple[str, float, float]]) -> None:
    for worth, (_, value, usual) in zip(worths(rows), rows, strict=True):
        assert 0.0 < worth <= min(value, usual) * (1 + 1e-9)


@given(asked, st.integers(0, 11), st.floats(1.0, 1e6))
def test_raising_a_value_raises_nobodys_worth_and_touches_no_other_tenant(
    rows: list[tuple[str, float, float]], place: int, factor: float
) -> None:
    place %= len(rows)
    owner, value, usual = rows[place]
    lied = [*rows]
    lied[place] = (owner, value * factor, usual)
    for n, (honest, lying) in enumerate(zip(worths(rows), worths(lied), strict=True)):
        if rows[n][0] != owner:
            assert lying == honest
        elif n != place:
            assert lying <= honest
        assert lying <= rows[n][2] * (1 + 1e-9)


@given(asked, st.lists(st.floats(1e-6, 1e-3), max_size=8))
def test_worthless_requests_beside_it_lift_none(
    rows: list[tuple[str, float, float]], junk: list[float]
) -> None:
    padded = [*rows, *(("a", value, 1.0) for value in junk)]
    assert worths(padded)[: len(rows)] == worths(rows)


def test_classes_keep_the_order_that_the_operator_gave_them() -> None:
    rows = [("a", 4.0, 4.0), ("b", 1.0, 1.0), ("c", 1e6, 1.0), ("c", 1.0, 1.0)]
    assert worths(rows) == [4.0, 1.0, 1.0, 1e-6]


# --- in the scheduler ----------------------------------------------------------------------------

Make = Callable[..., VirtualEngine]


@pytest.fixture
def engine(config_folder: Path) -> Make:
    def make(seats: int = 256, **config: Any) -> VirtualEngine:
        return VirtualEngine(
            Scheduler,
            config_folder,
            ROOFLINE.predict_shape_s,
            EngineShape(num_blocks=6_000, max_num_seqs=seats),
            believed=ROOFLINE,
            margin=1.02,
            slo_config=config,
        )

    return make


def quota(rate: float, burst: float) -> dict[str, float]:
    return {"promised_tokens_per_s": rate, "burst_tokens": burst}


SHARES = {"tenants": {"honest": quota(1_000, 4_000)}, "default": quota(500, 2_000)}
HONEST = SLO(ttft_ms=600, tpot_ms=60, tenant="honest")
Arrival = tuple[float, str, SLO]


def arrivals(rng: random.Random, kind: str, rate: float, slo: SLO, until_s: float) -> list[Arrival]:
    found, at_s = [], rng.expovariate(rate)
    while at_s < until_s:
        found.append((at_s, f"{kind}{len(found)}", slo))
        at_s += rng.expovariate(rate)
    return found


def attainment(
    one: VirtualEngine, attack: SLO | None, names: str = "*", until_s: float = 8.0
) -> float:
    """Share of the honest tenant's requests that attain, beside ten times as many of an attack.

    ``names``: as whom it comes; {} is the number of the request.
    """
    rng = random.Random(1)
    coming = arrivals(rng, "honest", 3.0, HONEST, until_s)
    if attack is not None:
        for at_s, name, slo in arrivals(rng, "attack", 30.0, attack, until_s):
            given = slo.to_extra_args() | {"slo_tenant": names.format(name)}
            coming.append((at_s, name, SLO.from_extra_args(given) or slo))
    coming.sort(key=lambda one: one[0])
    while coming or one.busy:
        while coming and coming[0][0] <= one.clock.now_s:
            at_s, name, slo = coming.pop(0)
            prompt, output = rng.randint(100, 300), rng.randint(20, 60)
            one.add(name, prompt, output, slo, max_tokens=100, arrival_s=at_s)
        if one.scheduler.has_requests():
            if not one.step().num_scheduled_tokens:
                one.clock.advance(0.001)
        elif one.busy:
            one.drain()
        else:
            one.clock.advance(max(coming[0][0] - one.clock.now_s, 0.0))
    assert all(outcome.finish_reason == "stop" for outcome in one.outcomes.values())
    reports = [o.report for name, o in one.outcomes.items() if name.startswith("honest")]
    return sum(bool(report and report["attained"]) for report in reports) / len(reports)


ATTACKS = {
    "value": (SLO(ttft_ms=600, tpot_ms=60, value=1e6), "mallory"),
    "tight": (SLO(ttft_ms=600, tpot_ms=30, value=1e6), "mallory"),
    "nameless": (SLO(ttft_ms=1_000, tpot_ms=40, value=1e6), "{}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_tenant_that_wants_everything_takes_nobodys_share(engine: Make, attack: str) -> None:
    slo, names = ATTACKS[attack]
    assert attainment(engine(), slo, names) < 0.4
    assert attainment(engine(quotas=SHARES), slo, names) > 0.9


def test_alone_a_tenant_attains_with_and_without_its_quota(engine: Make) -> None:
    assert attainment(engine(), None) == attainment(engine(quotas=SHARES), None) == 1.0


@pytest.mark.slow
def test_the_very_tightest_tpot_still_leaves_most(engine: Make) -> None:
    """A TPOT of one step makes everybody's steps that short, which no quota prevents; see
    ``min_tpot_ms``. Without a quota nobody else is promised anything."""
    attack = SLO(tpot_ms=21, value=1e6)
    assert attainment(engine(), attack, "mallory", 4.0) < 0.2
    assert attainment(engine(quotas=SHARES), attack, "mallory", 4.0) > 0.7


def promised_tokens(one: VirtualEngine, tenant: str) -> float:
    registry = one.scheduler.parts.metrics.registry
    labels = {"engine": "0", "tenant": tenant}
    return registry.get_sample_value("vllm_slo:tenant_promised_tokens_total", labels) or 0.0


@pytest.mark.parametrize("names", ["mallory", "{}"])
def test_promises_come_to_no_more_than_the_quota(engine: Make, names: str) -> None:
    """Also of requests that are promised late; and whoever invents names gets no more."""
    one = engine(quotas=SHARES)
    attainment(one, SLO(ttft_ms=1_000, tpot_ms=100, value=9), names, 5.0)
    assert promised_tokens(one, "mallory") == 0.0
    assert 1_500 < promised_tokens(one, "(others)") <= 500 * one.clock.now_s + 2_000
    assert one.scheduler.parts.quotas._paid == {}


def test_best_effort_goes_on_beyond_the_quota(engine: Make) -> None:
    one = engine(quotas={"default": {**ENDLESS, "burst_tokens": 130}})
    for n in range(4):
        one.add(f"r{n}", 60, 40, SLO(ttft_ms=5_000), max_tokens=40)
    one.step()
    promised = [t.promised for t in one.scheduler.parts.tracker.live.values()]
    assert promised == [True, False, False, False]
    one.run()
    reports = [one.outcomes[f"r{n}"].report for n in range(4)]
    assert [r and r["reason"] for r in reports] == [None, "quota", "quota", "quota"]
    assert all(r and r["attained"] for r in reports)  # there was nothing else to do
    value = one.scheduler.parts.metrics.registry.get_sample_value
    labels = {"engine": "0", "slo_class": "custom", "outcome": "best_effort", "reason": "quota"}
    assert value("vllm_slo:admissions_total", labels) == 3


def test_who_prefers_a_refusal_is_told_when_the_bucket_has_filled(engine: Make) -> None:
    one = engine(quotas={"default": quota(50, 100)})
    slo = SLO(ttft_ms=9_000, on_unattainable="decline")
    one.add("first", 60, 40, slo, max_tokens=40)
    one.step()
    one.add("second", 60, 40, slo, max_tokens=40)
    one.add("never", 200, 40, slo, max_tokens=40)
    one.run()
    stops = {name: outcome.stop_reason for name, outcome in one.outcomes.items()}
    second = unpack(stops["second"])
    assert isinstance(second, Declined)
    assert second.reason == "quota"
    assert 1_900 < second.retry_after_ms <= 2_000  # 100 tokens at 50/s, less the first step
    assert stops["never"] == "slo_declined:86400000:quota"
    assert one.outcomes["first"].finish_reason == "stop"


def test_who_is_refused_is_told_of_those_before_it_in_the_same_step(engine: Make) -> None:
    one = engine(quotas={"default": quota(50, 100)})
    slo = SLO(ttft_ms=9_000, on_unattainable="decline")
    for name in ("first", "second"):
        one.add(name, 60, 40, slo, max_tokens=40)
    one.run()
    assert one.outcomes["first"].finish_reason == "stop"
    assert one.outcomes["second"].stop_reason == "slo_declined:2000:quota"


def test_a_request_is_promised_late_once_its_tenant_can_pay(engine: Make) -> None:
    one = engine(quotas={"default": quota(100, 250)})
    one.add("first", 100, 100, SLO(tpot_ms=900), max_tokens=100)
    one.step()
    one.add("second", 20, 300, SLO(tpot_ms=900), max_tokens=200)
    one.run()
    report = one.outcomes["second"].report
    assert report and (report["promised"], report["reason"]) == (True, "quota")


@pytest.mark.parametrize("declared", [None, 1], ids=["unsaid", "understated"])
def test_what_an_answer_did_not_use_is_given_back(engine: Make, declared: int | None) -> None:
    """Until then its price is that of all it may become, whatever it declares."""
    one = engine(quotas={"default": {**ENDLESS, "burst_tokens": 1_000}})
    slo = SLO(tpot_ms=900, expected_output_tokens=declared)
    one.add("short", 100, 20, slo, max_tokens=800)
    one.step()
    quotas = one.scheduler.parts.quotas
    assert quotas._buckets[OTHERS].level(one.clock.now_s) == pytest.approx(100, abs=1)
    one.run()
    assert quotas._buckets[OTHERS].level(one.clock.now_s) == pytest.approx(880, abs=1)
    assert promised_tokens(one, "(others)") == pytest.approx(120, abs=1)


def test_a_client_that_leaves_has_had_its_promise(engine: Make) -> None:
    one = engine(quotas={"default": {**ENDLESS, "burst_tokens": 1_000}})
    one.add("gone", 100, 20, SLO(tpot_ms=900), max_tokens=800)
    one.step()
    one.abort("gone")
    one.run()
    quotas = one.scheduler.parts.quotas
    assert quotas._buckets[OTHERS].level(one.clock.now_s) == pytest.approx(100, abs=1)
    assert promised_tokens(one, "(others)") == pytest.approx(900, abs=1)


def test_a_prompt_that_the_cache_holds_is_not_paid_for(engine: Make) -> None:
    one = engine(quotas={"default": {**ENDLESS, "burst_tokens": 1_000}})
    prompt = list(range(3, 403))
    for name in ("first", "second"):
        one.add(name, prompt, 10, SLO(tpot_ms=900), max_tokens=10)
        one.run()
    left = one.scheduler.parts.quotas._buckets[OTHERS].level(one.clock.now_s)
    assert left == pytest.approx(1_000 - 410 - 16 - 10, abs=1)  # all but the last block is cached


def test_a_long_answer_pays_on_and_then_loses_its_promise(engine: Make) -> None:
    """What was learnt says ten tokens; it takes 800 and may take 20 + 100 + 100 at most."""
    one = engine(
        quotas={"default": {**ENDLESS, "burst_tokens": 100}, "tenants": {"t": quota(9e8, 9e8)}}
    )
    for n in range(12):
        one.add(f"seen{n}", 10, 10, SLO(tpot_ms=900, tenant="t"), max_tokens=900)
    one.run()
    one.add("long", 20, 800, SLO(tpot_ms=900, expected_output_tokens=1), max_tokens=900)
    steps = 0
    while one.outcomes["long"].finish_reason is None:
        if steps % 5 == 0:  # somebody else comes, so there is something to decide
            one.add(f"other{steps}", 10, 2, SLO(tpot_ms=900, tenant="t"), max_tokens=2)
        one.step()
        steps += 1
    assert len(one.outcomes["long"].token_ids) == 800
    assert one.outcomes["long"].report["promised"]  # it was
    value = one.scheduler.parts.metrics.registry.get_sample_value
    labels = {"engine": "0", "slo_class": "custom", "objective": "quota"}
    assert value("vllm_slo:promises_broken_total", labels) == 1
    assert 180 < promised_tokens(one, "(others)") < 215


def test_who_shares_a_bucket_is_not_pushed_aside_by_values_or_deadlines(engine: Make) -> None:
    one = engine(quotas={"default": {**ENDLESS, "burst_tokens": 130}})
    one.add("meek", 60, 40, SLO(ttft_ms=9_000, tenant="b"), max_tokens=40)
    for n in range(9):
        greedy = SLO(ttft_ms=100, tpot_ms=900, value=1e6, tenant=f"a{n}")
        one.add(f"greedy{n}", 60, 40, greedy, max_tokens=40, arrival_s=0.001)
    one.step()
    tracked = one.scheduler.parts.tracker.live
    assert [name for name, t in tracked.items() if t.promised] == ["meek"]


@pytest.mark.parametrize("quotas", [False, True])
def test_where_one_can_be_promised_it_is_by_the_operators_word(engine: Make, quotas: bool) -> None:
    config = {"quotas": {"default": quota(1e6, 1e6)}} if quotas else {}
    one = engine(seats=1, classes={"good": {"ttft_ms": 9_000, "value": 2.0}}, **config)
    one.add("greedy", 60, 40, SLO(ttft_ms=9_000, value=1e6, tenant="a"), max_tokens=40)
    one.add("good", 60, 40, SLO(slo_class="good", tenant="b"), max_tokens=40)
    one.step()
    promised = [name for name, t in one.scheduler.parts.tracker.live.items() if t.promised]
    assert promised == (["good"] if quotas else ["greedy"])


def test_a_quote_tells_of_the_quota_and_takes_nothing_from_it(engine: Make) -> None:
    one = engine(quotas={"default": quota(50, 100)})
    slo = SLO(ttft_ms=9_000)
    said = []
    for name in ("before", "again"):
        one.add(name, 60, 40, slo, max_tokens=40, quote=True)
        one.run()
        said.append(unpack_quote(one.outcomes[name].stop_reason))
    assert [quote and quote["promised"] for quote in said] == [True, True]
    one.add("first", 60, 40, slo, max_tokens=40)
    one.step()
    one.add("after", 60, 40, slo, max_tokens=40, quote=True)
    one.run()
    quote = unpack_quote(one.outcomes["after"].stop_reason)
    assert quote and (quote["promised"], quote["reason"], quote["cheapest"]) == (
        *(False, "quota"),
        None,
    )
    assert 1_500 < quote["retry_after_ms"] <= 2_000


def test_stages_are_paid_for_by_the_tightest_to_come(engine: Make) -> None:
    one = engine(quotas={"default": {**ENDLESS, "burst_tokens": 1_000}})
    stages: Any = [{"until": "x", "tpot_ms": 30}, {"tpot_ms": 2_000}]
    one.stages.end_of = lambda *_: None
    one.add("staged", 100, 20, SLO(stages=stages), max_tokens=20)
    one.step()
    level = one.scheduler.parts.quotas._buckets[OTHERS].level(one.clock.now_s)
    weight = token_weight(ROOFLINE, 0.03, 2048)
    assert weight > 1.3
    assert level == pytest.approx(1_000 - 100 - 20 * weight, rel=0.01)


def test_without_quotas_nothing_is_counted(engine: Make) -> None:
    one = engine()
    one.add("r", 100, 20, SLO(tpot_ms=900, tenant="t"))
    one.run()
    assert one.scheduler.parts.quotas is None
    assert promised_tokens(one, "t") == 0.0


@settings(max_examples=examples(15))
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60), st.integers(0, 3)), max_size=12))
def test_all_is_accounted_for(config_folder: Path, crowd: list[tuple[int, int, int]]) -> None:
    """Whatever comes and leaves: level and what was used are the burst, and nothing stays paid."""
    burst = 2_500.0
    one = VirtualEngine(
        Scheduler,
        config_folder,
        ROOFLINE.predict_shape_s,
        EngineShape(),
        believed=ROOFLINE,
        slo_config={"quotas": {"default": {**ENDLESS, "burst_tokens": burst}}},
    )
    for n, (prompt, output, kind) in enumerate(crowd):
        slo = [SLO(tpot_ms=40), SLO(ttft_ms=50), SLO(ttft_ms=5_000, tpot_ms=200), None][kind]
        one.add(f"r{n}", prompt, output, slo, max_tokens=60)
        if n % 3 == 2:
            one.step()
        if n % 4 == 3 and f"r{n - 1}" in one.scheduler.requests:
            one.abort(f"r{n - 1}")
    one.run()
    quotas = one.scheduler.parts.quotas
    assert quotas._paid == {}
    spent = promised_tokens(one, "(others)")
    assert quotas._buckets[OTHERS].level(one.clock.now_s) == pytest.approx(burst - spent, abs=0.01)
