# SPDX-License-Identifier: Apache-2.0
"""What is simulated: jobs of one or more rounds, and what became of them.

A job is what a user waits for: one request, or a chain of requests that a tool loop sends
(SLOs-Serve, table 1). Each round is one request to the engine; its answer has one or more stages,
each with a TPOT of its own (thinking, then response). Times are seconds from the start of the
simulation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of one answer: how many tokens it has, and the TPOT asked for it (seconds)."""

    tokens: int
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One request to the engine.

    Attributes:
        prompt_tokens: new prompt tokens; they follow everything the rounds before it held.
        stages: the answer, at least one stage of at least one token.
        ttft_s: objective for the first token, counted from when the client sent it.
        wait_s: from the end of the round before until this one is sent (a tool at work).
    """

    prompt_tokens: int
    stages: tuple[Stage, ...]
    ttft_s: float
    wait_s: float = 0.0

    @property
    def output_tokens(self) -> int:
        """Tokens of the whole answer."""
        return sum(stage.tokens for stage in self.stages)

    @property
    def tightest_tpot_s(self) -> float:
        """What stands for a request whose stages differ (SLOs-Serve, section 3.2.1)."""
        return min(stage.tpot_s for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Job:
    """One user's errand. ``application`` is its SLO class; ``rounds`` has at least one."""

    job_id: str
    application: str
    arrival_s: float
    rounds: tuple[Round, ...]

    @property
    def tokens(self) -> int:
        """Prompt and answer tokens that it computes, each counted once."""
        return sum(r.prompt_tokens + r.output_tokens for r in self.rounds)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One request as its client saw it.

    Attributes:
        sent_s: when the client sent it.
        token_times_s: when each token came, never decreasing.
        finished: whether the whole answer came.
        promised: whether the scheduler promised its objectives; None where it promises nothing.
        replica: who served it.
        reason: what stood in the way of a promise when it was first asked for, or None.
    """

    sent_s: float
    token_times_s: tuple[float, ...]
    finished: bool
    promised: bool | None = None
    replica: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job and the rounds that were begun; fewer than it has where one did not finish."""

    job: Job
    rounds: tuple[RoundResult, ...]
