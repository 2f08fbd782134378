# SPDX-License-Identifier: Apache-2.0
"""The arguments of several replicas, checked before anything starts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_slo.config.command_line import Flags, flag_of
from vllm_slo.config.model import CONFIG_KEY, SLOConfig, read_additional_config
from vllm_slo.config.recording import RECORD_KEY
from vllm_slo.config.serve_args import BUILT_IN_DRAFTS, given_arguments, tree_arguments
from vllm_slo.config.speculation import DRAFT_KEY, TOKEN_FILE_KEY, pool_value
from vllm_slo.errors import ConfigError
from vllm_slo.router.api_keys import API_KEY_ENV, api_key_digest
from vllm_slo.wire.draft_socket import check_address, single_addresses

HEAD_NODE: Final = "node:__internal_head__"
"""A resource that Ray gives to the head node and to no other."""

_REFUSED: Final = {
    "--data-parallel-size": "each replica is one engine; use --replicas (replicas: in YAML)",
    "--api-server-count": "the front is the only API server; remove the flag",
    "--nnodes": "a replica runs on one node; use fewer GPUs for each",
    "--distributed-executor-backend": "Ray places whole replicas here; remove the flag",
    "--headless": "a replica needs its API; remove the flag",
    "--grpc": "the front only speaks HTTP; remove the flag",
    "--uds": "replicas are reached over the network; remove the flag",
    "--root-path": "strip the prefix in the proxy before the front; remove the flag",
    "--ssl-keyfile": "TLS is ended before the front, in a proxy; remove the flag",
    "--ssl-certfile": "TLS is ended before the front, in a proxy; remove the flag",
    "--ssl-ca-certs": "TLS is ended before the front, in a proxy; remove the flag",
    "--ssl-cert-reqs": "TLS is ended before the front, in a proxy; remove the flag",
}
_REFUSED_ABOVE_ONE: Final = ("--data-parallel-size", "--api-server-count", "--nnodes")


class AppArgs(BaseModel):
    """Arguments of the Serve application, as in ``args:`` of a Serve config file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        min_length=1,
        description="Name or folder of the model; 'tiny' is the built-in one. Scope: all replicas. "
        "A model that cannot be loaded fails the deployment.",
    )
    replicas: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Number of replicas, 1 to 10000; unset: min_replicas to max_replicas, or 1. "
        "More than the cluster can hold: the others wait for nodes.",
    )
    min_replicas: int | None = Field(
        default=None,
        ge=0,
        le=10_000,
        description="Fewest replicas under autoscaling, 0 to 10000. Too low: the first burst waits "
        "for a model to load. 0: after a time without requests none is left, and the next request "
        "gets 503 while one starts.",
    )
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Most replicas under autoscaling, 1 to 10000. Too low: objectives are missed; "
        "too high: a burst of requests that no replica could serve in time starts many nodes.",
    )
    upscale_delay_s: float = Field(
        default=10.0,
        ge=0.0,
        le=86_400.0,
        description="Seconds for which more replicas must be wanted before they are started, 0 to "
        "86400. Scope: autoscaling. Too low: replicas are started and stopped again and again.",
    )
    downscale_delay_s: float = Field(
        default=300.0,
        ge=0.0,
        le=86_400.0,
        description="Seconds for which fewer replicas must be enough before some are stopped, 0 to "
        "86400. Scope: autoscaling. Too low: the next burst waits for a model to load.",
    )
    front_app: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the Serve application that has the fronts, for build_replicas; with "
        "it replicas are replaced while the fronts go on. A name that is not there: they "
        "register nowhere, and get no requests.",
    )
    replica_app: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the Serve application that has the replicas, for build_fronts. It is "
        "needed to scale from zero: with a name that is not there, no first replica starts.",
    )
    fronts: int = Field(
        default=1,
        ge=1,
        le=100,
        description="Number of fronts, 1 to 100; every replica is known to all. They listen on the "
        "same port, each on the node where it runs; see front_resources. 1: while a front starts "
        "again, nothing is served.",
    )
    host: str = Field(
        default="0.0.0.0",
        min_length=1,
        description="Address of the public port, on the node of the front. 127.0.0.1 admits only "
        "clients of that node.",
    )
    port: int = Field(
        default=8000,
        ge=1,
        le=65_535,
        description="The public port, 1 to 65535, the only one for clients. In use already: the "
        "deployment fails.",
    )
    private_host: str | None = Field(
        default=None,
        description="Address that replicas listen on; unset: the address of their node in Ray. It "
        "is the same on every node and must be reachable from the front.",
    )
    slo_config: str | dict[str, Any] | None = Field(
        default=None,
        description="Path of the SLO configuration, read where the application is built, or the "
        "mapping itself. Scope: front and all replicas.",
    )
    vllm_args: tuple[str, ...] = Field(
        default=(),
        description="Flags of 'vllm serve', a list or one string. Scope: all replicas. A flag that "
        "vLLM does not know fails the deployment.",
    )
    api_key_env: str = Field(
        default=API_KEY_ENV,
        min_length=1,
        description="Environment variable with the API key, on the node of the front or where the "
        "application is built. A variable with another name than the default may hold several "
        "keys, separated by commas. If it is not set: the default needs no key, and with another "
        "name the deployment fails.",
    )
    api_key_sha256: tuple[str, ...] = Field(
        default=(),
        description="SHA-256 (hex) of the API keys, instead of the variable. A client whose key is "
        "not among them gets 401.",
    )
    gpus_per_replica: float | None = Field(
        default=None,
        ge=0.0,
        le=1_024.0,
        description="GPUs of each replica; unset: tensor times pipeline parallel size if the "
        "cluster has GPUs now. Set it where nodes with GPUs come later.",
    )
    cpus_per_replica: float | None = Field(
        default=None,
        gt=0.0,
        le=4_096.0,
        description="CPU cores that Ray reserves for each replica, and on CPU the threads of its "
        "engine; unset: almost none are reserved, and replicas divide the cores of their node. "
        "More than a node has: the replicas wait for ever.",
    )
    front_resources: dict[str, float] = Field(
        default_factory=lambda: {HEAD_NODE: 0.001},
        description="Ray resources that a node of the front must have; default: the head node. "
        "If no node has them: the deployment waits for ever.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of the replica processes, in addition to those of the "
        "node. They are visible in Ray's state, so they must hold no secret.",
    )
    replica_module: str = Field(
        default="vllm_slo.router.replica",
        description="Python module of a replica process. For tests.",
    )

    @field_validator("vllm_args", mode="before")
    @classmethod
    def _split_words(cls, given: Any) -> Any:
        if isinstance(given, str):
            return tuple(shlex.split(given))
        if isinstance(given, list | tuple):  # YAML makes numbers of some words
            return tuple(str(word) if isinstance(word, int | float) else word for word in given)
        return given

    @field_validator("front_resources", "env", mode="before")
    @classmethod
    def _parse_json(cls, given: Any) -> Any:
        return json.loads(given) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _check(self) -> AppArgs:
        scaled = self.min_replicas is not None or self.max_replicas is not None
        if self.replicas is not None and scaled:
            raise ValueError("replicas: cannot be combined with min_replicas and max_replicas")
        if self.min_replicas is not None and self.max_replicas is None:
            raise ValueError("max_replicas: is needed with min_replicas")
        if scaled and self.fewest > self.most:
            raise ValueError(f"max_replicas: {self.most} is below min_replicas ({self.fewest})")
        if any(len(key) != 64 or set(key) - set("0123456789abcdef") for key in self.api_key_sha256):
            raise ValueError("api_key_sha256: not 64 lower-case hexadecimal digits")
        return self

    @classmethod
    def checked(cls, args: Mapping[str, Any]) -> AppArgs:
        """Validate arguments and the flags of vLLM in them; API keys in flags become digests.

        Raises:
            ConfigError: one line that names the argument or flag and the fix.
        """
        try:
            parsed = cls.model_validate(dict(args))
        except ValidationError as error:
            raise ConfigError(_first_mistake(error, cls.model_fields)) from None
        flags = Flags(parsed.vllm_args)
        _refuse(flags.with_config_file())
        for flag in ("--host", "--port"):
            if flags.values(flag) is not None:
                raise ConfigError(f"vllm_args: use the argument {flag[2:]}: instead of {flag}")
        update: dict[str, Any] = {}
        if (keys := flags.values("--api-key")) is not None:
            update["api_key_sha256"] = (*parsed.api_key_sha256, *map(api_key_digest, keys))
            update["vllm_args"] = tuple(flags.without("--api-key").words)
        parsed = parsed.model_copy(update=update)
        speculation = parsed.slo().speculation
        _check_ports(speculation.draft_servers, parsed.most)
        tree_arguments(speculation, given_arguments(flags.with_config_file()), spelled=flag_of)
        _ = parsed.parallel_size
        return parsed

    @property
    def fewest(self) -> int:
        """The smallest number of replicas."""
        if self.min_replicas is not None:
            return self.min_replicas
        return self.replicas or 1

    @property
    def first(self) -> int:
        """Replicas at the start: at least one, so that mistakes show."""
        return max(self.fewest, 1)

    @property
    def most(self) -> int:
        return self.replicas or self.max_replicas or 1

    @property
    def scales(self) -> bool:
        """Whether the number of replicas follows demand."""
        return self.max_replicas is not None

    @property
    def parallel_size(self) -> int:
        """Devices that one engine uses.

        Raises:
            ConfigError: a parallel size is not a whole number above zero.
        """
        flags, size = Flags(self.vllm_args).with_config_file(), 1
        for flag in ("--tensor-parallel-size", "--pipeline-parallel-size"):
            given = flags.last(flag)
            if given is not None and (not given.isdecimal() or int(given) < 1):
                raise ConfigError(f"{flag} {given}: not a whole number above zero")
            size *= int(given or 1)
        return size

    @property
    def served_model_names(self) -> list[str]:
        given = Flags(self.vllm_args).with_config_file().values("--served-model-name")
        return given or [self.model]

    def additional_config(self) -> dict[str, Any]:
        """vLLM's additional_config with the SLO configuration itself instead of its path.

        Raises:
            ConfigError: it cannot be read or used.
        """
        return embedded_config(self.slo_config, Flags(self.vllm_args).last("--additional-config"))

    def slo(self) -> SLOConfig:
        """The SLO configuration.

        Raises:
            ConfigError: it cannot be read or used.
        """
        return SLOConfig.from_additional_config(self.additional_config())


