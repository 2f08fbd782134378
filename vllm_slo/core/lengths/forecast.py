# SPDX-License-Identifier: Apache-2.0
"""A central estimate of an answer's length, for policies that serve the shortest first.

LAPS-SD estimates execution times from predicted output lengths (section 4.3, L_i of equation 6).
What predicts them is a `LengthForecaster`. The one in this module needs only the lengths seen of a
class; that of ``engine.scheduling.length_regressor`` also looks at the prompt. Memory and promises
are planned by `core.lengths.output_length` instead: they need a safe estimate, not a central one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vllm_slo.core.lengths.output_length import (
    LengthPrediction,
    OutputLengthPredictor,
    checked_quantile,
)


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class LengthQuery:
    """What is known of a request when it arrives.

    Compared by identity: make one for each request and keep it while the request lives, so that a
    forecaster can remember what it worked out for it.

    Attributes:
        slo_class: the name by which lengths are learnt.
        max_tokens: most output tokens, at least 1.
        declared: output tokens that the request announced, or None.
        prompt_token_ids: the prompt; empty where it is not tokens.
    """

    slo_class: str
    prompt_tokens: int
    max_tokens: int
    declared: int | None = None
    prompt_token_ids: Sequence[int] = ()


class LengthForecaster(Protocol):
    """Predicts total output lengths, and learns from those that came."""

    def predict(self, query: LengthQuery, generated: int = 0) -> LengthPrediction:
        """Central estimate of a request's total output tokens, ``generated`` of which are there.

        Never more than ``max_tokens`` and never less than ``generated + 1`` (within the cap). A
        declared length is believed until the answer is longer.
        """

    def observe(self, query: LengthQuery, tokens: int, *, cut_off: bool = False) -> None:
        """Record that a request ended by itself after ``tokens`` output tokens, or that its cap
        ``cut_off`` its answer there."""


class QuantileForecaster:
    """The median, or another quantile, of the class's requests that got further than this one.

    Args:
        lengths: what is known of classes; ``observe`` adds to it.
        quantile: of the lengths, 0 < quantile < 1.
    """

    def __init__(self, lengths: OutputLengthPredictor, quantile: float = 0.5) -> None:
        self._lengths = lengths
        self._quantile = checked_quantile(quantile)

    def predict(self, query: LengthQuery, generated: int = 0) -> LengthPrediction:
        return self._lengths.predict(
            query.slo_class, query.max_tokens, query.declared, generated, self._quantile
        )

    def observe(self, query: LengthQuery, tokens: int, *, cut_off: bool = False) -> None:
        self._lengths.observe(query.slo_class, tokens, cut_off=cut_off)


class RunningMean:
    """Mean of the values so far; after ``memory`` of them, older ones fade exponentially."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._count = 0
        self.mean = 0.0

    def add(self, value: float) -> None:
        self._count += 1
        self.mean += (value - self.mean) / min(self._count, self._memory)


class ForecastError(NamedTuple):
    """Attributes: ratio, predicted / actual; relative, |predicted - actual| / actual."""

    ratio: float
    relative: float


def forecast_error(predicted: float, actual: int) -> ForecastError:
    """How far off a predicted length was; an empty answer counts as one token."""
    actual = max(actual, 1)
    return ForecastError(predicted / actual, abs(predicted - actual) / actual)
