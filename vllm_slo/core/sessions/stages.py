# SPDX-License-Identifier: Apache-2.0
"""An answer in stages, each with a TPOT of its own: thinking, then the response.

Source: SLOs-Serve, table 1 (stages and their objectives) and section 3.2.1, "Multi-Decode SLOs":
the tightest objective stands for the request in admission. Here it is the tightest of the stages
that are still to come, so a request draws less once its tight stage is over.

The gap before a stage's first token belongs to that stage, so every gap after the first token
counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_slo.core.attainment import WindowTPOT
from vllm_slo.core.types import INFINITY


class StageResult(NamedTuple):
    """How a stage went.

    Attributes:
        tpot_s: its objective, seconds per token; infinite without one.
        worst_s: its worst window; None while it has no gap between two tokens.
        attained: whether it keeps its objective; None without one, or where it did not begin.
    """

    tpot_s: float
    worst_s: float | None
    tokens: int
    attained: bool | None


class StagedTPOT:
    """TPOT of an answer, stage by stage; with one stage, that of the answer.

    Args:
        tpots_s: objective of each stage, seconds per token; infinite without one.
        window: tokens per TPOT window.

    Attributes:
        stage: number of the stage that goes on.
        slack: how many times its objectives the answer is to keep. They count as they are for
            whether it attains.
        tightest_s: the tightest from here on, itself included, times the slack.
        is_last: whether no other stage follows.
    """

    __slots__ = (
        "_done",
        "_kept",
        "_tpots_s",
        "is_last",
        "measure",
        "slack",
        "stage",
        "tightest_s",
        "tokens",
    )

    def __init__(self, tpots_s: Sequence[float], window: int) -> None:
        self._tpots_s = tuple(tpots_s)
        self._done: list[tuple[WindowTPOT, int]] = []
        self._kept = True
        self.tokens = 0
        self.stage = 0
        self.slack = 1.0
        self.is_last = len(self._tpots_s) == 1
        self.tightest_s = min(self._tpots_s)
        self.measure = WindowTPOT(window)

    @property
    def tpot_s(self) -> float:
        """That of the stage that goes on, times the slack."""
        return self._tpots_s[self.stage] * self.slack

    def relax(self, slack: float) -> None:
        """From now on the answer is to keep so many times its objectives."""
        self.slack = slack
        self.tightest_s = min(self._tpots_s[self.stage :]) * slack

    @property
    def stages(self) -> int:
        return len(self._tpots_s)

    def add(self, time_s: float, count: int = 1) -> None:
        self.measure.add(time_s, count)
        self.tokens += count

    def next_stage(self) -> None:
        """Note that the last token recorded was the last of its stage."""
        assert not self.is_last
        self._done.append((self.measure, self.tokens))
        self._kept = self._kept and _keeps(self._tpots_s[self.stage], self.measure.worst_s)
        self.stage += 1
        self.is_last = self.stage + 1 == len(self._tpots_s)
        self.tightest_s = min(self._tpots_s[self.stage :]) * self.slack
        ended, self.tokens = self.measure, 0
        self.measure = ended.successor()

    @property
    def missed(self) -> bool:
        """Whether an objective has been missed, by a stage that is over or by a full window.

        The end of the answer can still save a full window: a tail joins the last one.
        """
        worst_s = self.measure.worst_full_s
        return not self._kept or (worst_s is not None and worst_s > self.tpot_s)

    @property
    def attained(self) -> bool:
        """Whether every stage so far keeps its objective, given that no token is to come."""
        return self._kept and _keeps(self._tpots_s[self.stage], self.measure.worst_s)

    def keeps(self, slack: float) -> bool:
        """Whether every stage so far keeps so many times its objective, likewise."""
        measures = (*(measure for measure, _ in self._done), self.measure)
        return all(
            _keeps(tpot_s * slack, measure.worst_s)
            for tpot_s, measure in zip(self._tpots_s, measures, strict=False)
        )

    @property
    def worst_s(self) -> float | None:
        """The worst window of all stages; None before the second token."""
        worst_s = [m.worst_s for m in (*(m for m, _ in self._done), self.measure)]
        return max((stage_s for stage_s in worst_s if stage_s is not None), default=None)

    def results(self) -> list[StageResult]:
        begun = [*self._done, (self.measure, self.tokens)]
        results = []
        for number, tpot_s in enumerate(self._tpots_s):
            if number >= len(begun):
                results.append(StageResult(tpot_s, None, 0, None))
                continue
            measure, tokens = begun[number]
            attained = None if tpot_s == INFINITY or not tokens else _keeps(tpot_s, measure.worst_s)
            results.append(StageResult(tpot_s, measure.worst_s, tokens, attained))
        return results


def _keeps(tpot_s: float, worst_s: float | None) -> bool:
    return worst_s is None or worst_s <= tpot_s
