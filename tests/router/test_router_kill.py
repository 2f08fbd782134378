# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of each part of a running service, with 40 requests in flight.

None that had not started is lost, none hangs, the service is whole again by itself on the same
port, and no process is left over.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import httpx
import psutil
import pytest
from patience import patience

pytest.importorskip("ray")

from live_replicas import LiveReplicas, await_whole, eventually, nothing, running, sigkill, volley

pytestmark = pytest.mark.slow

FAKES = ["--replicas", "2", "--replica-module", "fake_engine_replica"]
WHOLE_AGAIN_S = patience(30.0)
PROMPT_S = patience(10.0)
STREAM_TOKENS = round(patience(60))
"""Streams go on for some seconds: a part is killed in their midst."""
ASKED = {"model": "tiny", "prompt": "x", "max_tokens": 2}
RETRIES = round(patience(6))


@pytest.fixture(scope="module")
def live() -> Iterator[LiveReplicas]:
    with running(*FAKES) as live:
        assert "2 replicas of tiny behind http://127.0.0.1:" in live.lines[0]
        yield live


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
    if part == "engine":  # its server says so; a server that was killed can say nothing
        assert all("APIError" in str(one.error) for one in failed)
    assert {one.tokens for one in seen.streaming if one.error is None} == {STREAM_TOKENS}
    # A killed actor's child ends with the actor, so its streams end at once, too.
    assert max(one.ended_s for one in failed) - seen.killed_s < PROMPT_S
    await_whole(live, before, 1, WHOLE_AGAIN_S)
    eventually(lambda: len(live.engines()) == 2, "two engines", PROMPT_S)
    victims[0].wait(PROMPT_S)


def test_the_front_is_killed(live: LiveReplicas) -> None:
    before = await_whole(live, set(), 0, WHOLE_AGAIN_S)
    (front,) = live.children("Front")
    seen = asyncio.run(
        volley(live, lambda: sigkill(front), retries=RETRIES, stream_tokens=STREAM_TOKENS)
    )
    assert [one.error for one in seen.waiting] == [None] * 20
    assert all(one.error is not None for one in seen.streaming)
    assert max(one.ended_s for one in seen.streaming) - seen.killed_s < PROMPT_S
    await_whole(live, before, 2, WHOLE_AGAIN_S)


def process_of_front(live: LiveReplicas, word: str) -> psutil.Process:
    """The decision service, or HAProxy."""
    (front,) = live.children("Front")
    found = [one for one in front.children() if word in " ".join(one.cmdline())]
    assert len(found) == 1
    return found[0]


def in_fallback(live: LiveReplicas) -> int:
    """How many replicas HAProxy can use by itself."""
    shown = httpx.get(f"{live.url}/metrics/proxy").text
    up = r'haproxy_server_status\{proxy="fallback",[^}]*state="UP"\} 1'
    return len(re.findall(up, shown))


def test_the_decision_service_is_killed(live: LiveReplicas) -> None:
    """HAProxy goes on alone, with all replicas: nothing is refused, and no stream breaks."""
    before = await_whole(live, set(), 0, WHOLE_AGAIN_S)
    eventually(lambda: in_fallback(live) == 2, "both replicas in fallback", PROMPT_S)
    service = process_of_front(live, "decision_service")
    seen = asyncio.run(volley(live, lambda: sigkill(service), stream_tokens=STREAM_TOKENS))
    assert [one.error for one in (*seen.waiting, *seen.streaming)] == [None] * 40
    assert {(one.tokens, one.whole) for one in seen.waiting} == {(3, True)}
    after = [httpx.post(f"{live.url}/v1/completions", json=ASKED) for _ in range(10)]
    assert [one.status_code for one in after] == [200] * 10
    await_whole(live, before, 2, WHOLE_AGAIN_S)


def test_haproxy_is_killed(live: LiveReplicas) -> None:
    """The connections break, and a client that retries loses nothing."""
    before = await_whole(live, set(), 0, WHOLE_AGAIN_S)
    proxy = process_of_front(live, "haproxy.cfg")
    seen = asyncio.run(
        volley(live, lambda: sigkill(proxy), retries=RETRIES, stream_tokens=STREAM_TOKENS)
    )
    assert [one.error for one in seen.waiting] == [None] * 20
    assert all(one.error is not None for one in seen.streaming)
    await_whole(live, before, 2, WHOLE_AGAIN_S)


def test_the_fronts_actor_is_killed(live: LiveReplicas) -> None:
    before = await_whole(live, set(), 0, WHOLE_AGAIN_S)
    (actor,), (child,) = live.actors("Front"), live.children("Front")
    sigkill(actor)
    eventually(lambda: not child.is_running() or child.status() == "zombie", "its end", PROMPT_S)
    await_whole(live, before, 2, WHOLE_AGAIN_S)


def test_nothing_of_the_killed_is_left(live: LiveReplicas) -> None:
    await_whole(live, set(), 0, WHOLE_AGAIN_S)

    def left() -> list[str]:
        alive = {one.pid for one in live.processes()}
        return [one for one in live.left() if int(one.partition(":")[0]) not in alive]

    nothing(left, "processes that nobody owns", PROMPT_S)
    assert live.stop(WHOLE_AGAIN_S) == 0
