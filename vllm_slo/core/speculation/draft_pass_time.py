# SPDX-License-Identifier: Apache-2.0
"""What passes of a draft model add to a step of an engine with vLLM's own proposers."""

from __future__ import annotations

from vllm_slo.core.step_time.model import StepTimeModel


def with_draft_steps(model: StepTimeModel, steps: int) -> StepTimeModel:
    """The same engine where every step drafts in ``steps`` passes, whatever its shape says."""
    (k1, c1, b1), (k2, c2, b2) = model.terms
    return StepTimeModel(
        ((k1, 0.0, b1 + c1 * steps), (k2, 0.0, b2 + c2 * steps)),
        model.kv_s,
        model.max_tokens,
        model.pair_s,
    )


class DraftPassTime:
    """Estimates what one more pass of the draft adds to a step, as a share of the step without it.

    vLLM's proposers do not report how long they took. So the estimate is the slope of step times
    over the number of passes. It stays near ``first_guess`` until steps with different numbers of
    passes were seen, and enough of them.

    Args:
        first_guess: share before anything was seen.
    """

    PRIOR = 8.0
    """Steps, each one pass off the others, that ``first_guess`` counts for."""
    REMEMBERED = 200
    """Steps of each number of passes after which the oldest hardly count."""
    DEAREST = 2.0
    """Most that a pass may seem to take, in steps without drafts. A step that took longer was held
    up by something else, and a mean would not forget it for thousands of steps."""

    def __init__(self, first_guess: float = 0.05) -> None:
        self._first_guess = first_guess
        self._seen: dict[int, tuple[int, float]] = {}  # passes -> (steps, mean ratio)

    def observe(self, passes: int, ratio: float) -> None:
        """Learn from a step that computed no prompts.

        Args:
            passes: of the draft in it.
            ratio: its time over that of the same step without drafts.
        """
        count, mean = self._seen.get(passes, (0, 0.0))
        count = min(count + 1, self.REMEMBERED)
        ratio = min(ratio, 1.0 + self.DEAREST * passes)
        self._seen[passes] = count, mean + (ratio - mean) / count

    def share(self) -> float:
        """A pass's share of the time of a step without drafts; at least 0."""
        total = sum(count for count, _ in self._seen.values())
        if len(self._seen) < 2:
            return self._first_guess
        middle = sum(count * passes for passes, (count, _) in self._seen.items()) / total
        above = sum(
            count * mean * (passes - middle) for passes, (count, mean) in self._seen.items()
        )
        spread = sum(count * (passes - middle) ** 2 for passes, (count, _) in self._seen.items())
        return max((above + self.PRIOR * self._first_guess) / (spread + self.PRIOR), 0.0)