def _check_ports(address: str | None, replicas: int) -> None:
    """Refuse an address for draft servers at which not every replica can listen.

    All of them may be on one machine, and each one listens.

    Raises:
        ConfigError: it is not an address, or there are fewer ports than replicas.
    """
    if address is None:
        return
    check_address(address, "--draft-servers")
    if len(single_addresses(address)) < replicas or (replicas > 1 and address.endswith("*")):
        raise ConfigError(
            f"--draft-servers {address}: each of {replicas} replicas needs a port of its own; "
            f"write tcp://HOST:FIRST-LAST with {replicas} ports or more"
        )


def embedded_config(
    slo_config: Any, additional_json: str | None, from_flags: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """vLLM's additional_config for processes that may run on machines without these files.

    Paths of a profile, of draft models and of their token on this machine become absolute, and so
    does that of a recording.

    Args:
        slo_config: path of the SLO configuration, or the mapping itself.
        additional_json: vLLM's ``--additional-config``.
        from_flags: keys of additional_config that flags of ours set; None: none.

    Raises:
        ConfigError: the JSON or the SLO configuration cannot be used.
    """
    additional = read_additional_config(additional_json or "{}")
    given = {CONFIG_KEY: slo_config, **(from_flags or {})}
    additional |= {key: value for key, value in given.items() if value is not None}
    config = SLOConfig.from_additional_config(additional)
    pool = [_whole_path(name) for name in config.speculation.pool]
    if pool != [*config.speculation.pool]:
        additional[DRAFT_KEY] = pool_value(pool)
    token_file = config.speculation.draft_token_file
    if token_file is not None and Path(token_file).exists():
        additional[TOKEN_FILE_KEY] = str(Path(token_file).resolve())
    if config.recording.path is not None:
        additional[RECORD_KEY] = str(Path(config.recording.path).absolute())
    if additional.get(CONFIG_KEY) is None:
        return additional
    embedded = config.model_dump(exclude_unset=True)
    if embedded.get("profile") and Path(embedded["profile"]).exists():
        embedded["profile"] = str(Path(embedded["profile"]).resolve())
    return {**additional, CONFIG_KEY: embedded}


def _whole_path(model: str) -> str:
    """The absolute path of a model's folder on this machine; else its name."""
    here = model not in BUILT_IN_DRAFTS and Path(model).is_dir()
    return str(Path(model).resolve()) if here else model


def _refuse(flags: Flags) -> None:
    for flag, reason in _REFUSED.items():
        values = flags.values(flag)
        if values is None:
            continue
        if flag in _REFUSED_ABOVE_ONE and values and values[-1] in ("0", "1"):
            continue
        if flag == "--distributed-executor-backend" and values and values[-1] in ("mp", "uni"):
            continue
        raise ConfigError(f"{' '.join([flag, *values])}: {reason}")


def _first_mistake(error: ValidationError, fields: Mapping[str, Any]) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"][:1])
    if first["type"] == "extra_forbidden":
        return f"args: {key}: unknown key; known: {', '.join(fields)}"
    if first["type"] == "missing":
        return f"args: {key}: is required"
    if first["type"] == "value_error" and not key:
        return f"args: {first['ctx']['error']}"
    return f"args: {key}: {first['msg']}"


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that Ray reserves for one replica."""

    cpus: float
    gpus: float

    @property
    def bundle(self) -> dict[str, float]:
        """The only bundle of a replica's placement group: all its devices are on one node."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


TOKEN_CPUS: Final = 0.1
"""CPU resource of a replica without ``cpus_per_replica``; Ray counts CPUs but does not limit them.
"""


def resources(args: AppArgs, *, cluster_has_gpus: bool) -> Resources:
    """The resources of each replica."""
    gpus = args.gpus_per_replica
    if gpus is None:
        gpus = float(args.parallel_size) if cluster_has_gpus else 0.0
    return Resources(args.cpus_per_replica or TOKEN_CPUS, gpus)
