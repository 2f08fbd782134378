# SPDX-License-Identifier: Apache-2.0
"""How much more load one GPU carries under the same objectives: SLOs-Serve's six scenarios.

    python benchmarks/capacity.py            every table of results/capacity.md, under an hour
    python benchmarks/capacity.py --quick    a tenth of the work: shows that it runs, writes nothing

Each baseline is swept to its best setting on seeds of its own (100, 101); reported are 0, 1, 2.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common import RESULTS, markdown, write_result

from vllm_slo.sim.capacity import (
    TUNING_SEEDS,
    Capacity,
    Case,
    Question,
    Setting,
    Workers,
    best_of,
    find_capacities,
    ratio,
    sweep,
)
from vllm_slo.sim.cluster import Conditions
from vllm_slo.sim.hardware import load_hardware
from vllm_slo.sim.plot import write_pictures
from vllm_slo.sim.report import Report, Row
from vllm_slo.sim.scenarios import make_jobs
from vllm_slo.sim.systems import OURS, STOCK_FAMILIES, System, families

SCENARIOS = {
    "chatbot": ("a100-opt-13b", 300),
    "coder": ("a100-opt-13b", 500),
    "summarizer": ("a100-opt-13b", 300),
    "mixed": ("a100-opt-13b", 360),
    "toolllm": ("a100-toolllama-7b", 220),
    "reasoning": ("h100-llama-8b", 200),
}
"""Scenario -> hardware, jobs per window. The paper's models, but for reasoning: to fill its 1.5B
model on an A100 takes windows of thousands of jobs."""
SEEDS = (0, 1, 2)
NINETY = Question(0.9)
STRICT = Question(0.98)
EVERY = Question(0.9, every=True)
SHED = "shed + EDF"
NOISY = Conditions(bias=1.05, noise=0.10)
BRIEF = (OURS.name, "Sarathi (best budget)", "vLLM priority = deadline", SHED)
"""Families that are run where not all are."""
SCALED = ("chatbot", "coder", "summarizer", "mixed", "toolllm")
"""Scenarios of SLOs-Serve's figure 13."""

Key = tuple[str, str]
"""(scenario, family)"""


@dataclass(frozen=True)
class Plan:
    """How much of it is done."""

    scenarios: Sequence[str] = tuple(SCENARIOS)
    seeds: Sequence[int] = SEEDS
    size: float = 1.0
    precision: float = 0.06
    rough: float = 0.2

    def setting(self, scenario: str, **changes: object) -> Setting:
        """A scenario on its hardware."""
        hardware, jobs = SCENARIOS[scenario]
        plain = Setting(scenario, load_hardware(hardware), jobs=max(40, round(jobs * self.size)))
        return replace(plain, **changes)  # type: ignore[arg-type]


