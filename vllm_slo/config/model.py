# SPDX-License-Identifier: Apache-2.0
"""The operator's configuration: one frozen model, read from one YAML file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from vllm_slo.config.recording import RECORD_KEY, RecordingConfig
from vllm_slo.config.sections import (
    BestEffortConfig,
    ClassConfig,
    RoutingConfig,
    SessionsConfig,
    StageConfig,
)
from vllm_slo.config.speculation import (
    DRAFT_KEY,
    SERVERS_KEY,
    TOKEN_FILE_KEY,
    SpeculationConfig,
    check_pool,
    check_source,
)
from vllm_slo.config.yaml_nodes import line_of, near, parse
from vllm_slo.errors import ConfigError, InvalidSLOError
from vllm_slo.slo.access_config import (
    AccessConfig,
    GrantConfig,
    KeyConfig,
    QuotaConfig,
    QuotasConfig,
    Section,
)
from vllm_slo.slo.carriers import Policy
from vllm_slo.slo.model import SLO

CONFIG_KEY: Final = "slo_config"
"""Key of vLLM's `--additional-config` that holds a path to a YAML file, or the mapping itself."""

_UNMAPPED_TIERS: Final = ("auto", "default")


def read_additional_config(text: str) -> dict[str, Any]:
    """The value of ``--additional-config``.

    Raises:
        ConfigError: it is not a JSON object.
    """
    try:
        additional = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--additional-config: not JSON ({error})") from None
    if not isinstance(additional, dict):
        raise ConfigError("--additional-config: not a JSON object")
    return additional


