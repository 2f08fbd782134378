# SPDX-License-Identifier: Apache-2.0
"""Which new requests can be promised what they ask: SLOs-Serve's dynamic program.

Source: SLOs-Serve, section 3.2.1 (the transition), section 3.2.2 (the token budget line) and
appendix C (the table pb[i, m, n_1..n_L] of the largest prefill budget that is left).

Each request is a line (figure 5): its prefill is due at its deadline, and from then on it draws
decode tokens at its TPOT. A set of requests can be served when, at every prefill deadline, what
they have drawn by then stays below the tokens the engine can have processed by then; when the
decode rate that remains at the end can be sustained; and when their KV memory and seats suffice.
A deadline that leaves less than a step to spare is charged for the step that must be cut there,
and so is the beginning, where running decodes are due at times of their own.
Promises already given are forced in. Of all such sets the one of greatest value is chosen.

The table is kept as labels (pb, memory, n_1..n_L, value): for one vector n only labels that no
other beats in value, budget and memory survive, so memory needs no discretisation and values need
not be equal. The result is exact while a stage holds at most ``MAX_LABELS`` labels; beyond that the
best by value, then by budget, are kept.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.jit import jit
from vllm_slo.core.step_time.budget import Lines, whole_tokens_within
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import AdmissionPlan, Demand

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

MAX_LABELS = 256
ONE_SEAT = 1
ONE_OR_NONE = 2
"""Labels when one request is judged: it is admitted or it is not."""
MAX_NEW = 63
MAX_TIERS = 5
SHORTEST_STEP_S = 1e-9
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine has to give.

    Attributes:
        blocks: KV-cache blocks not yet spoken for by promises (held or still to come).
        seats: requests that may run at once, less those already promised.
        max_step_tokens: most tokens of one step.
        token_share: share of every step's tokens that promises may use, 0 < share <= 1.
        finish_interval_s: observed seconds between two finished requests, for ``retry_after_s``.
    """

    blocks: float
    seats: int
    max_step_tokens: int
    token_share: float = 1.0
    finish_interval_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Speculated:
    """Decoding with trees, as measured.

    Attributes:
        tokens_out: tokens that a step yields for a request, on the safe side; at least 1.
        tokens_in: tokens that a step verifies for it, its root and its nodes.
    """

    tokens_out: float
    tokens_in: float


PLAIN = Speculated(1.0, 1.0)


def tokens_of_step(asked: float, speculated: Speculated) -> float:
    """Tokens to verify in a step for a request that is to get ``asked`` tokens from it; fewer than
    one: it takes part in some steps only."""
    if asked <= 1.0 or speculated.tokens_out <= 1.0:
        return asked
    share = (asked - 1.0) / (speculated.tokens_out - 1.0)
    return 1.0 + (speculated.tokens_in - 1.0) * share


@jit
def _tokens_in(time_s: float, engine: Floats) -> float:
    """Tokens of one step of ``time_s`` seconds that promises may use."""
    lines = Lines(engine[0], 0.0, engine[1], engine[2], 0.0, engine[3])
    return float(whole_tokens_within(lines, time_s, engine[4], 0.0) * engine[5])


@jit
def _step_of(counts: Ints, tpots: Floats, engine: Floats) -> float:
    """Longest step that keeps the tightest TPOT among ``counts``, or the fullest step's time."""
    step = max(
        engine[0] * engine[4] + engine[1],
        engine[2] * engine[4] + engine[3],
    )
    for tier in range(len(counts)):
        if counts[tier] > 0:
            step = min(step, tpots[tier])
    return float(max(step, SHORTEST_STEP_S))


@jit
def _processed_by(time_s: float, step_s: float, engine: Floats) -> float:
    """Tokens processed from now until ``time_s`` in steps of at most ``step_s`` seconds."""
    whole = math.floor(time_s / step_s + 1e-9)
    rest = max(time_s - whole * step_s, 0.0)
    return whole * _tokens_in(step_s, engine) + _tokens_in(rest, engine)


@jit
def _decode_rate(counts: Ints, tpots: Floats, weights: Floats) -> float:
    """Tokens per second that decoding takes out of the budget."""
    rate = 0.0
    for tier in range(len(counts)):
        if counts[tier] > 0:
            rate += counts[tier] * weights[tier] / tpots[tier]
    return rate


