# SPDX-License-Identifier: Apache-2.0
"""LAPS-SD and fair shares on a real engine, chosen by configuration alone."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from patience import patience

pytest.importorskip("vllm")

from live_server import UNIPROC, environment

pytestmark = pytest.mark.engine

TOKENS = [280, 12, 220, 10, 14, 180, 8, 12]

SERVE = """
import json, sys
from vllm import SamplingParams
from vllm_slo import LLM, SLO

PROMPTS = [
    "def read(path):", "class Stack:", "import os", "# A comment about", "try:",
    "for name in sorted(", "async def main():", "    return self.",
]
config, tokens = json.loads(sys.argv[1])
llm = LLM(
    "tiny", draft_model="tiny", slo_config=config, dtype="float32", enforce_eager=True,
    max_model_len=384, max_num_seqs=1, block_size=32, disable_log_stats=False,
)
outputs = llm.generate(
    PROMPTS,
    [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in tokens],
    slo=[SLO(tier="best_effort", expected_output_tokens=n, tenant="ab"[n % 3 > 0]) for n in tokens],
    use_tqdm=False,
)
ended = [[list(o.outputs[0].token_ids), o.metrics.last_token_ts] for o in outputs]
print("\\n" + json.dumps(ended))
"""


def serve(slo_config: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    """What eight requests of two tenants say, and their numbers in the order in which they end;
    there is one place. An engine on CPU has its process."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE, json.dumps([slo_config, TOKENS])],
        capture_output=True,
        text=True,
        timeout=patience(280),
        check=False,
        env=environment() | UNIPROC,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    found = json.loads(lines[-1])
    order = sorted(range(len(found)), key=lambda place: found[place][1])
    return [tokens for tokens, _ in found], order


@pytest.mark.deep
@pytest.mark.slow
def test_another_order_and_other_shares_and_the_same_words() -> None:
    words, order = serve({})
    ours = {
        "best_effort": {"order": "laps_sd", "first_queue_s": patience(0.5)},
        "speculation": {"share": "tenants"},
    }
    said, ended = serve(ours)
    assert said == words
    assert [len(tokens) for tokens in said] == TOKENS
    short = [place for place, tokens in enumerate(TOKENS) if tokens < 20]
    assert sum(map(ended.index, short)) < sum(map(order.index, short))
    assert order == sorted(order)
