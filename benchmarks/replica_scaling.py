# SPDX-License-Identifier: Apache-2.0
"""Capacity per replica from 1 to 64 replicas, simulated, and what the way of routing is worth.

Every number of replicas gets windows of equal length: as many jobs for each replica. Arrivals are
Azure's timestamps, rescaled, or Poisson's where the name of the scenario ends so. Routing is the
front's own code (`core.routing.policy`), which knows of a replica what it said after its last step
and what was sent there since.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from common import RESULTS, markdown, write_result

from vllm_slo.bench import style
from vllm_slo.core.types import RoutingPolicy
from vllm_slo.sim.arrivals import read_trace
from vllm_slo.sim.capacity import find_capacities
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import load_hardware
from vllm_slo.sim.questions import Question
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.statistics import Capacity
from vllm_slo.sim.systems import OURS
from vllm_slo.sim.workers import Workers

NINETY = Question(0.9)
HARDWARE = "a100-opt-13b"
SIZES = (1, 2, 4, 8, 16, 32, 64)
COMPARED = 8
"""Replicas on which the policies are compared."""


@dataclass(frozen=True)
class Plan:
    """How much of it is done. ``jobs``: for each replica and window."""

    scenarios: Sequence[str]
    sizes: Sequence[int] = SIZES
    jobs: int = 100
    compared: int = COMPARED
    precision: float = 0.06

    def seeds(self, replicas: int) -> tuple[int, ...]:
        """Seeds of the windows; fewer replicas have shorter windows, so there are more of them."""
        return tuple(range(max(2, min(6, 12 // replicas))))


def capacity(
    plan: Plan, scenario: str, conditions: Conditions, start: float | None, workers: Workers
) -> Capacity:
    """Capacity of one size and policy, jobs/s per GPU."""
    name, _, arrivals = scenario.partition("-")
    setting = Setting(
        name, load_hardware(HARDWARE), conditions, jobs=plan.jobs, arrivals=arrivals or None
    )
    began_s = time.monotonic()
    ((found,),) = find_capacities(
        [Case(setting, OURS)],
        [NINETY],
        plan.seeds(conditions.replicas),
        start=None if start is None else lambda _: start,
        precision=plan.precision,
        processes=workers,
    )
    sys.stderr.write(
        f"{scenario}, {conditions.replicas} replicas, {conditions.routing}: {found.text} "
        f"({time.monotonic() - began_s:.0f} s)\n"
    )
    return found


def scaling(plan: Plan, workers: Workers) -> dict[str, dict[int, Capacity]]:
    """Scenario -> replicas -> capacity."""
    found: dict[str, dict[int, Capacity]] = {}
    for scenario in plan.scenarios:
        start: float | None = None
        for replicas in plan.sizes:
            one = capacity(plan, scenario, Conditions(replicas=replicas), start, workers)
            found.setdefault(scenario, {})[replicas] = one
            start = one.rate or start
    return found


def routing(
    plan: Plan, known: Mapping[str, Mapping[int, Capacity]], workers: Workers
) -> dict[str, dict[str, Capacity]]:
    """Scenario -> policy -> capacity of ``plan.compared`` replicas."""
    found: dict[str, dict[str, Capacity]] = {}
    for scenario in plan.scenarios:
        ours = known[scenario][plan.compared]
        found[scenario] = {"slo": ours}
        for policy in get_args(RoutingPolicy):
            if policy != "slo":
                conditions = Conditions(replicas=plan.compared, routing=policy)
                one = capacity(plan, scenario, conditions, ours.rate, workers)
                found[scenario][policy] = one
    return found


def shown(one: Capacity) -> str:
    """A capacity with its interval, or with both windows if there are only two."""
    if len(one.windows) > 2 or one.rate is None:
        return one.text
    return f"{one.rate:.3g} ({', '.join(f'{window.kept or 0.0:.3g}' for window in one.windows)})"


def against(one: Capacity, base: Capacity) -> str:
    """A ratio of means; the windows of two sizes are not the same jobs."""
    return f"{one.rate / base.rate:.2f}x" if one.rate and base.rate else "-"


def draw(found: Mapping[str, Mapping[int, Capacity]], path: Path) -> None:
    """Capacity per GPU by number of replicas."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(style.PICTURE):
        figure = Figure(figsize=(4.6 * len(found), 3.4), layout="constrained")
        for place, (scenario, sizes) in enumerate(found.items()):
            axes = figure.add_subplot(1, len(found), place + 1)
            numbers = [n for n, one in sizes.items() if one.rate]
            rates = [sizes[n].rate or 0.0 for n in numbers]
            # An interval from two windows says nothing.
            error = [(sizes[n].half_width or 0.0) * (len(sizes[n].windows) > 2) for n in numbers]
            axes.errorbar(numbers, rates, error, marker="o", capsize=3)
            axes.axhline(rates[0], linestyle=":", linewidth=0.9, color=style.MUTED)
            axes.set_xscale("log", base=2)
            axes.set_xticks(numbers, [str(n) for n in numbers])
            axes.set_ylim(0, 1.25 * max(rates))
            axes.set_title(scenario)
            axes.set_xlabel("replicas")
            axes.set_ylabel("jobs/s per GPU")
        figure.suptitle(
            "Capacity at 90% per GPU\nby number of replicas (dotted: one)",
            fontsize=12, fontweight="bold", x=0.01, ha="left",
        )  # fmt: skip
        figure.savefig(path, dpi=130)


def main() -> None:
    """Search, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shows that it runs; writes nothing")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--scenarios", default="chatbot,coder", help="e.g. coder-poisson")
    parser.add_argument("--name", default="replica_scaling", help="of the result and the picture")
    args = parser.parse_args()
    plan = Plan(("chatbot",), (1, 2, 4), 20, 4, 0.3)
    if not args.quick:
        plan = Plan(args.scenarios.split(","))
    began_s = time.monotonic()
    with Workers(args.processes) as workers:
        found = scaling(plan, workers)
        policies = routing(plan, found, workers)
    rows = [
        [scenario, replicas, len(one.windows), shown(one), against(one, sizes[1])]
        for scenario, sizes in found.items()
        for replicas, one in sizes.items()
    ]
    head = ["scenario", "replicas", "windows", "capacity, jobs/s per GPU", "per GPU against one"]
    table = markdown(head, rows)
    rows = [
        [scenario, policy, shown(one), against(one, by_policy["slo"])]
        for scenario, by_policy in policies.items()
        for policy, one in by_policy.items()
    ]
    head = ["scenario", f"routing of {plan.compared} replicas", "capacity, jobs/s per GPU",
            "against slo"]  # fmt: skip
    table += "\n\n" + markdown(head, rows)
    if args.quick:
        sys.stdout.write(table + "\n")
        return
    draw(found, RESULTS / f"{args.name}.png")
    sources = " and ".join(read_trace(kind).source for kind in ("azure-conv", "azure-code"))
    note = (
        f"Traces: {sources}. Intervals: 95%; in brackets: the windows, where there are two. "
        "The replicas are the same engine "
        f"under every policy ({OURS.name}); only where a request goes differs. "
        f"{(time.monotonic() - began_s) / 60:.0f} min.\n\n"
        f"![Capacity per GPU by number of replicas]({args.name}.png)"
    )
    write_result(args.name, __doc__, table, note=note)


if __name__ == "__main__":
    main()