@jit
def _gain(
    since_s: float, until_s: float, counts: Ints, tpots: Floats, weights: Floats, engine: Floats
) -> float:
    """Prefill budget generated between two instants with ``counts`` decoding: equation (3)."""
    step = _step_of(counts, tpots, engine)
    tokens = _processed_by(until_s, step, engine) - _processed_by(since_s, step, engine)
    return tokens - _decode_rate(counts, tpots, weights) * (until_s - since_s)


@jit
def _sustainable(counts: Ints, tpots: Floats, weights: Floats, engine: Floats) -> bool:
    """Whether decoding with ``counts`` can go on for ever."""
    step = _step_of(counts, tpots, engine)
    return _tokens_in(step, engine) >= _decode_rate(counts, tpots, weights) * step - EPS


@jit
def _cut(spare: float, counts: Ints, tpots: Floats, weights: Floats, engine: Floats) -> float:
    """Tokens lost by a step that must end at a given instant, with ``spare`` tokens in hand.

    Cutting one step in two pays its fixed cost twice. Whoever has a whole step to spare need not.
    """
    step = _step_of(counts, tpots, engine)
    whole = _tokens_in(step, engine)
    if spare >= whole:
        return 0.0
    return max(whole - 2.0 * _tokens_in(0.5 * step, engine), 0.0)


@jit
def _prune(
    order: Ints, budget: Floats, memory: Floats, value: Floats, counts: Ints, size: int, most: int
) -> int:
    """Indices of the labels worth keeping go to ``order[:result]``."""
    tiers = counts.shape[1]
    keys = np.zeros(size, dtype=np.int64)
    for label in range(size):
        for tier in range(tiers):
            keys[label] = keys[label] * 4099 + counts[label, tier]
    by_key = np.argsort(keys, kind="mergesort")
    kept = 0
    start = 0
    while start < size:
        end = start
        while end < size and keys[by_key[end]] == keys[by_key[start]]:
            end += 1
        for a in range(start, end):
            one = by_key[a]
            beaten = False
            for b in range(start, end):
                other = by_key[b]
                if (
                    one != other
                    and value[other] >= value[one]
                    and budget[other] >= budget[one]
                    and memory[other] <= memory[one]
                    and (
                        value[other] > value[one]
                        or budget[other] > budget[one]
                        or memory[other] < memory[one]
                        or other < one
                    )
                ):
                    beaten = True
                    break
            if not beaten:
                order[kept] = one
                kept += 1
        start = end
    if kept > most:
        rank = np.empty(kept, dtype=np.float64)
        for place in range(kept):
            rank[place] = -value[order[place]] - 1e-12 * min(budget[order[place]], 1e9)
        best = np.argsort(rank, kind="mergesort")[:most]
        chosen = order[:kept].copy()
        for place in range(most):
            order[place] = chosen[best[place]]
        kept = most
    return kept


