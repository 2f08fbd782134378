# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo simulate``: systems side by side in virtual time, at given rates or at capacity."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from vllm_slo.bench.traces import left_out_line
from vllm_slo.core.types import RoutingPolicy
from vllm_slo.sim.arrivals import TRACES, read_trace
from vllm_slo.sim.capacity import (
    Case,
    Processes,
    Progress,
    Question,
    Setting,
    Workers,
    best_of_family,
    find_capacities,
    quiet,
    sweep,
)
from vllm_slo.sim.cluster import Conditions, Overhead
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import built_in, load_hardware
from vllm_slo.sim.measure import counted
from vllm_slo.sim.report import Report, Row, render, write_json
from vllm_slo.sim.scenarios import ARRIVALS, SCENARIOS, applications_of
from vllm_slo.sim.systems import DRAFTS, System, families, parse_system

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_SYSTEMS: Final = "vllm-slo,fcfs-2048,fcfs-8192"
CURVE_POINTS: Final = 8
"""Rates of the attainment picture that belongs to a capacity."""

# --- reading options ------------------------------------------------------------------------------


def number(
    option: str, text: Any, low: float, high: float = math.inf, *, above: bool = False
) -> float:
    """A number in [``low``, ``high``] (``above``: not ``low`` itself); names the option if not."""
    try:
        value = float(text)
    except ValueError:
        raise SimulationError(f"{option}: {str(text)[:80]!r} is not a number") from None
    if not low <= value <= high or math.isinf(value) or (above and value == low):
        start = f"above {low:g}" if above else f"at least {low:g}"
        end = "" if math.isinf(high) else f" and at most {high:g}"
        raise SimulationError(f"{option}: must be {start}{end}, got {text}")
    return value


def whole(option: str, text: Any, low: int) -> int:
    """A whole number of at least ``low``; names the option if it is none."""
    try:
        value = int(text)
    except ValueError:
        raise SimulationError(f"{option}: {str(text)[:80]!r} is not a whole number") from None
    if value < low:
        raise SimulationError(f"{option}: must be at least {low}, got {value}")
    return value


def listed(option: str, text: str) -> list[str]:
    """Words between commas, each once, at least one."""
    words = list(dict.fromkeys(filter(None, (word.strip() for word in text.split(",")))))
    if not words:
        raise SimulationError(f"{option}: name at least one")
    return words


