# SPDX-License-Identifier: Apache-2.0
"""Output lengths by a small regressor that learns from the requests this server has finished.

LAPS-SD predicts lengths with a language model fine-tuned for it (section 4.3). Here a linear model
of the logarithm of the length learns online, by scikit-learn's ``SGDRegressor``, from what is known
at arrival: the class, the length of the prompt, ``max_tokens``, and which tokens the prompt begins
and ends with. The engine's next step waits for it, so it is no larger.

For each class it answers only while it is the better guess: both it and the class's quantile are
asked about every request before they learn from it, and the one that was closer of late speaks.
Close is measured by |ln(predicted / actual)|, which counts half and twice alike.

It sets no second thread to work beside the engine's: scikit-learn's SGD is a serial loop over rows,
and BLAS is serial on vectors of this length.
"""

from __future__ import annotations

import math
import zlib
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.length_forecast import LengthQuery, QuantileForecaster, RunningMean
from vllm_slo.core.output_length import LengthPrediction
from vllm_slo.errors import ConfigError

FIRST_TOKENS = 32
LAST_TOKENS = 64
"""Tokens at both ends of a prompt that are looked at: a long prompt costs no more than a short
one."""
BINS = 40
"""Half octaves, from 1 token on, that have a weight of their own; for prompts and for
``max_tokens``."""
CLASS_SLOTS = 64
"""Weights that classes share."""
HASH_BITS = 10
"""Tokens share 2^HASH_BITS weights."""
WINDOW = 512
"""Finished requests that are learnt from; older ones are forgotten."""
BATCH = 4
"""Finished requests between two lessons."""
REPLAYED = 60
"""Requests of the window in each lesson besides the new ones."""
MEMORY = 64
"""Requests of a class over which the two guesses are compared, more or less."""
RATE = 0.05
"""Step of the gradient descent; times the squared length of any row it stays below 1."""
HUBER = 0.5
"""Error of ln(tokens) from which on its size counts no more, so that an odd answer moves little."""

