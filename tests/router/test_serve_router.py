# SPDX-License-Identifier: Apache-2.0
"""The request router with Serve's own objects, and then in a local Ray with real engines."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hermetic import ROOT_VARIABLE, python_path
from live_server import UNIPROC, environment
from patience import patience
from support_folder import SUPPORT

pytest.importorskip("ray")

from live_replicas import LiveReplicas, eventually, nothing
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
    RunningReplicaInfo,
)
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RunningReplica

from vllm_slo import SLO
from vllm_slo.core.routing.state_stream import StateEncoder
from vllm_slo.router.serve_router import SLORequestRouter
from vllm_slo.wire.ports import free_port
from vllm_slo.wire.serve_stats import ServeStats

CLASS = "vllm_slo.router.serve_router.SLORequestRouter"
EXAMPLES = SUPPORT.parents[1] / "examples"
CHAT = DeploymentID("Chat", "app")
STAYS = {"stale_after_s": 3_600, "dead_after_s": 3_600}
EASY = SLO(ttft_ms=60_000, tpot_ms=5_000)


class Replica(RunningReplica):
    """Serve's view of a replica, without the handle of an actor."""

    def __init__(self, info: RunningReplicaInfo) -> None:
        self._replica_info = info
        self.probed = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.probed += 1
        return 0


def replica(name: str, **fields: Any) -> Replica:
    """A replica with the routing stats of a state, or with none."""
    from serve_driver import STATES

    stats: Mapping[str, Any] = {}
    if name in STATES:
        line = StateEncoder().line(STATES[name]).decode()
        stats = ServeStats(time.time(), time.time(), line).to_stats()
    known = {"node_id": "n", "node_ip": "127.0.0.1", "availability_zone": None, "actor_name": name}
    info = {"max_ongoing_requests": 5, "routing_stats": stats, **known, **fields}
    return Replica(RunningReplicaInfo(replica_id=ReplicaID(name, CHAT), **info))


def pending(name: str, *args: Any, **kwargs: Any) -> PendingRequest:
    return PendingRequest(list(args), kwargs, RequestMetadata(name, name))