def one_of(option: str, text: str, known: Sequence[str]) -> str:
    """One of ``known``."""
    if text not in known:
        raise SimulationError(f"{option}: {text[:80]!r} is unknown; use {', '.join(known)}")
    return text


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that ``simulate`` and ``plan`` share; ``settings_of`` reads their text."""
    add = parser.add_argument
    add("--routing", default="slo", metavar="POLICY",
        help=f"which replica gets a request: {', '.join(get_args(RoutingPolicy))} (default: slo, "
        "asks replica after replica for a promise)")  # fmt: skip
    add("--scenario", default="chatbot", metavar="NAME,...",
        help=f"all, or some of {', '.join(SCENARIOS)} (default: chatbot)")  # fmt: skip
    add("--hardware", default="h100-llama-8b", metavar="NAME|FILE",
        help=f"one of {', '.join(built_in())}, a YAML file, or a JSON profile of 'vllm-slo "
        "profile' (default: h100-llama-8b)")  # fmt: skip
    add("--kv-tokens", help="KV-cache size of one engine, tokens (default: the hardware's)")
    add("--max-num-seqs", help="requests in one step at most (default: the hardware's)")
    add("--arrivals", help=f"one of {', '.join(ARRIVALS)} (default: the scenario's own)")
    add("--fit", default="rescale",
        help="how a trace meets the rate: rescale its times, or thin its rows "
        "(default: rescale)")  # fmt: skip
    add("--trace-file",
        help="trace instead of the arrival kind's own: Azure or BurstGPT CSV, Mooncake JSON "
        "lines, or AdaServe JSON for its scenario; may be packed with gzip")  # fmt: skip
    add("--jobs", default="500", help="jobs per window and engine (default: 500)")
    add("--windows", default="3", help="windows, each with a seed of its own (default: 3)")
    add("--warmup", default="0.2",
        help="first share of a window's jobs that is not counted (default: 0.2)")  # fmt: skip
    add("--seed", default="0", help="seed of the first window (default: 0)")
    add("--bias", default="1.0",
        help="true step time over the one the scheduler believes (default: 1.0)")  # fmt: skip
    add("--noise", default="0.0",
        help="relative standard deviation of a step's time (default: 0.0)")  # fmt: skip
    add("--acceptance", default="0.7", metavar="A|APPLICATION=A,...",
        help="for systems that speculate: probability that the next drafted token is accepted, "
        "for all or by application (default: 0.7, assumed)")  # fmt: skip
    add("--draft-step-ms", metavar="MS",
        help="what a step of the draft model takes (default: the hardware's own)")  # fmt: skip
    add(
        "--overhead",
        default="modelled",
        help="what scheduling is charged on top of a step: modelled (as measured on the real "
        "objects), measured (here and now; implies --exact, not repeatable) or none "
        "(default: modelled)",
    )
    add("--exact", action="store_true",
        help="vLLM's whole scheduler object instead of the light scheduler: the same steps, "
        "slower")  # fmt: skip
    add("--processes", help="simulations side by side (default: one per core)")


def acceptance(
    text: str, scenarios: Sequence[str], trace_file: Path | None = None
) -> dict[str, float]:
    """``--acceptance``: one share for every application of ``scenarios``, or name=share pairs."""
    known = sorted({one for name in scenarios for one in applications_of(name, trace_file)})
    found = {}
    for part in text.split(","):
        name, given, share = part.rpartition("=")
        if given and name not in known:
            raise SimulationError(
                f"--acceptance: {name!r} is no application here; known: {', '.join(known)}"
            )
        value = number("--acceptance", share, 0, 1)
        found.update({name: value} if given else dict.fromkeys(known, value))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vllm-slo simulate``."""
    add = parser.add_argument
    add("--systems", default=DEFAULT_SYSTEMS, metavar="NAME,...",
        help="vllm-slo, fcfs-N, priority-N, prefill-first-N, shed-edf-N (N: tokens per step), "
        "disaggregated-P:D-N; the first three with -specK for at most K drafts, as "
        f"vllm-slo-spec ({DRAFTS}) or fcfs-2048-spec3; or 'families': every baseline, each tuned "
        f"on windows of its own (default: {DEFAULT_SYSTEMS})")  # fmt: skip
    add("--rate", metavar="R,...", help="jobs/s per GPU; several draw a curve")
    add("--find-capacity", action="store_true",
        help="find the highest rate that keeps --attainment")  # fmt: skip
    add("--attainment", default="0.9", metavar="SHARE,...",
        help="share of jobs that must keep their objectives (default: 0.9)")  # fmt: skip
    add("--precision", default="0.03", help="of a capacity, relative (default: 0.03)")
    add(
        "--replicas", default="1", metavar="N,...", help="replicas that share the load (default: 1)"
    )
    add_setting_arguments(parser)
    add("--out", metavar="DIR",
        help="write simulate.json and pictures here (with --find-capacity it also runs the rates "
        "around the capacity)")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """What ``simulate`` was asked, checked."""

    settings: tuple[Setting, ...]
    systems: tuple[System, ...] | None  # None: families
    rates: tuple[float, ...]
    targets: tuple[float, ...]
    precision: float
    replicas: tuple[int, ...]
    seeds: tuple[int, ...]
    processes: Processes
    out: Path | None


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """One setting per scenario; makes a few jobs of each, so that mistakes surface at once."""
    hardware = load_hardware(
        args.hardware,
        kv_tokens=None if args.kv_tokens is None else whole("--kv-tokens", args.kv_tokens, 1),
        max_num_seqs=(
            None if args.max_num_seqs is None else whole("--max-num-seqs", args.max_num_seqs, 1)
        ),
    )
    names = [name for name, one in SCENARIOS.items() if not one.trace]
    if args.scenario != "all":
        names = [one_of("--scenario", word, [*SCENARIOS, "all"])
                 for word in listed("--scenario", args.scenario)]  # fmt: skip
    if args.arrivals is not None:
        one_of("--arrivals", args.arrivals, ARRIVALS)
    if args.draft_step_ms is not None:
        step_ms = number("--draft-step-ms", args.draft_step_ms, 0, 60_000)
        hardware = hardware.with_draft_step(step_ms / 1e3)
    trace_file = None if args.trace_file is None else Path(args.trace_file)
    setting = Setting(
        scenario=names[0],
        hardware=hardware,
        conditions=Conditions(
            bias=number("--bias", args.bias, 0, above=True),
            noise=number("--noise", args.noise, 0, 1),
            exact=args.exact or args.overhead == "measured",
            routing=one_of("--routing", args.routing, get_args(RoutingPolicy)),  # type: ignore[arg-type]
            overhead=one_of("--overhead", args.overhead, get_args(Overhead)),  # type: ignore[arg-type]
            acceptance=acceptance(args.acceptance, names, trace_file),
        ),
        jobs=whole("--jobs", args.jobs, 1),
        warmup=number("--warmup", args.warmup, 0, 0.95),
        arrivals=args.arrivals,
        fit=one_of("--fit", args.fit, ("rescale", "thin")),  # type: ignore[arg-type]
        trace_file=trace_file,
    )
    found = [replace(setting, scenario=name) for name in names]
    for one in found:
        jobs = replace(one, fit="rescale").make(1.0, one.jobs, 0)
        if not counted(jobs, one.warmup):
            raise SimulationError("--jobs: none is left after the warm-up; use more")
    return found


