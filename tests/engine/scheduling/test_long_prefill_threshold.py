# SPDX-License-Identifier: Apache-2.0
"""With --long-prefill-token-threshold a step has a part of a prompt, and promises count that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from test_stock_equivalence import ROOFLINE

from vllm_slo import SLO
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import EngineShape, VirtualEngine

SHAPE = EngineShape(num_blocks=2000, max_num_seqs=32, max_num_batched_tokens=512)
CHUNK = 64
PROMPT = 640
"""Ten chunks, in steps that other prompts fill."""
FULL_STEP_S = ROOFLINE.predict_s(SHAPE.max_num_batched_tokens)


def report(folder: Path, ttft_s: float, threshold: int) -> dict[str, Any]:
    """Of a prompt that arrives among eight others."""
    one = VirtualEngine(
        Scheduler,
        folder,
        ROOFLINE.predict_shape_s,
        SHAPE,
        believed=ROOFLINE,
        long_prefill_token_threshold=threshold,
    )
    for number in range(8):
        one.add(f"other{number}", 2000, 5)
    one.add("asks", PROMPT, 5, SLO(ttft_ms=1e3 * ttft_s))
    one.run()
    found = one.outcomes["asks"].report
    assert found is not None
    return found


def test_a_promise_counts_the_steps_of_the_chunks(config_folder: Path) -> None:
    early = report(config_folder, 4 * FULL_STEP_S, CHUNK)
    assert early["reason"] == "prefill"
    late = report(config_folder, 12 * FULL_STEP_S, CHUNK)
    assert (late["promised"], late["attained"], late["reason"]) == (True, True, None)


@pytest.mark.parametrize("threshold", [0, PROMPT])
def test_a_prompt_that_is_not_cut_is_promised_as_before(
    config_folder: Path, threshold: int
) -> None:
    early = report(config_folder, 4 * FULL_STEP_S, threshold)
    assert (early["promised"], early["attained"]) == (True, True)
