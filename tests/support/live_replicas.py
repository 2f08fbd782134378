# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo serve --replicas`` as users start it, its processes by their part, and 40 clients."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from hermetic import ROOT_VARIABLE, python_path
from live_server import UNIPROC, environment
from patience import patience

from vllm_slo.wire.ports import free_port

TESTS = Path(__file__).parent
HANG_S = patience(60.0)


def eventually(holds: Callable[[], Any], what: str, within_s: float) -> Any:
    """Wait until ``holds`` returns something true, and return that."""
    end = time.monotonic() + within_s
    while not (said := holds()):
        assert time.monotonic() < end, f"{what}: not within {within_s:g} s"
        time.sleep(0.05)
    return said


def nothing(found: Callable[[], Any], what: str, within_s: float) -> None:
    """Wait until ``found`` returns something empty."""
    end = time.monotonic() + within_s
    while left := found():
        assert time.monotonic() < end, f"{what}: after {within_s:g} s still {left}"
        time.sleep(0.05)


@dataclass
class LiveReplicas:
    """A running ``vllm-slo serve --replicas``; remembers every process that it ever started."""

    process: subprocess.Popen[str]
    port: int
    folder: Path
    known: dict[int, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def processes(self) -> list[psutil.Process]:
        """All processes below the command."""
        found = []
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.process.pid).children(recursive=True)
        for one in found:
            with suppress(psutil.NoSuchProcess):
                self.known[one.pid] = one.create_time()
        return found

    def actors(self, deployment: str) -> list[psutil.Process]:
        """The Serve actors of a deployment."""
        found = []
        for one in self.processes():
            with suppress(psutil.NoSuchProcess):
                if f"ServeReplica:vllm-slo-{self.port}:{deployment}" in " ".join(one.cmdline()):
                    found.append(one)
        return found

    def children(self, deployment: str) -> list[psutil.Process]:
        """The processes that the actors of a deployment supervise."""
        found = []
        for actor in self.actors(deployment):
            with suppress(psutil.NoSuchProcess):
                found += [one for one in actor.children() if "-m" in one.cmdline()]
        return found

    def engines(self) -> list[psutil.Process]:
        """The engine core of each replica: of its children the one with most memory."""
        found = []
        for child in self.children("Replica"):
            with suppress(psutil.NoSuchProcess, ValueError):
                found.append(max(child.children(), key=lambda one: one.memory_info().rss))
        return found

    def replicas(self) -> list[dict[str, Any]]:
        """What the front says of its replicas; nothing while it does not answer."""
        with suppress(OSError, httpx.HTTPError):
            answer = httpx.get(f"{self.url}/replicas", timeout=patience(5))
            return list(answer.json()) if answer.status_code == 200 else []
        return []

    def ready(self) -> set[str]:
        """Names of the replicas that the front sends requests to."""
        return {one["name"] for one in self.replicas() if one["status"] == "ready"}

    def left(self) -> list[str]:
        """Processes ever seen that are there still, zombies aside."""
        left: list[str] = []
        for pid, created in self.known.items():
            with suppress(psutil.NoSuchProcess):
                one = psutil.Process(pid)
                if one.create_time() == created and one.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{pid}: {' '.join(one.cmdline())[:80]}")
        return left

    def stop(self, within_s: float) -> int:
        """SIGTERM; the exit status."""
        self.processes()
        self.process.terminate()
        return self.process.wait(within_s)

    def kill(self) -> None:
        """SIGKILL to all that is left."""
        if self.process.poll() is None:
            self.processes()
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(patience(30))
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        for pid in (int(one.partition(":")[0]) for one in self.left()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def running(
    *arguments: str, extra_env: dict[str, str] | None = None, within_s: float = HANG_S
) -> Iterator[LiveReplicas]:
    """Start, wait for the line that says so, stop, and see that nothing is left."""
    port = free_port()
    folder = Path(
        tempfile.mkdtemp(prefix="r-", dir=os.environ[ROOT_VARIABLE])
    )  # Ray's socket paths must be short
    command = [sys.executable, "-m", "vllm_slo.cli", "serve", "tiny", "--port", str(port)]
    env = {
        **environment(),
        **UNIPROC,
        "PYTHONPATH": python_path(TESTS),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        **(extra_env or {}),
    }
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=env,
            process_group=0,
        )
    live = LiveReplicas(process, port, folder)
    try:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)

        def said() -> str:
            live.processes()
            assert process.poll() is None, f"ended with status {process.returncode}"
            return process.stdout.readline() if process.stdout else ""

        live.lines.append(eventually(said, "the line that says ready", within_s))
        yield live
        assert live.stop(HANG_S) == 0
        nothing(live.left, "processes", patience(20))
    except BaseException:
        sys.stdout.write((folder / "stderr").read_text()[-4000:])
        for log in sorted(folder.glob("ray/session_latest/logs/worker-*.err")):
            sys.stdout.write(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}\n")
        raise
    finally:
        live.kill()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Outcome:
    """What one client saw: chunks with text, whether the answer was whole, the error if not."""

    tokens: int
    whole: bool
    error: str | None
    ended_s: float


async def _client(
    api: openai.AsyncOpenAI, prompt: str, tokens: int, started: asyncio.Event | None
) -> Outcome:
    count, whole, error = 0, False, None
    try:
        stream = await api.completions.create(
            model="tiny", prompt=prompt, max_tokens=tokens, stream=True, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            count += bool(chunk.choices and chunk.choices[0].text)
            whole = whole or bool(chunk.choices and chunk.choices[0].finish_reason)
            if started is not None and count >= 2:
                started.set()
    except (openai.APIError, httpx.HTTPError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Outcome(count, whole, error, time.monotonic())


@dataclass
class Volley:
    """40 clients and a kill: 20 in mid-stream and 20 that had no token yet."""

    streaming: list[Outcome]
    waiting: list[Outcome]
    killed_s: float


async def volley(
    live: LiveReplicas,
    kill: Callable[[], object],
    *,
    retries: int = 0,
    each: int = 20,
    begun: int = 20,
    stream_tokens: int,
    waiting_prompt: str = "wait",
    waiting_tokens: int = 3,
    lead_s: float = 0.3,
) -> Volley:
    """Start the streams. When ``begun`` of them run, start the others. Kill after ``lead_s``."""
    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="none", max_retries=retries, timeout=HANG_S
    ) as api:
        started = [asyncio.Event() for _ in range(each)]
        streams = [
            asyncio.create_task(_client(api, f"stream {number}", stream_tokens, event))
            for number, event in enumerate(started)
        ]
        async with asyncio.timeout(HANG_S):
            while sum(event.is_set() for event in started) < begun:
                await asyncio.sleep(0.01)
        waiting = [
            asyncio.create_task(_client(api, f"{waiting_prompt} {number}", waiting_tokens, None))
            for number in range(each)
        ]
        await asyncio.sleep(lead_s)
        kill()
        killed_s = time.monotonic()
        async with asyncio.timeout(HANG_S):
            return Volley(await asyncio.gather(*streams), await asyncio.gather(*waiting), killed_s)


def sigkill(process: psutil.Process) -> int:
    os.kill(process.pid, signal.SIGKILL)
    return int(process.pid)


def await_whole(live: LiveReplicas, before: set[str], kept: int, within_s: float) -> set[str]:
    """Until two replicas are ready, so many of those from before among them; their names."""

    def whole() -> set[str] | None:
        ready = live.ready()
        return ready if len(ready) == 2 and len(ready & before) == kept else None

    return set(eventually(whole, f"two replicas, {kept} of {before}", within_s))
