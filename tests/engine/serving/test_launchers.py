# SPDX-License-Identifier: Apache-2.0
"""Objectives where no HTTP middleware is: vLLM's batch runner, and an embedded engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live_server import SMALL, UNIPROC, command, environment
from patience import patience

pytest.importorskip("vllm")

from vllm_slo import tiny

pytestmark = pytest.mark.engine

NEVER = {"ttft_ms": 0.001, "on_unattainable": "decline"}
LINES: dict[str, dict[str, Any]] = {
    "kept": {"slo": {"ttft_ms": 60_000}},
    "declined": {"slo": NEVER},
    "declined by keys": {"vllm_xargs": {f"slo_{key}": value for key, value in NEVER.items()}},
    "bad": {"slo": {"ttft_ms": -4}},
    "no object": {"slo": 5},
    "internal": {"vllm_xargs": {"slo_quote": 1}},
    "beams": {"slo": {"ttft_ms": 60_000}, "use_beam_search": True, "n": 2},
    "plain": {},
}


def test_a_batch_goes_on_after_lines_that_are_refused(tmp_path: Path) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": asked | said}
        for name, said in LINES.items()
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = [command("vllm"), "run-batch", "-i", "in.jsonl", "-o", "out.jsonl"]
    arguments += ["--model", str(tiny.path("target")), "--served-model-name", "tiny"]
    arguments += ["--scheduler-cls", "vllm_slo.Scheduler", *SMALL[:-2]]
    done = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment() | UNIPROC,
        timeout=patience(240),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = {
        answer["custom_id"]: answer
        for answer in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    }
    codes = {name: answer["response"]["status_code"] for name, answer in answers.items()}
    assert codes == {
        "kept": 200,
        "declined": 429,
        "declined by keys": 429,
        "bad": 400,
        "no object": 400,
        "internal": 400,
        "beams": 400,
        "plain": 200,
    }
    report = answers["kept"]["response"]["body"]["kv_transfer_params"]["vllm_slo"]
    assert report["promised"] is True
    assert answers["plain"]["response"]["body"]["kv_transfer_params"] is None
    said = {name: answer["error"] for name, answer in answers.items() if answer["error"]}
    assert "retry after" in said["declined"]["error"]["message"]
    assert said["bad"]["error"]["message"].startswith("ttft_ms: ")
    assert "beam search" in said["beams"]["error"]["message"]


EMBEDDED = """
import asyncio, sys
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_slo.engine.gate import RequestDeclinedError

async def main():
    args = AsyncEngineArgs(
        model=sys.argv[1], scheduler_cls="vllm_slo.Scheduler", enforce_eager=True,
        max_model_len=256, dtype="float32", gpu_memory_utilization=0.2,
    )
    engine = AsyncLLM.from_engine_args(args)
    try:
        async def ask(name, extra):
            params = SamplingParams(max_tokens=4, extra_args=extra)
            async for output in engine.generate("hi", params, name):
                last = output
            return last
        kept = await ask("kept", {"slo_ttft_ms": 60000})
        print("kept", kept.kv_transfer_params["vllm_slo"]["promised"])
        try:
            await ask("declined", {"slo_ttft_ms": 0.001, "slo_on_unattainable": "decline"})
        except RequestDeclinedError as error:
            print("declined", error.declined.reason, error.declined.retry_after_ms >= 1)
        for name, extra in (("bad", {"slo_ttft_ms": -4}), ("internal", {"slo_ticket": 2**62})):
            try:
                await ask(name, extra)
            except Exception as error:
                print(name, type(error).__name__, str(error)[:10])
        plain = await ask("plain", None)
        print("plain", len(plain.outputs[0].token_ids))
    finally:
        engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_an_embedded_engine(tmp_path: Path) -> None:
    script = tmp_path / "embedded.py"
    script.write_text(EMBEDDED)
    done = subprocess.run(
        [sys.executable, str(script), str(tiny.path("target"))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment() | UNIPROC,
        timeout=patience(240),
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if not line.startswith(("INFO", "WARNING"))]
    for expected in (
        *("kept True", "declined expired True", "bad VLLMValidationError ttft_ms: -"),
        *("internal VLLMValidationError slo_ticket", "plain 4"),
    ):
        assert any(line.startswith(expected) for line in said), done.stdout + done.stderr[-3000:]
