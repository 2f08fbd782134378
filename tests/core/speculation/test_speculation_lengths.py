# SPDX-License-Identifier: Apache-2.0
"""Draft lengths by SLO: the planner against exhaustive search, tiers, and learnt acceptance."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_slo.core.batching.decodes import limit_of
from vllm_slo.core.speculation import draft_lengths
from vllm_slo.core.speculation.draft_lengths import (
    GRID,
    MAX_TIERS,
    AcceptanceEstimator,
    LengthPlan,
    Tier,
    counted_tokens,
    expected_tokens,
    fastest_pace_s,
    gather_tiers,
    plan_lengths,
    stretched_s,
    with_draft_steps,
    working_tpot_s,
)
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY, DecodeView

INF = math.inf
SLOPED = StepTimeModel(((0.0, 0.0, 0.020), (0.001, 0.0, 0.020)))
"""Twenty milliseconds, and one more for each token."""


@dataclass(frozen=True)
class Instance:
    """One problem, and what it says of a vector of lengths; no compiled code is used."""

    tiers: tuple[Tier, ...]
    model: StepTimeModel
    longest: int
    context: int = 0
    draft_step_s: float = 0.0
    least_passes: int = 0
    most_s: float = INF

    def plan(self, *, prompts: bool) -> LengthPlan:
        return plan_lengths(
            self.tiers,
            self.model,
            self.longest,
            prompts=prompts,
            context_tokens=self.context,
            draft_step_s=self.draft_step_s,
            least_passes=self.least_passes,
            most_s=self.most_s,
        )

    def vectors(self) -> list[tuple[int, ...]]:
        return list(itertools.product(range(1, self.longest + 1), repeat=len(self.tiers)))

    def passes(self, lengths: tuple[int, ...]) -> int:
        """Of the draft in a step."""
        return max(max(lengths) - 1, self.least_passes)

    def time_s(self, tokens: float, passes: int) -> float:
        pairs = tokens * self.context / sum(tier.requests for tier in self.tiers)
        predicted = self.model.predict_s(tokens, self.context, passes, pairs)
        return max(predicted + passes * self.draft_step_s, 1e-9)

    def span_s(self, lengths: tuple[int, ...]) -> float:
        """T: the longest step that keeps every TPOT, and no longer than prompts may cause."""
        spans = (
            tier.tpot_s * sum(tier.acceptance**i for i in range(length))
            for tier, length in zip(self.tiers, lengths, strict=True)
        )
        return min(self.most_s, *spans)

    def drawn(self, lengths: tuple[int, ...]) -> float:
        """Tokens that decoding takes from a step of T seconds on average."""
        step_s = self.span_s(lengths)
        return sum(
            tier.requests * (step_s / tier.tpot_s if length == 1 else length)
            for tier, length in zip(self.tiers, lengths, strict=True)
        )

    def overrun(self, lengths: tuple[int, ...]) -> float:
        """How many times longer than T the step is that T is to last for."""
        tokens = self.drawn(lengths)
        took_s = self.time_s(tokens, self.passes(lengths))
        return max(took_s / self.span_s(lengths), tokens / self.model.max_tokens)

    def prompt_rate(self, lengths: tuple[int, ...]) -> float | None:
        """Prompt tokens per second, None if a TPOT is missed."""
        step_s, passes = self.span_s(lengths), self.passes(lengths)
        tokens, requests = float(self.model.max_tokens), sum(t.requests for t in self.tiers)
        for k, c, b in self.model.terms:
            slope = k + self.model.pair_s * self.context / requests
            fixed_s = b + (c + self.draft_step_s) * passes + self.model.kv_s * self.context
            if slope * tokens > step_s - fixed_s:
                tokens = (step_s - fixed_s) / slope if slope else 0.0
        left = max(tokens, 0.0) - self.drawn(lengths)
        return left / step_s if left >= -1e-9 else None

    def token_rate(self, lengths: tuple[int, ...]) -> float | None:
        """Output tokens per second of a step of everybody, None if a TPOT is missed."""
        tokens = sum(t.requests * n for t, n in zip(self.tiers, lengths, strict=True))
        took_s = self.time_s(tokens, self.passes(lengths))
        if took_s > self.span_s(lengths) * (1 + 1e-12) or tokens > self.model.max_tokens:
            return None
        gives = sum(
            t.requests * expected_tokens(t.acceptance, n)
            for t, n in zip(self.tiers, lengths, strict=True)
        )
        return gives / took_s


seconds = st.floats(0.005, 0.3)
chances = st.floats(0.0, 1.0) | st.sampled_from([0.6, 0.8])
tiers = st.builds(Tier, st.integers(1, 12), seconds | st.just(INF), chances)
models = st.builds(
    lambda k1, k2, c, b1, b2, kv_s, pair_s, most: StepTimeModel(
        ((k1, c, b1), (k2, 0.0, b2)), kv_s, most, pair_s
    ),
    st.sampled_from([0.0, 1e-5]),
    st.just(0.0) | st.floats(1e-6, 0.003),
    st.sampled_from([0.0, 0.002]),
    st.floats(0.001, 0.05),
    st.floats(0.0, 0.05),
    st.sampled_from([0.0, 1e-6]),
    st.sampled_from([0.0, 1e-8]),
    st.sampled_from([64, 4096]),
)
instances = st.builds(
    Instance,
    st.lists(tiers, min_size=1, max_size=4).map(tuple),
    models,
    st.integers(1, 6),
    st.sampled_from([0, 3000]),
    st.sampled_from([0.0, 0.004]),
    st.integers(0, 2),
)
roomy = instances.filter(lambda instance: instance.model.terms[1][0] > 1e-5).map(
    lambda instance: replace(instance, model=replace(instance.model, max_tokens=1_000_000))
)
"""Steps may be as large as their time allows."""


def best(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


@given(instances)
def test_prompts_get_as_much_as_exhaustive_search_finds(instance: Instance) -> None:
    assume(instance.span_s(instance.vectors()[0]) < INF)
    plan = instance.plan(prompts=True)
    found = best([instance.prompt_rate(lengths) for lengths in instance.vectors()])
    assert plan.feasible == (found is not None)
    assert plan.step_s == pytest.approx(instance.span_s(plan.lengths))
    if found is None:
        least = min(map(instance.overrun, instance.vectors()))
        assert instance.overrun(plan.lengths) == pytest.approx(least, rel=1e-9)
        assert plan.prompt_tokens < 0.0
    else:
        assert plan.per_second == pytest.approx(found, rel=1e-6, abs=1e-6)
        assert instance.prompt_rate(plan.lengths) == pytest.approx(found, rel=1e-6, abs=1e-6)
        assert plan.prompt_tokens == pytest.approx(plan.per_second * plan.step_s)


@given(instances, seconds)
def test_prompts_may_make_a_step_so_long_and_no_longer(instance: Instance, most_s: float) -> None:
    bounded = replace(instance, most_s=most_s)
    plan = bounded.plan(prompts=True)
    found = best([bounded.prompt_rate(lengths) for lengths in bounded.vectors()])
    if found is None:
        assert plan == instance.plan(prompts=True)
    else:
        assert plan.feasible
        assert plan.step_s <= most_s
        assert plan.per_second == pytest.approx(found, rel=1e-6, abs=1e-6)
        assert bounded.prompt_rate(plan.lengths) == pytest.approx(found, rel=1e-6, abs=1e-6)


@given(instances)
def test_as_many_tokens_come_out_as_exhaustive_search_finds(instance: Instance) -> None:
    plan = instance.plan(prompts=False)
    found = best([instance.token_rate(lengths) for lengths in instance.vectors()])
    if found is None:
        assert plan == instance.plan(prompts=True)
    else:
        assert plan.feasible
        assert plan.per_second == pytest.approx(found, rel=1e-9)
        assert instance.token_rate(plan.lengths) == pytest.approx(found, rel=1e-9)


@given(st.lists(tiers, min_size=5, max_size=5), models, st.data())
def test_no_other_of_the_longest_lengths_yields_more(
    found: list[Tier], model: StepTimeModel, data: st.DataObject
) -> None:
    instance = Instance(tuple(found), model, 16)
    plan = instance.plan(prompts=False)
    lengths = st.tuples(*[st.integers(1, 16)] * 5)
    for other in data.draw(st.lists(lengths, min_size=20, max_size=20)):
        rate = instance.token_rate(other)
        assert rate is None or (plan.feasible and rate <= plan.per_second * (1 + 1e-9))


@given(instances.filter(lambda instance: instance.model.pair_s == 0.0), seconds)
def test_the_budget_is_the_step_time_models_own(instance: Instance, tpot_s: float) -> None:
    """Time2BS not rounded, beside one request."""
    plan = plan_lengths(
        [Tier(1, tpot_s, 0.5)], instance.model, 1, prompts=True, context_tokens=instance.context
    )
    tokens = instance.model.time_to_tokens(tpot_s, instance.context)
    assert math.floor(max(plan.prompt_tokens + 1.0, 0.0) + 1e-6) == tokens


@pytest.mark.parametrize(("acceptance", "expected"), [(0.0, 1.0), (0.5, 1.875), (1.0, 4.0)])
def test_acc_is_the_sum_of_the_chances_to_get_so_far(acceptance: float, expected: float) -> None:
    assert expected_tokens(acceptance, 4) == pytest.approx(expected)
    assert expected_tokens(acceptance, 1) == 1.0


# --- the paper's figure 6, and what it says of several tiers --------------------------------------


def test_two_tokens_a_batch_relax_the_step_to_twice_the_tpot() -> None:
    """Figure 6: auto-regressive decoding binds each batch to the TPOT, which ten decodes and twenty
    tokens of prompts fill; with two tokens a batch it may take twice as long, and holds 60."""
    decodes = [Tier(10, 0.050, 1.0)]
    plain = plan_lengths(decodes, SLOPED, 1, prompts=True)
    assert plain.lengths == (1,)
    assert plain.step_s == pytest.approx(0.050)
    assert plain.prompt_tokens == pytest.approx(20.0)
    assert plain.per_second == pytest.approx(400.0)

    speculated = plan_lengths(decodes, SLOPED, 2, prompts=True)
    assert speculated.lengths == (2,)
    assert speculated.step_s == pytest.approx(0.100)
    assert speculated.prompt_tokens == pytest.approx(60.0)
    assert speculated.per_second == pytest.approx(600.0)


def test_a_tight_tier_drafts_for_a_loose_one() -> None:
    """The loose tier sits steps out while the tight one stretches them."""
    plan = plan_lengths([Tier(8, 0.030, 0.8), Tier(8, 0.200, 0.8)], SLOPED, 8, prompts=True)
    tight, loose = plan.lengths
    assert tight > 1 == loose
    assert plan.step_s == pytest.approx(0.030 * expected_tokens(0.8, tight))
    drawn = 8 * tight + 8 * plan.step_s / 0.200
    assert plan.prompt_tokens == pytest.approx((plan.step_s - 0.020) / 0.001 - drawn)


def test_drafts_keep_a_tpot_that_no_plain_step_keeps() -> None:
    """Ten decodes take 30 ms a step: a TPOT of 20 ms needs more than a token from each."""
    tight = [Tier(10, 0.020, 0.9)]
    plain, drafted = (plan_lengths(tight, SLOPED, n, prompts=True) for n in (1, 6))
    assert not plain.feasible
    assert plain.lengths == (1,)
    assert plain.prompt_tokens == pytest.approx(-10.0)
    assert drafted.feasible
    assert drafted.lengths[0] > 1


def test_what_no_length_keeps_is_missed_by_as_little_as_can_be() -> None:
    tiers = [Tier(4, 0.001, 0.9), Tier(4, 0.100, 0.1)]
    for prompts in (True, False):
        plan = plan_lengths(tiers, SLOPED, 6, prompts=prompts)
        assert not plan.feasible
        assert plan.lengths == (6, 1)
        assert plan.prompt_tokens < 0.0


def test_nobody_asks_for_a_tpot() -> None:
    """With prompts the step is theirs; without, lengths are those that yield most."""
    free = [Tier(4, INF, 0.8)]
    busy = plan_lengths(free, SLOPED, 8, prompts=True, most_tokens=480)
    assert (busy.lengths, busy.step_s, busy.prompt_tokens, busy.feasible) == ((1,), INF, 480, True)
    assert busy.per_second == pytest.approx(480 / 0.5)
    idle = plan_lengths(free, SLOPED, 8, prompts=False)
    rates = [4 * expected_tokens(0.8, n) / (0.020 + 0.004 * n) for n in range(1, 9)]
    assert idle.lengths == (1 + int(np.argmax(rates)),)
    assert idle.per_second == pytest.approx(max(rates))
    assert idle.draft_steps == idle.lengths[0] - 1


def test_nobody_decodes() -> None:
    plan = plan_lengths([], SLOPED, 8, prompts=True, most_tokens=100)
    assert (plan.lengths, plan.step_s, plan.prompt_tokens, plan.draft_steps) == ((), INF, 100.0, 0)


def test_drafting_costs_what_the_model_or_the_caller_says() -> None:
    """Ten milliseconds a pass, said either way, shorten the drafts."""
    tiers = [Tier(4, 0.050, 0.8)]
    said = StepTimeModel(((0.0, 0.010, 0.020), (0.001, 0.010, 0.020)))
    one = plan_lengths(tiers, said, 8, prompts=False)
    other = plan_lengths(tiers, SLOPED, 8, prompts=False, draft_step_s=0.010)
    assert one == other
    assert one.lengths < plan_lengths(tiers, SLOPED, 8, prompts=False).lengths


def test_a_step_that_drafts_is_priced_by_its_passes() -> None:
    model = StepTimeModel(((0.0, 0.004, 0.020), (0.001, 0.002, 0.010)), 1e-6, 100, 1e-8)
    drafting = with_draft_steps(model, 3)
    for tokens in (1, 10, 80):
        expected_s = model.predict_s(tokens, 50, 3, 7)
        assert drafting.predict_s(tokens, 50, 0, 7) == pytest.approx(expected_s)
        assert drafting.predict_s(tokens, 50, 5, 7) == pytest.approx(expected_s)
    assert drafting.max_tokens == 100


# --- what cannot make things worse ----------------------------------------------------------------


def better(one: LengthPlan, other: LengthPlan) -> bool:
    """Whether the first is no worse: a plan that keeps every TPOT beats one that does not."""
    if not (one.feasible and other.feasible):
        return one.feasible or not other.feasible
    return one.per_second >= other.per_second * (1 - 1e-9) - 1e-9


def most_tokens(instance: Instance) -> float:
    """Output tokens per second at best, 0 where no step of everybody keeps the TPOTs."""
    return best([instance.token_rate(lengths) for lengths in instance.vectors()]) or 0.0


def changed(
    instance: Instance, *, more: int = 0, slower: float = 1.0, likelier: float = 1.0
) -> Instance:
    """The same with more requests in each tier, and every TPOT or acceptance multiplied."""
    tiers = [
        Tier(t.requests + more, t.tpot_s * slower, min(t.acceptance * likelier, 1.0))
        for t in instance.tiers
    ]
    return replace(instance, tiers=tuple(tiers))


@given(roomy, st.floats(1.0, 3.0))
def test_better_drafts_never_cost(instance: Instance, factor: float) -> None:
    likelier = changed(instance, likelier=factor)
    assert better(likelier.plan(prompts=True), instance.plan(prompts=True))
    known = most_tokens(instance)
    assert not known or likelier.plan(prompts=False).per_second >= known * (1 - 1e-9)


@given(roomy, st.floats(1.0, 3.0))
def test_looser_objectives_never_cost(instance: Instance, factor: float) -> None:
    looser = changed(instance, slower=factor)
    assert better(looser.plan(prompts=True), instance.plan(prompts=True))
    known = most_tokens(instance)
    assert not known or looser.plan(prompts=False).per_second >= known * (1 - 1e-9)


@given(instances)
def test_longer_drafts_may_be_left_alone(instance: Instance) -> None:
    shorter, longer = replace(instance, longest=2), replace(instance, longest=6)
    assert better(longer.plan(prompts=True), shorter.plan(prompts=True))
    known = most_tokens(shorter)
    assert not known or longer.plan(prompts=False).per_second >= known * (1 - 1e-9)


@given(instances, st.floats(0.0, 0.02))
def test_dearer_drafts_leave_prompts_less(instance: Instance, more_s: float) -> None:
    dearer = replace(instance, draft_step_s=instance.draft_step_s + more_s)
    assert better(instance.plan(prompts=True), dearer.plan(prompts=True))


@given(instances)
def test_more_requests_leave_prompts_less(instance: Instance) -> None:
    assume(instance.context == 0)
    assert better(instance.plan(prompts=True), changed(instance, more=1).plan(prompts=True))


# --- who falls behind, and tiers ------------------------------------------------------------------


def decode(*, late_s: float = 0.0, left: float = 8.0, tpot_s: float = 0.050) -> DecodeView:
    """A request with ``left`` tokens of its window to come, so many seconds behind, at time 0."""
    return DecodeView("r", tpot_s - late_s, left * tpot_s - late_s, left, tpot_s)


def test_who_is_on_schedule_or_ahead_keeps_its_tpot() -> None:
    for late_s in (0.0, -0.2):
        assert working_tpot_s(0.0, decode(late_s=late_s), 0.001) == 0.050
    assert working_tpot_s(0.0, decode(tpot_s=INFINITY), 0.001) == INFINITY


@given(st.floats(1e-4, 0.25), st.floats(1.0, 10.0))
def test_who_fell_behind_keeps_its_window_at_the_pace_planned(late_s: float, left: float) -> None:
    view = decode(late_s=late_s, left=left)
    pace_s = limit_of(0.0, view, 0.0)
    assume(0.002 < pace_s < 0.050)
    found = working_tpot_s(0.0, view, 0.001)
    assert found * left <= view.window_end_s + 1e-9
    assert pace_s / GRID <= found * (1 + 1e-9)
    steps = math.log(0.050 / found) / math.log(GRID)
    assert steps == pytest.approx(round(steps), abs=1e-6)  # so that there are few of them


def test_no_pace_is_asked_for_that_cannot_be_reached() -> None:
    """Rounding stops at it; a window that it cannot save hurries nobody."""
    view = decode(late_s=0.2, left=8.0)  # 25 ms a token
    assert working_tpot_s(0.0, view, 0.0249) == 0.0249
    assert working_tpot_s(0.0, view, 0.0251) == 0.050
    assert working_tpot_s(0.0, view, 0.080) == 0.080
    assert working_tpot_s(0.0, decode(late_s=0.5), 0.020) == 0.050


def test_the_fastest_pace_is_that_of_the_best_length() -> None:
    """Nine others verify one token each."""
    paces = [(0.020 + 0.001 * (9 + n)) / expected_tokens(0.7, n) for n in range(1, 7)]
    assert fastest_pace_s(0.7, 10, SLOPED, 6) == pytest.approx(min(paces))
    assert fastest_pace_s(0.7, 10, SLOPED, 1) == pytest.approx(0.030)
    fixed = {"draft_step_s": 0.004, "least_passes": 2}
    assert fastest_pace_s(0.7, 10, SLOPED, 1, **fixed) == pytest.approx(0.038)


paces = st.lists(st.tuples(seconds | st.just(INF), st.floats(0.02, 0.98)), max_size=40)


@given(paces)
def test_tiers_are_few_and_nobody_is_planned_for_more_loosely(
    found: list[tuple[float, float]],
) -> None:
    tiers, places = gather_tiers(found)
    assert len(tiers) == min(len(set(found)), MAX_TIERS)
    assert sum(tier.requests for tier in tiers) == len(found) == len(places)
    for place, tier in enumerate(tiers):
        members = [pace for pace, at in zip(found, places, strict=True) if at == place]
        assert len(members) == tier.requests
        assert min(tpot_s for tpot_s, _ in members) == tier.tpot_s
        mean = sum(chance for _, chance in members) / len(members)
        assert tier.acceptance == pytest.approx(mean)
        assert (tier.tpot_s == INF) == all(tpot_s == INF for tpot_s, _ in members)


def test_the_most_alike_are_merged() -> None:
    asked = [(0.02, 0.5), (0.03, 0.5), (0.05, 0.5), (0.05, 0.52), (0.1, 0.5), (INF, 0.5)]
    tiers, places = gather_tiers(asked)
    assert places == [0, 1, 2, 2, 3, 4]
    assert tiers[2][:2] == (2, 0.05)
    assert tiers[2].acceptance == pytest.approx(0.51)


# --- what a step may be stretched for -------------------------------------------------------------


def test_a_step_that_yields_nothing_can_be_made_up_for() -> None:
    """Ten tokens at 50 ms, 30 ms a step without drafts: 500 - 9 x 30 ms may go into one step."""
    decode = DecodeView("r", 0.050, 0.500, 10.0, 0.050)
    counted = counted_tokens(0.0, decode, 9.0, 0.030)
    assert stretched_s(0.0, decode, counted) == pytest.approx(0.230)
    assert counted_tokens(0.0, decode, 2.5, 0.030) == 2.5, "no more than it yields"


@given(
    st.floats(0.02, 0.2), st.integers(1, 50), st.floats(-0.05, 0.3), st.floats(0.1, 0.99), seconds
)
def test_a_window_survives_steps_of_single_tokens(
    tpot_s: float, left: int, late: float, sure: float, hoped: float
) -> None:
    """Every step is stretched as far as it may be and yields one token: the window is kept as long
    as steps without drafts could keep it when it began."""
    sure_s, now_s, end_s = sure * tpot_s, 0.0, left * tpot_s * (1.0 - late)
    assume(left * sure_s <= end_s)
    while left:
        due_s = end_s - (left - 1) * tpot_s
        decode = DecodeView("r", due_s, end_s, float(left), tpot_s)
        counted = counted_tokens(now_s, decode, 1.0 + 20.0 * hoped, sure_s)
        assert 1.0 <= counted <= max(1.0 + 20.0 * hoped, 1.0)
        now_s += max(stretched_s(now_s, decode, counted), sure_s)
        left -= 1
        assert now_s + left * sure_s <= end_s + 1e-9


def test_where_only_drafts_keep_the_tpot_the_last_tokens_count_on_no_luck() -> None:
    shares = [
        counted_tokens(0.0, DecodeView("r", 0.02, 0.02 * n, float(n), 0.02), 3.0, 0.030)
        for n in range(1, 20)
    ]
    assert shares[0] == 1.0
    assert shares == sorted(shares)
    assert shares[-1] == 3.0


@given(seconds, st.floats(1.0, 40.0), seconds, seconds)
def test_a_step_of_one_token_is_what_the_batch_plan_allows(
    tpot_s: float, left: float, ahead_s: float, now_s: float
) -> None:
    end_s = now_s + left * tpot_s + ahead_s
    decode = DecodeView("r", end_s - (left - 1.0) * tpot_s, end_s, left, tpot_s)
    assert stretched_s(now_s, decode, 1.0) == pytest.approx(limit_of(now_s, decode, 0.0))


# --- acceptance ----------------------------------------------------------------------------------


def feed(known: AcceptanceEstimator, slo_class: str, chance: float, steps: int) -> None:
    """Steps of four drafts each, at random."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        accepted = int(np.argmin(np.append(rng.random(4) < chance, [False])))
        known.observe(slo_class, accepted, min(accepted + 1, 4))


