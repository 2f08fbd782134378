# SPDX-License-Identifier: Apache-2.0
"""Sections of the configuration: `classes`, `best_effort`, `routing` and `sessions`."""

from __future__ import annotations

from pydantic import Field, model_validator

from vllm_slo.core.types import Backup, BestEffortOrder, LengthSource, RoutingPolicy
from vllm_slo.slo.access_config import Section
from vllm_slo.slo.model import SLO, OnUnattainable, Speculate, Tier


class StageConfig(Section):
    """A stage of the answers of a class."""

    until: str | None = Field(
        default=None,
        description="Text that ends the stage, 1 to 64 characters; the last stage has none. Scope: "
        "every request of the class. If the text never comes, the stage lasts to the end.",
    )
    tpot_ms: float | None = Field(
        default=None,
        description="Time per output token, milliseconds, 0.001 to 3600000; unset: no "
        "objective. Scope: the stage. Admission takes the tightest of all stages.",
    )


class ClassConfig(Section):
    """A named class of requests: the SLO fields that a request of the class starts from."""

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
    max_wait_ms: float | None = Field(
        default=None,
        description="How long a request waits for its first token at most, milliseconds from "
        "arrival, 0.001 to 86400000 and not below ttft_ms; unset: it waits. Scope: every request "
        "of the class. If its turn comes later it gets a 429, as soon as that is known. Too low: "
        "requests are turned away that would have been served.",
    )
    max_waiting: int | None = Field(
        default=None,
        description="How many requests of the class may wait for their first token without a "
        "promise, 1 to 1000000; unset: no bound. Scope: each engine. A request beyond them gets a "
        "429 at once. Too low: bursts are turned away that would soon have been served.",
    )
    speculation: Speculate | None = Field(
        default=None,
        description="off: no tokens are drafted for requests of the class; auto or unset: as it "
        "pays. Scope: every request of the class, on a server with a draft model.",
    )
    expected_output_tokens: int | None = Field(
        default=None,
        description="Expected output length, tokens, 1 to 10000000; unset: learnt online. "
        "Too low: memory is promised twice; too high: fewer requests are promised.",
    )

    def to_slo(self, name: str) -> SLO:
        """The SLO of a request that states this class and nothing else.

        Raises:
            InvalidSLOError: a field is out of range, or `name` is not a name.
        """
        slo = SLO(**self.model_dump(), slo_class=name)
        if slo.tier == "guaranteed" and not slo.has_objective:
            SLO(**self.model_dump())  # raises: without an objective there is nothing to guarantee
        return slo


class BestEffortConfig(Section):
    """The order in which requests without a promise are served; see LAPS-SD."""

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
        default=0,
        ge=0,
        le=1_000,
        description="Rounds in which a request's acceptance rate must be stable to be used "
        "(gamma), up to 1000. 0: the typical rate is used until its own is known; the paper has 3. "
        "Scope: server. Too high: the rate is known too late to be of use.",
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


class RoutingConfig(Section):
    """How the front of several replicas routes; a single server ignores it."""

    policy: RoutingPolicy = Field(
        default="slo",
        description="slo asks replica after replica for a promise; round_robin, least_loaded, "
        "power_of_two and scorers (llm-d's mix of queue, KV cache and prefix) send requests "
        "without asking. Scope: front. Without asking more objectives are missed.",
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
    demand_window_s: float = Field(
        default=30.0,
        ge=1.0,
        le=86_400.0,
        allow_inf_nan=False,
        description="Seconds of requests that say how many replicas are wanted, 1 to 86400; none "
        "is wanted after so long without a request. Scope: front. Too low: replicas come and go "
        "with every burst; too high: they come late.",
    )
    demand_target: float = Field(
        default=0.7,
        gt=0.0,
        le=1.0,
        description="Share of a replica's time that is to be filled when the number of wanted "
        "replicas is computed, above 0 to 1. Scope: front. Too high: bursts find no free replica; "
        "too low: replicas idle.",
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


class SessionsConfig(Section):
    """Jobs of several rounds: requests that share a session_id."""

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
        default=0.5,
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
