# SPDX-License-Identifier: Apache-2.0
"""One step's grants: algorithm 2 by hand, a brute-force oracle, and the rules on random steps."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_slo.core.batching.decodes import limit_of
from vllm_slo.core.batching.prompt_pace import SMALLEST_CHUNK, PromptPace, prompt_pace
from vllm_slo.core.batching.step import (
    StepLimits,
    plan_step,
)
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel, chunk_pairs
from vllm_slo.core.types import INFINITY, BestEffortView, DecodeView, PrefillView, StepPlan

SIX_A_UNIT = StepTimeModel(((0.0, 0.0, 0.0), (1 / 6, 0.0, 0.0)), max_tokens=1000)
"""Figure 3's engine: six tokens per time unit, whatever they are."""

WIDE = StepLimits(max_step_tokens=1000)


def on_schedule(name: str, start_s: float, tpot_s: float = 1.0, tokens: int = 1) -> DecodeView:
    return DecodeView(name, start_s + tpot_s, start_s + tpot_s, 1, tpot_s, tokens)


def never(_: PrefillView) -> bool:
    return False


# --- by hand -------------------------------------------------------------------------------------


def test_figure_3_leaves_three_tokens_a_unit_for_prefill() -> None:
    prompts = [PrefillView(f"new{i}", 6.0, 6, 1.0) for i in range(3)]
    remaining = {p.request_id: p.remaining_tokens for p in prompts}
    for start in range(6):
        decodes = [on_schedule(f"old{i}", float(start)) for i in range(3)]
        waiting = [
            p._replace(remaining_tokens=left, context_tokens=6 - left)
            for p in prompts
            if (left := remaining[p.request_id])
        ]
        plan = plan_step(float(start), decodes, waiting, [], SIX_A_UNIT, WIDE, may_start=never)
        assert plan.limit_s == 1.0
        assert plan.predicted_s <= 1.0
        assert [plan.tokens[d.request_id] for d in decodes] == [1, 1, 1]
        # 18 tokens are due in 6 units: the budget of 3 a unit is spent to the last one.
        assert sum(plan.tokens[p.request_id] for p in waiting) == 3
        for p in waiting:
            remaining[p.request_id] -= plan.tokens[p.request_id]
    assert set(remaining.values()) == {0}


def test_two_tiers_take_turns_as_in_algorithm_2() -> None:
    """TPOT 1 in each batch, TPOT 2 in every second one; the rest of six tokens is prefill."""
    backlog = PrefillView("p", 0.0, 10_000, INFINITY, 1)
    budgets = []
    for start, due in zip(range(4), (2.0, 2.0, 4.0, 4.0), strict=True):
        decodes = [on_schedule("tight", float(start)), DecodeView("loose", due, due, 1, 2.0)]
        plan = plan_step(float(start), decodes, [backlog], [], SIX_A_UNIT, WIDE)
        budgets.append((plan.tokens["tight"], plan.tokens["loose"], plan.tokens["p"]))
    assert budgets == [(1, 0, 5), (1, 1, 4), (1, 0, 5), (1, 1, 4)]


def test_decodes_that_have_time_do_not_make_a_short_tpot_give_up() -> None:
    """All twelve would take two units, but nine of them may wait for later steps."""
    tight = [on_schedule(f"tight{i}", 0.0) for i in range(3)]
    loose = [DecodeView(f"loose{i}", 9.0, 9.0, 1, 9.0) for i in range(9)]
    plan = plan_step(0.0, [*loose, *tight], [], [], SIX_A_UNIT, WIDE)
    assert plan.limit_s == 1.0
    assert [plan.tokens[one.request_id] for one in tight] == [1, 1, 1]
    assert plan.token_budget == 6


@pytest.mark.parametrize(("spare_s", "left_out"), [(2.0, 0), (1.9, 6)])
def test_no_decode_is_left_out_for_a_window_that_drafts_surely_keep_later(
    spare_s: float, left_out: int
) -> None:
    """All twelve take two units, which the short TPOTs may surely lose, or not quite."""
    tight = [on_schedule(f"tight{i}", 0.0)._replace(spare_s=spare_s) for i in range(3)]
    loose = [DecodeView(f"loose{i}", 9.0, 9.0, 1, 9.0) for i in range(9)]
    plan = plan_step(0.0, [*loose, *tight], [], [], SIX_A_UNIT, WIDE)
    assert [plan.tokens[one.request_id] for one in tight] == [1, 1, 1]
    assert plan.token_budget == 12 - left_out


def test_what_deadlines_do_not_ask_for_now_leaves_room_for_patient_decodes() -> None:
    """The loose decode may wait, but 12 tokens by t = 6 leave room for it at once."""
    decodes = [on_schedule("tight", 0.0), DecodeView("loose", 2.0, 2.0, 1, 2.0)]
    plan = plan_step(0.0, decodes, [PrefillView("p", 6.0, 12, 1.0)], [], SIX_A_UNIT, WIDE)
    assert plan.tokens == {"tight": 1, "loose": 1, "p": 4}


