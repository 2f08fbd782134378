# SPDX-License-Identifier: Apache-2.0
"""How much more load one GPU carries under the same objectives: five of SLOs-Serve's scenarios.

    python benchmarks/capacity.py            every table and picture of results/capacity.md
    python benchmarks/capacity.py --quick    a tenth of the work: shows that it runs, writes nothing

Each baseline is swept to its best setting on seeds of its own (100, 101); reported are 0, 1, 2.

A window lasts at least ten lifetimes of a job. In a shorter one the engine fills and empties, and
a rate looks kept that would not be kept for long. A lifetime is the mean latency of jobs that
attain near our capacity: 10.5 s in chatbot (in mixed, too), 9.2 s in summarizer, 8.1 s in toolllm,
1.4 s in coder. Reasoning, the sixth scenario, is left out: a job lives for 130 s, so a window needs
1,500 jobs, and one run of it takes minutes. Windows of 200 jobs, which lasted for 1.5 lifetimes,
put its capacity at 1.06 jobs/s; in a window of 1,500 jobs at 1.0 jobs/s, 71% attain with ours and
none with stock vLLM.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common import RESULTS, Stopwatch, markdown, times, write_result

from vllm_slo.sim.arrivals import read_trace
from vllm_slo.sim.capacity import TUNING_SEEDS, best_of, find_capacities, sweep
from vllm_slo.sim.ceiling import find_ceilings
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import load_hardware
from vllm_slo.sim.plot import write_pictures
from vllm_slo.sim.questions import Question
from vllm_slo.sim.report import Report, Row
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.statistics import Capacity, ratio
from vllm_slo.sim.systems import OURS, STOCK_FAMILIES, System, families
from vllm_slo.sim.workers import Workers
from vllm_slo.sim.workload import make_jobs

SCENARIOS = {
    "chatbot": ("a100-opt-13b", 800),
    "coder": ("a100-opt-13b", 500),
    "summarizer": ("a100-opt-13b", 480),
    "mixed": ("a100-opt-13b", 480),
    "toolllm": ("a100-toolllama-7b", 400),
}
"""Scenario -> hardware (the paper's models), jobs per window."""
SEEDS = (0, 1, 2)
NINETY = Question(0.9)
STRICT = Question(0.98)
EVERY = Question(0.9, every=True)
SHED = "shed + EDF"
NOISY = Conditions(bias=1.05, noise=0.10)
BRIEF = (OURS.name, "Sarathi (best budget)", "vLLM priority = deadline", SHED)
"""Families that are run if not all are."""
SCALED = ("chatbot", "coder", "summarizer", "mixed", "toolllm")
"""Scenarios of SLOs-Serve's figure 13."""

AT_CAPACITY = 2
"""Place of 0.97 of our capacity among the rates of ``around``."""

Key = tuple[str, str]
"""(scenario, family)"""
Found = Mapping[Key, tuple[Capacity, ...]]


@dataclass(frozen=True)
class Plan:
    """The size of the study."""

    scenarios: Sequence[str] = tuple(SCENARIOS)
    seeds: Sequence[int] = SEEDS
    size: float = 1.0
    precision: float = 0.06
    rough: float = 0.2

    def setting(self, scenario: str) -> Setting:
        """A scenario on its hardware."""
        hardware, jobs = SCENARIOS[scenario]
        return Setting(scenario, load_hardware(hardware), jobs=max(40, round(jobs * self.size)))


class Study:
    """All measurements, phase by phase; each phase prints its table at its end."""

    def __init__(self, plan: Plan, workers: Workers) -> None:
        self.plan = plan
        self.workers = workers
        self.watch = Stopwatch()
        self.settings = {name: plan.setting(name) for name in plan.scenarios}
        self.poisson = {
            f"{name}, Poisson": replace(self.settings[name], arrivals="poisson")
            for name in ("coder", "toolllm")
            if name in plan.scenarios
        }
        self.everything = {**self.settings, **self.poisson}
        self.scaled = [name for name in SCALED if name in self.settings]
        self.sections: dict[str, str] = {}

    def tell(self, title: str, text: str) -> None:
        """Keep a section of the result, and print it."""
        self.sections[title] = text
        sys.stdout.write(f"## {title}\n\n{text}\n\n")
        sys.stdout.flush()

    def search(
        self, name: str, cases: Mapping[Key, Case], questions: Sequence[Question] = (NINETY,)
    ) -> Found:
        """Capacities of several cases, by the key of each."""
        found = find_capacities(
            list(cases.values()),
            questions,
            self.plan.seeds,
            precision=self.plan.precision,
            processes=self.workers,
            progress=self.watch.phase(name),
        )
        return dict(zip(cases, found, strict=True))

    def bound(
        self, name: str, cases: Mapping[Key, Case], questions: Sequence[Question] = (NINETY,)
    ) -> Found:
        """Ceilings of several cases; systems with as many engines share one."""
        kinds = {key: (key[0], case.engines) for key, case in cases.items()}
        some = {kinds[key]: case for key, case in cases.items()}
        found = find_ceilings(
            list(some.values()),
            questions,
            self.plan.seeds,
            precision=self.plan.precision,
            processes=self.workers,
            progress=self.watch.phase(f"ceilings, {name}"),
        )
        by_kind = dict(zip(some, found, strict=True))
        return {key: by_kind[kind] for key, kind in kinds.items()}

    def run(self) -> None:
        """Every phase."""
        self.tune()
        self.find()
        self.ask_harder()
        self.add_noise()
        self.add_replicas()
        self.look()

    def tune(self) -> None:
        """Best setting of every family on the tuning seeds."""
        rivals: list[tuple[Key, System]] = []
        chosen: dict[Key, System] = {}
        for name, setting in self.everything.items():
            for family, systems in candidates(setting).items():
                if len(systems) == 1:
                    chosen[name, family] = systems[0]
                else:
                    rivals += [((name, family), system) for system in systems]
        short = {
            name: replace(one, jobs=max(40, one.jobs // 3)) for name, one in self.everything.items()
        }
        found = find_capacities(
            [Case(short[name], system) for (name, _), system in rivals],
            [NINETY],
            TUNING_SEEDS[: len(self.plan.seeds)],
            precision=self.plan.rough,
            processes=self.workers,
            progress=self.watch.phase("tuning"),
        )
        for key in dict.fromkeys(key for key, _ in rivals):
            places = [n for n, (other, _) in enumerate(rivals) if other == key]
            chosen[key] = best_of([rivals[n][1] for n in places], [found[n][0] for n in places])
        self.cases = {key: Case(self.everything[key[0]], one) for key, one in chosen.items()}

    def find(self) -> None:
        """Capacity of every system in every scenario."""
        self.found = self.search("capacity at 90%", self.cases)
        self.stock = {name: best_stock(self.found, name) for name in self.everything}
        self.three = [
            (name, family)
            for name in self.settings
            for family in dict.fromkeys((OURS.name, self.stock[name], SHED))
        ]
        self.tell("Capacity, jobs/s per GPU, with its 95% interval", self._capacities())
        self.ceilings = self.bound("90%", self.cases)
        self.tell("Ceiling, jobs/s per GPU, and each system's share of it", self._shares())

    def _shares(self) -> str:
        names = list(self.everything)
        rows = [["ceiling", *(self.ceilings[name, OURS.name][0].text for name in names)]]
        for family in dict.fromkeys(family for _, family in self.cases):
            keys = [(name, family) for name in names]
            rows.append([family, *(share(self.found, self.ceilings, key) for key in keys)])
        return markdown(["system", *names], rows)

    def _capacities(self) -> str:
        names = list(self.everything)
        rows = [
            [family, *(self._capacity(name, family) for name in names)]
            for family in dict.fromkeys(family for _, family in self.cases)
        ]
        for title, rival in (("best stock", self.stock), (SHED, dict.fromkeys(names, SHED))):
            ours = [times_of(self.found, (name, OURS.name), (name, rival[name])) for name in names]
            rows.append([f"ours against {title} (95%)", *ours])
        return markdown(["system (best tokens per step)", *names], rows)

    def _capacity(self, name: str, family: str) -> str:
        if (name, family) not in self.found:
            return ""
        text = self.found[name, family][0].text
        if family == OURS.name:
            return f"**{text}**"
        if family == self.stock[name]:
            text = f"**{text}**"
        system = self.cases[name, family].system.name
        if family == "disaggregated":
            return f"{text} ({system.removeprefix('disaggregated-').split('-')[0]})"
        return f"{text} ({system.rsplit('-', 1)[-1]})"

    def ask_harder(self) -> None:
        """98%, and 90% of every application."""
        cases = {key: self.cases[key] for key in self.three if key[1] != SHED}
        found = self.search("98%, and every application", cases, (STRICT, EVERY))
        bounds = self.bound("98%, and every application", cases, (STRICT, EVERY))
        rows = [
            [*key, *(cell for n in (0, 1) for cell in (one[n].text, share(found, bounds, key, n)))]
            for key, one in found.items()
        ]
        head = ["scenario", "system", "98%", "of its ceiling",
                "90% of every application", "of its ceiling"]  # fmt: skip
        self.tell("Stricter: 98%, and 90% of every application", markdown(head, rows))

    def add_noise(self) -> None:
        """The true step times differ from the believed ones."""
        cases = {
            key: replace(self.cases[key], setting=replace(self.settings[key[0]], conditions=NOISY))
            for key in self.three
        }
        self.noisy = self.search("5% slow, 10% noise", cases)
        bounds = self.bound("5% slow", cases)
        rows = [
            [name, family, self.noisy[name, family][0].text,
             share(self.noisy, bounds, (name, family)),
             times_of(self.noisy, (name, OURS.name), (name, family))]
            for name, family in self.three
        ]  # fmt: skip
        head = ["scenario", "system", "capacity", "of its ceiling", "ours against it (95%)"]
        self.tell(
            "Step times 5% slower than believed, 10% noise, margin learnt online",
            markdown(head, rows),
        )

    def add_replicas(self) -> None:
        """Four replicas against one."""
        four = Conditions(replicas=4)
        self.four = self.search(
            "replicas",
            {
                (name, OURS.name): Case(replace(self.settings[name], conditions=four), OURS)
                for name in self.scaled
            },
        )
        rows = [
            [name, self.found[name, OURS.name][0].text, one[0].text,
             f"{4 * self._gain(name):.2f}x"]
            for (name, _), one in self.four.items()
        ]  # fmt: skip
        head = ["scenario", "1 replica, per GPU", "4 replicas, per GPU", "4 against 1"]
        self.tell("Replicas", markdown(head, rows))

    def _gain(self, name: str) -> float:
        return score(self.four[name, OURS.name][0], self.found[name, OURS.name][0])

    def look(self) -> None:
        """Whole windows around our capacity: the curves of the picture, and what they show."""
        self.points = {
            key: sweep(
                [self.cases[key]],
                around(self.found[key[0], OURS.name][0].rate or 1.0),
                self.plan.seeds[:1],
                with_load=True,
                processes=self.workers,
                progress=self.watch.phase(f"picture {key[0]}, {key[1]}"),
            )[0]
            for key in self.three
        }
        rows = []
        for (name, family), points in self.points.items():
            s = points[AT_CAPACITY].summary
            late = s.missed_latency_p99_s
            rows.append(
                [name, family, f"{s.attainment:.0%}", f"{s.smallest:.0%}",
                 f"{s.token_attainment:.0%}", "-" if late is None else f"{late:.1f} s",
                 "-" if s.promised is None else f"{s.promised_missed} of {s.promised}",
                 s.unfinished,
                 ", ".join(f"{count} {reason}" for reason, count in s.reasons.items()) or "-"]
            )  # fmt: skip
        head = ["scenario", "system", "attained", "least application", "of tokens",
                "p99 latency of the missed", "promises broken", "unfinished",
                "what stood in the way"]  # fmt: skip
        self.tell("At 0.97 of our capacity, the whole first window", markdown(head, rows))

    def targets(self) -> str:
        """The table of the targets."""
        names = list(self.settings)
        ours = [(name, OURS.name) for name in names]
        stock = [(name, self.stock[name]) for name in names]
        shed = [(name, SHED) for name in names]
        poisson = [
            score(self.found[name, OURS.name][0], self.found[name, self.stock[name]][0])
            for name in self.poisson
        ]
        gains = [4 * self._gain(name) for name in self.scaled]
        rows = [
            ["geo-mean against the best stock configuration, true T known", "2.2x", "1.93x",
             ">= 2.5x", f"{geo_mean(self.found, ours, stock):.2f}x"],
            ["geo-mean against shed + EDF", "-", "1.44x", ">= 1.6x",
             f"{geo_mean(self.found, ours, shed):.2f}x"],
            ["the same two with T 5% slow and 10% noise, margin learnt online", "-", "-",
             ">= 2.0x / 1.4x", " / ".join(
                 f"{geo_mean(self.noisy, ours, other):.2f}x" for other in (stock, shed))],
            ["Poisson arrivals, against best stock: " + " / ".join(self.poisson), "-",
             "1.56x / 1.31x", ">= 1.8x / 1.4x", " / ".join(f"{one:.2f}x" for one in poisson)],
            ["the worst scenario against best stock", "1.14x", "0.81x", ">= 1.0x everywhere",
             f"{min(scores(self.found, ours, stock)):.2f}x"],
            ["4 replicas against 1, best / worst scenario (same rate per replica = 4x)",
             "4.6x / ~4x", "unclear", ">= 4.6x / >= 4.0x",
             f"{max(gains):.2f}x / {min(gains):.2f}x"],
        ]  # fmt: skip
        return markdown(["", "SLOs-Serve", "first prototype", "reach", "here"], rows)

    def draw(self, folder: Path) -> list[Path]:
        """The pictures."""
        rows = [
            Row(key[1], self.cases[key].setting, self.cases[key].system,
                points=tuple(points), capacities=self.found[key])
            for key, points in self.points.items()
        ]  # fmt: skip
        for name in self.scaled:
            for replicas, found in ((1, self.found), (4, self.four)):
                setting = replace(self.settings[name], conditions=Conditions(replicas=replicas))
                one = found[name, OURS.name]
                rows.append(Row(OURS.name, setting, OURS, capacities=one))
        report = Report(tuple(rows), tuple(self.plan.seeds), "make simulate")
        return write_pictures(report, folder, NINETY.target)


def candidates(setting: Setting) -> dict[str, tuple[System, ...]]:
    """Family -> settings, for the tightest TPOT of the scenario.

    Poisson arrivals are for the strongest baselines.
    """
    jobs = make_jobs(setting.scenario, setting.hardware, rate=1.0, count=50, seed=TUNING_SEEDS[0])
    tightest = min(one.tightest_tpot_s for job in jobs for one in job.rounds)
    found = families(setting.hardware.step_time, tightest)
    if setting.arrivals == "poisson":
        return {family: systems for family, systems in found.items() if family in BRIEF}
    return found


def best_stock(found: Found, name: str) -> str:
    """The stock family with the highest reported capacity, which favours stock."""
    known = [family for family in STOCK_FAMILIES if (name, family) in found]
    return max(known, key=lambda family: found[name, family][0].score)


def score(one: Capacity, base: Capacity) -> float:
    """The ratio; nan if there is none."""
    return found[0] if (found := ratio(one, base)) else math.nan


def scores(found: Found, ours: Sequence[Key], others: Sequence[Key]) -> list[float]:
    """Ratios, pair by pair."""
    return [score(found[a][0], found[b][0]) for a, b in zip(ours, others, strict=True)]


def geo_mean(found: Found, ours: Sequence[Key], others: Sequence[Key]) -> float:
    """Geometric mean of the ratios."""
    return math.exp(statistics.fmean(math.log(one) for one in scores(found, ours, others)))


def times_of(found: Found, one: Key, base: Key) -> str:
    """One ratio with its interval, for a table."""
    return times(None if one == base else ratio(found[one][0], found[base][0]))


def share(found: Found, ceilings: Found, key: Key, place: int = 0) -> str:
    """A capacity over its ceiling, for a table; ``place`` of the question."""
    if key not in found:
        return ""
    part = ratio(found[key][place], ceilings[key][place])
    return "-" if part is None else f"{part[0]:.0%}"


def around(rate: float) -> list[float]:
    """Rates of the picture, jobs/s per GPU."""
    return [round(rate * part, 4) for part in (0.4, 0.7, 0.97, 1.3)]


INTRODUCTION = """\
The highest rate, in jobs per second and GPU, at which 90% of the jobs keep every objective they
have (TTFT of every round, worst window of 10 tokens of every stage), by bisection on windows with
seeds {seeds}; the first fifth of each window warms up. The schedulers are vLLM 0.32's own objects
(light scheduler) and ours over them, under a virtual clock; nobody is told output lengths.
Baselines were given their best setting on other seeds. Step times are roofline models of data
sheets (vllm_slo/sim/profiles_data), not measurements: it is the ratios that are to be read.
Arrivals: {arrivals}, rescaled. Took {minutes:.0f} minutes.

Ratios are geometric means over the windows, compared pairwise: their intervals are narrower than
those of the capacities, which differ between windows of a bursty trace by a factor of ten.

A ceiling is the highest rate at which a linear program still lets 90% of a window's jobs attain: no
schedule without speculation does more (vllm_slo/sim/ceiling.py). It knows all arrivals and lengths
beforehand, drops the heaviest jobs and those of the warm-up at no cost, and divides steps. A
scheduler knows no lengths, so it cannot have all of the rest. Where step times are slow or noisy,
the program's steps take their mean time.

In toolllm a client whose job has missed an objective asks for none in its later rounds (tier
`best_effort`; SLOs-Serve, section 4.1), which ours can use; the baselines do not look at it. What
stood in the way is what the scheduler gives as its reason when it refuses a promise: `prefill`, the
prompt could not be done by its deadline beside what is promised; `memory`, no KV blocks; `decode`,
no time for its tokens; `expired`, the deadline had passed before the next step."""


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a few small windows; writes nothing")
    parser.add_argument("--processes", type=int, default=None, help="default: one per core")
    options = parser.parse_args()
    plan = Plan(("chatbot", "coder"), SEEDS[:1], 0.15, 0.2, 0.5) if options.quick else Plan()
    with Workers(options.processes) as workers:
        study = Study(plan, workers)
        study.run()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            study.draw(Path(folder))
        sys.stdout.write(f"{study.targets()}\n")
        return
    pictures = study.draw(RESULTS)
    write_result(
        "capacity",
        INTRODUCTION.format(
            seeds=", ".join(map(str, plan.seeds)),
            arrivals=" and ".join(read_trace(kind).source for kind in ("azure-code", "azure-conv")),
            minutes=study.watch.minutes,
        ),
        study.targets(),
        note="\n\n".join(
            [
                *(f"## {title}\n\n{text}" for title, text in study.sections.items()),
                *(f"![{one.stem}]({one.name})" for one in pictures),
            ]
        ),
    )


if __name__ == "__main__":
    main()
