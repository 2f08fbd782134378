# SPDX-License-Identifier: Apache-2.0
"""The section `best_effort` of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from vllm_slo.core.types import BestEffortOrder, LengthSource


class BestEffortConfig(BaseModel):
    """The order in which requests without a promise are served; see LAPS-SD."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    order: BestEffortOrder = Field(
        default="fcfs",
        description="fcfs: by arrival. laps_sd: the shortest request first, as far as lengths are "
        "known. las (least attained service) and lp_sjf (shortest predicted answer) are for "
        "comparison. Scope: server. All but fcfs order requests without an SLO, too.",
    )
    output_length: LengthSource = Field(
        default="quantile",
        description="How the length of an answer is predicted where the request does not declare "
        "it: quantile of its class, or learnt from prompts by scikit-learn (pip install "
        "'vllm-slo[lengths]'). Scope: server, laps_sd and lp_sjf. A bad prediction puts long "
        "requests before short ones.",
    )
    queues: int = Field(
        default=4,
        ge=1,
        le=32,
        description="Queues by attained service (K), 1 to 32. Scope: server, laps_sd and las. Too "
        "many: requests preempt each other, and their KV is computed again.",
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
        description="Whether a request whose remaining work is known can be preempted by a shorter "
        "one that comes later; false: never, as in the paper. Scope: server, laps_sd. True: "
        "requests wait less under steady load, and more KV is computed again.",
    )
    stable_rounds: int = Field(
        default=3,
        ge=0,
        le=1_000,
        description="Rounds in which a request's acceptance rate must be stable to be used "
        "(gamma), up to 1000. 0: the typical rate is used until its own is known; best where "
        "lengths are predicted well. Scope: server. Too low: an accidental rate is used; too high: "
        "the rate is known too late to be of use.",
    )
    stable_change: float = Field(
        default=0.2,
        gt=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="Largest change of the acceptance rate that counts as stable (delta), above 0 "
        "to 1. Scope: server. Too low: the rate is known too late; too high: an accidental rate is "
        "used.",
    )
