# SPDX-License-Identifier: Apache-2.0
"""The operator's configuration: one frozen model, one YAML file, unknown keys refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_slo.config.yaml_nodes import line_of, refuse_duplicates
from vllm_slo.core.types import Backup, BestEffortOrder, DraftShares, LengthSource, RoutingPolicy
from vllm_slo.errors import ConfigError, InvalidSLOError
from vllm_slo.slo.access_config import (
    AccessConfig,
    GrantConfig,
    KeyConfig,
    QuotaConfig,
    QuotasConfig,
)
from vllm_slo.slo.carriers import Policy
from vllm_slo.slo.model import SLO, OnUnattainable, Speculate, Tier

__all__ = [
    "CONFIG_KEY",
    "DRAFT_KEY",
    "SERVERS_KEY",
    "TOKEN_FILE_KEY",
    "BestEffortConfig",
    "ClassConfig",
    "RoutingConfig",
    "SLOConfig",
    "SessionsConfig",
    "SpeculationConfig",
    "pool_value",
]

CONFIG_KEY: Final = "slo_config"
"""Key of vLLM's `--additional-config` that holds a path to a YAML file, or the mapping itself."""

DRAFT_KEY: Final = "draft_model"
"""Key of vLLM's `--additional-config` that names the draft model, or lists several; wins over the
YAML file."""

SERVERS_KEY: Final = "draft_servers"
"""Key of vLLM's `--additional-config` with the address where draft servers are awaited; wins over
the YAML file."""

TOKEN_FILE_KEY: Final = "draft_token_file"
"""Key of vLLM's `--additional-config` that names the file with the token that draft servers share;
wins over the YAML file."""

MAX_POOL: Final = 4
"""Most draft models of one server."""

_UNMAPPED_TIERS: Final = ("auto", "default")


class StageConfig(BaseModel):
    """A stretch of the answers of a class."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    until: str | None = Field(
        default=None,
        description="Text that ends the stage, 1 to 64 characters; the last stage has none. Scope: "
        "every request of the class. A text that never comes: the stage lasts to the end.",
    )
    tpot_ms: float | None = Field(
        default=None,
        description="Time per output token, milliseconds, 0.001 to 3600000; unset: no "
        "objective. Scope: the stage. Admission takes the tightest of all stages.",
    )


class ClassConfig(BaseModel):
    """A named class of requests: the SLO fields that a request of the class starts from."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    ttft_ms: float | None = Field(
        default=None,
        description="Time to first token, milliseconds from arrival, 0.001 to 86400000. "
        "Scope: every request of the class. Too tight: the requests run best effort.",
    )
    tpot_ms: float | None = Field(
        default=None,
        description="Time per output token, milliseconds, 0.001 to 3600000. "
        "Scope: every request of the class. Too tight: small batches, little throughput.",
    )
    e2e_ms: float | None = Field(
        default=None,
        description="Time to the last token of the answer, milliseconds from arrival, 0.001 to "
        "86400000. Scope: every request of the class. Too tight: the requests run best effort. "
        "Where the length of answers is unknown, max_tokens counts.",
    )
    thinking_tpot_ms: float | None = Field(
        default=None,
        description="The time per output token while the model thinks, milliseconds; tpot_ms is "
        "then for what follows. Scope: every request of the class. Needs vLLM's "
        "--reasoning-parser.",
    )
    stages: list[StageConfig] | None = Field(
        default=None,
        description="Up to 8 stages in place of both, each with a TPOT and the text that ends it. "
        "Scope: every request of the class. Admission takes the tightest of them.",
    )
    session_e2e_ms: float | None = Field(
        default=None,
        description="Time of a whole job of several rounds, milliseconds, at most 86400000. Scope: "
        "requests of the class that name a session. Too tight: its rounds are not promised.",
    )
    session_rounds: int | None = Field(
        default=None,
        description="Rounds that a job is expected to have, 1 to 10000; unset: learnt. Scope: as "
        "session_e2e_ms. Too low: the first rounds take the time of the last ones.",
    )
    value: float = Field(
        default=1.0,
        description="Weight of a request when not all can be promised, 1e-6 to 1e6. "
        "Too high: the other classes lose their promises first.",
    )
    tier: Tier | None = Field(
        default=None,
        description="guaranteed or best_effort; unset: guaranteed when an objective is set. "
        "best_effort gives up the promise and is served from what is left over.",
    )
    on_unattainable: OnUnattainable = Field(
        default="best_effort",
        description="What happens when no promise can be made: best_effort serves the request "
        "late, decline answers 429 at once.",
    )
    speculation: Speculate | None = Field(
        default=None,
        description="off: nothing is drafted for requests of the class; auto or unset: as it pays. "
        "Scope: every request of the class, where there is a draft model.",
    )
    expected_output_tokens: int | None = Field(
        default=None,
        description="Expected output length, tokens, 1 to 10000000; unset: learnt online. "
        "Too low: memory is promised twice; too high: fewer requests are promised.",
    )

    def to_slo(self, name: str) -> SLO:
        """The SLO of a request that names this class and says nothing else.

        Raises:
            InvalidSLOError: a field is out of range, or `name` is not a name.
        """
        slo = SLO(**self.model_dump(), slo_class=name)
        if slo.tier == "guaranteed" and not slo.has_objective:
            SLO(**self.model_dump())  # raises: without an objective there is nothing to guarantee
        return slo


