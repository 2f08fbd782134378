# SPDX-License-Identifier: Apache-2.0
"""How long will one engine step take: a roofline model, its fit, its online correction.

The model is SLOs-Serve's (section 3.1.1), extended by two attention terms::

    T = max_l (k1_l * tokens + k2_l * spec_steps + b_l)  +  kv_s * context_tokens  +  pair_s * pairs

with l = 2: one line for "the weights are read once whatever the batch" (nearly flat), one for
compute.  ``kv_s`` prices the reading of the KV cache, ``pair_s`` the query-key products of
attention, which a prefill chunk at a long context is full of.  All times are seconds.

Everything here is plain Python floats in the hot paths (``predict_s``, ``time_to_tokens``,
``OnlineCorrection.observe``); numpy is used by :func:`fit` alone.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from vllm_slo.core.step_time.budget import Lines, tokens_within
from vllm_slo.core.step_time.least_squares import fit_higher_of_two_lines
from vllm_slo.errors import ProfileError

Term = tuple[float, float, float]
Sample = tuple["BatchShape", float]

DEFAULT_MAX_TOKENS = 65_536
DEFAULT_MARGIN = 1.10
"""Multiplicative margin while too few steps have been seen to measure one."""
DEFAULT_HORIZON = 5
"""Steps of a run whose time a margin covers: half of a TPOT window, so that both halves hold."""
LONGEST_HORIZON = 32
"""However long the window is: a prefill's deadline is nearer."""

_MIN_STEP_S = 1e-7
_MAX_STEP_S = 3600.0
NEGLIGIBLE = 1e-6
"""Of the shortest measured step: what a step of one token must take at the least."""
_NAMES = (
    "terms[0].k1", "terms[0].k2", "terms[0].b",
    "terms[1].k1", "terms[1].k2", "terms[1].b", "kv_s", "pair_s",
)  # fmt: skip
_FIX = "measure again with 'vllm-slo profile MODEL'"


