# SPDX-License-Identifier: Apache-2.0
"""What promises lacked of late, and what best effort then leaves them."""

from __future__ import annotations

from vllm_slo.core.batching.pressure import Pressure
from vllm_slo.core.types import INFINITY, BestEffortView


def test_pressure_is_forgotten() -> None:
    pressure = Pressure(10.0)
    assert pressure.prompt_step_s(0.0, 1.0, promises=True) == INFINITY
    assert pressure.blocks(0.0) == 0.0
    pressure.refused(100.0, ttft=False)
    assert not pressure.first_tokens_late(100.0)
    for now, beside, alone in ((100.0, 0.0, 1.5), (109.9, 0.0, 1.5), (110.0, INFINITY, INFINITY)):
        assert pressure.prompt_step_s(now, 1.0, promises=True) == beside
        assert pressure.prompt_step_s(now, 1.0, promises=False) == alone
    pressure.short_of(64, 100.0)
    assert pressure.blocks(100.0) == 64.0
    assert pressure.blocks(120.0) == 16.0
    pressure.short_of(8, 120.0)
    assert pressure.blocks(130.0) == 12.0
    pressure.refused(130.0, ttft=True)
    assert pressure.first_tokens_late(139.9)
    assert not pressure.first_tokens_late(140.0)


def waiting(name: str, since_s: float, needed_blocks: int) -> BestEffortView:
    return BestEffortView(name, since_s, 10, False, 0, needed_blocks)


def test_best_effort_leaves_the_memory_that_promises_were_short_of() -> None:
    pressure = Pressure(10.0)
    pressure.short_of(64, 100.0)
    ranked = [
        waiting("running", 99.0, 0),
        waiting("small", 99.0, 36),
        waiting("large", 99.0, 37),
        waiting("aged", 60.0, 100),
        waiting("aged, too", 60.0, 100),
    ]

    def fits_in_memory(free: int, now_s: float = 100.0, *, promises: bool = True) -> list[str]:
        found = pressure.fits_in_memory(ranked, free, now_s, ageing_s=30.0, promises=promises)
        return [r.request_id for r in found]

    assert fits_in_memory(100) == ["running", "small", "aged"]
    assert fits_in_memory(99) == ["running"]  # 35 are left, and not even the aged one fits
    assert fits_in_memory(100, promises=False) == [r.request_id for r in ranked]
    assert fits_in_memory(100, 110.0) == ["running", "small", "large", "aged"]
    assert fits_in_memory(10) == ["running"]
