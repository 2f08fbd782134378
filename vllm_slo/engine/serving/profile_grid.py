# SPDX-License-Identifier: Apache-2.0
"""The batches of which ``vllm-slo profile`` measures the step times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MARGIN = 64
"""Tokens a request may generate while it is measured."""
DECODE_STEPS = 5


@dataclass(frozen=True, slots=True)
class Scenario:
    """A sequence of steps that share one costly preparation.

    As many requests as the first of ``batches`` (descending) are given ``decode_context`` tokens.
    For each batch size the surplus is dropped, the rest decodes for some steps, and then, beside
    them, a prompt of which ``chunk_context`` tokens are cached grows by each of ``chunks``, a
    step each.  Batch size 0 with chunks is plain prefill.
    """

    batches: tuple[int, ...]
    decode_context: int = 0
    chunks: tuple[int, ...] = ()
    chunk_context: int = 0

    @property
    def cost(self) -> int:
        """Tokens to compute."""
        climbed = self.chunk_context + sum(self.chunks)
        return self.batches[0] * self.decode_context + len(self.batches) * climbed


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the engine: requests, tokens per step, tokens per request, KV tokens."""

    requests: int
    step_tokens: int
    request_tokens: int
    kv_tokens: int

    def allow(self, scenario: Scenario) -> bool:
        """Whether it runs without preemption and without a request ending early."""
        climbed = scenario.chunk_context + sum(scenario.chunks)
        held = scenario.batches[0] * (scenario.decode_context + MARGIN) + climbed
        return (
            scenario.batches[0] + bool(scenario.chunks) <= self.requests
            and scenario.batches[0] + max(scenario.chunks, default=0) <= self.step_tokens
            and max(scenario.decode_context, climbed) + MARGIN <= self.request_tokens
            and held <= 0.8 * self.kv_tokens
        )


def scenarios(limits: Limits, *, fill_tokens: int, quick: bool = False) -> list[Scenario]:
    """The grid: prefill chunks, decode batches and both at once, at short to long contexts.

    The cheapest come first, so that a run that is cut short still covers all kinds.

    Args:
        fill_tokens: tokens that one scenario may compute to prepare its decodes.
    """
    factor = 4 if quick else 2
    contexts = [16, *_powers(256, limits.request_tokens, factor)]
    chunks = list(_powers(16, limits.step_tokens, factor))
    made = []
    for nth, context in enumerate(contexts):
        behind = context if nth else 0
        room = limits.request_tokens - behind - MARGIN
        fitting = [n for n in chunks if 2 * n <= room]
        made.append(Scenario((0,), 0, tuple(fitting), behind))
        top = min(limits.requests - 1, max(fill_tokens // context, 1))
        batches = tuple(reversed(list(_powers(1, top, 2))))
        beside = tuple(fitting[1:4:2]) if nth in (1, 2) else ()
        while batches and not limits.allow(Scenario(batches, context, beside)):
            batches = batches[1:]
        made.append(Scenario(batches or (0,), context, beside))
    return sorted((s for s in made if s.cost and limits.allow(s)), key=lambda s: s.cost)


def _powers(first: int, last: int, factor: int) -> Iterator[int]:
    value = first
    while value <= last:
        yield value
        value *= factor
