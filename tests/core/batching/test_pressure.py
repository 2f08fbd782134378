# SPDX-License-Identifier: Apache-2.0
"""Whether first tokens come too late of late."""

from __future__ import annotations

from vllm_slo.core.batching.pressure import Pressure


def test_a_late_first_token_is_forgotten() -> None:
    pressure = Pressure(10.0)
    assert not pressure.first_tokens_late(0.0)
    pressure.refused(130.0)
    assert pressure.first_tokens_late(139.9)
    assert not pressure.first_tokens_late(140.0)
