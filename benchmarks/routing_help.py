# SPDX-License-Identifier: Apache-2.0
"""Whether routing by promises (SLOs-Serve, section 4.2) helps, in virtual time.

Every policy gets the same jobs, and the replicas are the same engine (vllm-slo): only where a
request goes differs. Load 1.0 is what lone replicas carry at 90%, to which the jobs are dealt in
turn, at full speed (``--capacities``; its seeds are not those of the table). Slow replicas count by
their speed. The worlds are in ``routing_worlds.py``.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from common import markdown, mean_points, write_result
from routing_worlds import HARDWARE, WORLDS, World

from vllm_slo.core.types import RoutingPolicy
from vllm_slo.sim.cluster import simulate
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.jobs import JobResult
from vllm_slo.sim.measure import measure_counted
from vllm_slo.sim.search import find_threshold
from vllm_slo.sim.statistics import mean_interval
from vllm_slo.sim.systems import OURS
from vllm_slo.sim.workers import Workers, quiet, run_tasks

POLICIES: Final[tuple[RoutingPolicy, ...]] = ("slo", "round_robin", "least_loaded", "scorers")
LOADS = (0.7, 0.9, 1.1)
TUNING_SEEDS = (100, 101, 102)
CAPACITY_REPLICAS = 4
"""Lone replicas over which a capacity is searched."""


@dataclass(frozen=True)
class Figures:
    """One window. Shares from 0 to 1; NaN where nothing is counted.

    Attributes:
        attained: of the jobs with objectives.
        tight: of the tight class.
        kept: promises kept, of the jobs that were promised.
        plain_s: p99 of the TTFT of jobs without objectives, seconds.
    """

    attained: float
    tight: float
    kept: float
    plain_s: float


def figures(results: Sequence[JobResult]) -> Figures:
    """Measure a window; its first fifth does not count."""
    jobs = measure_counted(results)
    asked = [job for job in jobs if job.application != "plain"]
    waits_s = [wait_s for job in jobs if job.application == "plain" for wait_s in job.ttfts_s]
    return Figures(
        _share([job.attained for job in asked]),
        _share([job.attained for job in asked if job.application == "tight"]),
        _share([not job.broken for job in asked if job.promised]),
        float(np.percentile(waits_s, 99)) if waits_s else math.nan,
    )


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else math.nan


def capacity(name: str) -> float:
    """Jobs/s of a replica at full speed that keeps 90%, over the tuning seeds."""
    quiet()
    world = WORLDS[name]

    def keeps(rate: float) -> bool:
        shares = []
        for seed in TUNING_SEEDS:
            jobs = world.make(rate, CAPACITY_REPLICAS, seed)
            results = [
                result
                for first in range(CAPACITY_REPLICAS)
                for result in simulate(
                    jobs[first::CAPACITY_REPLICAS], OURS, HARDWARE, Conditions(seed=seed)
                ).results
            ]
            shares.append(figures(results).attained)
        return math.fsum(shares) >= 0.9 * len(shares)

    found = find_threshold(keeps, 8.0, precision=0.06)
    if found.kept is None:
        raise SystemExit(f"{name}: no rate keeps 90%")
    return found.kept


def window(name: str, policy: RoutingPolicy, rate: float, replicas: int, seed: int) -> Figures:
    """Run one window at ``rate`` jobs/s for each replica at full speed."""
    quiet()
    world: World = WORLDS[name]
    jobs = world.make(rate * world.speed(replicas), replicas, seed)
    conditions = Conditions(
        replicas=replicas, routing=policy, seed=seed, slowness=dict(world.slowness)
    )
    return figures(simulate(jobs, OURS, HARDWARE, conditions).results)


def shown(values: Sequence[float], *, percent: bool = True) -> str:
    """Mean and 95% interval over seeds."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    mean, half = mean_interval(known)
    if percent:
        return f"{100 * mean:.1f}" + ("" if half is None else f" +- {100 * half:.1f}")
    return f"{mean:.2g}"


