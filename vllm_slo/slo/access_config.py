# SPDX-License-Identifier: Apache-2.0
"""The sections `access` and `quotas` of the configuration."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo.fields import MAX_TPOT_MS, MAX_TTFT_MS, MAX_VALUE
from vllm_slo.slo.model import SLO, Tier

_SECRETS: Final = ("sha256", "env", "file")


def check_tenant(name: str | None) -> str | None:
    """The name itself.

    Raises:
        ValueError: it is not a name; one line.
    """
    try:
        SLO(tenant=name)
    except InvalidSLOError as error:
        raise ValueError(str(error)) from error
    return name


class Section(BaseModel):
    """A section of the configuration: immutable, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class GrantConfig(Section):
    """What requests with a key may ask for."""

    tenant: str | None = Field(
        default=None,
        description="Tenant of every request with this key, 1 to 64 characters out of A-Z a-z 0-9 "
        "_ . : @ / -; unset: the key's own name. Scope: key. Two keys of one tenant share a quota.",
    )
    classes: list[str] | None = Field(
        default=None,
        description="Classes that requests may name, or be given by a service_tier or as the "
        "default; unset: all of them. Scope: key. Another class is refused with 403.",
    )
    tiers: list[Tier] = Field(
        default=["guaranteed", "best_effort"],
        description="Tiers that requests may have: guaranteed, best_effort or both. Scope: key. "
        "Without guaranteed a request with an objective must say tier best_effort, or gets 403.",
    )
    objectives: bool = Field(
        default=True,
        description="Whether requests may set objectives of their own; false: those of their class "
        "alone. Scope: key. True without quotas: tight objectives take what others could be given.",
    )
    min_ttft_ms: float | None = Field(
        default=None,
        gt=0.0,
        le=MAX_TTFT_MS,
        description="Tightest TTFT that requests may ask for themselves, milliseconds, above 0 to "
        "86400000; unset: any. Scope: key; their class may be tighter. Below it: 403.",
    )
    min_tpot_ms: float | None = Field(
        default=None,
        gt=0.0,
        le=MAX_TPOT_MS,
        description="Tightest TPOT that requests may ask for themselves, milliseconds, above 0 to "
        "3600000; unset: any. Scope: key; their class may be tighter. Too low: the steps of all "
        "become as short as one request wants them.",
    )
    max_value: float = Field(
        default=1.0,
        gt=0.0,
        le=MAX_VALUE,
        description="Highest value that requests may state themselves, above 0 to 1e6. Scope: key; "
        "their class may be higher. Too high without quotas: others lose their promises first.",
    )

    @property
    def limits_pace(self) -> bool:
        """Whether some objectives may not be asked for."""
        return not self.objectives or (self.min_ttft_ms, self.min_tpot_ms) != (None, None)

    @field_validator("tenant")
    @classmethod
    def _check_tenant(cls, given: str | None) -> str | None:
        return check_tenant(given)

    @field_validator("tiers")
    @classmethod
    def _check_tiers(cls, given: list[Tier]) -> list[Tier]:
        if not given:
            raise ValueError("name at least one of guaranteed, best_effort")
        return given


class KeyConfig(GrantConfig):
    """An API key, by its digest or by where it is kept, and what it may ask for."""

    sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="SHA-256 of the key, 64 lower-case hexadecimal digits (printf %s KEY | "
        "sha256sum). Scope: key. The key itself never stands in this file. A short or guessable "
        "key can be found from it.",
    )
    env: str | None = Field(
        default=None,
        min_length=1,
        description="Environment variable that holds the key, in place of sha256. Scope: every "
        "API server and replica. Not set there: the server does not start.",
    )
    file: str | None = Field(
        default=None,
        min_length=1,
        description="File that holds the key, in place of sha256; white space at its ends does not "
        "count. Scope: every API server and replica. Not readable there: it does not start.",
    )

    @model_validator(mode="after")
    def _check_secret(self) -> KeyConfig:
        if sum(getattr(self, name) is not None for name in _SECRETS) != 1:
            raise ValueError(f"give exactly one of {', '.join(_SECRETS)}")
        return self


class AccessConfig(Section):
    """Which API key may ask for what. vLLM's own `--api-key` decides who is let in at all."""

    keys: dict[str, KeyConfig] = Field(
        default_factory=dict,
        description="Keys by a name that is safe to show. Scope: server. A key that is not here "
        "falls under others.",
    )
    others: GrantConfig | None = Field(
        default=None,
        description="What requests without a key, or with one that is not listed, may ask for; "
        "unset: nothing: SLO fields of theirs are refused with 403, without any they are served "
        "best effort. Scope: server.",
    )

    @model_validator(mode="after")
    def _check_names(self) -> AccessConfig:
        for name in self.keys:
            check_tenant(name)
        return self

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants that keys speak for."""
        return frozenset(grant.tenant or name for name, grant in self.keys.items())

    @property
    def grants(self) -> dict[str, GrantConfig]:
        """Every grant by its key in the configuration."""
        listed: dict[str, GrantConfig] = {f"keys.{name}": g for name, g in self.keys.items()}
        return listed if self.others is None else {**listed, "others": self.others}


class QuotaConfig(Section):
    """How many promised tokens a tenant may have."""

    promised_tokens_per_s: float = Field(
        gt=0.0,
        le=1e9,
        allow_inf_nan=False,
        description="Tokens per second, above 0 to 1e9, of requests that are promised: prompt "
        "tokens to compute, and output tokens by what the TPOT makes of a step. Scope: tenant, one "
        "engine (N replicas: N times as much). Too low: requests go best effort beside idle time.",
    )
    burst_tokens: float = Field(
        ge=1.0,
        le=1e12,
        allow_inf_nan=False,
        description="Tokens that may be promised at once after a pause, 1 to 1e12. Scope: tenant, "
        "one engine. Also the largest request that can be promised. Too high: a burst takes all "
        "promises for as long as it lasts.",
    )


class QuotasConfig(Section):
    """Quotas of promised tokens by tenant; beyond them requests are served best effort."""

    tenants: dict[str, QuotaConfig] = Field(
        default_factory=dict,
        description="Quotas by tenant. Scope: engine. Without access anybody may claim to be any "
        "tenant.",
    )
    default: QuotaConfig | None = Field(
        default=None,
        description="Quota of each tenant that a key of access speaks for and tenants does not "
        "name, and one more for all other requests together; unset: they have none. Scope: engine.",
    )

    @model_validator(mode="after")
    def _check_names(self) -> QuotasConfig:
        for name in self.tenants:
            check_tenant(name)
        return self

    @property
    def on(self) -> bool:
        """Whether anybody has a quota."""
        return bool(self.tenants) or self.default is not None
