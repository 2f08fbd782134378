# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo serve MODEL --replicas N``: start or join a Ray cluster and serve until stopped."""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from vllm_slo.arguments import INTERRUPTED, number, whole
from vllm_slo.config.command_line import Flags
from vllm_slo.config.recording import RECORD_KEY
from vllm_slo.config.speculation import DRAFT_KEY, SERVERS_KEY, TOKEN_FILE_KEY, pool_value
from vllm_slo.errors import ConfigError, VllmSLOError
from vllm_slo.router import ray_session
from vllm_slo.router.arguments import HEAD_NODE, AppArgs, embedded_config
from vllm_slo.wire.draft_socket import check_verifier

DEFAULT_HOST: Final = "0.0.0.0"
DEFAULT_PORT: Final = 8000
POLL_S: Final = 0.2
STATUS_EVERY_S: Final = 2.0
_PASSED_ON: Final = ("VLLM_", "HF_", "OMP_", "CUDA_", "TORCH")
_SECRET: Final = ("TOKEN", "KEY", "SECRET")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags for several replicas; all others are vLLM's."""
    group = parser.add_argument_group("several replicas behind one port (vllm-slo[ray])")

    def add(flag: str, kind: Callable[[str], Any], metavar: str, text: str) -> None:
        # vLLM's flags may have underscores instead of dashes, so these may, too.
        names = dict.fromkeys((flag, f"--{flag[2:].replace('-', '_')}"))
        group.add_argument(*names, type=kind, metavar=metavar, help=text)

    add("--replicas", whole(1), "N", "number of replicas")
    add("--min-replicas", whole(0), "N", "fewest replicas, if their number follows demand")
    add("--max-replicas", whole(1), "N", "most replicas, if their number follows demand")
    add("--fronts", whole(1), "N", "number of fronts, which share the port (1)")
    add("--ray-address", str, "ADDRESS", "Ray cluster to run on; default: a new one here")
    add("--gpus-per-replica", number(0.0), "N", "default: tensor times pipeline parallel size")
    add("--cpus-per-replica", number(0.0), "N", "CPU cores reserved for each replica")
    add("--replica-module", str, "MODULE", argparse.SUPPRESS)  # for tests: no vLLM


def asked_for(args: argparse.Namespace) -> bool:
    """Whether the command line asks for replicas instead of a single server."""
    flags = ("replicas", "min_replicas", "max_replicas", "fronts", "ray_address")
    return any(getattr(args, flag, None) is not None for flag in flags)


