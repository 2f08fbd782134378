# SPDX-License-Identifier: Apache-2.0
"""Part of ``check_cuda.py``: a server answers, with CUDA graphs and asynchronous scheduling."""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from check_cuda_runner import CheckError, Found
from rich.console import Console

from vllm_slo.bench.demo_load import GPU_SIZE, SIZES, twin
from vllm_slo.bench.demo_servers import CANDIDATES, WITH_TREES, Candidate, server
from vllm_slo.bench.drafts import read_draft_counts
from vllm_slo.bench.endpoint import opener

WAYS: Final = {"stock": CANDIDATES[0], "vllm-slo": CANDIDATES[1], "trees": WITH_TREES}
REQUESTS: Final = 24
AT_ONCE: Final = 8
TOKENS: Final = 32
LOOSE: Final = {"ttft_ms": 60_000, "tpot_ms": 5_000}
TIGHT: Final = {"ttft_ms": 60_000, "tpot_ms": 0.5}
"""No step without drafts is so short: trees are verified for it where drafts help."""


def serve(way: str, cpu: bool) -> Found:
    """Requests with and without objectives to a costlier twin of the built-in model, in bf16."""
    console, candidate = Console(stderr=True), WAYS[way]
    model = twin(SIZES[0] if cpu else GPU_SIZE, console)
    options = ["--dtype=bfloat16"]
    if not cpu:
        options.append("--no-enforce-eager")
    if way != "trees":  # vLLM turns it off beside trees, and refuses the flag
        options.append("--async-scheduling")
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        with server(candidate, model, Path(folder), console, options) as url:
            start_s = time.monotonic() - began_s
            return _ask(url, candidate, start_s, trees=way == "trees")


def _ask(url: str, candidate: Candidate, start_s: float, *, trees: bool) -> Found:
    objectives = (None, LOOSE, TIGHT if trees else LOOSE) if candidate.send_slo else (None,)
    began_s = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [objectives[number % len(objectives)] for number in range(REQUESTS)]
        answers = list(pool.map(lambda pair: _answer(url, *pair), enumerate(asked)))
    took_s = time.monotonic() - began_s
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    if tokens != REQUESTS * TOKENS:
        raise CheckError(f"{tokens} tokens came of {REQUESTS} requests of {TOKENS}")
    loose = [a for a, slo in zip(answers, asked, strict=True) if slo is LOOSE]
    promised = sum(bool(answer["slo"]["promised"]) for answer in loose)
    facts: dict[str, Any] = {
        "start_s": round(start_s, 1),
        "tokens_per_s": round(tokens / took_s, 1),
        "promised": promised,
        "with_loose_objective": len(loose),
    }
    text = f"started in {start_s:.0f} s, {tokens / took_s:.0f} tokens/s"
    if loose:
        text += f", {promised} of {len(loose)} promised"
        if promised < len(loose):
            raise CheckError(f"{text}: every one of these objectives is easy to keep")
    if trees:
        counts = read_draft_counts(url)
        if counts is None or not counts.accepted_tokens:
            raise CheckError(f"no draft token was accepted ({counts})")
        facts["drafts"] = counts.to_dict()
        text += f", {counts}"
    return Found(text, facts)


def _answer(url: str, number: int, slo: dict[str, float] | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": f"def function_{number}(first, second):\n    ",
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    if slo is not None:
        body["slo"] = slo
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with opener(url).open(request, timeout=120) as page:
            answer: dict[str, Any] = json.load(page)
    except OSError as error:
        raise CheckError(f"request {number} failed: {error}") from error
    return answer
