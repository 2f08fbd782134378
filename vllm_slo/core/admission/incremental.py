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
from vllm_slo.core.admission.judgement import TierLoad, judge_one, load_in_tiers, prices
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


PROMISED: Final = Verdict(True)


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
        self._factor = speculated.tokens_out
        if self._factor != 1.0:
            committed = [replace(d, tpot_s=d.tpot_s * self._factor) for d in committed]
            decoding = {tpot_s * self._factor: n for tpot_s, n in decoding.items()}
        ranked = sorted(
            (d.deadline_s, d.request_id, d.prefill_tokens, d.tpot_s, d.context_tokens)
            for d in committed
        )
        columns = list(zip(*ranked, strict=True))
        self._capacity = capacity
        self._pending = np.array(columns[:1] + columns[2:], dtype=np.float64).reshape(4, -1)
        self._decoding = np.array([*decoding.keys(), *decoding.values()], np.float64).reshape(2, -1)
        self._tpots = {*decoding, *(row[3] for row in ranked)}
        self._context = float(decoding_context)
        engine = engine_of(model, capacity)
        self._prices = prices(
            engine, speculated.tokens_in, kv_per_token(model, int(engine.most_tokens))
        )
        self._by_tpot: dict[float, tuple[int, TierLoad]] = {}

    def judge(self, demand: Demand, now_s: float) -> Verdict:
        """Whether ``demand`` can be promised beside the committed load, from ``now_s`` on."""
        return self.judge_line(
            now_s,
            demand.deadline_s,
            demand.prefill_tokens,
            demand.tpot_s,
            demand.blocks,
            demand.context_tokens,
        )

    def judge_line(
        self,
        now_s: float,
        deadline_s: float,
        prefill_tokens: int,
        tpot_s: float,
        blocks: int,
        context_tokens: int,
    ) -> Verdict:
        """`judge` of a `Demand` with these values, for those who judge many."""
        capacity = self._capacity
        if blocks > capacity.blocks + EPS:
            return Verdict(False, "memory", max(capacity.finish_interval_s, 0.0))
        if capacity.seats < 1:
            return Verdict(False, "seats", max(capacity.finish_interval_s, 0.0))
        tier, load = self._by_tpot.get(tpot_s) or self._prepare(tpot_s)
        promised, sustainable, after_s = judge_one(
            now_s,
            load.pending,
            load.tiers,
            self._prices,
            deadline_s,
            float(prefill_tokens),
            tier,
            float(context_tokens),
        )
        if promised:
            return PROMISED
        reason = "prefill" if sustainable else "decode"
        return Verdict(False, reason, after_s or max(capacity.finish_interval_s, 0.0))

    def _prepare(self, tpot_s: float) -> tuple[int, TierLoad]:
        """The tier of a request with this TPOT, and the committed load in such tiers; kept."""
        slowed_s = tpot_s * self._factor
        tpots = tiers_of([*self._tpots, slowed_s])
        load = load_in_tiers(self._pending, np.array(tpots), self._decoding, self._context)
        prepared = tier_of(slowed_s, tpots), load
        if len(self._by_tpot) < MAX_PREPARED:
            self._by_tpot[tpot_s] = prepared
        return prepared
