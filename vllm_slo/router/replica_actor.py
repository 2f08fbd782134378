# SPDX-License-Identifier: Apache-2.0
"""The Serve actor of one replica."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import ray
from ray import serve

from vllm_slo.config.recording import SALT_VARIABLE
from vllm_slo.config.serve_args import serve_arguments
from vllm_slo.core.routing.demand_meter import Load
from vllm_slo.router.child import Child
from vllm_slo.router.front_actor import KILL_MARGIN_S, REGISTER_EVERY_S
from vllm_slo.wire.front_protocol import DRAIN_PATH, TOKEN_HEADER, TOKEN_VARIABLE

logger = logging.getLogger("ray.serve")

METRIC: Final = "replicas_wanted"
CALL_TIMEOUT_S: Final = 5.0
KNOWN_S: Final = 10.0
"""Time for a front to take a new replica for ready; without one it is started all the same."""
FIRST_REGISTER_EVERY_S: Final = 0.1
ANSWER_S: Final = 8.0
"""Time for any answer; a replica that takes longer is stuck."""
FAREWELL_S: Final = 1.0
"""Time for a leaving replica to tell the front, which may have left before it."""
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """All that a replica's actor needs to start its child on any node.

    Attributes:
        token: the same for all replicas, because HAProxy has one for all while a front's decision
            service is gone.
        salt: of the hashes in recordings, the same for all replicas.
    """

    module: str
    model: str
    vllm_args: tuple[str, ...]
    additional_config: str
    private_host: str | None
    drain_s: float
    fronts: tuple[str, ...]
    front_app: str | None
    most: int
    workers: int
    gpus: float
    cpus: float | None
    env: tuple[tuple[str, str], ...]
    secret_env: tuple[str, ...]
    token: str = field(repr=False)
    salt: str = field(repr=False)

    def command(self, private_host: str) -> list[str]:
        return [
            *(sys.executable, "-m", self.module),
            *("--private-host", private_host, "--"),
            *serve_arguments(self.model, self.vllm_args, json.loads(self.additional_config)),
        ]

    def environment(self, node_cores: int) -> dict[str, str]:
        """The environment of the child: the node's, the given one, and thread counts on CPU.

        It has no API keys, because replicas take requests only from the front.
        """
        given = _environment_at_start()
        env = {name: value for name, value in os.environ.items() if name not in self.secret_env}
        if "OMP_NUM_THREADS" not in given:
            env.pop("OMP_NUM_THREADS", None)  # Ray chose it for the actor, not for the engine
        if not self.gpus:
            # Without this, all engines of a node would bind to its first cores.
            cores = int(self.cpus) if self.cpus else node_cores // self.most
            env.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.workers)))
            env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        return {
            **env,
            **dict(self.env),
            TOKEN_VARIABLE: self.token,
            SALT_VARIABLE: self.salt,
        }


class Replica:
    """The actor of one replica: it starts a child, registers it at the front and ends with it."""

    # Serve awaits the constructor, so an actor can be stopped while its model is loaded.
    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]
        self._leaving = False
        self._spec = spec
        self._loads: dict[str, Load] = {}
        self._ready = 0
        self._is_known = asyncio.Event()
        context = serve.get_replica_context()
        self._name, self._app = context.replica_id.unique_id, spec.front_app or context.app_name
        self._child = Child(
            spec.command(spec.private_host or ray.util.get_node_ip_address()),
            spec.environment(_node_cores()),
        )
        await self._child.start()
        ready = await self._child.read()
        if ready is None:
            raise RuntimeError(await self._child.obituary("the replica"))
        self._entry = {"name": self._name, "url": ready["url"], "token": ready["token"]}
        self._tasks = [
            *(asyncio.create_task(self._stay_registered(front)) for front in spec.fronts),
            asyncio.create_task(self._end_with_child()),
        ]
        # Serve stops the replica that this one replaces as soon as this constructor is done.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_S):
                await self._is_known.wait()

    async def check_health(self) -> None:
        """Serve's health check; three failures in a row end the actor.

        Raises:
            RuntimeError: the child has ended.
            OSError: the child does not answer.
        """
        if self._child.returncode is not None:
            raise RuntimeError(f"the replica process has ended: {self._child.last_words()}")
        await asyncio.to_thread(require_answer, self._entry["url"], self._entry["token"])

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The metric for Serve's autoscaler: how many replicas the front wants."""
        if not self._loads:
            return {}
        return {METRIC: float(sum(self._loads.values(), start=Load()).replicas(self._ready))}

    async def wake(self) -> None:
        """Nothing: that this call waits says that a replica is wanted."""

    async def __del__(self) -> None:
        """Serve stops the actor: take no new requests, then drain."""
        self._leaving = True
        if hasattr(self, "_entry"):
            await self._deregister()
            with contextlib.suppress(OSError):
                await asyncio.to_thread(
                    drain, self._entry["url"], self._entry["token"], self._spec.drain_s
                )
        await self._child.terminate(KILL_MARGIN_S / 2)

    async def _stay_registered(self, name: str) -> None:
        """At the front of this name."""
        while not self._leaving:
            started_s = time.monotonic()
            try:
                front = serve.get_deployment_handle(name, self._app)
                answer = await asyncio.wait_for(
                    _awaited(front.register.remote(self._entry)), CALL_TIMEOUT_S
                )
                if "load" in answer:
                    self._loads[name] = Load(*answer["load"])
                    self._ready = len(answer["ready"])
                    if self._name in answer["ready"]:
                        self._is_known.set()
            except Exception as error:  # noqa: BLE001 (the front may be starting or restarting)
                logger.warning("%s: could not register: %r", self._name, error)
            pause_s = REGISTER_EVERY_S if self._is_known.is_set() else FIRST_REGISTER_EVERY_S
            await asyncio.sleep(max(0.0, started_s + pause_s - time.monotonic()))

    async def _deregister(self) -> None:
        await asyncio.gather(*map(self._deregister_at, self._spec.fronts))

    async def _deregister_at(self, name: str) -> None:
        with contextlib.suppress(Exception):  # a front also notices a silent replica
            front = serve.get_deployment_handle(name, self._app)
            await asyncio.wait_for(_awaited(front.deregister.remote(self._name)), FAREWELL_S)

    async def _end_with_child(self) -> None:
        """End this process with its child, because Serve replaces a dead actor at once."""
        while await self._child.read() is not None:
            pass
        if not self._leaving:
            logger.error(await self._child.obituary("the replica"))
            await self._deregister()
            os._exit(1)