def test_patient_decodes_that_verify_several_tokens_are_spared_room_for_all_of_them() -> None:
    decodes = [on_schedule("tight", 0.0), DecodeView("loose", 2.0, 2.0, 1, 2.0, tokens=3)]
    plan = plan_step(0.0, decodes, [PrefillView("p", 60.0, 60, 1.0)], [], SIX_A_UNIT, WIDE)
    assert plan.tokens == {"tight": 1, "loose": 3, "p": 2}


def test_prefills_are_served_in_the_order_given_and_leftovers_go_to_best_effort() -> None:
    prefills = [PrefillView("first", 9.0, 2, 1.0), PrefillView("second", 10.0, 2, 1.0)]
    others = [BestEffortView("old", 0.0, 1, True, 5), BestEffortView("new", 1.0, 9, False)]
    plan = plan_step(0.0, [on_schedule("d", 0.0)], prefills, others, SIX_A_UNIT, WIDE)
    assert plan.tokens == {"d": 1, "first": 2, "second": 2, "old": 1, "new": 0}
    assert plan.token_budget == 6
    assert plan.predicted_s == pytest.approx(1.0)


def test_the_tightest_promise_sets_the_step() -> None:
    decodes = [on_schedule("a", 0.0, 2.0), on_schedule("b", 0.0, 0.5), on_schedule("c", 0.0, 1.0)]
    plan = plan_step(0.0, decodes, [PrefillView("p", 0.0, 99, 1.0)], [], SIX_A_UNIT, WIDE)
    # A unit for three tokens: b must be in it, the others may wait and the late prefill may not.
    assert plan.limit_s == 0.5
    assert plan.tokens["b"] == 1
    assert plan.token_budget == 3


def test_nothing_running_takes_the_whole_engine() -> None:
    plan = plan_step(0.0, [], [PrefillView("p", 1000.0, 5000, 1.0)], [], SIX_A_UNIT, WIDE)
    assert plan.tokens == {"p": 1000}
    assert plan.limit_s == INFINITY


def test_nothing_at_all_is_an_empty_step() -> None:
    assert plan_step(0.0, [], [], [], SIX_A_UNIT, WIDE) == StepPlan(0, {}, 0.0, INFINITY)


def test_a_step_is_cut_where_a_prefill_ends_in_time_only_so() -> None:
    """A full step of 1,000 tokens would end at 167; six tokens due at 1.5 make it end there."""
    prefills = [PrefillView("urgent", 1.5, 6, 1.0), PrefillView("later", 500.0, 900, 1.0)]
    plan = plan_step(0.0, [], prefills, [], SIX_A_UNIT, WIDE)
    assert plan.limit_s == 1.5
    assert plan.tokens == {"urgent": 6, "later": 3}
    assert plan.predicted_s <= 1.5


def test_a_deadline_that_cannot_be_met_cuts_nothing() -> None:
    prefills = [PrefillView("lost", 0.5, 6, 1.0), PrefillView("later", 500.0, 994, 1.0)]
    plan = plan_step(0.0, [], prefills, [], SIX_A_UNIT, WIDE)
    assert plan.limit_s == INFINITY
    assert plan.token_budget == 1000


def test_all_tokens_of_the_decodes_count_when_a_step_is_cut() -> None:
    """Three for the decode and seven for the prefill take more than 1.5: no cut would help if the
    decode cannot wait."""
    prompt = PrefillView("p", 1.5, 7, 1.0)
    decodes = [DecodeView("d", 2.9, 2.9, 1, 2.9, tokens=3)]
    plan = plan_step(0.0, decodes, [prompt], [], SIX_A_UNIT, WIDE)
    assert (plan.limit_s, plan.tokens) == (2.9, {"d": 3, "p": 7})
    decodes = [DecodeView("d", 3.0, 3.0, 1, 3.0, tokens=3)]
    plan = plan_step(0.0, decodes, [prompt], [], SIX_A_UNIT, WIDE)
    assert (plan.limit_s, plan.tokens) == (1.5, {"d": 0, "p": 7})


def test_a_limit_short_by_a_rounding_error_drops_no_decode() -> None:
    due_s = 1.0 - 5e-10  # six decodes take 1.0
    decodes = [DecodeView(f"d{i}", due_s, due_s, 1, 1.0) for i in range(6)]
    plan = plan_step(0.0, decodes, [], [], SIX_A_UNIT, WIDE)
    assert plan.limit_s == due_s
    assert set(plan.tokens.values()) == {1}


