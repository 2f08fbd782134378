# SPDX-License-Identifier: Apache-2.0
"""What this engine tells a front about itself: its `ReplicaState`."""

from __future__ import annotations

from vllm.v1.request import Request

from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.types import Demand
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling.containment import Containment
from vllm_slo.engine.scheduling.quotes import Quotes
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.workload import Workload
from vllm_slo.engine.telemetry.state import INTERVAL_S, StatePublisher

MAX_COMMITTED = 1_024
MAX_TICKETS = 4_096


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
        self._publisher = StatePublisher.from_environment()
        self.highest_ticket = 0
        """The highest ticket that ever came; see `request_facts.ticket`."""

    def publish(self) -> None:
        """Publish the state of this moment."""
        if self._publisher is not None:
            self._publisher.publish(self.state(), self._clock.now_s)

    def publish_with_step(self) -> None:
        """A step was handed to the engine: publish if the last state is old, or if the step is
        long, since nothing is published while it runs."""
        if self._publisher is None:
            return
        now_s = self._clock.now_s
        long = self._clock.next_start_s(now_s) - now_s > INTERVAL_S
        if long or self._publisher.due(now_s):
            self._publisher.publish(self.state(), now_s)

    def state(self) -> ReplicaState:
        """The state of this moment; its times are relative to it.

        After ``schedule()`` the step it made counts as computed, and the next one begins at its
        end. Of more than `MAX_COMMITTED` promises the most urgent are told. While planning stands
        aside there are no seats, so that a front counts on no promise here.
        """
        now_s = self._clock.clock.monotonic_s()
        workload, blocks = self._workload, self._workload.blocks
        model = self._clock.promise_model
        start_s = self._clock.next_start_s(now_s)
        load = workload.committed(start_s, model, now_s)
        capacity = workload.capacity(load.requests, load.blocks)
        requests = self.requests_to_serve()
        running = min(len(self._state.running), len(requests))
        tickets = {t.ticket for t in self._tracker if t.ticket}
        return ReplicaState(
            model=model,
            start_s=start_s - now_s,
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
            tickets=tuple(sorted(tickets)[:MAX_TICKETS]),
            seen=self.highest_ticket,
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
