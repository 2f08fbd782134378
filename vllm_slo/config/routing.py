# SPDX-License-Identifier: Apache-2.0
"""The section `routing` of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_slo.core.types import Backup, RoutingPolicy


class RoutingConfig(BaseModel):
    """How the front of several replicas routes; a single server ignores it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    policy: RoutingPolicy = Field(
        default="slo",
        description="slo asks replica after replica for a promise; round_robin, least_loaded and "
        "power_of_two send requests without asking. Scope: front. Without asking more objectives "
        "are missed.",
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
        description="What happens to a request that no replica can promise: as_asked does what its "
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
        description="Seconds without a message from a replica after which it gets no new requests, "
        "0.2 to 3600. Scope: front. Too low: a busy network looks like a dead one.",
    )
    dead_after_s: float = Field(
        default=10.0,
        ge=0.2,
        le=3_600.0,
        allow_inf_nan=False,
        description="Seconds without a message from a replica after which its requests are retried "
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