@jit
def solve(  # noqa: C901  # one compiled loop: numba would not see through objects
    deadline: Floats,
    prefill: Floats,
    tier: Ints,
    blocks: Floats,
    values: Floats,
    forced: Bools,
    tpots: Floats,
    weights: Floats,
    decoding: Ints,
    engine: Floats,
    free_blocks: float,
    free_seats: int,
    most: int,
) -> int:
    """Bit set of the new requests (numbered in deadline order) that are admitted.

    Shapes: the first six are (N,) in deadline order; ``tpots`` and ``weights`` and ``decoding``
    are (L,). ``engine`` is (k1, b1, k2, b2, max_tokens, share).
    """
    tiers = len(tpots)
    room = 2 * most + 2
    budget = np.zeros(room)
    memory = np.zeros(room)
    value = np.zeros(room)
    chosen = np.zeros(room, dtype=np.int64)
    seats = np.zeros(room, dtype=np.int64)
    counts = np.zeros((room, tiers), dtype=np.int64)
    counts[0, :] = decoding
    size = 1
    if _decode_rate(decoding, tpots, weights) > 0.0:
        # Running decodes are due at times of their own: the first step is cut to meet them.
        budget[0] = -_cut(0.0, decoding, tpots, weights, engine)
    base_budget = budget[0]
    base_counts = decoding.copy()
    order = np.zeros(room, dtype=np.int64)
    now = 0.0
    number = 0
    for i in range(len(deadline)):
        until = deadline[i]
        if until < np.inf:
            for label in range(size):
                budget[label] += _gain(now, until, counts[label], tpots, weights, engine)
            base_budget += _gain(now, until, base_counts, tpots, weights, engine)
            now = until
        if forced[i]:
            if 0.0 < until < np.inf:
                base_budget -= prefill[i]
                base_budget -= _cut(base_budget, base_counts, tpots, weights, engine)
            else:
                base_budget -= prefill[i]
            base_counts[tier[i]] += 1
            floor = min(0.0, base_budget) - EPS
            kept = 0
            for label in range(size):
                left = budget[label] - prefill[i]
                if 0.0 < until < np.inf:
                    left -= _cut(left, counts[label], tpots, weights, engine)
                if chosen[label] == 0 or until == np.inf or left >= floor:
                    budget[kept] = left
                    memory[kept] = memory[label]
                    value[kept] = value[label]
                    chosen[kept] = chosen[label]
                    seats[kept] = seats[label]
                    counts[kept] = counts[label]
                    counts[kept, tier[i]] += 1
                    kept += 1
            size = kept
            continue
        floor = min(0.0, base_budget) - EPS
        grown = size
        for label in range(size):
            left = budget[label] - prefill[i]
            if 0.0 < until < np.inf:
                left -= _cut(left, counts[label], tpots, weights, engine)
            if (
                (until < np.inf and left < floor)
                or memory[label] + blocks[i] > free_blocks + EPS
                or seats[label] + 1 > free_seats
            ):
                continue
            counts[grown] = counts[label]
            counts[grown, tier[i]] += 1
            if not _sustainable(counts[grown], tpots, weights, engine):
                continue
            budget[grown] = left
            memory[grown] = memory[label] + blocks[i]
            value[grown] = value[label] + values[i]
            chosen[grown] = chosen[label] | (1 << number)
            seats[grown] = seats[label] + 1
            grown += 1
        number += 1
        size = _prune(order, budget, memory, value, counts, grown, most)
        picked = order[:size].copy()
        budget[:size] = budget[picked]
        memory[:size] = memory[picked]
        value[:size] = value[picked]
        chosen[:size] = chosen[picked]
        seats[:size] = seats[picked]
        counts[:size] = counts[picked]
    best = 0
    for label in range(1, size):
        if value[label] > value[best] or (
            value[label] == value[best] and budget[label] > budget[best]
        ):
            best = label
    return int(chosen[best])


@jit
def prefill_wait(
    backlog: float, counts: Ints, tpots: Floats, weights: Floats, engine: Floats
) -> float:
    """Seconds until ``backlog`` tokens are computed beside ``counts`` decoding.

    Below 0: such decoding cannot be sustained at all; 0: nothing would be left for prompts.
    """
    if not _sustainable(counts, tpots, weights, engine):
        return -1.0
    rate = _gain(0.0, 1.0, counts, tpots, weights, engine)
    return backlog / rate if rate > 0.0 else 0.0