def test_nothing_seen_is_the_prior() -> None:
    assert AcceptanceEstimator(0.6).acceptance("chat") == pytest.approx(0.6)
    assert AcceptanceEstimator(0.6).acceptance() == pytest.approx(0.6)


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.9])
def test_trials_tell_the_chance(chance: float) -> None:
    known = AcceptanceEstimator(memory=2000.0)
    feed(known, "code", chance, 2000)
    assert known.acceptance("code") == pytest.approx(chance, abs=0.04)


def test_classes_are_told_apart_and_new_ones_are_like_the_rest() -> None:
    known = AcceptanceEstimator()
    for _ in range(20):
        feed(known, "code", 0.9, 20)
        feed(known, "chat", 0.4, 20)
    assert known.acceptance("code") > 0.8
    assert known.acceptance("chat") < 0.5
    assert 0.5 < known.acceptance("new") == known.acceptance() < 0.8
    known.observe("new", 0, 4)
    assert known.acceptance("chat") < known.acceptance("new") < known.acceptance()


def test_what_was_is_forgotten() -> None:
    known = AcceptanceEstimator(memory=200.0)
    feed(known, "code", 0.9, 500)
    feed(known, "code", 0.3, 500)
    assert known.acceptance("code") < 0.4


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 8), st.integers(0, 8))))
def test_a_chance_is_never_certain(steps: list[tuple[str, int, int]]) -> None:
    known = AcceptanceEstimator()
    for name, accepted, rejected in steps:
        known.observe(name, accepted, accepted + rejected)
        assert 0.02 <= known.acceptance(name) <= 0.98


