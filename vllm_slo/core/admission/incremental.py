# SPDX-License-Identifier: Apache-2.0
"""One request after another, each judged alone beside what is promised: admission for routing.

The program is `admission.judge_one`; what does not change from one request to the next is prepared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from vllm_slo.core.admission.program import (
    EPS,
    ONE_OR_NONE,
    ONE_SEAT,
    PLAIN,
    Capacity,
    Floats,
    Ints,
    Speculated,
    engine_array,
    judge_one,
    kv_per_token,
    tier_of,
    tiers_of,
)
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand

Tiers: TypeAlias = tuple[Ints, Floats, Ints, Floats, Ints]
"""(tier of each committed request, TPOTs, decoding, KV tokens, requests by tier)."""

MAX_KNOWN_TPOTS: Final = 256


class Verdict(NamedTuple):
    """Whether one request can be promised; if not, what binds and when to ask again."""

    promised: bool
    reason: str | None = None
    retry_after_s: float = 0.0


class IncrementalAdmission:
    """What is promised already, prepared so that one request after another is judged quickly.

    ``judge`` says what `plan_admission` would say of that request alone.

    Args:
        committed, decoding, model, capacity, decoding_context, speculated: as `plan_admission`
            takes them.
    """

    def __init__(
        self,
        committed: Sequence[Demand],
        decoding: Mapping[float, int],
        model: StepTimeModel,
        capacity: Capacity,
        *,
        decoding_context: int = 0,
        speculated: Speculated = PLAIN,
    ) -> None:
        self._factor, self._tokens_in = speculated.tokens_out, speculated.tokens_in
        if self._factor != 1.0:
            committed = [replace(d, tpot_s=d.tpot_s * self._factor) for d in committed]
            decoding = {tpot_s * self._factor: n for tpot_s, n in decoding.items()}
        ranked = sorted(committed, key=lambda d: (d.deadline_s, d.request_id))
        self._capacity = capacity
        self._committed = ranked
        self._running = dict(decoding)
        self._context = decoding_context
        self._deadline = np.array([d.deadline_s for d in ranked], dtype=np.float64)
        self._prefill = np.array([d.prefill_tokens for d in ranked], dtype=np.float64)
        self._engine = engine_array(model, capacity)
        self._kv_per_token = kv_per_token(model, int(self._engine[4]))
        self._by_tpot: dict[float, tuple[int, Tiers]] = {}

    def judge(self, demand: Demand, now_s: float) -> Verdict:
        """Whether ``demand`` can be promised beside everything that is, from ``now_s`` on."""
        capacity, wait_s = self._capacity, max(self._capacity.finish_interval_s, 0.0)
        if demand.blocks > capacity.blocks + EPS:
            return Verdict(False, "memory", wait_s)
        if capacity.seats < 1:
            return Verdict(False, "seats", wait_s)
        tier, arrays = self._by_tpot.get(demand.tpot_s) or self.prepare(demand.tpot_s)
        said = judge_one(
            now_s,
            self._deadline,
            self._prefill,
            *arrays,
            self._engine,
            self._kv_per_token,
            self._tokens_in,
            demand.deadline_s,
            float(demand.prefill_tokens),
            tier,
            float(demand.context_tokens),
            ONE_SEAT,
            ONE_OR_NONE,
        )
        if said != said:  # NaN
            return Verdict(True)
        if said < 0.0:
            return Verdict(False, "decode", wait_s)
        return Verdict(False, "prefill", said or wait_s)

    def prepare(self, tpot_s: float) -> tuple[int, Tiers]:
        """Be ready for requests of this TPOT; (its tier, the arrays that depend on the tiers)."""
        slowed_s = tpot_s * self._factor
        tiers = tiers_of([*(d.tpot_s for d in self._committed), *self._running, slowed_s])
        places = np.array([tier_of(d.tpot_s, tiers) for d in self._committed], dtype=np.int64)
        decoding = np.zeros(len(tiers), dtype=np.int64)
        for tpot, count in self._running.items():
            decoding[tier_of(tpot, tiers)] += count
        each = self._context / max(int(decoding.sum()), 1)
        contexts = np.array(decoding * each, dtype=np.float64)
        counts: Ints = decoding.copy()
        for place, demand in zip(places, self._committed, strict=True):
            contexts[place] += demand.context_tokens
            counts[place] += 1
        tpots = np.array(tiers, dtype=np.float64)
        known = (tier_of(slowed_s, tiers), (places, tpots, decoding, contexts, counts))
        if len(self._by_tpot) < MAX_KNOWN_TPOTS:
            self._by_tpot[tpot_s] = known
        return known
