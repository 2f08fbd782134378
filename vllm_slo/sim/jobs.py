# SPDX-License-Identifier: Apache-2.0
"""Simulated jobs of one or more rounds, their made-up tokens and their results.

A job is one request, or a chain of requests that a tool loop sends (SLOs-Serve, table 1). Each
round is one request to the engine. Its answer has one or more stages, each with its own TPOT
(thinking, then response). Times are seconds from the start of the simulation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_slo.slo.model import SLO

STOP_TOKEN = 2
_FILLER = 5


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of an answer: its number of tokens and its TPOT objective in seconds."""

    tokens: int
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One request to the engine.

    Attributes:
        prompt_tokens: new prompt tokens; they follow prompts and answers of the previous rounds.
        stages: of the answer, at least one stage of at least one token.
        ttft_s: objective for the first token, from when the client sends the request.
        wait_s: from the end of the previous round until this one is sent (a tool works).
    """

    prompt_tokens: int
    stages: tuple[Stage, ...]
    ttft_s: float
    wait_s: float = 0.0

    @property
    def output_tokens(self) -> int:
        return sum(stage.tokens for stage in self.stages)

    @property
    def tightest_tpot_s(self) -> float:
        """The tightest TPOT, which stands for all stages (SLOs-Serve, section 3.2.1)."""
        return min(stage.tpot_s for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Job:
    """What one user waits for.

    Attributes:
        application: its SLO class.
        rounds: at least one.
        prefix: name of a text with which its first prompt begins, the same for every job that names
            it; empty: none.
        prefix_tokens: of that text. They count as tokens of the first prompt.
    """

    job_id: str
    application: str
    arrival_s: float
    rounds: tuple[Round, ...]
    prefix: str = ""
    prefix_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Prompt and answer tokens, each counted once."""
        return sum(r.prompt_tokens + r.output_tokens for r in self.rounds)


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """One round of a job as a request.

    Attributes:
        name: unique in the run.
        prompt: token ids.
        output_tokens: length of the answer; policies do not see it.
        sent_s, seen_s: when the client sent it, and when an engine can see it.
        acceptance: probability that a drafted token of its answer is accepted.
        stage_ends: number of the last token of each stage but the last; policies learn an end when
            it is reached.
    """

    name: str
    prompt: list[int]
    output_tokens: int
    slo: SLO
    sent_s: float
    seen_s: float
    acceptance: float
    stage_ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One request as its client saw it.

    Attributes:
        token_times_s: when each token came, never decreasing.
        promised: whether the scheduler promised its objectives; None if it promises nothing.
        late_kept: whether its late promise was kept; None: it has none.
        reason: why no promise was made when it was first asked for, or None.
    """

    sent_s: float
    token_times_s: tuple[float, ...]
    finished: bool
    promised: bool | None = None
    replica: int = 0
    reason: str | None = None
    late_kept: bool | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job and the rounds that were sent; the last of them may be unfinished."""

    job: Job
    rounds: tuple[RoundResult, ...]


def own_text(name: str, length: int) -> list[int]:
    """Token ids of a prompt with a unique beginning, so that no block of it is cached."""
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
    head = [3 + number // 997**place % 997 for place in range(6)]
    return [*head, *[_FILLER] * (length - len(head))][:length]


def round_prompt(
    job: Job, place: int, name: str, before: Sequence[int] = (), system: Sequence[int] = ()
) -> list[int]:
    """The prompt of round ``place`` of a job.

    Args:
        name: of the request; its own text follows from it.
        before: prompt and answer of the round before.
        system: tokens with which the first prompts of all jobs begin.
    """
    tokens = job.rounds[place].prompt_tokens
    common = () if place else (*system, *own_text(f"prefix {job.prefix}", job.prefix_tokens))
    common = common[: tokens - 1]
    return [*before, *common, *own_text(name, tokens - len(common))]


def answer_token(place: int, length: int) -> int:
    """Token ``place`` (from 0) of an answer of ``length`` tokens; the last one ends it."""
    return STOP_TOKEN if place + 1 >= length else 3 + place % 1000


def answer_text(length: int) -> list[int]:
    """A whole answer."""
    return [answer_token(place, length) for place in range(length)]
