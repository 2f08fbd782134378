# SPDX-License-Identifier: Apache-2.0
"""What this engine tells a front about itself: its `ReplicaState`."""

from __future__ import annotations

import math
from dataclasses import replace

from vllm.v1.request import Request

from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_pace import SLOW_S, StatePace
from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.core.types import INFINITY, Demand
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling.containment import Containment
from vllm_slo.engine.scheduling.quotes import Quotes
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.workload import Workload
from vllm_slo.engine.telemetry.state import StatePublisher

MAX_COMMITTED = 1_024
MAX_TICKETS = 4_096
MAX_FRONTS = 64
"""Fronts whose highest ticket is kept, the last ones to send. The value is a limit of memory."""
GRAIN_S = 1e-3
"""Deadlines are published in such steps: they move by less while step times are learnt, and a
promise that does not change is not sent again."""


class ReplicaReports:
    """Makes the state of one engine, and publishes it where the environment says so."""

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        workload: Workload,
        quotes: Quotes,
        clock: StepClock,
        containment: Containment,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._workload = workload
        self._quotes = quotes
        self._clock = clock
        self._containment = containment
        self._pace = StatePace()
        self._told: tuple[object, ...] = ()
        self._learnt: ReplicaState | None = None
        self._learnt_s = 0.0
        self._seen: dict[str, int] = {}
        self._publisher = StatePublisher.from_environment()  # last, because it opens a socket

    def saw(self, ticket: Ticket | None) -> None:
        """A request has come, with its front's mark if it has one."""
        if ticket is None:
            return
        highest = max(self._seen.pop(ticket.front, 0), ticket.number)
        self._seen[ticket.front] = highest
        if len(self._seen) > MAX_FRONTS:
            del self._seen[next(iter(self._seen))]

    def publish(self) -> None:
        """Publish the state of this moment."""
        if self._publisher is not None:
            now_s = self._clock.now_s
            self._told = self._news()
            self._pace.told(now_s)
            self._publisher.publish(_in_grains(self._with_learnt(self.state(), now_s)))

    def _with_learnt(self, state: ReplicaState, now_s: float) -> ReplicaState:
        """The state with what is learnt as it was told last, for `SLOW_S` after that."""
        if self._learnt is None or now_s >= self._learnt_s + SLOW_S:
            self._learnt, self._learnt_s = state, now_s
            return state
        known = self._learnt
        return replace(
            state,
            model=known.model,
            finish_interval_s=known.finish_interval_s,
            lengths=known.lengths,
        )

    def publish_with_step(self) -> None:
        """A step was handed to the engine: publish if it is time to."""
        if self._publisher is None:
            return
        now_s = self._clock.now_s
        step_s = self._clock.next_start_s(now_s) - now_s
        if self._pace.is_due(now_s, news=self._news() != self._told, step_s=step_s):
            self.publish()

    def _news(self) -> tuple[object, ...]:
        """What differs if something happened that fronts are told of soon."""
        tracker = self._tracker
        return tracker.changes, tracker.beginnings, self._containment.stands_aside

    def state(self) -> ReplicaState:
        """The state of this moment, on the monotonic clock.

        After ``schedule()`` the step it made counts as computed, and the next one begins at its
        end. Of more than `MAX_COMMITTED` promises the most urgent are told. While planning stands
        aside there are no seats, so that a front counts on no promise here.
        """
        now_s = self._clock.clock.monotonic_s()
        workload, blocks = self._workload, self._workload.blocks
        model = self._clock.promise_model
        start_s = self._clock.next_start_s(now_s)
        load = workload.committed(start_s, model)
        capacity = workload.capacity(load.requests, load.blocks)
        requests = self.requests_to_serve()
        running = min(len(self._state.running), len(requests))
        return ReplicaState(
            model=model,
            now_s=now_s,
            start_s=start_s,
            committed=_urgent(load.pending),
            decoding=load.decoding,
            decoding_context=load.context,
            free_blocks=blocks.total - load.blocks,
            total_blocks=blocks.total,
            block_sizes=tuple(blocks.sizes),
            seats=0 if self._containment.stands_aside else capacity.seats,
            max_step_tokens=workload.max_step_tokens,
            token_share=capacity.token_share,
            finish_interval_s=capacity.finish_interval_s,
            max_model_len=self._state.max_model_len,
            running=running,
            waiting=len(requests) - running,
            backlog_tokens=sum(
                max(r.num_prompt_tokens - r.num_computed_tokens, 0) for r in requests
            ),
            kv_usage=1.0 - blocks.free / blocks.total if blocks.total else 0.0,
            tickets=_oldest({t.ticket for t in self._tracker if t.ticket}),
            seen=dict(self._seen),
            lengths=workload.lengths.all_points(),
        )

    def requests_to_serve(self) -> list[Request]:
        """The live requests, without those that only ask for a quote."""
        requests = self._state.requests
        if not self._quotes:
            return list(requests.values())
        return [request for name, request in requests.items() if name not in self._quotes]


def _urgent(pending: list[Demand]) -> tuple[Demand, ...]:
    """The first `MAX_COMMITTED` by deadline."""
    if len(pending) > MAX_COMMITTED:
        pending = sorted(pending, key=lambda d: d.deadline_s)[:MAX_COMMITTED]
    return tuple(pending)


def _oldest(tickets: set[Ticket]) -> dict[str, frozenset[int]]:
    """Front -> numbers of its tickets; of all fronts together the first `MAX_TICKETS` or so."""
    numbers: dict[str, list[int]] = {}
    for front, number in tickets:
        numbers.setdefault(front, []).append(number)
    most = MAX_TICKETS // max(len(numbers), 1)
    return {front: frozenset(sorted(of_it)[:most]) for front, of_it in numbers.items()}


def _in_grains(state: ReplicaState) -> ReplicaState:
    """The state with deadlines rounded down to `GRAIN_S`."""
    rounded = [
        d
        if d.deadline_s == INFINITY
        else replace(d, deadline_s=math.floor(d.deadline_s / GRAIN_S) * GRAIN_S)
        for d in state.committed
    ]
    return replace(state, committed=tuple(rounded))