class SLOConfig(Section):
    """All settings of the operator. Immutable; checked when it is loaded."""

    classes: dict[str, ClassConfig] = Field(
        default_factory=dict,
        description="Named classes that requests refer to. Scope: server. A request that names a "
        "class that is not here is refused with 400.",
    )
    default_class: str | None = Field(
        default=None,
        description="Class of the requests that carry no SLO at all; unset: plain best effort. "
        "Scope: server. With a tight default class all plain clients compete for promises.",
    )
    service_tiers: dict[str, str | None] = Field(
        default_factory=dict,
        description="service_tier of a request (priority, flex, or any name of your own) -> class "
        "name. Scope: server. A tier that is not mapped asks for nothing; flex is always best "
        "effort; auto and default cannot be mapped.",
    )
    priorities: dict[Annotated[int, Field(strict=False)], str] = Field(
        default_factory=dict,
        description="priority of a request (vLLM's body field or X-Vllm-Priority header, or "
        "Dynamo's nvext.agent_hints.priority) -> class name, for requests that name no class. "
        "Scope: server. A number that is not mapped asks for nothing.",
    )
    decline_status: int = Field(
        default=429,
        ge=400,
        le=599,
        description="HTTP status of a declined request, 400 to 599. Scope: server. After 429, and "
        "after several of 500 and more, some gateways take the whole server out of service for a "
        "while; after 409 they do not, and clients of OpenAI and Anthropic retry it, too.",
    )
    profile: str | None = Field(
        default=None,
        description="Path of a step-time profile; unset: the user's cache folder is searched. "
        "Scope: server. A profile of another model or device stops the start-up.",
    )
    margin_quantile: float = Field(
        default=0.95,
        ge=0.5,
        le=0.999,
        description="Quantile of the residual ratio of step times that promises keep as margin, "
        "0.5 to 0.999. Too low: promises break under noise; too high: capacity is left unused.",
    )
    best_effort_token_share: float = Field(
        default=0.05,
        ge=0.0,
        le=0.5,
        description="Share of each step's token budget kept, with a place, for the best-effort "
        "request that has waited longest, once that is longer than ageing_s; 0 to 0.5. 0: best "
        "effort may wait for as long as promises fill the engine.",
    )
    ageing_s: float = Field(
        default=30.0,
        gt=0.0,
        le=86_400.0,
        allow_inf_nan=False,
        description="Seconds after which a best-effort request is served first within its share. "
        "For half of that time nothing is drafted in vain after a TTFT was refused. Too low: fewer "
        "promises under overload; too high: long waits.",
    )
    output_length_quantile: float = Field(
        default=0.9,
        ge=0.05,
        le=0.999,
        description="Quantile of a class's observed output lengths by which the KV that an answer "
        "reads is priced, 0.05 to 0.999. Too low: decode steps take longer than planned; too high: "
        "few promises. Memory is set aside by the whole distribution.",
    )
    tpot_window_tokens: int = Field(
        default=10,
        ge=1,
        le=10_000,
        description="Tokens over which TPOT is measured, the worst window counting, 1 to 10000. "
        "1: every gap between tokens must keep the objective.",
    )
    replan_interval_s: float = Field(
        default=0.5,
        ge=0.0,
        le=3_600.0,
        allow_inf_nan=False,
        description="Seconds between two attempts to promise waiting best-effort requests their "
        "objective, 0 to 3600. Too low: planning costs time; too high: chances are missed.",
    )
    quote_holds_s: float = Field(
        default=0.05,
        ge=0.0,
        le=60.0,
        allow_inf_nan=False,
        description="Seconds between a quote and the request that is sent on it, 0 to 60. A "
        'positive quote leaves headroom for promises made meanwhile. Too low: a "yes" no longer '
        'holds when the request comes; too high: a "no" to what could be promised.',
    )
    max_planned_new: int = Field(
        default=63,
        ge=1,
        le=63,
        description="New requests that one run of the dynamic program considers, 1 to 63. Too "
        "high: planning takes longer than a step; too low: a burst is promised piecemeal.",
    )

    best_effort: BestEffortConfig = Field(
        default_factory=BestEffortConfig,
        description="The order in which requests without a promise are served, and how their "
        "lengths are predicted.",
    )
    routing: RoutingConfig = Field(
        default_factory=RoutingConfig,
        description="How requests are spread over replicas (vllm-slo serve --replicas).",
    )
    sessions: SessionsConfig = Field(
        default_factory=SessionsConfig,
        description="Jobs of several rounds, such as tool loops: requests that share a session_id.",
    )
    speculation: SpeculationConfig = Field(
        default_factory=SpeculationConfig,
        description="Tokens drafted by small models (vllm-slo serve --draft-model), or by servers "
        "elsewhere (--draft-servers).",
    )
    recording: RecordingConfig = Field(
        default_factory=RecordingConfig,
        description="A file of what arrived and what became of it, without prompts and answers "
        "(vllm-slo serve --record).",
    )

    access: AccessConfig | None = Field(
        default=None,
        description="Which API key may ask for which class, tier, objective and value; unset: "
        "every request may ask for everything. Scope: server. Not for the Python LLM, which has no "
        "keys.",
    )
    quotas: QuotasConfig = Field(
        default_factory=QuotasConfig,
        description="How many tokens a tenant is promised at most. Scope: each engine. With any, "
        "value ranks the requests of one tenant, and across tenants only that of classes counts.",
    )

    @model_validator(mode="after")
    def _check_names(self) -> SLOConfig:
        self.slo_classes()
        for key, grant in self.access.grants.items() if self.access else ():
            for allowed in grant.classes or ():
                self._require_class(f"access.{key}.classes", allowed)
        for tier, name in self.service_tiers.items():
            if tier in _UNMAPPED_TIERS:
                raise ValueError(f"service_tiers: {tier!r} cannot be mapped; remove it")
            self._require_class(f"service_tiers.{tier}", name)
        for priority, name in self.priorities.items():
            self._require_class(f"priorities.{priority}", name)
        self._require_class("default_class", self.default_class)
        return self

    def _require_class(self, key: str, name: str | None) -> None:
        if name is not None and name not in self.classes:
            configured = ", ".join(sorted(self.classes)) or "none"
            raise ValueError(f"{key}: class {name!r} is not configured; configured: {configured}")

    def slo_classes(self) -> dict[str, SLO]:
        """The classes as SLOs, each with `slo_class` set to its own name."""
        slos = {}
        for name, spec in self.classes.items():
            try:
                slos[name] = spec.to_slo(name)
            except InvalidSLOError as error:
                raise ValueError(f"classes.{name}.{error}") from error
        return slos

    def http_policy(self, *, thinking: bool = True) -> Policy:
        """The part with which HTTP requests are read.

        ``thinking``: whether the server tells the model's thinking from its answer.
        """
        classes = self.slo_classes()
        return Policy(
            classes,
            self.service_tiers,
            classes[self.default_class] if self.default_class else None,
            thinking,
            self.priorities,
            self.sessions.read_session_id,
            self.decline_status,
        )

    @classmethod
    def load(cls, path: str | Path | None) -> SLOConfig:
        """Read a YAML file; None gives the defaults.

        Raises:
            ConfigError: the file cannot be read, is not YAML, or holds an unknown key or a bad
                value; one line that names the file, the line, the key and the fix.
        """
        if path is None:
            return cls()
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"cannot read the file {str(path)!r}: {reason}") from error
        return cls._from_yaml(text, str(path))

    @classmethod
    def _from_yaml(cls, text: str, origin: str) -> SLOConfig:
        node, data = parse(text, origin, ConfigError)
        return cls._from_data({} if data is None else data, origin, node)

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> SLOConfig:
        """Read vLLM's `additional_config`; keys of others in it are ignored.

        ``additional_config``: `VllmConfig.additional_config`; ``slo_config`` in it is a path of a
        YAML file or the mapping itself, ``draft_model`` a draft model's name or folder, or a list
        of them, ``draft_servers`` and ``draft_token_file`` as in the YAML file, ``record`` the
        path of `recording`. Anything without these keys gives the defaults.

        Raises:
            ConfigError: as `load`.
        """
        if not isinstance(additional_config, Mapping):
            return cls()
        config = cls._from_path_or_data(additional_config.get(CONFIG_KEY))
        keys = (DRAFT_KEY, SERVERS_KEY, TOKEN_FILE_KEY)
        given = {k: additional_config[k] for k in keys if additional_config.get(k) is not None}
        config = config.with_drafts(given) if given else config
        record = additional_config.get(RECORD_KEY)
        return config if record is None else config.with_recording(record)

    @classmethod
    def _from_path_or_data(cls, given: Any) -> SLOConfig:
        if given is None or isinstance(given, str | Path):
            return cls.load(given)
        return cls._from_data(given, CONFIG_KEY, None)

    def with_drafts(self, given: Mapping[str, Any]) -> SLOConfig:
        """The same configuration with drafts from elsewhere.

        ``given``: `DRAFT_KEY`, `SERVERS_KEY`, `TOKEN_FILE_KEY` and their values.

        Raises:
            ConfigError: a value is not valid, or drafts would come from two sources.
        """
        try:
            check_pool(given.get(DRAFT_KEY))
            for key in (SERVERS_KEY, TOKEN_FILE_KEY):
                if not isinstance(given.get(key, ""), str):
                    raise ValueError(f"{key}: expected a text, got {given[key]!r}")
            speculation = self.speculation.model_copy(update=dict(given))
            check_source(speculation.draft_model, speculation.draft_servers)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return self.model_copy(update={"speculation": speculation})

    def with_recording(self, path: Any) -> SLOConfig:
        """The same configuration, which records into this file.

        Raises:
            ConfigError: ``path`` is not a text, or empty.
        """
        if not isinstance(path, str) or not path:
            raise ConfigError(f"{RECORD_KEY}: expected the path of a file, got {path!r}")
        recording = self.recording.model_copy(update={"path": path})
        return self.model_copy(update={"recording": recording})

    @classmethod
    def _from_data(cls, data: Any, origin: str, node: yaml.Node | None) -> SLOConfig:
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"{origin}: expected keys such as 'classes:', got {type(data).__name__}"
            )
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise ConfigError(_describe(error, origin, node)) from error


