# SPDX-License-Identifier: Apache-2.0
"""The dynamic program of admission, compiled; `core.admission.program` says what it decides.

Source: SLOs-Serve, section 3.2.1 (the transition) and appendix C (the table pb[i, m, n_1..n_L] of
the largest prefill budget that is left).

The table is kept as labels (budget, memory, n_1..n_L, value): for one vector n only labels that no
other beats in value, budget and memory survive, so memory needs no discretisation and values need
not be equal. The result is exact while a stage holds at most ``most`` labels; beyond that the best
by value, then by budget, are kept.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from vllm_slo.core.admission.budget_line import (
    EPS,
    TPOT,
    WEIGHT,
    Engine,
    cut_tokens,
    decode_rate,
    is_sustainable,
    prefill_budget,
)
from vllm_slo.core.arrays import Bools, Floats, Floats2D, Ints, Ints2D
from vllm_slo.core.jit import jit

TIE_VALUE: Final = 1e-12
"""Value that a token of budget counts for where labels are ranked: it is to decide between labels
of one value only. Values that differ by less than 1e-3 (`TIE_TOKENS` of it) may be confused, which
costs exactness, and that only in stages of more than ``most`` labels."""
KEY_BASE: Final = 4099
"""More than the requests of a tier, and so small that five tiers fit 63 bits."""
TIE_TOKENS: Final = 1e9
"""Tokens of budget beyond which more of it is no better."""


class Requests(NamedTuple):
    """Requests in deadline order: promised ones, which are forced, and new ones.

    Attributes:
        deadline_s: (N,) seconds from now, at least 0; infinite without a TTFT.
        prefill: (N,) tokens of work that are due then.
        tier: (N,) where it decodes from then on.
        blocks: (N,) KV blocks of a new one.
        values: (N,) what a new one is worth.
        forced: (N,) whether it is promised already.
    """

    deadline_s: Floats
    prefill: Floats
    tier: Ints
    blocks: Floats
    values: Floats
    forced: Bools


class Labels(NamedTuple):
    """One row for each set of new requests that is still considered.

    Attributes:
        budget: (R,) prefill tokens left.
        memory: (R,) KV blocks taken.
        value: (R,) what the set is worth.
        chosen: (R,) bit set of the new requests in it, numbered in deadline order.
        seats: (R,) how many they are.
        counts: (R, L) requests that decode, by tier.
    """

    budget: Floats
    memory: Floats
    value: Floats
    chosen: Ints
    seats: Ints
    counts: Ints2D


@jit
def _copy(labels: Labels, source: int, target: int) -> None:
    """Write one row over another."""
    labels.budget[target] = labels.budget[source]
    labels.memory[target] = labels.memory[source]
    labels.value[target] = labels.value[source]
    labels.chosen[target] = labels.chosen[source]
    labels.seats[target] = labels.seats[source]
    labels.counts[target] = labels.counts[source]


@jit
def _keys(counts: Ints2D, size: int) -> Ints:
    """(size,) a number for each row's counts, different for different counts below `KEY_BASE`."""
    keys = np.zeros(size, dtype=np.int64)
    for label in range(size):
        for tier in range(counts.shape[1]):
            keys[label] = keys[label] * KEY_BASE + counts[label, tier]
    return keys


