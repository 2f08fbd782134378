# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of each part of a running service, with 40 requests in flight.

None that had not started is lost, none hangs, the service is whole again by itself on the same
port, and no process is left over.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import psutil
import pytest

pytest.importorskip("ray")

from live_replicas import LiveReplicas, eventually, nothing, running, volley

ENGINES = [
    *("--replicas", "2", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "10"),
    *("--dtype", "float32", "--gpu-memory-utilization", "0.2"),
]
FAKES = ["--replicas", "2", "--replica-module", "fake_engine_replica"]
WHOLE_AGAIN_S = 30.0
PROMPT_S = 5.0
STREAM_TOKENS = 60


@pytest.fixture(scope="module")
def live() -> Iterator[LiveReplicas]:
    with running(*FAKES) as live:
        assert "2 replicas of tiny behind http://127.0.0.1:" in live.lines[0]
        yield live


def sigkill(process: psutil.Process) -> int:
    os.kill(process.pid, signal.SIGKILL)
    return int(process.pid)


def await_whole(live: LiveReplicas, before: set[str], kept: int, within_s: float) -> set[str]:
    """Until two replicas are ready, so many of those from before among them; their names."""

    def whole() -> set[str] | None:
        ready = live.ready()
        return ready if len(ready) == 2 and len(ready & before) == kept else None

    return set(eventually(whole, f"two replicas, {kept} of {before}", within_s))


@pytest.mark.parametrize("part", ["actor", "child", "engine"])
def test_a_replica_is_killed(live: LiveReplicas, part: str) -> None:
    before = await_whole(live, set(), 0, WHOLE_AGAIN_S)
    find = {
        "actor": lambda: live.actors("Replica"),
        "child": lambda: live.children("Replica"),
        "engine": live.engines,
    }[part]
    victims = find()
    assert len(victims) == 2
    seen = asyncio.run(volley(live, lambda: sigkill(victims[0]), stream_tokens=STREAM_TOKENS))
    assert [one.error for one in seen.waiting] == [None] * 20
    assert {(one.tokens, one.whole) for one in seen.waiting} == {(3, True)}
    failed = [one for one in seen.streaming if one.error is not None]
    assert 1 <= len(failed) < 20
    assert all("APIError" in str(one.error) for one in failed)
    assert {one.tokens for one in seen.streaming if one.error is None} == {STREAM_TOKENS}
    # A killed actor's child ends with the actor, so its streams end at once, too.
    assert max(one.ended_s for one in failed) - seen.killed_s < PROMPT_S
    await_whole(live, before, 1, WHOLE_AGAIN_S)
    eventually(lambda: len(live.engines()) == 2, "two engines", 10)
    victims[0].wait(10)


def test_the_front_is_killed(live: LiveReplicas) -> None:
    before = await_whole(live, set(), 0, WHOLE_AGAIN_S)
    (front,) = live.children("Front")
    seen = asyncio.run(volley(live, lambda: sigkill(front), retries=6, stream_tokens=STREAM_TOKENS))
    assert [one.error for one in seen.waiting] == [None] * 20
    assert all(one.error is not None for one in seen.streaming)
    assert max(one.ended_s for one in seen.streaming) - seen.killed_s < PROMPT_S
    await_whole(live, before, 2, WHOLE_AGAIN_S)


def test_the_fronts_actor_is_killed(live: LiveReplicas) -> None:
    before = await_whole(live, set(), 0, WHOLE_AGAIN_S)
    (actor,), (child,) = live.actors("Front"), live.children("Front")
    sigkill(actor)
    eventually(lambda: not child.is_running() or child.status() == "zombie", "its end", 10)
    await_whole(live, before, 2, WHOLE_AGAIN_S)


def test_nothing_of_the_killed_is_left(live: LiveReplicas) -> None:
    await_whole(live, set(), 0, WHOLE_AGAIN_S)

    def left() -> list[str]:
        alive = {one.pid for one in live.processes()}
        return [one for one in live.left() if int(one.partition(":")[0]) not in alive]

    nothing(left, "processes that nobody owns", 10)
    started_s = time.monotonic()
    assert live.stop(30) == 0
    assert time.monotonic() - started_s < 20


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_part_with_real_engines() -> None:
    """20 streams take all seats, so that 20 more wait in the engines; then a part is killed."""
    with running(*ENGINES, within_s=300) as live:
        for part in ("engine", "child", "actor", "front"):
            before = await_whole(live, set(), 0, 300)
            victims = {
                "engine": live.engines,
                "child": lambda: live.children("Replica"),
                "actor": lambda: live.actors("Replica"),
                "front": lambda: live.children("Front"),
            }[part]()
            retries = 6 if part == "front" else 0
            seen = asyncio.run(
                volley(live, partial(sigkill, victims[0]), retries=retries, stream_tokens=400)
            )
            assert [one.error for one in seen.waiting] == [None] * 20, part
            failed = [one for one in seen.streaming if one.error is not None]
            assert 1 <= len(failed) <= (20 if part == "front" else 19), part
            assert max(one.ended_s for one in failed) - seen.killed_s < PROMPT_S, part
            assert all(one.whole for one in seen.waiting), part
            assert all(one.whole or one.error for one in seen.streaming), part
            await_whole(live, before, 2 if part == "front" else 1, 300)
