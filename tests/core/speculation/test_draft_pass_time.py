# SPDX-License-Identifier: Apache-2.0
"""core/speculation/draft_pass_time.py: what passes of a draft add to a step."""

from __future__ import annotations

import pytest

from vllm_slo.core.speculation.draft_pass_time import DraftPassTime, with_draft_steps
from vllm_slo.core.step_time.model import StepTimeModel


def test_a_step_that_drafts_is_priced_by_its_passes() -> None:
    model = StepTimeModel(((0.0, 0.004, 0.020), (0.001, 0.002, 0.010)), 1e-6, 100, 1e-8)
    drafting = with_draft_steps(model, 3)
    for tokens in (1, 10, 80):
        expected_s = model.predict_s(tokens, 50, 3, 7)
        assert drafting.predict_s(tokens, 50, 0, 7) == pytest.approx(expected_s)
        assert drafting.predict_s(tokens, 50, 5, 7) == pytest.approx(expected_s)
    assert drafting.max_tokens == 100


def test_the_price_of_a_pass_is_the_slope_of_step_times() -> None:
    known = DraftPassTime(0.05)
    assert known.share() == 0.05
    for step in range(200):
        passes = 1 + step % 5
        known.observe(passes, 1.0 + 0.12 * passes)
    assert known.share() == pytest.approx(0.12, abs=0.002)


def test_a_machine_that_slept_does_not_make_passes_dear() -> None:
    known = DraftPassTime(0.05)
    for step in range(100):
        passes = 1 + step % 5
        known.observe(passes, 3000.0 if step == 43 else 1.0 + 0.12 * passes)
    assert known.share() < 0.3


def test_a_pass_that_never_changes_has_no_known_price() -> None:
    known = DraftPassTime(0.05)
    for _ in range(100):
        known.observe(3, 2.0)
    assert known.share() == 0.05
