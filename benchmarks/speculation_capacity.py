# SPDX-License-Identifier: Apache-2.0
"""What speculation is worth in capacity: with drafts of planned lengths against none, simulated.

    python benchmarks/speculation_capacity.py            results/speculation_capacity.md
    python benchmarks/speculation_capacity.py --quick    two scenarios, small: writes nothing

SLOs-Serve counts SLO-adaptive speculation (section 3.2.3) among what raises capacity (section 6.1).
Objectives and hardware are those of ``capacity.py``, windows are shorter; the draft of each
hardware is in its profile (vllm_slo/sim/profiles_data).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from common import Stopwatch, markdown, times, write_result

from vllm_slo.core.speculation.draft_lengths import plan_lengths
from vllm_slo.core.speculation.tiers import Tier
from vllm_slo.sim.capacity import find_capacities, sweep
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import load_hardware
from vllm_slo.sim.questions import Question
from vllm_slo.sim.scenarios import LOOSE_TPOT_S, TIGHT_TPOT_S, applications_of
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.statistics import Capacity, ratio
from vllm_slo.sim.systems import OURS, TREES, System, parse_system, speculating
from vllm_slo.sim.workers import Workers, quiet

SCENARIOS: Mapping[str, tuple[str, int]] = {
    "chatbot": ("a100-opt-13b", 150),
    "coder": ("a100-opt-13b", 250),
    "coder, Poisson": ("a100-opt-13b", 250),
    "summarizer": ("a100-opt-13b", 150),
    "mixed": ("a100-opt-13b", 180),
    "toolllm": ("a100-toolllama-7b", 110),
    "reasoning": ("h100-llama-8b", 200),
    "adaserve": ("h100-llama-8b", 200),
}
"""Scenario -> hardware, jobs per window."""
PAPER = ("chatbot", "coder", "summarizer", "mixed")
"""Scenarios that SLOs-Serve runs with a draft model."""
SEEDS = (0, 1, 2)
NINETY = Question(0.9)
ACCEPTANCE = 0.7
"""Assumed: SLOs-Serve gives no figure. The EAGLE-3 head of Llama-3.1-8B yields 2.8 to 3.5 tokens
per step of 7 drafts (model cards), which is 0.65 to 0.74."""
OTHERS = (0.5, 0.9)
SHORTEST_S = 10.0
"""Seconds; a window whose jobs all come within it says nothing about a rate."""
CONTEXT = 1000
"""KV tokens of a request where equations are asked."""
STOCK = parse_system("fcfs-2048")
CHAINS = speculating(OURS)
PAIRS = ((OURS, CHAINS), (OURS, TREES), (STOCK, speculating(STOCK, 3)))
"""(system, the same with speculation)."""


@dataclass(frozen=True)
class Plan:
    """The size of the study."""

    scenarios: Sequence[str] = tuple(SCENARIOS)
    seeds: Sequence[int] = SEEDS
    size: float = 1.0
    precision: float = 0.06

    def setting(self, name: str, acceptance: float) -> Setting:
        """A scenario on its hardware; every application's drafts are accepted alike."""
        hardware, jobs = SCENARIOS[name]
        scenario, _, arrivals = name.partition(", ")
        return Setting(
            scenario,
            load_hardware(hardware),
            Conditions(acceptance=dict.fromkeys(applications_of(scenario), acceptance)),
            jobs=max(40, round(jobs * self.size)),
            arrivals=arrivals.lower() or None,
        )


Key = tuple[str, str, float]
"""(scenario, system, acceptance); without drafts the acceptance is 0."""


