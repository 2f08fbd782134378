# SPDX-License-Identifier: Apache-2.0
"""Which new requests can be promised what they ask: SLOs-Serve's dynamic program.

Source: SLOs-Serve, section 3.2.1 (the transition), section 3.2.2 (the token budget line) and
appendix C (the table pb[i, m, n_1..n_L] of the largest prefill budget that is left).

Each request is a line (figure 5): its prefill is due at its deadline, and from then on it draws
decode tokens at its TPOT. A set of requests can be served if three things hold. At every prefill
deadline they have drawn no more tokens than the engine can have processed by then. The decode rate
at the end can be sustained. Their KV memory and seats suffice.

A deadline that leaves less than a step to spare is charged for the step that must be cut there. So
is the beginning, where running decodes are due at times of their own. Promises already given are
forced in. Of all sets that can be served, the one of greatest value is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from vllm_slo.core.admission.budget_line import Engine, prefill_wait
from vllm_slo.core.admission.labels import choose, decode_costs, tiers_of_requests
from vllm_slo.core.admission.tiers import kv_per_token, tier_of, tiers_of
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import AdmissionPlan, Demand

MAX_LABELS: Final = 256
"""Labels of a stage: a limit of the time that a plan takes, some 0.3 ms for 16 new requests
(docs/benchmarks/admission_latency.md). With fewer, plans of many requests are no longer exact."""
MAX_NEW: Final = 63
"""New requests of one plan: a set of them is the bits of one signed 64-bit number."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine has to give.

    Attributes:
        blocks: KV-cache blocks that no promise holds or will need.
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
        tokens_out: tokens that a step yields for a request, a careful estimate; at least 1.
        tokens_in: tokens that a step verifies for it, its root and its nodes.
    """

    tokens_out: float
    tokens_in: float


PLAIN = Speculated(1.0, 1.0)


def tokens_of_step(asked: float, speculated: Speculated) -> float:
    """Tokens to verify in a step for a request that is to get ``asked`` tokens from it.

    Less than one means that it takes part in some steps only.
    """
    if asked <= 1.0 or speculated.tokens_out <= 1.0:
        return asked
    share = (asked - 1.0) / (speculated.tokens_out - 1.0)
    return 1.0 + (speculated.tokens_in - 1.0) * share


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


def chunks_delay_s(model: StepTimeModel, tokens: int, chunk_tokens: int, step_tokens: int) -> float:
    """Seconds by which a prompt takes longer if a step computes ``chunk_tokens`` of it at most.

    Other prompts fill the rest of each step, so every chunk takes as long as a full step.

    Args:
        model: predicts the time of a full step.
        tokens: tokens to compute.
        chunk_tokens: most of them in one step; 0: as many as a step holds.
        step_tokens: most tokens of one step.
    """
    if not 0 < chunk_tokens < min(tokens, step_tokens):
        return 0.0
    steps = math.ceil(tokens / chunk_tokens) - tokens / step_tokens
    return steps * model.predict_s(step_tokens)


def engine_of(model: StepTimeModel, capacity: Capacity) -> Engine:
    """What one step holds for promises."""
    most_tokens = min(model.max_tokens, capacity.max_step_tokens)
    return Engine(model.lines(), float(most_tokens), float(capacity.token_share))


class _Instance:
    """One problem, in deadline order; running promises before new requests on a tie."""

    def __init__(
        self,
        now_s: float,
        new: Sequence[Demand],
        committed: Sequence[Demand],
        decoding: Mapping[float, int],
        decoding_context: int,
        model: StepTimeModel,
        capacity: Capacity,
        tokens_in: float,
    ) -> None:
        ranked = sorted(
            [(d.deadline_s, 0, d.request_id, d) for d in committed]
            + [(d.deadline_s, 1, d.request_id, d) for d in new]
        )
        self.capacity = capacity
        self.new = [row[3] for row in ranked if row[1]]
        rows = [
            (
                *(d.deadline_s - now_s, d.prefill_tokens, d.tpot_s, d.blocks),
                *(d.value, d.context_tokens, not is_new),
            )
            for _, is_new, _, d in ranked
        ]
        self.table = np.array(rows, dtype=np.float64).T.copy()
        tpots = tiers_of([row[3].tpot_s for row in ranked] + list(decoding)) or [math.inf]
        running = [0] * len(tpots)
        for tpot_s, count in decoding.items():
            running[tier_of(tpot_s, tpots)] += count
        self.tpots = np.array(tpots)
        self.decoding = np.array(running, dtype=np.int64)
        self.engine = engine_of(model, capacity)
        price = kv_per_token(model, int(self.engine.most_tokens))
        self.load = self.tpots, self.decoding, float(decoding_context), tokens_in, price

    def solve(self) -> list[Demand]:
        """The admitted requests in deadline order."""
        if not self.new:
            return []
        capacity = self.capacity
        free = float(capacity.blocks), capacity.seats
        bits = choose(self.table, *self.load, self.engine, *free, MAX_LABELS)
        return [demand for number, demand in enumerate(self.new) if bits >> number & 1]

    def refusals(self, admitted: Sequence[Demand]) -> dict[str, tuple[str, float]]:
        """For each new request that is not ``admitted``: the resource that binds, and in how many
        seconds to ask again."""
        if len(admitted) == len(self.new):
            return {}
        capacity, wait_s = self.capacity, max(self.capacity.finish_interval_s, 0.0)
        spare_blocks = capacity.blocks - sum(d.blocks for d in admitted)
        _, prefill, tpot_s, _, _, context, forced = self.table
        tier, promised = tiers_of_requests(tpot_s, self.tpots), forced > 0.0
        costs = decode_costs(tier, context, *self.load)
        taken = {d.request_id for d in admitted}
        served = promised.copy()
        served[~promised] = [d.request_id in taken for d in self.new]
        counts = self.decoding + np.bincount(tier[served], minlength=len(self.tpots))
        backlog = float(prefill[promised].sum())
        backlog += sum(d.prefill_tokens for d in admitted)
        refused: dict[str, tuple[str, float]] = {}
        for demand, own in zip(self.new, tier[~promised], strict=True):
            if demand.request_id in taken:
                continue
            if demand.blocks > spare_blocks:
                refused[demand.request_id] = "memory", wait_s
            elif len(admitted) + 1 > capacity.seats:
                refused[demand.request_id] = "seats", wait_s
            else:
                beside = counts.copy()
                beside[own] += 1
                work = backlog + demand.prefill_tokens
                wait = prefill_wait(work, beside, costs, self.engine)
                reason = "prefill" if wait.sustainable else "decode"
                refused[demand.request_id] = reason, wait.seconds or wait_s
        return refused


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
        The plan. Requests beyond ``MAX_NEW`` are in neither list; ask again for them.

    Raises:
        ValueError: two demands share an id.
    """
    considered = sorted(new, key=lambda d: (d.deadline_s, d.request_id))[:MAX_NEW]
    ids = [d.request_id for d in (*considered, *committed)]
    if len(set(ids)) != len(ids):
        raise ValueError("plan_admission: two demands share one request id")
    if speculated.tokens_out != 1.0:
        # A request that gets several tokens from a step needs steps so much less often.
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

    Its decode tokens would come out of the budget of the ``pending`` promises. If that budget is
    too small, its first token is held back (figure 5: a line grows from its deadline, not from the
    moment at which the prefill ends).
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
