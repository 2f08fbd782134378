# SPDX-License-Identifier: Apache-2.0
import itertools
import math
import random
from dataclasses import replace

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_slo.core.admission.incremental import IncrementalAdmission
from vllm_slo.core.admission.program import (
    Capacity,
    can_start_early,
    plan_admission,
    work_tokens,
)
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand

SIX_A_UNIT = StepTimeModel(((0.0, 0.0, 0.0), (1 / 6, 0.0, 0.0)), max_tokens=1000)
PLENTY = Capacity(blocks=1e6, seats=1000, max_step_tokens=1000)


def figure_3(count: int) -> list[Demand]:
    return [Demand(f"new{i}", 6.0, 6, 1.0, 1) for i in range(count)]


def test_figure_3_three_of_four_bursting_prompts_are_admitted() -> None:
    plan = plan_admission(0.0, figure_3(4), [], {1.0: 3}, SIX_A_UNIT, PLENTY)
    assert len(plan.admitted) == 3
    assert len(plan.refused) == 1


def test_figure_5_dynamic_batches_admit_what_a_fixed_batch_cannot() -> None:
    # Slope and offset as on a roofline: a step of twice the time holds more than twice the tokens.
    roofline = StepTimeModel(((0.0, 0.0, 0.0), (0.1, 0.0, 0.5)), max_tokens=1000)
    requests = [
        Demand("r1", 2.0, 9, 1.0, 1),
        Demand("r2", 4.0, 3, 4.0, 1),
        Demand("r3", 9.0, 10, 4.0, 1),
    ]
    fixed = Capacity(blocks=100, seats=100, max_step_tokens=5)
    dynamic = Capacity(blocks=100, seats=100, max_step_tokens=1000)
    assert len(plan_admission(0.0, requests, [], {}, roofline, fixed).admitted) < 3
    assert plan_admission(0.0, requests, [], {}, roofline, dynamic).admitted == ("r1", "r2", "r3")