def say_left_out(settings: Sequence[Setting], console: Console) -> None:
    """A line for each trace of which rows are left out."""
    lines: dict[str, None] = {}  # each once, in this order
    for one in settings:
        spec = SCENARIOS[one.scenario]
        kinds = spec.arrivals if spec.trace or one.arrivals is None else (one.arrivals,)
        for kind in set(kinds).intersection(TRACES):
            trace = read_trace(kind, one.trace_file)
            if trace.rows_left_out:
                lines[left_out_line(trace.source, trace.rows_left_out)] = None
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def check_drafts(systems: Sequence[System], settings: Sequence[Setting]) -> None:
    """SimulationError where a system speculates and there is no draft on its hardware."""
    if any(system.drafts for system in systems):
        for setting in settings:
            setting.hardware.speculating()


def seeds_of(args: argparse.Namespace) -> tuple[int, ...]:
    """Seeds of the windows."""
    first = whole("--seed", args.seed, 0)
    return tuple(range(first, first + whole("--windows", args.windows, 1)))


def processes_of(args: argparse.Namespace) -> int | None:
    """Processes, None for one per core."""
    return None if args.processes is None else whole("--processes", args.processes, 1)


def options_of(args: argparse.Namespace) -> Options:
    """Check everything before the first simulation; SimulationError names what is wrong."""
    if (args.rate is None) is not args.find_capacity:
        raise SimulationError("--rate: give a rate, or --find-capacity, and not both")
    rates = () if args.rate is None else tuple(
        number("--rate", word, 0, above=True) for word in listed("--rate", args.rate)
    )  # fmt: skip
    targets = tuple(
        number("--attainment", word, 0, 1, above=True)
        for word in listed("--attainment", args.attainment)
    )
    systems = None
    if args.systems != "families":
        systems = tuple(parse_system(word) for word in listed("--systems", args.systems))
    settings = tuple(settings_of(args))
    check_drafts(systems or (), settings)
    return Options(
        settings=settings,
        systems=systems,
        rates=rates,
        targets=targets,
        precision=number("--precision", args.precision, 0.001, 1),
        replicas=tuple(
            whole("--replicas", word, 1) for word in listed("--replicas", args.replicas)
        ),
        seeds=seeds_of(args),
        processes=processes_of(args),
        out=out_of(args.out),
    )


def out_of(text: str | None) -> Path | None:
    """The folder for files; made now, so that a mistake does not cost a simulation."""
    if text is None:
        return None
    if find_spec("matplotlib") is None:
        raise SimulationError("--out: pictures need matplotlib: pip install 'vllm-slo[bench]'")
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SimulationError(f"--out: cannot make {path}: {error.strerror}") from error
    return path


def need_vllm() -> None:
    """Raise where vLLM, whose scheduler is simulated, is not installed."""
    if find_spec("vllm") is None:
        raise SimulationError(
            "vLLM is not installed, and its scheduler is what is simulated: "
            "pip install 'vllm-slo[cpu]' or 'vllm-slo[cuda]'"
        )


# --- running --------------------------------------------------------------------------------------


def wide_console() -> Console:
    """For results: a pipe or a file is as wide as the tables want."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=140)


@contextmanager
def bar(console: Console, what: str) -> Iterator[Progress]:
    """A progress bar over tasks; silent where the console is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with RichProgress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def questions_of(targets: Sequence[float], setting: Setting) -> list[Question]:
    """Each target over all jobs and, with several applications, over each of them."""
    several = len(SCENARIOS[setting.scenario].applications) > 1
    kinds = (False, True) if several else (False,)
    return [Question(target, every) for target in targets for every in kinds]


