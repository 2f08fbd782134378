# SPDX-License-Identifier: Apache-2.0
"""Fitting the step-time model to measured steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_slo.core.step_time.least_squares import fit_higher_of_two_lines
from vllm_slo.core.step_time.model import DEFAULT_MAX_TOKENS, BatchShape, Sample, StepTimeModel
from vllm_slo.errors import ProfileError

SHORTEST_STEP_S: Final = 1e-7
LONGEST_STEP_S: Final = 3600.0
"""Seconds. A measured step that is shorter or longer is an error of the clock."""
NEGLIGIBLE: Final = 1e-6
"""Of the shortest measured step: what a step of one token must take at the least."""


@dataclass(frozen=True, slots=True)
class FitReport:
    """A fitted model and how well it fits.

    Attributes:
        r2: share of the variance of the step times that it explains.
        worst_residual_s: largest |predicted - actual|, seconds.
        worst_residual_ratio: largest |predicted / actual - 1|.
    """

    model: StepTimeModel
    r2: float
    worst_residual_s: float
    worst_residual_ratio: float
    n: int


def fit(
    samples: Iterable[Sample],
    *,
    kv_term: bool = True,
    pair_term: bool = True,
    max_tokens: int = DEFAULT_MAX_TOKENS,
) -> FitReport:
    """Fit the model to measured steps.

    Residuals are *relative*, so that short steps count as much as long ones, and single outliers
    hardly matter (see `fit_higher_of_two_lines`). A step of one token takes time in every fit: if
    all of it came out as attention or as drafting, too few shapes were seen to tell these apart,
    and their terms are left at 0.

    Args:
        samples: (shape, seconds); those that `is_usable` rejects are left out.
        kv_term, pair_term: False leaves that term at 0.

    Raises:
        ProfileError: fewer than two usable samples.
    """
    usable = [(s, t) for s, t in samples if is_usable(s, t)]
    if len(usable) < 2:
        raise ProfileError(f"step-time fit: {len(usable)} usable samples, at least 2 needed")
    least_s = NEGLIGIBLE * min(seconds for _, seconds in usable)
    for attention, drafting in ((True, True), (False, True), (False, False)):
        model = _fit(usable, kv_term and attention, pair_term and attention, drafting, max_tokens)
        if model.predict_s(1) > least_s:
            break
    return _report(model, usable)


def _fit(
    samples: Sequence[Sample], kv_term: bool, pair_term: bool, draft_term: bool, max_tokens: int
) -> StepTimeModel:
    shapes = [s for s, _ in samples]
    seconds = np.array([t for _, t in samples], dtype=np.float64)
    lines = np.array([[s.tokens, s.spec_steps * draft_term, 1.0] for s in shapes], dtype=np.float64)
    attention = np.array(
        [[s.context_tokens * kv_term, s.pairs * pair_term] for s in shapes], dtype=np.float64
    )
    best = fit_higher_of_two_lines(lines, attention, seconds)
    return StepTimeModel(
        ((float(best[0]), float(best[1]), float(best[2])),
         (float(best[3]), float(best[4]), float(best[5]))),
        float(best[6]), max_tokens, float(best[7]),
    )  # fmt: skip


def is_usable(shape: BatchShape, time_s: float) -> bool:
    """Whether a measured step has a shape and a time that a step can have."""
    counts = (shape.spec_steps, shape.context_tokens, shape.pairs)
    return (
        SHORTEST_STEP_S <= time_s <= LONGEST_STEP_S
        and 1 <= shape.tokens <= 10**9
        and all(0 <= count <= 10**18 for count in counts)
    )


def _report(model: StepTimeModel, samples: Sequence[Sample]) -> FitReport:
    actual = np.array([t for _, t in samples])
    predicted = np.array([model.predict_shape_s(s) for s, _ in samples])
    residual = predicted - actual
    spread = float(((actual - actual.mean()) ** 2).sum())
    wrong = float((residual**2).sum())
    r2 = 1.0 - wrong / spread if spread > 0.0 else float(wrong == 0.0)
    return FitReport(
        model,
        r2,
        float(np.abs(residual).max()),
        float(np.abs(residual / actual).max()),
        len(samples),
    )