@jit
def _prune(labels: Labels, size: int, most: int) -> int:
    """Keep of the first ``size`` rows those that no other of their counts beats, at most ``most``;
    how many they are."""
    budget, memory, value = labels.budget, labels.memory, labels.value
    keys = _keys(labels.counts, size)
    by_key = np.argsort(keys, kind="mergesort")
    order = np.empty(size, dtype=np.int64)
    kept = start = 0
    while start < size:
        end = start
        while end < size and keys[by_key[end]] == keys[by_key[start]]:
            end += 1
        for one in by_key[start:end]:
            beaten = False
            for other in by_key[start:end]:
                if (
                    one != other
                    and value[other] >= value[one]
                    and budget[other] >= budget[one]
                    and memory[other] <= memory[one]
                    and (
                        value[other] > value[one]
                        or budget[other] > budget[one]
                        or memory[other] < memory[one]
                        or other < one  # of equals the first stays
                    )
                ):
                    beaten = True
                    break
            if not beaten:
                order[kept] = one
                kept += 1
        start = end
    order = order[:kept]
    if kept > most:
        rank = np.empty(kept, dtype=np.float64)
        for place in range(kept):
            left = min(budget[order[place]], TIE_TOKENS)
            rank[place] = -value[order[place]] - TIE_VALUE * left
        order = order[np.argsort(rank, kind="mergesort")[:most]]
        kept = most
    budget[:kept], memory[:kept], value[:kept] = budget[order], memory[order], value[order]
    labels.chosen[:kept] = labels.chosen[order]
    labels.seats[:kept] = labels.seats[order]
    labels.counts[:kept] = labels.counts[order]
    return kept


@jit
def _after_prompt(
    budget: float,
    prefill: float,
    deadline_s: float,
    counts: Ints,
    tiers: Floats2D,
    engine: Engine,
) -> float:
    """Budget that is left when a prompt is done, the step that ends at its deadline paid for."""
    left = budget - prefill
    if 0.0 < deadline_s < np.inf:
        left -= cut_tokens(left, counts, tiers, engine)
    return left


@jit
def _serve(
    labels: Labels,
    size: int,
    requests: Requests,
    i: int,
    bit: int,
    floor: float,
    tiers: Floats2D,
    engine: Engine,
    free_blocks: float,
    free_seats: int,
) -> int:
    """Serve request ``i`` in each of ``size`` rows: the transition; how many rows there then are.

    A promised one (``bit`` 0) changes a row, or drops it where it would be late because of new
    ones. A new one gets rows of its own beside them.
    """
    prefill, until_s, tier = requests.prefill[i], requests.deadline_s[i], requests.tier[i]
    end = size if bit else 0
    for label in range(size):
        left = _after_prompt(
            labels.budget[label], prefill, until_s, labels.counts[label], tiers, engine
        )
        late = until_s < np.inf and left < floor
        if bit:
            if (
                late
                or labels.memory[label] + requests.blocks[i] > free_blocks + EPS
                or labels.seats[label] + 1 > free_seats
            ):
                continue
        elif late and labels.chosen[label] != 0:
            continue
        _copy(labels, label, end)
        labels.budget[end] = left
        labels.counts[end, tier] += 1
        if bit:
            if not is_sustainable(labels.counts[end], tiers, engine):
                continue
            labels.memory[end] += requests.blocks[i]
            labels.value[end] += requests.values[i]
            labels.chosen[end] |= bit
            labels.seats[end] += 1
        end += 1
    return end


@jit
def best_set(
    requests: Requests,
    decoding: Ints,
    tiers: Floats2D,
    engine: Engine,
    free_blocks: float,
    free_seats: int,
    most: int,
) -> int:
    """Bit set of the new requests (numbered in deadline order) that are admitted.

    Args:
        requests: the promised ones and the new ones.
        decoding: (L,) promised requests that decode, by tier.
        tiers: (2, L) TPOTs and weights.
        engine: what a step holds.
        free_blocks: KV blocks for new requests.
        free_seats: how many new requests may run.
        most: labels that a stage keeps.
    """
    rows = 2 * most + 2
    labels = Labels(
        np.zeros(rows),
        np.zeros(rows),
        np.zeros(rows),
        np.zeros(rows, dtype=np.int64),
        np.zeros(rows, dtype=np.int64),
        np.zeros((rows, len(decoding)), dtype=np.int64),
    )
    labels.counts[0, :] = decoding
    size = 1
    if decode_rate(decoding, tiers) > 0.0:
        # Running decodes are due at times of their own: the first step is cut to meet them.
        labels.budget[0] = -cut_tokens(0.0, decoding, tiers, engine)
    promised_budget, promised_counts = labels.budget[0], decoding.copy()
    now_s, number = 0.0, 0
    for i in range(len(requests.deadline_s)):
        until_s, prefill = requests.deadline_s[i], requests.prefill[i]
        tier, is_new = requests.tier[i], not requests.forced[i]
        if until_s < np.inf:
            for label in range(size):
                labels.budget[label] += prefill_budget(
                    now_s, until_s, labels.counts[label], tiers, engine
                )
            promised_budget += prefill_budget(now_s, until_s, promised_counts, tiers, engine)
            now_s = until_s
        if not is_new:
            promised_budget = _after_prompt(
                promised_budget, prefill, until_s, promised_counts, tiers, engine
            )
            promised_counts[tier] += 1
        # Promises that are broken already forbid only what makes it worse.
        floor = min(0.0, promised_budget) - EPS
        bit = 1 << number if is_new else 0
        size = _serve(labels, size, requests, i, bit, floor, tiers, engine, free_blocks, free_seats)
        if is_new:
            number += 1
            size = _prune(labels, size, most)
    best = 0
    for label in range(1, size):
        if labels.value[label] > labels.value[best] or (
            labels.value[label] == labels.value[best] and labels.budget[label] > labels.budget[best]
        ):
            best = label
    return int(labels.chosen[best])