def difference(values: Sequence[float], ours: Sequence[float]) -> str:
    """Points by which ``slo`` keeps more, with its interval over seeds; bold if it excludes 0."""
    ahead = [100 * (b - a) for a, b in zip(values, ours, strict=True)]
    mean, half = mean_interval(ahead)
    text = mean_points(ahead)
    return f"**{text}**" if half is not None and abs(mean) > half else text


Table = Mapping[tuple[str, int, float, RoutingPolicy], Sequence[Figures]]


def rows_of(found: Table) -> list[list[str]]:
    """A row for each world, number of replicas, load and policy."""
    rows = []
    for (name, replicas, load, policy), runs in found.items():
        ours = found[name, replicas, load, "slo"]
        against = ["", ""]
        if policy != "slo":
            against = [
                difference([run.attained for run in runs], [run.attained for run in ours]),
                difference([run.tight for run in runs], [run.tight for run in ours]),
            ]
        rows.append(
            [
                name,
                str(replicas),
                f"{load:g}",
                policy,
                shown([run.attained for run in runs]),
                shown([run.tight for run in runs]),
                shown([run.kept for run in runs]),
                shown([run.plain_s for run in runs], percent=False),
                *against,
            ]
        )
    return rows


def verdicts(found: Table) -> str:
    """How often slo is ahead of each policy beyond the interval, and behind."""
    counted = []
    for other in POLICIES[1:]:
        ahead = behind = 0
        points = []
        for (name, replicas, load, policy), runs in found.items():
            if policy != other:
                continue
            ours = found[name, replicas, load, "slo"]
            pairs = zip(ours, runs, strict=True)
            mean, half = mean_interval([100 * (a.attained - b.attained) for a, b in pairs])
            points.append(mean)
            ahead += half is not None and mean > half
            behind += half is not None and mean < -half
        counted.append(
            [other, str(len(points)), str(ahead), str(behind), f"{np.mean(points):+.1f}"]
        )
    head = ["slo against", "cells", "ahead", "behind", "points, mean over cells"]
    return markdown(head, counted)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shows that it runs; writes nothing")
    parser.add_argument("--capacities", action="store_true", help="only searches load 1.0")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--replicas", default="4", help="e.g. 2,4,8")
    parser.add_argument("--loads", default=",".join(f"{load:g}" for load in LOADS))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--name", default="routing_help", help="of the result")
    args = parser.parse_args()
    names = args.worlds.split(",")
    sizes = [int(size) for size in args.replicas.split(",")]
    loads = [float(load) for load in args.loads.split(",")]
    seeds = range(args.seeds)
    if args.quick:
        names, sizes, loads, seeds = ["mixed classes"], [2], [0.9], range(2)
    began_s = time.monotonic()
    with Workers(args.processes) as workers:
        if args.capacities:
            searched = run_tasks(capacity, [(name,) for name in names], workers)
            rows = [[n, f"{rate:.3g}"] for n, rate in zip(names, searched, strict=True)]
            sys.stdout.write(markdown(["world", "jobs/s"], rows) + "\n")
            return
        keys = [(n, size, load, p) for n in names for size in sizes for load in loads
                for p in POLICIES]  # fmt: skip
        tasks = [
            (n, p, WORLDS[n].rate * load, size, seed) for n, size, load, p in keys for seed in seeds
        ]
        runs = iter(run_tasks(window, tasks, workers))
    found = {key: [next(runs) for _ in seeds] for key in keys}
    head = ["world", "replicas", "load", "policy", "attained, %", "tight class, %",
            "promises kept, %", "TTFT p99 without objectives, s", "slo ahead by, points",
            "of the tight class"]  # fmt: skip
    table = verdicts(found) + "\n\n" + markdown(head, rows_of(found))
    if args.quick:
        sys.stdout.write(table + "\n")
        return
    limits = ", ".join(f"{name} {WORLDS[name].rate:.3g}" for name in names)
    note = (
        f"Intervals: 95%, over {len(seeds)} seeds; differences are paired by seed, bold where the "
        f"interval excludes 0. Jobs/s of load 1.0 for each replica: {limits}. Hardware: "
        f"{HARDWARE.name}. {(time.monotonic() - began_s) / 60:.0f} min."
    )
    write_result(args.name, __doc__, table, note=note)


if __name__ == "__main__":
    main()
