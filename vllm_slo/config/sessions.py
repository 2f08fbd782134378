# SPDX-License-Identifier: Apache-2.0
"""The section `sessions` of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


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
        "for rounds to come, 0 to 1. Scope: server. 0: prefixes are evicted like all others while "
        "tools run; too high: prefixes that many requests share are evicted first.",
    )
    read_session_id: bool = Field(
        default=False,
        description="Whether vLLM's session_id (body field, X-Session-ID header) names the session "
        "of a request without slo.session_id. Scope: server. Ids that are not valid names are "
        "ignored.",
    )
