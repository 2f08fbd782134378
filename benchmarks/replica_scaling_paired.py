# SPDX-License-Identifier: Apache-2.0
"""Capacity per GPU of 2 to 8 replicas against lone replicas that serve the same jobs, simulated.

``replica_scaling.py`` compares windows that hold as many jobs for each replica, so the windows of
one replica are 100 rows of Azure's trace and those of eight are 800. Their bursts differ, and with
them the capacity. Here both sides have the same window. The lone replicas are dealt its jobs in
turn, and none knows of the others; the routed ones are one service behind the front. So the ratio
is what routing is worth, window by window.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from common import markdown, times, write_result

from vllm_slo.sim.arrivals import read_trace
from vllm_slo.sim.cluster import simulate
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import load_hardware
from vllm_slo.sim.questions import Question, Watcher
from vllm_slo.sim.search import Threshold, find_threshold
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.statistics import Capacity, ratio
from vllm_slo.sim.systems import OURS
from vllm_slo.sim.workers import Workers, quiet, run_tasks

NINETY = Question(0.9)
HARDWARE = "a100-opt-13b"
POLICIES = ("slo", "least_loaded")
START = 1.0
"""First rate of a search, jobs/s per GPU."""


def setting_of(scenario: str, replicas: int, jobs: int) -> Setting:
    """``scenario``: with its own arrivals, or ``-poisson``."""
    name, _, arrivals = scenario.partition("-")
    conditions = Conditions(replicas=replicas)
    return Setting(name, load_hardware(HARDWARE), conditions, jobs=jobs, arrivals=arrivals or None)


def keeps(setting: Setting, seed: int, routing: str, rate: float) -> bool:
    """Whether 90% of a window's jobs attain. ``routing``: a policy, or ``lone``."""
    jobs = Case(setting, OURS).window(rate, seed)
    count = setting.conditions.replicas
    watcher = Watcher(jobs, setting.warmup, (NINETY,))
    if routing == "lone":
        conditions = Conditions(seed=seed)
        parts = [jobs[first::count] for first in range(count)]
    else:
        conditions = replace(setting.conditions, seed=seed, routing=routing)  # type: ignore[arg-type]
        parts = [jobs]
    for part in parts:
        simulate(part, OURS, setting.hardware, conditions, watch=watcher)
        if (answer := watcher.evidence.answer(NINETY)) is not None:
            return answer
    return False


def search(setting: Setting, seed: int, precision: float) -> dict[str, Threshold]:
    """The thresholds of one window: lone replicas, then each policy from where those are."""
    quiet()
    start, found = START, {}
    for routing in ("lone", *POLICIES):
        found[routing] = find_threshold(
            partial(keeps, setting, seed, routing), start, precision=precision
        )
        start = found[routing].kept or start
    return found


def rows_of(scenario: str, replicas: int, windows: Sequence[dict[str, Threshold]]) -> list[str]:
    """A row of the table."""
    found = {
        routing: Capacity.of(NINETY, (window[routing] for window in windows))
        for routing in windows[0]
    }
    spread = [window["lone"].kept or 0.0 for window in windows]
    return [
        scenario,
        str(replicas),
        str(len(windows)),
        f"{min(spread):.2g} to {max(spread):.2g}",
        *(found[routing].text for routing in found),
        times(ratio(found["slo"], found["lone"])),
        times(ratio(found["slo"], found["least_loaded"])),
    ]


def main() -> None:
    """Search, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shows that it runs; writes nothing")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--scenarios", default="coder,coder-poisson")
    parser.add_argument("--windows", default="2:12,4:12,8:8", help="replicas:windows, ...")
    parser.add_argument("--jobs", type=int, default=100, help="for each replica and window")
    parser.add_argument("--precision", type=float, default=0.06)
    args = parser.parse_args()
    scenarios, windows, precision = args.scenarios, args.windows, args.precision
    if args.quick:
        scenarios, windows, precision = "coder", "2:2", 0.5
    began_s, table = time.monotonic(), []
    with Workers(args.processes) as workers:
        for scenario in scenarios.split(","):
            for part in windows.split(","):
                replicas, count = map(int, part.split(":"))
                setting = setting_of(scenario, replicas, 20 if args.quick else args.jobs)
                tasks = [(setting, seed, precision) for seed in range(count)]
                table.append(rows_of(scenario, replicas, run_tasks(search, tasks, workers)))
                sys.stderr.write(" | ".join(table[-1]) + "\n")
    head = ["scenario", "replicas", "windows", "lone: lowest to highest window",
            "lone, jobs/s per GPU", "slo", "least_loaded", "slo against lone",
            "slo against least_loaded"]  # fmt: skip
    text = markdown(head, table)
    if args.quick:
        sys.stdout.write(text + "\n")
        return
    note = (
        f"Trace: {read_trace('azure-code').source}; {args.jobs} jobs for each replica and window. "
        "Intervals: 95%, over windows; ratios are geometric means of the windows' own ratios. "
        f"Engine: {OURS.name} on {HARDWARE} everywhere; only where a request goes differs. "
        f"{(time.monotonic() - began_s) / 60:.0f} min."
    )
    write_result("replica_scaling_paired", __doc__, text, note=note)


if __name__ == "__main__":
    main()
