# SPDX-License-Identifier: Apache-2.0
"""The Serve application: one front, and replicas that register with it.

Serve places, watches and restarts the two kinds of actors. Each supervises one child process that
does the work, so no request passes through Ray: clients talk to the front's child, which talks to
the replicas' children.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from vllm_slo.config.serve_args import serve_arguments
from vllm_slo.errors import ConfigError
from vllm_slo.router.arguments import (
    API_KEY_ENV,
    AppArgs,
    Flags,
    Resources,
    api_key_digest,
    api_keys_in,
    resources,
)
from vllm_slo.router.child import Child
from vllm_slo.router.protocol import TOKEN_HEADER

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.config import AutoscalingContext
    from ray.serve.handle import DeploymentHandle

__all__ = ["build", "replicas_wanted"]

logger = logging.getLogger("ray.serve")

FRONT: Final = "Front"
REPLICA: Final = "Replica"
METRIC: Final = "replicas_wanted"
REGISTER_EVERY_S: Final = 1.0
FORGET_AFTER_S: Final = 10.0
"""A replica that has not registered for this long is not handed to the front's child."""
CALL_TIMEOUT_S: Final = 5.0
ANSWER_S: Final = 8.0
"""A replica that takes longer to answer at all is stuck."""
FAREWELL_S: Final = 1.0
"""How long a leaving replica tries to tell the front, which may have left before."""
KILL_MARGIN_S: Final = 10.0
"""What a stopping actor is given on top of the drain time of its child."""
BIND_ATTEMPTS: Final = 10
FRONT_FAILURES: Final = 8
"""So many starts of the front's child in a row that fail end its actor."""
STEADY_S: Final = 5.0
"""A front's child that lived this long did not fail at the start."""
MAX_BACKOFF_S: Final = 5.0
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


# --- replicas ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica's actor needs to start its child, wherever it is placed."""

    module: str
    model: str
    vllm_args: tuple[str, ...]
    additional_config: str
    private_host: str | None
    drain_s: float
    most: int
    workers: int
    gpus: float
    cpus: float | None
    env: tuple[tuple[str, str], ...]
    secret_env: tuple[str, ...]

    def command(self, private_host: str) -> list[str]:
        """The command line of the child."""
        return [
            *(sys.executable, "-m", self.module),
            *("--private-host", private_host, "--drain-s", str(self.drain_s), "--"),
            *serve_arguments(self.model, self.vllm_args, json.loads(self.additional_config)),
        ]

    def environment(self, node_cores: int) -> dict[str, str]:
        """The environment of the child: the node's, what was passed on, and threads on CPU.

        API keys stay with the front: replicas admit nobody but the front.
        """
        given = _environment_at_start()
        env = {name: value for name, value in os.environ.items() if name not in self.secret_env}
        if "OMP_NUM_THREADS" not in given:
            env.pop("OMP_NUM_THREADS", None)  # Ray's own choice, made for the actor
        if not self.gpus:
            # Left alone, the engines of one node would all bind to its first cores.
            cores = int(self.cpus) if self.cpus else node_cores // self.most
            env.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.workers)))
            env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        return {**env, **dict(self.env)}