class BestEffortConfig(BaseModel):
    """In which order requests without a promise are served; see LAPS-SD."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    order: BestEffortOrder = Field(
        default="fcfs",
        description="fcfs: as they arrive. laps_sd: shortest first, as far as that is known. las "
        "(least attained service) and lp_sjf (shortest predicted answer) to compare with. Scope: "
        "server. With another than fcfs requests that carry no SLO are ordered, too.",
    )
    output_length: LengthSource = Field(
        default="quantile",
        description="What an answer's length is foretold by where no request declares it: quantile "
        "of its class, or learnt from prompts by scikit-learn (pip install 'vllm-slo[lengths]'). "
        "Scope: server, laps_sd and lp_sjf. A bad guess puts long requests before short ones.",
    )
    queues: int = Field(
        default=4,
        ge=1,
        le=32,
        description="Queues by service (K), 1 to 32. Scope: server, laps_sd and las. Too many: "
        "requests take each other's places, and compute their KV again.",
    )
    first_queue_s: float = Field(
        default=0.25,
        gt=0.0,
        le=3_600.0,
        allow_inf_nan=False,
        description="Service of the first queue (S_1), seconds of a request's own work, above 0 to "
        "3600. Scope: server. Too low: short requests fall behind; too high: long ones go first.",
    )
    queue_ratio: float = Field(
        default=4.0,
        gt=1.0,
        le=1_000.0,
        allow_inf_nan=False,
        description="How many times the service of a queue the next one takes (M), above 1 to "
        "1000. Scope: server. Too high: most requests share a queue.",
    )
    preempt_known: bool = Field(
        default=False,
        description="Whether a request whose remaining work is known can lose its place to a "
        "shorter one that comes later; false: as in the paper, never. Scope: server, laps_sd. "
        "True: requests wait less where they keep coming, and more KV is computed again.",
    )
    stable_rounds: int = Field(
        default=3,
        ge=0,
        le=1_000,
        description="Rounds in which a request's acceptance rate must stand still to be believed "
        "(gamma), up to 1000. 0: the typical rate is taken until its own is known; best where "
        "lengths are foretold well. Scope: server. Too low: it is believed by accident; too high: "
        "it is known too late to be of use.",
    )
    stable_change: float = Field(
        default=0.2,
        gt=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="By how much it may move in them (delta), above 0 to 1. Scope: server. Too "
        "low: known too late; too high: believed by accident.",
    )


class SessionsConfig(BaseModel):
    """Jobs of several rounds: requests that share a session_id."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    idle_s: float = Field(
        default=300.0,
        gt=0.0,
        le=86_400.0,
        allow_inf_nan=False,
        description="Seconds without a request after which a session counts as ended, above 0 to "
        "86400. Scope: server. Too low: slow tools begin sessions anew; too high: the attainment "
        "of sessions that did not say which round is the last is known late.",
    )
    kv_share: float = Field(
        default=0.25,
        ge=0.0,
        le=1.0,
        description="Share of the KV cache's blocks that are kept warm, evicted after all others, "
        "for rounds to come, 0 to 1. Scope: server. 0: prefixes are evicted like any other while "
        "tools run; too high: prefixes that everybody shares go first.",
    )
    read_session_id: bool = Field(
        default=False,
        description="Whether vLLM's session_id (body field, X-Session-ID header) names the session "
        "of a request that names none by slo.session_id. Scope: server. Ids that are no valid name "
        "are left alone.",
    )


