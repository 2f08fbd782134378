# SPDX-License-Identifier: Apache-2.0
"""The same requests on vLLM's real CPU engine and in the simulator, under several conditions.

    python benchmarks/sim_validation.py                     results/sim_validation.md, 40 minutes
    python benchmarks/sim_validation.py --only sessions     one condition; writes nothing
    python benchmarks/sim_validation.py --quick             seconds of each; writes nothing

The engine is vLLM's engine core with a costlier twin of the built-in model, in a process of its own
on one core. A client in another process sends each request at its time; there is no HTTP server,
no tokenizer and no network, in the simulator neither. Step times are profiled on the same machine
before each condition and again after it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from common import RESULTS, markdown, write_result
from sim_validation_conditions import (
    CLASSES,
    CONDITIONS,
    PLENTY,
    Condition,
    Served,
    limits,
    make_jobs,
)
from sim_validation_engine import BLOCK_SIZE, EngineSetup
from sim_validation_live import EngineProcess, LiveRun, Measured, code_tokens, serve
from sim_validation_report import DRIFT, FORECAST, HEAD, Row, again, bounds, cells, draw
from sim_validation_simulated import (
    BLOCK_STEPS,
    SEEDS,
    STRETCH_S,
    Task,
    Told,
    acceptance,
    begins_s,
    bias,
    delivered_s,
    simulated,
    told,
    with_drift,
)

from vllm_slo.bench.demo_load import choose_model
from vllm_slo.config import profiles
from vllm_slo.sim.hardware import load_hardware
from vllm_slo.sim.measure import measure_job
from vllm_slo.sim.workers import Workers, run_tasks

PARAMETERS: Final = 25e6
"""Size of the twin: steps of some 10 ms on one core, so that a run holds hundreds of requests."""
INTRODUCTION: Final = """\
{doc}

The engine is vLLM's engine core with a costlier twin of the built-in model, in a process of its own
on one core, with synchronous stepping. A client in another process sends each request at its time.
There is no HTTP server, no tokenizer and no network, in the simulator neither. The requests are the
demo's classes with objectives, Poisson. A load is the offered tokens over what one engine could
process if it did nothing but prefill. Loads were chosen so that vllm-slo keeps about nine in ten
objectives, which is what `plan` asks for by default. Where the machine became slower, it kept
fewer. The simulator serves the very same requests. Answers end where the workload says; no
scheduler knows where.

{conditions}

*{forecast}*: what an operator knows. Step times are profiled right before and right after the runs
of a system (`vllm-slo profile --quick`). A run of {short_s:g} s before the others tells what the
profile does not: steps of the shapes that this traffic has, what vllm-slo's scheduler takes beyond
vLLM's, what drafts take, how long a request is on its way, and how far live steps are from all
that. They are as far from it in the simulator, in stretches of {block} steps. The accepted share of
the drafts is that of the runs themselves.

*{drift}*: what live steps tell is told of the runs themselves, and how fast the machine was at each
moment, in means over {stretch:g} s. This is a shared machine, whose speed changes from minute to
minute: no forecast knows that. What is left is the error of the simulator. The target is judged on
these rows.
"""
PICTURE: Final = "![CDFs of TTFT and TPOT, real against simulated](sim_validation.png)"
NOTE: Final = """\
TPOT is each request's worst window of 10 tokens. *same verdict*: share of the requests that kept
their objectives in both or missed them in both. Of two real runs of the same requests, the second
against the first: {again}. No simulator can be asked for less.

Not covered: asynchronous scheduling, an HTTP frontend, several fronts, draft servers.
Took {minutes:.0f} minutes."""
PROFILE_S: Final = 25.0
PROFILE_AFTER_S: Final = 10.0
SHORT_RUN_S: Final = 25.0
"""Arrivals of the run before the others. It warms the engine up, and tells the simulator what the
profile does not."""
SHORT_RUN_SEED: Final = 1000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        runs: of the seeds of a condition, at most.
        share: of the duration of each run.
        simulations: of each run, for each row; the table has their mean.
    """

    profile_s: float = PROFILE_S
    after_s: float = PROFILE_AFTER_S
    runs: int = 3
    share: float = 1.0
    simulations: int = SEEDS


QUICK: Final = Sizes(12.0, 4.0, 1, 0.25, 1)


def say(text: str) -> None:
    """Progress."""
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")