def _node_cores() -> int:
    """Cores of this node as given to Ray, else those that this process may use."""
    here = ray.get_runtime_context().get_node_id()
    given = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["NodeID"] == here]
    return int(given[0]) if given and given[0] >= 1 else len(os.sched_getaffinity(0))


def _environment_at_start() -> frozenset[str]:
    """Names of the environment variables that this process was started with."""
    try:
        whole = Path("/proc/self/environ").read_bytes()
    except OSError:
        return frozenset(os.environ)
    return frozenset(
        entry.partition(b"=")[0].decode(errors="replace") for entry in whole.split(b"\0")
    )


def require_answer(url: str, token: str, within_s: float = ANSWER_S) -> None:
    """Require any answer from a replica's server, without a proxy between.

    Raises:
        OSError: there is no answer.
    """
    request = urllib.request.Request(f"{url}/health", headers={TOKEN_HEADER: token})
    with contextlib.suppress(urllib.error.HTTPError):
        _DIRECT.open(request, timeout=within_s).close()


def drain(url: str, token: str, seconds: float) -> None:
    """Wait until a replica's requests have ended, at most so long; it takes no new ones.

    Raises:
        OSError: it does not answer.
    """
    request = urllib.request.Request(
        f"{url}{DRAIN_PATH}?seconds={seconds}", headers={TOKEN_HEADER: token}, method="POST"
    )
    _DIRECT.open(request, timeout=seconds + ANSWER_S).close()


async def _awaited(response: Any) -> Any:
    """A Serve response as a coroutine, as asyncio's timeouts need it."""
    return await response
