# SPDX-License-Identifier: Apache-2.0
"""The two clocks."""

from __future__ import annotations

import time

import pytest

from vllm_slo.core.clock import SystemClock, VirtualClock


def test_the_system_clock_reads_the_machine() -> None:
    clock = SystemClock()
    before = time.monotonic(), time.time()
    read = clock.monotonic_s(), clock.epoch_s()
    after = time.monotonic(), time.time()
    assert before[0] <= read[0] <= after[0]
    assert before[1] - 1 <= read[1] <= after[1] + 1  # an epoch clock may be set


def test_a_virtual_clock_moves_only_when_told() -> None:
    clock = VirtualClock(5.0)
    assert clock.monotonic_s() == clock.epoch_s() == 5.0
    clock.advance(0.25)
    clock.advance(0.0)
    assert clock.monotonic_s() == clock.epoch_s() == 5.25
    assert VirtualClock().monotonic_s() == 0.0


@pytest.mark.parametrize("seconds", [-1.0, -1e-9])
def test_a_virtual_clock_does_not_go_back(seconds: float) -> None:
    clock = VirtualClock(1.0)
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(seconds)
    assert clock.monotonic_s() == 1.0
