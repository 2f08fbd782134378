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
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from vllm_slo.core.arrays import Ints, Ints2D
from vllm_slo.core.jit import jit

Source = Literal["declared", "quantile", "learnt", "cap"]
"""Where a predicted length comes from: the request itself, what requests of its class did, a
regressor that learnt from all requests (`core.lengths.forecast`), or ``max_tokens``."""
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
        # An answer is twice its tokens, and 1 more where it was cut off there.
        self._arrivals: dict[str, deque[int]] = {}
        self._seen: dict[str, array[int]] = {}  # ascending
        self._samples: dict[str, Ints] = {}
        self._ends: dict[str, int] = {}

    def observe(self, slo_class: str, tokens: int, *, cut_off: bool = False) -> None:
        """Record that a request of this class ended by itself after ``tokens`` tokens, or that its
        cap ``cut_off`` its answer there."""
        arrivals = self._arrivals.setdefault(slo_class, deque())
        seen = self._seen.setdefault(slo_class, array("q"))
        newest = 2 * tokens + cut_off
        arrivals.append(newest)
        insort(seen, newest)
        ends = self._ends.get(slo_class, 0) + (not cut_off)
        if len(arrivals) > self._window:
            oldest = arrivals.popleft()
            del seen[bisect_left(seen, oldest)]
            ends -= oldest % 2 == 0
        self._ends[slo_class] = ends
        self._samples.pop(slo_class, None)

    def _ranked(self, slo_class: str) -> Ints:
        """The lengths of a class in ascending order, as many as were seen, with those that were cut
        off replaced by what they would have become; `UNSEEN` where that is not known."""
        sample = self._samples.get(slo_class)
        if sample is None:
            seen = np.array(self._seen.get(slo_class, array("q")), dtype=np.int64)
            sample = self._samples[slo_class] = _product_limit(seen)
        return sample

    def _got_to(self, slo_class: str, tokens: int) -> int:
        """How many answers of a class were at least so long."""
        seen = self._seen[slo_class]
        return len(seen) - bisect_left(seen, 2 * tokens)

    def _longest(self, slo_class: str) -> int:
        """The longest answer of a class that was seen, whether it ended there or was cut off."""
        return self._seen[slo_class][-1] // 2

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
            length = int(ranked[longer + math.ceil(share * survivors) - 1])
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
        quantile = int(ranked[place]) if known else UNSEEN
        steps = [longer + part * survivors // self.PARTS for part in range(self.PARTS)]
        looks = ranked[steps].tolist()
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
        known = self._believed(slo_class)
        return int(_hold(*known, self.PARTS, prompt, max_tokens, declared or 0, generated))

    def expected_holds(self, slo_class: str, requests: Ints) -> Ints:
        """`expected_hold` of many requests of a class.

        Args:
            slo_class: theirs.
            requests: (4, n) tokens of the prompt, most tokens of the answer, its declared length
                (0: none), tokens so far.

        Returns:
            (n,) tokens.
        """
        return _holds(*self._believed(slo_class), self.PARTS, requests)

    def _believed(self, slo_class: str) -> tuple[Ints, int]:
        """The ranked lengths of a class and the longest one that was seen; none until there are
        enough of them."""
        ranked = self._ranked(slo_class)
        if len(ranked) < self._min_samples:
            return ranked[:0], 0
        return ranked, self._longest(slo_class)


@jit
def _hold(
    ranked: Ints,
    class_longest: int,
    parts: int,
    prompt: int,
    cap: int,
    declared: int,
    done: int,
) -> int:
    """`_holds` of one request."""
    now = prompt + done + 1
    if declared > done:
        return max(prompt + min(declared, cap), now)
    longer = np.searchsorted(ranked, done, side="right")
    survivors = len(ranked) - longer
    longest, most = min(cap, class_longest), 0
    for part in range(parts if survivors > 0 else 0):
        passed = part * survivors // parts
        length = min(ranked[longer + passed], longest)
        most = max(most, (prompt + length) * (survivors - passed) // survivors)
        if length == longest:  # fewer and fewer are there from here on
            break
    return max(most, now)


@jit
def _holds(ranked: Ints, class_longest: int, parts: int, requests: Ints2D) -> Ints:
    """KV tokens to set aside for each of n requests of a class.

    Args:
        ranked: lengths of the class in ascending order; empty where it is not believed.
        class_longest: the longest answer of the class that was seen.
        parts: points of the survival curve to look at.
        requests: (4, n) tokens of the prompt, most tokens of the answer, its declared length
            (0: none), tokens so far.

    Returns:
        (n,) tokens, as `OutputLengthPredictor.expected_hold` gives them.
    """
    holds = np.empty(requests.shape[1], dtype=np.int64)
    for i in range(len(holds)):
        prompt, cap, declared, done = requests[0, i], requests[1, i], requests[2, i], requests[3, i]
        holds[i] = _hold(ranked, class_longest, parts, prompt, cap, declared, done)
    return holds


@jit
def _product_limit(seen: Ints) -> Ints:
    """Quantiles at 1/2n, 3/2n and so on of the product-limit estimator's distribution: n lengths
    for the n answers ``seen``, ascending, as `OutputLengthPredictor` keeps them.

    If no answer was cut off, these are the lengths that were seen. If the longest answers were cut
    off, the estimator does not tell the largest lengths; these are `UNSEEN`.
    """
    count, found = len(seen), 0
    survival = 1.0
    sample = np.full(count, UNSEEN, dtype=np.int64)
    for place in range(count):
        if seen[place] % 2:
            continue
        survival *= 1.0 - 1.0 / (count - place)
        ended = (1.0 - survival) * count + ROUNDING
        while found < count and found + 0.5 <= ended:
            sample[found] = seen[place] // 2
            found += 1
    return sample


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
    most, parts = now, len(looks)
    for part, length in enumerate(looks):
        longest = length if length < max_tokens else max_tokens
        left = survivors - part * survivors // parts
        held = (prompt + longest) * left // survivors
        if held > most:
            most = held
    return most
