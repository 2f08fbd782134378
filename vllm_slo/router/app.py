# SPDX-License-Identifier: Apache-2.0
"""The Serve application: one front, and replicas that register with it.

Serve places, watches and restarts the actors. Each actor supervises one child process that does the
work. Clients talk to the front's child, which talks to the replicas' children, so no request passes
through Ray.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from vllm_slo.config.command_line import Flags
from vllm_slo.config.recording import SALT_VARIABLE, make_salt
from vllm_slo.errors import ConfigError
from vllm_slo.router.api_keys import API_KEY_ENV, api_key_digest, api_keys_in
from vllm_slo.router.arguments import AppArgs, Resources, resources
from vllm_slo.router.front_actor import FRONT, KILL_MARGIN_S, REPLICA, Front, FrontSpec
from vllm_slo.router.replica_actor import Replica, ReplicaSpec
from vllm_slo.wire.front_protocol import token_in

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.config import AutoscalingContext


def replicas_wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy: as many replicas as the front asked for last.

    Serve applies the delays. Nothing changes while the front has not asked. Without a replica there
    is none to pass its word on; then its call of `Replica.wake`, which waits, asks for one.
    """
    series = (context.raw_metrics or {}).get("replicas_wanted", {}).values()
    newest = max(
        (points[-1] for points in series if points), key=lambda p: p.timestamp, default=None
    )
    wanted = context.target_num_replicas if newest is None else math.ceil(newest.value)
    if not context.running_replicas and context.total_num_requests:
        wanted = max(wanted, 1)
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(low, min(high, wanted)), {}


def build(args: Mapping[str, Any]) -> Application:
    """The application, for ``serve run vllm_slo.router.app:build model=...`` and config files.

    ``args``: see `AppArgs`.

    Raises:
        ConfigError: one line that names the argument and the fix.
    """
    parsed = AppArgs.checked(args)
    for name in ("front_app", "replica_app"):
        if getattr(parsed, name) is not None:
            raise ConfigError(f"{name}: this application has fronts and replicas; remove it")
    return _fronts(parsed, _replicas(parsed))


def build_fronts(args: Mapping[str, Any]) -> Application:
    """An application with the fronts alone; as `build`. The replicas are those of another one, of
    `build_replicas`, so that it can be deployed anew while these fronts go on."""
    return _fronts(AppArgs.checked(args), None)


def build_replicas(args: Mapping[str, Any]) -> Application:
    """An application with the replicas alone, for the fronts of ``front_app``; as `build`.

    Raises:
        ConfigError: as `build`, or ``front_app`` is missing.
    """
    parsed = AppArgs.checked(args)
    if parsed.front_app is None:
        raise ConfigError("front_app: is needed; name the application of build_fronts")
    return _replicas(parsed)


def _replicas(parsed: AppArgs) -> Application:
    slo, additional = parsed.slo(), parsed.additional_config()
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    set_aside = resources(parsed, cluster_has_gpus=has_gpus)
    drain_s = slo.routing.drain_s
    replica = serve.deployment(Replica, name=REPLICA).options(
        **_replica_options(parsed, set_aside, drain_s)
    )
    return replica.bind(
        ReplicaSpec(
            module=parsed.replica_module,
            model=parsed.model,
            vllm_args=tuple(Flags(parsed.vllm_args).without("--additional-config").words),
            additional_config=json.dumps(additional),
            private_host=parsed.private_host,
            drain_s=drain_s,
            fronts=front_names(parsed.fronts),
            front_app=parsed.front_app,
            most=parsed.most,
            workers=parsed.parallel_size,
            gpus=set_aside.gpus,
            cpus=parsed.cpus_per_replica,
            env=tuple(sorted(parsed.env.items())),
            secret_env=_secrets(parsed),
            token=token_in({**os.environ, **parsed.env}) or secrets.token_urlsafe(32),
            salt={**os.environ, **parsed.env}.get(SALT_VARIABLE) or make_salt(),
        )
    )


def _fronts(parsed: AppArgs, replicas: Application | None) -> Application:
    """``replicas``: of the same application; None: they are in another one."""
    slo, additional = parsed.slo(), parsed.additional_config()
    keys_here = api_keys_in(os.environ, parsed.api_key_env)
    spec = FrontSpec(
        module="vllm_slo.router.front",
        host=parsed.host,
        port=parsed.port,
        slo_config=json.dumps(additional.get("slo_config")),
        api_key_env=parsed.api_key_env,
        # Of the keys set where the application is built; else a front reads its own.
        api_key_sha256=parsed.api_key_sha256 or tuple(map(api_key_digest, keys_here)),
        secret_env=_secrets(parsed),
        drain_s=slo.routing.drain_s,
        shares_port=parsed.fronts > 1,
        replica_app=parsed.replica_app,
    )
    first, *others = (
        serve.deployment(Front, name=name).options(
            num_replicas=1,
            max_ongoing_requests=10_000,
            ray_actor_options={
                "num_cpus": 0,
                "resources": parsed.front_resources,
                "runtime_env": _pushing("HANDLE"),
            },
            **_supervision(spec.drain_s),
        )
        for name in front_names(parsed.fronts)
    )
    return first.bind(spec, replicas, *(other.bind(spec, replicas) for other in others))


def _secrets(parsed: AppArgs) -> tuple[str, ...]:
    """Environment variables that no child gets."""
    return tuple({API_KEY_ENV, parsed.api_key_env})


def front_names(count: int) -> tuple[str, ...]:
    """The deployments of the fronts."""
    return (FRONT, *(f"{FRONT}-{number}" for number in range(2, count + 1)))


def _replica_options(args: AppArgs, set_aside: Resources, drain_s: float) -> dict[str, Any]:
    actor: dict[str, Any] = {"num_cpus": set_aside.cpus, "num_gpus": set_aside.gpus}
    options: dict[str, Any] = {"ray_actor_options": actor, **_supervision(drain_s)}
    if set_aside.gpus:
        options["placement_group_bundles"] = [set_aside.bundle]
        options["placement_group_strategy"] = "STRICT_PACK"
    if not args.scales:
        return {**options, "num_replicas": args.first}
    actor["runtime_env"] = _pushing("REPLICA")
    options["autoscaling_config"] = AutoscalingConfig(
        min_replicas=args.fewest,
        max_replicas=args.most,
        initial_replicas=args.first,
        upscale_delay_s=args.upscale_delay_s,
        downscale_delay_s=args.downscale_delay_s,
        downscale_to_zero_delay_s=args.downscale_delay_s,
        policy=AutoscalingPolicy(policy_function="vllm_slo.router.app:replicas_wanted"),
    )
    return options


def _pushing(what: str) -> dict[str, Any]:
    """A runtime environment in which Serve passes metrics on every second: its ten are too many."""
    variable = f"RAY_SERVE_{what}_AUTOSCALING_METRIC_PUSH_INTERVAL_S"
    return {"env_vars": {variable: os.environ.get(variable, "1.0")}}


def _supervision(drain_s: float) -> dict[str, Any]:
    """How Serve watches the actors; its default period of ten seconds is too long for clients."""
    return {
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_timeout_s": drain_s + KILL_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": 3,
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
    }
