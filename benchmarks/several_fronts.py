# SPDX-License-Identifier: Apache-2.0
"""Whether several fronts keep together what one keeps, in virtual time.

The jobs are dealt to the fronts in turn. A front knows its own requests at once, and those of the
others from the states of the replicas. A busy replica tells its state every 125 ms, which is what
it may do in the mean (`core.routing.state_pace`); a real one tells what is little at once. Worlds,
hardware and load 1.0 are those of ``routing_help.py``; all policies are ``slo``.
"""

from __future__ import annotations

import argparse
import time
from statistics import fmean
from typing import Final

from common import markdown, mean_points, write_result
from routing_help import Figures, difference, figures, shown
from routing_worlds import HARDWARE, WORLDS

from vllm_slo.core.routing.state_pace import EARNED_S
from vllm_slo.sim.cluster import Simulation
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.systems import OURS
from vllm_slo.sim.workers import Workers, quiet, run_tasks

FRONTS: Final = (1, 2, 4)
LOADS: Final = (0.7, 0.9, 1.1)
REPLICAS: Final = 4


def window(name: str, fronts: int, rate: float, seed: int) -> tuple[Figures, float]:
    """One window, and the share of the shadows' promises that the replica then refused."""
    quiet()
    world = WORLDS[name]
    jobs = world.make(rate * world.speed(REPLICAS), REPLICAS, seed)
    conditions = Conditions(
        replicas=REPLICAS,
        fronts=fronts,
        state_interval_s=EARNED_S,
        seed=seed,
        slowness=dict(world.slowness),
    )
    simulation = Simulation(jobs, OURS, HARDWARE, conditions, None)
    simulation.run()
    asked = sum(front.asked for front in simulation.fronts)
    wrong = sum(front.wrong for front in simulation.fronts)
    return figures(simulation.results()), wrong / max(asked, 1)


Run = tuple[Figures, float]


def _attained(run: Run) -> float:
    return run[0].attained


def _kept(run: Run) -> float:
    return run[0].kept


def _wrong(run: Run) -> float:
    return run[1]


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shows that it runs; writes nothing")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    names, loads, seeds = list(WORLDS), list(LOADS), range(args.seeds)
    if args.quick:
        names, loads, seeds = ["mixed classes"], [0.9], range(2)
    began_s = time.monotonic()
    keys = [(name, load, fronts) for name in names for load in loads for fronts in FRONTS]
    tasks = [
        (name, fronts, WORLDS[name].rate * load, seed)
        for name, load, fronts in keys
        for seed in seeds
    ]
    with Workers(args.processes) as workers:
        runs = iter(run_tasks(window, tasks, workers))
    found = {key: [next(runs) for _ in seeds] for key in keys}
    rows: list[list[str]] = []
    points: dict[int, tuple[list[float], list[float]]] = {n: ([], []) for n in FRONTS[1:]}
    for (name, load, fronts), cell in found.items():
        alone, against = found[name, load, 1], ["", ""]
        if fronts > 1:
            for place, what in enumerate((_attained, _kept)):
                one, several = [*map(what, alone)], [*map(what, cell)]
                against[place] = difference(one, several)
                points[fronts][place].append(100 * (fmean(several) - fmean(one)))
        rows.append(
            [
                *(name, f"{load:g}", str(fronts)),
                *(shown([*map(what, cell)]) for what in (_attained, _kept, _wrong)),
                *against,
            ]
        )
    summary = markdown(
        ["fronts", "cells", "attained against one front, points", "promises kept, points"],
        [
            [str(fronts), str(len(attained)), *(mean_points(each) for each in (attained, kept))]
            for fronts, (attained, kept) in points.items()
        ],
    )
    head = ["world", "load", "fronts", "attained, %", "promises kept, %", "shadow wrong, %",
            "attained against one front, points", "promises kept, points"]  # fmt: skip
    table = f"{summary}\n\n{markdown(head, rows)}"
    if args.quick:
        print(table)
        return
    note = (
        f"Intervals: 95%, over {len(seeds)} seeds; differences are paired by seed, bold where the "
        f"interval excludes 0. {REPLICAS} replicas. Hardware: {HARDWARE.name}. "
        f"{(time.monotonic() - began_s) / 60:.0f} min."
    )
    write_result("several_fronts", __doc__, table, note=note)


if __name__ == "__main__":
    main()
