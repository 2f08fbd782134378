# SPDX-License-Identifier: Apache-2.0
"""Who waits for the promises of others: near capacity, above it, and beside batch work.

    python benchmarks/colocation.py            every table of results/colocation.md
    python benchmarks/colocation.py --quick    one small window: shows that it runs, writes nothing

All systems serve the same jobs in virtual time. Stock vLLM gets the setting that is best for it in
each row. Nothing of vllm-slo was chosen on these windows.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from capacity import NOISY
from common import Stopwatch, markdown, write_result

from vllm_slo.sim.cluster import simulate
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import Hardware, load_hardware
from vllm_slo.sim.jobs import Job, JobResult, Round, Stage
from vllm_slo.sim.measure import measure_counted, summarise
from vllm_slo.sim.setting import Setting
from vllm_slo.sim.systems import OURS, System, parse_system
from vllm_slo.sim.workers import Workers, run_tasks

SEEDS = (3, 4, 5, 6)
"""Windows. vllm-slo was tuned on 100 to 103."""
STOCK = ("fcfs-512", "fcfs-1024", "fcfs-2048", "fcfs-8192", "priority-512", "priority-2048")
"""vLLM's own settings: Sarathi-like budgets, the default, and priority by deadline."""
BUDGETED = tuple(f"latency-budget-{ms}" for ms in (30, 40, 50, 60, 80))
"""HyGen's idea (arXiv 2501.14808): online work first, batch work in what is left of a budget."""
BATCH = 400
"""Requests of the backlog: prompts of 300 to 1,200 tokens, answers of 100 to 300, no objective."""
HARDWARE = {"toolllm": "a100-toolllama-7b"}
OTHER_HARDWARE = "a100-opt-13b"


@dataclass(frozen=True)
class Row:
    """One load.

    Attributes:
        scenario: as the simulator names it; Poisson arrivals.
        rate: jobs/s per GPU.
        jobs: of one window.
        batch: requests of the backlog, there from the start.
        system: tokens of a system prompt with which every prompt begins.
    """

    scenario: str
    rate: float
    jobs: int = 300
    batch: int = 0
    system: int = 0


NEAR = (
    Row("chatbot", 2.4), Row("coder", 4.0), Row("summarizer", 1.75), Row("mixed", 2.5),
    Row("toolllm", 1.4, 220),
)  # fmt: skip
BESIDE = (Row("chatbot", 0.7, 100, BATCH), Row("chatbot", 1.4, 200, BATCH),
          Row("chatbot", 2.0, 280, BATCH))  # fmt: skip
SHARED = (Row("chatbot", 3.2, system=512), Row("chatbot", 4.0, system=512),
          Row("mixed", 4.0, system=512), Row("chatbot", 2.0, 280, BATCH, 512))  # fmt: skip
TWICE = (Row("chatbot", 5.0), Row("coder", 11.0, 400), Row("mixed", 5.0))


@dataclass(frozen=True)
class Measure:
    """One window, or the mean of several. Times in seconds.

    Attributes:
        attained: share of the jobs that kept all their objectives.
        ttft_s, latency_s: 99th percentiles over all jobs that count.
        end_s: when the last job ended, the backlog included.
        batch: answer tokens/s of the backlog while jobs arrive.
        twice: tokens that were computed beyond those that had to be, as a share of these.
        broken: jobs with a promise that was not kept.
        late, late_broken: the same of late promises: all, and those not kept.
    """

    attained: float
    ttft_s: float
    latency_s: float
    end_s: float
    batch: float
    twice: float
    broken: float
    late: float
    late_broken: float


def hardware_of(row: Row) -> Hardware:
    """What serves a row."""
    return load_hardware(HARDWARE.get(row.scenario, OTHER_HARDWARE))


def backlog(count: int, seed: int) -> list[Job]:
    """Batch work without objectives, all there at time 0."""
    rng = np.random.default_rng([seed, 77])
    prompts, answers = rng.integers(300, 1201, count), rng.integers(100, 301, count)
    return [
        Job(f"batch-{i}", "batch", 0.0,
            (Round(int(prompt), (Stage(int(answer), math.inf),), math.inf),))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]  # fmt: skip


