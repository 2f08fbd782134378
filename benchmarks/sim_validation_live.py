# SPDX-License-Identifier: Apache-2.0
"""The live half of ``sim_validation.py``: jobs through real engines, in real time.

The client and the front are in this process, the engines in processes of their own. There is no
server, no tokenizer and no network. The front of several engines is the simulator's own; it knows
the states that they send.
"""

from __future__ import annotations

import heapq
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, Final

from sim_validation_conditions import Condition
from sim_validation_engine import ENVIRONMENT, Asked, EngineSetup, Profiled, Record

from vllm_slo import tiny
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.core.types import RoutingPolicy
from vllm_slo.sim.cluster import slo_of
from vllm_slo.sim.front import Front
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import (
    Job,
    JobResult,
    RoundRequest,
    RoundResult,
    answer_text,
    round_prompt,
)
from vllm_slo.slo.access import Seal
from vllm_slo.slo.keys import TICKET_KEY
from vllm_slo.tiny import text as tiny_text

CHILD: Final = Path(__file__).with_name("sim_validation_engine.py")
APART: Final = 397
"""Tokens from the begin of a job's part of a text to the next job's."""
HEAD_START_S: Final = 0.1
"""From the begin of a run to its first second, for the first arrival to be in time."""


class EngineProcess:
    """An engine in its own process. It sleeps while nobody asks anything of it."""

    def __init__(self, setup: EngineSetup) -> None:
        Seal.prepare()  # tickets come sealed, and the process reads the secret when it starts
        ours, theirs = socket.socketpair()
        self._said: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(CHILD), str(theirs.fileno())],
                env={**os.environ, **ENVIRONMENT},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
            )
        self.connection = Connection(ours.detach())
        self.connection.send(setup)

    def ready(self) -> None:
        """Wait until it has started and warmed up."""
        self._answer()

    def send(self, *message: Any) -> None:
        """Send a message that has no answer."""
        self.connection.send(message)

    def ask(self, *message: Any) -> Any:
        """Send a message and wait for its answer.

        Raises:
            SystemExit: the process has ended; with what it said.
        """
        self.connection.send(message)
        return self._answer()

    def receive(self) -> tuple[Any, ...]:
        """The next message.

        Raises:
            SystemExit: the process has ended; with what it said.
        """
        try:
            message: tuple[Any, ...] = self.connection.recv()
        except (EOFError, ConnectionError):
            self._said.seek(0)
            raise SystemExit(
                f"an engine failed, exit status {self._process.wait()}\n{self._said.read()}"
            ) from None
        return message

    def _answer(self) -> Any:
        while (message := self.receive())[0] != "done":
            pass  # a state
        return message[1]

    def profile(self, time_limit_s: float) -> Profiled:
        """Measure its step times."""
        profiled: Profiled = self.ask("profile", time_limit_s)
        return profiled

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self.connection.close()
        self._process.wait(60.0)
        self._said.close()


class LiveReplica:
    """An engine as a front's replica (`vllm_slo.sim.front.Replica`)."""

    busy = False  # each state is taken in when it comes: the engine spaces them out
    steps = computed_tokens = 0
    scheduler_s = 0.0

    def __init__(self, engine: EngineProcess, seal: Seal, began_s: float) -> None:
        self.engine = engine
        self._seal = seal
        self._began_s = began_s
        self._epoch_s = time.time() - time.monotonic() + began_s
        self.told: ReplicaState | None = None
        self.now_s = 0.0

    def state(self) -> ReplicaState | None:
        return self.told

    def promise(self, request: RoundRequest, ticket: Ticket) -> float | None:
        assert request.slo is not None
        declining = replace(request, slo=replace(request.slo, on_unattainable="decline"))
        self.accept(declining, ticket)
        return None

    def accept(self, request: RoundRequest, ticket: Ticket | None) -> None:
        extra = request.slo and request.slo.to_extra_args()
        if extra and ticket:
            extra = self._seal.sealed({**extra, TICKET_KEY: str(ticket)})
        self.engine.send("add", request.name, self._epoch_s + request.sent_s, extra)

    def step(self) -> list[str]:
        raise NotImplementedError("a real engine steps by itself")

    def take(self, name: str) -> tuple[RoundResult, list[int]]:
        raise NotImplementedError("results come as messages")


