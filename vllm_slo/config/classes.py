# SPDX-License-Identifier: Apache-2.0
"""The section `classes` of the configuration: named classes of requests."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from vllm_slo.slo.model import SLO, OnUnattainable, Speculate, Tier


class StageConfig(BaseModel):
    """A stage of the answers of a class."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

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
