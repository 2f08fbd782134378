# SPDX-License-Identifier: Apache-2.0
"""Draft servers that Ray places and watches: flags, one process's supervisor, and a real one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from live_server import command, environment
from patience import patience

from vllm_slo import cli
from vllm_slo.core.speculation.draft_sessions import DraftAsk
from vllm_slo.engine.speculation.draft_link import DraftLink
from vllm_slo.router import draft_fleet
from vllm_slo.router.draft_fleet import Supervisor, Watched
from vllm_slo.wire.draft_socket import TOKEN_VARIABLE

pytest.importorskip("ray")

TOKEN = "a token of the tests' own"
CONNECT = ["--model", "tiny", "--connect", "tcp://127.0.0.1:1"]
SLEEPS = "import time; time.sleep(600)"
START_S = patience(180.0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--count", "2", "--connect", "nowhere"], "--connect nowhere: not an address"),
        (["--count", "2"], "--token-file: not given, and VLLMSLO_DRAFT_TOKEN is not set"),
        (["--ray-address", "127.0.0.1:9"], "--ray-address 127.0.0.1:9: [Errno 111]"),
    ],
)
def test_a_mistake_is_one_line_before_ray_starts(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert cli.main(["draft-server", *CONNECT, *flags]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"vllm-slo: error: {said}")
    assert told.count("\n") == 1


# One process's supervisor.


def supervisor(monkeypatch: pytest.MonkeyPatch, code: str) -> Supervisor:
    """Of a process that runs some code instead of a draft server."""
    monkeypatch.setattr(draft_fleet, "PAUSES_S", (0.0, 0.2))
    found = Supervisor([])
    found._argv = [sys.executable, "-c", code]
    return found


async def until(watched: Supervisor, holds: Callable[[Watched], bool]) -> Watched:
    end_s = time.monotonic() + patience(20.0)
    while not holds(one := await watched.watch()):
        assert time.monotonic() < end_s, one
        await asyncio.sleep(0.02)
    return one


def test_a_process_that_is_killed_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        watched = supervisor(monkeypatch, SLEEPS)
        first = await until(watched, lambda one: one["pid"] > 0)
        os.kill(first["pid"], signal.SIGKILL)
        second = await until(watched, lambda one: one["starts"] == 2 and one["pid"] > 0)
        assert second["pid"] != first["pid"]
        await watched.stop()
        assert not psutil.pid_exists(second["pid"])

    asyncio.run(play())


def test_a_process_that_ends_at_once_is_not_started_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        watched = supervisor(monkeypatch, "pass")
        await until(watched, lambda one: one["starts"] == 2)
        began_s = time.monotonic()
        await until(watched, lambda one: one["starts"] == 5)
        # Only the first start anew comes at once.
        assert time.monotonic() - began_s > 3 * 0.2
        await watched.stop()

    asyncio.run(play())


def test_a_process_that_cannot_use_its_flags_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        said = "import sys; print('vllm-slo: error: --model: no', file=sys.stderr); sys.exit(2)"
        watched = supervisor(monkeypatch, said)
        one = await until(watched, lambda one: bool(one["error"]))
        assert one["error"] == "vllm-slo: error: --model: no"
        assert (await watched.watch())["starts"] == 1
        await watched.stop()

    asyncio.run(play())


@pytest.mark.parametrize(("given", "expected"), [(None, "nobind"), ("0-1", "0-1")])
def test_its_threads_stay_off_the_cores_of_other_engines(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variable, told = "VLLM_CPU_OMP_THREADS_BIND", tmp_path / "told"
    if given is None:
        monkeypatch.delenv(variable, raising=False)
    else:
        monkeypatch.setenv(variable, given)
    code = f"import os, pathlib; pathlib.Path({str(told)!r}).write_text(os.environ[{variable!r}])"

    async def play() -> None:
        watched = supervisor(monkeypatch, code)
        await until(watched, lambda one: one["starts"] == 2)
        await watched.stop()

    asyncio.run(play())
    assert told.read_text() == expected


def test_a_process_that_ran_and_then_cannot_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As for want of memory, at a time: that is no reason to end all draft servers."""
    ran = tmp_path / "ran"
    code = (
        f"import pathlib, sys, time; ran = pathlib.Path({str(ran)!r})\n"
        "ran.exists() and sys.exit(2)\nran.touch()\ntime.sleep(600)"
    )

    async def play() -> None:
        watched = supervisor(monkeypatch, code)
        first = await until(watched, lambda one: one["pid"] > 0 and ran.exists())
        os.kill(first["pid"], signal.SIGKILL)
        third = await until(watched, lambda one: one["starts"] == 3)
        assert not third["error"]
        await watched.stop()

    asyncio.run(play())


# The whole, with a model.


@pytest.mark.deep
@pytest.mark.engine
@pytest.mark.slow
def test_ray_starts_a_killed_draft_server_anew_and_nothing_is_left_behind(tmp_path: Path) -> None:
    log = tmp_path / "fleet.log"
    with DraftLink("tcp://127.0.0.1:*", TOKEN, vocab_size=2048) as link, log.open("w") as file:
        fleet = subprocess.Popen(
            [
                *(command("vllm-slo"), "draft-server", "--model", "tiny", "--count", "1"),
                *("--connect", link.address, "--dtype", "float32", "--enforce-eager"),
                *("--max-model-len", "512"),
            ],
            env={**environment(), TOKEN_VARIABLE: TOKEN},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            first = drafting(link, log)
            os.kill(first.pid, signal.SIGKILL)
            psutil.wait_procs([first], timeout=patience(20))
            second = drafting(link, log)
            assert second.pid != first.pid
            assert len(link.drafters) == 1
            family = psutil.Process(fleet.pid).children(recursive=True)
            fleet.send_signal(signal.SIGTERM)
            assert fleet.wait(patience(60)) == 0
            _, left = psutil.wait_procs([second, *family], timeout=patience(20))
            assert not left
        finally:
            fleet.kill()
            fleet.wait()


def wait(holds: Callable[[], object], log: Path, within_s: float = START_S) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, log.read_text()[-3000:]
        time.sleep(0.2)


def drafting(link: DraftLink, log: Path) -> psutil.Process:
    """The process of the one draft server, once it drafts."""

    def drafts() -> bool:
        link.poll()
        ask = DraftAsk(np.arange(300, 320), 2)
        asks = {drafter.name: {"s": ask} for drafter in link.drafters}
        return bool(link.exchange(asks, deadline_s=patience(2.0)).answers)

    wait(drafts, log)
    own = [
        one
        for one in psutil.process_iter(["cmdline"])
        if link.address in (one.info["cmdline"] or ()) and "--name" in one.info["cmdline"]
    ]
    assert len(own) == 1
    return own[0]