@jit
def judge_one(
    now_s: float,
    deadline: Floats,
    prefill: Floats,
    tier: Ints,
    tpots: Floats,
    decoding: Ints,
    contexts: Floats,
    counts: Ints,
    engine: Floats,
    kv_per_token: float,
    tokens_in: float,
    new_deadline: float,
    new_prefill: float,
    new_tier: int,
    new_context: float,
    free_seats: int,
    most: int,
) -> float:
    """`solve` for one new request, memory and seats apart: NaN if it is admitted.

    Otherwise `prefill_wait` of it. ``deadline`` (N,) is absolute and ascending; ``counts`` and
    ``contexts`` (L,) are the requests of a tier, committed and decoding, and their KV tokens.
    ``tokens_in`` as `Speculated` has it. ``free_seats`` and ``most`` are `ONE_SEAT` and
    `ONE_OR_NONE`: numba would compile `solve` once more for numbers that are written here.
    """
    size = len(deadline)
    place = np.searchsorted(deadline, new_deadline, side="right")
    due = np.empty(size + 1)
    work = np.empty(size + 1)
    tiers = np.empty(size + 1, dtype=np.int64)
    forced = np.ones(size + 1, dtype=np.bool_)
    forced[place] = False
    for i in range(size + 1):
        if i == place:
            due[i], work[i], tiers[i] = new_deadline, new_prefill, new_tier
        else:
            j = i if i < place else i - 1
            due[i], work[i], tiers[i] = deadline[j], prefill[j], tier[j]
        due[i] = max(due[i] - now_s, 0.0)
    weights = np.empty(len(tpots))
    everyone = counts.copy()
    everyone[new_tier] += 1
    for t in range(len(tpots)):
        read = contexts[t] + (new_context if t == new_tier else 0.0)
        weights[t] = tokens_in + kv_per_token * read / max(everyone[t], 1)
    nothing = np.zeros(size + 1)
    worth = np.ones(size + 1)
    if solve(
        due,
        work,
        tiers,
        nothing,
        worth,
        forced,
        tpots,
        weights,
        decoding,
        engine,
        0.0,
        free_seats,
        most,
    ):
        return np.nan
    return prefill_wait(work.sum(), everyone, tpots, weights, engine)


def tiers_of(tpots: Sequence[float]) -> list[float]:
    """At most ``MAX_TIERS`` TPOT values, each standing for those from itself up to the next."""
    distinct = sorted(set(tpots))
    if len(distinct) <= MAX_TIERS:
        return distinct
    finite = [tpot for tpot in distinct if tpot < math.inf]
    room = MAX_TIERS - (len(distinct) - len(finite))
    ratio = (finite[-1] / finite[0]) ** (1.0 / room)
    merged = [finite[0]]
    for tpot in finite:
        if tpot >= merged[-1] * ratio * (1 - 1e-12) and len(merged) < room:
            merged.append(tpot)
    return merged + ([math.inf] if len(finite) < len(distinct) else [])


def tier_of(tpot_s: float, tiers: Sequence[float]) -> int:
    """The loosest of the ascending ``tiers`` that is not looser than ``tpot_s``."""
    return max(bisect_right(tiers, tpot_s) - 1, 0)


def work_tokens(model: StepTimeModel, tokens: int, context_tokens: int = 0) -> float:
    """Prefill work in tokens of a short prompt: attention makes the tokens of a long one dearer.

    Args:
        model: its ``pair_s`` prices a query-key pair.
        tokens: tokens to compute.
        context_tokens: tokens already computed.
    """
    slope = max(model.terms[0][0], model.terms[1][0])
    if model.pair_s == 0.0 or slope == 0.0:
        return float(tokens)
    return tokens * (1.0 + model.pair_s * (context_tokens + 0.5 * tokens) / slope)


def kv_per_token(model: StepTimeModel, limit: int) -> float:
    """What reading one token's KV costs, in tokens to compute."""
    slope = max(model.terms[0][0], model.terms[1][0]) or model.predict_s(limit) / limit
    return model.kv_s / slope


def engine_array(model: StepTimeModel, capacity: Capacity) -> Floats:
    """(6,) what `solve` takes for the engine: (k1, b1, k2, b2, max_tokens, share)."""
    (k1, _, b1), (k2, _, b2) = model.terms
    limit = min(model.max_tokens, capacity.max_step_tokens)
    return np.array([k1, b1, k2, b2, limit, capacity.token_share])


