# SPDX-License-Identifier: Apache-2.0
"""The Serve actor of the front."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm_slo.errors import ConfigError
from vllm_slo.router.api_keys import API_KEY_ENV, api_key_digest, api_keys_in
from vllm_slo.router.child import Child

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

FRONT: Final = "Front"
REPLICA: Final = "Replica"
"""The deployments; further fronts have a number."""
REGISTER_EVERY_S: Final = 1.0
FORGET_AFTER_S: Final = 10.0
"""Time without a registration after which the front's child gets no more requests for a replica."""
KILL_MARGIN_S: Final = 10.0
"""Time for an actor to stop, in addition to the drain of its child."""
BIND_ATTEMPTS: Final = 10
FRONT_FAILURES: Final = 8
"""Failed starts of the front's child in a row after which its actor ends."""
STEADY_S: Final = 5.0
"""A child that ran longer did not fail at its start."""
MAX_BACKOFF_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class FrontSpec:
    """All that a front's actor needs to start its child.

    Attributes:
        shares_port: other fronts of this application may listen on the same port of a node.
        replica_app: the application of the replicas; None: that of the front, or not known.
    """

    module: str
    host: str
    port: int
    slo_config: str
    api_key_env: str
    api_key_sha256: tuple[str, ...]
    secret_env: tuple[str, ...]
    drain_s: float
    shares_port: bool = False
    replica_app: str | None = None

    def environment(self) -> dict[str, str]:
        """The environment of the child: the node's, without API keys."""
        return {name: value for name, value in os.environ.items() if name not in self.secret_env}

    def command(self) -> list[str]:
        """The command line of the child.

        Raises:
            ConfigError: a variable for the API keys was named and is not set.
        """
        config = {
            "slo_config": json.loads(self.slo_config),
            "api_key_sha256": self._digests(),
        }
        return [
            *(sys.executable, "-m", self.module, "--host", self.host, "--port", str(self.port)),
            *("--config", json.dumps(config)),
            *(["--share-port"] if self.shares_port else []),
        ]

    def _digests(self) -> list[str]:
        if self.api_key_sha256:
            return list(self.api_key_sha256)
        keys = api_keys_in(os.environ, self.api_key_env)
        if not keys and self.api_key_env != API_KEY_ENV:
            raise ConfigError(f"api_key_env: the variable {self.api_key_env} is not set")
        return [api_key_digest(key) for key in keys]


