# SPDX-License-Identifier: Apache-2.0
"""How many requests are refused although some schedule would keep every objective.

Small random cases: up to three requests decode, and up to four more come, most of them borderline.
The real scheduler rules on them in a virtual engine whose step times it knows exactly, so nothing
is refused for fear of noise. Then a search over all schedules (`tests/support/step_oracle.py`),
which knows the lengths of answers, tells what could have been promised.

A refusal is false if the request could have been served beside everything that was promised. A
promise is unsafe if no schedule keeps all that was promised with it. Lost value is what the best
set that can be served is worth beyond the promised one. Requests that are refused are served best
effort; some of them are promised later, when others end sooner than they might have.

Cases are tiny: objectives leave room for one to five steps. So one step too many refuses a request,
and the shares are far higher than those of an engine whose objectives leave room for many steps.
They serve to compare versions of admission. To compare with another version, run this script once
more with `PYTHONPATH` set to a checkout of that version, `VLLM_PLUGINS` empty, and `--json FILE`;
then run it here with `--before NAME=FILE`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from common import markdown, write_result

SUPPORT: Final = Path(__file__).parents[1] / "tests" / "support"
REASONS: Final = ("prefill", "decode", "memory", "seats")
CASES: Final = 1000
SEED: Final = 1


def count(cases: int, seed: int) -> Counter[str]:
    """Play so many cases, and count."""
    sys.path.insert(0, str(SUPPORT))
    refused_cases = import_module("refused_cases")
    config = import_module("model_config").CONFIG
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for number in range(cases):
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{number}/{cases} cases")
            case = refused_cases.random_case(rng)
            try:
                verdict = refused_cases.play(case, Path(folder))
            except TimeoutError:
                found["left out"] += 1
                continue
            found.update(facts(verdict))
    return found


def facts(verdict: Any) -> Counter[str]:
    """What one case adds to the counts."""
    found = Counter(
        {
            "cases": 1,
            "promised": len(verdict.promised),
            "refused": len(verdict.reasons),
            "false": len(verdict.false),
            "cases with a refusal": bool(verdict.reasons),
            "cases with a false one": bool(verdict.false),
            "refused value": verdict.refused_value,
            "lost value": verdict.lost,
            "promised later": len(verdict.later),
            "attained": len(set(verdict.reasons) & set(verdict.attained)),
            "unsafe": verdict.unsafe,
            "broken": len(verdict.broken) - len(verdict.broken_later),
            "broken later": len(verdict.broken_later),
        }
    )
    for place, reason in verdict.reasons.items():
        found[f"refused: {reason}"] += 1
        found[f"false: {reason}"] += place in verdict.false
    return found


def share(part: int, whole: int) -> str:
    """A share with its numbers."""
    return f"{part / whole:.1%} ({part} of {whole})" if whole else "-"


def rows(found: Counter[str]) -> list[tuple[str, str]]:
    """The table's rows for one version."""
    offered = found["promised"] + found["refused"]
    return [
        ("promised when they come", share(found["promised"], offered)),
        ("refused", share(found["refused"], offered)),
        ("**false refusals**", share(found["false"], found["refused"])),
        *(
            (f"... for {reason}", share(found[f"false: {reason}"], found[f"refused: {reason}"]))
            for reason in REASONS
        ),
        (
            "cases with a false refusal, of those with any",
            share(found["cases with a false one"], found["cases with a refusal"]),
        ),
        ("lost value, of what was refused", share(found["lost value"], found["refused value"])),
        ("refused, promised later", share(found["promised later"], found["refused"])),
        ("refused, attained in the end", share(found["attained"], found["refused"])),
        ("cases with an unsafe promise", share(found["unsafe"], found["cases"])),
        ("promises missed, against those given at once", share(found["broken"], found["promised"])),
        (
            "... given later, against all given later",
            share(found["broken later"], found["promised later"]),
        ),
    ]


def main() -> None:
    """Count, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", type=Path, help="write the counts there, and no table")
    parser.add_argument(
        "--before",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="counts of another version, to stand beside; may be repeated",
    )
    args = parser.parse_args()
    found = count(args.cases, args.seed)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
        return
    versions = {}
    for name, _, file in (text.partition("=") for text in args.before):
        versions[name] = Counter(json.loads(Path(file).read_text()))
    versions["now"] = found
    columns = [rows(counts) for counts in versions.values()]
    table = [[line[0][0], *(value for _, value in line)] for line in zip(*columns, strict=True)]
    text = (__doc__ or "").strip()
    note = (
        f"{found['cases']} cases; {found['left out']} more whose search took too long are left out."
    )
    write_result("false_refusals", text, markdown(["", *versions], table), note=note)


if __name__ == "__main__":
    main()