class RoutingConfig(BaseModel):
    """How the front of several replicas routes; a single server ignores it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    policy: RoutingPolicy = Field(
        default="slo",
        description="slo asks replica after replica for a promise; round_robin, least_loaded and "
        "power_of_two ask none and send. Scope: front. The latter break more objectives.",
    )
    max_hops: int = Field(
        default=8,
        ge=1,
        le=1_000,
        description="Replicas that are asked for a promise before the backup acts, 1 to 1000. "
        "Scope: front. Too low: requests go without a promise beside idle replicas.",
    )
    backup: Backup = Field(
        default="as_asked",
        description="What happens to a request that nobody can promise: as_asked does what its "
        "on_unattainable says, best_effort serves it late, decline answers 429. Scope: front.",
    )
    retries: int = Field(
        default=2,
        ge=0,
        le=100,
        description="How often a request that has not started is sent to another replica when "
        "one fails, 0 to 100. Scope: front. Too high: a request that kills engines kills more.",
    )
    stale_after_s: float = Field(
        default=2.0,
        ge=0.2,
        le=3_600.0,
        allow_inf_nan=False,
        description="Seconds without a word from a replica after which it gets no new requests, "
        "0.2 to 3600. Scope: front. Too low: a busy network looks like a dead one.",
    )
    dead_after_s: float = Field(
        default=10.0,
        ge=0.2,
        le=3_600.0,
        allow_inf_nan=False,
        description="Seconds without a word from a replica after which its requests are retried "
        "elsewhere or end with an error, 0.2 to 3600. Scope: front. Too low: work is thrown away.",
    )
    drain_s: float = Field(
        default=30.0,
        ge=0.0,
        le=3_600.0,
        allow_inf_nan=False,
        description="Seconds that running requests are given to end when the front or a replica "
        "is stopped, 0 to 3600. Too low: streams end with an error.",
    )

    @model_validator(mode="after")
    def _check_patience(self) -> RoutingConfig:
        if self.dead_after_s < self.stale_after_s:
            raise ValueError(
                f"routing: dead_after_s ({self.dead_after_s:g}) is below stale_after_s "
                f"({self.stale_after_s:g}); raise the first or lower the second"
            )
        return self


def pool_value(pool: Sequence[str]) -> str | list[str]:
    """Draft models as `DRAFT_KEY` holds them."""
    return pool[0] if len(pool) == 1 else list(pool)


def check_pool(given: Any) -> None:
    """Refuse what is not one draft model or a list of different ones.

    Raises:
        ValueError: one line that names the field.
    """
    if given is None:
        return
    pool = list(given) if isinstance(given, list | tuple) else [given]
    for name in pool:
        if not isinstance(name, str) or not name:
            raise ValueError(f"draft_model: expected a name or a folder, got {name!r}")
        if pool.count(name) > 1:
            raise ValueError(f"draft_model: {name!r} is named twice; name each model once")
    if not 1 <= len(pool) <= MAX_POOL:
        raise ValueError(f"draft_model: {len(pool)} models listed; list 1 to {MAX_POOL}")


def check_source(draft_model: Any, draft_servers: Any) -> None:
    """Refuse drafts from two sources.

    Raises:
        ValueError: one line that names both fields.
    """
    if draft_model is not None and draft_servers is not None:
        raise ValueError(
            f"draft_servers: {draft_servers} cannot be combined with draft_model; drafts come from "
            "servers or from models beside the served one, remove one of the two"
        )


class SpeculationConfig(BaseModel):
    """Token trees drafted by small models and verified by the served one; see AdaServe and, for
    several models, SpecRouter. Or chains drafted by servers elsewhere; see GoodSpeed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    draft_model: str | list[str] | None = Field(
        default=None,
        description="Name or folder of the draft model, of the same vocabulary as the served one, "
        "or a list of up to 4, the smallest first, of which the fastest chain is chosen all the "
        "time; unset: no trees. Scope: server. A draft that guesses badly costs time and gains "
        "nothing, and each costs memory.",
    )
    max_depth: int = Field(
        default=5,
        ge=1,
        le=16,
        description="Most tokens that a tree guesses ahead (AdaServe's D_max), 1 to 16. Scope: "
        "server. Too high: draft passes for tokens that are hardly ever accepted.",
    )
    min_depth: int = Field(
        default=0,
        ge=0,
        le=16,
        description="Least tokens that the draft guesses ahead (D_min), 0 to 16. Scope: server. "
        "Above 0: it drafts even where that makes answers slower.",
    )
    max_width: int = Field(
        default=4,
        ge=1,
        le=16,
        description="Most candidates for each token ahead (W_max), 1 to 16. Scope: server. Too "
        "high: the draft computes nodes that are not chosen.",
    )
    min_width: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Least candidates for each token ahead, 1 to 16. Scope: server. Above 1: trees "
        "branch even where a chain is faster.",
    )
    max_nodes: int = Field(
        default=24,
        ge=1,
        le=63,
        description="Most draft tokens of one request that one step verifies, 1 to 63. Scope: "
        "server. Too high: unlikely tokens are verified when nobody else needs the time.",
    )
    draft_tokens: int = Field(
        default=64,
        ge=1,
        le=4_096,
        description="Tokens that one pass of the draft may hold (B2), 1 to 4096; also the extra "
        "paths one step verifies. Scope: server. Each costs one or two KV blocks of memory.",
    )

    draft_servers: str | None = Field(
        default=None,
        description="Address where draft servers are awaited, tcp://HOST:PORT or ipc://PATH, in "
        "place of a draft_model; unset: none are. Scope: server, one engine. Without any of them "
        "answers are as before, a token a step; a slow one costs up to draft_deadline_ms a step.",
    )
    draft_deadline_ms: float = Field(
        default=50.0,
        gt=0.0,
        le=60_000.0,
        allow_inf_nan=False,
        description="Milliseconds that a step waits for draft servers at most, above 0 to 60000. "
        "Scope: server. Too low: drafts come too late to be of use; too high: a drafter that hangs "
        "holds up everybody until it is suspended.",
    )
    draft_token_file: str | None = Field(
        default=None,
        description="File with the secret that draft servers share with this server, 16 characters "
        "or more; unset: the environment variable VLLMSLO_DRAFT_TOKEN. Scope: server. Another "
        "secret than theirs: they are not let in.",
    )
    share: DraftShares = Field(
        default="throughput",
        description="Who gets the drafts that no objective needs. throughput: whose are likeliest "
        "to be accepted; tenants: divided fairly among tenants (GoodSpeed). Scope: server, with a "
        "draft model or vLLM's own drafts. Fair shares give fewer tokens altogether.",
    )

    @property
    def pool(self) -> tuple[str, ...]:
        """The draft models, the smallest first; empty: no trees."""
        if self.draft_model is None:
            return ()
        return (self.draft_model,) if isinstance(self.draft_model, str) else (*self.draft_model,)

    @property
    def source(self) -> tuple[str, str] | None:
        """The field that says where drafts come from, and what it says; None: there are none."""
        if self.draft_servers is not None:
            return SERVERS_KEY, self.draft_servers
        return (DRAFT_KEY, " ".join(self.pool)) if self.pool else None

    @field_validator("draft_model")
    @classmethod
    def _check_pool(cls, given: str | list[str] | None) -> str | list[str] | None:
        check_pool(given)
        return given

    @model_validator(mode="after")
    def _check_bounds(self) -> SpeculationConfig:
        check_source(self.draft_model, self.draft_servers)
        for what in ("depth", "width"):
            least, most = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if least > most:
                raise ValueError(
                    f"speculation: min_{what} ({least}) is above max_{what} ({most}); lower the "
                    "first or raise the second"
                )
        return self


