# SPDX-License-Identifier: Apache-2.0
"""Output lengths by a small regressor that learns from the requests this server has finished.

LAPS-SD predicts lengths with a language model fine-tuned for it (section 4.3). Here a linear model
of the logarithm of the length learns online, by scikit-learn's ``SGDRegressor``, from what is known
at arrival: the length of the prompt, ``max_tokens``, and which tokens the prompt begins and ends
with. Each class has one of its own: a burst of another class would drown what it has learnt. The
engine's next step waits for it, so it is no larger.

It answers only while it is the better guess: both it and the class's quantile are asked about every
request before they learn from it, and the one that was closer of late speaks. Close is measured by
|ln(predicted / actual)|, which counts half and twice alike.

It sets no second thread to work beside the engine's: scikit-learn's SGD is a serial loop over rows,
and BLAS is serial on so few numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.lengths.forecast import LengthQuery, QuantileForecaster, RunningMean
from vllm_slo.core.lengths.output_length import LengthPrediction
from vllm_slo.errors import ConfigError

FIRST_TOKENS = 32
LAST_TOKENS = 64
"""Tokens at both ends of a prompt that are looked at: a long prompt costs no more than a short
one."""
BINS = 40
"""Half octaves, from 1 token on, that have a weight of their own; for prompts and for
``max_tokens``."""
HASH_BITS = 10
"""Tokens share 2^HASH_BITS weights."""
WINDOW = 512
"""Finished requests of a class that are learnt from; older ones are forgotten."""
BATCH = 4
"""Finished requests between two lessons."""
REPLAYED = 60
"""Requests of the window in each lesson besides the new ones."""
MEMORY = 64
"""Requests over which the two guesses are compared, more or less."""
RATE = 0.05
"""Step of the gradient descent; times the squared length of any row it stays below 1."""
HUBER = 0.5
"""Error of ln(tokens) from which on its size counts no more, so that an odd answer moves little."""

_CAP_AT = 1 + BINS
_TOKENS_AT = _CAP_AT + BINS
WIDTH = _TOKENS_AT + (1 << HASH_BITS)
"""Numbers that describe a request."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing
_SHIFT = np.uint64(64 - HASH_BITS)

Floats = NDArray[np.float64]


class Features(NamedTuple):
    """A row of ``WIDTH`` numbers. Attributes: places that are not 0, each once; values there."""

    places: NDArray[np.intp]
    values: Floats


def features_of(query: LengthQuery) -> Features:
    """A constant, both lengths by half octaves, and which tokens there are, in all of length 1."""
    row = np.zeros(WIDTH)
    row[0] = 1.0
    _put_length(row[1:_CAP_AT], query.prompt_tokens)
    _put_length(row[_CAP_AT:_TOKENS_AT], query.max_tokens)
    ids = query.prompt_token_ids
    ends = [*ids[:FIRST_TOKENS], *ids[FIRST_TOKENS:][-LAST_TOKENS:]]
    if ends:
        hashed = (np.array(ends, np.int64).astype(np.uint64) * _MULTIPLIER) >> _SHIFT
        tokens = np.unique(hashed).astype(np.intp)
        row[_TOKENS_AT + tokens] = 1.0 / math.sqrt(len(tokens))
    places = np.flatnonzero(row)
    return Features(places, row[places])


def _put_length(bins: Floats, tokens: int) -> None:
    """Share 1 between the two half octaves that a length lies between."""
    place = min(2.0 * math.log2(tokens + 1), BINS - 1.0)
    lower = min(int(place), BINS - 2)
    bins[lower], bins[lower + 1] = lower + 1 - place, place - lower


