# SPDX-License-Identifier: Apache-2.0
"""core/speculation/draft_lengths.py: the planner against exhaustive search."""

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

from vllm_slo.core.speculation import draft_lengths
from vllm_slo.core.speculation.acceptance import expected_tokens
from vllm_slo.core.speculation.draft_lengths import (
    LengthPlan,
    fastest_pace_s,
    plan_lengths,
)
from vllm_slo.core.speculation.tiers import Tier
from vllm_slo.core.step_time.model import StepTimeModel

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
        return min(self.most_s, *self.spans_s(lengths))

    def spans_s(self, lengths: tuple[int, ...]) -> list[float]:
        """The longest step that keeps each TPOT."""
        return [
            tier.tpot_s * sum(tier.acceptance**i for i in range(length))
            for tier, length in zip(self.tiers, lengths, strict=True)
        ]

    def tokens(self, lengths: tuple[int, ...]) -> int:
        """Tokens that a step of all requests verifies."""
        return sum(tier.requests * n for tier, n in zip(self.tiers, lengths, strict=True))

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
        tokens = self.tokens(lengths)
        took_s = self.time_s(tokens, self.passes(lengths))
        if took_s > self.span_s(lengths) * (1 + 1e-12) or tokens > self.model.max_tokens:
            return None
        gives = sum(
            t.requests * expected_tokens(t.acceptance, n)
            for t, n in zip(self.tiers, lengths, strict=True)
        )
        return gives / took_s

    @property
    def is_tie(self) -> bool:
        """Whether a TPOT is as long as a step, or as a step without tokens. Then rounding decides
        whether the TPOT is kept."""
        return any(
            math.isclose(self.time_s(tokens, self.passes(lengths)), span)
            for lengths in self.vectors()
            for tokens in (0, self.tokens(lengths))
            for span in (*self.spans_s(lengths), self.most_s)
        )


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
    assume(instance.span_s(instance.vectors()[0]) < INF and not instance.is_tie)
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
    assume(not bounded.is_tie)
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
def test_lengths_that_keep_every_tpot_are_found_if_there_are_any(instance: Instance) -> None:
    assume(not instance.is_tie)
    plan = instance.plan(prompts=False)
    if best([instance.token_rate(lengths) for lengths in instance.vectors()]) is None:
        assert plan == instance.plan(prompts=True)
    else:
        assert plan.feasible
        assert instance.token_rate(plan.lengths) == pytest.approx(plan.per_second, rel=1e-9)


@given(instances.map(lambda instance: replace(instance, tiers=instance.tiers[:1])))
def test_one_tier_yields_as_much_as_exhaustive_search_finds(instance: Instance) -> None:
    assume(not instance.is_tie)
    found = best([instance.token_rate(lengths) for lengths in instance.vectors()])
    if found is not None:
        assert instance.plan(prompts=False).per_second == pytest.approx(found, rel=1e-9)


def served(rng: np.random.Generator, tiers: int, longest: int) -> Instance:
    """Requests and hardware as they are served: steps hold thousands of tokens."""
    served_tiers = [
        Tier(
            int(rng.integers(1, 40)),
            float(rng.uniform(0.03, 0.3)) if rng.random() < 0.8 else INF,
            float(rng.uniform(0.3, 0.9)),
        )
        for _ in range(tiers)
    ]
    pass_s, step_s = rng.choice([0.0, 0.001, 0.002]), rng.uniform(0.01, 0.03)
    token_s, rest_s = rng.uniform(5e-5, 4e-4), rng.uniform(0.0, 0.015)
    model = StepTimeModel(((1e-5, pass_s, step_s), (token_s, 0.0, rest_s)), 1e-8)
    context, draft_step_s = int(rng.integers(0, 60_000)), float(rng.choice([0.0, 0.002]))
    return Instance(tuple(served_tiers), model, longest, context, draft_step_s)


def test_several_tiers_lose_next_to_nothing_against_exhaustive_search() -> None:
    """Lengths are raised greedily: of 500 random cases hardly any is off the optimum by more than
    one percent, which a knapsack of few large items may be."""
    rng = np.random.default_rng(7)
    losses = []
    for instance in (served(rng, tiers=int(rng.integers(1, 5)), longest=6) for _ in range(500)):
        found = best([instance.token_rate(lengths) for lengths in instance.vectors()])
        if found is not None:
            losses.append(1.0 - instance.plan(prompts=False).per_second / found)
    assert len(losses) > 400
    assert min(losses) > -1e-9
    assert np.mean(losses) < 1e-4
    assert np.mean(np.array(losses) > 0.01) <= 0.005
    assert max(losses) < 0.05