@jit
def tiers_of_requests(tpot_s: Floats, tpots: Floats) -> Ints:
    """(N,) tiers of requests by their TPOT: `core.admission.tiers.tier_of`."""
    tier = np.empty(len(tpot_s), dtype=np.int64)
    for i in range(len(tpot_s)):
        tier[i] = max(np.searchsorted(tpots, tpot_s[i], side="right") - 1, 0)
    return tier


@jit
def decode_costs(
    tier: Ints,
    context: Floats,
    tpots: Floats,
    decoding: Ints,
    decoding_context: float,
    tokens_in: float,
    kv_price: float,
) -> Floats:
    """(2, L) TPOTs and weights: what a decode token of a tier costs, with the reading of its KV.

    A step reads the KV of the requests that decode in it, not of all that run. So the reading is
    charged to the token: a request that draws a token every other step pays every other.

    Args:
        tier: (N,) of the requests before their first token.
        context: (N,) KV tokens that they will read.
        tpots: (L,) TPOTs of the tiers.
        decoding: (L,) requests that decode.
        decoding_context: KV tokens that those read in one step, together.
        tokens_in: tokens that a step verifies for a request.
        kv_price: tokens that reading one token's KV costs.
    """
    costs = np.empty((2, len(tpots)))
    each = decoding_context / max(decoding.sum(), 1)
    for t in range(len(tpots)):
        total, count = 0.0, 0
        for i in range(len(tier)):
            if tier[i] == t:
                total += context[i]
                count += 1
        total += decoding[t] * each
        count += decoding[t]
        costs[TPOT, t] = tpots[t]
        costs[WEIGHT, t] = tokens_in + kv_price * total / max(count, 1)
    return costs


@jit
def choose(
    table: Floats2D,
    tpots: Floats,
    decoding: Ints,
    decoding_context: float,
    tokens_in: float,
    kv_price: float,
    engine: Engine,
    free_blocks: float,
    free_seats: int,
    most: int,
) -> int:
    """`best_set` of requests in a table.

    Args:
        table: (7, N), in deadline order: seconds to the deadline, prefill tokens, TPOT, blocks,
            value, context tokens, 1 where it is promised already; see `Requests`.
        tpots, decoding, decoding_context, tokens_in, kv_price: as `decode_costs` takes them.
        engine, free_blocks, free_seats, most: as `best_set` takes them.
    """
    tier = tiers_of_requests(table[2], tpots)
    costs = decode_costs(tier, table[5], tpots, decoding, decoding_context, tokens_in, kv_price)
    until_s = np.maximum(table[0], 0.0)
    requests = Requests(until_s, table[1], tier, table[3], table[4], table[6] > 0.0)
    return best_set(requests, decoding, costs, engine, free_blocks, free_seats, most)