class Study:
    """Capacities by key, and whole windows at the capacity without speculation."""

    def __init__(self, plan: Plan, acceptance: float, workers: Workers) -> None:
        self.plan, self.acceptance, self.workers = plan, acceptance, workers
        self.watch = Stopwatch()
        self.found: dict[Key, Capacity] = {}

    def search(self, keys: Mapping[Key, System], seeds: Sequence[int], what: str) -> None:
        """Capacities of the systems in their scenarios."""
        cases = [
            Case(self.plan.setting(name, acceptance), system)
            for (name, _, acceptance), system in keys.items()
        ]
        found = find_capacities(
            cases,
            [NINETY],
            seeds,
            precision=self.plan.precision,
            processes=self.workers,
            progress=self.watch.phase(what),
        )
        self.found |= dict(zip(keys, (one for (one,) in found), strict=True))

    def run(self) -> None:
        """With and without, one scenario after another; then other acceptances, and why."""
        for name in self.plan.scenarios:
            systems = {
                (name, one.name, self.acceptance * one.speculates): one
                for pair in PAIRS
                for one in pair
            }
            self.search(systems, self.plan.seeds, name)
        others = {
            (name, one.name, other): one
            for name in self.plan.scenarios
            for other in OTHERS
            for one in (CHAINS, TREES)
        }
        self.search(others, self.plan.seeds[:1], "other acceptances")

    def of(self, name: str, one: System, acceptance: float | None = None) -> Capacity:
        """One capacity that was found."""
        if acceptance is None:
            acceptance = self.acceptance
        return self.found[name, one.name, acceptance if one.speculates else 0.0]

    def gain(
        self, name: str, plain: System, drafted: System, acceptance: float | None = None
    ) -> tuple[float, float, float] | None:
        """With speculation over without (mean, low, high), on the windows that both ran; None where
        either has no answer, or none that means anything: its jobs came all at once."""
        one, other = self.of(name, drafted, acceptance), self.of(name, plain)
        if max(one.score, other.score) > SCENARIOS[name][1] / SHORTEST_S:
            return None
        count = min(len(one.windows), len(other.windows))
        one, other = (Capacity.of(NINETY, each.windows[:count]) for each in (one, other))
        return ratio(one, other)

    def capacities(self) -> str:
        """The table of the claim."""
        rows = []
        for name in self.plan.scenarios:
            hardware = load_hardware(SCENARIOS[name][0])
            row = [name, f"{hardware.name}, {hardware.draft.name if hardware.draft else '-'}"]
            for plain, drafted in PAIRS:
                one, other = self.of(name, plain), self.of(name, drafted)
                row += [one.text] * (drafted is not TREES)
                row += [other.text, times(self.gain(name, plain, drafted))]
            rows.append(row)
        for title, names in (("paper's with a draft", PAPER), ("all", self.plan.scenarios)):
            means = [self.mean(names, *pair) for pair in PAIRS]
            cells = ["", "", means[0], "", means[1], "", "", means[2]]
            rows.append([f"**geo-mean, {title}**", "", *cells])
        head = ["scenario", "hardware, draft"]
        for plain, drafted in PAIRS:
            head += [plain.name] * (drafted is not TREES)
            head += [drafted.name, "with : without (95%)"]
        return markdown(head, rows)

    def mean(self, names: Sequence[str], plain: System, drafted: System) -> str:
        """Geometric mean of the gains of the scenarios that have one, and how many have not."""
        gains = [self.gain(name, plain, drafted) for name in names if name in self.plan.scenarios]
        means = [gain[0] for gain in gains if gain]
        if not means:
            return "-"
        missing = f", without {len(gains) - len(means)}" if len(means) < len(gains) else ""
        return fold(statistics.geometric_mean(means)) + missing

    def sensitivity(self) -> str:
        """The gain at other acceptances."""
        shares = sorted({*OTHERS, self.acceptance})
        rows = [
            [name, *(self._both(name, share) for share in shares)] for name in self.plan.scenarios
        ]
        head = ["scenario", *(f"accepted: {share:g}" for share in shares)]
        return markdown(head, rows)

    def _both(self, name: str, acceptance: float) -> str:
        """The gains of chains and of trees."""
        drafted = (CHAINS, TREES)
        gains = (self.gain(name, OURS, one, acceptance) for one in drafted)
        return ", ".join(fold(gain[0]) if gain else "-" for gain in gains)

    def reasons(self) -> str:
        """Whole first windows at our capacity without speculation: what stood in the way."""
        rows = []
        for name in self.plan.scenarios:
            setting = self.plan.setting(name, self.acceptance)
            rate = self.of(name, OURS).score
            for system in (OURS, CHAINS, TREES):
                (points,) = sweep(
                    [Case(setting, system)], [rate], self.plan.seeds[:1], processes=self.workers
                )
                found = points[0].summary
                why = ", ".join(f"{count} {reason}" for reason, count in found.reasons.items())
                rows.append(
                    [name, f"{rate:.3g}", system.name, f"{found.attainment:.0%}",
                     f"{1e3 * (found.tpot_p50_s or 0):.0f} / {1e3 * (found.tpot_p99_s or 0):.0f}",
                     f"{found.promised_missed} of {found.promised}", why or "-"]
                )  # fmt: skip
        head = ["scenario", "jobs/s per GPU", "system", "attained", "TPOT ms, p50 / p99",
                "promises broken", "what stood in the way"]  # fmt: skip
        return markdown(head, rows)


