# SPDX-License-Identifier: Apache-2.0
"""What ``simulate`` and ``plan`` share: options, consoles, progress bars, notes on traces."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vllm_slo.bench.traces import left_out_line
from vllm_slo.core.types import RoutingPolicy
from vllm_slo.sim.arrivals import ARRIVALS, TRACES, read_trace
from vllm_slo.sim.conditions import Conditions, Overhead
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import built_in, load_hardware
from vllm_slo.sim.measure import counted
from vllm_slo.sim.scenarios import SCENARIOS, applications_of
from vllm_slo.sim.setting import Setting
from vllm_slo.sim.systems import System
from vllm_slo.sim.workers import Progress

if TYPE_CHECKING:
    from rich.console import Console


def number(
    option: str, text: Any, low: float, high: float = math.inf, *, above: bool = False
) -> float:
    """A number in [``low``, ``high``], with ``above`` in (``low``, ``high``]; errors name it."""
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
    """A whole number of at least ``low``; errors name the option."""
    try:
        value = int(text)
    except ValueError:
        raise SimulationError(f"{option}: {str(text)[:80]!r} is not a whole number") from None
    if value < low:
        raise SimulationError(f"{option}: must be at least {low}, got {value}")
    return value


def listed(option: str, text: str) -> list[str]:
    """The words between commas, without duplicates; at least one."""
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
        help=f"how a replica is chosen: {', '.join(get_args(RoutingPolicy))} (default: slo, "
        "which asks one replica after the other for a promise)")  # fmt: skip
    add("--scenario", default="chatbot", metavar="NAME,...",
        help=f"all, or one or more of {', '.join(SCENARIOS)} (default: chatbot)")  # fmt: skip
    add("--hardware", default="h100-llama-8b", metavar="NAME|FILE",
        help=f"one of {', '.join(built_in())}, a YAML file, or a JSON profile of 'vllm-slo "
        "profile' (default: h100-llama-8b)")  # fmt: skip
    add("--kv-tokens", help="KV-cache size of one engine, tokens (default: the hardware's)")
    add("--max-num-seqs", help="most requests in one step (default: the hardware's)")
    add("--arrivals", help=f"one of {', '.join(ARRIVALS)} (default: the scenario's own)")
    add("--fit", default="rescale",
        help="how a trace is fitted to the rate: rescale its times, or thin its rows "
        "(default: rescale)")  # fmt: skip
    add("--trace-file",
        help="replaces the trace of the arrival kind: Azure or BurstGPT CSV, Mooncake JSON "
        "lines, or AdaServe JSON for its scenario; may be compressed with gzip")  # fmt: skip
    add("--jobs", default="500", help="jobs per window and engine (default: 500)")
    add("--windows", default="3", help="windows, each with its own seed (default: 3)")
    add("--warmup", default="0.2",
        help="first share of a window's jobs, not counted (default: 0.2)")  # fmt: skip
    add("--seed", default="0", help="seed of the first window (default: 0)")
    add("--bias", default="1.0",
        help="true step time divided by the one the scheduler believes (default: 1.0)")  # fmt: skip
    add("--noise", default="0.0",
        help="relative standard deviation of a step's time (default: 0.0)")  # fmt: skip
    add("--system-tokens", default="0",
        help="tokens with which every job's first prompt begins, the same for all jobs "
        "(default: 0)")  # fmt: skip
    add("--acceptance", default="0.7", metavar="A|APPLICATION=A,...",
        help="for systems that speculate: probability that the next drafted token is accepted, "
        "for all applications or for each (default: 0.7, an assumption)")  # fmt: skip
    add("--draft-step-ms", metavar="MS",
        help="time of one step of the draft model (default: the hardware's)")  # fmt: skip
    add(
        "--overhead",
        default="modelled",
        help="scheduling time added to each step: modelled (as measured on the real objects), "
        "measured (in this run; implies --exact, not repeatable) or none (default: modelled)",
    )
    add("--exact", action="store_true",
        help="vLLM's whole scheduler object instead of the light scheduler: the same steps, "
        "but slower")  # fmt: skip
    add("--processes", help="simulations at the same time (default: one per core)")


def acceptance(text: str, scenarios: Sequence[str]) -> dict[str, float]:
    """``--acceptance``: one share for every application of ``scenarios``, or name=share pairs."""
    known = sorted({each for name in scenarios for each in applications_of(name)})
    shares = {}
    for part in text.split(","):
        name, given, share = part.rpartition("=")
        if given and name not in known:
            raise SimulationError(
                f"--acceptance: unknown application {name!r}; known: {', '.join(known)}"
            )
        value = number("--acceptance", share, 0, 1)
        shares.update({name: value} if given else dict.fromkeys(known, value))
    return shares


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """One setting per scenario; makes jobs of each once, so that mistakes show at once."""
    hardware = load_hardware(
        args.hardware,
        kv_tokens=None if args.kv_tokens is None else whole("--kv-tokens", args.kv_tokens, 1),
        max_num_seqs=(
            None if args.max_num_seqs is None else whole("--max-num-seqs", args.max_num_seqs, 1)
        ),
    )
    names = [name for name, scenario in SCENARIOS.items() if not scenario.trace]
    if args.scenario != "all":
        names = [one_of("--scenario", word, [*SCENARIOS, "all"])
                 for word in listed("--scenario", args.scenario)]  # fmt: skip
    if args.arrivals is not None:
        one_of("--arrivals", args.arrivals, ARRIVALS)
    if args.draft_step_ms is not None:
        step_ms = number("--draft-step-ms", args.draft_step_ms, 0, 60_000)
        hardware = hardware.with_draft_step(step_ms / 1e3)
    setting = Setting(
        scenario=names[0],
        hardware=hardware,
        conditions=Conditions(
            bias=number("--bias", args.bias, 0, above=True),
            noise=number("--noise", args.noise, 0, 1),
            system_tokens=whole("--system-tokens", args.system_tokens, 0),
            exact=args.exact or args.overhead == "measured",
            routing=one_of("--routing", args.routing, get_args(RoutingPolicy)),  # type: ignore[arg-type]
            overhead=one_of("--overhead", args.overhead, get_args(Overhead)),  # type: ignore[arg-type]
            acceptance=acceptance(args.acceptance, names),
        ),
        jobs=whole("--jobs", args.jobs, 1),
        warmup=number("--warmup", args.warmup, 0, 0.95),
        arrivals=args.arrivals,
        fit=one_of("--fit", args.fit, ("rescale", "thin")),  # type: ignore[arg-type]
    )
    settings = [replace(setting, scenario=name) for name in names]
    for each in settings:
        if not counted(each.sample(each.jobs), each.warmup):
            raise SimulationError("--jobs: none are left after the warm-up; use more")
    return settings


def check_drafts(systems: Sequence[System], settings: Sequence[Setting]) -> None:
    """Raise SimulationError if a system speculates and its hardware has no draft."""
    if any(system.speculates for system in systems):
        for setting in settings:
            setting.hardware.speculating()


def seeds_of(args: argparse.Namespace) -> tuple[int, ...]:
    """Seeds of the windows."""
    first = whole("--seed", args.seed, 0)
    return tuple(range(first, first + whole("--windows", args.windows, 1)))


def processes_of(args: argparse.Namespace) -> int | None:
    """Processes, None for one per core."""
    return None if args.processes is None else whole("--processes", args.processes, 1)


def out_of(text: str | None) -> Path | None:
    """The folder for files; created now, so that a wrong path shows before the simulation."""
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
    """Raise SimulationError if vLLM, whose scheduler is simulated, is not installed."""
    if find_spec("vllm") is None:
        raise SimulationError(
            "the simulator runs vLLM's scheduler, and vLLM is not installed: "
            "pip install 'vllm-slo[cpu]' or 'vllm-slo[cuda]'"
        )


def wide_console() -> Console:
    """A console for results; 140 columns wide where the output is no terminal."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=140)


@contextmanager
def bar(console: Console, what: str) -> Iterator[Progress]:
    """A progress bar over tasks; hidden if the console is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with RichProgress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def say_left_out(settings: Sequence[Setting], console: Console) -> None:
    """Print a line for each trace of which rows are left out."""
    lines: dict[str, None] = {}  # a dict keeps each line once and in order
    for setting in settings:
        spec = SCENARIOS[setting.scenario]
        kinds = spec.arrivals if spec.trace or setting.arrivals is None else (setting.arrivals,)
        for kind in set(kinds).intersection(TRACES):
            trace = read_trace(kind)
            if trace.rows_left_out:
                lines[left_out_line(trace.source, trace.rows_left_out)] = None
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
