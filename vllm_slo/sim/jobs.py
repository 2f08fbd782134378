# SPDX-License-Identifier: Apache-2.0
"""Simulated jobs of one or more rounds, their made-up tokens and their results.

A job is one request, or a chain of requests that a tool loop sends (SLOs-Serve, table 1). Each
round is one request to the engine. Its answer has one or more stages, each with its own TPOT
(thinking, then response). Times are seconds from the start of the simulation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vllm_slo.core.attainment import DEFAULT_WINDOW_TOKENS
from vllm_slo.slo.model import SLO

STOP_TOKEN = 2
_FILLER = 5


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of an answer: its number of tokens and its TPOT objective in seconds."""

    tokens: int
    tpot_s: float


@dataclass(frozen=True, slots=True)
class RequestDetails:
    """What a request brings beside lengths and objectives, where it is no scenario's.

    Attributes:
        slo: what it asks the server for; None: nothing, not even a class.
        row: its place in the recording, or its job's in the window.
        application: its class, which may differ within a session.
        priority: as vLLM's.
        kept_tokens: of the text before it (prompts and answers of the previous rounds), so many
            leading tokens begin its prompt; None: all.
        not_before_s: it is sent at this time or later.
        hash_ids, block_tokens: of its whole prompt; prompts with the same leading ids begin with
            the same tokens (``traces.request.TraceRequest``).
        shared_tokens: leading tokens of its whole prompt that an earlier request had, too.
        window_tokens: over which its TPOT is judged.
    """

    slo: SLO | None
    row: int
    application: str
    priority: int = 0
    kept_tokens: int | None = None
    not_before_s: float = 0.0
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = 1
    shared_tokens: int = 0
    window_tokens: int = DEFAULT_WINDOW_TOKENS


@dataclass(frozen=True, slots=True)
class Round:
    """One request to the engine.

    Attributes:
        prompt_tokens: new prompt tokens; they follow prompts and answers of the previous rounds.
        stages: of the answer, at least one stage of at least one token.
        ttft_s: objective for the first token, from when the client sends the request.
        wait_s: from the end of the previous round until this one is sent (a tool works).
        details: None: a scenario's round, which asks for ``ttft_s`` and the TPOTs of ``stages``.
    """

    prompt_tokens: int
    stages: tuple[Stage, ...]
    ttft_s: float
    wait_s: float = 0.0
    details: RequestDetails | None = None

    @property
    def output_tokens(self) -> int:
        return sum(stage.tokens for stage in self.stages)

    @property
    def tightest_tpot_s(self) -> float:
        """The tightest TPOT, which stands for all stages (SLOs-Serve, section 3.2.1)."""
        return min(stage.tpot_s for stage in self.stages)

    def least_prompt(self, before: int) -> tuple[int, int]:
        """Fewest new prompt tokens that are computed, and the tokens cached before them.

        ``before``: tokens that the prompt repeats of the rounds before it.
        """
        shared = self.details.shared_tokens if self.details else 0
        extra = min(max(shared - before, 0), self.prompt_tokens - 1)
        return self.prompt_tokens - extra, before + extra

    @property
    def e2e_s(self) -> float:
        """Objective for the last token of the answer, from when the client sends the request."""
        asked = self.details and self.details.slo
        return math.inf if not asked or asked.e2e_ms is None else asked.e2e_ms / 1e3

    @property
    def has_objective(self) -> bool:
        """Whether it asks for any time."""
        asked = (self.ttft_s, self.tightest_tpot_s, self.e2e_s)
        return any(math.isfinite(limit_s) for limit_s in asked)

    @property
    def window_tokens(self) -> int:
        """Tokens over which its TPOT is judged."""
        return self.details.window_tokens if self.details else DEFAULT_WINDOW_TOKENS


