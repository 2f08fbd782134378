# SPDX-License-Identifier: Apache-2.0
"""Non-negative least squares, and the higher of two lines fitted with it."""

import math

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


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
    """Assignments to begin with: the second line holds the rows above some value of ``x``."""
    cuts = np.unique(np.quantile(x, (0.0, 0.25, 0.5, 0.75)))
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


def _huber_delta(residual: FloatArray) -> float:
    """1.345 robust standard deviations (median absolute deviation), at least 1%."""
    return max(1.345 * 1.4826 * float(np.median(np.abs(residual))), 0.01)


def _huber_weights(residual: FloatArray) -> FloatArray:
    weights: FloatArray = _huber_delta(residual) / np.maximum(np.abs(residual), 1e-300)
    return weights.clip(max=1.0)


def _huber_loss(residual: FloatArray, delta: float = 0.10) -> float:
    size = np.abs(residual)
    return float(np.where(size < delta, 0.5 * size**2, delta * (size - 0.5 * delta)).mean())