def test_a_chunk_granted_in_two_goes_costs_what_it_costs_in_one() -> None:
    """Tokens spared for cheap decodes leave time for more of a chunk whose tokens are dear."""
    model = StepTimeModel(((0.0, 0.0, 0.0), (0.01, 0.0, 0.0)), 1e-3, max_tokens=1000, pair_s=1e-5)
    decodes = [on_schedule("tight", 0.0, 4.0)]
    decodes += [DecodeView(f"d{i}", INFINITY, INFINITY, 1, INFINITY) for i in range(20)]
    prompt = PrefillView("p", 500.0, 900, 1.0, 2000)
    plan = plan_step(0.0, decodes, [prompt], [], model, WIDE)

    def time_s(chunk: int) -> float:
        return step_s(model, [*((1, d.context_tokens) for d in decodes), (chunk, 2000)])

    fitting = max(n for n in range(900) if time_s(n) <= 4.0)
    assert plan.tokens == {d.request_id: 1 for d in decodes} | {"p": fitting}
    assert plan.predicted_s == pytest.approx(time_s(fitting), rel=1e-12)


# --- the step limit of one decode ----------------------------------------------------------------


def test_on_schedule_the_limit_is_the_tpot() -> None:
    assert limit_of(3.0, DecodeView("d", 4.0, 10.0, 7, 1.0), 0.1) == 1.0


def test_ahead_of_schedule_all_slack_goes_into_one_step() -> None:
    assert limit_of(3.0, DecodeView("d", 5.5, 11.5, 7, 1.0), 0.1) == 2.5


def test_behind_schedule_the_lateness_is_spread_over_the_window() -> None:
    # 0.7 late with 7 tokens left: each of them 0.1 faster.
    limit = limit_of(3.7, DecodeView("d", 4.0, 10.0, 7, 1.0), 0.1)
    assert limit == pytest.approx(0.9)


def test_a_lost_window_hurries_nobody() -> None:
    assert limit_of(9.9, DecodeView("d", 4.0, 10.0, 7, 1.0), 0.1) == 1.0
    assert limit_of(99.0, DecodeView("d", 4.0, 10.0, 7, 1.0), 0.1) == 1.0


def test_a_tpot_below_the_shortest_step_asks_for_the_shortest() -> None:
    assert limit_of(0.0, DecodeView("d", 0.01, 0.1, 10, 0.01), 0.05) == 0.05


def test_attention_counts_when_judging_whether_a_window_is_lost() -> None:
    """The decodes alone take 1.2 with their query-key pairs, so a window of 1.1 is lost."""
    model = StepTimeModel(((0.0, 0.0, 1.0), (0.0, 0.0, 1.0)), max_tokens=1000, pair_s=0.001)
    late = DecodeView("d", 1.1, 1.1, 1, 5.0, 1, 199)
    assert plan_step(0.0, [late], [], [], model, WIDE).limit_s == 5.0


decode_views = st.builds(
    lambda i, due, more, left, tpot, tokens, context: DecodeView(
        f"d{i}", due, due + more * tpot, left, tpot, tokens, context
    ),
    st.integers(0, 10**9),
    st.floats(-5, 10),
    st.integers(0, 9),
    st.integers(1, 10),
    st.floats(0.05, 5),
    st.integers(1, 4),
    st.integers(1, 500),
)


@given(decode_views, st.floats(-5, 10), st.floats(1e-4, 2))
def test_the_limit_is_never_below_what_any_step_takes(
    decode: DecodeView, start_s: float, shortest_s: float
) -> None:
    assert limit_of(start_s, decode, shortest_s) >= shortest_s - 1e-9


@given(st.floats(0.05, 5), st.integers(1, 10), st.floats(0, 5), st.floats(1e-4, 0.04))
def test_steps_at_the_limit_save_a_late_window(
    tpot_s: float, left: int, late_s: float, shortest_s: float
) -> None:
    """Following the limit, token by token, the window ends in time if it can end in time at all."""
    end_s = left * tpot_s - late_s
    now_s = 0.0
    for place in range(left):
        due_s = end_s - (left - place - 1) * tpot_s
        view = DecodeView("d", due_s, end_s, left - place, tpot_s)
        now_s += limit_of(now_s, view, shortest_s)
    if end_s >= left * shortest_s:
        assert now_s <= end_s + 1e-6
    else:
        assert now_s == pytest.approx(left * tpot_s)  # given up: its pace, no faster


# --- algorithm 2, literally ----------------------------------------------------------------------


def algorithm_2(units: int, tpots: list[int], tokens_per_batch: int) -> int:
    """Prefill budget of ``units`` batches of one unit each (its tightest TPOT is 1)."""
    queue = [(0, i) for i in range(len(tpots))]
    total = 0
    for i in range(units):
        budget = tokens_per_batch
        while queue[0][0] <= i and budget > 0:
            due, who = heapq.heappop(queue)
            budget -= 1
            heapq.heappush(queue, (due + tpots[who], who))
        total += budget
    return total