class SLOConfig(BaseModel):
    """Everything an operator can set. Immutable; checked when it is loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    classes: dict[str, ClassConfig] = Field(
        default_factory=dict,
        description="Named classes that requests refer to. Scope: server. A request that names a "
        "class that is not here is refused with 400.",
    )
    default_class: str | None = Field(
        default=None,
        description="Class of the requests that carry no SLO at all; unset: plain best effort. "
        "Scope: server. A tight default class makes every plain client compete for promises.",
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
        description="HTTP status of a declined request, 400 to 599. Scope: server. 429 makes some "
        "gateways take the whole server out of service for a while, and so do several of 500 and "
        "more; 409 does not, and clients of OpenAI and Anthropic try again after it, too.",
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
        description="Seconds after which a best-effort request is served first within its share; "
        "half of it is how long its prompts stand back after a promise was refused for want of "
        "time, and nothing is drafted in vain after a TTFT was. Too low: promises are fewer under "
        "overload; too high: long waits.",
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
        description="Seconds that lie between a quote and the request that is sent on it, 0 to 60: "
        'a "yes" leaves room for what may be promised to others meanwhile. Too low: a "yes" '
        'is not true any more when the request comes; too high: a "no" to what could be had.',
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
        description="In which order requests without a promise are served, and by what their "
        "lengths are foretold.",
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

    access: AccessConfig | None = Field(
        default=None,
        description="Which API key may ask for which class, tier, objective and value; unset: "
        "anybody for anything. Scope: server. Not for the Python LLM, which has no keys.",
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
                raise ValueError(f"service_tiers: {tier!r} cannot be mapped; it asks for nothing")
            self._require_class(f"service_tiers.{tier}", name)
        for priority, name in self.priorities.items():
            self._require_class(f"priorities.{priority}", name)
        self._require_class("default_class", self.default_class)
        return self

    def _require_class(self, key: str, name: str | None) -> None:
        if name is not None and name not in self.classes:
            known = ", ".join(sorted(self.classes)) or "none"
            raise ValueError(f"{key}: class {name!r} is not configured; configured: {known}")

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
        """The part by which HTTP requests are read.

        Args:
            thinking: whether the server tells thinking from the answer.
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
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f"{origin}:{mark.line + 1}" if mark is not None else origin
            problem = getattr(error, "problem", None) or "not valid YAML"
            raise ConfigError(f"{line}: broken YAML: {problem}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{origin}: broken YAML: {error}") from error
        refuse_duplicates(node, origin, ConfigError)
        return cls._from_data({} if data is None else data, origin, node)

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> SLOConfig:
        """Read vLLM's `additional_config`; other keys in it are left to their owners.

        Args:
            additional_config: `VllmConfig.additional_config`; ``slo_config`` in it is a path of a
                YAML file or the mapping itself, ``draft_model`` a draft model's name or folder, or
                a list of them, ``draft_servers`` and ``draft_token_file`` as in the YAML file.
                Anything without these keys gives the defaults.

        Raises:
            ConfigError: as `load`.
        """
        if not isinstance(additional_config, Mapping):
            return cls()
        config = cls._given(additional_config.get(CONFIG_KEY))
        keys = (DRAFT_KEY, SERVERS_KEY, TOKEN_FILE_KEY)
        given = {k: additional_config[k] for k in keys if additional_config.get(k) is not None}
        return config.with_drafts(given) if given else config

    @classmethod
    def _given(cls, given: Any) -> SLOConfig:
        if given is None or isinstance(given, str | Path):
            return cls.load(given)
        return cls._from_data(given, CONFIG_KEY, None)

    def with_drafts(self, given: Mapping[str, Any]) -> SLOConfig:
        """The same configuration with drafts from elsewhere.

        Args:
            given: `DRAFT_KEY`, `SERVERS_KEY`, `TOKEN_FILE_KEY` and their values.

        Raises:
            ConfigError: a value is none, or drafts would come from two sources.
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
        near = difflib.get_close_matches(loc[-1], model.model_fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(model.model_fields)
        message = f"{key}: unknown key; {hint}"
    elif first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        message = f"{key}: {message}" if loc[:1] in (("access",), ("quotas",)) else message
        loc = loc or tuple(message.split(":", 1)[0].split("."))
    else:
        message = f"{key}: {first['msg']}"
    line = line_of(node, loc)
    return f"{origin}:{line}: {message}" if line else f"{origin}: {message}"
