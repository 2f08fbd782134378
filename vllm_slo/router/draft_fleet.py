# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo draft-server --count N``: several draft servers, placed and watched by Ray.

Each actor supervises one ``vllm-slo draft-server`` process on its node and restarts it when it
ends. Ray restarts an actor, on another node if needed, when its node or process is lost. Every
process connects to the verifier itself, so drafts do not pass through Ray. The secret does not
either: processes read it from the environment or from a file of their node.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, TypedDict

from vllm_slo.arguments import INTERRUPTED
from vllm_slo.errors import ConfigError
from vllm_slo.router import ray_session
from vllm_slo.router.child import Child
from vllm_slo.wire.draft_socket import connected_addresses, derive_keys, read_token

POLL_S: Final = 1.0
MOST: Final = 1024
PAUSES_S: Final = (0.0, 1.0, 5.0, 15.0)
"""Pauses before the first, second, ... restart of a process in a row."""
STEADY_S: Final = 60.0
"""After a process that ran for so long, the next restart is the first in a row."""
GRACE_S: Final = 5.0
UNUSABLE: Final = 2
"""Exit status of a process that cannot use its flags; a restart would not help."""


class Watched(TypedDict):
    """The state of one draft server.

    Attributes:
        pid: of the process; 0: it does not run.
        error: why it cannot run at all, or "".
    """

    node: str
    pid: int
    starts: int
    error: str


class Supervisor:
    """Keeps one draft server running; the class of a Ray actor.

    ``argv``: the command line; it is visible to others, so it must hold no secret.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = [sys.executable, "-m", "vllm_slo.cli", *argv]
        self._child: Child | None = None
        self._starts = self._row = 0
        self._begun_s = self._next_s = 0.0
        self._error = ""

    async def watch(self) -> Watched:
        """Start the process if it does not run; returns its state."""
        if self._child is not None and self._child.returncode is not None:
            await self._ended(self._child)
        if self._child is None and not self._error and time.monotonic() >= self._next_s:
            # Ray sets the number of threads; vLLM would bind those of all engines to one core.
            self._child = Child(self._argv, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ})
            await self._child.start()
            self._starts += 1
            self._begun_s = time.monotonic()
        pid = self._child.pid if self._child else 0
        return Watched(node=socket.gethostname(), pid=pid, starts=self._starts, error=self._error)

    async def _ended(self, child: Child) -> None:
        code = await child.wait()
        self._child = None
        if code == UNUSABLE and self._starts == 1:  # later it is for want of memory or the like
            self._error = child.last_words()
        if time.monotonic() - self._begun_s > STEADY_S:
            self._row = 0
        self._next_s = time.monotonic() + PAUSES_S[min(self._row, len(PAUSES_S) - 1)]
        self._row += 1

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.terminate(GRACE_S)


def asked_for(args: argparse.Namespace) -> bool:
    """Whether the command line asks for several draft servers, or for Ray."""
    return args.count is not None or args.ray_address is not None


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Keep draft servers running until SIGINT or SIGTERM.

    Raises:
        VllmSLOError: a flag cannot be used, or a draft server cannot run at all; one line.
    """
    count = 1 if args.count is None else args.count
    connected_addresses(args.connect, "--connect")
    if args.ray_address is None:
        derive_keys(read_token(args.token_file))
    else:
        ray_session.require(args.ray_address)
    ray_session.import_ray("--ray-address" if args.count is None else "--count")
    with ray_session.interruptible(), ray_session.cluster(args.ray_address, count):
        _Fleet(args, rest, count).watch()
    return INTERRUPTED if ray_session.hurried() else 0


def command_of(args: argparse.Namespace, rest: Sequence[str], name: str) -> list[str]:
    """The command line of one draft server."""
    words = ["draft-server", "--model", args.model, "--name", name]
    words += [word for address in args.connect for word in ("--connect", address)]
    if args.token_file is not None:
        words += ["--token-file", args.token_file]
    return [*words, "--max-sessions", str(args.max_sessions), *rest]


class _Fleet:
    def __init__(self, args: argparse.Namespace, rest: Sequence[str], count: int) -> None:
        import ray

        self._ray = ray
        prefix = args.name or socket.gethostname()
        actor = ray.remote(Supervisor).options(
            num_cpus=args.cpus_per_server,
            num_gpus=args.gpus_per_server,
            max_restarts=-1,
            scheduling_strategy="SPREAD",
        )
        self._actors = {
            name: actor.remote(command_of(args, rest, name))
            for name in (f"{prefix}-{place}" for place in range(count))
        }

    def watch(self) -> None:
        """Report changes until a signal comes.

        Raises:
            ConfigError: a draft server cannot use its flags.
        """
        known: dict[str, Watched] = {}
        try:
            while True:
                for name, state in self._look().items():
                    if state["error"]:
                        raise ConfigError(state["error"].removeprefix("vllm-slo: error: "))
                    if state["pid"] and state != known.get(name):
                        ray_session.say(
                            f"draft server {name}: process {state['pid']} on {state['node']}"
                        )
                    known[name] = state
                time.sleep(POLL_S)
        finally:
            self._stop()

    def _look(self) -> dict[str, Watched]:
        """The states of actors that answer; an actor that Ray restarts does not."""
        from ray.exceptions import RayError

        calls = {name: actor.watch.remote() for name, actor in self._actors.items()}
        self._ray.wait(list(calls.values()), num_returns=len(calls), timeout=POLL_S)
        states: dict[str, Watched] = {}
        for name, call in calls.items():
            try:
                states[name] = self._ray.get(call, timeout=0)
            except RayError:
                continue
        return states

    def _stop(self) -> None:
        from ray.exceptions import RayError

        try:
            stopping: list[Any] = [actor.stop.remote() for actor in self._actors.values()]
            self._ray.wait(stopping, num_returns=len(stopping), timeout=GRACE_S + POLL_S)
        except RayError as error:
            ray_session.say(f"stopping: {error}")
