# SPDX-License-Identifier: Apache-2.0
"""TPOTs in tiers, and what decode tokens cost: the coordinates of the dynamic program."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from vllm_slo.core.step_time.model import StepTimeModel

MAX_TIERS: Final = 5
"""Tiers of one problem. Each is a dimension of the table, so the labels that none beats multiply
with it. TPOTs beyond that share the tier of a tighter one, which is safe and admits less."""
ROUNDING: Final = 1e-12
"""Of a TPOT: so much below a tier's edge is on it."""


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
        if tpot >= merged[-1] * ratio * (1 - ROUNDING) and len(merged) < room:
            merged.append(tpot)
    return merged + ([math.inf] if len(finite) < len(distinct) else [])


def tier_of(tpot_s: float, tiers: Sequence[float]) -> int:
    """The loosest of the ascending ``tiers`` that is not looser than ``tpot_s``."""
    return max(bisect_right(tiers, tpot_s) - 1, 0)


def kv_per_token(model: StepTimeModel, limit: int) -> float:
    """What reading one token's KV costs, in tokens to compute."""
    slope = max(model.terms[0][0], model.terms[1][0]) or model.predict_s(limit) / limit
    return model.kv_s / slope