class Oracle:
    """Every subset, checked against the definition; shares no code with the product."""

    def __init__(
        self,
        new: list[Demand],
        committed: list[Demand],
        decoding: dict[float, int],
        model: StepTimeModel,
        capacity: Capacity,
        context: int,
    ) -> None:
        self.new, self.committed, self.decoding = new, committed, decoding
        self.model, self.capacity, self.context = model, capacity, context
        self.weight = self._weights(context)

    def _weights(self, context: int) -> dict[float, float]:
        """Cost of a decode token in prefill tokens: the KV it reads comes on top."""
        running = sum(self.decoding.values())
        each = context / running if running else 0.0
        values: dict[float, list[float]] = {}
        for demand in (*self.new, *self.committed):
            values.setdefault(demand.tpot_s, []).append(demand.context_tokens)
        for tpot, count in self.decoding.items():
            values.setdefault(tpot, []).extend([each] * count)
        most = min(self.model.max_tokens, self.capacity.max_step_tokens)
        slope = max(term[0] for term in self.model.terms) or self.model.predict_s(most) / most
        return {
            tpot: 1 + self.model.kv_s * sum(rows) / max(len(rows), 1) / slope
            for tpot, rows in values.items()
        }

    def rate(self, decoding: dict[float, int]) -> float:
        return sum(count * self.weight[tpot] / tpot for tpot, count in decoding.items())

    def tokens_in(self, seconds: float) -> float:
        best = float(min(self.model.max_tokens, self.capacity.max_step_tokens))
        for slope, _, offset in self.model.terms:
            if seconds < offset:
                return 0.0
            if slope > 0:
                best = min(best, (seconds - offset) / slope)
        return math.floor(best + 1e-9) * self.capacity.token_share

    def step(self, decoding: dict[float, int]) -> float:
        most = min(self.model.max_tokens, self.capacity.max_step_tokens)
        tightest = min((tpot for tpot, count in decoding.items() if count), default=math.inf)
        return min(tightest, self.model.predict_s(most))

    def processed(self, until: float, decoding: dict[float, int]) -> float:
        step = self.step(decoding)
        whole = math.floor(until / step + 1e-9)
        return whole * self.tokens_in(step) + self.tokens_in(max(until - whole * step, 0.0))

    def paid(self, budget: float, decoding: dict[float, int]) -> float:
        """A tight instant cuts a step in two and pays its fixed cost twice."""
        step = self.step(decoding)
        whole, half = self.tokens_in(step), self.tokens_in(step / 2)
        return budget if budget >= whole else budget - max(whole - 2 * half, 0.0)

    def budgets(self, chosen: tuple[Demand, ...]) -> list[float]:
        """Budget left at each committed or chosen deadline, in order; -inf: unsustainable."""
        line = sorted(
            [(d.deadline_s, 0, d.request_id, d) for d in self.committed]
            + [(d.deadline_s, 1, d.request_id, d) for d in chosen],
            key=lambda row: row[:3],
        )
        stops = sorted({d.deadline_s for d in (*self.new, *self.committed)})
        decoding = dict(self.decoding)
        now, result = 0.0, []
        budget = self.paid(0.0, decoding) if any(decoding.values()) else 0.0
        for stop in stops:
            until = max(stop, 0.0)
            budget += self.processed(until, decoding) - self.processed(now, decoding)
            budget -= self.rate(decoding) * (until - now)
            now = until
            for _, is_new, _, demand in (row for row in line if row[0] == stop):
                budget = self.paid(budget - demand.prefill_tokens, decoding)
                decoding[demand.tpot_s] = decoding.get(demand.tpot_s, 0) + 1
                result.append(budget)
                if is_new:
                    step = self.step(decoding)
                    if self.tokens_in(step) < self.rate(decoding) * step - 1e-6:
                        result.append(-math.inf)
        return result

    def feasible(self, chosen: tuple[Demand, ...]) -> bool:
        if not chosen:
            return True
        if sum(d.blocks for d in chosen) > self.capacity.blocks + 1e-6:
            return False
        if len(chosen) > self.capacity.seats:
            return False
        return all(budget >= -2e-6 for budget in self.budgets(chosen))

    def best_value(self) -> float:
        return max(
            sum(d.value for d in chosen)
            for size in range(len(self.new) + 1)
            for chosen in itertools.combinations(self.new, size)
            if self.feasible(chosen)
        )


def random_case(rng: random.Random) -> tuple[Oracle, list[Demand], list[Demand]]:
    tiers = rng.sample([0.3, 0.5, 1.0, 2.0], rng.randint(1, 3))
    model = StepTimeModel(
        (
            (0.0, 0.0, rng.choice([0.0, 0.1, 0.2])),
            (rng.uniform(0.01, 0.1), 0.0, rng.uniform(0, 0.1)),
        ),
        kv_s=rng.choice([0.0, 1e-4]),
        max_tokens=rng.choice([16, 64, 1000]),
    )

    def one(name: str) -> Demand:
        return Demand(
            name,
            rng.uniform(0.1, 6.0),
            rng.randint(1, 30),
            rng.choice(tiers),
            rng.randint(1, 10),
            rng.choice([1.0, 1.0, 2.0, 0.5, 3.7]),
            rng.randint(0, 100),
        )

    new = [one(f"n{i}") for i in range(rng.randint(1, 7))]
    committed = [one(f"c{i}") for i in range(rng.randint(0, 2))]
    decoding = {tpot: rng.randint(0, 2) for tpot in tiers}
    capacity = Capacity(rng.randint(5, 60), rng.randint(1, 7), 1000, rng.choice([1.0, 0.9]))
    context = 50 * sum(decoding.values())
    return Oracle(new, committed, decoding, model, capacity, context), new, committed