class Replica:
    """Actor of one replica: starts its child, tells the front of it, ends with it."""

    # Serve awaits the constructor, so that an actor can be told to leave while a model is loaded.
    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]
        self._leaving = False
        self._spec = spec
        self._wanted = 0
        context = serve.get_replica_context()
        self._name, self._app = context.replica_id.unique_id, context.app_name
        self._child = Child(
            spec.command(spec.private_host or ray.util.get_node_ip_address()),
            spec.environment(_node_cores()),
        )
        await self._child.start()
        ready = await self._child.read()
        if ready is None:
            raise RuntimeError(await _obituary("the replica", self._child))
        self._entry = {"name": self._name, "url": ready["url"], "token": ready["token"]}
        self._tasks = [
            asyncio.create_task(self._stay_registered()),
            asyncio.create_task(self._end_with_child()),
        ]

    async def check_health(self) -> None:
        """Serve's health check; three that fail in a row end the actor.

        Raises:
            RuntimeError: the child is gone.
            OSError: the child does not answer.
        """
        if self._child.returncode is not None:
            raise RuntimeError(f"the replica process is gone: {self._child.last_words()}")
        await asyncio.to_thread(require_answer, self._entry["url"], self._entry["token"])

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's autoscaler is told: the front's latest word."""
        return {METRIC: float(self._wanted)} if self._wanted else {}

    async def __del__(self) -> None:
        """Serve's request to leave: no new requests, then drain."""
        self._leaving = True
        if hasattr(self, "_entry"):
            await self._deregister()
        await self._child.terminate(self._spec.drain_s + KILL_MARGIN_S / 2)

    async def _stay_registered(self) -> None:
        while not self._leaving:
            started_s = time.monotonic()
            try:
                front = serve.get_deployment_handle(FRONT, self._app)
                answer = await asyncio.wait_for(
                    _awaited(front.register.remote(self._entry)), CALL_TIMEOUT_S
                )
                self._wanted = int(answer["wanted"])
            except Exception as error:  # noqa: BLE001 (the front may be starting, or starting anew)
                logger.warning("%s: could not register: %r", self._name, error)
            await asyncio.sleep(max(0.0, started_s + REGISTER_EVERY_S - time.monotonic()))

    async def _deregister(self) -> None:
        with contextlib.suppress(Exception):  # the front finds out by itself
            front = serve.get_deployment_handle(FRONT, self._app)
            await asyncio.wait_for(_awaited(front.deregister.remote(self._name)), FAREWELL_S)

    async def _end_with_child(self) -> None:
        """Serve replaces an actor that died at once, an unhealthy one after several checks."""
        while await self._child.read() is not None:
            pass
        if not self._leaving:
            logger.error(await _obituary("the replica", self._child))
            await self._deregister()
            os._exit(1)


# --- front ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrontSpec:
    """What the front's actor needs to start its child."""

    module: str
    host: str
    port: int
    slo_config: str
    served_model_names: tuple[str, ...]
    api_key_env: str
    api_key_sha256: tuple[str, ...]
    secret_env: tuple[str, ...]
    drain_s: float

    def environment(self) -> dict[str, str]:
        """The environment of the child: that of the node without API keys."""
        return {name: value for name, value in os.environ.items() if name not in self.secret_env}

    def command(self) -> list[str]:
        """The command line of the child.

        Raises:
            ConfigError: the variable with the API key was asked for and is not set.
        """
        config = {
            "slo_config": json.loads(self.slo_config),
            "served_model_names": list(self.served_model_names),
            "api_key_sha256": self._digests(),
        }
        return [
            *(sys.executable, "-m", self.module, "--host", self.host, "--port", str(self.port)),
            *("--config", json.dumps(config)),
        ]

    def _digests(self) -> list[str]:
        if self.api_key_sha256:
            return list(self.api_key_sha256)
        keys = api_keys_in(os.environ, self.api_key_env)
        if not keys and self.api_key_env != API_KEY_ENV:
            raise ConfigError(f"api_key_env: the variable {self.api_key_env} is not set")
        return [api_key_digest(key) for key in keys]


