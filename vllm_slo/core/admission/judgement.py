# SPDX-License-Identifier: Apache-2.0
"""Whether one request can be promised beside everything that is: the program for a single request.

Routing and quotes ask this of many requests, one after the other, with the same committed load.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from vllm_slo.core.admission.budget_line import TPOT, WEIGHT, Engine, prefill_wait
from vllm_slo.core.admission.labels import Requests, best_set
from vllm_slo.core.arrays import Floats, Floats2D
from vllm_slo.core.jit import jit
from vllm_slo.core.step_time.budget import Lines

ONE_SEAT: Final = 1
ONE_OR_NONE: Final = 2
"""Labels where one request is judged: it is admitted or it is not."""
NO_BLOCKS: Final = 0.0
"""KV blocks that the request needs here, and that are free: memory is looked at before."""


DEADLINE: Final = 0
PREFILL: Final = 1
TIER: Final = 2
"""Rows of the promises before their first token."""
CONTEXT: Final = 3
"""Row of the KV tokens that they will read, before tiers are known."""
PENDING_ROWS: Final = 3
DECODING: Final = 1
CONTEXTS: Final = 2
COUNTS: Final = 3
"""Rows of the tiers, after their TPOTs."""


class TierLoad(NamedTuple):
    """What is promised already, in tiers. Few and plain arrays: to pass each costs time, and a
    request is judged in microseconds.

    Attributes:
        pending: (3, N) requests before their first token, deadlines ascending: absolute deadline,
            tokens of work left, tier.
        tiers: (4, L) seconds per token, requests that decode, KV tokens of all requests of the
            tier, all its requests.
    """

    pending: Floats2D
    tiers: Floats2D


@jit
def load_in_tiers(
    pending: Floats2D, tpots: Floats, decoding: Floats2D, decoding_context: float
) -> TierLoad:
    """What is promised, in the tiers with these TPOTs.

    Args:
        pending: (4, N) requests before their first token, deadlines ascending: absolute deadline,
            tokens of work left, TPOT, KV tokens that they will read.
        tpots: (L,) ascending.
        decoding: (2, M) TPOTs, and requests that decode by each.
        decoding_context: KV tokens that those read in one step, together.
    """
    found = pending[:PENDING_ROWS].copy()
    tiers = np.zeros((COUNTS + 1, len(tpots)))
    tiers[TPOT] = tpots
    for i in range(decoding.shape[1]):
        tier = max(np.searchsorted(tpots, decoding[0, i], side="right") - 1, 0)
        tiers[DECODING, tier] += decoding[1, i]
    each = decoding_context / max(tiers[DECODING].sum(), 1.0)
    for t in range(len(tpots)):
        tiers[CONTEXTS, t] = tiers[DECODING, t] * each
        tiers[COUNTS, t] = tiers[DECODING, t]
    for i in range(pending.shape[1]):
        tier = max(np.searchsorted(tpots, pending[TIER, i], side="right") - 1, 0)
        found[TIER, i] = tier
        tiers[CONTEXTS, tier] += pending[CONTEXT, i]
        tiers[COUNTS, tier] += 1.0
    return TierLoad(found, tiers)


def prices(engine: Engine, tokens_in: float, kv_price: float) -> Floats:
    """(10,) what steps hold and what tokens cost, as `judge_one` takes it.

    Args:
        engine: what a step holds.
        tokens_in: see `Speculated`.
        kv_price: tokens that reading one token's KV costs, see `kv_per_token`.
    """
    return np.array([*engine.lines, *engine[1:], tokens_in, kv_price], dtype=np.float64)


@jit
def judge_one(
    now_s: float,
    pending: Floats2D,
    tiers: Floats2D,
    step: Floats,
    deadline_s: float,
    prefill: float,
    tier: int,
    context_tokens: float,
) -> tuple[bool, bool, float]:
    """`best_set` of one new request; memory and seats are not looked at.

    Args:
        now_s: when the next step can begin.
        pending, tiers: what is promised, a `TierLoad`.
        step: the `prices`.
        deadline_s: the request's, absolute.
        prefill: its tokens of work.
        tier: the one it would decode in.
        context_tokens: KV tokens that it will read.

    Returns:
        Whether every objective can be kept; if not, whether its decoding could go on for ever, and
        the seconds until its prompt could be done (0 where nobody knows).
    """
    lines = Lines(step[0], step[1], step[2], step[3], step[4], step[5])
    engine = Engine(lines, step[6], step[7])
    tokens_in, kv_price = step[8], step[9]
    size, sorts = pending.shape[1], tiers.shape[1]
    place = np.searchsorted(pending[DEADLINE], deadline_s, side="right")
    due_s = np.empty(size + 1)
    work = np.empty(size + 1)
    tier_of_each = np.empty(size + 1, dtype=np.int64)
    forced = np.ones(size + 1, dtype=np.bool_)
    forced[place] = False
    for i in range(size + 1):
        if i == place:
            due_s[i], work[i], tier_of_each[i] = deadline_s, prefill, tier
        else:
            j = i if i < place else i - 1
            due_s[i], work[i] = pending[DEADLINE, j], pending[PREFILL, j]
            tier_of_each[i] = int(pending[TIER, j])
        due_s[i] = max(due_s[i] - now_s, 0.0)
    decoding = np.empty(sorts, dtype=np.int64)
    everyone = np.empty(sorts, dtype=np.int64)
    decode = np.empty((2, sorts))
    for t in range(sorts):
        decoding[t], everyone[t] = int(tiers[DECODING, t]), int(tiers[COUNTS, t])
        read = tiers[CONTEXTS, t]
        if t == tier:
            everyone[t] += 1
            read += context_tokens
        decode[TPOT, t] = tiers[TPOT, t]
        decode[WEIGHT, t] = tokens_in + kv_price * read / max(everyone[t], 1)
    unused = np.zeros(size + 1)
    requests = Requests(due_s, work, tier_of_each, unused, np.ones(size + 1), forced)
    if best_set(requests, decoding, decode, engine, NO_BLOCKS, ONE_SEAT, ONE_OR_NONE):
        return True, True, 0.0
    wait = prefill_wait(work.sum(), everyone, decode, engine)
    return False, wait.sustainable, wait.seconds
