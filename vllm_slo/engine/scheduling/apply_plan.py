# SPDX-License-Identifier: Apache-2.0
"""vLLM's state as the plan of one step wants it, put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue
from vllm.v1.request import Request

from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling.step_schedule import StepSchedule


class Steerable(Protocol):
    """What of vLLM's scheduler a plan replaces for one step.

    Attributes:
        running: the requests that run, in the order in which vLLM serves them.
        waiting: those that wait and hold no KV blocks.
        kv_holding_waiting: those that wait and hold some.
        max_num_scheduled_tokens: tokens of a step.
    """

    running: list[Request]
    waiting: RequestQueue
    kv_holding_waiting: RequestQueue
    max_num_scheduled_tokens: int


@contextmanager
def applied(scheduler: Steerable, schedule: StepSchedule, state: SchedulerState) -> Iterator[None]:
    """While this lasts vLLM's ``schedule()`` finds what ``schedule`` says. Afterwards its queues
    and limits are what they were, with what vLLM changed in them kept.

    Args:
        scheduler: vLLM's.
        schedule: the plan of the step.
        state: the same scheduler, to preempt requests by.
    """
    for request in schedule.preempt:
        state.preempt(request, schedule.timestamp)
    offered = schedule.waiting
    waiting, kv_holding = FCFSRequestQueue(offered), FCFSRequestQueue()
    # Nothing below this line can fail before vLLM schedules.
    queue, holding = scheduler.waiting, scheduler.kv_holding_waiting
    tokens = scheduler.max_num_scheduled_tokens
    if schedule.running is not None:
        scheduler.running = schedule.running
    scheduler.waiting, scheduler.kv_holding_waiting = waiting, kv_holding
    scheduler.max_num_scheduled_tokens = schedule.token_budget
    try:
        yield
    finally:
        left, given = set(scheduler.waiting), set(offered)
        scheduler.max_num_scheduled_tokens = tokens
        returned = [request for request in scheduler.waiting if request not in given]
        # Put aside with blocks: they began to load, or cannot go on yet.
        aside = [*scheduler.kv_holding_waiting]
        scheduler.waiting, scheduler.kv_holding_waiting = queue, holding
        if taken := [request for request in offered if request not in left]:
            queue.remove_requests(taken)
            holding.remove_requests(taken)
        for request in reversed(aside):
            holding.prepend_request(request)
        for request in reversed(returned):
            queue.prepend_request(request)
