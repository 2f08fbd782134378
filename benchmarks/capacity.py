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
from speculation_capacity import ACCEPTANCE

from vllm_slo.sim.arrivals import read_trace
from vllm_slo.sim.capacity import TUNING_SEEDS, best_of, find_capacities, sweep
from vllm_slo.sim.ceiling import find_ceilings
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import load_hardware
from vllm_slo.sim.plot import write_pictures
from vllm_slo.sim.questions import Question
from vllm_slo.sim.report import Report, Row
from vllm_slo.sim.scenarios import applications_of
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.statistics import Capacity, ratio
from vllm_slo.sim.systems import OURS, STOCK_FAMILIES, System, families, speculating
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
SHED = "shed + EDF"
FAMILIES = (
    OURS.name,
    "vLLM fcfs 2048",
    "Sarathi (best budget)",
    "vLLM priority = deadline",
    SHED,
)
"""vLLM's default, its settings that do best, and a patch of it."""
STOCK = [family for family in FAMILIES if family in STOCK_FAMILIES]
DRAFTED, STOCK_DRAFTED = "vllm-slo, drafts", "best stock, drafts"
STOCK_DRAFTS = 3
"""vLLM drafts as many tokens for each request; 3 is usual for a small draft model."""
NOISY = Conditions(bias=1.05, noise=0.10)
AT_CAPACITY = 2
"""Place of 0.97 of our capacity among the rates of ``around``."""

Key = tuple[str, str]
"""(scenario, family)"""
Found = Mapping[Key, Capacity]


@dataclass(frozen=True)
class Plan:
    """The size of the study."""

    scenarios: Sequence[str] = tuple(SCENARIOS)
    seeds: Sequence[int] = SEEDS
    size: float = 1.0
    precision: float = 0.06
    rough: float = 0.2

    def setting(self, scenario: str) -> Setting:
        """A scenario on its hardware, with Poisson arrivals."""
        hardware, jobs = SCENARIOS[scenario]
        jobs = max(40, round(jobs * self.size))
        return Setting(scenario, load_hardware(hardware), jobs=jobs, arrivals="poisson")


QUICK = Plan(("chatbot", "coder"), SEEDS[:1], 0.15, 0.2, 0.5)