class LengthRegressor:
    """A `LengthForecaster` that has learnt what prompts lead to, where that helps.

    Deterministic: the same requests in the same order make the same predictions. Memory: 5 MB for
    each class, and 2 KB for each `LengthQuery` that is alive.

    Args:
        quantile: answers where the regressor has nothing better to say: before it has learnt, for
            classes in which it is the worse guess, and for requests that have outgrown what it
            said. What is declared is taken from it too.
        min_samples: requests of a class that must have finished before the regressor is asked.

    Raises:
        ConfigError: scikit-learn is not installed.
    """

    def __init__(self, quantile: QuantileForecaster, min_samples: int = 64) -> None:
        self._quantile = quantile
        self._min_samples = min_samples
        self._new_model = _estimators()
        self._classes: dict[str, _ClassRegressor] = {}
        self._known: WeakKeyDictionary[LengthQuery, Features] = WeakKeyDictionary()

    def predict(self, query: LengthQuery, generated: int = 0) -> LengthPrediction:
        """The regressor's guess, source ``learnt``, or what the quantile says."""
        prediction = self._quantile.predict(query, generated)
        regressor = self._classes.get(query.slo_class)
        if prediction.source == "declared" or regressor is None or regressor.excess.mean >= 0.0:
            return prediction
        tokens = regressor.guess(self._features(query), query.max_tokens)
        return LengthPrediction(tokens, "learnt") if tokens > generated else prediction

    def observe(self, query: LengthQuery, tokens: int, *, cut_off: bool = False) -> None:
        """Compare both guesses with what came, then learn from it."""
        regressor = self._classes.get(query.slo_class)
        if regressor is None:
            regressor = self._classes[query.slo_class] = _ClassRegressor(*self._new_model())
        features = self._features(query)
        rival = self._quantile.predict(query)
        # What is declared, or a cap, is not what the regressor would stand in for.
        if regressor.finished >= self._min_samples and rival.source == "quantile":
            regressor.compare(features, query.max_tokens, rival.tokens, tokens)
        self._quantile.observe(query, tokens, cut_off=cut_off)
        regressor.observe(features, tokens, cut_off=cut_off or tokens >= query.max_tokens)

    def _features(self, query: LengthQuery) -> Features:
        known = self._known.get(query)
        if known is None:
            known = self._known[query] = features_of(query)
        return known


class _ClassRegressor:
    """What is learnt of one class.

    Attributes:
        finished: requests it has learnt from, the forgotten ones included.
        excess: its error less that of the quantile, of late.
    """

    def __init__(self, model: Any, as_it_is: Any) -> None:
        self.finished = 0
        self.excess = RunningMean(MEMORY)
        self._model = model
        self._as_it_is = as_it_is
        self._weights: Floats = np.zeros(WIDTH)
        self._rows = np.zeros((WINDOW, WIDTH))
        self._targets = np.zeros(WINDOW)
        self._cut_off = np.zeros(WINDOW, np.bool_)
        self._random = np.random.default_rng(0)

    def guess(self, features: Features, max_tokens: int) -> int:
        """Total output tokens, from 1 to ``max_tokens``."""
        told = float(self._weights[features.places] @ features.values)
        return max(round(math.exp(min(told, math.log(max(max_tokens, 1))))), 1)

    def compare(self, features: Features, max_tokens: int, rival: int, tokens: int) -> None:
        """Take in whose guess of a request of ``tokens`` was closer, and by how much."""
        actual = max(tokens, 1)
        mine = abs(math.log(self.guess(features, max_tokens) / actual))
        self.excess.add(mine - abs(math.log(rival / actual)))

    def observe(self, features: Features, tokens: int, *, cut_off: bool) -> None:
        """Remember a request; with every ``BATCH``-th there is a lesson."""
        place = self.finished % WINDOW
        self._rows[place] = 0.0
        self._rows[place, features.places] = features.values
        self._targets[place] = math.log(max(tokens, 1))
        self._cut_off[place] = cut_off
        self.finished += 1
        if self.finished % BATCH == 0:
            self._learn()

    def _learn(self) -> None:
        """One lesson: the newest requests, and some of the window at random.

        An answer that ``max_tokens`` cut off says "at least so long": a longer guess is no error.
        """
        newest = np.arange(self.finished - BATCH, self.finished) % WINDOW
        older = self._random.integers(min(self.finished, WINDOW), size=REPLAYED)
        lesson = np.concatenate((newest, older))
        rows, targets, cut_off = self._rows[lesson], self._targets[lesson], self._cut_off[lesson]
        targets[cut_off] = np.maximum(targets[cut_off], rows[cut_off] @ self._weights)
        with self._as_it_is(assume_finite=True, skip_parameter_validation=True):
            self._model.partial_fit(rows, targets)
        self._weights = self._model.coef_


def _estimators() -> Callable[[], tuple[Any, Any]]:
    """Makes (an estimator, scikit-learn's ``config_context``).

    Imported late: most servers need none.
    """
    try:
        from sklearn import config_context
        from sklearn.linear_model import SGDRegressor
    except ImportError as error:
        raise ConfigError(
            "best_effort.output_length: a learnt output length needs scikit-learn; "
            "pip install 'vllm-slo[lengths]', or choose another way"
        ) from error
    return lambda: (
        SGDRegressor(
            loss="huber",
            epsilon=HUBER,
            alpha=1e-4,
            fit_intercept=False,
            learning_rate="constant",
            eta0=RATE,
            random_state=0,
        ),
        config_context,
    )