def prefill_of_steps(units: int, tpots: list[int]) -> int:
    """The same with ``plan_step`` and an endless late prefill; every token must be on time."""
    produced = [0] * len(tpots)
    total = 0
    for now in range(units):
        decodes = [
            DecodeView(f"d{i}", (produced[i] + 1.0) * t, 1000.0 * t, 1000 - produced[i], float(t))
            for i, t in enumerate(tpots)
        ]
        backlog = [PrefillView("p", -1.0, 10**6, INFINITY, 1)]
        plan = plan_step(float(now), decodes, backlog, [], SIX_A_UNIT, WIDE)
        assert plan.limit_s == 1.0
        total += plan.tokens["p"]
        for i, tpot in enumerate(tpots):
            produced[i] += plan.tokens[f"d{i}"]
            assert produced[i] >= (now + 1) // tpot
    return total


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=0, max_size=5))
def test_a_backlog_gets_the_prefill_budget_of_algorithm_2(others: list[int]) -> None:
    tpots = [1, *others]
    # Twelve units hold whole periods of every TPOT: when in its period one decodes is no matter.
    assert prefill_of_steps(12, tpots) == algorithm_2(12, tpots, 6)


# --- brute force ---------------------------------------------------------------------------------

tiny_models = st.builds(
    lambda low, k, high, kv, pair: StepTimeModel(
        ((0.0, 0.0, low), (k, 0.0, high)), kv, max_tokens=64, pair_s=pair
    ),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.05, 1 / 6, 0.25]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([0.0, 0.002]),
)


def step_s(model: StepTimeModel, chunks: list[tuple[int, int]]) -> float:
    """Time of a batch given as (tokens, context) per request."""
    used = [(n, c) for n, c in chunks if n]
    return model.predict_s(
        sum(n for n, _ in used),
        sum(c for _, c in used),
        pairs=sum(chunk_pairs(n, c) for n, c in used),
    )


@settings(max_examples=examples(100))
@given(
    model=tiny_models,
    tpots=st.lists(st.sampled_from([0.4, 0.8, 1.0]), max_size=3),
    prompts=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=2),
    others=st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(1, 4)), max_size=2),
    max_tokens=st.integers(1, 9),
)
def test_no_allotment_within_the_limit_serves_an_earlier_one_better(
    model: StepTimeModel,
    tpots: list[float],
    prompts: list[tuple[int, int]],
    others: list[tuple[int, bool, int]],
    max_tokens: int,
) -> None:
    """All decodes and prefills late: the grants are the best ones, in serving order.

    Oracle: every allotment of tokens, compared decode by decode, then prefill by prefill.
    """
    decodes = [DecodeView(f"d{i}", i - 9.0, -1.0, 1, t, 1, 3) for i, t in enumerate(tpots)]
    prefills = [PrefillView(f"p{i}", -1.0, n, 1.0, c) for i, (n, c) in enumerate(prompts)]
    rest = [BestEffortView(f"b{i}", 0.0, n, whole, c) for i, (n, whole, c) in enumerate(others)]
    plan = plan_step(0.0, decodes, prefills, rest, model, StepLimits(max_tokens))
    views: list[Any] = [*decodes, *prefills, *rest]
    choices = [
        *[(0, 1) for _ in decodes],
        *[range(p.remaining_tokens + 1) for p in prefills],
        *[(0, b.remaining_tokens) if b.decoding else range(b.remaining_tokens + 1) for b in rest],
    ]
    got = tuple(plan.tokens[v.request_id] for v in views)
    contexts = [v.context_tokens for v in views]
    best = max(
        one
        for one in itertools.product(*choices)
        if sum(one) <= max_tokens
        and step_s(model, list(zip(one, contexts, strict=True))) <= plan.limit_s
    )
    if not any(best):  # then the step is best effort's, whatever the limit
        best = max(one for one in itertools.product(*choices) if sum(one) <= max_tokens)
    assert got == best


# --- rules on random steps -----------------------------------------------------------------------