@dataclass(frozen=True, slots=True)
class Job:
    """What one user waits for. ``application`` is its SLO class; there is at least one round."""

    job_id: str
    application: str
    arrival_s: float
    rounds: tuple[Round, ...]

    @property
    def tokens(self) -> int:
        """Prompt and answer tokens, each counted once."""
        return sum(r.prompt_tokens + r.output_tokens for r in self.rounds)

    @property
    def longest_request(self) -> int:
        """Most tokens of one request: its whole prompt and its answer."""
        return max(before + r.prompt_tokens + r.output_tokens for r, before in self.in_context())

    @property
    def has_objective(self) -> bool:
        """Whether any of its requests asks for any time."""
        return any(asked.has_objective for asked in self.rounds)

    def in_context(self) -> Iterator[tuple[Round, int]]:
        """Each round, and the tokens that its prompt repeats of the rounds before it."""
        held = 0
        for asked in self.rounds:
            kept = asked.details.kept_tokens if asked.details else None
            held = held if kept is None else min(held, kept)
            yield asked, held
            held += asked.prompt_tokens + asked.output_tokens

    def by_request(self) -> tuple[Job, ...]:
        """The job, or where it was recorded a job of each of its requests.

        A scenario's job is one thing to its user; a server counts requests.
        """
        if self.rounds[0].details is None or len(self.rounds) == 1:
            return (self,)
        return tuple(
            Job(f"{self.job_id}.{place}", self.application_of(asked), self.arrival_s, (asked,))
            for place, asked in enumerate(self.rounds)
        )

    def application_of(self, asked: Round) -> str:
        """The class of one of its requests."""
        return asked.details.application if asked.details else self.application


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """One round of a job as a request.

    Attributes:
        name: unique in the run.
        prompt: token ids.
        output_tokens: length of the answer; policies do not see it.
        slo: None: it asks for nothing.
        sent_s, seen_s: when the client sent it, and when an engine can see it.
        acceptance: probability that a drafted token of its answer is accepted.
        stage_ends: number of the last token of each stage but the last; policies learn an end when
            it is reached.
        priority: as vLLM's.
    """

    name: str
    prompt: list[int]
    output_tokens: int
    slo: SLO | None
    sent_s: float
    seen_s: float
    acceptance: float
    stage_ends: tuple[int, ...] = ()
    priority: int = 0


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
    """A job and the rounds that were sent; a scenario's ends with a round that is unfinished."""

    job: Job
    rounds: tuple[RoundResult, ...]

    def by_request(self) -> tuple[JobResult, ...]:
        """As ``Job.by_request``; of a round that was not sent there is no result."""
        parts = self.job.by_request()
        if len(parts) == 1:
            return (self,)
        results = []
        for place, part in enumerate(parts):
            got = self.rounds[place : place + 1]
            sent_s = got[0].sent_s if got else part.arrival_s
            results.append(JobResult(replace(part, arrival_s=sent_s), got))
        return tuple(results)


def own_text(name: str, length: int) -> list[int]:
    """Token ids of a prompt with a unique beginning, so that no block of it is cached."""
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
    head = [3 + number // 997**place % 997 for place in range(6)]
    return [*head, *[_FILLER] * (length - len(head))][:length]


def hashed_text(hash_ids: Sequence[int], block_tokens: int, start: int, end: int) -> list[int]:
    """Tokens ``start`` to ``end`` of a prompt of which each id stands for ``block_tokens`` tokens.

    Prompts with the same leading ids begin with the same tokens. It ends early with the last id.
    """
    text: list[int] = []
    first = start // block_tokens
    for place, hash_id in enumerate(hash_ids[first : -(-end // block_tokens)], first):
        block = own_text(f"block {hash_id}", block_tokens)
        text += block[max(start - place * block_tokens, 0) : end - place * block_tokens]
    return text


def round_prompt(
    asked: Round, name: str, before: Sequence[int] = (), system: Sequence[int] = ()
) -> list[int]:
    """The tokens of a prompt.

    Args:
        name: of the request; its own text follows from it.
        before: what it repeats of the rounds before it.
        system: tokens with which the first prompts of all jobs begin.
    """
    length, prompt = asked.prompt_tokens + len(before), list(before)
    if asked.details is not None and asked.details.hash_ids:
        ids, block = asked.details.hash_ids, asked.details.block_tokens
        prompt += hashed_text(ids, block, len(prompt), length)
    elif not prompt:
        prompt += system[: length - 1]
    return [*prompt, *own_text(name, length - len(prompt))]


def answer_token(place: int, length: int) -> int:
    """Token ``place`` (from 0) of an answer of ``length`` tokens; the last one ends it."""
    return STOP_TOKEN if place + 1 >= length else 3 + place % 1000


def answer_text(length: int) -> list[int]:
    """A whole answer."""
    return [answer_token(place, length) for place in range(length)]
