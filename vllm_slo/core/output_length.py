# SPDX-License-Identifier: Apache-2.0
"""How many tokens will a request generate: what it declared, what its class did, or its cap.

A central guess for ordering work is in `core.length_forecast`.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

Source = Literal["declared", "quantile", "learnt", "cap"]
"""Where a predicted length comes from: the request itself, what requests of its class did, a
regressor that learnt from all requests (`core.length_forecast`), or ``max_tokens``."""


class LengthPrediction(NamedTuple):
    """Attributes: tokens (total output, at least 1) and where the number comes from."""

    tokens: int
    source: Source


def checked_quantile(quantile: float) -> float:
    """The quantile itself; ValueError unless it lies strictly between 0 and 1."""
    if not 0.0 < quantile < 1.0:
        raise ValueError(f"quantile must lie strictly between 0 and 1, not {quantile}")
    return quantile


class OutputLengthPredictor:
    """Online quantile of the output length of each class, over its last ``window`` requests.

    Args:
        quantile: of the lengths seen, 0 < quantile < 1.
        window: requests remembered per class.
        min_samples: requests a class must have finished before it is believed.
    """

    PARTS = 8
    """Points of the survival curve that ``expected_hold`` looks at."""
    REMEMBERED = 4096
    """Of its answers: it is asked for every promise in every plan, and has few new ones to give."""

    def __init__(self, quantile: float = 0.9, window: int = 256, min_samples: int = 8) -> None:
        self._quantile = checked_quantile(quantile)
        self._window = window
        self._min_samples = min_samples
        self._arrivals: dict[str, deque[int]] = {}
        self._ranked: dict[str, list[int]] = {}
        self._holds: dict[tuple[str, int, int, int], int] = {}

    def observe(self, slo_class: str, tokens: int) -> None:
        """Record that a request of this class ended by itself after ``tokens`` tokens."""
        arrivals = self._arrivals.setdefault(slo_class, deque())
        ranked = self._ranked.setdefault(slo_class, [])
        arrivals.append(tokens)
        insort(ranked, tokens)
        self._holds.clear()
        if len(arrivals) > self._window:
            ranked.pop(bisect_right(ranked, arrivals.popleft()) - 1)

    def predict(
        self,
        slo_class: str,
        max_tokens: int,
        declared: int | None = None,
        generated: int = 0,
        quantile: float | None = None,
    ) -> LengthPrediction:
        """Total output tokens of a request that has generated ``generated`` so far.

        Never more than ``max_tokens`` and never less than ``generated + 1`` (within the cap). The
        ``quantile`` (0 < quantile < 1; None: the predictor's own) is taken among requests that got
        further than this one.
        """
        floor = min(generated + 1, max_tokens)
        if declared is not None and declared > generated:
            return LengthPrediction(max(min(declared, max_tokens), floor), "declared")
        ranked = self._ranked.get(slo_class, ())
        longer = bisect_right(ranked, generated)
        survivors = len(ranked) - longer
        if len(ranked) >= self._min_samples and survivors > 0:
            share = self._quantile if quantile is None else quantile
            place = longer + math.ceil(share * survivors) - 1
            return LengthPrediction(max(min(ranked[place], max_tokens), floor), "quantile")
        return LengthPrediction(max(max_tokens, 1), "cap")

    def points(self, slo_class: str) -> tuple[int, ...]:
        """What is known of a class, for `length_of` and `hold_of`; empty until it is believed.

        The quantile of its lengths, the `PARTS` lengths that `expected_hold` looks at, and of how
        many requests they are.
        """
        ranked = self._ranked.get(slo_class, ())
        longer = bisect_right(ranked, 0)
        survivors = len(ranked) - longer
        if len(ranked) < self._min_samples or survivors < 1:
            return ()
        quantile = ranked[longer + math.ceil(self._quantile * survivors) - 1]
        looks = [ranked[longer + part * survivors // self.PARTS] for part in range(self.PARTS)]
        return (quantile, *looks, survivors)

    def all_points(self) -> dict[str, tuple[int, ...]]:
        """`points` of every class that is believed."""
        known = {slo_class: self.points(slo_class) for slo_class in self._ranked}
        return {slo_class: points for slo_class, points in known.items() if points}

    def expected_hold(
        self, slo_class: str, prompt: int, max_tokens: int, declared: int | None, generated: int
    ) -> int:
        """KV tokens to set aside for a request: the most that it can be expected to hold.

        Requests of a class do not all end late, nor at the same time. With S(n) the share of those
        that got as far as this one and go on to n tokens, it holds (prompt + n) S(n) tokens on
        average when it would be at n, and the greatest of these is set aside (never less than it
        needs next). Over many requests that bounds what they hold together at any time, on average.
        A declared length is taken at its word; without any knowledge only what is needed next.
        """
        now = prompt + generated + 1
        if declared is not None and declared > generated:
            return max(prompt + min(declared, max_tokens), now)
        ranked = self._ranked.get(slo_class, ())
        longer = bisect_right(ranked, generated)
        survivors = len(ranked) - longer
        if len(ranked) < self._min_samples or survivors < 1:
            return now
        asked = slo_class, prompt, max_tokens, longer
        hold = self._holds.get(asked)
        if hold is None:
            if len(self._holds) >= self.REMEMBERED:
                self._holds.clear()
            hold = self._holds[asked] = self._hold(ranked, longer, prompt, max_tokens)
        return max(hold, now)

    def _hold(self, ranked: Sequence[int], longer: int, prompt: int, max_tokens: int) -> int:
        """The greatest (prompt + n) S(n), n the lengths ``ranked`` from place ``longer`` on."""
        survivors, most = len(ranked) - longer, 0
        for part in range(self.PARTS):
            passed = part * survivors // self.PARTS
            length = min(ranked[longer + passed], max_tokens)
            most = max(most, (prompt + length) * (survivors - passed) // survivors)
            if length == max_tokens:  # fewer and fewer are at the cap from here on
                break
        return most


def length_of(points: Sequence[int], max_tokens: int, declared: int | None) -> int:
    """What `OutputLengthPredictor.predict` says of a request that has not begun."""
    if declared is not None and declared > 0:
        known = declared
    elif points:
        known = points[0]
    else:
        return max(max_tokens, 1)
    return max(min(known, max_tokens), min(1, max_tokens))


def hold_of(points: Sequence[int], prompt: int, max_tokens: int, declared: int | None) -> int:
    """What `OutputLengthPredictor.expected_hold` says of a request that has not begun."""
    now = prompt + 1
    if declared is not None and declared > 0:
        return max(prompt + min(declared, max_tokens), now)
    if not points:
        return now
    _, *looks, survivors = points
    return max(
        now,
        *(
            (prompt + min(length, max_tokens))
            * (survivors - part * survivors // len(looks))
            // survivors
            for part, length in enumerate(looks)
        ),
    )
