# SPDX-License-Identifier: Apache-2.0
"""The live step-time model of an engine: how far it is off, by how much to be careful, and refits.

``OnlineCorrection.observe`` runs in every step, so it is plain Python floats.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from itertools import zip_longest
from typing import Final

from vllm_slo.core.step_time.fit import fit, is_usable
from vllm_slo.core.step_time.model import BatchShape, Sample, StepTimeModel

DEFAULT_MARGIN: Final = 1.10
"""Factor on expected times while too few steps have been seen to measure one."""
DEFAULT_HORIZON: Final = 5
"""Steps of a run whose time a margin covers: half of a TPOT window, so that both halves hold."""
LONGEST_HORIZON: Final = 32
"""Steps of the longest such run, however long the window is: a prefill's deadline is nearer."""


def horizon_of(window: int) -> int:
    """Steps of a run whose time a margin covers, for a TPOT judged over ``window`` tokens."""
    return min(max(window // 2, DEFAULT_HORIZON), LONGEST_HORIZON)


class _SlidingQuantile:
    """Exact quantiles of the last ``size`` values; one add is a bisection in a sorted list."""

    __slots__ = ("_order", "_size", "_sorted")

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        if len(self._order) == self._size:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        self._order.append(value)
        insort(self._sorted, value)

    def quantile(self, q: float) -> float:
        """The ceil(q (n + 1))-th smallest: a next draw lies below it with probability >= q."""
        n = len(self._sorted)
        rank = math.ceil(q * (n + 1))
        return self._sorted[min(max(rank, 1), n) - 1]


class OnlineCorrection:
    """Learns from live steps by how much a base model is off, and how widely.

    ``bias`` is the median of actual over predicted times. The margin is a quantile, and not of
    single steps but of runs of ``horizon`` steps: that is what promises depend on. A TPOT is judged
    over a window of as many tokens, a prefill takes many steps, and the noise of single steps evens
    out in a run. A share q of the runs stayed under ``bias * margin(q)``.

    Ratios are always taken against the *base* model, never against a corrected one. The steps fed
    in must not overlap: with asynchronous scheduling a step's time is the interval between two
    successive outputs of a busy engine, not the latency of one batch.
    """

    BIAS_WINDOW = 64
    """Steps of the median: one hiccup does not move it, and a machine that became slower does
    within half of them."""
    MARGIN_WINDOW = 512
    """Runs of the quantile: a slow phase is remembered for so many steps, on purpose."""
    STALL = 20.0
    """Typical steps that a step counts for at the most in a run. Otherwise a machine that slept
    would promise nothing until the run is forgotten."""
    ENOUGH = 64
    """Runs before the measured quantile may be tighter than the default margin."""
    MOST_OFF = 1e6
    """Ratio of actual and predicted time, either way, beyond which a step is an error."""

    def __init__(
        self, default_margin: float = DEFAULT_MARGIN, horizon: int = DEFAULT_HORIZON
    ) -> None:
        self._default_margin = default_margin
        self._run: deque[tuple[float, float]] = deque(maxlen=horizon)
        self._recent = _SlidingQuantile(self.BIAS_WINDOW)
        self._window = _SlidingQuantile(self.MARGIN_WINDOW)

    def __len__(self) -> int:
        """Runs of steps in the margin's window."""
        return len(self._window)

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Take in one step; anything that is not two finite positive times is ignored."""
        if not (0.0 < predicted_s < math.inf and 0.0 < actual_s < math.inf):
            return
        ratio = actual_s / predicted_s
        if 1.0 / self.MOST_OFF < ratio < self.MOST_OFF:
            self._recent.add(ratio)
            most = self.STALL * self.bias
            self._run.append((predicted_s, actual_s))
            taken_s = guessed_s = 0.0
            for guess, actual in self._run:
                taken_s += min(actual, most * guess)
                guessed_s += guess
            self._window.add(taken_s / guessed_s)

    @property
    def bias(self) -> float:
        """Actual over predicted, typically; 1.0 before any step."""
        return self._recent.quantile(0.5) if len(self._recent) else 1.0

    def margin(self, quantile: float) -> float:
        """What to multiply a bias-corrected time by so that a share ``quantile`` stays under.

        At least 1. The default margin is its floor until enough steps have been seen.
        """
        if not 0.0 < quantile < 1.0:
            raise ValueError(f"quantile must lie between 0 and 1, not {quantile}")
        n = len(self._window)
        measured = self._window.quantile(quantile) / self.bias if n else 1.0
        return max(measured, 1.0 if n >= self.ENOUGH else self._default_margin)

    def jitter(self, quantile: float) -> float:
        """Share of its expected time by which a single step may overrun; 0 before enough steps."""
        if len(self._recent) < self.BIAS_WINDOW:
            return 0.0
        return max(self._recent.quantile(quantile) / self.bias - 1.0, 0.0)

    def model(self, base: StepTimeModel) -> StepTimeModel:
        """``base`` corrected by the bias: the expected time."""
        return base.scaled(self.bias)

    def promise_model(self, base: StepTimeModel, quantile: float) -> StepTimeModel:
        """``base`` corrected, plus margin: the time to promise by."""
        return base.scaled(self.bias * self.margin(quantile))


class StepTimeEstimator:
    """The live step-time model of one engine: a base, its correction, and its replacement.

    With a profile the base stays, and only bias and margin follow the live steps. Without one the
    base is a prior of the wrong shape, so ``learn`` is true and the model is fitted anew to live
    steps: after some, and then whenever twice as many have been seen.

    Args:
        base: the profile's model; None: a prior.
        horizon: see ``OnlineCorrection``.
    """

    FIRST_REFIT = 64
    """Steps before the first refit."""
    LAST_REFIT_GAP = 4096
    """Steps between two refits at the most. A refit takes some milliseconds."""
    PER_BUCKET = 8
    """Samples kept per octave of tokens and of context, so that rare shapes are not washed out."""
    SPAN = 3
    """Octaves of tokens that samples must span: a slope cannot be told from steps of one size."""

    def __init__(
        self, base: StepTimeModel | None = None, *, horizon: int = DEFAULT_HORIZON
    ) -> None:
        self.base = base if base is not None else StepTimeModel.prior()
        self.learn = base is None
        self._horizon = horizon
        self.correction = OnlineCorrection(horizon=horizon)
        self._buckets: dict[tuple[int, int], deque[Sample]] = {}
        self._seen = 0
        self._next_refit = self.FIRST_REFIT

    def observe(self, shape: BatchShape, actual_s: float) -> None:
        """Take in one step: its shape and its duration. Unusable ones are ignored."""
        if not is_usable(shape, actual_s):
            return
        self.correction.observe(self.base.predict_shape_s(shape), actual_s)
        if not self.learn:
            return
        key = (shape.tokens.bit_length(), shape.context_tokens.bit_length())
        self._buckets.setdefault(key, deque(maxlen=self.PER_BUCKET)).append((shape, actual_s))
        self._seen += 1
        if self._seen >= self._next_refit:
            self._next_refit += min(self._next_refit, self.LAST_REFIT_GAP)
            self._refit()

    def begin_anew(self) -> None:
        """Forget how far off the base is."""
        self.correction = OnlineCorrection(horizon=self._horizon)

    def expected(self) -> StepTimeModel:
        """The model of typical times."""
        return self.correction.model(self.base)

    def promise(self, quantile: float) -> StepTimeModel:
        """The model of times that a share ``quantile`` of the steps stays under."""
        return self.correction.promise_model(self.base, quantile)

    def _refit(self) -> None:
        octaves = [tokens for tokens, _ in self._buckets]
        if max(octaves) - min(octaves) < self.SPAN:
            return
        samples = [sample for bucket in self._buckets.values() for sample in bucket]
        self.base = fit(samples, max_tokens=self.base.max_tokens).model
        self.begin_anew()
        # Shapes take turns, as in live runs of steps: runs of one shape would differ more.
        for turn in zip_longest(*self._buckets.values()):
            for shape, actual_s in filter(None, turn):
                self.correction.observe(self.base.predict_shape_s(shape), actual_s)
