# SPDX-License-Identifier: Apache-2.0
"""What drafts take beside tokens: slots of the input, and KV blocks ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from test_skipped_decodes import CHAT, ROOFLINE, Planned
from virtual_trees import TreeEngine

from vllm_slo import SLO
from vllm_slo.sim.harness import EngineShape, VirtualEngine


def test_a_plan_leaves_the_draft_model_its_slots(config_folder: Path) -> None:
    """vLLM's draft model needs one more input token for each request: a step of 64 holds fewer."""
    one = VirtualEngine(
        Planned,
        config_folder,
        ROOFLINE.predict_shape_s,
        EngineShape(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512),
        believed=ROOFLINE,
        speculative_config={
            "method": "draft_model",
            "model": str(config_folder),
            "num_speculative_tokens": 3,
        },
    )
    for number in range(4):
        one.add(f"chat{number}", 20, 100, CHAT)
    for _ in range(6):
        one.step()
    for number in range(3):
        one.add(f"long{number}", 150, 5, SLO(ttft_ms=20_000))
    seen = 0
    while one.busy:
        output, plan = one.step(), one.scheduler.plans[-1]
        if plan is None:
            continue
        for name, tokens in plan.tokens.items():
            if name.startswith("long") and tokens and name in one.scheduler.requests:
                seen += 1
                assert output.num_scheduled_tokens.get(name) == tokens
    assert seen > 5


def test_trees_keep_their_slot_ahead_in_every_count() -> None:
    """31 nodes, their root and one slot ahead are 33 tokens: two blocks of 32."""
    one = TreeEngine(ROOFLINE, speculation={"max_nodes": 31})
    blocks = one.scheduler._spec_decode_step_blocks
    assert (blocks() if callable(blocks) else blocks) == 2