@given(st.integers(0, 100), st.integers(1, 8))
def test_an_accepted_draft_never_lowers_the_estimate(seen: int, more: int) -> None:
    known = AcceptanceEstimator()
    for place in range(seen):
        known.observe("chat", place % 3, 2 + place % 3)
    before = known.acceptance("chat")
    known.observe("chat", more, more)
    assert known.acceptance("chat") >= before - 1e-12


def test_no_more_can_be_accepted_than_was_tried() -> None:
    with pytest.raises(ValueError, match="3 of 2 drafts"):
        AcceptanceEstimator().observe("chat", 3, 2)


# --- its own cost ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [True, False])
def test_a_plan_is_little_work(prompts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tiers, sixteen tokens: half of the plans within 8000 lines of what is compiled to some
    50 us; there are a million combinations of lengths."""
    for name, function in list(vars(draft_lengths).items()):
        if hasattr(function, "compiled") or hasattr(function, "py_func"):
            plain = getattr(function, "py_func", None) or function.__wrapped__
            monkeypatch.setattr(draft_lengths, name, plain)
    lines = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    rng = np.random.default_rng(1)
    model = StepTimeModel(((1e-5, 0.002, 0.020), (2e-4, 0.0, 0.005)), 1e-8)
    found = []
    for _ in range(200):
        columns = rng.integers(1, 40, 5), rng.uniform(0.03, 0.3, 5), rng.uniform(0.3, 0.9, 5)
        tiers = [Tier(int(n), t, a) for n, t, a in zip(*columns, strict=True)]
        lines, before = 0, sys.gettrace()
        sys.settrace(count)
        try:
            plan_lengths(tiers, model, 16, prompts=prompts, context_tokens=20_000)
        finally:
            sys.settrace(before)
        found.append(lines)
    assert np.median(found) < 8_000
