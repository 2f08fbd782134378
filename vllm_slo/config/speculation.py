# SPDX-License-Identifier: Apache-2.0
"""The section `speculation` of the configuration, and keys that override parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pydantic import Field, field_validator, model_validator

from vllm_slo.core.types import DraftShares
from vllm_slo.slo.access_config import Section

DRAFT_KEY: Final = "draft_model"
"""Key of vLLM's `--additional-config` that names the draft model, or lists several. It overrides
the YAML file."""
SERVERS_KEY: Final = "draft_servers"
"""Key of vLLM's `--additional-config` with the address to which draft servers connect. It overrides
the YAML file."""
TOKEN_FILE_KEY: Final = "draft_token_file"
"""Key of vLLM's `--additional-config` that names the file with the token of draft servers. It
overrides the YAML file."""
MAX_POOL: Final = 4
"""Most draft models of one server."""


def pool_value(pool: Sequence[str]) -> str | list[str]:
    """Draft models as `DRAFT_KEY` holds them."""
    return pool[0] if len(pool) == 1 else list(pool)


def check_pool(given: Any) -> None:
    """Refuse a value that is neither one draft model nor a list of different ones.

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


class SpeculationConfig(Section):
    """Token trees drafted by small models and verified by the served one; see AdaServe and, for
    several models, SpecRouter. Or chains drafted by servers elsewhere; see GoodSpeed."""

    draft_model: str | list[str] | None = Field(
        default=None,
        description="Name or folder of the draft model, of the same vocabulary as the served one, "
        "or a list of up to 4, the smallest first, of which the fastest chain is chosen all the "
        "time; unset: no trees. Scope: server. A draft model that guesses badly costs time for "
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
        description="Fewest tokens that the draft guesses ahead (D_min), 0 to 16. Scope: server. "
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
        description="Fewest candidates for each token ahead, 1 to 16. Scope: server. Above 1: "
        "trees branch even where a chain is faster.",
    )
    max_nodes: int = Field(
        default=24,
        ge=1,
        le=63,
        description="Most draft tokens of one request that one step verifies, 1 to 63. Scope: "
        "server. Too high: unlikely tokens are verified when no other request needs the time.",
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
        description="Address to which draft servers connect, tcp://HOST:PORT or ipc://PATH, in "
        "place of a draft_model; unset: none. With replicas tcp://HOST:FIRST-LAST: each listens at "
        "the first port that is free, so there are as many ports or more. Scope: server. While "
        "none is connected, no tokens are drafted; a slow one costs up to draft_deadline_ms a "
        "step.",
    )
    draft_deadline_ms: float = Field(
        default=50.0,
        gt=0.0,
        le=60_000.0,
        allow_inf_nan=False,
        description="Milliseconds that a step waits for draft servers at most, above 0 to 60000. "
        "Scope: server. Too low: drafts come too late to be of use; too high: a drafter that hangs "
        "delays all requests until it is suspended.",
    )
    draft_token_file: str | None = Field(
        default=None,
        description="File with the secret that draft servers share with this server, 16 characters "
        "or more; unset: the environment variable VLLMSLO_DRAFT_TOKEN. Scope: server. Draft "
        "servers with another secret are refused.",
    )
    share: DraftShares = Field(
        default="throughput",
        description="How the drafts that no objective needs are divided. throughput: to the "
        "requests whose drafts are likeliest to be accepted; tenants: fairly among tenants "
        "(GoodSpeed). Scope: server, with a draft model or vLLM's own drafts. Fair shares give "
        "fewer tokens in total.",
    )

    @property
    def pool(self) -> tuple[str, ...]:
        """The draft models, the smallest first; empty: no trees."""
        if self.draft_model is None:
            return ()
        return (self.draft_model,) if isinstance(self.draft_model, str) else (*self.draft_model,)

    @property
    def source(self) -> tuple[str, str] | None:
        """(field that says where drafts come from, its value); None: there are no drafts."""
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