@pytest.mark.slow
def test_admission_equals_the_best_of_all_subsets() -> None:
    rng = random.Random(20250922)
    partial = 0
    for case in range(3000):
        oracle, new, committed = random_case(rng)
        if not all(budget >= 0 for budget in oracle.budgets(())):
            continue  # running promises that are already broken: see the test below
        plan = plan_admission(
            0.0,
            new,
            committed,
            oracle.decoding,
            oracle.model,
            oracle.capacity,
            decoding_context=50 * sum(oracle.decoding.values()),
        )
        chosen = tuple(d for d in new if d.request_id in plan.admitted)
        assert oracle.feasible(chosen), (case, chosen)
        assert sum(d.value for d in chosen) == pytest.approx(oracle.best_value()), case
        partial += 0 < len(chosen) < len(new)
    assert partial > 800  # the cases are neither trivial nor hopeless


def test_a_broken_promise_admits_nobody_who_would_make_it_worse() -> None:
    late = Demand("late", 0.5, 100, 1.0, 1)
    earlier = Demand("earlier", 0.4, 1, 1.0, 1)
    plan = plan_admission(0.0, [earlier], [late], {}, SIX_A_UNIT, PLENTY)
    assert plan.admitted == ()


def test_an_impossible_deadline_is_refused_and_hurts_nobody() -> None:
    dead = Demand("dead", -5.0, 6, 1.0, 1)
    live = Demand("live", 6.0, 6, 1.0, 1)
    plan = plan_admission(0.0, [dead, live], [], {}, SIX_A_UNIT, PLENTY)
    assert plan.admitted == ("live",)
    assert plan.refused == {"dead": "prefill"}
    assert plan.retry_after_s["dead"] > 0


def test_value_decides_between_equals() -> None:
    cheap = [Demand(f"cheap{i}", 1.0, 3, math.inf, 1, value=1.0) for i in range(2)]
    dear = Demand("dear", 1.0, 6, math.inf, 1, value=2.5)
    plan = plan_admission(0.0, [*cheap, dear], [], {}, SIX_A_UNIT, PLENTY)
    assert plan.admitted == ("dear",)


@pytest.mark.parametrize(
    ("capacity", "decoding", "reason"),
    [
        (Capacity(0.0, 10, 1000), {}, "memory"),
        (Capacity(10.0, 0, 1000), {}, "seats"),
        (PLENTY, {1.0: 6}, "decode"),
        (PLENTY, {1.0: 5}, "prefill"),
    ],
)
def test_the_refusal_names_what_binds(
    capacity: Capacity, decoding: dict[float, int], reason: str
) -> None:
    one = Demand("one", 3.0, 10, 1.0, 1)
    plan = plan_admission(0.0, [one], [], decoding, SIX_A_UNIT, capacity)
    assert plan.refused == {"one": reason}


def test_no_ttft_needs_only_a_sustainable_decode() -> None:
    endless = Demand("endless", math.inf, 10_000, 1.0, 1)
    assert plan_admission(0.0, [endless], [], {1.0: 4}, SIX_A_UNIT, PLENTY).admitted == ("endless",)
    assert plan_admission(0.0, [endless], [], {1.0: 6}, SIX_A_UNIT, PLENTY).admitted == ()


def test_no_tpot_takes_no_decode_budget() -> None:
    new = [Demand(f"n{i}", 6.0, 6, math.inf, 1) for i in range(7)]
    assert len(plan_admission(0.0, new, [], {}, SIX_A_UNIT, PLENTY).admitted) == 6


def test_many_tiers_are_merged_towards_the_tighter() -> None:
    new = [Demand(f"n{i}", 6.0, 1, 1.0 + 0.1 * i, 1) for i in range(12)]
    plan = plan_admission(0.0, new, [], {}, SIX_A_UNIT, PLENTY)
    assert 0 < len(plan.admitted) <= 12
    rate = sum(1 / d.tpot_s for d in new if d.request_id in plan.admitted)
    assert rate <= 6.0 + 1e-6


def test_shared_ids_are_an_error() -> None:
    one = Demand("same", 1.0, 1, 1.0, 1)
    with pytest.raises(ValueError, match="share one request id"):
        plan_admission(0.0, [one], [one], {}, SIX_A_UNIT, PLENTY)


