# SPDX-License-Identifier: Apache-2.0
"""Whether several fronts keep together what one keeps, in virtual time.

The jobs are dealt to the fronts in turn. A front knows its own requests at once, and those of the
others from the states of the replicas, which are at most 20 ms and one step old. Worlds, hardware
and load 1.0 are those of ``routing_help.py``; all policies are ``slo``.
"""

from __future__ import annotations

import argparse
import time
from typing import Final

from common import markdown, write_result
from routing_help import Figures, difference, figures, shown
from routing_worlds import HARDWARE, WORLDS

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
        replicas=REPLICAS, fronts=fronts, seed=seed, slowness=dict(world.slowness)
    )
    simulation = Simulation(jobs, OURS, HARDWARE, conditions, None)
    simulation.run()
    asked = sum(front.asked for front in simulation.fronts)
    wrong = sum(front.wrong for front in simulation.fronts)
    return figures(simulation.results()), wrong / max(asked, 1)


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
    rows = []
    for (name, load, fronts), cell in found.items():
        alone = found[name, load, 1]
        against = [] if fronts == 1 else [
            difference([run[0].attained for run in alone], [run[0].attained for run in cell]),
            difference([run[0].kept for run in alone], [run[0].kept for run in cell]),
        ]  # fmt: skip
        rows.append(
            [
                *(name, f"{load:g}", str(fronts)),
                shown([run[0].attained for run in cell]),
                shown([run[0].kept for run in cell]),
                shown([run[1] for run in cell]),
                *(against or ["", ""]),
            ]
        )
    head = ["world", "load", "fronts", "attained, %", "promises kept, %", "shadow wrong, %",
            "attained against one front, points", "promises kept, points"]  # fmt: skip
    table = markdown(head, rows)
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