def app_args(args: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    """Arguments of the Serve application for a command line.

    Raises:
        ConfigError: one line that names the flag and the fix.
    """
    flags = Flags(rest)
    port = flags.last("--port") or str(DEFAULT_PORT)
    if not port.isdecimal():
        raise ConfigError(f"--port {port}: not a number")
    from_flags = {
        DRAFT_KEY: args.draft_model and pool_value(args.draft_model),
        SERVERS_KEY: args.draft_servers,
        TOKEN_FILE_KEY: args.draft_token_file,
        RECORD_KEY: args.record,
    }
    additional = embedded_config(args.slo_config, args.additional_config, from_flags)
    given = {
        "model": args.model,
        "replicas": args.replicas,
        "min_replicas": args.min_replicas,
        "max_replicas": args.max_replicas,
        "fronts": args.fronts,
        "gpus_per_replica": args.gpus_per_replica,
        "cpus_per_replica": args.cpus_per_replica,
        "replica_module": args.replica_module,
        "host": flags.last("--host") or DEFAULT_HOST,
        "port": int(port),
        "slo_config": additional.pop("slo_config", None),
    }
    rest = flags.without("--host").without("--port").words
    if additional:
        rest = [*rest, "--additional-config", json.dumps(additional)]
    given["vllm_args"] = rest
    checked = AppArgs.checked({key: value for key, value in given.items() if value is not None})
    return checked.model_dump(exclude_unset=True)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM; a second signal ends the drain.

    Raises:
        VllmSLOError: a flag, the port or the configuration cannot be used, or a replica does not
            start; one line.
    """
    given = app_args(args, rest)
    if args.ray_address is None:
        _require_port(given["host"], given["port"])
        given["private_host"] = "127.0.0.1"
    else:
        ray_session.require(args.ray_address)
        given["env"] = passed_on(os.environ)
    ray_session.import_ray("--replicas", "aiohttp", "ray.serve")
    checked = AppArgs.checked(given)
    speculation = checked.slo().speculation
    if speculation.draft_servers is not None and args.ray_address is None:
        check_verifier(speculation.draft_servers, speculation.draft_token_file)
    cpus = int((checked.cpus_per_replica or 0) * checked.most) + 1
    with ray_session.interruptible(), ray_session.cluster(args.ray_address, cpus):
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        _Deployment(given, args.ray_address).serve()
    return INTERRUPTED if ray_session.hurried() else 0


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this environment that replicas on other machines get.

    Secrets are left out, because other users of a cluster can read an application's environment.
    ``CUDA_VISIBLE_DEVICES`` is left out, because Ray sets it.
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_PASSED_ON)
        and not any(word in name for word in _SECRET)
        and name != "CUDA_VISIBLE_DEVICES"
    }


class _Deployment:
    def __init__(self, given: Mapping[str, Any], ray_address: str | None) -> None:
        import ray
        from ray import serve

        self._serve = serve
        self._args = AppArgs.checked(given)
        self._given = dict(given)
        self._name = f"vllm-slo-{self._args.port}"
        self._serve_ran = _serve_runs()
        self._ends_serve = ray_address is not None and not self._serve_ran
        if ray_address is not None and not ray_address.startswith("ray://"):
            here = ray.util.get_node_ip_address()
            self._given["front_resources"] = {f"node:{here}": 0.001}
        elif ray_address is not None:
            self._given["front_resources"] = {HEAD_NODE: 0.001}
        self._handle: Any = None
        self._local = ray_address is None
        self._ran = False

    def serve(self) -> None:
        """Deploy, wait for a signal, drain.

        Raises:
            VllmSLOError: a replica or the front does not start.
        """
        from vllm_slo.router.app import build

        if self._serve_ran and self._name in self._serve.status().applications:
            raise ConfigError(
                f"--port {self._args.port}: the application {self._name} already runs on this "
                "cluster; choose another port or delete it"
            )
        try:
            self._serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
            target = self._serve.RunTarget(build(self._given), name=self._name, route_prefix=None)
            self._handle = self._serve.run_many([target], wait_for_applications_running=False)[0]
            self._await_ready()
            self._watch()
        except KeyboardInterrupt:
            ray_session.say("stopping; a second signal stops at once")
            self._drain()
        finally:
            # A local cluster ends anyway, so it is waited for only if the application ran.
            self._delete(wait=ray_session.signals() < 2 and (self._ran or not self._local))

    def _await_ready(self) -> None:
        """Wait until the application runs and the front has all its replicas."""
        told = ""
        while True:
            status = self._serve.status().applications.get(self._name)
            for name, deployment in status.deployments.items() if status else ():
                message = deployment.message
                if "failed to start" in message or status.status == "DEPLOY_FAILED":
                    raise VllmSLOError(f"{_reason(message or status.message)}; logs: {_logs()}")
                if message and message != told:
                    told = message
                    ray_session.say(f"{name}: {message.splitlines()[0]}")
            if status and status.status == "RUNNING" and self._ready() >= self._args.first:
                break
            time.sleep(POLL_S)
        self._ran = True
        count, names = self._ready(), " ".join(self._args.served_model_names)
        replicas = "1 replica" if count == 1 else f"{count} replicas"
        host = f"[{self._args.host}]" if ":" in self._args.host else self._args.host
        print(  # noqa: T201 (the one line that scripts wait for)
            f"vllm-slo: {replicas} of {names} behind http://{host}:{self._args.port}", flush=True
        )

    def _watch(self) -> None:
        """Report changes of the number of ready replicas until a signal comes."""
        known = self._ready()
        among = "" if self._args.scales else f" of {self._args.first}"
        while True:
            time.sleep(STATUS_EVERY_S)
            ready = self._ready()
            if ready != known:
                ray_session.say(f"{ready}{among} replicas ready")
                known = ready

    def _ready(self) -> int:
        from ray.exceptions import RayError

        try:
            return int(self._handle.status.remote().result(timeout_s=10)["ready"])
        except (RayError, TimeoutError):  # the front is starting or restarting
            return 0

    def _drain(self) -> None:
        from ray.exceptions import RayError

        with suppress(RayError, TimeoutError):
            if self._handle is not None:
                patience_s = self._args.slo().routing.drain_s + 15
                self._handle.drain.remote().result(timeout_s=patience_s)

    def _delete(self, *, wait: bool) -> None:
        from ray.exceptions import RayError

        with suppress(RayError, TimeoutError):
            self._serve.delete(self._name, _blocking=wait)
            if self._ends_serve and wait:
                self._serve.shutdown()


def _serve_runs() -> bool:
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _require_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"--port {port}: {host}: {error.strerror}") from None


def _reason(message: str) -> str:
    """The line of a Serve message with the reason why an actor did not start."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(("RuntimeError: the ", "vllm_slo.errors."))]
    line = (ours or lines or ["the deployment failed"])[-1]
    return line.split(": ", 1)[-1] if ours else line


def _logs() -> str:
    import ray

    with suppress(AttributeError, RuntimeError):
        return str(ray._private.worker._global_node.get_logs_dir_path())
    return "in the cluster"