@dataclass
class Case:
    """The arguments of one call."""

    decodes: list[DecodeView]
    prefills: list[PrefillView]
    best_effort: list[BestEffortView]
    model: StepTimeModel
    limits: StepLimits
    early: frozenset[str] = field(default_factory=frozenset)

    def plan(self, **changes: Any) -> StepPlan:
        one = replace(self, **changes)
        return plan_step(
            0.0,
            one.decodes,
            one.prefills,
            one.best_effort,
            one.model,
            one.limits,
            may_start=lambda p: p.request_id in one.early,
        )

    def pace(self) -> PromptPace:
        answers = [b for b in self.best_effort if b.decoding]
        shape = BatchShape.of(
            [
                *((d.tokens, d.context_tokens) for d in self.decodes),
                *((b.remaining_tokens, b.context_tokens) for b in answers),
            ]
        )
        prompts = [b for b in self.best_effort if not b.decoding]
        load = shape.tokens, shape.context_tokens, shape.pairs
        return prompt_pace(0.0, load, self.prefills, prompts, self.model)

    def by_id(self) -> dict[str, Any]:
        return {v.request_id: v for v in (*self.decodes, *self.flexible())}

    def promised(self) -> list[DecodeView | PrefillView]:
        return [*self.decodes, *self.prefills]

    def flexible(self) -> list[PrefillView | BestEffortView]:
        """Those whose tokens of a step the planner chooses."""
        return [*self.prefills, *self.best_effort]

    def predict_s(self, tokens: dict[str, int]) -> float:
        views = self.by_id()
        return step_s(self.model, [(n, views[i].context_tokens) for i, n in tokens.items()])


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    """Any step: with and without objectives, on time, late, hopeless, in all mixtures."""
    second = st.one_of(st.floats(-3, 20), st.sampled_from([0.0, 1.0, 2.0]))
    tpots = st.one_of(st.floats(0.02, 3), st.sampled_from([0.1, 1.0, INFINITY]))
    context = st.one_of(st.just(0), st.integers(1, 800))
    decodes = []
    for i in range(draw(st.integers(0, 6))):
        tpot, left = draw(tpots), draw(st.integers(1, 10))
        due = INFINITY if tpot == INFINITY else draw(second)
        end = due if tpot == INFINITY else due + (left - 1) * tpot
        left = 1 if tpot == INFINITY else left
        tokens = draw(st.sampled_from([1, 1, 1, 4]))
        decodes.append(DecodeView(f"d{i}", due, end, left, tpot, tokens, 1 + draw(context)))
    deadlines = draw(st.lists(st.one_of(second, st.just(INFINITY)), max_size=5))
    prefills = [
        PrefillView(
            f"p{i}", due, draw(st.integers(1, 700)), draw(tpots), draw(context), draw(st.booleans())
        )
        for i, due in enumerate(sorted(deadlines))
    ]
    best_effort = []
    for i in range(draw(st.integers(0, 5))):
        whole = draw(st.booleans())
        wanted = draw(st.integers(1, 4)) if whole else draw(st.integers(1, 900))
        starts = not whole and draw(st.booleans())
        best_effort.append(
            BestEffortView(f"b{i}", 0.0, wanted, whole, draw(context) + whole, starts=starts)
        )
    model = StepTimeModel(
        ((0.0, 0.0, draw(st.floats(0, 0.3))), (draw(st.floats(1e-5, 0.02)), 0.0, 0.01)),
        draw(st.sampled_from([0.0, 1e-5])),
        draw(st.sampled_from([500, 4096])),
        draw(st.sampled_from([0.0, 1e-6])),
    )
    limits = StepLimits(
        draw(st.integers(24, 1200)),
        draw(st.sampled_from([0, 0, 1, 30])),
        draw(st.sampled_from([INFINITY, 0.05, 0.5])),
        draw(st.sampled_from([1 << 30, 3, 1, 0])),
    )
    early = draw(st.sets(st.sampled_from([p.request_id for p in prefills]))) if prefills else ()
    return Case(decodes, prefills, best_effort, model, limits, frozenset(early))


MANY = settings(max_examples=examples(120))


@MANY
@given(cases())
def test_every_request_gets_a_sane_grant(case: Case) -> None:
    plan = case.plan()
    views = case.by_id()
    assert set(plan.tokens) == set(views)
    assert sum(plan.tokens.values()) == plan.token_budget <= case.limits.max_step_tokens
    for one in case.decodes:
        assert plan.tokens[one.request_id] in (0, one.tokens)
    for other in case.flexible():
        assert 0 <= plan.tokens[other.request_id] <= other.remaining_tokens
        if isinstance(other, BestEffortView) and other.decoding:
            assert plan.tokens[other.request_id] in (0, other.remaining_tokens)
    assert not math.isnan(plan.limit_s)
    assert plan.limit_s > 0
    expected = case.predict_s(plan.tokens) if plan.token_budget else 0.0
    assert plan.predicted_s == pytest.approx(expected, rel=1e-12)
    assert math.isfinite(plan.predicted_s)


def urgent(case: Case, plan: StepPlan) -> list[DecodeView]:
    """Decodes whose next token would be late after one more step."""
    longest = case.model.predict_s(min(case.limits.max_step_tokens, case.model.max_tokens))
    next_end = 2 * min(plan.limit_s, longest)
    return [d for d in case.decodes if d.due_s < next_end - 1e-9]


@MANY
@given(cases())
def test_a_step_keeps_its_limit_unless_its_urgent_decodes_alone_break_it(case: Case) -> None:
    plan = case.plan()
    must = {d.request_id: d.tokens for d in urgent(case, plan)}
    assert all(plan.tokens[i] == n for i, n in must.items())  # 24 tokens hold them all
    if not any(plan.tokens[v.request_id] for v in case.promised()):
        return  # an otherwise empty step is best effort's
    if case.predict_s(must) > plan.limit_s:
        assert {i: n for i, n in plan.tokens.items() if n} == must
    else:
        assert plan.predicted_s <= plan.limit_s


@MANY
@given(cases())
def test_seats_are_respected(case: Case) -> None:
    plan = case.plan()
    starting = [v for v in case.flexible() if v.starts and plan.tokens[v.request_id]]
    assert len(starting) <= case.limits.seats


