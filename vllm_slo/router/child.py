# SPDX-License-Identifier: Apache-2.0
"""A supervised child process that speaks JSON lines; nothing of it survives its supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import re
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

__all__ = ["Child", "keep_group_until_exit"]

LEFTOVER_PATIENCE_S: Final = 1.0
"""How long what a dead child left behind (an engine, a resource tracker) may take to end."""
_KEPT_LINES: Final = 200
_MAX_LINE_BYTES: Final = 4 * 1024 * 1024
_PROCESS_PREFIX: Final = re.compile(r"^\([\w :.-]*pid=\d+\)\s*")
_LOG_PREFIX: Final = re.compile(r"^[A-Z]+ \d\d-\d\d [\d:.]+ (\[[^]]*\] )?")
_TELLING: Final = re.compile(
    r"^(?:vllm-slo: |[\w.-]+: )?(?:[\w.]*(?:Error|Exception)|error)\b.*: ?"
)


class Child:
    """One child process in a group of its own, in the session of its supervisor.

    Not in a session of its own: Linux with autogroup shares the processors out by session, and on
    two cores clients of an engine in another session were seen to wait for seconds to run.

    The child's stdin stays open for as long as this process lives, so a child that watches it knows
    when to leave. If it does not leave then, or leaves something behind, a guard process ends the
    whole group; see `vllm_slo.router.guard`.

    Args:
        argv: the command line; nothing secret belongs here.
        env: the whole environment of the child.
        patience_s: seconds that the group is given after the death of this process.

    Use `start`, then `read` until it returns None; all methods belong to one event loop.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], *, patience_s: float = 3.0
    ) -> None:
        self._argv = tuple(argv)
        self._env = dict(env)
        self._patience_s = patience_s
        self._stderr: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start the process.

        Raises:
            OSError: it cannot be started.
        """
        loop = asyncio.get_running_loop()
        self._process = process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._env,
            process_group=0,
        )
        self._ended = loop.create_future()
        self._lifeline = _start_guard(process.pid, self._patience_s)
        assert process.stdin and process.stdout and process.stderr
        self._stdout = await _reader(process.stdout)
        self._stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        self._forwarding = asyncio.create_task(self._forward(await _reader(process.stderr)))
        threading.Thread(target=self._await_end, args=(process, loop), daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id, which is that of its group, too."""
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """As `subprocess.Popen.returncode`; None while it runs or before it was started."""
        return None if self._process is None else self._process.returncode

    async def read(self) -> dict[str, Any] | None:
        """The next JSON object from stdout; None at its end. Other lines go to stderr."""
        while True:
            try:
                line = await self._stdout.readline()
            except ValueError:  # a line above the limit; asyncio has dropped it
                continue
            if not line:
                return None
            with suppress(ValueError):
                if isinstance(message := json.loads(line), dict):
                    return message
            self._say(line)

    def write(self, message: Mapping[str, Any]) -> None:
        """Send one JSON line; nothing happens when the child is gone."""
        if not self._stdin.is_closing():
            self._stdin.write(json.dumps(message).encode() + b"\n")

    async def wait(self) -> int:
        """Wait until the child and everything it started have ended; its return code."""
        code = int(await asyncio.shield(self._ended))
        with suppress(asyncio.TimeoutError):  # a stranger may have inherited the pipe
            await asyncio.wait_for(asyncio.shield(self._forwarding), 1.0)
        return code

    async def terminate(self, grace_s: float) -> int:
        """SIGTERM, and SIGKILL to the whole group after ``grace_s``; the return code."""
        self._signal(signal.SIGTERM)
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self.wait(), grace_s)
        return await self.kill()

    async def kill(self) -> int:
        """SIGKILL to the whole group; the return code."""
        with suppress(ProcessLookupError, PermissionError):
            if self.returncode is None:
                os.killpg(self.pid, signal.SIGKILL)
        return await self.wait()

    def last_words(self) -> str:
        """What most likely says why the child ended: its last error line, else its last line."""
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
        with suppress(OSError):
            os.write(self._lifeline, b"x")
        os.close(self._lifeline)
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._note_end, process.returncode)

    def _note_end(self, code: int) -> None:
        self._stdin.close()
        if not self._ended.done():
            self._ended.set_result(code)

    async def _forward(self, stderr: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stderr.readline()
            except ValueError:
                continue
            if not line:
                return
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


def keep_group_until_exit(group: int, patience_s: float) -> None:
    """End a process group once this process is gone, however that came about."""
    _lifelines.append(_start_guard(group, patience_s))


_lifelines: list[int] = []
"""Open for as long as this process lives."""


def _start_guard(group: int, patience_s: float) -> int:
    """Start the guard of a group; returns the lifeline, which is to be held open."""
    lifeline, ours = os.pipe()
    script = str(Path(guard.__file__))
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", script, str(lifeline), str(group), str(patience_s)],
            pass_fds=(lifeline,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    finally:
        os.close(lifeline)
    return ours


def _without_prefix(line: str) -> str:
    """A line of vLLM's log without the process and time that it begins with."""
    return _LOG_PREFIX.sub("", _PROCESS_PREFIX.sub("", line)).strip()
