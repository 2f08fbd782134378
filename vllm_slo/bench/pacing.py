# SPDX-License-Identifier: Apache-2.0
"""When requests are sent: at their times (open loop), or as others end (closed loop).

In both, a round of a session waits for the answer to the round before it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from vllm_slo.bench.planned import PlannedRequest

T = TypeVar("T")
Sending = Callable[[PlannedRequest, float], Coroutine[Any, Any, T]]
"""Sends a request that was due at a time, and returns when its answer has ended. It must return a
result also when it is cancelled."""


async def open_loop(
    requests: Sequence[PlannedRequest], send: Sending[T], now_s: Callable[[], float], drain_s: float
) -> list[T | None]:
    """Send each request at its time, however many answers are still open.

    A round of a session is sent at its time, but not before the answer to the previous round has
    ended and its think time is over.

    Args:
        requests: by `at_s`, at least one.
        drain_s: time after the last arrival until what is unfinished is cut off.

    Returns:
        A result for each request; None: it was not sent before the end.
    """
    tasks: list[asyncio.Task[T | None]] = []
    last_round: dict[str, asyncio.Task[T | None]] = {}
    ended_s: dict[asyncio.Task[T | None], float] = {}

    def note_end(task: asyncio.Task[T | None]) -> None:
        ended_s[task] = now_s()

    async def in_turn(request: PlannedRequest, previous: asyncio.Task[T | None]) -> T | None:
        try:
            await asyncio.wait([previous])
            due_s = max(request.at_s, ended_s[previous] + request.think_s)
            await asyncio.sleep(due_s - now_s())
        except asyncio.CancelledError:
            return None
        return await send(request, due_s)

    for request in requests:
        delay_s = request.at_s - now_s()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        previous = last_round.get(request.session)
        sending: Coroutine[Any, Any, T | None] = (
            send(request, request.at_s) if previous is None else in_turn(request, previous)
        )
        task = asyncio.create_task(sending)
        task.add_done_callback(note_end)  # before those who wait for the task
        tasks.append(task)
        if request.session:
            last_round[request.session] = task
    _, late = await asyncio.wait(tasks, timeout=drain_s)
    return await _cut_off(tasks, late)


async def closed_loop(
    requests: Sequence[PlannedRequest],
    send: Sending[T],
    now_s: Callable[[], float],
    drain_s: float,
    concurrency: int,
) -> list[T | None]:
    """Keep ``concurrency`` requests open, in order; their times and think times do not count.

    Args:
        requests: at least one.
        drain_s: time without the end of any answer after which all open requests are cut off, and
            no more are sent.

    Returns:
        As `open_loop`.
    """
    next_round = _next_rounds(requests)
    later = set(next_round.values())
    ready = [place for place in range(len(requests)) if place not in later]
    heapq.heapify(ready)
    tasks: dict[asyncio.Task[T], int] = {}
    running: set[asyncio.Task[T]] = set()
    while ready or running:
        while ready and len(running) < concurrency:
            place = heapq.heappop(ready)
            task = asyncio.create_task(send(requests[place], now_s()))
            tasks[task] = place
            running.add(task)
        ended, running = await asyncio.wait(
            running, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not ended:
            break
        for task in ended:
            following = next_round.get(tasks[task])
            if following is not None:
                heapq.heappush(ready, following)
    results: list[T | None] = [None] * len(requests)
    for place, result in zip(tasks.values(), await _cut_off(list(tasks), running), strict=True):
        results[place] = result
    return results


def _next_rounds(requests: Sequence[PlannedRequest]) -> dict[int, int]:
    """Place of a round -> place of the next round of its session."""
    following: dict[int, int] = {}
    last: dict[str, int] = {}
    for place, request in enumerate(requests):
        if not request.session:
            continue
        if request.session in last:
            following[last[request.session]] = place
        last[request.session] = place
    return following


async def _cut_off(tasks: Sequence[asyncio.Task[T]], late: set[asyncio.Task[T]]) -> list[T]:
    for task in late:
        task.cancel()
    return list(await asyncio.gather(*tasks))
