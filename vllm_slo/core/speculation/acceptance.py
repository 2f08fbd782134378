# SPDX-License-Identifier: Apache-2.0
"""How many drafts are accepted: the estimate of each class, and the tokens that follow from it.

Source: SLOs-Serve, section 3.2.3.
"""

from __future__ import annotations

import math


def expected_tokens(acceptance: float, length: float) -> float:
    """Acc(sl): the mean number of tokens of a step that verifies ``length`` tokens of a request.

    Args:
        acceptance: chance that a draft is accepted if those before it are, in [0, 1].
        length: the request's last token and its drafts, at least 1.
    """
    if acceptance >= 1.0:
        return float(length)
    return float((1.0 - acceptance**length) / (1.0 - acceptance))


class AcceptanceEstimator:
    """Estimates the chance that a draft is accepted if those before it are, by class.

    A trial is a draft that the target looked at: each accepted draft, and the first rejected one.
    Drafts behind a rejected one are not trials. The weight of a trial falls exponentially with the
    number of later ones. A class with few trials is assumed to be like all classes together, and
    these at first like ``prior``.

    Args:
        prior: acceptance before the first trial.
        memory: trials after which an old one counts for 1/e.
    """

    LEAST, MOST = 0.02, 0.98
    """Bounds of an estimate: no chance is certain."""
    PRIOR_TRIALS = 8.0
    """Trials that ``prior`` counts for."""
    SHARED_TRIALS = 32.0
    """Trials after which a class's own count as much as those of all classes."""

    def __init__(self, prior: float = 0.6, memory: float = 400.0) -> None:
        self._prior = prior
        self._memory = memory
        self._all = 0.0, 0.0  # accepted, tried
        self._classes: dict[str, tuple[float, float]] = {}

    def observe(self, slo_class: str, accepted: int, tried: int) -> None:
        """Learn from one step of one request: ``accepted`` of ``tried`` drafts were accepted.

        Raises:
            ValueError: more drafts were accepted than tried, or fewer than none.
        """
        if not 0 <= accepted <= tried:
            raise ValueError(f"acceptance: {accepted} of {tried} drafts cannot have been accepted")
        if tried:
            keep = math.exp(-tried / self._memory)
            hits, trials = self._classes.get(slo_class, (0.0, 0.0))
            self._classes[slo_class] = keep * hits + accepted, keep * trials + tried
            hits, trials = self._all
            self._all = keep * hits + accepted, keep * trials + tried

    def acceptance(self, slo_class: str | None = None) -> float:
        """The estimate of a class, or of all classes together, within [LEAST, MOST]."""
        hits, trials = self._all
        hits += self.PRIOR_TRIALS * self._prior
        estimate = hits / (trials + self.PRIOR_TRIALS)
        if slo_class in self._classes:
            hits, trials = self._classes[slo_class]
            estimate = (hits + self.SHARED_TRIALS * estimate) / (trials + self.SHARED_TRIALS)
        return min(max(estimate, self.LEAST), self.MOST)