class Machine:
    """The model, the cores, and the engine that is profiled, which stays for all conditions."""

    def __init__(self, parameters: float) -> None:
        from rich.console import Console

        model = choose_model(parameters, Console(stderr=True))
        self.arguments = {"model": str(model.folder)}
        for option in model.options:
            name, _, value = option.removeprefix("--").partition("=")
            self.arguments[name] = value
        self.cores = sorted(os.sched_getaffinity(0), reverse=True)
        self.profiler = self.engine({"enable_prefix_caching": False}, None, PLENTY)
        self.profiler.ready()

    def engine(
        self,
        arguments: dict[str, object],
        slo_config: dict[str, object] | None,
        kv_tokens: int,
        *,
        number: int = 0,
        tells_state: bool = False,
    ) -> EngineProcess:
        """Start an engine on core ``number`` of those that engines use; it is not ready yet."""
        # One block is vLLM's null block.
        blocks = {"num_gpu_blocks_override": kv_tokens // BLOCK_SIZE + 1}
        core = self.cores[number % len(self.cores)]
        setup = EngineSetup(
            {**self.arguments, **blocks, **arguments}, slo_config, core, tells_state
        )
        return EngineProcess(setup)

    @contextmanager
    def engines(
        self, condition: Condition, served: Served, profile: Path
    ) -> Iterator[list[EngineProcess]]:
        """The engines of one system."""
        config = None
        if served.slo_config is not None:
            classes: dict[str, object] = {spec.name: {} for spec in CLASSES}
            slo = {"profile": str(profile), "classes": classes}
            config = {**served.slo_config, "slo_config": slo}
        several = condition.replicas > 1
        engines = [
            self.engine(
                {"max_model_len": condition.max_model_len, **served.arguments},
                config, condition.kv_tokens,
                number=number, tells_state=several and config is not None,
            )
            for number in range(condition.replicas)
        ]  # fmt: skip
        try:
            for engine in engines:
                engine.ready()
            yield engines
        finally:
            for engine in engines:
                engine.close()


def measure(condition: Condition, machine: Machine, sizes: Sizes, folder: Path) -> Measured:
    """Profile the engine; serve all runs by each system, and profile again after each system."""
    begun_s = time.monotonic()
    say(f"{condition.name}: profiling")
    profiles_made = [machine.profiler.profile(sizes.profile_s)]
    path = profiles.save(profiles_made[0].report, folder / f"{slug(condition)}.json")
    hardware = load_hardware(path, **limits())
    workload, text = condition.workload, code_tokens() if condition.text else []
    duration_s = sizes.share * workload.duration_s
    wanted = [(SHORT_RUN_SEED, SHORT_RUN_S)]
    wanted += [(seed, duration_s) for seed in condition.seeds[: sizes.runs]]
    jobs = [
        [
            replace(job, job_id=f"{number}-{job.job_id}")
            for job in make_jobs(workload, hardware, seed, lasts_s)
        ]
        for number, (seed, lasts_s) in enumerate(wanted)
    ]
    runs: dict[str, list[LiveRun]] = {}
    for served in condition.systems:
        with machine.engines(condition, served, path) as engines:
            runs[served.name] = []
            for number, one in enumerate(jobs):
                say(f"{condition.name}: {served.name}, run {number}: {len(one)} jobs")
                first = sum(map(len, jobs[:number]))
                runs[served.name].append(serve(one, engines, text=text, first=first))
        profiles_made.append(machine.profiler.profile(sizes.after_s))
    took_s = time.monotonic() - begun_s
    return Measured(condition, tuple(profiles_made), hardware, jobs, runs, took_s)


def slug(condition: Condition) -> str:
    """A condition's name for files."""
    return condition.name.replace(" ", "-")


def main() -> None:
    """Measure, simulate, compare, write."""
    args = parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    chosen = [one for one in CONDITIONS if not args.only or one.name in args.only]
    sizes = QUICK if args.quick else Sizes()
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.work or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        measured = list(measurements(chosen, sizes, folder, args.parameters))
    say("simulating")
    with Workers() as workers:
        rows = [row for one in measured for row in rows_of(one, sizes, workers)]
    show(args, measured, rows, (time.monotonic() - begun_s) / 60)
    say("done")


def rows_of(measured: Measured, sizes: Sizes, workers: Workers) -> list[Row]:
    """The rows of one condition: as an operator would forecast, and with the machine's speed."""
    rows = []
    for number, served in enumerate(measured.condition.systems):
        runs = measured.runs[served.name]
        begun_s = [run.began_s for run in runs]
        begins = begins_s(begun_s)
        later_s = [at_s - began_s for at_s, began_s in zip(begins, begun_s, strict=True)]
        told_of = partial(known_of, measured, number)
        forecast = told_of(runs[:1])
        drifted = with_drift(told_of(runs), [run.records for run in runs], later_s)
        accepted = acceptance([record for run in runs[1:] for record in run.records])
        task = partial(Task, measured.condition, served, measured.jobs, begins, accepted)
        kinds = {FORECAST: forecast, DRIFT: drifted}
        tasks = [(task(one, seed),) for one in kinds.values() for seed in range(sizes.simulations)]
        found = iter(run_tasks(simulated, tasks, workers, None))
        real = tuple(tuple(map(measure_job, run.results)) for run in runs[1:])
        for kind in kinds:
            parts = tuple(zip(*itertools.islice(found, sizes.simulations), strict=True))
            rows.append(Row(measured.condition.name, served.name, kind, real, parts))
    return rows


def known_of(measured: Measured, number: int, runs: Sequence[LiveRun]) -> Told:
    """What is known of system ``number`` of a condition, if it has shown its steps in ``runs``."""
    served = measured.condition.systems[number]
    every = [record for run in measured.runs[served.name] for record in run.records]
    hardware = replace(measured.hardware, frontend_s=delivered_s(every))
    profiled = measured.profiles[number : number + 2]
    return told(served, hardware, profiled, [record for run in runs for record in run.records])


def measurements(
    chosen: Sequence[Condition], sizes: Sizes, folder: Path, parameters: float
) -> Iterator[Measured]:
    """Each condition's; those that are kept in ``folder`` are not measured again."""
    machine = None
    for condition in chosen:
        kept = folder / f"{slug(condition)}.pickle"
        if not kept.is_file():
            machine = machine or Machine(parameters)
            kept.write_bytes(pickle.dumps(measure(condition, machine, sizes, folder)))
        yield pickle.loads(kept.read_bytes())
    if machine is not None:
        machine.profiler.close()


TELLING_HEAD: Final = (
    "condition", "system", "lone step, ms, by profile", "live steps over the profile",
    "errors of short, long steps", "scheduling beyond the profile, ms a step", "drafts accepted",
    "preemptions", "tokens found in the prefix cache", "promises that a replica took back",
    "jobs of each run",
)  # fmt: skip


def telling(measured: Measured) -> list[list[str]]:
    """What the simulator was told, and what happened live: a line for each system."""
    lines = []
    for number, served in enumerate(measured.condition.systems):
        short, *runs = measured.runs[served.name]
        known = known_of(measured, number, [short])
        records = [record for run in runs for record in run.records]
        steps = [step for record in records for step in record.steps]
        mean_requests = statistics.fmean(step.shape.requests for step in steps)
        beyond_s = known.scheduling[0] + known.scheduling[1] * mean_requests
        accepted = acceptance(records)
        parts = (known.errors.short, known.errors.long)
        scattered = ", ".join(f"{statistics.pstdev(part):.1%}" for part in parts if part)
        lone = (p.report.model.predict_s(1) for p in measured.profiles[number : number + 2])
        lines.append([
            measured.condition.name, served.name, ", ".join(f"{1e3 * s:.1f}" for s in lone),
            f"{bias(steps, known):.3f}", scattered,
            f"{1e3 * max(beyond_s, 0.0):.2f}",
            ", ".join(f"{name} {share:.0%}" for name, share in accepted.items()) or "-",
            str(sum(record.preemptions for record in records)),
            f"{sum(record.cached_tokens for record in records):,}",
            f"{sum(run.wrong for run in runs)} of {sum(run.asked for run in runs)}",
            ", ".join(str(len(jobs)) for jobs in measured.jobs[1:]),
        ])  # fmt: skip
    return lines


def repeated(measured: Measured, rows: Sequence[Row]) -> list[str]:
    """How far real runs of the same requests are from each other, in sentences."""
    condition = measured.condition
    seeds = condition.seeds[: len(measured.jobs) - 1]
    pairs = [
        (seeds.index(seed), place) for place, seed in enumerate(seeds) if seeds.index(seed) < place
    ]
    return [
        again(row.condition, row.system, row.real[first], row.real[second])
        for row in rows
        if row.condition == condition.name and row.kind == FORECAST
        for first, second in pairs
    ]


def show(
    args: argparse.Namespace, measured: Sequence[Measured], rows: Sequence[Row], minutes: float
) -> None:
    """Write the result, or only show it where it is a part of one."""
    table = markdown(HEAD, map(cells, rows))
    details = markdown(TELLING_HEAD, [line for one in measured for line in telling(one)])
    repeats = [line for one in measured for line in repeated(one, rows)]
    same = "; ".join(repeats) or "no run was repeated"
    note = f"{bounds(rows)}\n\n{PICTURE}\n\n{details}\n\n{NOTE.format(again=same, minutes=minutes)}"
    if args.quick or args.only:
        sys.stdout.write(f"{table}\n\n{note}\n")
        if args.work:
            draw(rows, args.work / "sim_validation.png")
        return
    conditions = "\n".join(
        f"- {one.condition.name}: {one.condition.words}; load {one.condition.workload.load:g}."
        for one in measured
    )
    text = INTRODUCTION.format(
        doc=(__doc__ or "").partition("\n")[0], conditions=conditions, forecast=FORECAST,
        drift=DRIFT, block=BLOCK_STEPS, short_s=SHORT_RUN_S, stretch=STRETCH_S,
    )  # fmt: skip
    write_result("sim_validation", text, table, note=note)
    draw(rows, RESULTS / "sim_validation.png")


def parse_args() -> argparse.Namespace:
    """The command line."""
    names = [condition.name for condition in CONDITIONS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="shows that it runs")
    parser.add_argument(
        "--parameters", type=float, default=PARAMETERS, help="size of the twin; default: 25e6"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep what was measured; it is not done again"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