@MANY
@given(cases())
def test_best_effort_takes_nothing_from_promises_but_the_kept_share(case: Case) -> None:
    without = case.plan(best_effort=[])
    held = {p.request_id for p in case.prefills if ends_later(case, without, p)}
    if {name for name, tokens in without.tokens.items() if tokens} <= held:
        return  # who is held back begins only where the step would be empty otherwise
    paces = (case.pace(), replace(case, best_effort=[]).pace())
    if min(pace.promised for pace in paces) < sum(p.remaining_tokens for p in case.prefills):
        return  # they are spread over the steps that there are, and others make these longer
    free = case.plan(limits=replace(case.limits, best_effort_tokens=0))
    promised = [v.request_id for v in case.promised()]
    assert free.limit_s == without.limit_s
    assert [free.tokens[i] for i in promised] == [without.tokens[i] for i in promised]
    kept = case.plan()
    lost = sum(without.tokens.values()) - sum(kept.tokens[i] for i in promised)
    whole = max((d.tokens for d in case.decodes), default=1) - 1  # a decode is not split
    if case.model.kv_s == 0.0 and case.model.pair_s == 0.0 and case.limits.seats > 10:
        wanted = sum(b.remaining_tokens for b in case.best_effort)
        assert lost <= min(case.limits.best_effort_tokens, wanted) + whole


def ends_later(case: Case, plan: StepPlan, prefill: PrefillView) -> bool:
    """Whether the last token of a prefill is to wait: its deadline comes after the next step."""
    longest = case.model.predict_s(min(case.limits.max_step_tokens, case.model.max_tokens))
    step = min(plan.limit_s, longest)
    return prefill.deadline_s >= 2 * step - 1e-9 and prefill.request_id not in case.early


@MANY
@given(cases())
def test_what_could_use_tokens_gets_them_while_there_is_room(case: Case) -> None:
    plan = case.plan()
    used, views = plan.token_budget, case.by_id()
    most = min(case.limits.max_step_tokens, case.model.max_tokens)
    starting = sum(views[i].starts and n > 0 for i, n in plan.tokens.items() if i[0] != "d")

    def more_fits(name: str, tokens: int, limit_s: float) -> bool:
        after = {**plan.tokens, name: plan.tokens[name] + tokens}
        return used + tokens <= most and case.predict_s(after) <= limit_s - 1e-12

    for decode in case.decodes:
        if not plan.tokens[decode.request_id]:
            assert not more_fits(decode.request_id, decode.tokens, plan.limit_s)
    for view in case.flexible():
        left = view.remaining_tokens - plan.tokens[view.request_id]
        seated = not view.starts or plan.tokens[view.request_id]
        if not left or (not seated and starting >= case.limits.seats):
            continue
        pace, prompts = case.pace(), case.prefills
        paced = pace.promised
        if isinstance(view, BestEffortView):
            paced, prompts = pace.best_effort, [b for b in case.best_effort if not b.decoding]
        if view in prompts and sum(plan.tokens[v.request_id] for v in prompts) >= paced:
            continue
        limit_s, chunk = plan.limit_s, 1
        if isinstance(view, BestEffortView):
            limit_s = min(limit_s, case.limits.best_effort_step_s)
            chunk = left if view.decoding else 1
        elif left == 1 and ends_later(case, plan, view):
            continue
        assert not more_fits(view.request_id, chunk, limit_s)


@MANY
@given(cases())
def test_a_prefill_that_may_not_start_early_keeps_exactly_its_last_token(case: Case) -> None:
    plan = case.plan()
    held = [p for p in case.prefills if ends_later(case, plan, p)]
    last = {p.request_id for p in held if p.remaining_tokens == 1}
    if any(tokens for name, tokens in plan.tokens.items() if name not in last):
        assert all(plan.tokens[p.request_id] < p.remaining_tokens for p in held)
    roomy = case.plan(
        decodes=[],
        best_effort=[],
        early=frozenset(),
        limits=StepLimits(10**6),
        model=replace(case.model, max_tokens=10**6),
        prefills=[p._replace(deadline_s=INFINITY) for p in case.prefills],
    )
    last = any(p.remaining_tokens > 1 for p in case.prefills)  # else the step would be empty
    assert all(roomy.tokens[p.request_id] == p.remaining_tokens - last for p in case.prefills)


@MANY
@given(cases())
def test_best_effort_alone_always_makes_progress(case: Case) -> None:
    """However short its steps are to be: somebody who has or finds a seat gets tokens."""
    plan = case.plan(decodes=[], prefills=[])
    able = [b for b in case.best_effort if not b.starts or case.limits.seats]
    if not able:
        assert plan.token_budget == 0
        return
    first = able[0]
    least = min(first.remaining_tokens, SMALLEST_CHUNK, case.limits.max_step_tokens)
    assert plan.tokens[first.request_id] >= (first.remaining_tokens if first.decoding else least)


@MANY
@given(cases())
def test_the_plan_depends_on_nothing_but_its_arguments(case: Case) -> None:
    assert case.plan() == case.plan()
    moved = case.plan(decodes=case.decodes[::-1])
    # Which requests take part is not for the order to decide, unless two are due at one time.
    if len({d.due_s for d in case.decodes}) == len(case.decodes):
        assert moved.tokens == case.plan().tokens