class Front:
    """Actor of the front: keeps its child alive and tells it which replicas there are."""

    # Serve awaits the constructor; see `Replica`.
    async def __init__(self, spec: FrontSpec, replicas: DeploymentHandle) -> None:  # type: ignore[misc]
        self._spec = spec
        self._replicas = replicas  # binds both deployments into one application; never called
        self._leaving = False
        self._entries: dict[str, dict[str, str]] = {}
        self._seen_s: dict[str, float] = {}
        self._sent: list[dict[str, str]] | None = None
        self._said: dict[str, Any] = {}
        self._failures = 0
        for attempt in range(BIND_ATTEMPTS):
            if await self._start_child():
                break
            # The child of a front that just died may still hold the port.
            if self._leaving or attempt + 1 == BIND_ATTEMPTS:
                raise RuntimeError(await _obituary("the front", self._child))
            await asyncio.sleep(0.5)
        self._tasks = [
            asyncio.create_task(self._supervise()),
            asyncio.create_task(self._forget_the_silent()),
        ]

    async def register(self, entry: dict[str, str]) -> dict[str, int]:
        """A replica says that it is there; every second. Returns how many are wanted."""
        name = entry["name"]
        self._seen_s[name] = time.monotonic()
        self._entries[name] = entry
        self._tell()
        return {"wanted": int(self._said.get("wanted", 0))}

    async def deregister(self, name: str) -> None:
        """A replica leaves."""
        self._entries.pop(name, None)
        self._seen_s.pop(name, None)
        self._tell()

    async def status(self) -> dict[str, Any]:
        """Where the front listens, replicas ready and wanted, names of those registered, pid."""
        return {
            "listening": self._said.get("listening"),
            "ready": int(self._said.get("ready", 0)),
            "wanted": int(self._said.get("wanted", 0)),
            "replicas": sorted(self._entries),
            "pid": self._child.pid,
        }

    async def drain(self) -> None:
        """Stop accepting, wait for what runs; the front is not started again."""
        self._leaving = True
        await self._child.terminate(self._spec.drain_s + KILL_MARGIN_S / 2)

    async def check_health(self) -> None:
        """Serve's health check.

        Raises:
            RuntimeError: the child is gone and does not come back.
        """
        # One that listens is left alone, however many died before it.
        listens = self._said and self._child.returncode is None
        if self._failures > 1 and not listens and not self._leaving:
            raise RuntimeError(f"the front process does not stay: {self._child.last_words()}")

    async def __del__(self) -> None:
        await self.drain()

    async def _start_child(self) -> bool:
        """Start the child; whether it listens."""
        self._child = Child(
            self._spec.command(),
            self._spec.environment(),
            patience_s=self._spec.drain_s + KILL_MARGIN_S,
        )
        self._said = {}
        self._sent = None
        await self._child.start()
        message = await self._child.read()
        if message is None:
            return False
        self._said = message
        self._tell()
        return True

    async def _supervise(self) -> None:
        while True:
            started_s = time.monotonic()
            while (message := await self._child.read()) is not None:
                self._said.update(message)
            if self._leaving:
                return
            steady = time.monotonic() - started_s > STEADY_S
            self._failures = 0 if steady else self._failures + 1
            logger.error(await _obituary("the front", self._child))
            await self._restart()

    async def _restart(self) -> None:
        """Start children until one listens; the first at once, the others ever later."""
        while not self._leaving:
            if self._failures > FRONT_FAILURES:
                os._exit(1)
            if self._failures > 1:
                await asyncio.sleep(min(MAX_BACKOFF_S, 0.1 * 2**self._failures))
            if await self._start_child():
                return
            self._failures += 1
            logger.error(await _obituary("the front", self._child))

    async def _forget_the_silent(self) -> None:
        while True:
            await asyncio.sleep(REGISTER_EVERY_S)
            limit_s = time.monotonic() - FORGET_AFTER_S
            for name in [name for name, seen_s in self._seen_s.items() if seen_s < limit_s]:
                logger.warning("replica %s is silent", name)
                await self.deregister(name)

    def _tell(self) -> None:
        entries = [self._entries[name] for name in sorted(self._entries)]
        if entries != self._sent and self._said:
            self._child.write({"replicas": entries})
            self._sent = entries


# --- the application -----------------------------------------------------------------------------


