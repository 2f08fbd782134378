# SPDX-License-Identifier: Apache-2.0
"""The scheduler under random events, for long.

`tests/engine/scheduling/test_scheduler_machine.py` again and again, each time with another seed:
hypothesis drives vLLM's scheduler and ours through runs of random events (arrivals of every kind,
garbage, clients that leave, steps that take no time or far too long, a clock that jumps, pauses,
sessions, resets of the prefix cache), and books kept beside it are compared after every event and
every step: KV blocks are conserved, no promise is dropped silently, nobody starves, budgets are
kept, every request ends once and with the tokens it should have. A failure names its seed."""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from common import markdown, write_result

ROOT: Final = Path(__file__).parents[1]
TEST: Final = "tests/engine/scheduling/test_scheduler_machine.py"


class Played(NamedTuple):
    """One process: its seed, its events, and its failure (empty: none)."""

    seed: int
    counts: Counter[str]
    failure: str


def play(seed: int, runs: int) -> Played:
    """Run so many times in another process."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", TEST, f"--hypothesis-seed={seed}",
         "--timeout", "0", "-o", "session_timeout=99999", "-p", "no:cacheprovider"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "VLLMSLO_MACHINE_RUNS": str(runs)},
    )  # fmt: skip
    found = re.search(r"^\{.*\}$", done.stdout, re.MULTILINE)
    counts = Counter[str](ast.literal_eval(found[0]) if found else {})
    return Played(seed, counts, done.stdout[-4000:] if done.returncode else "")


def main() -> int:
    """Play until the time is up and print what happened; returns 1 if anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="no seed begins after them")
    parser.add_argument("--runs", type=int, default=500, help="of each seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--first-seed", type=int, default=1)
    args = parser.parse_args()
    begun_s = time.monotonic()
    played: list[Played] = []

    def keep_playing(first: int) -> None:
        seed = first
        while time.monotonic() < begun_s + args.minutes * 60:
            played.append(play(seed, args.runs))
            sys.stderr.write(f"seed {seed}: {played[-1].failure or dict(played[-1].counts)}\n")
            seed += args.jobs

    with ThreadPoolExecutor(args.jobs) as pool:
        for job in range(args.jobs):
            pool.submit(keep_playing, args.first_seed + job)
    minutes = (time.monotonic() - begun_s) / 60
    total = sum((one.counts for one in played), Counter[str]())
    failed = sorted(one.seed for one in played if one.failure)
    text = (
        f"{len(played)} seeds of {args.runs} runs, {minutes:.0f} minutes in {args.jobs} processes. "
        + (f"**Failed: seeds {failed}.**" if failed else "No invariant was violated.")
    )
    rows = [[kind, f"{count:,}"] for kind, count in total.most_common()]
    write_result("scheduler_machine", f"{__doc__}\n{text}", markdown(["what", "how often"], rows))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