def horizon_of(window: int) -> int:
    """Steps of a run whose time a margin covers, for a TPOT judged over ``window`` tokens."""
    return min(max(window // 2, DEFAULT_HORIZON), LONGEST_HORIZON)


def chunk_pairs(tokens: int, context_tokens: int) -> int:
    """Query-key pairs of one request: ``tokens`` new ones after ``context_tokens`` cached ones.

    Each new token attends to the cached ones, to its predecessors in the chunk and to itself.
    """
    return tokens * context_tokens + tokens * (tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What one step runs, as far as its duration is concerned.

    tokens: scheduled tokens of all requests.  spec_steps: sequential steps of the draft model
    (SLOs-Serve's #SpecStep).  context_tokens: KV tokens attended to before this step, summed
    over the scheduled requests.  requests: how many are scheduled.  pairs: query-key pairs,
    the sum of :func:`chunk_pairs` over the requests (0: not known, not priced).
    """

    tokens: int
    spec_steps: int = 0
    context_tokens: int = 0
    requests: int = 1
    pairs: int = 0

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]], spec_steps: int = 0) -> "BatchShape":
        """The shape of a batch given as (scheduled tokens, context tokens) per request."""
        tokens = context = pairs = requests = 0
        for n, c in chunks:
            tokens += n
            context += c
            pairs += chunk_pairs(n, c)
            requests += 1
        return cls(tokens, spec_steps, context, requests, pairs)


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Batch shape -> seconds; see the module's equation.  Monotone in every argument.

    terms: two triples (k1_s, k2_s, b_s): seconds per token, seconds per draft step, seconds.
    kv_s: seconds per context token.  max_tokens: the most :meth:`time_to_tokens` answers.
    pair_s: seconds per query-key pair.

    Raises ProfileError for a coefficient that is negative, not finite or not a number.
    """

    terms: tuple[Term, Term]
    kv_s: float = 0.0
    max_tokens: int = DEFAULT_MAX_TOKENS
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.terms) != 2 or any(len(term) != 3 for term in self.terms):
            raise ProfileError(f"step-time model: terms must be two triples (k1, k2, b); {_FIX}")
        values = (*self.terms[0], *self.terms[1], self.kv_s, self.pair_s)
        for index, value in enumerate(values):
            if type(value) is not float or not 0.0 <= value < math.inf:
                _check_coefficient(_NAMES[index], value)
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ProfileError(f"step-time model: max_tokens must be a positive integer; {_FIX}")

    @classmethod
    def prior(cls) -> "StepTimeModel":
        """A start for a server without a profile: a 0.3B bf16 model on two CPU cores.

        Deliberately slow: a faster engine promises too little for its first steps, never too
        much.  :class:`StepTimeEstimator` replaces it once live steps show the real shape.
        """
        return cls(((0.0, 0.0, 0.040), (0.0006, 0.0, 0.030)), 2e-6, pair_s=1e-7)

    def predict_s(
        self, tokens: float, context_tokens: float = 0, spec_steps: float = 0, pairs: float = 0
    ) -> float:
        """Seconds one step takes.  Arguments as in :class:`BatchShape`, all >= 0."""
        (k1, k2, b), (m1, m2, d) = self.terms
        low = k1 * tokens + k2 * spec_steps + b
        high = m1 * tokens + m2 * spec_steps + d
        attention = self.kv_s * context_tokens + self.pair_s * pairs
        return max(low, high) + attention

    def predict_shape_s(self, shape: BatchShape) -> float:
        """Seconds a step of this shape takes."""
        return self.predict_s(shape.tokens, shape.context_tokens, shape.spec_steps, shape.pairs)

    def lines(self) -> Lines:
        """The model without attention."""
        (k1, k2, b), (m1, m2, d) = self.terms
        return Lines(float(k1), float(k2), float(b), float(m1), float(m2), float(d))

    def time_to_tokens(
        self,
        time_s: float,
        context_tokens: float = 0,
        spec_steps: float = 0,
        pairs: float = 0,
        pairs_per_token: float = 0,
    ) -> int:
        """Largest n <= max_tokens whose step fits into ``time_s``; 0 if not even one does.

        The paper's time2bs.  Exact in floating point: ``predict_s(n, ...) <= time_s`` and n + 1
        does not fit, where the pairs of n tokens are ``pairs + n * pairs_per_token``: ``pairs``
        holds the part that is already settled (the decodes), ``pairs_per_token`` what each
        further token adds (for a prefill chunk, its context so far).
        """
        (k1, k2, b), (m1, m2, d) = self.terms
        left_s = time_s - self.kv_s * context_tokens - self.pair_s * pairs
        slope = self.pair_s * pairs_per_token
        lines = Lines(k1 + slope, k2, b, m1 + slope, m2, d)
        guess = tokens_within(lines, left_s, float(self.max_tokens), spec_steps)
        n = int(guess) if guess >= 1.0 else 0
        predict_s = self.predict_s
        here = predict_s(n, context_tokens, spec_steps, pairs + n * pairs_per_token)
        above = predict_s(n + 1, context_tokens, spec_steps, pairs + (n + 1) * pairs_per_token)
        if here <= time_s and (n >= self.max_tokens or above > time_s):
            return n
        return _largest(
            lambda n: (
                predict_s(n, context_tokens, spec_steps, pairs + n * pairs_per_token) <= time_s
            ),
            self.max_tokens,
        )

    def chunk_to_fit(
        self,
        time_s: float,
        chunk_context: float,
        tokens: float = 0,
        context_tokens: float = 0,
        spec_steps: float = 0,
        pairs: float = 0,
    ) -> int:
        """Largest chunk of one request that still fits into a step of ``time_s``.

        The chunk follows ``chunk_context`` cached tokens of its request; the other arguments are
        the batch it joins.  Exact: its n tokens add ``chunk_pairs(n, chunk_context)`` pairs.
        """
        context = context_tokens + chunk_context
        most = max(int(self.max_tokens - tokens), 0)

        def fits(n: int) -> bool:
            more = n * chunk_context + n * (n + 1) // 2
            return self.predict_s(tokens + n, context, spec_steps, pairs + more) <= time_s

        left = time_s - self.kv_s * context - self.pair_s * pairs
        guess = float(most)
        for k1, k2, b in self.terms:
            free = left - k1 * tokens - k2 * spec_steps - b
            # The positive root of pair_s/2 n^2 + linear n = free, safe at pair_s = 0.
            linear = k1 + self.pair_s * (chunk_context + 0.5)
            root = linear + math.sqrt(max(linear * linear + 2.0 * self.pair_s * free, 0.0))
            if root * guess > 2.0 * free:
                guess = 2.0 * free / root if root else 0.0
        n = int(guess) if guess >= 1.0 else 0
        if n and fits(n) and (n == most or not fits(n + 1)):
            return n
        return _largest(fits, most)

    def scaled(self, factor: float) -> "StepTimeModel":
        """The same model, every time multiplied by ``factor`` (> 0)."""
        (k1, k2, b), (m1, m2, d) = self.terms
        return StepTimeModel(
            ((k1 * factor, k2 * factor, b * factor), (m1 * factor, m2 * factor, d * factor)),
            self.kv_s * factor,
            self.max_tokens,
            self.pair_s * factor,
        )

    def besides(self, fixed_s: float, token_s: float = 0.0) -> "StepTimeModel":
        """The same engine with other work in every step: so many seconds, and more per token."""
        (k1, k2, b), (m1, m2, d) = self.terms
        return StepTimeModel(
            ((k1 + token_s, k2, b + fixed_s), (m1 + token_s, m2, d + fixed_s)),
            self.kv_s,
            self.max_tokens,
            self.pair_s,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_dict` gives the equal model back."""
        return {
            "terms": [list(term) for term in self.terms],
            "kv_s": self.kv_s,
            "pair_s": self.pair_s,
            "max_tokens": self.max_tokens,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "StepTimeModel":
        """Inverse of :meth:`to_dict`.  Raises ProfileError for anything else."""
        try:
            low, high = (tuple(term) for term in data["terms"])
            return cls((low, high), data["kv_s"], data["max_tokens"], data.get("pair_s", 0.0))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProfileError(f"step-time model: {error!r} while reading it; {_FIX}") from error


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Largest n in 0..most for which ``fits`` holds (it holds up to some n); 0 if none.

    For where nothing fits, and where rounding misled a closed form.
    """
    if most < 1 or not fits(1):
        return 0
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _check_coefficient(name: str, value: Any) -> None:
    bad = isinstance(value, bool) or not isinstance(value, int | float)
    if bad or not math.isfinite(value) or value < 0:
        raise ProfileError(
            f"step-time model: {name} must be a finite number >= 0, not {str(value)[:80]}; {_FIX}"
        )


# --- fitting ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FitReport:
    """A fitted model and how well it fits.

    r2: of the step times in seconds.  worst_residual_s: largest |predicted - actual|, seconds.
    worst_residual_ratio: largest |predicted / actual - 1|.  n: samples used.
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
    """Fit the model to measured steps: pairs of (shape, seconds).

    Residuals are *relative*, so that short steps count as much as long ones, and single outliers
    hardly matter (see :func:`fit_higher_of_two_lines`).  Samples that are not finite, not
    positive or beyond an hour are left out.  kv_term, pair_term: False leaves that term at 0.

    A step of one token takes time in every fit: where all of it would be attention's or drafting's,
    too few shapes were seen to tell these apart, and they are left out.

    Raises ProfileError if fewer than two usable samples remain.
    """
    usable = [(s, t) for s, t in samples if _is_usable(s, t)]
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


def _is_usable(shape: BatchShape, time_s: float) -> bool:
    counts = (shape.spec_steps, shape.context_tokens, shape.pairs)
    return (
        _MIN_STEP_S <= time_s <= _MAX_STEP_S
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


# --- online -------------------------------------------------------------------------------------


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

    ``bias`` is the median of actual/predicted over the last 64 steps: a 50x hiccup does not
    move it, a machine that became slower does within some 32 steps.  For the margin such a hiccup
    counts as ``STALL`` typical steps, or a machine that slept would promise nothing for long.
    The margin is a quantile of what promises depend on: not of single steps but of runs of
    ``horizon`` steps, because a TPOT is judged over a window of as many tokens and a prefill takes
    many steps, and the noise of single steps evens out in a run.  ``bias * margin(q)`` is what a
    share q of the last 512 runs stayed under; a slow phase is remembered that long, on purpose.
    Ratios are always taken against the *base* model, never against a corrected one.

    The steps fed in must not overlap: with asynchronous scheduling a step's time is the
    interval between two successive outputs of a busy engine, not the latency of one batch.
    """

    BIAS_WINDOW = 64
    MARGIN_WINDOW = 512
    STALL = 20.0
    ENOUGH = 64
    """Steps before the measured quantile may be tighter than the default margin."""

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
        if 1e-6 < ratio < 1e6:
            self._recent.add(ratio)
            most = self.STALL * self.bias
            self._run.append((predicted_s, actual_s))
            self._window.add(
                sum(min(actual, most * guess) for guess, actual in self._run)
                / sum(guess for guess, _ in self._run)
            )

    @property
    def bias(self) -> float:
        """Actual over predicted, typically; 1.0 before any step."""
        return self._recent.quantile(0.5) if len(self._recent) else 1.0

    def margin(self, quantile: float) -> float:
        """What to multiply a bias-corrected time by so that a share ``quantile`` stays under.

        At least 1.  The default margin is its floor until enough steps have been seen.
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

    With a profile (``learn=False``) the base stays and only bias and margin follow the live
    steps.  Without one (``learn=True``) the base is a prior of the wrong shape, so the model is
    fitted anew to live steps, after 64 of them and then at every doubling up to every 4096th;
    samples are kept per octave of tokens and context, so rare shapes are not washed out.
    One refit takes some milliseconds and happens only when token counts span a factor of 8.
    ``horizon``: see :class:`OnlineCorrection`.
    """

    FIRST_REFIT = 64
    LAST_REFIT_GAP = 4096
    PER_BUCKET = 8

    def __init__(
        self,
        base: StepTimeModel | None = None,
        *,
        learn: bool | None = None,
        horizon: int = DEFAULT_HORIZON,
    ) -> None:
        self.base = base if base is not None else StepTimeModel.prior()
        self.learn = learn if learn is not None else base is None
        self._horizon = horizon
        self.correction = OnlineCorrection(horizon=horizon)
        self._buckets: dict[tuple[int, int], deque[Sample]] = {}
        self._seen = 0
        self._next_refit = self.FIRST_REFIT

    def observe(self, shape: BatchShape, actual_s: float) -> None:
        """Take in one step: its shape and its duration.  Unusable ones are ignored."""
        if not _is_usable(shape, actual_s):
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
        """Forget how far off the base is: the next step alone says so."""
        self.correction = OnlineCorrection(horizon=self._horizon)

    def expected(self) -> StepTimeModel:
        """The model of typical times."""
        return self.correction.model(self.base)

    def promise(self, quantile: float) -> StepTimeModel:
        """The model of times that a share ``quantile`` of the steps stays under."""
        return self.correction.promise_model(self.base, quantile)

    def _refit(self) -> None:
        octaves = [tokens for tokens, _ in self._buckets]
        if max(octaves) - min(octaves) < 3:
            return
        samples = [sample for bucket in self._buckets.values() for sample in bucket]
        self.base = fit(samples, max_tokens=self.base.max_tokens).model
        self.begin_anew()
        # Shapes take turns, as in live runs of steps: runs of one shape would differ more.
        for turn in zip_longest(*self._buckets.values()):
            for shape, actual_s in filter(None, turn):
                self.correction.observe(self.base.predict_shape_s(shape), actual_s)