class _Instance:
    """One problem in arrays, in deadline order; running promises before new requests on a tie."""

    def __init__(
        self,
        now_s: float,
        new: Sequence[Demand],
        committed: Sequence[Demand],
        decoding: Mapping[float, int],
        decoding_context: int,
        model: StepTimeModel,
        capacity: Capacity,
        tokens_in: float = 1.0,
    ) -> None:
        ranked = sorted(
            [(d.deadline_s, 0, d.request_id, d) for d in committed]
            + [(d.deadline_s, 1, d.request_id, d) for d in new],
            key=lambda row: row[:3],
        )
        demands = [row[3] for row in ranked]
        self.new = [row[3] for row in ranked if row[1]]
        self.tiers = tiers_of([d.tpot_s for d in demands] + list(decoding)) or [math.inf]
        self.tpots = np.array(self.tiers)
        self.deadline = np.array([max(d.deadline_s - now_s, 0.0) for d in demands])
        self.prefill = np.array([float(d.prefill_tokens) for d in demands])
        self.tier = np.array([tier_of(d.tpot_s, self.tiers) for d in demands], dtype=np.int64)
        self.blocks = np.array([float(d.blocks) for d in demands])
        self.values = np.array([d.value for d in demands])
        self.forced = np.array([row[1] == 0 for row in ranked], dtype=np.bool_)
        self.decoding = np.zeros(len(self.tiers), dtype=np.int64)
        for tpot, count in decoding.items():
            self.decoding[tier_of(tpot, self.tiers)] += count
        self.engine = engine_array(model, capacity)
        reading = self._reading(demands, decoding_context, model, int(self.engine[4]))
        self.weights = tokens_in + reading
        self.capacity = capacity

    def _reading(
        self, demands: Sequence[Demand], decoding_context: int, model: StepTimeModel, limit: int
    ) -> Floats:
        """(L,) what a decode step of a tier costs besides its tokens: its KV is read.

        A step reads the KV of those that decode in it, not of all that run: so the reading is
        charged to the token, and a request that draws a token every other step pays every other.
        """
        total = np.zeros(len(self.tiers))
        count = np.zeros(len(self.tiers))
        for place, demand in zip(self.tier, demands, strict=True):
            total[place] += demand.context_tokens
            count[place] += 1
        total += self.decoding * (decoding_context / max(int(self.decoding.sum()), 1))
        count += self.decoding
        return np.asarray(kv_per_token(model, limit) * total / np.maximum(count, 1))

    def solve(self) -> list[Demand]:
        """The admitted requests in deadline order."""
        if not self.new:
            return []
        bits = solve(
            self.deadline,
            self.prefill,
            self.tier,
            self.blocks,
            self.values,
            self.forced,
            self.tpots,
            self.weights,
            self.decoding,
            self.engine,
            float(self.capacity.blocks),
            self.capacity.seats,
            MAX_LABELS,
        )
        return [demand for number, demand in enumerate(self.new) if bits >> number & 1]

    def refusals(self, admitted: Sequence[Demand]) -> dict[str, tuple[str, float]]:
        """Of each new request beside those ``admitted``: which resource binds for it, and in how
        many seconds to ask again."""
        if len(admitted) == len(self.new):
            return {}
        capacity, wait_s = self.capacity, max(self.capacity.finish_interval_s, 0.0)
        spare_blocks = capacity.blocks - sum(d.blocks for d in admitted)
        tiers = np.append(
            self.tier[self.forced],
            np.array([tier_of(d.tpot_s, self.tiers) for d in admitted], dtype=np.int64),
        )
        counts = self.decoding + np.bincount(tiers, minlength=len(self.tiers))
        backlog = float(self.prefill[self.forced].sum()) + sum(d.prefill_tokens for d in admitted)
        taken = {d.request_id for d in admitted}
        found: dict[str, tuple[str, float]] = {}
        for demand in self.new:
            if demand.request_id in taken:
                continue
            if demand.blocks > spare_blocks:
                found[demand.request_id] = "memory", wait_s
            elif len(admitted) + 1 > capacity.seats:
                found[demand.request_id] = "seats", wait_s
            else:
                beside = counts.copy()
                beside[tier_of(demand.tpot_s, self.tiers)] += 1
                after_s = prefill_wait(
                    backlog + demand.prefill_tokens, beside, self.tpots, self.weights, self.engine
                )
                reason = "decode" if after_s < 0.0 else "prefill"
                found[demand.request_id] = reason, after_s if after_s > 0.0 else wait_s
        return found


