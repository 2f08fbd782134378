# SPDX-License-Identifier: Apache-2.0
"""How fast a trace of 27 million rows is read, and how much memory that takes.

The file is synthetic and has the shape of Azure's trace of 2024: a week, dates with microseconds,
two token counts. Each way reads it in a process of its own, which imports nothing else:

- `read`: every row becomes a request.
- `window`: `--from` and `--to` choose an hour; the whole file is read for it.

Packed files have a tenth of the rows. Memory is the peak of the process's resident memory. "rows/s"
is by the clock on the wall, "per CPU second" leaves out what other processes took meanwhile.

    python benchmarks/trace_reading.py                    all of it
    python benchmarks/trace_reading.py --rows 1000000     a shorter one, nothing is written
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from common import markdown, write_result

ROWS: Final = 27_000_000
WEEK_S: Final = 7 * 86_400
MOST_MB: Final = 300
HOUR: Final = ("2024-05-12 10:00", "2024-05-12 11:00")
START: Final = datetime(2024, 5, 10, tzinfo=UTC)


def lines(rows: int) -> Iterator[str]:
    """The lines of a trace: rows in order of time, spread evenly over a week's seconds."""
    rng = random.Random(0)
    yield "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    lengths = [f"{rng.randint(1, 8000)},{rng.randint(1, 1000)}\n" for _ in range(10_007)]
    number = 0
    for second in range(WEEK_S):
        moment = (START + timedelta(seconds=second)).isoformat(" ").removesuffix("+00:00")
        here = (second + 1) * rows // WEEK_S - number
        for place in range(here):
            micros = place * 1_000_000 // here
            yield f"{moment}.{micros:06}+00:00,{lengths[number % len(lengths)]}"
            number += 1


def read_one(path: Path, way: str) -> dict[str, float]:
    """Read a file in one way: rows given, seconds on the wall and of the CPU, peak MB."""
    from vllm_slo.traces.files import read
    from vllm_slo.traces.selection import Selection, select
    from vllm_slo.traces.times import moment_of, parse_date_s

    low, high = (moment_of(parse_date_s(text)) for text in HOUR)
    window = Selection(low, high)
    requests = read(path) if way == "read" else select(path, window)
    count, began_s, began_cpu_s = 0, time.perf_counter(), time.process_time()
    for _ in requests:
        count += 1
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "requests": count,
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
        "peak_mb": usage.ru_maxrss / 1000,
    }


def measured(path: Path, way: str) -> dict[str, Any]:
    """`read_one` in a process of its own."""
    words = [sys.executable, __file__, "--read", way, str(path)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def packed(path: Path, suffix: str) -> Path:
    """A compressed copy."""
    from vllm_slo.traces.compression import written

    copy = path.with_name(path.name + suffix)
    with written(copy) as target, path.open(encoding="utf-8", newline="") as source:
        shutil.copyfileobj(source, target, 1 << 20)
    return copy


def write(path: Path, rows: int) -> Path:
    """Write a trace of so many rows."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(lines(rows))
    return path


def main() -> None:
    """Write the files, read them, write the table."""
    parser = argparse.ArgumentParser(description="see the first lines of the file")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--read", nargs=2, metavar=("WAY", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        way, name = args.read
        print(json.dumps(read_one(Path(name), way)))
        return
    table = []
    with tempfile.TemporaryDirectory() as folder:
        whole = write(Path(folder) / "week.csv", args.rows)
        tenth = write(Path(folder) / "tenth.csv", args.rows // 10)
        files = [
            ("plain", args.rows, whole, ("read", "window")),
            ("gzip", args.rows // 10, packed(tenth, ".gz"), ("read",)),
            ("zstd", args.rows // 10, packed(tenth, ".zst"), ("read",)),
        ]
        for name, rows, path, ways in files:
            for way in ways:
                found = measured(path, way)
                table.append((
                    name, way, f"{rows / 1e6:g} million", f"{path.stat().st_size / 1e6:.0f}",
                    found["requests"], f"{found['wall_s']:.1f}", f"{rows / found['wall_s']:,.0f}",
                    f"{rows / found['cpu_s']:,.0f}", f"{found['peak_mb']:.0f}", f"< {MOST_MB}",
                ))  # fmt: skip
                print(*table[-1], flush=True)
    head = (
        "file", "way", "rows", "MB", "requests given", "seconds", "rows/s", "per CPU second",
        "peak MB", "target",
    )  # fmt: skip
    if args.rows == ROWS:
        write_result("trace_reading", __doc__ or "", markdown(head, table))
    else:
        print(markdown(head, table))


if __name__ == "__main__":
    main()