class Study:
    """All measurements, phase by phase; each phase prints its table at its end."""

    def __init__(self, plan: Plan, workers: Workers) -> None:
        self.plan = plan
        self.workers = workers
        self.watch = Stopwatch()
        self.settings = {name: plan.setting(name) for name in plan.scenarios}
        self.sections: dict[str, str] = {}

    def tell(self, title: str, text: str) -> None:
        """Keep a section of the result, and print it."""
        self.sections[title] = text
        sys.stdout.write(f"## {title}\n\n{text}\n\n")
        sys.stdout.flush()

    def search(self, name: str, cases: Mapping[Key, Case]) -> Found:
        """Capacities of several cases, by the key of each."""
        found = find_capacities(
            list(cases.values()),
            [NINETY],
            self.plan.seeds,
            precision=self.plan.precision,
            processes=self.workers,
            progress=self.watch.phase(name),
        )
        return {key: one for key, (one,) in zip(cases, found, strict=True)}

    def run(self) -> None:
        """Every phase."""
        self.tune()
        self.find()
        self.bound()
        self.add_noise()
        self.add_bursts()
        self.look()

    def tune(self) -> None:
        """Best setting of every family on the tuning seeds."""
        rivals: list[tuple[Key, System]] = []
        chosen: dict[Key, System] = {}
        for name, setting in self.settings.items():
            for family, systems in candidates(setting).items():
                if len(systems) == 1:
                    chosen[name, family] = systems[0]
                else:
                    rivals += [((name, family), system) for system in systems]
        short = {
            name: replace(one, jobs=max(40, one.jobs // 3)) for name, one in self.settings.items()
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
        self.cases = {
            (name, family): Case(setting, chosen[name, family])
            for name, setting in self.settings.items()
            for family in FAMILIES
        }

    def find(self) -> None:
        """Capacity of every system in every scenario, without drafts and with them."""
        self.found = dict(self.search("capacity at 90%", self.cases))
        self.stock = {name: best_stock(self.found, name) for name in self.settings}
        drafted = {}
        for name in self.settings:
            case = self.cases[name, OURS.name]
            accepted = dict.fromkeys(applications_of(name), ACCEPTANCE)
            setting = replace(case.setting, conditions=Conditions(acceptance=accepted))
            drafted[name, DRAFTED] = Case(setting, speculating(OURS))
            plain = self.cases[name, self.stock[name]].system
            drafted[name, STOCK_DRAFTED] = Case(setting, speculating(plain, STOCK_DRAFTS))
        self.found |= self.search("with drafts", drafted)
        self.three = [
            (name, family)
            for name in self.settings
            for family in (OURS.name, self.stock[name], SHED)
        ]
        self.tell("Capacity, jobs/s per GPU, with its 95% interval", self._capacities())

    def _capacities(self) -> str:
        names = list(self.settings)
        rows = [
            [family, *(self._capacity(name, family) for name in names)]
            for family in (*FAMILIES, DRAFTED, STOCK_DRAFTED)
        ]
        for title, one, other in self.comparisons():
            rows.append([title, *(times_of(self.found, (n, one[n]), (n, other[n])) for n in names)])
        return markdown(["system (best tokens per step)", *names], rows)

    def comparisons(self) -> list[tuple[str, dict[str, str], dict[str, str]]]:
        """What is compared: title, and by scenario the one family and the other."""
        ours, shed = (dict.fromkeys(self.settings, family) for family in (OURS.name, SHED))
        best = {name: self._better(name, OURS.name, DRAFTED) for name in self.settings}
        rival = {name: self._better(name, self.stock[name], STOCK_DRAFTED) for name in self.stock}
        return [
            ("ours against best stock (95%)", ours, self.stock),
            ("ours against shed + EDF (95%)", ours, shed),
            ("the better with or without drafts, ours against stock (95%)", best, rival),
        ]

    def _better(self, name: str, one: str, other: str) -> str:
        return max(one, other, key=lambda family: self.found[name, family].score)

    def _capacity(self, name: str, family: str) -> str:
        text = self.found[name, family].text
        if family in (OURS.name, self.stock[name]):
            text = f"**{text}**"
        if family not in FAMILIES or family == OURS.name:
            return text
        return f"{text} ({self.cases[name, family].system.name.rsplit('-', 1)[-1]})"

    def bound(self) -> None:
        """The ceilings, and each system's share of them."""
        names = list(self.settings)
        alone = [self.cases[name, OURS.name] for name in names]
        ceilings = [
            find_ceilings(
                alone,
                [NINETY],
                self.plan.seeds,
                precision=self.plan.precision,
                processes=self.workers,
                progress=self.watch.phase("even ceilings" if even else "ceilings"),
                even=even,
            )
            for even in (False, True)
        ]
        free, even = ({n: one for n, (one,) in zip(names, c, strict=True)} for c in ceilings)
        self.even = {name: score(self.found[name, OURS.name], even[name]) for name in names}
        rows = [
            ["ceiling, any jobs dropped", *(free[name].text for name in names)],
            ["ceiling, an even share of every job kept", *(even[name].text for name in names)],
        ]
        for family in FAMILIES:
            both = [[score(self.found[n, family], one[n]) for one in (free, even)] for n in names]
            rows.append([family, *(f"{any_job:.0%}, {each:.0%}" for any_job, each in both)])
        self.tell(
            "Ceilings, jobs/s per GPU, and each system's share of both",
            markdown(["system", *names], rows),
        )

    def add_noise(self) -> None:
        """The true step times differ from the believed ones."""
        cases = {
            key: replace(self.cases[key], setting=replace(self.settings[key[0]], conditions=NOISY))
            for key in self.three
        }
        self.noisy = self.search("5% slow, 10% noise", cases)
        self.tell(
            "Step times 5% slower than believed, 10% noise, margin learnt online",
            self._three(self.noisy),
        )

    def add_bursts(self) -> None:
        """The same with the recorded arrivals, which come in bursts."""
        cases = {
            key: replace(self.cases[key], setting=replace(self.settings[key[0]], arrivals=None))
            for key in self.three
        }
        self.bursts = self.search("recorded arrivals", cases)
        self.tell("Recorded arrivals", self._three(self.bursts))

    def _three(self, found: Found) -> str:
        rows = [
            [name, family, found[name, family].text,
             times_of(found, (name, OURS.name), (name, family))]
            for name, family in self.three
        ]  # fmt: skip
        return markdown(["scenario", "system", "capacity", "ours against it (95%)"], rows)

    def look(self) -> None:
        """Whole windows around our capacity: the curves of the picture, and what they show."""
        self.points = {
            key: sweep(
                [self.cases[key]],
                around(self.found[key[0], OURS.name].rate or 1.0),
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

    def targets(self) -> list[list[str]]:
        """The rows of the table of the targets."""
        steady = [name for name in self.settings if name != "toolllm"]
        plain, _, drafted = (
            geo_mean(self.found, one, other) for _, one, other in self.comparisons()
        )
        ours = dict.fromkeys(self.settings, OURS.name)
        noisy, bursts = (geo_mean(found, ours, self.stock) for found in (self.noisy, self.bursts))
        worst = min(
            score(self.noisy[name, OURS.name], self.noisy[name, self.stock[name]])
            for name in self.settings
        )
        return [
            ["share of the even ceiling: " + ", ".join(steady), "92, 94, 91%, - (another bound)",
             ">= 95% each", ", ".join(f"{self.even[name]:.0%}" for name in steady)],
            ["toolllm", "61% (another bound)", ">= 85%", f"{self.even['toolllm']:.0%}"
             if "toolllm" in self.even else "-"],
            ["geometric mean against best stock: scheduling alone / with drafts where they pay",
             "1.58x / -", ">= 1.9x / >= 2.2x", f"{plain:.2f}x / {drafted:.2f}x"],
            ["scheduling alone, recorded arrivals", "-", "-", f"{bursts:.2f}x"],
            ["scheduling alone, steps 5% slow, 10% noise; worst scenario", "1.70x; 0.94x",
             ">= 1.85x; >= 1.0x", f"{noisy:.2f}x; {worst:.2f}x"],
        ]  # fmt: skip

    def draw(self, folder: Path) -> list[Path]:
        """The picture."""
        rows = [
            Row(key[1], self.cases[key].setting, self.cases[key].system,
                points=tuple(points), capacities=(self.found[key],))
            for key, points in self.points.items()
        ]  # fmt: skip
        report = Report(tuple(rows), tuple(self.plan.seeds), "make simulate")
        return write_pictures(report, folder, NINETY.target)

    def write(self) -> None:
        """Write results/capacity.md and its picture."""
        pictures = self.draw(RESULTS)
        seeds = ", ".join(map(str, self.plan.seeds))
        traces = " and ".join(read_trace(kind).source for kind in ("azure-code", "azure-conv"))
        write_result(
            "capacity",
            INTRODUCTION.format(
                seeds=seeds, arrivals=traces, acceptance=ACCEPTANCE, drafts=STOCK_DRAFTS,
                minutes=self.watch.minutes,
            ),
            markdown(TARGETS_HEAD, self.targets()),
            note="\n\n".join(
                [
                    *(f"## {title}\n\n{text}" for title, text in self.sections.items()),
                    *(f"![{one.stem}]({one.name})" for one in pictures),
                ]
            ),
        )  # fmt: skip


def candidates(setting: Setting) -> dict[str, tuple[System, ...]]:
    """Family -> settings, for the tightest TPOT of the scenario."""
    jobs = make_jobs(setting.scenario, setting.hardware, rate=1.0, count=50, seed=TUNING_SEEDS[0])
    tightest = min(one.tightest_tpot_s for job in jobs for one in job.rounds)
    found = families(setting.hardware.step_time, tightest)
    return {family: found[family] for family in FAMILIES}


def best_stock(found: Found, name: str) -> str:
    """The stock family with the highest reported capacity, which favours stock."""
    return max(STOCK, key=lambda family: found[name, family].score)


def score(one: Capacity, base: Capacity) -> float:
    """The ratio; nan if there is none."""
    return found[0] if (found := ratio(one, base)) else math.nan


def geo_mean(found: Found, ones: Mapping[str, str], others: Mapping[str, str]) -> float:
    """Geometric mean of the ratios; by scenario one family and the other."""
    ratios = [score(found[n, one], found[n, others[n]]) for n, one in ones.items()]
    return math.exp(statistics.fmean(math.log(one) for one in ratios))


def times_of(found: Found, one: Key, base: Key) -> str:
    """One ratio with its interval, for a table."""
    return times(None if one == base else ratio(found[one], found[base]))


def around(rate: float) -> list[float]:
    """Rates of the picture, jobs/s per GPU."""
    return [round(rate * part, 4) for part in (0.4, 0.7, 0.97, 1.3)]


TARGETS_HEAD = ("", "before (45d4d77)", "target", "here")

INTRODUCTION = """\
The highest rate, in jobs per second and GPU, at which 90% of the jobs keep every objective they
have (TTFT of every round, worst window of 10 tokens of every stage), by bisection on windows with
seeds {seeds}; the first fifth of each window warms up. The schedulers are vLLM 0.32's own objects
(light scheduler) and ours over them, under a virtual clock; nobody is told output lengths.
Baselines were given their best setting on other seeds. Step times are roofline models of data
sheets (vllm_slo/sim/profiles_data), not measurements: it is the ratios that are to be read.
Arrivals are Poisson, but in one table: there they are {arrivals}, rescaled. Took {minutes:.0f}
minutes.

Ratios are geometric means over the windows, compared pairwise: their intervals are narrower than
those of the capacities, which differ between windows of a bursty trace by a factor of ten.

With drafts, `vllm-slo` plans the length for each request, and stock vLLM drafts {drafts} tokens for
everybody with the setting that is its best without drafts. A drafted token is accepted with
probability {acceptance:g} if those before it were. Drafting is charged, see
[speculation_capacity.md](speculation_capacity.md).

A ceiling is the highest rate at which a linear program still lets 90% of a window's jobs attain: no
schedule without speculation does more (vllm_slo/sim/ceiling.py). It knows all arrivals and lengths
beforehand, drops the heaviest jobs and those of the warm-up at no cost, and divides steps. No
scheduler knows lengths, so none can have all of it. The even ceiling keeps the same share of every
job. A scheduler that chooses by what it can see, such as the length of a prompt, may exceed it.

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
    plan = QUICK if options.quick else Plan()
    with Workers(options.processes) as workers:
        study = Study(plan, workers)
        study.run()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            study.draw(Path(folder))
        sys.stdout.write(f"{markdown(TARGETS_HEAD, study.targets())}\n")
        return
    study.write()


if __name__ == "__main__":
    main()
