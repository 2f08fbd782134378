# SPDX-License-Identifier: Apache-2.0
"""One step: vLLM's requests into views, ``core.batching.step``'s answer into a nudge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from vllm_slo.core.batching import step
from vllm_slo.core.ordering.best_effort import preemptions, rank_best_effort
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY, BestEffortView, PrefillView, StepPlan
from vllm_slo.engine.scheduling import request_views
from vllm_slo.engine.scheduling.request_views import SLORequest

if TYPE_CHECKING:
    from vllm_slo.engine.scheduling.controller import Steering

WAITING_LOOKAHEAD = 64
"""Best-effort requests considered per step; more could not start in one step anyway."""


@dataclass(slots=True)
class Nudge:
    """What vLLM's ``schedule()`` is to find.

    Attributes:
        preempt: best-effort requests whose KV goes first.
        running: the running list in the order in which it gives way (last first), or None: as is.
        waiting: waiting requests that may start, in order.
        tokens: request id -> most tokens of this step.
        token_budget: tokens of the whole step.
        limit_s: the step time that promises, and best effort by itself, allow.
        deadline_s: the step time that a prompt's deadline allows.
        timestamp: for vLLM's preemption event.
    """

    preempt: list[Request]
    running: list[Request] | None
    waiting: list[Request]
    tokens: dict[str, int]
    token_budget: int
    limit_s: float
    deadline_s: float
    timestamp: float


def _by_deadline(tracked: SLORequest) -> tuple[float, bool, float, str]:
    """Of those who can wait for ever the promised first: a seat freed for them is theirs."""
    name = tracked.request.request_id
    return tracked.deadline_s, not tracked.promised, tracked.arrival_s, name


class StepPlanner:
    """Plans one step: sorts requests into views, asks ``core.batching.step``, builds the nudge."""

    def __init__(self, steering: Steering, start_s: float, model: StepTimeModel) -> None:
        self.steering = steering
        self.scheduler = steering.scheduler
        self.start_s = start_s
        self.model = model
        self.decodes: list[SLORequest] = []
        self.prefills: list[SLORequest] = []
        self.others: list[Request] = []
        self.resuming = 0
        self.holding = False
        self._ranks: dict[str, int] = {}
        self._sort_running()

    def _sort_running(self) -> None:
        tracked = self.steering.tracked
        for request in self.scheduler.running:
            one = tracked.get(request.request_id)
            if one is None or not (one.promised or self._is_trusted(one)):
                self.others.append(request)
            elif request_views.is_decoding(request):
                self.decodes.append(one)
            else:
                self.prefills.append(one)

    def _is_trusted(self, one: SLORequest) -> bool:
        """Whether a request is planned for like a promised one: until it begins, if that does not
        take too long; then only where trees yield, since in plain steps the margin of promises is
        all that there is to spare."""
        if not one.decodes:
            return one.holds_tpot and not self.steering.is_aged(one.request)
        return one.holds_tpot and bool(self.steering.expected)

    def nudge(self) -> Nudge | None:
        starting, waiting_others = self._sort_waiting()
        quiet = not (starting or waiting_others or self.prefills or self.holding)
        if quiet and not self.others:
            return None
        self.prefills += starting
        self.prefills.sort(key=_by_deadline)
        preempt = self._preemptions([t for t in starting if t.promised])
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if preempt:
            freed = sum(self.steering.held_blocks(r) for r in preempt)
            self.steering.pressure.short_of(freed, self.steering.now_s)
            free += freed
        # What starts in blocks that decodes are about to take would be preempted for them.
        spare = free - self._decode_blocks()
        if self.steering.best_effort is not None:
            places = self._seats(preempt) - len(starting)
            yielding = self._order(preempt, waiting_others, places, spare)
            freed = sum(self.steering.held_blocks(r) for r in yielding)
            preempt += yielding
            free, spare = free + freed, spare + freed
        out = set(preempt)
        others = self._welcome([r for r in self.others + waiting_others if r not in out], spare)
        self.prefills = [
            t
            for t in self.prefills
            if self._needed_blocks(t.request) <= (free if t.promised else max(spare, 0))
        ]
        plan = self._plan(others, preempt)
        unpromised = [t.request.request_id for t in self.prefills if not t.promised]
        for name in (*unpromised, *(view.request_id for view in others)):
            if plan.tokens.get(name):
                self.steering.served(name)
        return self._build(plan, preempt, starting, waiting_others)

    def _sort_waiting(self) -> tuple[list[SLORequest], list[Request]]:
        """Waiting requests that could start: promised ones and those who are let in, by deadline;
        best effort, the first few.

        vLLM asks a blocked request whether it may go on only while a step has tokens left, and a
        planned step has none: so it is asked here.
        """
        scheduler = self.scheduler
        tracked = self.steering.tracked
        starting: list[SLORequest] = []
        others: list[Request] = []
        loras = {request_views.lora_id(r) for r in scheduler.running}
        for request in (*scheduler.kv_holding_waiting, *scheduler.waiting):
            if request_views.is_blocked(request) and not scheduler._handle_blocked_waiting_request(
                request
            ):
                continue
            if not self._takes_lora(request, loras):
                continue
            one = tracked.get(request.request_id)
            self.resuming += request_views.holds_kv(request)
            if one is not None and one.promised:
                starting.append(one)
            elif one is not None and (self._is_trusted(one) or self.steering.can_wait(one)):
                one.opportunistic = one.opportunistic or self._finds_room(one)
                if one.opportunistic:
                    starting.append(one)
            elif len(others) < WAITING_LOOKAHEAD or self.steering.best_effort is not None:
                others.append(request)
        starting.sort(key=_by_deadline)
        return starting, others

    def _order(
        self, preempt: list[Request], waiting: list[Request], places: int, free_blocks: int
    ) -> list[Request]:
        """Put best effort in order, in place: who runs, and the first of those who wait. Returns
        who gives up a place for them.

        Args:
            preempt: who has to already, for promises.
            waiting: best effort that waits.
            places: seats that nobody holds, or is about to.
            free_blocks: KV blocks likewise.
        """
        order, out = self.steering.best_effort, set(preempt)
        assert order is not None
        by_id = {r.request_id: r for r in (*self.others, *waiting) if r not in out}
        ranked = order.rank(by_id.values())
        chosen = [by_id[name] for name in order.give_way(ranked, places, free_blocks)]
        self.others = [by_id[view.request_id] for view in ranked if view.placed]
        waiting[:] = [by_id[view.request_id] for view in ranked if not view.placed]
        del waiting[WAITING_LOOKAHEAD:]
        self._ranks = {view.request_id: place for place, view in enumerate(ranked)}
        freed = self.scheduler._request_blocks_can_be_freed
        return [request for request in chosen if freed(request)]

    def _finds_room(self, one: SLORequest) -> bool:
        """Whether a request may begin without a promise; nobody behind one who may not."""
        self.holding = self.holding or not self.steering.has_room_for(one)
        return not self.holding

    def _takes_lora(self, request: Request, loaded: set[int]) -> bool:
        """Whether a request finds its LoRA among those ``loaded``, or a slot for it.

        vLLM counts the LoRAs of the requests in the step; here running requests may sit one out,
        and all must fit when they are back.
        """
        config, lora = self.scheduler.lora_config, request_views.lora_id(request)
        return config is None or lora == 0 or lora in loaded or len(loaded - {0}) < config.max_loras

    def _preemptions(self, starting: list[SLORequest]) -> list[Request]:
        """Best-effort requests that must give up memory or seats to promises, latest first. Who is
        only let in takes nobody's: two of them would take each other's for ever."""
        if not self.others:
            return []
        scheduler, steering = self.scheduler, self.steering
        pool = scheduler.kv_cache_manager.block_pool
        begun = [*self.decodes, *(t for t in self.prefills if t.promised and t not in starting)]
        needed = self._decode_blocks() + sum(self._blocks_to_come(t.request) for t in begun)
        seats, free = self._seats([]), pool.get_num_free_blocks()
        to_start = [self._blocks_to_come(t.request) for t in starting]
        if needed + sum(to_start) <= free and len(starting) <= seats:
            return []
        starved = steering.waiting.starved
        victims = list(reversed(self._ranked(self.others)))
        victims.sort(key=lambda r: r.request_id == starved)
        most, short = free + sum(steering.held_blocks(r) for r in victims), -seats
        for blocks in to_start:
            # What is cleared for who cannot start all the same would go to somebody else.
            if needed + blocks <= most:
                needed, short = needed + blocks, short + 1
        by_id = {request.request_id: request for request in victims}
        chosen = preemptions(
            needed, free, [(r.request_id, steering.held_blocks(r)) for r in victims]
        )
        names = [r.request_id for r in victims[: max(short, len(chosen), 0)]]
        return [
            by_id[name] for name in names if scheduler._request_blocks_can_be_freed(by_id[name])
        ]

    def _blocks_to_come(self, request: Request) -> int:
        """KV blocks that a promised request needs for its next sample, beyond those it holds."""
        if request_views.is_decoding(request) and request.num_computed_tokens:
            return 0
        blocks = self.steering.blocks_for(request.num_tokens + 1)
        return blocks - self.steering.held_blocks(request)

    def _ranked(self, others: list[Request]) -> list[Request]:
        """Best effort in serving order."""
        order = self.steering.best_effort
        if order is None:
            return others
        by_id = {request.request_id: request for request in others}
        return [by_id[view.request_id] for view in order.rank(others)]

    def _seats(self, preempt: list[Request]) -> int:
        """Seats that nobody holds once those have gone."""
        scheduler = self.scheduler
        running = len(scheduler.running) - len(preempt)
        return scheduler.max_num_active_reqs - running - scheduler.num_waiting_for_streaming_input

    def _decode_blocks(self) -> int:
        """KV blocks that promised decodes may be about to take."""
        return len(self.decodes) * len(self.steering.block_sizes)

    def _welcome(self, others: list[Request], free_blocks: int) -> list[BestEffortView]:
        """Best effort in serving order, without those for whom there is no memory."""
        steering = self.steering
        now_s, ageing_s, starved = (
            steering.now_s,
            steering.config.ageing_s,
            steering.waiting.starved,
        )
        found = (
            request_views.best_effort_view(r, steering.since_served_s(r), self._needed_blocks(r))
            for r in others
        )
        if steering.best_effort is None:
            ranked = rank_best_effort(found, now_s, ageing_s, starved)
        else:
            ranked = sorted(found, key=lambda view: self._ranks[view.request_id])
        return steering.pressure.fits_in_memory(
            ranked,
            free_blocks,
            now_s,
            ageing_s=ageing_s,
            promises=self._promises(),
        )

    def _promises(self) -> bool:
        return bool(self.decodes or self.prefills)

    def _needed_blocks(self, request: Request) -> int:
        """KV blocks without which vLLM could not start a request; 0 where it holds its own."""
        if request.status == RequestStatus.RUNNING or request_views.holds_kv(request):
            return 0
        return self.steering.blocks_for(request.num_tokens)

    def _plan(self, others: list[BestEffortView], preempt: list[Request]) -> StepPlan:
        steering = self.steering
        share = steering.reserved_share()
        limits = step.StepLimits(
            max_step_tokens=steering.max_step_tokens,
            best_effort_tokens=max(int(share * self._fullest_step()), 1) if share else 0,
            best_effort_step_s=steering.responsive_step_s(self.model),
            best_effort_prompt_s=steering.pressure.prompt_step_s(
                steering.now_s, self.model.predict_s(1), promises=self._promises()
            ),
            seats=self._seats(preempt) - self.resuming,
        )
        return step.plan_step(
            self.start_s,
            [steering.decode_view(t, self.start_s) for t in self.decodes],
            [request_views.prefill_view(t) for t in self.prefills],
            others,
            self.model,
            limits,
            may_start=self._may_start,
        )

    def _may_start(self, view: PrefillView) -> bool:
        """Whether a prefill may end now: there was room for it, it is due, or nobody's promise
        suffers."""
        one = self.steering.tracked[view.request_id]
        due = one.opportunistic or one.begin_by_s <= self.start_s
        return due or self.steering.may_start(view, self.start_s, self.model)

    def _fullest_step(self) -> int:
        tightest = min((t.tpot_s for t in self.decodes), default=INFINITY)
        if tightest == INFINITY:
            return self.steering.max_step_tokens
        return self.model.time_to_tokens(tightest)

    def _with_padding(self, token_budget: int, starting: int) -> int:
        """Room for the drafts to which vLLM pads a request that starts with one token; it would
        rather start nobody than that one without. Nobody gets more than was granted."""
        padding = starting * self.scheduler.draft_padding
        return min(token_budget + padding, self.steering.max_step_tokens)

    def _build(
        self,
        plan: StepPlan,
        preempt: list[Request],
        starting: list[SLORequest],
        waiting_others: list[Request],
    ) -> Nudge:
        tokens = plan.tokens
        offered: list[Request] = []
        loras = {request_views.lora_id(r) for r in self.scheduler.running if r not in preempt}
        for request in (*(t.request for t in starting), *waiting_others):
            if tokens.get(request.request_id) and self._takes_lora(request, loras):
                offered.append(request)
                loras.add(request_views.lora_id(request))
        # As vLLM does: who holds blocks must never wait behind who may not get any.
        offered.sort(key=request_views.holds_kv, reverse=True)
        running = None
        if preempt or self.steering.take_unordered():
            out = set(preempt)
            running = [t.request for t in (*self.decodes, *self.prefills)]
            running = [r for r in running if r.status == RequestStatus.RUNNING]
            running += [r for r in self.others if r not in out]
        return Nudge(
            preempt,
            running,
            offered,
            tokens,
            self._with_padding(plan.token_budget, len(offered)),
            min(plan.limit_s, self.steering.responsive_step_s(self.model)),
            plan.deadline_s,
            self.steering.now_s,
        )
