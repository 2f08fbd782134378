# SPDX-License-Identifier: Apache-2.0
"""The terminal of ``simulate`` and ``plan``: consoles, progress bars, notes on traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_slo.bench.traces import left_out_line
from vllm_slo.sim.arrivals import TRACES, read_trace
from vllm_slo.sim.scenarios import SCENARIOS
from vllm_slo.sim.setting import Setting
from vllm_slo.sim.workers import Progress

if TYPE_CHECKING:
    from rich.console import Console


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
            trace = read_trace(kind, setting.trace_file)
            if trace.rows_left_out:
                lines[left_out_line(trace.source, trace.rows_left_out)] = None
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
