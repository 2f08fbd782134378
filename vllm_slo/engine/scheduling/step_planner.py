# SPDX-License-Identifier: Apache-2.0
"""One step: vLLM's requests into views, and the answer of `core.batching` into a schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

from vllm.v1.request import Request, RequestStatus

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.batching.best_effort_memory import Memory, fitting
from vllm_slo.core.batching.step import StepLimits, plan_step
from vllm_slo.core.ordering.best_effort import preemptions, rank_best_effort
from vllm_slo.core.ordering.starvation_guard import StarvationGuard
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY, BestEffortView, PrefillView, StepPlan
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling import request_facts, request_views
from vllm_slo.engine.scheduling.admission import AdmissionController
from vllm_slo.engine.scheduling.best_effort import BestEffort
from vllm_slo.engine.scheduling.opportunistic import OpportunisticStarts
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.responsive_steps import ResponsiveSteps
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.step_schedule import StepSchedule
from vllm_slo.engine.scheduling.warm_prefixes import WarmPrefixes
from vllm_slo.engine.scheduling.workload import Workload

WAITING_LOOKAHEAD = 64
"""Best-effort requests considered per step; more could not start in one step anyway."""


def _by_deadline(tracked: SLORequest) -> tuple[float, bool, float, str]:
    """Key of the order of prefills. Of requests without a deadline the promised ones are first, so
    that they get the seats that were freed for them."""
    name = tracked.request.request_id
    return tracked.deadline_s, not tracked.promised, tracked.arrival_s, name


class StepPlanner:
    """Plans one step after the other. Between steps it holds nothing.

    Args:
        warm: blocks that best effort leaves to rounds that are to come.
        starts: who may begin without a promise.
        responsive: how long a step may be that no promise limits.
        order: in which best effort is served; None: as it arrives.
        config: ages and windows.
        draft_padding: drafts to which vLLM pads a request that starts.
    """

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        workload: Workload,
        warm: WarmPrefixes,
        admission: AdmissionController,
        starts: OpportunisticStarts,
        clock: StepClock,
        guard: StarvationGuard,
        responsive: ResponsiveSteps,
        order: BestEffort | None,
        config: SLOConfig,
        draft_padding: int,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._workload = workload
        self._blocks = workload.blocks
        self._warm = warm
        self._admission = admission
        self._starts = starts
        self._clock = clock
        self._guard = guard
        self._responsive = responsive
        self._best_effort = order
        self._ageing_s = config.ageing_s
        self._draft_padding = draft_padding

    def all_may_decode(self) -> bool:
        """Whether a step of all that run keeps the shortest promised TPOT."""
        tpot_s = self._tracker.tightest_tpot_s
        if tpot_s == INFINITY:
            return True
        running = self._state.running
        context = sum(request.num_computed_tokens for request in running)
        return self._clock.promise_model.predict_s(len(running), context) <= tpot_s

    def _begin(self, start_s: float) -> None:
        """Sort the running requests for a step that begins at ``start_s``."""
        self.start_s = start_s
        self.model: StepTimeModel = self._clock.promise_model
        self.decodes: list[SLORequest] = []
        self.prefills: list[SLORequest] = []
        self.others: list[Request] = []
        self.skipped: list[Request] = []
        self.responsive_s = self._responsive.longest_s(self.model)
        self.resuming = 0
        self.holding = False
        self._ranks: dict[str, int] = {}
        live, is_decoding = self._tracker.live, request_facts.is_decoding
        skips = self._state.skips
        for request in self._state.running:
            if skips(request):
                self.skipped.append(request)
                continue
            tracked = live.get(request.request_id)
            if tracked is None or not (tracked.promised or self._starts.is_planned_for(tracked)):
                self.others.append(request)
            elif is_decoding(request):
                self.decodes.append(tracked)
            else:
                self.prefills.append(tracked)

    def plan(self, start_s: float) -> StepSchedule | None:
        """The schedule of a step that begins at ``start_s``; None: vLLM may do as it does."""
        self._begin(start_s)
        starting, waiting_others = self._sort_waiting()
        quiet = not (starting or waiting_others or self.prefills or self.holding)
        if quiet and not self.others and self.all_may_decode():
            return None
        self._load = self._workload.committed(start_s, self.model)
        self.prefills += starting
        self.prefills.sort(key=_by_deadline)
        self._to_share = {
            number
            for t in starting
            if t.promised and t.shared_prefix is not None
            for number in t.shared_prefix.blocks
        }
        preempt = self._preemptions([t for t in starting if t.promised])
        free = self._free_without(preempt)
        # A request that starts in blocks that decodes need next would soon be preempted for them.
        spare = free - self._decode_blocks()
        if self._best_effort is not None:
            places = self._seats(preempt) - len(starting)
            cold = spare - self._warm.free_blocks()
            preempt += self._order(preempt, waiting_others, places, cold)
            free = self._free_without(preempt)
            spare = free - self._decode_blocks()
        out = set(preempt)
        others = self._fitting([r for r in self.others + waiting_others if r not in out], spare)
        self.prefills = [
            t
            for t in self.prefills
            if self._needed_blocks(t.request) - self._shared_blocks(t)
            <= (free if t.promised else max(spare, 0))
        ]
        plan = self._plan(others, preempt)
        unpromised = [t.request.request_id for t in self.prefills if not t.promised]
        for name in (*unpromised, *(view.request_id for view in others)):
            if plan.tokens.get(name):
                self._guard.served(name, self._clock.now_s)
        return self._build(plan, preempt, starting, waiting_others)

    def _sort_waiting(self) -> tuple[list[SLORequest], list[Request]]:
        """Waiting requests that could start: by deadline those that are promised or may begin
        without a promise, and the first few of best effort.

        vLLM asks a blocked request whether it may go on only while a step has tokens left. A
        planned step has none left, so it is asked here.
        """
        state, live = self._state, self._tracker.live
        starting: list[SLORequest] = []
        refused: list[Request] = []
        others: list[Request] = []
        loras = self._loras(state.running)
        for request in (*state.waiting_with_blocks, *state.waiting):
            if request_facts.awaits_output(request):
                continue
            if request_facts.is_blocked(request) and not state.can_continue(request):
                continue
            if not self._takes_lora(request, loras):
                continue
            one = live.get(request.request_id)
            self.resuming += request_facts.holds_kv(request)
            if one is not None and one.promised:
                starting.append(one)
            elif one is not None and (
                self._starts.is_planned_for(one) or self._starts.had_better_wait(one)
            ):
                one.opportunistic = one.opportunistic or self._finds_headroom(one)
                if one.opportunistic:
                    starting.append(one)
            elif self._best_effort is not None or len(others) < WAITING_LOOKAHEAD:
                others.append(request)
            elif len(refused) < WAITING_LOOKAHEAD and self._asked(request.request_id):
                refused.append(request)
        starting.sort(key=_by_deadline)
        return starting, others + refused

    def _order(
        self, preempt: list[Request], waiting: list[Request], places: int, free_blocks: int
    ) -> list[Request]:
        """Put best effort in order, in place: the running requests, and the first of the waiting
        ones. Returns the running requests that give up their place to these.

        Args:
            preempt: requests that are preempted for promises already.
            waiting: best-effort requests that wait.
            places: seats that are free and that no promise is about to take.
            free_blocks: KV blocks likewise.
        """
        order, out = self._best_effort, set(preempt)
        assert order is not None
        by_id = {r.request_id: r for r in (*self.others, *waiting) if r not in out}
        ranked = order.rank(by_id.values())
        chosen = [by_id[name] for name in order.give_way(ranked, places, free_blocks)]
        self.others = [by_id[view.request_id] for view in ranked if view.placed]
        waiting[:] = [by_id[view.request_id] for view in ranked if not view.placed]
        del waiting[WAITING_LOOKAHEAD:]
        self._ranks = {view.request_id: place for place, view in enumerate(ranked)}
        return [request for request in chosen if self._state.frees_blocks(request)]

    def _finds_headroom(self, one: SLORequest) -> bool:
        """Whether a request may begin without a promise. Behind one that may not, none may."""
        self.holding = self.holding or not self._starts.has_headroom(one)
        return not self.holding

    def _loras(self, requests: Iterable[Request]) -> set[int]:
        """The LoRAs of requests; none where the engine has no LoRA."""
        if self._state.lora_config is None:
            return set()
        return {request_facts.lora_id(request) for request in requests}

    def _takes_lora(self, request: Request, loaded: set[int]) -> bool:
        """Whether a request finds its LoRA among those ``loaded``, or a slot for it.

        vLLM counts the LoRAs of the requests in the step; here running requests may sit one out,
        and all must fit when they are back.
        """
        config, lora = self._state.lora_config, request_facts.lora_id(request)
        return config is None or lora == 0 or lora in loaded or len(loaded - {0}) < config.max_loras

    def _preemptions(self, starting: list[SLORequest]) -> list[Request]:
        """Best-effort requests to preempt so that promised ones find memory and seats, the latest
        first. Requests that begin without a promise preempt nobody: two of them would preempt each
        other for ever."""
        if not self.others:
            return []
        begun = [*self.decodes, *(t for t in self.prefills if t.promised and t not in starting)]
        needed = self._decode_blocks() + sum(self._blocks_to_come(t) for t in begun)
        seats, free = self._seats([]), self._blocks.free
        to_start = [self._blocks_to_come(t) for t in starting]
        if needed + sum(to_start) <= free and len(starting) <= seats:
            return []
        starved = self._guard.starved
        victims = list(reversed(self._ranked(self.others)))
        victims.sort(key=lambda r: r.request_id == starved)
        freed = self._blocks.freed_in_turn(victims, self._to_share)
        most, short = free + sum(freed), -seats
        for blocks in to_start:
            # Memory freed for a request that cannot start all the same would go to another one.
            if needed + blocks <= most:
                needed, short = needed + blocks, short + 1
        names = [request.request_id for request in victims]
        chosen = preemptions(needed, free, list(zip(names, freed, strict=True)))
        leaving = victims[: max(short, len(chosen), 0)]
        return [request for request in leaving if self._state.frees_blocks(request)]

    def _free_without(self, preempt: list[Request]) -> int:
        """KV blocks that are free once these have gone."""
        return self._blocks.free + sum(self._blocks.freed_in_turn(preempt, self._to_share))

    def _blocks_to_come(self, tracked: SLORequest) -> int:
        """KV blocks that a promised request needs for its next sample, beyond those it holds, and
        those that others hold."""
        request = tracked.request
        if request_facts.is_decoding(request) and request.num_computed_tokens:
            return 0
        blocks = self._blocks.needed(request.num_tokens + 1)
        return blocks - self._blocks.held(request) - self._shared_blocks(tracked)

    def _shared_blocks(self, tracked: SLORequest) -> int:
        """KV blocks of a request that has not started which others hold."""
        prefix = tracked.shared_prefix
        if prefix is None or tracked.request.num_computed_tokens:
            return 0
        return self._blocks.filled(prefix.tokens)

    def _ranked(self, others: list[Request]) -> list[Request]:
        """Best effort, those that are to keep their place longest first."""
        order = self._best_effort
        if order is None:
            return sorted(others, key=lambda r: r.arrival_time)
        by_id = {request.request_id: request for request in others}
        return [by_id[view.request_id] for view in order.rank(others)]

    def _seats(self, preempt: list[Request]) -> int:
        """Seats that nobody holds once those have gone."""
        state = self._state
        running = len(state.running) - len(preempt)
        return state.max_running - running - state.awaiting_input

    def _decode_blocks(self) -> int:
        """KV blocks that promised decodes may be about to take."""
        return len(self.decodes) * len(self._blocks.sizes)

    def _fitting(self, others: list[Request], free_blocks: int) -> list[BestEffortView]:
        """Best effort in serving order, without those for whom there is no memory."""
        now_s, starved = self._clock.now_s, self._guard.starved
        if not others:
            return []
        load, by_id = self._load, {r.request_id: r for r in others}
        holds = self._workload.memory.holds(others, load.prefixes)
        views = (
            request_views.best_effort_view(
                r,
                self._guard.seen(name, now_s),
                self._needed_blocks(r),
                holds[name],
                asked=self._asked(name),
            )
            for name, r in by_id.items()
        )
        if self._best_effort is None:
            ranked = rank_best_effort(views, now_s, self._ageing_s, starved)
        else:
            ranked = sorted(views, key=lambda view: self._ranks[view.request_id])
            aged = (r for r in ranked if now_s - r.waiting_since_s > self._ageing_s)
            starved = next((r.request_id for r in aged), None)
        if not (self.decodes or self.prefills or self.others):
            # Promises that cannot start yet, as their grammar compiles, leave no engine idle.
            starved = starved or ranked[0].request_id
        unpromised = [t.request for t in (*self.decodes, *self.prefills) if not t.promised]
        planned = sum(self._workload.memory.holds(unpromised, load.prefixes).values())

        def present_blocks(name: str) -> int:
            return self._blocks.present_blocks(by_id[name], self._own_warm_blocks(name))

        memory = Memory(
            self._blocks.total,
            free_blocks,
            load.blocks + planned,
            math.sqrt(load.squares),
            self._warm.free_blocks(),
        )
        return [
            # The prefix cache is asked only for requests that could start now.
            request_views.with_cached(view, self._blocks.cached_tokens(by_id[view.request_id]))
            if view.starts
            else view
            for view in fitting(ranked, memory, starved, present=present_blocks)
        ]

    def _own_warm_blocks(self, request_id: str) -> int:
        """Warm blocks of the session of a request."""
        tracked = self._tracker.get(request_id)
        if tracked is None or tracked.session is None:
            return 0
        return self._warm.free_of(tracked.session.key)

    def _asked(self, request_id: str) -> bool:
        """Whether a request without a promise asked for one."""
        tracked = self._tracker.get(request_id)
        return tracked is not None and tracked.slo.effective_tier == "guaranteed"

    def _needed_blocks(self, request: Request) -> int:
        """KV blocks without which vLLM could not start a request; 0 where it holds its own."""
        if request.status == RequestStatus.RUNNING or request_facts.holds_kv(request):
            return 0
        return self._blocks.needed(request.num_tokens)

    def _plan(self, others: list[BestEffortView], preempt: list[Request]) -> StepPlan:
        workload = self._workload
        share = workload.reserved_share()
        guard_s = workload.overrun_s(self.model.predict_s(workload.max_step_tokens))
        limits = StepLimits(
            max_step_tokens=self._max_tokens(len(others)),
            best_effort_tokens=max(int(share * self._fullest_step()), 1) if share else 0,
            best_effort_step_s=self.responsive_s,
            seats=self._seats(preempt) - self.resuming,
            spread_prompts=not workload.speculates,
        )
        return plan_step(
            self.start_s,
            workload.decode_rows(self.decodes, self.start_s),
            [request_views.prefill_view(t, guard_s) for t in self.prefills],
            others,
            self.model,
            limits,
            may_start=self._may_start,
        )

    def _max_tokens(self, others: int) -> int:
        """Tokens of the step at most: beside them, the draft model has slots for each request."""
        slots, most = self._state.draft_slots, self._workload.max_step_tokens
        if not slots:
            return most
        requests = min(len(self.decodes) + len(self.prefills) + others, self._state.max_running)
        return max(min(most, self._state.max_input_tokens - slots * requests), 1)

    def _may_start(self, view: PrefillView) -> bool:
        """Whether a prefill may end now: there was room for it, it is due, or nobody's promise
        suffers."""
        one = self._tracker.live[view.request_id]
        due = one.opportunistic or one.begin_by_s <= self.start_s
        return due or self._admission.may_start(view, self.start_s, self.model)

    def _fullest_step(self) -> int:
        tightest = min((t.tpot_s for t in self.decodes), default=INFINITY)
        if tightest == INFINITY:
            return self._workload.max_step_tokens
        return self.model.time_to_tokens(tightest)

    def _with_padding(self, token_budget: int, starting: int) -> int:
        """The budget with room for the drafts to which vLLM pads a request that starts with one
        token. Without that room vLLM starts no request. The hook still grants what was planned."""
        padding = starting * self._draft_padding
        return min(token_budget + padding, self._workload.max_step_tokens)

    def _undivided(self, tokens: dict[str, int], waiting: list[Request]) -> int:
        """Tokens of the longest image among the requests of the step, where none may be divided: so
        many more than are granted one of them may need to go on."""
        if self._state.divides_inputs:
            return 0
        requests = (r for r in (*self._state.running, *waiting) if tokens.get(r.request_id))
        return max(map(request_facts.longest_input, requests), default=0)

    def _build(
        self,
        plan: StepPlan,
        preempt: list[Request],
        starting: list[SLORequest],
        waiting_others: list[Request],
    ) -> StepSchedule:
        tokens = plan.tokens
        offered: list[Request] = []
        loras = self._loras(r for r in self._state.running if r not in preempt)
        for request in (*(t.request for t in starting), *waiting_others):
            if tokens.get(request.request_id) and self._takes_lora(request, loras):
                offered.append(request)
                loras.add(request_facts.lora_id(request))
        # As in vLLM: a request that holds blocks never waits behind one that may not get any.
        offered.sort(key=request_facts.holds_kv, reverse=True)
        running = None
        reordered = self._tracker.take_reordered()
        if preempt or reordered or self._best_effort is not None:
            out = set(preempt)
            begun = [t.request for t in self.prefills if t not in starting]
            running = [t.request for t in self.decodes] + self.skipped + begun
            running += [r for r in self.others if r not in out]
        return StepSchedule(
            preempt,
            running,
            offered,
            tokens,
            self._with_padding(plan.token_budget + self._undivided(tokens, offered), len(offered)),
            min(plan.limit_s, self.responsive_s),
            plan.deadline_s,
            self._clock.now_s,
        )
