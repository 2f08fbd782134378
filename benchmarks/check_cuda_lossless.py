# SPDX-License-Identifier: Apache-2.0
"""Part of ``check_cuda.py``: answers with token trees are those without, in float32.

The engines and their requests are those of the tests: greedy decoding with penalties, grammars,
stop words, logprobs and the like.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from check_cuda_runner import CheckError, Found, run_command

SUPPORT: Final = Path(__file__).parents[1] / "tests" / "support"
ENGINE: Final = SUPPORT / "tree_engine.py"
EVERY_ON_CPU: Final = 7


def lossless(cpu: bool) -> Found:
    """The same requests to an engine with trees and to one without."""
    if not ENGINE.is_file():
        raise CheckError(f"{ENGINE} is missing: run it in a clone of the repository")
    sys.path.insert(0, str(SUPPORT))
    compared = import_module("lossless")

    phases = {"all": {"every": EVERY_ON_CPU if cpu else 1}}
    options = {} if cpu else {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.5}
    plain, trees = (_told({"trees": on, "options": options}, phases) for on in (False, True))
    seen = trees["seen"]
    places = [place * phases["all"]["every"] for place in compared.differing(plain, trees)]
    facts = {"requests": len(plain["said"]), "differing": places, "seen": seen}
    if not seen["branching"] or seen["deepest"] < 1:
        raise CheckError(
            f"nothing was shown: {seen['trees']} trees, {seen['branching']} with branches"
        )
    if compared.beyond_vllms_own_fault(places):
        raise CheckError(f"{len(places)} of {facts['requests']} answers differ: {places[:10]}")
    return Found(
        f"{facts['requests']} answers are the same, {seen['branching']} branching trees verified",
        facts,
    )


def _told(engine: dict[str, Any], phases: dict[str, Any]) -> dict[str, Any]:
    asked = json.dumps({"engine": engine, "phases": phases})
    found: dict[str, Any] = json.loads(run_command([str(ENGINE), asked]).strip().splitlines()[-1])
    return dict(found["all"])
