# SPDX-License-Identifier: Apache-2.0
"""How close to what is possible, and what that costs others: every target in one table.

python benchmarks/targets.py    results/targets.md, capacity.md and colocation.md
"""

from __future__ import annotations

import argparse

import capacity
import colocation
import false_refusals
from common import Stopwatch, markdown, write_result

from vllm_slo.sim.workers import Workers

FALSE_BEFORE = 0.850
"""Share of the refusals that were false at 45d4d77 (results/false_refusals.md)."""

TEXT = """\
The first rows are of [capacity.md](capacity.md): Poisson arrivals, five scenarios, the highest rate
at which 90% of the jobs keep every objective. The even ceiling is the highest rate at which a
linear program can keep the same share of every job. The following rows are of
[colocation.md](colocation.md). The last one is of [false_refusals.md](false_refusals.md). "Before"
is commit 45d4d77. Its shares of a ceiling were of a mean-field bound, and its geometric means were
over six scenarios with recorded arrivals in windows that were too short; so these do not compare
with the column beside them. Took {minutes:.0f} minutes."""


def main() -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--processes", type=int, default=None, help="default: one per core")
    options = parser.parse_args()
    watch = Stopwatch()
    with Workers(options.processes) as workers:
        rows = colocation.run(workers)
        study = capacity.Study(capacity.Plan(), workers)
        study.run()
        study.write()
    found = false_refusals.count(false_refusals.CASES, false_refusals.SEED)
    false = found["false"] / found["refused"]
    table = [
        *study.targets(),
        *rows,
        [
            "refusals that are false by a search over all schedules, tiny cases",
            f"{FALSE_BEFORE:.0%}",
            f"<= {FALSE_BEFORE / 2:.0%}",
            f"{false:.0%}",
        ],
    ]
    write_result(
        "targets",
        TEXT.format(minutes=watch.minutes),
        markdown(("", "before", "target", "here"), table),
    )


if __name__ == "__main__":
    main()