def labelled(options: Options, setting: Setting, console: Console) -> list[tuple[str, System]]:
    """Systems with their labels; families are tuned for the setting, on seeds of their own."""
    if options.systems is not None:
        return [(system.name, system) for system in options.systems]
    jobs = replace(setting, fit="rescale").make(1.0, min(setting.jobs, 500), 0)
    tightest_s = min(one.tightest_tpot_s for job in jobs for one in job.rounds)
    found = []
    for family, candidates in families(setting.hardware.step_time, tightest_s).items():
        with bar(console, f"tuning {family} for {setting.scenario}") as progress:
            best = best_of_family(
                candidates,
                setting,
                Question(options.targets[0]),
                precision=max(options.precision, 0.1),
                processes=options.processes,
                progress=progress,
            )
        name = family if best.name == family else f"{family} [{best.name}]"
        found.append((name, best))
    return found


def run_rates(options: Options, console: Console) -> list[Row]:
    """Every system at every rate, run to the end."""
    rows = []
    for setting in options.settings:
        systems = labelled(options, setting, console)
        for replicas in options.replicas:
            one = with_replicas(setting, replicas)
            cases = [Case(one, system) for _, system in systems]
            with bar(console, f"{setting.scenario}, {replicas} replicas") as progress:
                points = sweep(
                    cases,
                    options.rates,
                    options.seeds,
                    with_load=options.out is not None,
                    processes=options.processes,
                    progress=progress,
                )
            rows += [
                Row(label, one, system, tuple(found))
                for (label, system), found in zip(systems, points, strict=True)
            ]
    return rows


def with_replicas(setting: Setting, replicas: int) -> Setting:
    """The same setting on so many replicas."""
    return replace(setting, conditions=replace(setting.conditions, replicas=replicas))


def run_capacities(options: Options, console: Console) -> list[Row]:
    """The capacity of every system; with pictures, also the rates around it."""
    rows = []
    for setting in options.settings:
        systems = labelled(options, setting, console)
        questions = questions_of(options.targets, setting)
        for replicas in options.replicas:
            one = with_replicas(setting, replicas)
            cases = [Case(one, system) for _, system in systems]
            with bar(console, f"{setting.scenario}, {replicas} replicas: capacity") as progress:
                found = find_capacities(
                    cases,
                    questions,
                    options.seeds,
                    precision=options.precision,
                    processes=options.processes,
                    progress=progress,
                )
            made = [
                Row(label, one, system, (), capacities)
                for (label, system), capacities in zip(systems, found, strict=True)
            ]
            if options.out is not None and replicas == options.replicas[0]:
                made = add_curves(made, options, console)
            rows += made
    return rows


def add_curves(rows: Sequence[Row], options: Options, console: Console) -> list[Row]:
    """Run rates from below the lowest capacity to above the highest."""
    kept = [score for row in rows if (score := row.capacities[0].score) > 0]
    if not kept:
        return list(rows)
    low, high = 0.6 * min(kept), 1.4 * max(kept)
    step = (high / low) ** (1 / (CURVE_POINTS - 1))
    rates = [low * step**place for place in range(CURVE_POINTS)]
    cases = [Case(row.setting, row.system) for row in rows]
    with bar(console, f"{rows[0].setting.scenario}: rates around the capacity") as progress:
        points = sweep(
            cases,
            rates,
            options.seeds,
            with_load=True,
            processes=options.processes,
            progress=progress,
        )
    return [replace(row, points=tuple(found)) for row, found in zip(rows, points, strict=True)]


def run(args: argparse.Namespace) -> int:
    """Run ``vllm-slo simulate``; raises SimulationError for bad input before it simulates."""
    from rich.console import Console

    options = options_of(args)
    bars, console = Console(stderr=True), wide_console()
    say_left_out(options.settings, bars)
    need_vllm()
    quiet()
    with Workers(processes_of(args)) as workers:
        options = replace(options, processes=workers)
        rows = (run_capacities if args.find_capacity else run_rates)(options, bars)
    command = shlex.join(["vllm-slo", *sys.argv[1:]])
    report = Report(tuple(rows), options.seeds, command)
    console.print(render(report))
    if options.out is not None:
        from vllm_slo.sim.plot import write_pictures

        path = options.out / "simulate.json"
        write_json(report.to_dict(), path, "--out")
        for written in (path, *write_pictures(report, options.out, options.targets[0])):
            console.print(f"written: {written}", soft_wrap=True)
    return 0