def replicas_wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy: as many as the front asked for last.

    Serve applies the delays. Without a word from the front, nothing changes.
    """
    series = (context.raw_metrics or {}).get("replicas_wanted", {}).values()
    newest = max(
        (points[-1] for points in series if points), key=lambda p: p.timestamp, default=None
    )
    wanted = context.target_num_replicas if newest is None else math.ceil(newest.value)
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(low, min(high, wanted)), {}


def build(args: Mapping[str, Any]) -> Application:
    """The application, for ``serve run vllm_slo.router.app:build model=...`` and config files.

    Args:
        args: see `AppArgs`.

    Raises:
        ConfigError: one line that names the argument and the fix.
    """
    parsed = AppArgs.checked(args)
    slo, additional = parsed.slo(), parsed.additional_config()
    set_aside = resources(parsed, cluster_has_gpus=_cluster_has_gpus())
    drain_s = slo.routing.drain_s
    secret_env = tuple({API_KEY_ENV, parsed.api_key_env})
    replica = serve.deployment(Replica, name=REPLICA).options(
        **_replica_options(parsed, set_aside, drain_s)
    )
    front = serve.deployment(Front, name=FRONT).options(
        num_replicas=1,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0, "resources": parsed.front_resources},
        **_supervision(drain_s),
    )
    return front.bind(
        FrontSpec(
            module=parsed.front_module,
            host=parsed.host,
            port=parsed.port,
            slo_config=json.dumps(additional.get("slo_config")),
            served_model_names=tuple(parsed.served_model_names),
            api_key_env=parsed.api_key_env,
            api_key_sha256=_digests_known_here(parsed),
            secret_env=secret_env,
            drain_s=drain_s,
        ),
        replica.bind(
            ReplicaSpec(
                module=parsed.replica_module,
                model=parsed.model,
                vllm_args=tuple(Flags(parsed.vllm_args).without("--additional-config").words),
                additional_config=json.dumps(additional),
                private_host=parsed.private_host,
                drain_s=drain_s,
                most=parsed.most,
                workers=parsed.parallel_size,
                gpus=set_aside.gpus,
                cpus=parsed.cpus_per_replica,
                env=tuple(sorted(parsed.env.items())),
                secret_env=secret_env,
            )
        ),
    )


def _replica_options(args: AppArgs, set_aside: Resources, drain_s: float) -> dict[str, Any]:
    actor: dict[str, Any] = {"num_cpus": set_aside.cpus, "num_gpus": set_aside.gpus}
    # Serve hands a metric on every ten seconds unless told otherwise where the actor starts.
    push = "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"
    options: dict[str, Any] = {"ray_actor_options": actor, **_supervision(drain_s)}
    if set_aside.gpus:
        options["placement_group_bundles"] = [set_aside.bundle]
        options["placement_group_strategy"] = "STRICT_PACK"
    if not args.scales:
        return {**options, "num_replicas": args.fewest}
    actor["runtime_env"] = {"env_vars": {push: os.environ.get(push, "1.0")}}
    options["autoscaling_config"] = AutoscalingConfig(
        min_replicas=args.fewest,
        max_replicas=args.most,
        initial_replicas=args.fewest,
        upscale_delay_s=args.upscale_delay_s,
        downscale_delay_s=args.downscale_delay_s,
        policy=AutoscalingPolicy(policy_function="vllm_slo.router.app:replicas_wanted"),
    )
    return options


def _supervision(drain_s: float) -> dict[str, Any]:
    """How Serve watches either kind of actor; its own ten seconds are too slow for clients."""
    return {
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_timeout_s": drain_s + KILL_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": 3,
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
    }


def _digests_known_here(args: AppArgs) -> tuple[str, ...]:
    """Digests of the keys where the application is built; without any, the front looks itself."""
    keys = api_keys_in(os.environ, args.api_key_env)
    return args.api_key_sha256 or tuple(map(api_key_digest, keys))


def _cluster_has_gpus() -> bool:
    return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0)


def _node_cores() -> int:
    """Cores of this node, by the operator's word to Ray if there is one."""
    here = ray.get_runtime_context().get_node_id()
    said = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["NodeID"] == here]
    return int(said[0]) if said and said[0] >= 1 else len(os.sched_getaffinity(0))


def _environment_at_start() -> frozenset[str]:
    """Names of the variables that this process was started with."""
    try:
        whole = Path("/proc/self/environ").read_bytes()
    except OSError:
        return frozenset(os.environ)
    return frozenset(
        entry.partition(b"=")[0].decode(errors="replace") for entry in whole.split(b"\0")
    )


def require_answer(url: str, token: str, within_s: float = ANSWER_S) -> None:
    """Require any answer at all from a replica's server; no proxy stands between.

    Raises:
        OSError: there is none.
    """
    request = urllib.request.Request(f"{url}/health", headers={TOKEN_HEADER: token})
    with contextlib.suppress(urllib.error.HTTPError):
        _DIRECT.open(request, timeout=within_s).close()


async def _obituary(what: str, child: Child) -> str:
    """Why a child ended, in one line."""
    code = await child.wait()
    how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    return f"{what} {how}: {child.last_words()}"


async def _awaited(response: Any) -> Any:
    """A Serve response as a coroutine, which asyncio's timeouts demand."""
    return await response