async def router(
    *replicas: Replica, slo_config: str | dict[str, Any] | None = None, **kwargs: Any
) -> SLORequestRouter:
    """A router as Serve makes it, once it is ready; states stay fresh by default."""
    made = SLORequestRouter(CHAT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    made.initialize_state(slo_config=slo_config or {"routing": STAYS}, **kwargs)
    made._compiling.join()
    made.update_replicas(list(replicas))
    return made


async def chosen(made: SLORequestRouter, request: PendingRequest) -> list[list[str]]:
    ranks = await made.choose_replicas(list(made.curr_replicas.values()), request)
    return [[each.replica_id.unique_id for each in rank] for rank in ranks]


async def assigned(made: SLORequestRouter, request: PendingRequest) -> str:
    """The replica that Serve's own loop takes for a request."""
    taken = await asyncio.wait_for(made._choose_replica_for_request(request), patience(10.0))
    made.on_send_request(taken.replica_id)
    return str(taken.replica_id.unique_id)


def test_serve_takes_the_class_by_its_name() -> None:
    config = RequestRouterConfig(request_router_class=CLASS)
    loaded: Any = config.get_request_router_class()
    assert loaded.__name__ == "SLORequestRouter"
    assert RequestRouterConfig(request_router_class=SLORequestRouter).request_router_class == CLASS


def test_requests_go_where_they_belong() -> None:
    async def check() -> None:
        made = await router(replica("full"), replica("open"))
        for n in range(4):
            assert await assigned(made, pending(f"{n}", "hi", slo=EASY)) == "open"
            assert await assigned(made, pending(f"{n} plain", "hi")) == "full"

    asyncio.run(check())


def test_calls_within_one_request_are_all_answered() -> None:
    async def check() -> None:
        made = await router(replica("full"), replica("open"))
        calls = [pending("same", "hi", slo=EASY), pending("same", "hi"), pending("same", "hi")]
        taken = await asyncio.gather(*(assigned(made, call) for call in calls))
        assert taken == ["open", "full", "full"]
        assert len(made._shadows._sent) == 3

    asyncio.run(check())


def test_a_replica_that_takes_no_more_requests_is_passed_over() -> None:
    async def check() -> None:
        made = await router(replica("full"), replica("open"))
        made.on_new_queue_len_info(ReplicaID("open", CHAT), 5)
        assert await chosen(made, pending("1", "hi", slo=EASY)) == [["full"], [], []]
        made.on_new_queue_len_info(ReplicaID("full", CHAT), 5)
        assert await chosen(made, pending("1", "hi", slo=EASY)) == [["open"], ["full"], []]

    asyncio.run(check())


def test_serve_waits_between_its_tries() -> None:
    async def check() -> None:
        made = await router(replica("full"), replica("open"))
        request = pending("1", "hi", slo=EASY)
        await chosen(made, request)
        assert request.routing_context.should_backoff

    asyncio.run(check())


def test_the_life_of_a_request_is_followed() -> None:
    async def check() -> None:
        full, free = replica("full"), replica("open")
        made = await router(full, free)
        shadow = lambda each: made._shadows._shadows[each.replica_id.unique_id].virtual  # noqa: E731
        request = pending("1", "hi", slo=EASY)
        await chosen(made, request)
        assert (shadow(full).outstanding, shadow(free).outstanding) == (0, 1)
        made.on_request_routed(request, full.replica_id, SimpleNamespace())
        assert (shadow(full).outstanding, shadow(free).outstanding) == (1, 0)
        made.on_request_completed(full.replica_id, "1")
        assert (shadow(full).outstanding, shadow(free).outstanding) == (0, 0)
        made.on_replica_actor_died(free.replica_id)
        assert await chosen(made, pending("2", "hi", slo=EASY)) == [["full"], [], []]
        made.update_replicas([replica("open")])
        assert await chosen(made, pending("3", "hi", slo=EASY)) == [["open"], [], []]

    asyncio.run(check())


def test_without_states_it_routes_as_serve_does() -> None:
    async def check() -> None:
        made = await router(replica("a"), replica("b"))
        firsts = set()
        for n in range(30):
            ranks = await chosen(made, pending(f"{n}", "hi", slo=EASY))
            assert sorted(ranks[0]) == ["a", "b"] and ranks[1] == []
            firsts.add(ranks[0][0])
        assert firsts == {"a", "b"}
        assert len(await made.choose_replicas([], None)) == 2
        counts = [await assigned(made, pending(f"r{n}", "hi", slo=EASY)) for n in range(8)]
        assert (counts.count("a"), counts.count("b")) == (4, 4)  # by the length of the queues

    asyncio.run(check())


def test_a_mistake_in_routing_loses_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Hostile:
        @property
        def extra_args(self) -> object:
            raise RuntimeError("not today")

    async def check() -> None:
        made = await router(replica("full"), replica("open"))
        for n in range(3):
            assert await assigned(made, pending(f"{n}", Hostile())) in ("full", "open")
        assert await assigned(made, pending("4", "hi", slo=EASY)) == "open"

    with caplog.at_level(logging.ERROR):
        asyncio.run(check())
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_the_configuration_is_the_engines(tmp_path: Path) -> None:
    async def check() -> None:
        path = tmp_path / "slo.yaml"
        path.write_text(json.dumps({"routing": {"policy": "least_loaded", **STAYS}}))
        made = await router(replica("full"), replica("open"), slo_config=str(path))
        assert (await chosen(made, pending("1", "hi", slo=EASY)))[0] == ["full"]
        mapping = {"classes": {"chat": {"ttft_ms": 60_000}}, "routing": STAYS}
        made = await router(replica("full"), replica("open"), slo_config=mapping)
        ranks = await chosen(made, pending("1", "hi", slo={"class": "chat"}))
        assert ranks[0] == ["open"]

    asyncio.run(check())


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"slo_config": {"clases": {}}}, "slo_config: clases: unknown key"),
        ({"slo_config": 7}, "slo_config: expected keys"),
        ({"config": {}}, "config: unknown key; known: slo_config"),
    ],
)
def test_a_mistake_in_the_configuration_is_told_and_nobody_waits(
    kwargs: dict[str, Any], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        made = await router(replica("full"), replica("open"), **kwargs)
        assert await assigned(made, pending("1", "hi", slo=EASY)) in ("full", "open")
        assert len((await chosen(made, pending("2", "hi", slo=EASY)))[0]) == 2

    with caplog.at_level(logging.ERROR):
        asyncio.run(check())
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"request_router_kwargs: {expected}") and "\n" not in line


# --- live ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live() -> Iterator[dict[str, Any]]:
    """What `serve_driver` found, in a local Ray with two deployments one after the other."""
    with tempfile.TemporaryDirectory(prefix="r-", dir=os.environ[ROOT_VARIABLE]) as folder:
        words = ["-m", "serve_driver", str(free_port()), str(EXAMPLES), str(patience(60.0))]
        env = {
            **environment(),
            **UNIPROC,
            "PYTHONPATH": python_path(SUPPORT, EXAMPLES),
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            process_group=0,
        )
        driver = LiveReplicas(process, 0, Path(folder))

        def has_ended() -> bool:
            driver.processes()
            return process.poll() is not None

        try:
            eventually(has_ended, "the end of the driver", patience(300.0))
            out, err = process.communicate()
            assert process.returncode == 0, out + err[-4000:]
            nothing(driver.left, "processes", patience(30.0))
            yield json.loads(out.splitlines()[-1])
        finally:
            driver.kill()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_go_where_they_belong_whatever_form_they_have(live: dict[str, Any]) -> None:
    assert all(live["told"].values()), live["told"]
    assert {"slo", "body", "http", "http_none", "several_in_one"} <= live["told"].keys()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_when_a_replica_is_full_the_next_request_goes_to_the_one_that_can_promise(
    live: dict[str, Any],
) -> None:
    found = live["engines"]  # of examples/ray_serve.py
    assert found["promised"] == [True] * len(found["replicas"]), found
    full = found["first"]
    assert found["replicas"][0] == full
    # Requests with the same beginning stay together, as Serve's own router would not keep them,
    # until the eight places are taken. A state on its way may count one of them twice.
    assert 6 <= found["replicas"].count(full) <= 8, found
