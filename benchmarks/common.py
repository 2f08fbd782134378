# SPDX-License-Identifier: Apache-2.0
"""What several benchmarks need: tables, progress, and a result file that says how it was made."""

from __future__ import annotations

import datetime
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from vllm_slo.bench.report import machine, versions
from vllm_slo.sim.statistics import mean_interval

RESULTS = Path(__file__).parent / "results"


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def write_result(name: str, text: str, table: str, *, note: str = "") -> Path:
    """Write ``results/NAME.md``: what it is, the table, command, machine, versions, date."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.md"
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    found = ", ".join(f"{package} {number}" for package, number in versions().items() if number)
    where = machine()
    today = datetime.datetime.now(tz=datetime.UTC).date()
    parts = [f"# {name.replace('_', ' ').capitalize()}", text.strip(), table]
    parts += [note.strip()] if note else []
    parts.append(
        f"- command: `{command}`\n- machine: {where['cores']} cores, {where['cpu']}\n"
        f"- versions: {found}\n- date: {today}"
    )
    path.write_text("\n\n".join(parts) + "\n")
    sys.stdout.write(f"{table}\n\nwritten: {path}\n")
    return path


def mean_points(values: Sequence[float]) -> str:
    """The mean of differences with its 95% interval, for a table; the mean alone of one value."""
    mean, half = mean_interval(values)
    return f"{mean:+.1f}" + ("" if half is None else f" +- {half:.1f}")


def times(ratio: tuple[float, float, float] | None) -> str:
    """A ratio with its 95% interval, for a table; a dash if there is none."""
    if ratio is None:
        return "-"
    mean, low, high = ratio
    return f"{mean:.2f}x" + (f" ({low:.2f}-{high:.2f})" if low < high else "")


class Stopwatch:
    """Time since its construction, and the progress of the phases of a benchmark."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def minutes(self) -> float:
        """Minutes so far."""
        return (time.monotonic() - self._began_s) / 60

    def phase(self, name: str) -> Callable[[int, int], None]:
        """A callback that shows how far one phase is, on stderr."""

        def show(done: int, of: int) -> None:
            if sys.stderr.isatty() or done == of:
                end = "\n" if done == of else ""
                sys.stderr.write(f"\r{name}: {done}/{of} searches, {self.minutes:.1f} min{end}")
                sys.stderr.flush()

        return show
