# SPDX-License-Identifier: Apache-2.0
"""A supervised child: its lines, its end, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import patience

from vllm_slo.router import child as child_module
from vllm_slo.router import guard
from vllm_slo.router.child import Child

ECHO = """
import json, sys
print("no JSON", flush=True)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    print(json.dumps({"got": json.loads(line)}), flush=True)
"""
# Ignores the end of its stdin and SIGTERM, and has an engine of the same mind.
STUBBORN = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
engine = os.fork()
if engine:
    print(json.dumps({"pid": os.getpid(), "engine": engine}), flush=True)
while True:
    time.sleep(1)
"""
OWNER = """
import asyncio, os, sys
from vllm_slo.router.child import Child
async def main():
    child = Child([sys.executable, "-c", sys.argv[1]], os.environ, patience_s=0.2)
    await child.start()
    print(str(await child.read()).replace("'", '"'), flush=True)
    await child.wait()
asyncio.run(main())
"""

GONE_S = patience(10.0)


def python(code: str, patience_s: float = 3.0) -> Child:
    return Child([sys.executable, "-c", code], os.environ, patience_s=patience_s)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, patience(30)))


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie that somebody has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_gone(*pids: int, within_s: float = GONE_S) -> None:
    end = time.monotonic() + within_s
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.02)


def guards_of(owner: int) -> list[int]:
    """Guards at the other end of a pipe of this process."""
    ours, found = pipes_of(Path(f"/proc/{owner}")), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if guard.__file__.encode() in words and ours & pipes_of(entry):
                found.append(int(entry.name))
    return found


def pipes_of(process: Path) -> set[str]:
    links = set()
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):
            links.add(str(descriptor.readlink()))
    return {link for link in links if link.startswith("pipe:")}


def test_lines_go_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    async def talk() -> None:
        child = python(ECHO)
        assert child.returncode is None
        await child.start()
        assert await child.read() == {"ready": True}
        child.write({"a": 1})
        child.write({"b": [2]})
        assert await child.read() == {"got": {"a": 1}}
        assert await child.read() == {"got": {"b": [2]}}
        assert child.returncode is None
        assert len(guards_of(os.getpid())) == 1
        assert await child.terminate(GONE_S) == -signal.SIGTERM
        assert await child.read() is None
        child.write({"nobody": "listens"})
        await_gone(*guards_of(os.getpid()))

    run(talk())
    assert "no JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("usage: x\nvllm serve: error: unrecognized arguments: --x\n", "unrecognized arguments"),
        (
            "Traceback (most recent call last):\n  File ...\nOSError: no model\nSee the docs.\n",
            "OSError: no model",
        ),
        (
            (
                "(APIServer pid=7) INFO 11-21 10:00:00 [a.py:1] fine\n"
                "(EngineCore_0 pid=9) ERROR 11-21 10:00:01 [core.py:7] torch.OutOfMemoryError: X\n"
                "(APIServer pid=7) INFO 11-21 10:00:02 [a.py:2] leaving\n"
            ),
            "torch.OutOfMemoryError: X",
        ),
        ("vllm-slo: error: slo.yaml:1: broken\n", "vllm-slo: error: slo.yaml:1: broken"),
        ("Killed\n\n", "Killed"),
        ("", "it said nothing"),
    ],
)
def test_last_words(stderr: str, expected: str) -> None:
    async def listen() -> None:
        child = python(f"import sys; sys.stderr.write({stderr!r}); sys.exit(3)")
        await child.start()
        assert await child.read() is None
        assert await child.wait() == child.returncode == 3
        assert expected in child.last_words()

    run(listen())


def test_a_long_line_is_skipped_and_a_large_one_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "_MAX_LINE_BYTES", 100_000)

    async def listen() -> None:
        child = python(
            "import json\n"
            "print('x' * 1_000_000)\n"
            "print(json.dumps({'large': 'x' * 50_000}))\n"
            "print('[1]')"
        )
        await child.start()
        assert await child.read() == {"large": "x" * 50_000}
        assert await child.read() is None
        assert await child.wait() == 0

    run(listen())


def test_a_child_that_reads_nothing_blocks_nobody() -> None:
    async def talk() -> None:
        child = python("import time; print('{}', flush=True); time.sleep(60)")
        await child.start()
        assert await child.read() == {}
        for _ in range(50):
            child.write({"replicas": "x" * 10_000})
        assert await child.kill() == -signal.SIGKILL

    run(talk())


def test_terminate_turns_into_kill_and_leaves_no_engine() -> None:
    async def stop() -> None:
        child = python(STUBBORN)
        await child.start()
        pids = await child.read()
        assert pids is not None
        assert await child.terminate(0.2) == -signal.SIGKILL
        await_gone(pids["pid"], pids["engine"])

    run(stop())


def test_a_killed_child_leaves_no_engine() -> None:
    async def stop() -> None:
        child = python(STUBBORN)
        await child.start()
        pids = await child.read()
        assert pids is not None
        os.kill(pids["pid"], signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
        await_gone(pids["pid"], pids["engine"])

    run(stop())


def test_a_killed_owner_leaves_nothing() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, STUBBORN], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pids: dict[str, int] = json.loads(owner.stdout.readline())
    watching = guards_of(owner.pid)
    assert len(watching) == 1
    owner.kill()
    owner.wait()
    await_gone(pids["pid"], pids["engine"], *watching)
    owner.stdout.close()


def test_a_command_that_cannot_be_started() -> None:
    async def start() -> None:
        child = Child(["/nowhere/python"], os.environ)
        with pytest.raises(FileNotFoundError):
            await child.start()
        assert child.returncode is None

    run(start())


@pytest.mark.parametrize("attempt", range(3))
def test_an_owner_that_is_killed_at_once_leaves_nothing(attempt: int) -> None:
    """Even if it dies just after its child has come to be, and the child reads no stdin."""
    deaf = f"import time\ntime.sleep({GONE_S * 6 + attempt})"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, deaf])
    found: list[psutil.Process] = []
    while not found:
        with suppress(psutil.Error):
            found = [one for one in psutil.Process(owner.pid).children() if deaf in one.cmdline()]
    owner.kill()
    owner.wait()
    await_gone(found[0].pid)
