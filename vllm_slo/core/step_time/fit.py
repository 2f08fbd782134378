# SPDX-License-Identifier: Apache-2.0
"""Fitting the step-time model to measured steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.step_time.model import DEFAULT_MAX_TOKENS, BatchShape, Sample, StepTimeModel
from vllm_slo.errors import ProfileError

FloatArray = NDArray[np.float64]

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


def nnls(a: FloatArray, y: FloatArray) -> FloatArray:
    """The x >= 0 that minimises |a x - y|.  Shapes: a [rows, columns], y [rows], x [columns].

    Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.  Columns are scaled to
    unit length first, so that tokens in thousands and constants of 1 mix well; a column of
    zeros gets the coefficient 0.
    """
    norms = np.sqrt((a**2).sum(axis=0))
    used = norms > 0.0
    a = a / np.where(used, norms, 1.0)
    x = np.zeros(a.shape[1])
    passive = np.zeros(a.shape[1], dtype=np.bool_)
    for _ in range(4 * a.shape[1]):
        gradient = np.where(used & ~passive, a.T @ (y - a @ x), -np.inf)
        entering = int(np.argmax(gradient))
        if gradient[entering] <= 1e-10:
            break
        passive[entering] = True
        while passive.any():
            trial = np.zeros_like(x)
            trial[passive] = np.linalg.lstsq(a[:, passive], y, rcond=None)[0]
            blocked = passive & (trial <= 0.0)
            if not blocked.any():
                x = trial
                break
            step = float((x[blocked] / np.maximum(x[blocked] - trial[blocked], 1e-300)).min())
            x = np.maximum(x + step * (trial - x), 0.0)
            passive &= ~(blocked & (x <= 1e-14))
            x[~passive] = 0.0
    unscaled: FloatArray = x / np.where(used, norms, 1.0)
    return unscaled


def fit_higher_of_two_lines(lines: FloatArray, shared: FloatArray, y: FloatArray) -> FloatArray:
    """Fit ``y = max(lines @ u, lines @ v) + shared @ w`` with u, v, w >= 0.

    Shapes: lines [n, 3], shared [n, s], y [n] > 0; returns u, v, w joined, [6 + s].

    Max-affine regression: each row is assigned to the line that is higher there, everything is
    solved together by :func:`nnls` on relative residuals with Huber weights, and so on until the
    assignment stands.  It starts from several splits along the first column; the best fit wins.
    """
    solutions = [_alternate(lines, shared, y, high) for high in _starts(lines[:, 0])]
    return min(solutions, key=lambda x: _huber_loss(_predict(lines, shared, x) / y - 1.0))


def _starts(x: FloatArray) -> list[NDArray[np.bool_]]:
    """Assignments to begin with: the second line holds the rows above some value of ``x``, one of
    the quartiles of the rows or of their distinct values. Most steps of a live engine only decode
    and hold few tokens, so that all quartiles of its rows may be alike."""
    quartiles = (0.0, 0.25, 0.5, 0.75)
    cuts = np.unique([np.quantile(x, quartiles), np.quantile(np.unique(x), quartiles)])
    return [x > cut for cut in cuts]


def _alternate(
    lines: FloatArray, shared: FloatArray, y: FloatArray, high: NDArray[np.bool_]
) -> FloatArray:
    """Solve, reassign, repeat.  Returns the best solution visited."""
    weights = np.ones_like(y)
    best, best_loss = np.zeros(6 + shared.shape[1]), math.inf
    for iteration in range(12):
        rows = np.hstack([lines * ~high[:, None], lines * high[:, None], shared])
        scale = np.sqrt(weights)
        x = nnls(rows * (scale / y)[:, None], scale)
        residual = _predict(lines, shared, x) / y - 1.0
        loss = _huber_loss(residual)
        if loss < best_loss * (1.0 - 1e-9):
            best, best_loss = x, loss
        higher = lines @ x[3:6] > lines @ x[:3]
        weights = _huber_weights(residual)
        if bool((higher == high).all()) and loss > best_loss * (1.0 - 1e-6) and iteration > 2:
            break
        high = higher
    return best


def _predict(lines: FloatArray, shared: FloatArray, x: FloatArray) -> FloatArray:
    predicted: FloatArray = np.maximum(lines @ x[:3], lines @ x[3:6]) + shared @ x[6:]
    return predicted


def _huber_weights(residual: FloatArray) -> FloatArray:
    """Weights beyond 1.345 robust standard deviations (median absolute deviation), at least 1%."""
    delta = max(1.345 * 1.4826 * float(np.median(np.abs(residual))), 0.01)
    weights: FloatArray = delta / np.maximum(np.abs(residual), 1e-300)
    return weights.clip(max=1.0)


def _huber_loss(residual: FloatArray, delta: float = 0.10) -> float:
    size = np.abs(residual)
    return float(np.where(size < delta, 0.5 * size**2, delta * (size - 0.5 * delta)).mean())
