# SPDX-License-Identifier: Apache-2.0
"""What is drafted after a step: how deep and wide candidate trees are to be, and for how many."""

from __future__ import annotations

import itertools

from vllm_slo.config.speculation import SpeculationConfig
from vllm_slo.core.speculation.chain_forecast import DraftLoad
from vllm_slo.core.speculation.tree_budget import (
    DEPTH_BESIDE_PROMPTS,
    depth_and_width,
    needs_drafts,
    prompts_fill,
)
from vllm_slo.core.types import INFINITY
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling import request_facts
from vllm_slo.engine.scheduling.kv_blocks import KVBlocks
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.speculation.draft_models import Drafts
from vllm_slo.engine.speculation.tree_limits import TreeLimits

WIDTHS = 1, 2
"""Widths of trees to choose from, besides the widest that equation 9 allows."""


class NextDrafts:
    """Bounds the trees of the next drafts; ``drafting`` chooses the models, depth and width."""

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        blocks: KVBlocks,
        clock: StepClock,
        limits: TreeLimits,
        drafting: Drafts,
        config: SpeculationConfig,
        max_step_tokens: int,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._blocks = blocks
        self._clock = clock
        self._limits = limits
        self._drafting = drafting
        self._config = config
        self._max_step_tokens = max_step_tokens

    def decide(self, lagging: int, *, barred: bool) -> None:
        """Decide what is drafted after the step that is being planned.

        Where prompts fill the steps, drafts have to spare more of such a step than they take,
        unless a TPOT needs them.

        Args:
            lagging: requests that need nodes to keep up with their TPOT.
            barred: whether trees could not be verified.
        """
        running, config = self._state.running, self._config
        active, behind = len(running), max(lagging, self._faster_than_plain())
        if barred or not active:
            self._drafting.nothing()
            return
        model = self._clock.verifying_model
        tightest_s = self._tracker.tightest_tpot_s
        plain_s = self._clock.plain_promise_model.predict_s(active, self._limits.context())
        if not (behind or needs_drafts(tightest_s, plain_s)) and self._prompts_fill(tightest_s):
            model = model.filled()
        deepest, widest = self._depth_and_width(active, tightest_s)
        least = min(config.min_width, widest)
        widths = tuple(w for w in sorted({*WIDTHS, widest}) if least <= w <= widest)
        begun = sum(request.num_output_tokens == 1 for request in running)
        # Drafts spare no reading of prompts that are not computed to their end.
        context = sum(r.num_computed_tokens for r in running if request_facts.is_decoding(r))
        verifying_s = self._limits.verifying_s()
        self._drafting.decide(
            DraftLoad(
                *(active, context, deepest, widths, behind, config.min_depth, begun, verifying_s)
            ),
            model,
        )
        self._limits.note_drafting(self._drafting.plan.drafting_s)

    def _faster_than_plain(self) -> int:
        """How many requests ask for a TPOT that is shorter than a step without trees."""
        step_s = self._clock.verifying_model.predict_s(len(self._state.running))
        return sum(
            t.tpot_s < step_s and not t.missed and t.first_token_s is not None
            for t in self._tracker
        )

    def _prompts_fill(self, step_s: float) -> bool:
        """`prompts_fill` for a step of ``step_s``."""
        state, next_tokens = self._state, request_facts.tokens_to_next_sample
        room = self._tokens_within(step_s) - sum(map(next_tokens, state.running))
        tokens = map(next_tokens, itertools.chain(state.waiting_with_blocks, state.waiting))
        waiting = ((each, self._blocks.needed(each)) for each in tokens)
        seats = state.max_running - len(state.running)
        return prompts_fill(room, seats, self._blocks.free, waiting)

    def _tokens_within(self, step_s: float) -> int:
        """Tokens of a step that takes so long."""
        if step_s == INFINITY:
            return self._max_step_tokens
        tokens = self._clock.verifying_model.time_to_tokens(step_s, self._limits.context())
        return min(tokens, self._max_step_tokens)

    def _depth_and_width(self, active: int, tightest_s: float) -> tuple[int, int]:
        """Equations 8 and 9. B1 is the largest batch that keeps the tightest TPOT if the best path
        of a typical tree is accepted as usual."""
        config, tokens = self._config, self._tokens_within(tightest_s * self._limits.ahead())
        return depth_and_width(
            active,
            verifier_tokens=max(tokens, 1),
            speculator_tokens=config.draft_tokens,
            min_depth=config.min_depth,
            max_depth=min(config.max_depth, DEPTH_BESIDE_PROMPTS)
            if self._limits.prompts_wait()
            else config.max_depth,
            max_width=config.max_width,
        )