def in_theory(acceptance: float) -> str:
    """The planner's own objective: prompt tokens per second beside decodes."""
    rows = []
    for name in dict.fromkeys(hardware for hardware, _ in SCENARIOS.values()):
        hardware = load_hardware(name)
        beside = hardware.speculating()
        for share in (0.1, 0.4, 0.8):
            row: list[object] = [name, round(share * beside.kv_tokens / CONTEXT), f"{share:.0%}"]
            for tpot_s in (TIGHT_TPOT_S, LOOSE_TPOT_S):
                tiers = [Tier(max(1, int(share * beside.kv_tokens / CONTEXT)), tpot_s, acceptance)]
                context = int(share * beside.kv_tokens)
                one, other = (
                    plan_lengths(
                        tiers,
                        each.step_time,
                        1 + drafts,
                        prompts=True,
                        context_tokens=context,
                        least_passes=min(drafts, 1),
                    )
                    for each, drafts in ((hardware, 0), (beside, CHAINS.drafts))
                )
                row += [other.lengths[0], fold(other.per_second / one.per_second)]
            rows.append(row)
    head = ["hardware", "requests that decode", "KV in use"]
    for tpot_s in (TIGHT_TPOT_S, LOOSE_TPOT_S):
        head += [f"tokens verified at {1e3 * tpot_s:.0f} ms", "prompt tokens/s, with : without"]
    return markdown(head, rows)


def fold(value: float) -> str:
    """A ratio."""
    return f"{value:.2f}x"


INTRODUCTION = """\
The highest rate, in jobs per second and GPU, at which 90% of the jobs keep every objective (TTFT of
every round, worst window of 10 tokens of every stage), by bisection on windows with seeds {seeds};
objectives and hardware are those of [capacity.md](capacity.md), windows are shorter. `{ours}`
plans at most {drafts} drafts of vLLM's own draft model for each request by its TPOT and learns
online how many are accepted; `{trees}` is what `vllm-slo serve --draft-model` does; `{stock}`
is vLLM's own scheduler with 3 drafts for everybody. A drafted token is accepted with probability
{acceptance:g} if those before it were: assumed, SLOs-Serve gives no figure. Each further guess of a
tree has 15% of the rest: assumed, too.

Speculation is not free here: a step is charged each pass of the draft and the tokens that the draft
reads, and its weights and its KV take memory from the target's (4% to 9% of the KV tokens). The
passes of vLLM's draft model are those that its worker runs: after each step as many as the
scheduler asks for and one at least, whether the drafts are verified or not. The draft of trees may
rest, and reads later what it has missed; trees take some blocks of KV more. OPT-125M is
SLOs-Serve's draft; it runs toolllm and reasoning without one, so those drafts are chosen. Ratios
are geometric means over the windows, compared pairwise; a dash: no rate is too high for a window of
so few jobs. The last two rows leave such scenarios out. vLLM 0.32's scheduler object (light
scheduler) and ours over it, in virtual time; step times are rooflines of data sheets.
Took {minutes:.0f} minutes in {processes}."""


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="two small scenarios; writes nothing")
    parser.add_argument("--processes", type=int, default=None, help="default: one per core")
    parser.add_argument(
        "--acceptance", type=float, default=ACCEPTANCE, help=f"default: {ACCEPTANCE}"
    )
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=tuple(SCENARIOS))
    options = parser.parse_args()
    quiet()
    plan = Plan(options.scenarios)
    if options.quick:
        plan = replace(Plan(("chatbot", "coder")), seeds=SEEDS[:1], size=0.15, precision=0.5)
    with Workers(options.processes) as workers:
        study = Study(plan, options.acceptance, workers)
        study.run()
        parts = (
            study.capacities(),
            study.sensitivity(),
            study.reasons(),
            in_theory(options.acceptance),
        )
    if options.quick:
        sys.stdout.write("\n\n".join(parts) + "\n")
        return
    count = workers.processes
    write_result(
        "speculation_capacity",
        INTRODUCTION.format(
            seeds=", ".join(map(str, plan.seeds)),
            ours=CHAINS.name,
            trees=TREES.name,
            stock=PAIRS[-1][1].name,
            drafts=CHAINS.drafts,
            acceptance=options.acceptance,
            minutes=study.watch.minutes,
            processes="one process" if count == 1 else f"{count} processes",
        ),
        parts[0],
        note=f"## If other shares were accepted: `{CHAINS.name}` and `{TREES.name}` : "
        f"`{OURS.name}`, first window\n\n{parts[1]}\n\n"
        f"## At the capacity without speculation, the whole first window\n\n{parts[2]}\n\n"
        "## What there is to gain: the planner's objective (SLOs-Serve, appendix D), "
        f"{CONTEXT} tokens of KV per request\n\n{parts[3]}",
    )


if __name__ == "__main__":
    main()
