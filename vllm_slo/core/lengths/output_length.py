# SPDX-License-Identifier: Apache-2.0
"""How many tokens a request will generate: what it declared, what its class did, or its cap.

An answer that `max_tokens` cut off would have gone on: it is a censored observation. Long answers
are cut off more often. So if such an answer were taken as it is, or left out, answers would look
shorter than they are. The lengths of a class are therefore those of the product-limit estimator
(Kaplan and Meier, 1958): an answer that was cut off counts among those that got as far, and not
among those that ended there.

`core.lengths.forecast` has a central estimate for ordering work.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.jit import jit

Ints = NDArray[np.int64]

Source = Literal["declared", "quantile", "learnt", "cap"]
"""Where a predicted length comes from: the request itself, what requests of its class did, a
regressor that learnt from all requests (`core.lengths.forecast`), or ``max_tokens``."""
_Seen: TypeAlias = tuple[int, bool]
"""(tokens of an answer, whether it was cut off there)."""
ROUNDING = 1e-6
"""Answers: so little below a whole number is that number."""
UNSEEN = 1 << 40
"""Tokens, more than any answer has: the length of answers of which it is only known that they are
longer than all that ended by themselves."""


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
        min_samples: requests of a class that must have ended before its lengths are used; for a
            quantile, without being cut off.
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
        off replaced by what they would have become; `UNSEEN` where that is not known."""
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
        further than this one. If it is not known, since longer answers were cut off before it, the
        result is this request's cap.
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
        """What is known of a class, for `length_of` and `hold_of`; empty until that is enough.

        These are the quantile of its lengths (`UNSEEN` if that is not known), the `PARTS` lengths
        that `expected_hold` looks at, and the number of requests that they come from.
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
        """`points` of every class of which enough is known."""
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
        S(n) is looked at up to the longest answer that was seen.

        A declared length is believed. If too little is known of the class, only what is needed next
        is set aside.
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


@jit
def holds_of(
    ranked: Ints,
    class_longest: int,
    parts: int,
    prompt: Ints,
    cap: Ints,
    declared: Ints,
    done: Ints,
) -> Ints:
    """KV tokens to set aside for each of n requests of a class.

    Args:
        ranked: lengths of the class in ascending order; empty where it is not believed.
        class_longest: the longest answer of the class that was seen.
        parts: points of the survival curve to look at.
        prompt, cap, declared, done: (n,) tokens of the prompt, most tokens of the answer, its
            declared length (0: none), tokens so far.

    Returns:
        (n,) tokens, as `OutputLengthPredictor.expected_hold` gives them.
    """
    holds = np.empty(len(prompt), dtype=np.int64)
    for i in range(len(prompt)):
        now = prompt[i] + done[i] + 1
        if declared[i] > done[i]:
            holds[i] = max(prompt[i] + min(declared[i], cap[i]), now)
            continue
        longer = np.searchsorted(ranked, done[i], side="right")
        survivors = len(ranked) - longer
        longest, most = min(cap[i], class_longest), 0
        for part in range(parts if survivors > 0 else 0):
            passed = part * survivors // parts
            length = min(ranked[longer + passed], longest)
            most = max(most, (prompt[i] + length) * (survivors - passed) // survivors)
            if length == longest:  # fewer and fewer are there from here on
                break
        holds[i] = max(most, now)
    return holds


def _product_limit(seen: Sequence[_Seen]) -> list[int]:
    """Quantiles at 1/2n, 3/2n and so on of the product-limit estimator's distribution: n lengths
    for the n answers ``seen`` (ascending).

    If no answer was cut off, these are the lengths that were seen. If the longest answers were cut
    off, the estimator does not tell the largest lengths; these are `UNSEEN`.
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
    """`OutputLengthPredictor.predict` for a request that has not begun, from `points`."""
    if declared is not None and declared > 0:
        length = declared
    elif points:
        length = points[0]
    else:
        return max(max_tokens, 1)
    return max(min(length, max_tokens), min(1, max_tokens))


def hold_of(points: Sequence[int], prompt: int, max_tokens: int, declared: int | None) -> int:
    """`OutputLengthPredictor.expected_hold` for a request that has not begun, from `points`."""
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
