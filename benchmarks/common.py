# SPDX-License-Identifier: Apache-2.0
"""What every benchmark needs: a table, and a result file that says how it came about."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm_slo.bench.report import machine, versions

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