_PROMPT_AT = 2
_CAP_AT = _PROMPT_AT + BINS
_CLASS_AT = _CAP_AT + BINS
_TOKENS_AT = _CLASS_AT + CLASS_SLOTS
WIDTH = _TOKENS_AT + (1 << HASH_BITS)
"""Numbers that describe a request."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing
_SHIFT = np.uint64(64 - HASH_BITS)

Floats = NDArray[np.float64]


def features_of(query: LengthQuery) -> Floats:
    """(WIDTH,): a constant, the logarithm of the prompt's length, both lengths by half octaves,
    the class, and which tokens there are, all of these together of length 1."""
    row = np.zeros(WIDTH)
    row[0] = 1.0
    row[1] = (math.log1p(query.prompt_tokens) - 5.5) / 3.0  # within 2 of 0 up to 100,000 tokens
    _put_length(row[_PROMPT_AT:_CAP_AT], query.prompt_tokens)
    _put_length(row[_CAP_AT:_CLASS_AT], query.max_tokens)
    row[_CLASS_AT + zlib.crc32(query.slo_class.encode()) % CLASS_SLOTS] = 1.0
    ids = query.prompt_token_ids
    ends = [*ids[:FIRST_TOKENS], *ids[FIRST_TOKENS:][-LAST_TOKENS:]]
    if ends:
        hashed = (np.array(ends, np.int64).astype(np.uint64) * _MULTIPLIER) >> _SHIFT
        places = np.unique(hashed).astype(np.intp)
        row[_TOKENS_AT + places] = 1.0 / math.sqrt(len(places))
    return row


def _put_length(bins: Floats, tokens: int) -> None:
    """Share 1 between the two half octaves that a length lies between."""
    place = min(2.0 * math.log2(max(tokens, 0) + 1), BINS - 1.0)
    lower = min(int(place), BINS - 2)
    bins[lower], bins[lower + 1] = lower + 1 - place, place - lower


class LengthRegressor:
    """A `LengthForecaster` that has learnt what prompts lead to, where that helps.

    Deterministic: the same requests in the same order make the same predictions.

    Args:
        quantile: answers where the regressor has nothing better to say: before it has learnt, for
            classes in which it is the worse guess, and for requests that have outgrown what it
            said. What is declared is taken from it too.
        min_samples: requests that must have finished before the regressor is asked.

    Raises:
        ConfigError: scikit-learn is not installed.
    """

    def __init__(self, quantile: QuantileForecaster, min_samples: int = 64) -> None:
        self._quantile = quantile
        self._min_samples = min_samples
        self._model, self._as_it_is = _estimator()
        self._weights: Floats = np.zeros(WIDTH)
        self._rows = np.zeros((WINDOW, WIDTH))
        self._targets = np.zeros(WINDOW)
        self._cut_off = np.zeros(WINDOW, np.bool_)
        self._finished = 0
        self._random = np.random.default_rng(0)
        self._excess: dict[str, RunningMean] = {}  # the regressor's error less the quantile's
        self._known: WeakKeyDictionary[LengthQuery, tuple[NDArray[np.intp], Floats]] = (
            WeakKeyDictionary()
        )

    def predict(self, query: LengthQuery, generated: int = 0) -> LengthPrediction:
        """The regressor's guess, source ``learnt``, or what the quantile says."""
        prediction = self._quantile.predict(query, generated)
        excess = self._excess.get(query.slo_class)
        if prediction.source == "declared" or excess is None or excess.mean >= 0.0:
            return prediction
        tokens = self._guess(query)
        return LengthPrediction(tokens, "learnt") if tokens > generated else prediction

    def observe(self, query: LengthQuery, tokens: int) -> None:
        """Compare both guesses with what came, then learn from it."""
        target = math.log(max(tokens, 1))
        rival = self._quantile.predict(query)
        # Against ``max_tokens``, of a class not believed yet, anything would win.
        if self._finished >= self._min_samples and rival.source == "quantile":
            error = abs(math.log(self._guess(query)) - target)
            excess = self._excess.setdefault(query.slo_class, RunningMean(MEMORY))
            excess.add(error - abs(math.log(rival.tokens) - target))
        self._quantile.observe(query, tokens)
        place = self._finished % WINDOW
        self._rows[place], self._targets[place] = features_of(query), target
        self._cut_off[place] = tokens >= query.max_tokens
        self._finished += 1
        if self._finished % BATCH == 0:
            self._learn()

    def _guess(self, query: LengthQuery) -> int:
        """Total output tokens by the regressor alone, from 1 to ``max_tokens``."""
        known = self._known.get(query)
        if known is None:
            row = features_of(query)
            places = np.flatnonzero(row)
            known = self._known[query] = places, row[places]
        places, values = known
        most = max(query.max_tokens, 1)
        told = min(float(self._weights[places] @ values), math.log(most))
        return min(max(round(math.exp(told)), 1), most)

    def _learn(self) -> None:
        """One lesson: the newest requests, and some of the window at random.

        An answer that ``max_tokens`` cut off says "at least so long": a longer guess is no error.
        """
        newest = np.arange(self._finished - BATCH, self._finished) % WINDOW
        older = self._random.integers(min(self._finished, WINDOW), size=REPLAYED)
        lesson = np.concatenate((newest, older))
        rows, targets, cut_off = self._rows[lesson], self._targets[lesson], self._cut_off[lesson]
        # Not by `@`: BLAS would set other threads to work.
        guesses = np.einsum("ij,j->i", rows[cut_off], self._weights)
        targets[cut_off] = np.maximum(targets[cut_off], guesses)
        with self._as_it_is(assume_finite=True, skip_parameter_validation=True):
            self._model.partial_fit(rows, targets)
        self._weights = self._model.coef_


def _estimator() -> tuple[Any, Any]:
    """(an estimator, scikit-learn's ``config_context``). Imported late: most servers need none."""
    try:
        from sklearn import config_context
        from sklearn.linear_model import SGDRegressor
    except ImportError as error:
        raise ConfigError(
            "best_effort.output_length: a learnt output length needs scikit-learn; "
            "pip install 'vllm-slo[lengths]', or choose another way"
        ) from error
    return (
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