@dataclass(frozen=True, slots=True)
class LiveRun:
    """One run.

    Attributes:
        results: of each job, in order; times are seconds from the begin of the run.
        began_s: on the machine's monotonic clock.
        records: of each engine.
        asked, wrong: promises that the front's shadows gave, and those that a replica refused.
    """

    results: tuple[JobResult, ...]
    records: tuple[Record, ...]
    began_s: float
    asked: int = 0
    wrong: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What one condition gave.

    Attributes:
        profiles: before the runs of the first system, and after those of each.
        hardware: as the simulator knows it by the profile.
        jobs: of the short run, and of each run after it.
        runs: of each system, by its name: the short run, and those after it.
    """

    condition: Condition
    profiles: tuple[Profiled, ...]
    hardware: Hardware
    jobs: list[list[Job]]
    runs: dict[str, list[LiveRun]]
    took_s: float


class Client:
    """Sends the rounds of jobs at their times, and collects what comes back."""

    def __init__(
        self,
        jobs: Sequence[Job],
        engines: Sequence[EngineProcess],
        routing: RoutingPolicy,
        text: Sequence[int],
        first: int,
    ) -> None:
        self._jobs = jobs
        self._engines = engines
        self._first = first
        self._prompts = prompts_of(jobs, text, first)
        for engine in engines:
            engine.ask("prepare", [
                Asked(name, prompt, jobs[number].rounds[place].output_tokens,
                      jobs[number].application)
                for (number, place), prompt in self._prompts.items()
                for name in [f"{first + number}.{place}"]
            ])  # fmt: skip
        self.began_s = self._began_s = time.monotonic() + HEAD_START_S
        seal = Seal.prepare()
        self._replicas = [LiveReplica(engine, seal, self._began_s) for engine in engines]
        self.front = Front(self._replicas, routing, len(engines), 0, 0.0)
        self._sends = [(job.arrival_s, number, 0) for number, job in enumerate(jobs)]
        heapq.heapify(self._sends)
        self._sent_s: dict[str, float] = {}
        self._rounds: list[list[RoundResult]] = [[] for _ in jobs]
        self._open = len(jobs)

    def run(self) -> tuple[JobResult, ...]:
        """Serve all jobs to their end."""
        connections = {engine.connection: n for n, engine in enumerate(self._engines)}
        while self._open:
            while self._sends and self._sends[0][0] <= self._now_s():
                self._send(*heapq.heappop(self._sends))
            rest_s = max(self._sends[0][0] - self._now_s(), 0.0) if self._sends else None
            for ready in wait(list(connections), rest_s):
                number = connections[ready]  # type: ignore[index]
                what, *arguments = self._engines[number].receive()
                if what == "ended":
                    self._ended(number, *arguments)
                else:
                    self._told(number, *arguments)
        return tuple(
            JobResult(job, tuple(rounds))
            for job, rounds in zip(self._jobs, self._rounds, strict=True)
        )

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _send(self, sent_s: float, number: int, place: int) -> None:
        job, name = self._jobs[number], f"{self._first + number}.{place}"
        asked, cached = job.rounds[place], {}
        if place:
            last = self._prompts[number, place - 1]
            text = len(last) + job.rounds[place - 1].output_tokens
            cached[str(self._rounds[number][-1].replica)] = text
        self._sent_s[name] = sent_s
        ends = tuple(accumulate(stage.tokens for stage in asked.stages))[:-1]
        slo, prompt = slo_of(job, place), self._prompts[number, place]
        self.front.send(
            RoundRequest(name, prompt, asked.output_tokens, slo, sent_s, self._now_s(), 0.0, ends),
            cached,
        )

    def _told(self, number: int, state: ReplicaState, taken_s: float) -> None:
        replica = self._replicas[number]
        replica.told, replica.now_s = state, taken_s - self._began_s
        self.front.stepped(number)

    def _ended(
        self,
        replica: int,
        name: str,
        times_s: Sequence[float],
        finished: bool,
        report: dict[str, Any] | None,
    ) -> None:
        report = report or {}
        if not times_s and not finished:
            self.front.refused(name, self._now_s())
            return
        self.front.ended(name)
        number, place = map(int, name.split("."))
        number -= self._first
        job, late = self._jobs[number], report.get("late_promise")
        times_s = tuple(at_s - self._began_s for at_s in times_s)
        self._rounds[number].append(
            RoundResult(
                self._sent_s.pop(name),
                times_s,
                finished,
                report.get("promised") if late is None else False,
                replica,
                report.get("reason"),
                None if late is None else late["kept"],
            )
        )
        if finished and place + 1 < len(job.rounds):
            at_s = times_s[-1] + job.rounds[place + 1].wait_s
            heapq.heappush(self._sends, (at_s, number, place + 1))
        else:
            self._open -= 1


def prompts_of(
    jobs: Sequence[Job], text: Sequence[int] = (), first: int = 0
) -> dict[tuple[int, int], list[int]]:
    """(job, round) -> prompt.

    Args:
        text: token ids from which each job gets a part; empty: the simulator's own prompts, so that
            both find the same in their prefix caches.
        first: number of the first job, if others came before.
    """
    prompts = {}
    for number, job in enumerate(jobs):
        before: list[int] = []
        for place, asked in enumerate(job.rounds):
            prompt = round_prompt(asked, f"{first + number}.{place}", before)
            if text:
                begin = (first + number) * APART % (len(text) - len(prompt))
                prompt = list(text[begin : begin + len(prompt)])
            prompts[number, place] = prompt
            before = [*prompt, *answer_text(asked.output_tokens)]
    return prompts


def code_tokens() -> list[int]:
    """Python code with which the built-in models were not trained, as their tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny.path("target") / "tokenizer.json"))
    documents = tiny_text.documents(held_out=True)
    return [token for text in documents for token in tokenizer.encode(text).ids]


def serve(
    jobs: Sequence[Job],
    engines: Sequence[EngineProcess],
    routing: RoutingPolicy = "slo",
    text: Sequence[int] = (),
    first: int = 0,
) -> LiveRun:
    """Serve jobs in real time; ``text`` and ``first`` as in `prompts_of`."""
    client = Client(jobs, engines, routing, text, first)
    results = client.run()
    records = tuple(engine.ask("record") for engine in engines)
    return LiveRun(results, records, client.began_s, client.front.asked, client.front.wrong)
