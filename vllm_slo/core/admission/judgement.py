# SPDX-License-Identifier: Apache-2.0
"""Whether one request can be promised beside everything that is: the program for a single request.

Routing and quotes ask this of many requests, one after the other, with the same committed load.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from vllm_slo.core.admission.budget_line import TPOT, WEIGHT, Engine, prefill_wait
from vllm_slo.core.admission.labels import Requests, best_set
from vllm_slo.core.arrays import Floats, Ints
from vllm_slo.core.jit import jit

ONE_SEAT: Final = 1
ONE_OR_NONE: Final = 2
"""Labels where one request is judged: it is admitted or it is not."""
NO_BLOCKS: Final = 0.0
"""KV blocks that the request needs here, and that are free: memory is looked at before."""


class TierLoad(NamedTuple):
    """What is promised already, in tiers.

    Attributes:
        deadline_s: (N,) absolute, ascending, of requests before their first token.
        prefill: (N,) tokens of work left of them.
        tier: (N,) theirs.
        tpots: (L,) seconds per token.
        decoding: (L,) requests that decode.
        contexts: (L,) KV tokens of all requests of a tier.
        counts: (L,) all requests of a tier.
    """

    deadline_s: Floats
    prefill: Floats
    tier: Ints
    tpots: Floats
    decoding: Ints
    contexts: Floats
    counts: Ints


@jit
def judge_one(
    now_s: float,
    load: TierLoad,
    engine: Engine,
    tokens_in: float,
    kv_price: float,
    deadline_s: float,
    prefill: float,
    tier: int,
    context_tokens: float,
) -> tuple[bool, bool, float]:
    """`best_set` of one new request; memory and seats are not looked at.

    Args:
        now_s: when the next step can begin.
        load: what is promised.
        engine: what a step holds.
        tokens_in: see `Speculated`.
        kv_price: tokens that reading one token's KV costs, see `kv_per_token`.
        deadline_s: the request's, absolute.
        prefill: its tokens of work.
        tier: the one it would decode in.
        context_tokens: KV tokens that it will read.

    Returns:
        Whether every objective can be kept; if not, whether its decoding could go on for ever, and
        the seconds until its prompt could be done (0 where nobody knows).
    """
    size = len(load.deadline_s)
    place = np.searchsorted(load.deadline_s, deadline_s, side="right")
    due_s = np.empty(size + 1)
    work = np.empty(size + 1)
    tiers = np.empty(size + 1, dtype=np.int64)
    forced = np.ones(size + 1, dtype=np.bool_)
    forced[place] = False
    for i in range(size + 1):
        if i == place:
            due_s[i], work[i], tiers[i] = deadline_s, prefill, tier
        else:
            j = i if i < place else i - 1
            due_s[i], work[i], tiers[i] = load.deadline_s[j], load.prefill[j], load.tier[j]
        due_s[i] = max(due_s[i] - now_s, 0.0)
    everyone = load.counts.copy()
    everyone[tier] += 1
    decode = np.empty((2, len(load.tpots)))
    for t in range(len(load.tpots)):
        read = load.contexts[t] + (context_tokens if t == tier else 0.0)
        decode[TPOT, t] = load.tpots[t]
        decode[WEIGHT, t] = tokens_in + kv_price * read / max(everyone[t], 1)
    requests = Requests(due_s, work, tiers, np.zeros(size + 1), np.ones(size + 1), forced)
    if best_set(requests, load.decoding, decode, engine, NO_BLOCKS, ONE_SEAT, ONE_OR_NONE):
        return True, True, 0.0
    wait = prefill_wait(work.sum(), everyone, decode, engine)
    return False, wait.sustainable, wait.seconds
