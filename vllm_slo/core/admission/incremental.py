# SPDX-License-Identifier: Apache-2.0
"""One request after another, each judged alone beside what is promised: admission for routing.

What does not change from one request to the next is prepared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from vllm_slo.core.admission.budget_line import EPS
from vllm_slo.core.admission.judgement import TierLoad, judge_one
from vllm_slo.core.admission.program import (
    PLAIN,
    Capacity,
    Speculated,
    engine_of,
)
from vllm_slo.core.admission.tiers import kv_per_token, tier_of, tiers_of
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand

MAX_PREPARED: Final = 256
"""TPOTs for which the committed load is kept in tiers: a limit of memory for clients that ask for a
new one each time. The load of a TPOT beyond them is prepared at every request."""


class Verdict(NamedTuple):
    """Whether one request can be promised; if not, what binds and when to ask again."""

    promised: bool
    reason: str | None = None
    retry_after_s: float = 0.0


class IncrementalAdmission:
    """The committed load, prepared so that one request after another is judged quickly.

    ``judge`` gives the verdict that `plan_admission` would give on that request alone.

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
        self._engine = engine_of(model, capacity)
        self._kv_price = kv_per_token(model, int(self._engine.most_tokens))
        self._by_tpot: dict[float, tuple[int, TierLoad]] = {}

    def judge(self, demand: Demand, now_s: float) -> Verdict:
        """Whether ``demand`` can be promised beside the committed load, from ``now_s`` on."""
        capacity, wait_s = self._capacity, max(self._capacity.finish_interval_s, 0.0)
        if demand.blocks > capacity.blocks + EPS:
            return Verdict(False, "memory", wait_s)
        if capacity.seats < 1:
            return Verdict(False, "seats", wait_s)
        tier, load = self._by_tpot.get(demand.tpot_s) or self.prepare(demand.tpot_s)
        promised, sustainable, after_s = judge_one(
            now_s,
            load,
            self._engine,
            tokens_in=self._tokens_in,
            kv_price=self._kv_price,
            deadline_s=demand.deadline_s,
            prefill=float(demand.prefill_tokens),
            tier=tier,
            context_tokens=float(demand.context_tokens),
        )
        if promised:
            return Verdict(True)
        return Verdict(False, "prefill" if sustainable else "decode", after_s or wait_s)

    def prepare(self, tpot_s: float) -> tuple[int, TierLoad]:
        """The tier of a request with this TPOT, and the committed load in such tiers; kept."""
        slowed_s = tpot_s * self._factor
        tpots = tiers_of([*(d.tpot_s for d in self._committed), *self._running, slowed_s])
        tier = np.array([tier_of(d.tpot_s, tpots) for d in self._committed], dtype=np.int64)
        decoding = np.zeros(len(tpots), dtype=np.int64)
        for running_s, count in self._running.items():
            decoding[tier_of(running_s, tpots)] += count
        each = self._context / max(int(decoding.sum()), 1)
        contexts = np.array(decoding * each, dtype=np.float64)
        counts = decoding.copy()
        for place, demand in zip(tier, self._committed, strict=True):
            contexts[place] += demand.context_tokens
            counts[place] += 1
        load = TierLoad(
            self._deadline,
            self._prefill,
            tier,
            np.array(tpots, dtype=np.float64),
            decoding,
            contexts,
            counts,
        )
        prepared = tier_of(slowed_s, tpots), load
        if len(self._by_tpot) < MAX_PREPARED:
            self._by_tpot[tpot_s] = prepared
        return prepared
