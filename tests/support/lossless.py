# SPDX-License-Identifier: Apache-2.0
"""The engines whose answers are compared (``tree_engine.py``), each run once in a session.

An engine serves all its phases one after the other. What it said is kept in the session's folder,
so that every file of tests, in whichever process it runs, finds it there.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from hermetic import ROOT_VARIABLE
from patience import patience

from vllm_slo.engine.compat.version import is_at_least

Said = dict[str, Any]

CHILD: Final = Path(__file__).with_name("tree_engine.py")
LOGPROB_TOLERANCE: Final = 2e-3
FEWER: Final = 4
"""Every so many of the requests, where a fraction of them shows it. All kinds are among them."""
FEW: Final[Said] = {"every": FEWER}
DRAWS: Final = {
    "prompt": "def main(argv):\n    for name in ",
    "count": 2500,
    "temperature": 0.7,
    "top_p": 0.95,
    "tokens": 4,
}
POOL: Final = ("draft", "middle")

ENGINES: Final[dict[str, tuple[Said, dict[str, Said]]]] = {
    "plain": ({}, {"whole": {}}),
    "public plain": ({}, {"whole": {"public": True}}),
    "public trees": ({"trees": True}, {"whole": {"public": True}}),
    "trees": (
        {"trees": True},
        {
            "whole": {},
            "mask": {**FEW, "break": "mask"},
            "compaction": {**FEW, "break": "compaction"},
            "positions": {**FEW, "break": "positions"},
            "watched": {**FEW, "watch": True},
            "hole": {**FEW, "watch": True, "break": "draft"},
            "rests": {**FEW, "watch": True, "rest": 4},
            "rests for good": {**FEW, "rest": 4, "break": "catching up"},
        },
    ),
    "masks": (
        {"trees": True, "masked": True},
        {
            "fewer": FEW,
            "mask": {**FEW, "break": "mask"},
            "compaction": {**FEW, "break": "compaction"},
        },
    ),
    "seeded plain": ({"seeded": True}, {"fewer": {"every": 4}}),
    "seeded trees": ({"trees": True, "seeded": True}, {"fewer": {"every": 4}}),
    "draws plain": ({"sample": DRAWS}, {"whole": {}}),
    "draws trees": ({"trees": True, "sample": DRAWS}, {"whole": {}, "walk": {"break": "walk"}}),
    "two drafts": (
        {"trees": True, "pool": POOL, "rotate": 5},
        {"whole": {}, "guesses": {**FEW, "watch": True, "break": "guesses"}},
    ),
    "three drafts": (
        {"trees": True, "pool": (*POOL, "target"), "rotate": 3},
        {"watched": {**FEW, "watch": True}},
    ),
    "failing drafts": (
        {"trees": True, "pool": ("draft", "broken", "middle"), "rotate": 4, "fail": (2, 30)},
        {"fewer": FEW},
    ),
    "ngram": ({"method": "ngram"}, {"whole": {}}),
    "draft_model": ({"method": "draft_model"}, {"whole": {}}),
}
"""Engine -> its options, and its phases: which requests it serves, what is broken meanwhile."""


def told(engine: str, phase: str = "whole") -> Said:
    """What the requests of one phase got, and what happened in the engine."""
    if engine == "plain" and phase == "fewer":
        whole = told("plain")
        return {**whole, "said": whole["said"][::FEWER]}
    found: Said = _run(engine)[phase]
    return found


@functools.cache
def _run(engine: str) -> Said:
    """All phases of an engine, from whichever process runs it first."""
    path = Path(os.environ[ROOT_VARIABLE]) / f"engine {engine}.json"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            options, phases = ENGINES[engine]
            done = subprocess.run(
                [sys.executable, str(CHILD), json.dumps({"engine": options, "phases": phases})],
                capture_output=True,
                text=True,
                timeout=patience(600),
                check=False,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            path.write_text(done.stdout.strip().splitlines()[-1])
    found: Said = json.loads(path.read_text())
    return found


KINDS: Final = 9
"""Kinds of requests that are not seeded, in turn; see ``tree_engine.parameters``."""
WITH_LEAST_LENGTH: Final = (4, 5)
"""Kinds with ``min_tokens``."""


def beyond_vllms_own_fault(places: list[int]) -> list[int]:
    """Differences that vLLM's own drafts do not make by themselves.

    vLLM 0.32 forbids stop tokens in the last token of a step that verifies drafts, by the length
    that the answer had before the step: an answer may miss its end at ``min_tokens`` (its
    ``MinTokensLogitsProcessor.apply``). Which steps do so depends on time.
    """
    return [place for place in places if place % KINDS not in WITH_LEAST_LENGTH]


def differing(one: Said, other: Said) -> list[int]:
    """The requests that got something else: tokens, text, reason of their end, logprobs."""
    assert len(one["said"]) == len(other["said"])
    return [
        place
        for place, (a, b) in enumerate(zip(one["said"], other["said"], strict=True))
        if any(a[key] != b[key] for key in ("text", "end"))
        or _tokens_differ(a, b)
        or _logprobs_differ(a["logprobs"], b["logprobs"])
    ]


def _tokens_differ(one: Said, other: Said) -> bool:
    """Where an answer ends with a stop string, vLLM 0.31 keeps what its last step brought besides:
    the text ends where it should, and the tokens go on (``IncrementalDetokenizer.update``)."""
    tokens, others = one["tokens"], other["tokens"]
    if isinstance(one["end"][1], str) and not is_at_least((0, 32)):
        known = min(len(tokens), len(others))
        tokens, others = tokens[:known], others[:known]
    return bool(tokens != others)


def _logprobs_differ(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is not other
    return any(
        abs(dict(map(tuple, a)).get(token, 99.0) - logprob) > LOGPROB_TOLERANCE
        for a, b in zip(one, other, strict=True)
        for token, logprob in b
    )
