# SPDX-License-Identifier: Apache-2.0
"""A supervised child process that writes JSON lines and ends with its supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from vllm_slo.router import guard

LEFTOVER_PATIENCE_S: Final = 1.0
"""Time for processes that a dead child left behind (an engine, a resource tracker) to end."""
_GUARD: Final = (sys.executable, "-I", "-S", str(Path(guard.__file__)))
_KEPT_LINES: Final = 200
_MAX_LINE_BYTES: Final = 4 * 1024 * 1024
_PROCESS_PREFIX: Final = re.compile(r"^\([\w :.-]*pid=\d+\)\s*")
_LOG_PREFIX: Final = re.compile(r"^[A-Z]+ \d\d-\d\d [\d:.]+ (\[[^]]*\] )?")
_TELLING: Final = re.compile(
    r"^(?:vllm-slo: |[\w.-]+: )?(?:[\w.]*(?:Error|Exception)|error)\b.*: ?"
)


class Child:
    """One child process in its own process group, in the session of its supervisor.

    It has no session of its own, because Linux with autogroup divides the processors by session: on
    two cores, clients of an engine in another session waited for seconds to run.

    The child's stdin is open until this process ends, so a child that reads it knows when to end.
    If the child does not end then, or leaves processes behind, a guard process ends the whole
    group; see `vllm_slo.router.guard`.

    Use `start`, then `read` until it returns None. All methods belong to one event loop.

    Args:
        argv: the command line; it is visible to others, so it must hold no secret.
        env: the whole environment of the child.
        patience_s: seconds for the group to end after the death of this process.
        pass_fds: open files that the child gets under the same numbers.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        patience_s: float = 3.0,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._argv = tuple(argv)
        self._env = dict(env)
        self._patience_s = patience_s
        self._pass_fds = tuple(pass_fds)
        self._stderr: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start the process.

        Raises:
            OSError: it cannot be started.
        """
        loop = asyncio.get_running_loop()
        process, self._lifeline = _start_guarded(
            self._argv,
            self._patience_s,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._env,
            pass_fds=self._pass_fds,
        )
        self._process = process
        self._ended = loop.create_future()
        assert process.stdin and process.stdout and process.stderr
        self._stdout = await _reader(process.stdout)
        self._stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        self._forwarding = asyncio.create_task(self._forward(await _reader(process.stderr)))
        threading.Thread(target=self._await_end, args=(process, loop), daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """As `subprocess.Popen.returncode`; None before the start and while the child runs."""
        return None if self._process is None else self._process.returncode

    async def read(self) -> dict[str, Any] | None:
        """The next JSON object from stdout, None at its end. Other lines go to stderr."""
        while line := await _next_line(self._stdout):
            with suppress(ValueError):
                if isinstance(message := json.loads(line), dict):
                    return message
            self._say(line)
        return None

    def write(self, message: Mapping[str, Any]) -> None:
        """Send one JSON line; nothing happens if the child has ended."""
        if not self._stdin.is_closing():
            self._stdin.write(json.dumps(message).encode() + b"\n")

    async def wait(self) -> int:
        """Wait until the child and everything it started have ended; its return code."""
        code = int(await asyncio.shield(self._ended))
        with suppress(asyncio.TimeoutError):  # another process may have inherited the pipe
            await asyncio.wait_for(asyncio.shield(self._forwarding), 1.0)
        return code

    async def terminate(self, grace_s: float) -> int:
        """Send SIGTERM, and after ``grace_s`` SIGKILL to the whole group; the return code."""
        self._signal(signal.SIGTERM)
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self.wait(), grace_s)
        return await self.kill()

    async def kill(self) -> int:
        """Send SIGKILL to the whole group; the return code."""
        with suppress(ProcessLookupError, PermissionError):
            if self.returncode is None:
                os.killpg(self.pid, signal.SIGKILL)
        return await self.wait()

    async def obituary(self, what: str) -> str:
        """Wait until the child ends; one line with the reason. ``what`` names the child."""
        code = await self.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"{what} {how}: {self.last_words()}"

    def last_words(self) -> str:
        """The line most likely to say why the child ended: its last error, else its last line."""
        lines = [_without_prefix(line) for line in self._stderr]
        lines = [line for line in lines if line]
        telling = [line for line in lines if _TELLING.match(line)]
        return (telling or lines or ["it said nothing"])[-1]

    def _signal(self, number: int) -> None:
        if self._process is not None and self.returncode is None:
            self._process.send_signal(number)

    def _await_end(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        process.wait()
        guard.end_group(process.pid, LEFTOVER_PATIENCE_S)
        _tell_guard(self._lifeline, "ended")
        os.close(self._lifeline)
        with suppress(RuntimeError):  # the loop is closed, so nothing waits
            loop.call_soon_threadsafe(self._note_end, process.returncode)

    def _note_end(self, code: int) -> None:
        self._stdin.close()
        if not self._ended.done():
            self._ended.set_result(code)

    async def _forward(self, stderr: asyncio.StreamReader) -> None:
        while line := await _next_line(stderr):
            self._say(line)

    def _say(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self._stderr.append(text)
        sys.stderr.write(f"{text}\n")


async def _reader(pipe: IO[bytes]) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """The next line that is not too long; empty at the end."""
    while True:
        with suppress(ValueError):  # asyncio has dropped a line above the limit
            return await reader.readline()


def start_until_exit(argv: Sequence[str], patience_s: float) -> subprocess.Popen[bytes]:
    """Start a process with an empty stdin. Its group ends after this process has ended for any
    reason, and has ``patience_s`` for it.

    Raises:
        OSError: it cannot be started.
    """
    process, lifeline = _start_guarded(argv, patience_s, stdin=subprocess.DEVNULL)
    _lifelines.append(lifeline)
    return process


_lifelines: list[int] = []
"""Pipes that stay open until this process ends."""


def _start_guarded(
    argv: Sequence[str], patience_s: float, *, pass_fds: Sequence[int] = (), **options: Any
) -> tuple[subprocess.Popen[bytes], int]:
    """A process that leads a group of its own, and the lifeline of the group's guard, which must
    stay open. ``options``: of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    if shutil.which(argv[0]) is None:
        raise FileNotFoundError(f"{argv[0]}: no such program")
    theirs, ours = os.pipe()
    try:
        subprocess.run(
            [*_GUARD, "watch", str(theirs), str(patience_s)],
            pass_fds=(theirs,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        process = subprocess.Popen(
            [*_GUARD, "start", str(ours), *argv],
            process_group=0,
            pass_fds=(*pass_fds, ours),
            **options,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return process, ours


def _tell_guard(lifeline: int, line: object) -> None:
    with suppress(OSError):
        os.write(lifeline, f"{line}\n".encode())


def _without_prefix(line: str) -> str:
    """A line of vLLM's log without the process and time at its start."""
    return _LOG_PREFIX.sub("", _PROCESS_PREFIX.sub("", line)).strip()