# --- holding back, seats, shares: by hand --------------------------------------------------------


def test_the_last_token_waits_until_the_deadline_comes() -> None:
    model = StepTimeModel(((0.0, 0.0, 1.0), (0.0, 0.0, 1.0)), max_tokens=100)  # any step: 1 s
    for now, granted in ((0.0, 9), (7.0, 9), (8.0, 9), (8.1, 10), (9.0, 10)):
        prompt = PrefillView("p", 10.0, 10, 1.0)
        plan = plan_step(now, [], [prompt], [], model, StepLimits(100), may_start=never)
        assert plan.tokens["p"] == granted, now


def test_a_held_request_gives_its_tokens_to_the_next_one() -> None:
    prefills = [PrefillView("held", 90.0, 4, 1.0), PrefillView("next", 95.0, 9, 1.0)]
    decodes = [on_schedule("d", 0.0)]
    plan = plan_step(0.0, decodes, prefills, [], SIX_A_UNIT, WIDE, may_start=never)
    assert plan.tokens == {"d": 1, "held": 3, "next": 2}


def test_nobody_is_held_back_for_the_sake_of_nothing() -> None:
    prefills = [PrefillView("a", INFINITY, 1, 1.0, 7), PrefillView("b", INFINITY, 1, 1.0, 7)]
    assert plan_step(0.0, [], prefills, [], SIX_A_UNIT, WIDE, may_start=never).token_budget == 2
    more = [*prefills, PrefillView("c", INFINITY, 5, 1.0, 7)]
    plan = plan_step(0.0, [], more, [], SIX_A_UNIT, WIDE, may_start=never)
    assert plan.tokens == {"a": 0, "b": 0, "c": 4}


def test_may_start_is_asked_only_for_prefills_that_would_end_now() -> None:
    asked: list[str] = []

    def may_start(prefill: PrefillView) -> bool:
        asked.append(prefill.request_id)
        return True

    prefills = [PrefillView("ends", 90.0, 2, 1.0), PrefillView("does not", 95.0, 900, 1.0)]
    plan = plan_step(
        0.0, [on_schedule("d", 0.0)], prefills, [], SIX_A_UNIT, WIDE, may_start=may_start
    )
    assert plan.tokens["ends"] == 2
    assert asked == ["ends"]


def test_promises_sit_down_first() -> None:
    prefills = [PrefillView(f"p{i}", 50.0 + i, 1, 1.0, starts=True) for i in range(2)]
    others = [
        BestEffortView("b", 0.0, 1, False, starts=True),
        BestEffortView("runs", 0.0, 1, True, 7),
    ]
    plan = plan_step(0.0, [], prefills, others, SIX_A_UNIT, StepLimits(100, seats=2))
    assert plan.tokens == {"p0": 1, "p1": 1, "b": 0, "runs": 1}
    plan = plan_step(0.0, [], prefills, others, SIX_A_UNIT, StepLimits(100, seats=1))
    assert plan.tokens == {"p0": 1, "p1": 0, "b": 0, "runs": 1}


def test_the_kept_share_comes_before_promised_prefill_and_after_urgent_decodes() -> None:
    limits = StepLimits(1000, best_effort_tokens=2)
    decodes = [on_schedule("d", 0.0)]
    prefills, others = [PrefillView("p", 0.5, 99, 1.0)], [BestEffortView("b", 0.0, 9, False)]
    plan = plan_step(0.0, decodes, prefills, others, SIX_A_UNIT, limits)
    assert plan.tokens == {"d": 1, "p": 3, "b": 2}


def test_the_kept_share_is_used_in_steps_that_promises_made_long() -> None:
    """The step may take 2 for its promises; best effort may not make any longer than 1."""
    limits = StepLimits(1000, best_effort_tokens=2, best_effort_step_s=1.0)
    decodes = [on_schedule("d", 0.0, 2.0)]
    prefills, others = [PrefillView("p", 0.5, 99, 1.0)], [BestEffortView("b", 0.0, 9, False)]
    plan = plan_step(0.0, decodes, prefills, others, SIX_A_UNIT, limits)
    assert plan.tokens == {"d": 1, "p": 9, "b": 2}
    assert plan.predicted_s <= plan.limit_s == 2.0


def test_the_kept_share_is_one_for_all() -> None:
    """The promises end at 4/3: beyond the 1 of best effort there are the two tokens kept."""
    limits = StepLimits(1000, best_effort_tokens=2, best_effort_step_s=1.0)
    prefills = [PrefillView("p", 0.5, 7, 1.0)]
    others = [BestEffortView(f"b{i}", 0.0, 9, False) for i in range(3)]
    plan = plan_step(0.0, [on_schedule("d", 0.0, 2.0)], prefills, others, SIX_A_UNIT, limits)
    assert plan.tokens == {"d": 1, "p": 7, "b0": 2, "b1": 0, "b2": 0}


