# SPDX-License-Identifier: Apache-2.0
"""Consoles, progress bars, notes and files of ``simulate`` and ``plan``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_slo import arguments
from vllm_slo.bench.traces import left_out_line
from vllm_slo.sim.arrivals import TRACES, read_trace
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.scenarios import SCENARIOS
from vllm_slo.sim.setting import Setting
from vllm_slo.sim.workers import Progress

if TYPE_CHECKING:
    from rich.console import Console


def need_vllm() -> None:
    """Raise SimulationError if vLLM, whose scheduler is simulated, is not installed."""
    if find_spec("vllm") is None:
        raise SimulationError(
            "the simulator runs vLLM's scheduler, and vLLM is not installed: "
            "pip install 'vllm-slo[cpu]' or 'vllm-slo[cuda]'"
        )


def make_folder(path: Path | None) -> None:
    """Make the folder for files and pictures, so that a wrong path shows before the simulation."""
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise SimulationError("--out: pictures need matplotlib: pip install 'vllm-slo[bench]'")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SimulationError(f"--out: cannot make {path}: {error.strerror}") from error


def put_json(data: Mapping[str, Any], path: Path) -> None:
    """Write the result of ``--json``."""
    arguments.put_json(data, path, lambda text: SimulationError(f"--json: {text}"))


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


def say_notes(settings: Sequence[Setting], console: Console) -> None:
    """Print a line for each thing that is not simulated as the traces have it."""
    lines: dict[str, None] = {}  # a dict keeps each line once and in order
    for setting in settings:
        lines.update(dict.fromkeys(_traffic_notes(setting) if setting.traffic else _notes(setting)))
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _notes(setting: Setting) -> Iterator[str]:
    spec = SCENARIOS[setting.scenario]
    kinds = spec.arrivals if spec.trace or setting.arrivals is None else (setting.arrivals,)
    for kind in set(kinds).intersection(TRACES):
        trace = read_trace(kind)
        if trace.rows_left_out:
            yield left_out_line(trace.source, trace.rows_left_out)


def _traffic_notes(setting: Setting) -> Iterator[str]:
    recording = setting.traffic[0].recording
    if recording.left_out:
        yield left_out_line(recording.source, recording.left_out)
    if not setting.recorded:
        return
    if recording.estimated:
        yield (
            f"{recording.source}: requests without a recorded answer: {recording.estimated}; each "
            "gets the length of another answer of its class"
        )
    if clipped := sum(traffic.clipped(setting.hardware) for traffic in setting.traffic):
        yield (
            f"{recording.source}: {clipped} of the requests are cut to the context of "
            f"{setting.hardware.name}, prompt and answer together"
        )
