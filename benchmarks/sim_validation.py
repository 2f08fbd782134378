# SPDX-License-Identifier: Apache-2.0
"""One workload on vLLM's real CPU engine and in the simulator, side by side.

The engine is vLLM's engine core with the built-in model as a costlier twin, in a process of its own
on one core. A loop adds each request when its arrival time has come and steps the engine; there is
no server, no tokenizer and no network, in the simulator neither. Step times are profiled first, on
the same engine with the same settings; the simulator knows that profile and the engine's limits,
and nothing of the live runs but, where a row says so, how their step times scattered.

Answers end where the workload says, by a stop token that the schedulers cannot foresee.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import numpy as np
from sim_validation_engine import (
    CLASSES,
    KV_TOKENS,
    MAX_SEQS,
    STEP_TOKENS,
    Live,
    hardware_of,
    make_jobs,
    measure_profile,
    read_jobs,
    read_live,
    replay,
)
from sim_validation_report import Row, StepError, compare, draw, error_table, main_table, step_error

from vllm_slo.bench.demo_load import twin
from vllm_slo.config import profiles
from vllm_slo.sim.cluster import simulate
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job
from vllm_slo.sim.measure import measure_job
from vllm_slo.sim.systems import OURS, System, system

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",  # one core, as the engine of a server on two cores gets
}
SYSTEMS: Final = {
    "stock vLLM": system("fcfs", STEP_TOKENS),
    "vllm-slo": replace(OURS, token_budget=STEP_TOKENS),
}
SEEDS: Final = 10
"""Simulations per row with noise; their requests are pooled."""


def in_own_process(*arguments: object) -> None:
    """Run this script with ``arguments`` in another process; its output is shown if it fails."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: failed\n{done.stdout}{done.stderr}")


def simulated(
    name: str,
    kind: str,
    one: System,
    jobs: Sequence[Job],
    hardware: Hardware,
    *,
    noise: float = 0.0,
    bias: float = 1.0,
) -> Row:
    """A row of the simulator: ``SEEDS`` runs with noise, else one."""
    seeds = SEEDS if noise else 1
    runs = []
    for seed in range(seeds):
        # The profile's step times include what vLLM's scheduler takes.
        world = Conditions(bias=bias, noise=noise, seed=seed, overhead="none")
        runs.append(tuple(map(measure_job, simulate(jobs, one, hardware, world).results)))
    return Row(name, kind, tuple(runs))


def say(text: str) -> None:
    """Progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def go_live(
    args: argparse.Namespace, work: Path
) -> tuple[Hardware, list[Job], dict[str, list[Live]]]:
    """Profile the engine, make the jobs, replay them; results in ``work`` are not made again."""
    from rich.console import Console

    model = twin(args.parameters, Console())
    profile = work / "profile.json"
    if not profile.is_file():
        say("profiling the engine")
        in_own_process("--measure", model, profile, args.profile_s)
    hardware = hardware_of(profile)
    jobs = make_jobs(hardware, args.load, args.duration, args.seed)
    described = json.dumps([asdict(job) for job in jobs])
    asked = work / "jobs.json"
    if asked.is_file() and asked.read_text() != described:
        raise SystemExit(f"--work {work} holds runs of another workload: give another folder")
    asked.write_text(described)
    live: dict[str, list[Live]] = {name: [] for name in SYSTEMS}
    for repetition in range(args.repetitions):
        order = list(SYSTEMS) if repetition % 2 == 0 else list(reversed(SYSTEMS))
        for name in order:
            out = work / f"{name.replace(' ', '-')}-{repetition + 1}.json"
            if not out.is_file():
                say(f"{name}, run {repetition + 1}: {len(jobs)} requests in {args.duration:g} s")
                in_own_process("--replay", model, asked, name, profile, out)
            live[name].append(read_live(out, jobs))
    return hardware, jobs, live


def rows_of(
    hardware: Hardware, jobs: Sequence[Job], live: Mapping[str, Sequence[Live]]
) -> tuple[list[Row], dict[str, list[StepError]]]:
    """Every row of the table, and the error of the profile in each live run."""
    errors = {
        name: [step_error(run.steps, hardware.step_time) for run in runs]
        for name, runs in live.items()
    }
    rows = []
    for name, one in SYSTEMS.items():
        for number, run in enumerate(live[name], 1):
            measures = tuple(map(measure_job, run.results))
            rows.append(Row(name, f"real, run {number}", (measures,)))
        every = step_error([s for run in live[name] for s in run.steps], hardware.step_time)
        noise = min(every.noise, 1.0)
        rows += [
            simulated(name, "simulated", one, jobs, hardware),
            simulated(name, "simulated, noise", one, jobs, hardware, noise=noise),
            simulated(
                name, "simulated, noise and bias", one, jobs, hardware, noise=noise, bias=every.bias
            ),
        ]
    return rows, errors


def describe(
    hardware: Hardware,
    jobs: Sequence[Job],
    profile: profiles.ProfileReport,
    errors: Mapping[str, Sequence[StepError]],
    args: argparse.Namespace,
) -> str:
    """What was run, and how well the profile fits, in words."""
    ratios = [took_s / profile.model.predict_shape_s(shape) for shape, took_s in profile.samples]
    lone_s = hardware.zero_load_tpot_s()
    parts = ", ".join(
        f"{spec.name} (TTFT {spec.ttft_slowdown:g}x, TPOT {spec.tpot_multiple:g}x zero load; "
        f"{sum(job.application == spec.name for job in jobs)} requests)"
        for spec in CLASSES
    )
    prompt = np.mean([job.rounds[0].prompt_tokens for job in jobs])
    output = np.mean([job.rounds[0].output_tokens for job in jobs])
    live = "; ".join(
        f"{name}, run {number}: bias {one.bias:.3f}, noise {one.noise:.1%} over {one.steps:,} steps"
        for name, runs in errors.items()
        for number, one in enumerate(runs, 1)
    )
    return f"""