_SECTIONS: Final[Mapping[str, type[BaseModel]]] = {
    "access": AccessConfig,
    "access.keys": KeyConfig,
    "access.others": GrantConfig,
    "best_effort": BestEffortConfig,
    "classes": ClassConfig,
    "quotas": QuotasConfig,
    "quotas.default": QuotaConfig,
    "quotas.tenants": QuotaConfig,
    "recording": RecordingConfig,
    "routing": RoutingConfig,
    "sessions": SessionsConfig,
    "speculation": SpeculationConfig,
}


def _describe(error: ValidationError, origin: str, node: yaml.Node | None) -> str:
    """One line for the first mistake that pydantic found."""
    first = error.errors(include_url=False)[0]
    loc = tuple(str(part) for part in first["loc"] if part != "[key]")
    key = ".".join(loc)
    if first["type"] == "extra_forbidden":
        model = _SECTIONS.get(loc[0], SLOConfig) if len(loc) > 1 else SLOConfig
        model = StageConfig if loc[2:3] == ("stages",) else model
        model = _SECTIONS.get(".".join(loc[:2]), model) if len(loc) > 2 else model
        message = f"{key}: unknown key; {near(loc[-1], model.model_fields)}"
    elif first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        message = f"{key}: {message}" if loc[:1] in (("access",), ("quotas",)) else message
        loc = loc or tuple(message.split(":", 1)[0].split("."))
    else:
        message = f"{key}: {first['msg']}"
    line = line_of(node, loc)
    return f"{origin}:{line}: {message}" if line else f"{origin}: {message}"