def plan_admission(
    now_s: float,
    new: Sequence[Demand],
    committed: Sequence[Demand],
    decoding: Mapping[float, int],
    model: StepTimeModel,
    capacity: Capacity,
    *,
    decoding_context: int = 0,
    speculated: Speculated = PLAIN,
) -> AdmissionPlan:
    """Choose the new requests of greatest value whose every objective can be kept.

    Args:
        now_s: when the next step can begin.
        new: requests that ask for a promise; the ``MAX_NEW`` earliest deadlines are considered.
        committed: promised requests whose first token is still to come; they are forced in.
        decoding: how many promised requests decode, by their TPOT in seconds.
        model: step times, with the margin that promises are to keep.
        capacity: memory, seats and step size that are left.
        decoding_context: KV tokens the decoding requests read in one step, together.
        speculated: what decoding is like; ``model`` then includes drafting.

    Returns:
        The plan. Requests beyond ``MAX_NEW`` are in neither list: they are to be asked again.

    Raises:
        ValueError: two demands share an id.
    """
    considered = sorted(new, key=lambda d: (d.deadline_s, d.request_id))[:MAX_NEW]
    ids = [d.request_id for d in (*considered, *committed)]
    if len(set(ids)) != len(ids):
        raise ValueError("plan_admission: two demands share one request id")
    if speculated.tokens_out != 1.0:
        # Who gets several tokens from a step needs one only so much less often.
        committed = [_slower(demand, speculated.tokens_out) for demand in committed]
        considered = [_slower(demand, speculated.tokens_out) for demand in considered]
        decoding = {tpot * speculated.tokens_out: n for tpot, n in decoding.items()}
    instance = _Instance(
        now_s,
        considered,
        committed,
        decoding,
        decoding_context,
        model,
        capacity,
        speculated.tokens_in,
    )
    admitted = instance.solve()
    refusals = instance.refusals(admitted)
    return AdmissionPlan(
        tuple(demand.request_id for demand in admitted),
        {name: reason for name, (reason, _) in refusals.items()},
        {name: after_s for name, (_, after_s) in refusals.items()},
    )


def _slower(demand: Demand, factor: float) -> Demand:
    return replace(demand, tpot_s=demand.tpot_s * factor)


def can_start_early(
    now_s: float,
    tpot_s: float,
    pending: Sequence[Demand],
    decoding: Mapping[float, int],
    model: StepTimeModel,
    capacity: Capacity,
    *,
    decoding_context: int = 0,
    speculated: Speculated = PLAIN,
) -> bool:
    """Whether a promised request may begin to decode now, before its deadline.

    Its decode tokens would come out of the budget of the ``pending`` promises, so the first token
    of a request whose early start they cannot afford is held back (figure 5: a line grows from its
    deadline, not from the moment the prefill happens to end).
    """
    if tpot_s == math.inf or not pending:
        return True
    starter = Demand("", now_s, 0, tpot_s, 0)
    plan = plan_admission(
        now_s,
        [starter],
        pending,
        decoding,
        model,
        Capacity(0.0, 1, capacity.max_step_tokens, capacity.token_share),
        decoding_context=decoding_context,
        speculated=speculated,
    )
    return bool(plan.admitted)


def warm_up() -> None:
    """Compile everything that admission, quotes and routing call, before anybody waits for it.

    A request that is refused takes a way of its own through the program, and so does one that is
    judged alone; see `core.admission.incremental`. Takes tens of seconds on a slow core where numba
    finds nothing in its cache, and about a second else, most of which is the import of numba.
    """
    model = StepTimeModel(((0.0, 0.0, 0.01), (1e-4, 0.0, 0.005)))
    demands = [Demand(str(i), 1.0 + i, 10, 0.05, 1) for i in range(3)]
    never = Demand("n", 1e-9, 10**9, 0.05, 1)
    capacity = Capacity(10.0, 10, 128)
    plan_admission(
        0.0, [*demands, never], [Demand("c", 1.0, 10, 0.05, 1)], {0.1: 1}, model, capacity
    )
    moment, tier = np.ones(1), np.zeros(1, dtype=np.int64)
    judge_one(
        0.0,
        moment,
        moment,
        tier,
        moment,
        tier,
        moment,
        tier,
        engine_array(model, capacity),
        0.0,
        1.0,
        1.0,
        1.0,
        0,
        1.0,
        ONE_SEAT,
        ONE_OR_NONE,
    )