class Progress:
    """One line per phase on stderr."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()

    def phase(self, name: str):  # noqa: ANN201  # a callback
        """A callback for one phase."""

        def show(done: int, of: int) -> None:
            minutes = (time.monotonic() - self.began_s) / 60
            if sys.stderr.isatty() or done == of:
                end = "\n" if done == of else ""
                sys.stderr.write(f"\r{name}: {done}/{of} searches, {minutes:.1f} min{end}")
                sys.stderr.flush()

        return show


def candidates(setting: Setting) -> dict[str, tuple[System, ...]]:
    """Family -> settings, for the tightest TPOT of the scenario.

    Reasoning's prompts of some hundred tokens fill no step: the budget makes no difference there,
    and one is enough. Poisson arrivals are for the strongest baselines.
    """
    jobs = make_jobs(setting.scenario, setting.hardware, rate=1.0, count=50, seed=TUNING_SEEDS[0])
    tightest = min(one.tightest_tpot_s for job in jobs for one in job.rounds)
    found = families(setting.hardware.step_time, tightest)
    if setting.scenario == "reasoning":
        return {family: systems[-1:] for family, systems in found.items() if family in BRIEF}
    if setting.arrivals == "poisson":
        return {family: systems for family, systems in found.items() if family in BRIEF}
    return found


def tune(plan: Plan, settings: Mapping[str, Setting], workers: Workers, progress: Progress):  # noqa: ANN201
    """Best setting of every family on the tuning seeds, for each named setting."""
    rivals: list[tuple[Key, System]] = []
    chosen: dict[Key, System] = {}
    for name, setting in settings.items():
        for family, systems in candidates(setting).items():
            if len(systems) == 1:
                chosen[name, family] = systems[0]
            else:
                rivals += [((name, family), system) for system in systems]
    cases = [
        Case(replace(settings[name], jobs=max(40, settings[name].jobs // 3)), system)
        for (name, _), system in rivals
    ]
    found = find_capacities(
        cases,
        [NINETY],
        TUNING_SEEDS[: len(plan.seeds)],
        precision=plan.rough,
        processes=workers,
        progress=progress.phase("tuning"),
    )
    for key in dict.fromkeys(key for key, _ in rivals):
        places = [n for n, (other, _) in enumerate(rivals) if other == key]
        chosen[key] = best_of([rivals[n][1] for n in places], [found[n][0] for n in places])
    return chosen


def search(
    plan: Plan,
    cases: Mapping[Key, Case],
    questions: Sequence[Question],
    workers: Workers,
    show: object,
) -> dict[Key, tuple[Capacity, ...]]:
    """Capacities of several cases, by the key of each."""
    found = find_capacities(
        list(cases.values()),
        questions,
        plan.seeds,
        precision=plan.precision,
        processes=workers,
        progress=show,  # type: ignore[arg-type]
    )
    return dict(zip(cases, found, strict=True))


def best_stock(found: Mapping[Key, tuple[Capacity, ...]], name: str) -> str:
    """The stock family with the highest reported capacity: stock is given the benefit."""
    known = [family for family in STOCK_FAMILIES if (name, family) in found]
    return max(known, key=lambda family: found[name, family][0].score)


def times(one: Capacity, base: Capacity) -> str:
    """One ratio, for a table."""
    found = ratio(one, base)
    return "-" if found is None else f"{found[0]:.2f}x"


def geo_mean(pairs: Sequence[tuple[Capacity, Capacity]]) -> str:
    """Geometric mean of the ratios."""
    found = [ratio(one, base) for one, base in pairs]
    if any(one is None for one in found):
        return "-"
    return f"{math.exp(sum(math.log(one[0]) for one in found if one) / len(found)):.2f}x"


def scores(pairs: Sequence[tuple[Capacity, Capacity]]) -> list[float]:
    """The ratios; nan where there is none."""
    return [found[0] if (found := ratio(*pair)) else math.nan for pair in pairs]


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a few small windows; writes nothing")
    parser.add_argument("--processes", type=int, default=None, help="default: one per core")
    options = parser.parse_args()
    plan = Plan(("chatbot", "coder"), SEEDS[:1], 0.15, 0.2, 0.5) if options.quick else Plan()
    progress = Progress()
    with Workers(options.processes) as workers:
        run(plan, workers, progress, quick=options.quick)


def run(plan: Plan, workers: Workers, progress: Progress, *, quick: bool) -> None:
    """All phases, then the report."""
    settings = {name: plan.setting(name) for name in plan.scenarios}
    poisson = {
        f"{name}, Poisson": plan.setting(name, arrivals="poisson")
        for name in ("coder", "toolllm")
        if name in plan.scenarios
    }
    everything = {**settings, **poisson}
    chosen = tune(plan, everything, workers, progress)
    cases = {key: Case(everything[key[0]], system) for key, system in chosen.items()}
    found = search(plan, cases, [NINETY], workers, progress.phase("capacity at 90%"))

    stock = {name: best_stock(found, name) for name in everything}
    three = [(n, f) for n in settings for f in (OURS.name, stock[n], SHED)]
    strict = search(
        plan,
        {key: cases[key] for key in three if key[1] != SHED},
        [STRICT, EVERY],
        workers,
        progress.phase("98%, and every application"),
    )
    noisy = search(
        plan,
        {
            key: replace(cases[key], setting=replace(settings[key[0]], conditions=NOISY))
            for key in three
        },
        [NINETY],
        workers,
        progress.phase("5% slow, 10% noise"),
    )
    scaled_names = [name for name in SCALED if name in settings]
    scaled = {(name, "1"): found[name, OURS.name] for name in scaled_names}
    scaled |= search(
        plan,
        {
            (name, "4"): Case(replace(settings[name], conditions=Conditions(replicas=4)), OURS)
            for name in scaled_names
        },
        [NINETY],
        workers,
        progress.phase("replicas"),
    )
    table = targets(settings, poisson, stock, found, noisy, scaled, scaled_names)
    pictured = {
        key: sweep(
            [cases[key]],
            around(found[key[0], OURS.name][0].rate or 1.0),
            plan.seeds[:1],
            with_load=True,
            processes=workers,
            progress=progress.phase(f"picture {key[0]}, {key[1]}"),
        )[0]
        for key in three
    }
    rows = [
        Row(key[1], cases[key].setting, cases[key].system,
            points=tuple(points), capacities=found[key])
        for key, points in pictured.items()
    ]  # fmt: skip
    rows += [
        Row(OURS.name, replace(settings[name], conditions=Conditions(replicas=int(count))), OURS,
            capacities=one)
        for (name, count), one in scaled.items()
    ]  # fmt: skip
    folder = Path(tempfile.mkdtemp()) if quick else RESULTS
    pictures = write_pictures(Report(tuple(rows), tuple(plan.seeds), "make simulate"), folder, 0.9)
    if quick:
        sys.stdout.write(f"{table}\n\n{measures(three, pictured)}\n")
        return
    minutes = (time.monotonic() - progress.began_s) / 60
    write_result(
        "capacity",
        INTRODUCTION.format(seeds=", ".join(map(str, plan.seeds)), minutes=minutes),
        table,
        note="\n\n".join(
            [
                "## Capacity, jobs/s per GPU, with its 95% interval",
                capacities(everything, chosen, found, stock),
                "## Stricter: 98%, and 90% of every application",
                stricter(strict),
                "## At 0.97 of our capacity, whole windows",
                measures(three, pictured),
                "## Step times 5% slower than believed, 10% noise, margin learnt online",
                compared(three, noisy),
                "## Replicas",
                replicas(scaled_names, scaled),
                *(f"![{one.stem}]({one.name})" for one in pictures),
            ]
        ),
    )


def around(rate: float) -> list[float]:
    """Rates of the picture, jobs/s per GPU."""
    return [round(rate * part, 4) for part in (0.4, 0.7, 0.97, 1.3)]


INTRODUCTION = """\
The highest rate, in jobs per second and GPU, at which 90% of the jobs keep every objective they
have (TTFT of every round, worst window of 10 tokens of every stage), by bisection on windows with
seeds {seeds}; the first fifth of each window warms up. The schedulers are vLLM 0.32's own objects
(light twin) and ours over them, under a virtual clock; nobody is told output lengths. Baselines
were given their best setting on other seeds. Step times are roofline models of data sheets
(vllm_slo/sim/profiles_data), not measurements: it is the ratios that are to be read. Took
{minutes:.0f} minutes."""


def targets(settings, poisson, stock, found, noisy, scaled, scaled_names) -> str:  # noqa: ANN001
    """The table of what was aimed at."""
    ours = {name: found[name, OURS.name][0] for name in (*settings, *poisson)}
    by_stock = [(ours[n], found[n, stock[n]][0]) for n in settings]
    by_shed = [(ours[n], found[n, SHED][0]) for n in settings]
    pair = lambda other: [(noisy[n, OURS.name][0], noisy[n, other(n)][0]) for n in settings]  # noqa: E731
    rows = [
        ["geo-mean against the best stock configuration, true T known", "2.2x", "1.93x",
         ">= 2.5x", geo_mean(by_stock)],
        ["geo-mean against shed + EDF", "-", "1.44x", ">= 1.6x", geo_mean(by_shed)],
        ["the same two with T 5% slow and 10% noise, margin learnt online", "-", "-",
         ">= 2.0x / 1.4x",
         f"{geo_mean(pair(stock.__getitem__))} / {geo_mean(pair(lambda n: SHED))}"],
        ["Poisson arrivals, against best stock: " + " / ".join(poisson), "-", "1.56x / 1.31x",
         ">= 1.8x / 1.4x", " / ".join(times(ours[n], found[n, stock[n]][0]) for n in poisson)],
        ["the worst scenario against best stock", "1.14x", "0.81x", ">= 1.0x everywhere",
         f"{min(scores(by_stock)):.2f}x"],
        ["4 replicas against 1, best / worst scenario (same rate per replica = 4x)", "4.6x / ~4x",
         "unclear", ">= 4.6x / >= 4.0x", scaling(scaled, scaled_names)],
    ]  # fmt: skip
    return markdown(["", "SLOs-Serve", "first prototype", "reach", "here"], rows)


def scaling(scaled, names) -> str:  # noqa: ANN001
    """Best and worst gain of four replicas."""
    found = [4 * s for s in scores([(scaled[n, "4"][0], scaled[n, "1"][0]) for n in names])]
    return f"{max(found):.2f}x / {min(found):.2f}x"


def capacities(everything, chosen, found, stock) -> str:  # noqa: ANN001
    """Every system in every scenario."""
    names = list(everything)
    order = list(dict.fromkeys(family for _, family in chosen))
    rows = []
    for family in order:
        cells = []
        for name in names:
            if (name, family) not in found:
                cells.append("")
                continue
            mark = "**" if family in (OURS.name, stock[name]) else ""
            system = chosen[name, family].name.rsplit("-", 1)[-1]
            best = (
                f" ({chosen[name, family].name.removeprefix('disaggregated-').split('-')[0]})"
                if (family == "disaggregated")
                else f" ({system})"
                if family != OURS.name
                else ""
            )
            cells.append(f"{mark}{found[name, family][0].text}{mark}{best}")
        rows.append([family, *cells])
    rows.append(
        [
            "against best stock",
            *(times(found[n, OURS.name][0], found[n, stock[n]][0]) for n in names),
        ]
    )
    rows.append(
        ["against shed + EDF", *(times(found[n, OURS.name][0], found[n, SHED][0]) for n in names)]
    )
    return markdown(["system (best tokens per step)", *names], rows)  # fmt: skip


def stricter(strict) -> str:  # noqa: ANN001
    """The same questions, asked harder."""
    return markdown(
        ["scenario", "system", "98%", "90% of every application"],
        [[n, f, one[0].text, one[1].text] for (n, f), one in strict.items()],
    )


def compared(three, found) -> str:  # noqa: ANN001
    """Ours against each."""
    rows = []
    for name, family in three:
        against = times(found[name, OURS.name][0], found[name, family][0])
        rows.append([name, family, found[name, family][0].text, against])
    return markdown(["scenario", "system", "capacity", "ours against it"], rows)


def replicas(names, scaled) -> str:  # noqa: ANN001
    """Capacity by number of replicas."""
    counts = sorted({int(count) for _, count in scaled})
    rows = []
    for name in names:
        one = scaled[name, "1"][0]
        cells = [scaled[name, str(c)][0] for c in counts]
        rows.append(
            [name, *(c.text for c in cells), *(
                f"{c * s:.2f}x" for c, s in zip(counts, scores([(x, one) for x in cells]),
                                                strict=True) if c > 1)]
        )  # fmt: skip
    head = [f"{c} replica{'s' * (c > 1)}, per GPU" for c in counts]
    return markdown(["scenario", *head, *(f"{c} against 1" for c in counts if c > 1)], rows)


def measures(three, pictured) -> str:  # noqa: ANN001
    """What whole windows show."""
    rows = []
    for name, family in three:
        point = pictured[name, family][2]
        s = point.summary
        late = s.missed_latency_p99_s
        rows.append(
            [name, family, f"{s.attainment:.0%}", f"{s.smallest:.0%}",
             f"{s.token_attainment:.0%}", "-" if late is None else f"{late:.1f} s",
             "-" if s.promised is None else f"{s.promised_missed} of {s.promised}", s.unfinished]
        )  # fmt: skip
    return markdown(
        ["scenario", "system", "attained", "least application", "of tokens",
         "p99 latency of the missed", "promises broken", "unfinished"],
        rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