Workload: {len(jobs)} requests, Poisson over {args.duration:g} s ({len(jobs) / args.duration:.2f}/s,
seed {args.seed}), on average {prompt:.0f} prompt and {output:.0f} answer tokens:
{parts}.
Engine: twin of {args.parameters / 1e6:.0f}M parameters, at most {STEP_TOKENS} tokens and {MAX_SEQS}
requests a step, {KV_TOKENS:,} KV tokens, synchronous stepping. A lone step takes
{1e3 * lone_s:.1f} ms.

Profile: {profile.fit.n} shapes, R² {profile.fit.r2:.4f}; predictions are off by
{np.std(ratios):.1%} (standard deviation), at worst {profile.fit.worst_residual_ratio:.1%}. Live
steps against it (bias: time of all steps over what was predicted; noise: standard deviation of
actual over predicted, relative to its mean):
{live}.

*simulated*: the profile alone. *noise*: step times scatter as the live ones did (lognormal,
independent; {SEEDS} seeds, pooled; counts are means). *noise and bias*: they are longer by the live
bias, too, which the schedulers are not told, so that what remains is the simulator's own error.
TPOT is each request's worst window of 10 tokens.
""".strip()


NOTE: Final = """
The lines that compare real runs say how far two runs of the same requests on the same engine lie
apart: no simulator can be asked for less. *same verdict*: share of the requests that kept their
objectives in both or missed them in both. The step times of the profile hold what vLLM's own
scheduler takes, so the simulator charges none; what ours takes beyond that is left out (see
scheduler_overhead.md) but for the bias.

Not covered: memory pressure (the KV cache holds all requests), prefix caching across requests,
asynchronous scheduling, an HTTP frontend, more than one replica.
"""


def main() -> None:
    """Measure, simulate, compare, write."""
    args = parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.measure:
        model, out, limit_s = args.measure
        measure_profile(model, Path(out), float(limit_s))
        return
    if args.replay:
        model, asked, name, profile, out = args.replay
        replay(model, read_jobs(Path(asked)), name == "vllm-slo", Path(profile), Path(out))
        return
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        hardware, jobs, live = go_live(args, work)
        say("simulating")
        rows, errors = rows_of(hardware, jobs, live)
        report(
            args, rows, describe(hardware, jobs, profiles.load(work / "profile.json"), errors, args)
        )
    say("done")


def report(args: argparse.Namespace, rows: Sequence[Row], text: str) -> None:
    """Write the result, or with ``--smoke`` only show it."""
    from common import RESULTS, markdown, write_result

    table, wrong = main_table(rows), error_table(compare(rows))
    shown = "\n\n".join(
        [text, markdown(table[0], table[1:]), "Error:", markdown(wrong[0], wrong[1:])]
    )
    if args.smoke:
        print(shown)
        if args.work:
            draw(rows, args.work / "sim_validation.png")
        return
    note = f"![CDFs of TTFT and TPOT, real against simulated](sim_validation.png)\n{NOTE}"
    write_result("sim_validation", __doc__ or "", shown, note=note)
    draw(rows, RESULTS / "sim_validation.png")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=float, default=100e6, help="size of the twin")
    parser.add_argument("--load", type=float, default=0.6, help="offered tokens over capacity")
    parser.add_argument("--duration", type=float, default=50.0, help="seconds of arrivals")
    parser.add_argument("--repetitions", type=int, default=2, help="live runs of each system")
    parser.add_argument("--profile-s", type=float, default=60.0, help="seconds of profiling")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="keep raw data here; runs found are not redone")
    parser.add_argument("--smoke", action="store_true", help="seconds of each; writes no result")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--replay", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.duration, args.profile_s, args.repetitions = 8.0, 15.0, 1
    return args


if __name__ == "__main__":
    main()