def test_hardly_any_other_of_the_longest_lengths_yields_more() -> None:
    rng = np.random.default_rng(3)
    for instance in (served(rng, tiers=5, longest=16) for _ in range(100)):
        plan = instance.plan(prompts=False)
        for other in rng.integers(1, 17, (50, 5)).tolist():
            rate = instance.token_rate(tuple(other))
            assert rate is None or (plan.feasible and rate <= plan.per_second * 1.01)


@given(instances.filter(lambda instance: instance.model.pair_s == 0.0), seconds)
def test_the_budget_is_the_step_time_models_own(instance: Instance, tpot_s: float) -> None:
    """Time2BS not rounded, beside one request."""
    plan = plan_lengths(
        [Tier(1, tpot_s, 0.5)], instance.model, 1, prompts=True, context_tokens=instance.context
    )
    tokens = instance.model.time_to_tokens(tpot_s, instance.context)
    assert tokens - 1e-6 <= max(plan.prompt_tokens + 1.0, 0.0) < tokens + 1.0 + 1e-6


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


def test_nobody_decodes() -> None:
    plan = plan_lengths([], SLOPED, 8, prompts=True, most_tokens=100)
    assert (plan.lengths, plan.step_s, plan.prompt_tokens) == ((), INF, 100.0)


def test_drafting_costs_what_the_model_or_the_caller_says() -> None:
    """Ten milliseconds a pass, said either way, shorten the drafts."""
    tiers = [Tier(4, 0.050, 0.8)]
    said = StepTimeModel(((0.0, 0.010, 0.020), (0.001, 0.010, 0.020)))
    one = plan_lengths(tiers, said, 8, prompts=False)
    other = plan_lengths(tiers, SLOPED, 8, prompts=False, draft_step_s=0.010)
    assert one == other
    assert one.lengths < plan_lengths(tiers, SLOPED, 8, prompts=False).lengths


# --- what cannot make things worse ----------------------------------------------------------------


def better(one: LengthPlan, other: LengthPlan) -> bool:
    """Whether the first is no worse: a plan that keeps every TPOT beats one that does not."""
    if not (one.feasible and other.feasible):
        return one.feasible or not other.feasible
    return one.per_second >= other.per_second * (1 - 1e-9) - 1e-9


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


@given(roomy, st.floats(1.0, 3.0))
def test_looser_objectives_never_cost(instance: Instance, factor: float) -> None:
    looser = changed(instance, slower=factor)
    assert better(looser.plan(prompts=True), instance.plan(prompts=True))


@given(instances)
def test_longer_drafts_may_be_left_alone(instance: Instance) -> None:
    shorter, longer = replace(instance, longest=2), replace(instance, longest=6)
    assert better(longer.plan(prompts=True), shorter.plan(prompts=True))


@given(instances, st.floats(0.0, 0.02))
def test_dearer_drafts_leave_prompts_less(instance: Instance, more_s: float) -> None:
    dearer = replace(instance, draft_step_s=instance.draft_step_s + more_s)
    assert better(instance.plan(prompts=True), dearer.plan(prompts=True))


@given(instances)
def test_more_requests_leave_prompts_less(instance: Instance) -> None:
    assume(instance.context == 0)
    assert better(instance.plan(prompts=True), changed(instance, more=1).plan(prompts=True))


# --- the fastest pace  ----------------------------------------------------------------------------


def test_the_fastest_pace_is_that_of_the_best_length() -> None:
    """Nine others verify one token each."""
    paces = [(0.020 + 0.001 * (9 + n)) / expected_tokens(0.7, n) for n in range(1, 7)]
    assert fastest_pace_s(0.7, 10, SLOPED, 6) == pytest.approx(min(paces))
    assert fastest_pace_s(0.7, 10, SLOPED, 1) == pytest.approx(0.030)
    fixed: Any = {"draft_step_s": 0.004, "least_passes": 2}
    assert fastest_pace_s(0.7, 10, SLOPED, 1, **fixed) == pytest.approx(0.038)


# --- its own cost ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompts", "most_lines"), [(True, 8_000), (False, 25_000)])
def test_a_plan_is_little_work(
    prompts: bool, most_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five tiers, sixteen tokens, a million combinations of lengths: half of the plans within so
    many lines of what is compiled to some 25 us."""
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
    assert np.median(found) < most_lines
