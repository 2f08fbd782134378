# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of ``check_cuda.py``, each in a process of its own, and tells how they ended."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import psutil

from vllm_slo.arguments import put_json
from vllm_slo.bench import style
from vllm_slo.bench.report import machine, versions
from vllm_slo.errors import VllmSLOError

RESULT: Final = "CHECK_CUDA_RESULT"
"""Names the file into which a part writes what it found."""
GRACE_S: Final = 15.0
"""Seconds that the processes of a part have to end when its time is over."""
COLOURS: Final = {"pass": "green", "fail": "bold red", "skipped": "yellow"}
Status: TypeAlias = Literal["pass", "fail", "skipped"]


class CheckError(Exception):
    """Something does not work; the message says what, in one line."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to check.

    Attributes:
        command: the words of the process that checks it.
        limit_s: seconds after which its process group is killed.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """What a part found.

    Attributes:
        text: the line of the table.
        facts: numbers and names for the JSON file.
        status: how it ended.
    """

    text: str
    facts: dict[str, Any] = field(default_factory=dict)
    status: Status = "pass"


def report_found(check: Callable[[], Found]) -> int:
    """Check in this process, which a runner has started; returns the exit status.

    Another exception than CheckError and those of this project leaves its trace in the part's log,
    and the runner tells its last line.
    """
    try:
        found = check()
    except (CheckError, VllmSLOError) as error:
        print(error)
        found = Found(str(error).partition("\n")[0], status="fail")
    text = json.dumps(asdict(found), indent=1)
    if RESULT in os.environ:
        Path(os.environ[RESULT]).write_text(text, encoding="utf-8")
    print(text)
    return 0 if found.status != "fail" else 1


def run_all(parts: Sequence[Part], out: Path, *, cpu: bool) -> int:
    """Run the parts one after the other, print the table and write ``out``; 1 if any fails."""
    from rich.console import Console
    from rich.markup import escape

    console, logs = Console(), out.with_suffix("")
    logs.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    table = style.table("check-cuda" + (" on CPU" if cpu else ""))
    for name in ("part", "result", "seconds", "found"):
        table.add_column(name, justify="right" if name == "seconds" else "left")
    results: list[dict[str, Any]] = []
    for part in parts:
        console.print(f"{part.name} ...", highlight=False)
        part_began_s = time.monotonic()
        found = run_part(part, logs)
        took_s = time.monotonic() - part_began_s
        colour = COLOURS[found.status]
        shown = f"[{colour}]{found.status}[/]"
        table.add_row(part.name, shown, f"{took_s:.0f}", escape(found.text))
        results.append({"part": part.name, "seconds": round(took_s, 1), **asdict(found)})
    failed = [result["part"] for result in results if result["status"] == "fail"]
    said = {
        "passed": not failed,
        "on": "cpu" if cpu else "cuda",
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began_s, 1),
        "machine": machine(),
        "versions": versions(),
        "parts": results,
    }
    put_json(said, out, CheckError)
    console.print(table)
    verdict = f"failed: {', '.join(failed)}" if failed else "all parts pass"
    console.print(
        f"{out}: {verdict} ({said['seconds']:.0f} s; what each part printed is in {logs})",
        soft_wrap=True,
        highlight=False,
    )
    return 1 if failed else 0


def run_part(part: Part, logs: Path) -> Found:
    """Run one part until it ends, or until its time is over."""
    name = part.name.replace(" ", "-")
    log, result = logs / f"{name}.log", logs / f"{name}.json"
    result.unlink(missing_ok=True)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            part.command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, RESULT: str(result.absolute())},
            process_group=0,
        )
        try:
            code = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            return Found(f"took longer than {part.limit_s:g} s{_last_line(log)}", status="fail")
        finally:
            end(process)
    with suppress(OSError, ValueError, TypeError):
        found = Found(**json.loads(result.read_text(encoding="utf-8")))
        if code == 0 or found.status == "fail":
            return found
    return Found(f"ended with status {code}{_last_line(log)}", status="fail")


def end(process: subprocess.Popen[bytes]) -> None:
    """End all processes that a part has started, also those in process groups of their own."""
    left: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        left = psutil.Process(process.pid).children(recursive=True)
    _signal_group(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    _signal_group(process.pid, signal.SIGKILL)
    for child in left:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[-300:]}" if last else ""


def run_command(words: Sequence[str], **environment: str) -> str:
    """What a Python module prints.

    Raises:
        CheckError: it fails; with its last line.
    """
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    sys.stderr.write(done.stderr + done.stdout)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "nothing printed").splitlines()
        raise CheckError(f"{' '.join(words[:3])}: {lines[-1]}")
    return done.stdout
