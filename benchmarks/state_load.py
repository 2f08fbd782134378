# SPDX-License-Identifier: Apache-2.0
"""Replicas that tell a front how they stand, and a front that reads it: the real feed, streams over
loopback sockets and the front's own reader; only the engines are made up.

As a script it serves replicas until its stdin ends: ``state_load.py REPLICAS HOW``.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, get_args

import uvicorn
import uvloop

from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_pace import SLOW_S, StatePace
from vllm_slo.core.routing.state_stream import StateEncoder
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand
from vllm_slo.engine.http.front_access import FrontAccess
from vllm_slo.engine.http.state_feed import StateFeed
from vllm_slo.router.replica_spec import ReplicaSpec
from vllm_slo.router.upstream import Upstream

How = Literal["changes", "whole"]
"""What a line holds and when one is sent: what changed, as the replicas do, or the whole state with
each step, as they did before."""
STEP_S: Final = 0.02
PROMISES: Final = 100
LIFE_S: Final = 10.0
"""A request lives so long: ten a second come and go."""
PREFILL_S: Final = 0.5
"""Of its life before its first token."""
TIERS: Final = (0.03, 0.05, 0.1)
MODEL: Final = StepTimeModel(((0.0, 0.0, 0.02), (1.1e-4, 0.0, 0.004)), kv_s=2e-8)
POINTS: Final = (400, 10, 40, 80, 120, 200, 300, 500)
TOKEN: Final = "benchmark"
STALE_S: Final = 30.0


class MadeUpReplica:
    """Its state after each step: about `PROMISES` promises, of which requests come and go."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._number = 0
        self._steps = 0
        self._pending: deque[tuple[float, Demand]] = deque()
        self._decoding: deque[tuple[float, float]] = deque()
        self._learnt_s = 0.0
        self.news = 0
        self._next_s = time.monotonic() - LIFE_S
        self.step(time.monotonic())

    def _arrive(self, at_s: float) -> None:
        rng, self._number = self._rng, self._number + 1
        prompt = rng.randint(300, 1500)
        demand = Demand(
            f"cmpl-{self._number:032x}-0",
            round(at_s + 2.0, 3),
            rng.randint(50, 400),
            rng.choice(TIERS),
            rng.randint(20, 90),
            context_tokens=prompt,
        )
        self._pending.append((at_s, demand))
        self.news += 1

    def step(self, now_s: float) -> None:
        """Requests come, begin and end."""
        self._steps += 1
        if now_s >= self._learnt_s + SLOW_S:
            self._learnt_s = now_s
            self._model = MODEL.scaled(self._rng.uniform(0.99, 1.01))
            self._finish_interval_s = LIFE_S / PROMISES * self._rng.uniform(0.9, 1.1)
            self._lengths = dict.fromkeys(("chat", "code"), (*POINTS, 8 + self._number))
        while self._next_s <= now_s:
            self._arrive(self._next_s)
            self._next_s += self._rng.expovariate(PROMISES / LIFE_S)
        while self._pending and self._pending[0][0] <= now_s - PREFILL_S:
            came_s, demand = self._pending.popleft()
            self._decoding.append((came_s, demand.tpot_s))
            self.news += 1
        while self._decoding and self._decoding[0][0] <= now_s - LIFE_S:
            self._decoding.popleft()
            self.news += 1

    def state(self, now_s: float) -> ReplicaState:
        """The state of this moment."""
        pending, running = len(self._pending), len(self._decoding)
        decoding = dict.fromkeys(TIERS, 0)
        for _, tpot_s in self._decoding:
            decoding[tpot_s] += 1
        first = self._number - pending - running
        return ReplicaState(
            self._model,
            now_s=now_s,
            start_s=now_s + STEP_S,
            committed=tuple(demand for _, demand in self._pending),
            decoding=decoding,
            decoding_context=900 * running + self._steps % 900,
            free_blocks=10_000.0 - 50 * (pending + running),
            total_blocks=10_000,
            block_sizes=(16,),
            seats=256 - pending - running,
            max_step_tokens=8192,
            max_model_len=8192,
            finish_interval_s=self._finish_interval_s,
            running=running,
            waiting=pending,
            backlog_tokens=sum(demand.prefill_tokens for _, demand in self._pending),
            tickets={"": frozenset(range(first + 1, self._number + 1))},
            seen={"": self._number},
            lengths=self._lengths,
        )

    async def publish(self, feed: StateFeed) -> None:
        """Step for ever, and tell the feed as an engine's `ReplicaReports` does."""
        pace, told = StatePace(), -1
        await asyncio.sleep(self._rng.uniform(0.0, STEP_S))
        next_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            self.step(now_s)
            if pace.is_due(now_s, news=self.news != told, step_s=STEP_S):
                pace.told(now_s)
                told = self.news
                feed.take(self.state(now_s), now_s)
            next_s = max(next_s + STEP_S, now_s)  # steps that were missed are not made up for
            await asyncio.sleep(max(next_s - time.monotonic(), 0.0))


async def whole_states(replica: MadeUpReplica, send: Any) -> None:
    """Answer with the whole state after each step."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    encoder, next_s = StateEncoder(), time.monotonic()
    while True:
        now_s = time.monotonic()
        replica.step(now_s)
        encoder.begin_anew()
        line = encoder.line(replica.state(now_s))
        await send({"type": "http.response.body", "body": line, "more_body": True})
        next_s = max(next_s + STEP_S, now_s)  # steps that were missed are not made up for
        await asyncio.sleep(max(next_s - time.monotonic(), 0.0))


async def serve(count: int, how: How) -> None:
    """Serve ``count`` replicas below ``/0``, ``/1``, ... until stdin ends; prints the port."""
    replicas = [MadeUpReplica(seed) for seed in range(count)]
    feeds = [StateFeed() for _ in replicas]

    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        raise NotImplementedError

    accesses = [FrontAccess(TOKEN, only=True, feed=feed) for feed in feeds]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        _, number, path = scope["path"].split("/", 2)
        if how == "whole":
            await whole_states(replicas[int(number)], send)
        else:
            await accesses[int(number)](nothing, {**scope, "path": "/" + path}, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, log_level="error", lifespan="off", access_log=False)
        server = uvicorn.Server(config)
        pairs = zip(replicas, feeds, strict=True) if how == "changes" else ()
        working = [replica.publish(feed) for replica, feed in pairs]
        engines = asyncio.gather(*working, server.serve(sockets=[listening]))
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        engines.cancel()
        os._exit(0)  # streams that go on are no reason to wait


@asynccontextmanager
async def followed(count: int, how: How) -> AsyncIterator[list[Upstream]]:
    """The replicas as a front follows them, in a process of their own."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, str(count), how),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None
    port = int(await child.stdout.readline())
    specs = [ReplicaSpec(f"r{n}", f"http://127.0.0.1:{port}/{n}", TOKEN) for n in range(count)]
    upstreams = [Upstream(spec, STALE_S, 2 * STALE_S) for spec in specs]
    try:
        for upstream in upstreams:
            upstream.start()
        while not all(upstream.virtual.state is not None for upstream in upstreams):
            await asyncio.sleep(0.05)
        yield upstreams
    finally:
        for upstream in upstreams:
            await upstream.close()
        child.stdin.close()
        await child.wait()


if __name__ == "__main__":
    asked: Any = sys.argv[2]
    assert asked in get_args(How)
    uvloop.run(serve(int(sys.argv[1]), asked))