def measure(row: Row, system: System, seed: int, conditions: Conditions) -> Measure:
    """Serve one window to its end."""
    hardware = hardware_of(row)
    setting = Setting(row.scenario, hardware, jobs=row.jobs, arrivals="poisson")
    online = setting.make(row.rate * hardware.gpus, row.jobs, seed)
    jobs = [*online, *backlog(row.batch, seed)]
    conditions = replace(conditions, seed=seed, system_tokens=row.system)
    run = simulate(jobs, system, hardware, conditions)
    names = {job.job_id for job in online}
    own = [result for result in run.results if result.job.job_id in names]
    measures = measure_counted(own)
    summary = summarise(measures, 1.0)
    last_s = max(job.arrival_s for job in online)
    # The last token of an answer is not computed on, and a system prompt once.
    shared = [min(row.system, job.rounds[0].prompt_tokens - 1) for job in jobs]
    needed = sum(job.tokens - len(job.rounds) for job in jobs) - sum(shared) + max(shared)
    return Measure(
        summary.attainment,
        summary.ttft_p99_s or 0.0,
        float(np.percentile([m.latency_s for m in measures if m.latency_s is not None], 99)),
        max(result.rounds[-1].token_times_s[-1] for result in run.results),
        sum(_tokens_by(result, last_s) for result in run.results if result not in own) / last_s,
        run.computed_tokens / needed - 1.0,
        summary.promised_missed,
        summary.late,
        summary.late_missed,
    )


def _tokens_by(result: JobResult, time_s: float) -> int:
    return sum(at_s <= time_s for at_s in result.rounds[0].token_times_s)


def mean(windows: Sequence[Measure]) -> Measure:
    """The mean of several windows; promises are added up."""
    values = {
        name: statistics.fmean(getattr(one, name) for one in windows)
        for name in Measure.__dataclass_fields__
    }
    sums = ("broken", "late", "late_broken")
    return Measure(**values | {name: sum(getattr(m, name) for m in windows) for name in sums})


class Study:
    """All rows, each by every system."""

    def __init__(
        self, rows: Sequence[Row], seeds: Sequence[int], workers: Workers, conditions: Conditions
    ) -> None:
        keys = [
            (row, parse_system(name))
            for row in rows
            for name in (OURS.name, *STOCK, *(BUDGETED if row.batch else ()))
        ]
        tasks = [(row, one, seed, conditions) for row, one in keys for seed in seeds]
        found = iter(run_tasks(measure, tasks, workers, None))
        self.found = {(row, one.name): mean([next(found) for _ in seeds]) for row, one in keys}

    def best(
        self, row: Row, value: Callable[[Measure], float], names: Sequence[str] = STOCK
    ) -> tuple[str, Measure]:
        """The setting of which ``value`` is least; of stock vLLM, or of ``names``."""
        name = min(names, key=lambda name: value(self.found[row, name]))
        return name, self.found[row, name]

    def table(self, rows: Sequence[Row]) -> str:
        """Ours, the stock settings that attain most and end first, and beside batch work the
        latency budget that attains most."""
        lines = []
        for row in rows:
            attains = self.best(row, lambda m: -m.attained)
            ends = self.best(row, lambda m: m.end_s)
            shown = {OURS.name: self.found[row, OURS.name], attains[0]: attains[1]}
            shown |= {ends[0]: ends[1]}
            if row.batch:
                shown |= dict([self.best(row, lambda m: -m.attained, BUDGETED)])
            label = f"{row.scenario} {row.rate:g}" + (f" beside {row.batch}" if row.batch else "")
            label += f", system prompt of {row.system}" if row.system else ""
            for name, one in shown.items():
                lines.append(
                    [label, name, f"{one.attained:.1%}", f"{one.ttft_s:.2f}",
                     f"{one.latency_s:.1f}", f"{one.end_s:.1f}",
                     f"{one.end_s / ends[1].end_s:.2f}x",
                     f"{one.batch:.0f}" if row.batch else "-", f"{one.twice:.1%}",
                     f"{one.broken:.0f}" if name == OURS.name else "-",
                     f"{one.late_broken:.0f} of {one.late:.0f}" if name == OURS.name else "-"]
                )  # fmt: skip
        return markdown(
            ["jobs/s per GPU", "system", "attained", "TTFT p99, s", "latency p99, s", "end, s",
             "end against the first to end", "batch tokens/s", "computed twice", "broken",
             "late ones broken"],
            lines,
        )  # fmt: skip

    def targets(self) -> list[list[str]]:
        """The rows of the targets of these loads, and what was measured."""
        mixed, coder, batch = NEAR[3], NEAR[1], BESIDE[1]
        ours = {row: self.found[row, OURS.name] for row in (mixed, coder, batch)}

        def against(row: Row) -> float:
            return ours[row].latency_s / self.best(row, lambda m: m.latency_s)[1].latency_s

        ends = {
            row.scenario: self.found[row, OURS.name].end_s
            / self.best(row, lambda m: m.end_s)[1].end_s
            for row in TWICE
        }
        batch_end = ours[batch].end_s / self.best(batch, lambda m: m.end_s)[1].end_s
        broken = sum(one.broken for (_, name), one in self.found.items() if name == OURS.name)

        mine = [one for (_, name), one in self.found.items() if name == OURS.name]
        late_broken, all_late = sum(m.late_broken for m in mine), sum(m.late for m in mine)
        late = f"{late_broken:.0f} of {all_late:.0f}"

        def near(row: Row) -> str:
            one = ours[row]
            return f"{one.attained:.1%}, {one.ttft_s:.1f} s, {against(row):.2f}x"

        beside = ours[batch]
        return [
            ["mixed 2.5: attained, p99 TTFT, p99 latency against the best stock",
             "96.7%, 25.9 s, 1.13x", ">= 96%, <= 4 s, <= 1.05x", near(mixed)],
            ["coder 4.0: the same", "95.8%, 10.4 s, 2.3x", ">= 95%, <= 2 s, <= 1.3x", near(coder)],
            ["twice the capacity: end of everything against the first stock setting to end",
             "1.1x", "<= 1.02x each",
             ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ends.items())],
            ["chatbot 1.4 beside batch: attained, batch tokens/s, end", "100%, 419, 1.11x",
             ">= 99%, >= 540, <= 1.03x",
             f"{beside.attained:.1%}, {beside.batch:.0f}, {batch_end:.2f}x"],
            ["tokens computed twice, the same run", "11%", "<= 4%", f"{beside.twice:.1%}"],
            ["promises broken, all rows", "-", "0", f"{broken:.0f}"],
            ["late promises broken, all rows", "-", "<= 1%", late],
        ]  # fmt: skip