class Front:
    """The actor of a front: it keeps its child running and tells it of the replicas.

    Args:
        replicas: of the same application; None: they are in another one.
        others: the other fronts of the application. Serve deploys what a constructor gets.
    """

    # Serve awaits the constructor, so an actor can be stopped while it waits for its child.
    async def __init__(  # type: ignore[misc]
        self, spec: FrontSpec, replicas: DeploymentHandle | None, *others: DeploymentHandle
    ) -> None:
        self._spec = spec
        self._replicas = replicas
        self._waking: Any = None
        self._leaving = False
        self._entries: dict[str, dict[str, str]] = {}
        self._seen_s: dict[str, float] = {}
        self._sent: list[dict[str, str]] | None = None
        self._report: dict[str, Any] = {}
        self._failures = 0
        for attempt in range(BIND_ATTEMPTS):
            if await self._start_child():
                break
            # The child of a front that has just died may still hold the port.
            if self._leaving or attempt + 1 == BIND_ATTEMPTS:
                raise RuntimeError(await self._child.obituary("the front"))
            await asyncio.sleep(0.5)
        self._tasks = [
            asyncio.create_task(self._supervise()),
            asyncio.create_task(self._remove_silent()),
            asyncio.create_task(self._wake()),
        ]

    async def register(self, entry: dict[str, str]) -> dict[str, Any]:
        """Register a replica, every second; returns the load, as `Load` has it, and the names of
        the replicas that are ready, once both are known."""
        name = entry["name"]
        self._seen_s[name] = time.monotonic()
        self._entries[name] = entry
        self._send_entries()
        return {key: self._report[key] for key in ("load", "ready") if key in self._report}

    async def deregister(self, name: str) -> None:
        self._entries.pop(name, None)
        self._seen_s.pop(name, None)
        self._send_entries()

    async def status(self) -> dict[str, Any]:
        """URL of the front, numbers of replicas, names of registered ones, pid of the child."""
        return {
            "listening": self._report.get("listening"),
            "ready": len(self._report.get("ready", ())),
            "wanted": int(self._report.get("wanted", 0)),
            "replicas": sorted(self._entries),
            "pid": self._child.pid,
        }

    async def drain(self) -> None:
        """Stop the child after its running requests; it is not started again."""
        self._leaving = True
        await self._child.terminate(self._spec.drain_s + KILL_MARGIN_S / 2)

    async def check_health(self) -> None:
        """Serve's health check.

        Raises:
            RuntimeError: the child has ended several times and none listens.
        """
        # A child that listens is healthy, however many failed before it.
        listens = self._report and self._child.returncode is None
        if self._failures > 1 and not listens and not self._leaving:
            raise RuntimeError(f"the front process keeps failing: {self._child.last_words()}")

    async def __del__(self) -> None:
        await self.drain()

    async def _start_child(self) -> bool:
        """Start the child; whether it listens."""
        self._child = Child(
            self._spec.command(),
            self._spec.environment(),
            patience_s=self._spec.drain_s + KILL_MARGIN_S,
        )
        self._report = {}
        self._sent = None
        await self._child.start()
        self._write_entries()  # those from before, so that it knows them when it listens
        message = await self._child.read()
        if message is None:
            return False
        self._report = message
        self._send_entries()
        return True

    async def _supervise(self) -> None:
        while True:
            started_s = time.monotonic()
            while (message := await self._child.read()) is not None:
                self._report.update(message)
            if self._leaving:
                return
            steady = time.monotonic() - started_s > STEADY_S
            self._failures = 0 if steady else self._failures + 1
            logger.error(await self._child.obituary("the front"))
            await self._restart()

    async def _restart(self) -> None:
        """Start children until one listens: the first at once, the others after growing pauses."""
        while not self._leaving:
            if self._failures > FRONT_FAILURES:
                os._exit(1)
            if self._failures > 1:
                await asyncio.sleep(min(MAX_BACKOFF_S, 0.1 * 2**self._failures))
            if await self._start_child():
                return
            self._failures += 1
            logger.error(await self._child.obituary("the front"))

    async def _remove_silent(self) -> None:
        while True:
            await asyncio.sleep(REGISTER_EVERY_S)
            limit_s = time.monotonic() - FORGET_AFTER_S
            for name in [name for name, seen_s in self._seen_s.items() if seen_s < limit_s]:
                logger.warning("replica %s has stopped registering", name)
                await self.deregister(name)

    async def _wake(self) -> None:
        """While a replica is wanted and there is none, keep one call waiting for it: Serve sees the
        call and starts a replica if it scales from zero."""
        while True:
            await asyncio.sleep(REGISTER_EVERY_S)
            wanted = self._report.get("wanted", 0) > 0 and not self._entries
            try:
                if wanted and self._waking is None:
                    self._waking = self._wake_replicas()
                elif not wanted and self._waking is not None:
                    waking, self._waking = self._waking, None
                    waking.cancel()
            except Exception as error:  # noqa: BLE001 (Serve may be restarting)
                logger.warning("could not ask for a replica: %r", error)

    def _wake_replicas(self) -> Any:
        """A call that waits for a replica; None: it is not known where they are."""
        replicas, app = self._replicas, self._spec.replica_app
        if replicas is None and app is not None:
            from ray import serve

            replicas = serve.get_deployment_handle(REPLICA, app)
        return None if replicas is None else replicas.wake.remote()

    def _send_entries(self) -> None:
        if self._report:
            self._write_entries()

    def _write_entries(self) -> None:
        entries = [self._entries[name] for name in sorted(self._entries)]
        if entries != self._sent:
            self._child.write({"replicas": entries})
            self._sent = entries
