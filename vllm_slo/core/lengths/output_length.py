# SPDX-License-Identifier: Apache-2.0
"""How many tokens will a request generate: what it declared, what its class did, or its cap.

An answer that `max_tokens` cut off would have gone on: it is a censored observation. Taken as it
is, or left out, it would make answers look shorter than they are, since long ones are cut off more
often. So a class's lengths are those of the product-limit estimator (Kaplan and Meier, 1958): an
answer that was cut off counts among those that got as far, and not among those that ended there.

A central guess for ordering work is in `core.lengths.forecast`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.lengths.holds import holds_of

Ints = NDArray[np.int64]

Source = Literal["declared", "quantile", "learnt", "cap"]
"""Where a predicted length comes from: the request itself, what requests of its class did, a
regressor that learnt from all requests (`core.lengths.forecast`), or ``max_tokens``."""


_Seen: TypeAlias = tuple[int, bool]
"""(tokens of an answer, whether it was cut off there)."""

ROUNDING = 1e-6
UNSEEN = 1 << 40
"""A length beyond all that were seen: longer answers were cut off."""


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
        min_samples: requests of a class that must have ended before it is believed; for a length,
            not cut off.
    """

    PARTS = 8
    """Points of the survival curve that ``expected_hold`` looks at."""

    def __init__(self, quantile: float = 0.9, window: int = 256, min_samples: int = 8) -> None:
        self._quantile = checked_quantile(quantile)
        self._window = window
        self._min_samples = min_samples
        self._arrivals: dict[str, deque[_Seen]] = {}
        self._seen: dict[str, list[_Seen]] = {}
        self._samples: dict[str, list[int]] = {}
        self._ends: dict[str, int] = {}
        self._arrays: dict[str, Ints] = {}

    def observe(self, slo_class: str, tokens: int, *, cut_off: bool = False) -> None:
        """Record that a request of this class ended by itself after ``tokens`` tokens, or that its
        cap ``cut_off`` its answer there."""
        arrivals = self._arrivals.setdefault(slo_class, deque())
        seen = self._seen.setdefault(slo_class, [])
        arrivals.append((tokens, cut_off))
        insort(seen, (tokens, cut_off))
        ends = self._ends.get(slo_class, 0) + (not cut_off)
        if len(arrivals) > self._window:
            oldest = arrivals.popleft()
            seen.pop(bisect_right(seen, oldest) - 1)
            ends -= not oldest[1]
        self._ends[slo_class] = ends
        self._samples.pop(slo_class, None)
        self._arrays.pop(slo_class, None)

    def _ranked(self, slo_class: str) -> Sequence[int]:
        """The lengths of a class in ascending order, as many as were seen, with those that were cut
        off replaced by what they would have become; `UNSEEN` where nobody knows."""
        if slo_class not in self._seen:
            return ()
        sample = self._samples.get(slo_class)
        if sample is None:
            sample = self._samples[slo_class] = _product_limit(self._seen[slo_class])
        return sample

    def _got_to(self, slo_class: str, tokens: int) -> int:
        """How many answers of a class were at least so long."""
        seen = self._seen[slo_class]
        return len(seen) - bisect_left(seen, (tokens, False))

    def _longest(self, slo_class: str) -> int:
        """The longest answer of a class that was seen, whether it ended there or was cut off."""
        return self._seen[slo_class][-1][0]

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
        further than this one. Where longer answers were cut off before it, it is this request's cap
        if enough answers got there, and else nobody knows.
        """
        floor = min(generated + 1, max_tokens)
        if declared is not None and declared > generated:
            return LengthPrediction(max(min(declared, max_tokens), floor), "declared")
        ranked = self._ranked(slo_class)
        longer = bisect_right(ranked, generated)
        survivors = len(ranked) - longer
        if survivors > 0:
            share = self._quantile if quantile is None else quantile
            length = ranked[longer + math.ceil(share * survivors) - 1]
            if length < UNSEEN and self._ends[slo_class] >= self._min_samples:
                return LengthPrediction(max(min(length, max_tokens), floor), "quantile")
            if length >= max_tokens and self._got_to(slo_class, max_tokens) >= self._min_samples:
                return LengthPrediction(max_tokens, "quantile")
        return LengthPrediction(max(max_tokens, 1), "cap")

    def points(self, slo_class: str) -> tuple[int, ...]:
        """What is known of a class, for `length_of` and `hold_of`; empty until it is believed.

        The quantile of its lengths, `UNSEEN` if that is not known, the `PARTS` lengths that
        `expected_hold` looks at, and of how many requests they are.
        """
        ranked = self._ranked(slo_class)
        longer = bisect_right(ranked, 0)
        survivors = len(ranked) - longer
        if len(ranked) < self._min_samples or survivors < 1:
            return ()
        known = self._ends[slo_class] >= self._min_samples
        place = longer + math.ceil(self._quantile * survivors) - 1
        quantile = ranked[place] if known else UNSEEN
        looks = [ranked[longer + part * survivors // self.PARTS] for part in range(self.PARTS)]
        longest = self._longest(slo_class)
        return (quantile, *(min(length, longest) for length in looks), survivors)

    def all_points(self) -> dict[str, tuple[int, ...]]:
        """`points` of every class that is believed."""
        known = {slo_class: self.points(slo_class) for slo_class in self._seen}
        return {slo_class: points for slo_class, points in known.items() if points}

    def expected_hold(
        self, slo_class: str, prompt: int, max_tokens: int, declared: int | None, generated: int
    ) -> int:
        """KV tokens to set aside for a request: the most that it can be expected to hold.

        Requests of a class do not all end late, nor at the same time. With S(n) the share of those
        that got as far as this one and go on to n tokens, it holds (prompt + n) S(n) tokens on
        average when it would be at n, and the greatest of these is set aside (never less than it
        needs next). Over many requests that bounds what they hold together at any time, on average.
        A declared length is taken at its word; without any knowledge only what is needed next. S(n)
        is known up to the longest answer that was seen, and looked at no further.
        """
        columns = (prompt, max_tokens, declared or 0, generated)
        return int(self.expected_holds(slo_class, *np.array(columns, dtype=np.int64)[:, None])[0])

    def expected_holds(
        self, slo_class: str, prompt: Ints, max_tokens: Ints, declared: Ints, generated: Ints
    ) -> Ints:
        """`expected_hold` of many requests of a class: (n,) tokens of each argument and answer.

        A declared length of 0 is none.
        """
        ranked = self._ranked(slo_class)
        believed = len(ranked) >= self._min_samples
        if slo_class not in self._arrays:
            self._arrays[slo_class] = np.array(ranked if believed else (), dtype=np.int64)
        longest = self._longest(slo_class) if believed else 0
        columns = prompt, max_tokens, declared, generated
        return holds_of(self._arrays[slo_class], longest, self.PARTS, *columns)


def _product_limit(seen: Sequence[_Seen]) -> list[int]:
    """As many lengths as were ``seen`` (ascending), none cut off, of the distribution that the
    product-limit estimator finds: its quantiles at 1/2n, 3/2n and so on.

    Without answers that were cut off these are the lengths that were seen. Those that the estimator
    cannot tell, as the longest answers were cut off, are `UNSEEN`.
    """
    count = len(seen)
    survival = 1.0
    sample: list[int] = []
    for place, (tokens, cut_off) in enumerate(seen):
        if cut_off:
            continue
        survival *= 1.0 - 1.0 / (count - place)
        ended = (1.0 - survival) * count + ROUNDING
        while len(sample) + 0.5 <= ended:
            sample.append(tokens)
    return sample + [UNSEEN] * (count - len(sample))


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