@settings(max_examples=examples(150))
@given(st.integers(0, 2**32), st.floats(1.0, 3.0), st.floats(1.0, 3.0), st.integers(0, 3))
def test_more_capacity_never_loses_value(seed: int, share: float, room: float, seats: int) -> None:
    """Speed is not asserted: a faster step that is cut may lose more (`_cut` assumes halves)."""
    oracle, new, committed = random_case(random.Random(seed))
    more = oracle.capacity
    less = replace(
        more,
        blocks=more.blocks / room,
        seats=max(more.seats - seats, 0),
        token_share=more.token_share / share,
    )

    def value(capacity: Capacity) -> float:
        plan = plan_admission(0.0, new, committed, oracle.decoding, oracle.model, capacity)
        return sum(d.value for d in new if d.request_id in plan.admitted)

    # Where promises are behind already, new ones are judged by whether they make it worse.
    behind = Oracle(new, committed, oracle.decoding, oracle.model, less, oracle.context)
    if all(budget >= 0 for budget in behind.budgets(())):
        assert value(less) <= value(more) + 1e-6


def test_early_start_is_refused_only_while_others_need_the_tokens() -> None:
    pending = [Demand("a", 6.0, 6, 1.0, 1), Demand("b", 6.0, 6, 1.0, 1)]
    assert not can_start_early(2.0, 1.0, pending, {1.0: 3}, SIX_A_UNIT, PLENTY)
    assert can_start_early(2.0, 1.0, pending[:1], {1.0: 3}, SIX_A_UNIT, PLENTY)
    assert can_start_early(2.0, 1.0, [], {1.0: 6}, SIX_A_UNIT, PLENTY)
    assert can_start_early(2.0, math.inf, pending, {1.0: 3}, SIX_A_UNIT, PLENTY)


def test_long_prompts_cost_their_attention() -> None:
    model = StepTimeModel(((0.0, 0.0, 0.0), (1e-3, 0.0, 0.0)), pair_s=1e-6)
    assert work_tokens(model, 100) == pytest.approx(100 * 1.05)
    assert work_tokens(model, 100, 1000) == pytest.approx(100 * 2.05)
    assert work_tokens(SIX_A_UNIT, 100, 1000) == 100


@settings(max_examples=examples(400))
@given(st.integers(0, 2**32))
def test_incremental_admission_judges_one_request_as_the_program_does(seed: int) -> None:
    rng = random.Random(seed)
    oracle, new, committed = random_case(rng)
    admission = IncrementalAdmission(
        committed,
        oracle.decoding,
        oracle.model,
        oracle.capacity,
        decoding_context=oracle.context,
    )
    now_s = rng.choice([0.0, 0.0, 0.7])
    for demand in new:
        plan = plan_admission(
            now_s,
            [demand],
            committed,
            oracle.decoding,
            oracle.model,
            oracle.capacity,
            decoding_context=oracle.context,
        )
        verdict = admission.judge(demand, now_s)
        assert verdict.promised == bool(plan.admitted)
        assert verdict.reason == plan.refused.get(demand.request_id)
        assert verdict.retry_after_s == pytest.approx(plan.retry_after_s.get(demand.request_id, 0))


def test_more_tiers_than_the_table_holds_are_judged_the_same() -> None:
    committed = [Demand(f"c{i}", 1.0 + i, 20, 0.02 * (i + 1), 1) for i in range(9)]
    model = StepTimeModel(((0.0, 0.0, 0.01), (1e-3, 0.0, 0.005)), kv_s=1e-6)
    admission = IncrementalAdmission(
        committed, {0.3: 2, 0.5: 1}, model, PLENTY, decoding_context=900
    )
    verdicts = set()
    for tokens in (10, 500, 1500, 5000):
        demand = Demand("n", 2.0, tokens, 0.07, 1)
        plan = plan_admission(
            0.0, [demand], committed, {0.3: 2, 0.5: 1}, model, PLENTY, decoding_context=900
        )
        assert admission.judge(demand, 0.0).promised == bool(plan.admitted)
        verdicts.add(bool(plan.admitted))
    assert verdicts == {True, False}