def test_a_kept_share_that_finds_no_seat_goes_back_to_the_promises() -> None:
    limits = StepLimits(1000, best_effort_tokens=2, seats=0)
    decodes = [on_schedule("d", 0.0), DecodeView("loose", 2.0, 2.0, 1, 2.0)]
    prefills = [PrefillView("p", 0.5, 99, 1.0, 5)]
    others = [BestEffortView("b", 0.0, 9, False, starts=True)]
    plan = plan_step(0.0, decodes, prefills, others, SIX_A_UNIT, limits)
    assert plan.tokens["b"] == 0
    assert plan.token_budget == 6


def test_a_lone_best_effort_prefill_is_not_cut_where_nothing_limits_it() -> None:
    others = [BestEffortView("b", 0.0, 900, False)]
    assert plan_step(0.0, [], [], others, SIX_A_UNIT, WIDE).tokens == {"b": 900}


def test_a_lone_best_effort_prefill_leaves_the_engine_responsive() -> None:
    others = [BestEffortView("b", 0.0, 900, False)]
    # 40 units are 240 tokens; where less than a chunk would fit, it gets one chunk.
    limits = StepLimits(1000, best_effort_step_s=40.0)
    assert plan_step(0.0, [], [], others, SIX_A_UNIT, limits).tokens == {"b": 240}
    limits = StepLimits(1000, best_effort_step_s=0.1)
    assert plan_step(0.0, [], [], others, SIX_A_UNIT, limits).tokens == {"b": SMALLEST_CHUNK}


def test_a_deadline_is_met_by_a_step_without_the_decodes_that_can_wait() -> None:
    """Reading the KV of both decodes would take the step beyond the deadline."""
    model = StepTimeModel(((0.0, 0.0, 0.0), (0.01, 0.0, 0.0)), kv_s=0.001, max_tokens=1000)
    decodes = [
        DecodeView("now", 1.0, 10.0, 10, 1.0, context_tokens=100),
        DecodeView("later", 3.0, 12.0, 10, 1.0, context_tokens=400),
    ]
    prompt = PrefillView("p", 0.5, 30, 1.0)
    plan = plan_step(0.0, decodes, [prompt], [], model, WIDE)
    assert plan.tokens == {"now": 1, "later": 0, "p": 30}
    assert plan.predicted_s <= 0.5


def test_decodes_wait_for_a_deadline_if_the_step_after_it_is_in_time_for_them() -> None:
    """That step decodes all of them and nothing else, though a full one would take ten times as
    long as they can wait."""
    model = StepTimeModel(((0.0, 0.0, 0.0), (0.01, 0.0, 0.0)), max_tokens=1000)
    decodes = [DecodeView(f"d{i}", 1.0, 10.0, 10, 1.0) for i in range(20)]
    prompts = [PrefillView("p", 0.5, 40, 1.0), PrefillView("later", 30.0, 900, 1.0)]
    plan = plan_step(0.0, decodes, prompts, [], model, WIDE)
    assert plan.tokens["p"] == 40 and plan.predicted_s <= 0.5
    late = [decode._replace(due_s=0.6) for decode in decodes]  # they cannot wait for it
    assert plan_step(0.0, late, prompts, [], model, WIDE).predicted_s > 0.5


@pytest.mark.parametrize("drafted", [1, 4])
def test_a_step_ends_at_a_deadline_by_the_exact_attention_of_what_is_due(drafted: int) -> None:
    """The due prompt's 515 pairs and those of the decode take the step to just before it."""
    model = StepTimeModel(((0.0, 0.0, 0.0), (0.01, 0.0, 0.0)), pair_s=0.001, max_tokens=1000)
    decode = DecodeView("d", 1.0, 10.0, 10, 1.0, tokens=drafted, context_tokens=10)
    prompts = [PrefillView("due", 0.0, 5, 1.0, 100), PrefillView("later", 50.0, 900, 1.0)]
    took_s = step_s(model, [(drafted, 10), (5, 100)])
    for spare_s, ends in ((1e-3, True), (-1e-3, False)):
        prompts[0] = prompts[0]._replace(deadline_s=took_s + spare_s)
        plan = plan_step(0.0, [decode], prompts, [], model, WIDE)
        assert (plan.predicted_s <= took_s + spare_s and plan.tokens["due"] == 5) == ends


def test_without_objectives_nothing_limits_the_step() -> None:
    decodes = [DecodeView("d", INFINITY, INFINITY, 1, INFINITY)]
    prefills = [PrefillView("p", INFINITY, 500, INFINITY)]
    others = [BestEffortView("b", 0.0, 900, False)]
    plan = plan_step(0.0, decodes, prefills, others, SIX_A_UNIT, WIDE)
    assert plan.limit_s == INFINITY
    assert plan.tokens == {"d": 1, "p": 500, "b": SMALLEST_CHUNK}
    alone = plan_step(0.0, [], prefills, others, SIX_A_UNIT, WIDE)
    assert alone.tokens == {"p": 500, "b": 500}
