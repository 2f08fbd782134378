# SPDX-License-Identifier: Apache-2.0
"""Prompts are spread over the steps until their deadline, as far as that costs nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_slo.core.batching.prompt_pace import (
    MOST_STEPS,
    SMALLEST_CHUNK,
    SPARED_STEPS,
    UNPACED,
    free_tokens,
    prompt_pace,
)
from vllm_slo.core.batching.step import StepLimits, plan_step
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY, BestEffortView, DecodeView, PrefillView

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.020), (1e-4, 0.0, 0.010)))
"""Up to 100 tokens take 20 ms; each further one 0.1 ms."""


def prompt(tokens: int, deadline_s: float) -> PrefillView:
    return PrefillView("p", deadline_s, tokens, 0.1)


def promised(*prefills: PrefillView, decodes: int = 40, model: StepTimeModel = ROOFLINE) -> int:
    return prompt_pace(0.0, (decodes, 0, 0), prefills, [], model).promised


def test_free_tokens_are_those_that_the_weights_hide() -> None:
    assert free_tokens(ROOFLINE) == pytest.approx(100)
    assert free_tokens(StepTimeModel((ROOFLINE.terms[1], ROOFLINE.terms[0]))) == pytest.approx(100)
    assert free_tokens(StepTimeModel(((0.0, 0.0, 0.01), (1e-4, 0.0, 0.02)))) == 0.0
    assert free_tokens(StepTimeModel(((1e-4, 0.0, 0.02), (1e-4, 0.0, 0.03)))) == 0.0


def test_what_the_steps_until_the_deadline_have_free_is_not_paid_for() -> None:
    """60 free tokens in each of (10 - 2) steps of 20 ms."""
    assert promised(prompt(480, 0.201)) == 60
    assert promised(prompt(481, 0.201)) == 61
    assert promised(prompt(600, 0.201)) == 600 - 480 + 60
    assert promised(prompt(1000, 0.041)) == 1000 + 60  # no step is left: all of it, and more
    assert promised(prompt(1000, -1.0)) == 1000 + 60


def test_a_prompt_is_spread_over_as_many_steps_as_its_work_leaves_time_for() -> None:
    """At once, 1,000 tokens take 114 ms beside 40 decodes. Each step that 60 of them wait for takes
    20 ms and makes the first one 6 ms shorter: 87 ms are enough for six."""
    assert promised(prompt(1000, 0.201)) == 1000 - 6 * 60 + 60


def test_no_prompt_is_spread_over_more_than_so_many_steps() -> None:
    assert promised(prompt(60 * MOST_STEPS + 5, INFINITY)) == 60 + 5
    assert promised(prompt(60 * MOST_STEPS + 5, 1000.0)) == 60 + 5


def test_nothing_waits_where_nothing_is_gained() -> None:
    assert prompt_pace(0.0, (0, 0, 0), [prompt(900, 9.0)], [], ROOFLINE) == UNPACED
    assert promised(prompt(900, 9.0), decodes=100) == 900  # the decodes take all that is free


def test_the_more_prompts_of_best_effort_wait_the_faster_they_are_computed() -> None:
    views = [BestEffortView(f"b{i}", 0.0, 900, False) for i in range(5)]
    for decodes, chunk in ((10, 90), (90, SMALLEST_CHUNK), (500, SMALLEST_CHUNK)):
        for count in range(6):
            pace = prompt_pace(0.0, (decodes, 0, 0), [], views[:count], ROOFLINE)
            assert pace.best_effort == chunk * count
    long = BestEffortView("long", 0.0, 16_000, False)
    assert prompt_pace(0.0, (10, 0, 0), [], [long], ROOFLINE).best_effort == 1000


def test_best_effort_makes_the_steps_fewer_that_a_deadline_leaves() -> None:
    """Two chunks of 64 tokens make a step of 40 + 128 + 60 tokens: 32.8 ms, of which 6 fit."""
    others = [BestEffortView(f"b{i}", 0.0, 900, False) for i in range(2)]
    chunk = max(60, SMALLEST_CHUNK)
    step_s = 0.010 + 1e-4 * (40 + 2 * chunk + 60)
    pace = prompt_pace(0.0, (40, 0, 0), [prompt(600, 0.201)], others, ROOFLINE)
    steps = int(0.201 / step_s) - SPARED_STEPS
    assert pace.promised == 600 - 60 * steps + 60


models = st.builds(
    lambda floor, slope, start: StepTimeModel(((0.0, 0.0, floor), (slope, 0.0, start))),
    st.floats(0.005, 0.05),
    st.floats(1e-5, 1e-3),
    st.floats(0.0, 0.02),
)


def lateness(
    prefills: Iterable[tuple[int, float]], decodes: int, model: StepTimeModel
) -> list[float]:
    """Serve the prompts step by step beside decodes that never end; how late each is."""
    left = [[tokens, deadline_s, INFINITY] for tokens, deadline_s in prefills]
    now_s = 0.0
    for _ in itertools.count():
        waiting = [one for one in left if one[0] > 0]
        if not waiting:
            return [done_s - deadline_s for _, deadline_s, done_s in left]
        views = [PrefillView(f"p{i}", one[1], int(one[0]), 1.0) for i, one in enumerate(waiting)]
        answers = [DecodeView("d", INFINITY, INFINITY, 1, INFINITY, decodes)]
        plan = plan_step(now_s, answers, views, [], model, StepLimits(65_536))
        assert plan.token_budget > decodes, "a prompt waits for ever"
        now_s += model.predict_s(plan.token_budget)
        for one, view in zip(waiting, views, strict=True):
            one[0] -= plan.tokens[view.request_id]
            if one[0] == 0:
                one[2] = now_s
    raise AssertionError


@example(
    [(1113, 0.5)],
    30,
    StepTimeModel(((0.0, 0.0, 0.03125), (0.0004055598715573259, 0.0, 0.0))),
)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.floats(0.02, 5.0)), min_size=1, max_size=5),
    st.integers(1, 300),
    models,
)
def test_a_prompt_that_would_be_in_time_at_once_is_in_time_at_its_pace(
    prefills: list[tuple[int, float]], decodes: int, model: StepTimeModel
) -> None:
    """Where each prompt is in time if they are computed one after the other, each in one step, it
    is in time when they are spread."""
    ranked = sorted(prefills, key=lambda p: p[1])
    done_s = 0.0
    for tokens, deadline_s in ranked:
        done_s += model.predict_s(tokens + decodes)
        if done_s > deadline_s:
            return
    assert max(lateness(ranked, decodes, model)) <= 1e-9
