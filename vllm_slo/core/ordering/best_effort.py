# SPDX-License-Identifier: Apache-2.0
"""Requests without a promise: which are served first, and which lose their KV first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_slo.core.types import BestEffortView


def rank_best_effort(
    requests: Iterable[BestEffortView], now_s: float, ageing_s: float, starved: str | None = None
) -> list[BestEffortView]:
    """Serving order.

    1. The ``starved`` request (``StarvationGuard.starved``).
    2. Answers that have begun, also where they have lost their place: the fewer run at a time, the
       sooner each of them ends.
    3. Those that asked for a promise: their clients wait.
    4. The others.

    Within 2 to 4, requests that have waited longer than ``ageing_s`` come first, then those that
    decode, then as given.
    """
    return sorted(
        requests,
        key=lambda r: (
            r.request_id != starved,
            not r.begun,
            not (r.begun or r.asked),
            now_s - r.waiting_since_s <= ageing_s,
            not r.decoding,
        ),
    )


def preemptions(
    needed_blocks: int, free_blocks: int, victims: Sequence[tuple[str, int]]
) -> tuple[str, ...]:
    """Best-effort requests whose KV must go so that promises find ``needed_blocks``.

    ``victims``: (request id, blocks it would free), in the order in which they are to give way.

    Returns:
        The shortest prefix of ``victims`` that frees enough; all of them if that is too little.
    """
    chosen: list[str] = []
    for request_id, blocks in victims:
        if free_blocks >= needed_blocks:
            break
        chosen.append(request_id)
        free_blocks += blocks
    return tuple(chosen)
