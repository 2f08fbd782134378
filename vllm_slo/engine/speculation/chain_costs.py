# SPDX-License-Identifier: Apache-2.0
"""What the passes of a draft cost, and what promises may count on where chains are drafted."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.admission.program import PLAIN, Speculated
from vllm_slo.core.arrays import Floats
from vllm_slo.core.speculation.acceptance import AcceptanceEstimator, expected_tokens
from vllm_slo.core.speculation.draft_pass_time import DraftPassTime
from vllm_slo.core.speculation.measured_trees import MeasuredTrees
from vllm_slo.core.speculation.tree_budget import sustained_trees
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling.decode_model import WayToDecode
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.slo_request import UNLABELLED, SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock

KEPT_WEIGHT = 0.01
"""Weight of the newest answer in the exponential mean of what chains yield over what is expected of
them: some hundred steps of a request."""
MOST_KEPT = 2.0
"""Times what was expected that one step counts for at most in that mean."""


def label_of(tracked: SLORequest | None) -> str:
    """The class by which the acceptance of a request's drafts is learnt."""
    return UNLABELLED if tracked is None else tracked.slo_class


class ChainCosts:
    """The price and the yield of chains on one engine.

    Args:
        most: drafts of a request at most.
        lowers: whether a step may say how far ahead to draft.

    Attributes:
        acceptance: what has been learnt of it, by class.
        base: the step times that passes are compared with.
    """

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        clock: StepClock,
        config: SLOConfig,
        *,
        most: int,
        lowers: bool,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._clock = clock
        self._most = most
        self._lowers = lowers
        self.acceptance = AcceptanceEstimator()
        self.base = clock.estimator.base
        self._pass_time = self._new_pass_time()
        self._measured = MeasuredTrees(config.tpot_window_tokens, config.margin_quantile)
        self._kept = 1.0
        self._sustained: dict[float, tuple[float, Speculated]] = {}
        self._drafts_that_keep(1.0, 0.1, StepTimeModel.prior(), 0.001)  # compiles it now

    def begin_step(self) -> None:
        """Forget what was worked out for the last step."""
        self._sustained.clear()

    def follow_base(self) -> None:
        """Learn what a pass takes anew where the step times have been fitted anew."""
        if self._clock.estimator.base is not self.base:
            self.base = self._clock.estimator.base
            self._pass_time = self._new_pass_time()

    def observe_passes(self, passes: int, ratio: float) -> None:
        """Take in a step of so many passes that took ``ratio`` times what it takes without."""
        self._pass_time.observe(passes, ratio)

    def observe_drafts(self, request_id: str, label: str, given: int, length: int) -> None:
        """Take in ``given`` tokens of a request of which ``length`` were to be verified."""
        expected = expected_tokens(self.acceptance.acceptance(label), length)
        self._measured.observe(request_id, expected, given)
        self._kept += KEPT_WEIGHT * (min(given / expected, MOST_KEPT) - self._kept)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._measured.forget(request_id)

    def acceptance_of(self, tracked: SLORequest | None) -> float:
        """The acceptance of a request's drafts; None: it has no objective."""
        return self.acceptance.acceptance(label_of(tracked))

    def _new_pass_time(self) -> DraftPassTime:
        """Profiles that know what a pass takes leave little to learn."""
        known = any(c > 0.0 for _, c, _ in self.base.terms)
        return DraftPassTime(0.0) if known else DraftPassTime()

    def pass_s(self, margin: float = 1.0) -> float:
        """Seconds of one pass of the draft that step times do not hold yet."""
        if not self._lowers:
            return 0.0
        plain_s = self.base.predict_s(max(len(self._state.running), 1))
        return self._pass_time.share() * plain_s * margin

    def without_passes(self, model: StepTimeModel) -> StepTimeModel:
        """Step times to plan by. Where drafting is always the same, they hold all of it."""
        if self._lowers:
            return model
        (k1, _, b1), (k2, _, b2) = model.terms
        return replace(model, terms=((k1, 0.0, b1), (k2, 0.0, b2)))

    def full_pass_s(self, model: StepTimeModel, margin: float = 1.0) -> float:
        """Seconds of one pass of the draft, those that step times hold included."""
        if not self._lowers:
            return 0.0
        return max(c for _, c, _ in model.terms) + self.pass_s(margin)

    def plain(self) -> StepTimeModel:
        """As `DecodeModel.plain`. Steps without drafts make one pass all the same."""
        steps = self._clock
        model = steps.plain_promise_model
        return model.besides(self.full_pass_s(model, steps.margin)) if self._lowers else model

    def _drafts_that_keep(
        self, share: float, tpot_s: float, model: StepTimeModel, pass_s: float
    ) -> tuple[Speculated, StepTimeModel, float]:
        """The drafts with which most requests keep a TPOT together, steps with them, and how many
        do. ``model`` are steps without drafts; the first pass is part of them."""
        further = np.arange(self._most, dtype=np.float64)
        chances: Floats = self._least_acceptance() ** (further[:, None] + 1.0)
        least = model.besides(pass_s)
        drafts, drafting_s, most = sustained_trees(
            chances, share, tpot_s, least, drafting_s=further * pass_s
        )
        return drafts, least.besides(drafting_s), most

    def speculative(self, tpot_s: float) -> WayToDecode | None:
        steps = self._clock
        plain = steps.plain_promise_model
        pass_s = self.full_pass_s(plain, steps.margin)
        drafts, model, _ = self._drafts_that_keep(self._measured.share(), tpot_s, plain, pass_s)
        return None if drafts == PLAIN else (model, drafts)

    def _least_acceptance(self) -> float:
        """Of the classes that ask for a TPOT."""
        return min(
            (self.acceptance.acceptance(t.slo_class) for t in self._tracker if t.tpot_s < INFINITY),
            default=self.acceptance.acceptance(),
        )

    def spread(self) -> float:
        return math.hypot(self._clock.spread, self._measured.spread())

    def sustainable(self, tpot_s: float) -> tuple[float, Speculated]:
        """As `DecodeModel.sustainable`; asked for every request that waits, so answered once a
        step."""
        if tpot_s not in self._sustained:
            model = self._clock.verifying_model
            drafts, _, most = self._drafts_that_keep(
                min(self._kept, 1.0), tpot_s, model, self.full_pass_s(model)
            )
            self._sustained[tpot_s] = most, drafts
        return self._sustained[tpot_s]
