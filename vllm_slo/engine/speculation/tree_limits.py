# SPDX-License-Identifier: Apache-2.0
"""How long steps may take where trees are verified, and what promises may count on then."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from vllm.v1.request import Request

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.admission.program import PLAIN, Speculated
from vllm_slo.core.arrays import Floats
from vllm_slo.core.batching.decodes import limit_of
from vllm_slo.core.batching.step import PATIENT_STEPS
from vllm_slo.core.speculation.candidate_trees import TPOTLimit
from vllm_slo.core.speculation.measured_trees import MeasuredTrees
from vllm_slo.core.speculation.tree_budget import sustained_trees
from vllm_slo.core.speculation.window_odds import TreeTokens, WindowOdds
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import DecodeView
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling import request_views
from vllm_slo.engine.scheduling.decode_model import PlainDecoding, WayToDecode
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.responsive_steps import ResponsiveSteps
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.speculation.draft_models import Drafts
from vllm_slo.engine.speculation.verifying_time import VerifyingTime

EPS = 1e-9
DEAR_SHARE = 0.8
"""Share of the dearest drafting seen so far that still counts a step later: a step of trees may be
followed by steps that draft as much."""


class TreeLimits:
    """The time of steps with trees, and the limits that TPOTs set to it. What is worked out counts
    for one step."""

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        clock: StepClock,
        responsive: ResponsiveSteps,
        drafting: Drafts,
        verifying: VerifyingTime,
        config: SLOConfig,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._clock = clock
        self._responsive = responsive
        self._drafting = drafting
        self._verifying = verifying
        self._plain = PlainDecoding(clock)
        self._measured = MeasuredTrees(config.tpot_window_tokens, config.margin_quantile)
        self._views: dict[str, DecodeView] = {}
        self._known_limits: tuple[list[str], list[TPOTLimit]] = [], []
        self._ahead_s: Floats | None = None
        self._verifying_s: float | None = None
        self._context: int | None = None
        self._dear_s = self._stretched_s = 0.0
        self._odds: tuple[WindowOdds, float, int] | None = None
        self._urgent_odds: WindowOdds | None = None
        self._counts: dict[str, TreeTokens] = {}
        self._sustained: dict[float, tuple[float, Speculated]] = {}

    def begin_step(self) -> None:
        """Forget what was worked out for the last step."""
        self._sustained.clear()
        self._views.clear()
        self._known_limits = [], []
        self._ahead_s = self._verifying_s = self._context = self._odds = self._urgent_odds = None
        self._counts.clear()
        self._stretched_s = self._responsive.longest_s(self._clock.promise_model)

    def note_drafting(self, drafting_s: float) -> None:
        """So many seconds of drafting follow the step that is being planned."""
        self._dear_s = max(DEAR_SHARE * self._dear_s, drafting_s)

    def observe(self, request_id: str, expected: float, given: int) -> None:
        """A request got ``given`` tokens of a tree that was expected to yield ``expected``."""
        self._measured.observe(request_id, expected, given)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._measured.forget(request_id)

    def view(self, tracked: SLORequest) -> DecodeView:
        """A decoding request before the step, a token of it being expected; looked at once."""
        name = tracked.request.request_id
        if name not in self._views:
            strength = self._clock.strength
            self._views[name] = request_views.decode_view(tracked, self._clock.start_s, strength)
        return self._views[name]

    def ahead(self) -> float:
        """Tokens that a step yields at best, of a typical tree."""
        return 1.0 + float(self._drafting.typical[:, 0].sum())

    def drafting_s(self) -> Floats:
        """(depths,) seconds of drafting for all who run, by how far ahead, and of verifying at all;
        asked several times in a step, so answered once."""
        if self._ahead_s is None:
            requests = len(self._state.running)
            self._ahead_s = self._drafting.ahead_s(requests) + self.verifying_s()
        return self._ahead_s

    def verifying_s(self) -> float:
        """Seconds that verifying trees adds to a step of all who run, besides their tokens; asked
        several times in a step, so answered once."""
        if self._verifying_s is None:
            requests = max(len(self._state.running), 1)
            self._verifying_s = self._verifying.seconds(requests, self.context())
        return self._verifying_s

    def context(self) -> int:
        """KV tokens that the running requests read; asked several times in a step, so answered
        once."""
        if self._context is None:
            self._context = sum(r.num_computed_tokens for r in self._state.running)
        return self._context

    def limits(self, requests: Sequence[Request]) -> list[TPOTLimit]:
        """Longest step of a token that keeps the TPOT of each promised request that decodes.

        Args:
            requests: those that have candidates, in the order of their trees.
        """
        live = self._tracker.live
        names = [name for name, t in live.items() if t.promised and t.decodes]
        known, limits = self._known_limits
        if names != known:  # promises come and go while a step is planned
            limits = self._find_limits(names, requests)
            self._known_limits = names, limits
        return limits

    def _find_limits(self, names: Sequence[str], requests: Sequence[Request]) -> list[TPOTLimit]:
        start_s = self._clock.start_s
        places = {request.request_id: place for place, request in enumerate(requests)}
        found = []
        for name in names:
            tracked = self._tracker.live[name]
            view = self.view(tracked)
            if view.window_end_s > start_s:  # else it is lost, and hurries nobody
                limit_s = limit_of(start_s, view, 0.0)
                tpot_s = tracked.tpot_s * self._share(view)
                found.append(TPOTLimit(limit_s, tpot_s, places.get(name, -1)))
        return found

    def prompts_wait(self) -> bool:
        """Whether prompts are to be computed of requests that are promised an objective, or may
        begin without a promise."""
        tracker = self._tracker
        if any(True for _ in tracker.promised_before_first_token()):
            return True
        return any(t.opportunistic and not t.decodes for t in tracker.without_promise())

    def counted_tokens(self, view: DecodeView, gain: float) -> float:
        """Tokens of a request that prompts may stretch a step for, if its tree is expected to yield
        ``gain`` of them beside the root's. They are less than one where its window depends on
        drafts."""
        return min(self._counted(view).by_prompts, 1.0 + self._share(view) * gain)

    def _share(self, view: DecodeView) -> float:
        """Share of a tree's gain that nodes may stretch a step for."""
        hoped = max(self.ahead(), 1.0 + EPS)
        return min(max((self._counted(view).by_nodes - 1.0) / (hoped - 1.0), 0.0), 1.0)

    def _counted(self, view: DecodeView) -> TreeTokens:
        if view.request_id not in self._counts:
            odds, acceptance, longest = self._window_odds()
            counted = odds.tree_tokens(self._clock.start_s, view, acceptance, longest)
            # Prompts that arrive during the step wait for its end.
            most = max(self._stretched_s / view.tpot_s, 1.0)
            counted = counted._replace(by_nodes=min(counted.by_nodes, most))
            self._counts[view.request_id] = counted
        return self._counts[view.request_id]

    def spare_s(self, view: DecodeView) -> float:
        """As in `DecodeView`. Decodes can wait if they need no token for `PATIENT_STEPS` steps of
        all."""
        odds, acceptance, _ = self._window_odds()
        start_s = self._clock.start_s
        if self._urgent_odds is None:
            soon_s = start_s + PATIENT_STEPS * odds.longest_s
            planned = (t for t in self._tracker.live.values() if t.promised or t.holds_tpot)
            urgent = sum(self.view(t).due_s < soon_s for t in planned if t.decodes)
            self._urgent_odds = WindowOdds(self._path_steps_s(max(urgent, 1)))
        return self._urgent_odds.spare_s(start_s, view, acceptance)

    def _path_steps_s(self, requests: int) -> Floats:
        """(L,) seconds of steps that verify 1, 2, ... L nodes of one path of so many requests. They
        are some of those that run, whose contexts are taken to be of one length."""
        running = max(len(self._state.running), 1)
        model, context = self._clock.plain_promise_model, self.context() * requests // running
        drafting_s = np.maximum(self.drafting_s(), self._dear_s)
        drafting_s = drafting_s[np.isfinite(drafting_s)]  # the depths that there are
        step_s = [model.predict_s(requests, context) + self._dear_s]
        step_s += [
            model.predict_s(requests * (2 + depth), context) + each
            for depth, each in enumerate(drafting_s.tolist())
        ]
        return np.array(step_s)

    def _window_odds(self) -> tuple[WindowOdds, float, int]:
        """The odds of TPOT windows in steps that verify the best path of each tree, the acceptance
        with which such paths yield what is typical of them, and their greatest length."""
        if self._odds is None:
            requests = max(len(self._state.running), 1)
            step_s = self._path_steps_s(requests)
            chances = self._drafting.typical[: len(step_s) - 1, 0]
            # Guesses accepted of those that were reached.
            acceptance = float(chances.sum() / (1.0 + chances[:-1].sum()))
            plain_s = self._clock.plain_promise_model.predict_s(requests, self.context())
            self._odds = WindowOdds(step_s, plain_s), acceptance, len(step_s)
        return self._odds

    def sustainable(self, tpot_s: float) -> tuple[float, Speculated]:
        """As `DecodeModel.sustainable`; asked for every request that waits, so answered once a
        step."""
        if self._drafting.out:
            return self._plain.sustainable(tpot_s)
        if tpot_s not in self._sustained:
            trees, _, most = sustained_trees(
                self._drafting.typical,
                1.0,
                tpot_s,
                self._clock.verifying_model,
                drafting_s=self.drafting_s(),
            )
            self._sustained[tpot_s] = most, trees
        return self._sustained[tpot_s]

    def spread(self) -> float:
        return math.hypot(self._clock.spread, self._measured.spread())

    def plain(self) -> StepTimeModel:
        return self._plain.plain()

    def speculative(self, tpot_s: float) -> WayToDecode | None:
        if self._drafting.out:
            return None
        share, plain = self._measured.share(), self._clock.plain_promise_model
        speculated, drafting_s, _ = sustained_trees(
            self._drafting.typical,
            share,
            tpot_s,
            plain,
            drafting_s=self.drafting_s() * self._clock.margin,
        )
        return None if speculated == PLAIN else (plain.besides(drafting_s), speculated)