INTRODUCTION = """\
Poisson arrivals, windows with seeds {seeds}, means; the first fifth of each window's jobs warms up.
The schedulers are vLLM 0.32's own objects (light scheduler) and ours over them, under a virtual
clock, with the step times of vllm_slo/sim/profiles_data. Nobody is told output lengths. Stock vLLM
was tried with {stock}; a table shows the setting that attains most and the one that ends first. The
backlog is {batch} requests without objectives that are there at the start. Beside it, HyGen's idea
(arXiv 2501.14808) was tried, too: requests by deadline first, batch work in what is left of a
budget of {budgets} ms a step; the one that attains most is shown. "Computed twice" is what was
computed beyond prompts and answers, since KV was dropped. A system prompt is part of every prompt,
with TTFT objectives as if it were not in the prefix cache. Took {minutes:.0f} minutes."""


TARGETS_HEAD = ("", "before (45d4d77, one window)", "target", "here")


def run(workers: Workers) -> list[list[str]]:
    """Measure all of it, and write results/colocation.md; the rows of the targets."""
    watch = Stopwatch()
    true = Study((*NEAR, *BESIDE, *SHARED, *TWICE), SEEDS, workers, Conditions())
    wrong = Study((*NEAR, BESIDE[1]), SEEDS, workers, NOISY)
    sections = {
        "Near capacity": true.table(NEAR),
        "Beside a backlog of batch work": true.table(BESIDE),
        "Behind a system prompt": true.table(SHARED),
        "Twice the capacity": true.table(TWICE),
        "Step times 5% slower than believed, 10% noise": wrong.table((*NEAR, BESIDE[1])),
    }
    write_result(
        "colocation",
        INTRODUCTION.format(
            seeds=", ".join(map(str, SEEDS)),
            stock=", ".join(STOCK),
            batch=BATCH,
            budgets=", ".join(name.rsplit("-", 1)[-1] for name in BUDGETED),
            minutes=watch.minutes,
        ),
        markdown(TARGETS_HEAD, true.targets()),
        note="\n\n".join(f"## {title}\n\n{table}" for title, table in sections.items()),
    )
    return true.targets()


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one small window; writes nothing")
    parser.add_argument("--processes", type=int, default=None, help="default: one per core")
    options = parser.parse_args()
    with Workers(options.processes) as workers:
        if options.quick:
            row = Row("chatbot", 1.4, 40, 40)
            study = Study((row,), SEEDS[:1], workers, Conditions())
            sys.stdout.write(f"{study.table((row,))}\n")
        else:
            run(workers)


if __name__ == "__main__":
    main()
