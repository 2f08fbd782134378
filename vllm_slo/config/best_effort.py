# SPDX-License-Identifier: Apache-2.0
"""The section `best_effort` of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from vllm_slo.core.types import BestEffortOrder, LengthSource

__all__ = ["BestEffortConfig"]


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
