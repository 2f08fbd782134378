# SPDX-License-Identifier: Apache-2.0
"""The least work of a job, and between which times it has to be done.

Every number errs on the side of the schedule: no schedule of one engine without speculation does
less work, does it earlier than ``earliest_s``, or attains the job's objectives with work done later
than ``latest_s``. ``ceiling`` builds an upper bound from them. Times are seconds from the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.step_time.model import StepTimeModel, chunk_pairs
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job, Round
from vllm_slo.sim.measure import TOLERANCE_S

Floats = NDArray[np.float64]

_NO_TOKENS: Final = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Work:
    """Pieces of work of one kind; every array has one number per piece.

    Attributes:
        earliest_s: before this the step that does the piece cannot start.
        latest_s: when that step has to be over.
        tokens: computed tokens.
        attention_s: seconds of attention, which come on top of either line of the step-time model.
        context: KV tokens that the step reads for it.
    """

    earliest_s: Floats
    latest_s: Floats
    tokens: Floats
    attention_s: Floats
    context: Floats

    @classmethod
    def joined(cls, parts: Sequence[Work]) -> Work:
        """All pieces of ``parts``, in order."""
        names = ("earliest_s", "latest_s", "tokens", "attention_s", "context")
        return cls(*(np.concatenate([_NO_TOKENS, *(getattr(p, n) for p in parts)]) for n in names))


@dataclass(frozen=True, slots=True)
class JobWork:
    """All work of one job.

    Attributes:
        first_prompts, later_prompts: one piece per round.
        answers: one piece per answer token but the first of a round, which its prompt gives.
        steps: least number of steps in which the job takes part.
        starts_s: when an engine can first see the job.
        ends_s: latest time of its last token; infinite without objectives that limit it.
    """

    first_prompts: Work
    later_prompts: Work
    answers: Work
    steps: int
    starts_s: float
    ends_s: float

    @property
    def possible(self) -> bool:
        """Whether a lone job on an idle engine could attain."""
        every = (self.first_prompts, self.later_prompts, self.answers)
        return all(bool(np.all(work.earliest_s < work.latest_s)) for work in every)


def least_step_time(model: StepTimeModel) -> StepTimeModel:
    """A step-time model that no step undercuts, even if it computes KV again instead of reading it.

    A preempted request computes its context again. A step that waits for the weights has tokens to
    spare, so there this costs less than reading: up to F = (b1 - b2) / (m2 - m1) context tokens are
    free, where m is a line's seconds per token, b its constant, and line 1 the flatter one. Without
    F reads the flat line still binds, so its constant is lowered by F reads. Beyond F a computed
    token costs m2 - m1 more than the flat line says; a read is priced at no more than that.
    """
    flat, steep = sorted(model.terms, key=lambda term: (term[0], -term[2]))
    slope_s = steep[0] - flat[0]
    kv_s = min(model.kv_s, slope_s)
    free = max(0.0, (flat[2] - steep[2]) / slope_s) if slope_s > 0 else 0.0
    base_s = max(0.0, flat[2] - kv_s * free)
    return StepTimeModel(((flat[0], flat[1], base_s), steep), kv_s, model.max_tokens, model.pair_s)


def latest_after_first_s(asked: Round) -> Floats:
    """Latest times of the tokens of an answer after its first one, shape (output_tokens,).

    Only the last token of a TPOT window has a time of its own: a window is one mean. Windows are
    cut as ``core.attainment.worst_window_tpot_s`` cuts them, stage by stage as in
    ``measure.stage_tpots_s``. The first number is 0.
    """
    latest = np.zeros(asked.output_tokens)
    start = 0
    for stage in asked.stages:
        base, end = max(start - 1, 0), start + stage.tokens
        gaps = end - 1 - base
        if gaps > 0:
            number, window = np.arange(1, gaps + 1), asked.window_tokens
            windows = max(1, gaps // window)
            last = -(-number // window)
            cut = np.where(last >= windows, gaps, last * window)
            latest[base + 1 : end] = latest[base] + (stage.tpot_s + TOLERANCE_S) * cut
        start = end
    return latest


def works_of(job: Job, hardware: Hardware, least: StepTimeModel) -> list[JobWork]:
    """The work of a job, or where each of its requests counts, of each of them.

    A later round finds all of its prefix cached, and each round is sent as soon as the round
    before it may have ended. The rounds of a recorded session are taken to be sent as if each one
    kept its objectives, so there the times are an estimate. ``least``: ``least_step_time`` of the
    hardware's model.
    """
    prompts, answers, seen, ends = [], [], [], []
    sent_s, latest_sent_s = job.arrival_s, job.arrival_s
    for place, (asked, before) in enumerate(job.in_context()):
        if place:
            sent_s += asked.wait_s
            latest_sent_s += asked.wait_s + TOLERANCE_S
            if asked.details is not None:
                sent_s = max(sent_s, asked.details.not_before_s)
                latest_sent_s = max(latest_sent_s, asked.details.not_before_s)
        seen_s = sent_s + hardware.frontend_s
        seen.append(seen_s)
        prompt, context = asked.least_prompt(before)
        pairs = chunk_pairs(prompt, context)
        last_s = latest_sent_s + asked.e2e_s + TOLERANCE_S
        first_s = min(latest_sent_s + asked.ttft_s + TOLERANCE_S, last_s)
        prompts.append(
            Work(
                np.array([seen_s]),
                np.array([first_s]),
                np.array([float(prompt)]),
                np.array([least.kv_s * context + least.pair_s * pairs]),
                np.array([float(context)]),
            )
        )
        seen_s += least.predict_s(prompt, context, 0, pairs)
        held = context + prompt + np.arange(asked.output_tokens - 1, dtype=float)
        attention_s = least.kv_s * held + least.pair_s * (held + 1.0)
        alone_s = np.cumsum(least.predict_s(1) + attention_s)
        latest = np.minimum(first_s + latest_after_first_s(asked), last_s)
        answers.append(
            Work(
                seen_s + np.concatenate([[0.0], alone_s])[:-1],
                latest[1:],
                np.ones(len(held)),
                attention_s,
                held,
            )
        )
        sent_s = seen_s + (float(alone_s[-1]) if len(alone_s) else 0.0)
        latest_sent_s = float(latest[-1])
        ends.append(latest_sent_s if math.isfinite(latest_sent_s) else math.inf)
    if len(job.by_request()) > 1:
        none = Work.joined([])
        return [
            JobWork(prompt, none, answer, asked.output_tokens, seen_s, end_s)
            for asked, prompt, answer, seen_s, end_s in zip(
                job.rounds, prompts, answers, seen, ends, strict=True
            )
        ]
    return [
        JobWork(
            prompts[0],
            Work.joined(prompts[1:]),
            Work.joined(answers),
            sum(asked.output_tokens for asked in job.rounds),
            seen[0],
            ends[-1],
        )
    ]
