# SPDX-License-Identifier: Apache-2.0
"""Jobs through one or more replicas in virtual time.

There are three kinds of event: a client sends a round, a replica refuses one that its shadow had
promised, and a replica does a step (schedules, runs, answers). The earliest event goes first. At
the same instant a refusal goes before a send, a send before a step, a lower-numbered replica before
a higher one, and an earlier job before a later one. A replica sees what arrived during a step when
the step is over, as vLLM does; only then can it refuse.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.front import Front, Replica
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import (
    Job,
    JobResult,
    RoundRequest,
    RoundResult,
    answer_text,
    own_text,
    round_prompt,
)
from vllm_slo.sim.systems import System
from vllm_slo.slo.model import SLO, Stage

Watch = Callable[[JobResult], bool]
"""Called with each job when it has ended; True stops the run."""


@dataclass(slots=True)
class Run:
    """The outcome of one simulation.

    Attributes:
        results: one for each job, in the order of the jobs; only jobs that ended if ``aborted``.
        end_s: virtual time at which the last job ended.
        gpus: GPUs of the whole system.
        computed_tokens: tokens of all steps, those that are computed again included.
        scheduler_s: wall-clock seconds spent in schedulers.
        wall_s: wall-clock seconds of the simulation.
        aborted: whether ``watch`` stopped it.
    """

    results: list[JobResult]
    end_s: float
    steps: int
    gpus: int
    computed_tokens: int
    scheduler_s: float
    wall_s: float
    aborted: bool


def slo_of(job: Job, place: int) -> SLO | None:
    """What round ``place`` of a job asks for; the rounds of a job are one session."""
    asked, several = job.rounds[place], len(job.rounds) > 1
    if asked.details is not None:
        return asked.details.slo
    tpots_ms = [None if math.isinf(s.tpot_s) else s.tpot_s * 1e3 for s in asked.stages]
    staged = len(set(tpots_ms)) > 1
    marks = [*(f"end of stage {n}" for n in range(1, len(tpots_ms))), None]
    return SLO(
        ttft_ms=None if math.isinf(asked.ttft_s) else asked.ttft_s * 1e3,
        tpot_ms=None if staged else tpots_ms[0],
        stages=tuple(map(Stage, tpots_ms, marks)) if staged else None,
        session_id=job.job_id if several else None,
        session_last=place + 1 == len(job.rounds) if several else None,
        slo_class=job.application,
    )


class Simulation:
    """One run: clients send rounds, replicas serve them."""

    def __init__(
        self,
        jobs: Sequence[Job],
        system: System,
        hardware: Hardware,
        conditions: Conditions,
        watch: Watch | None,
    ) -> None:
        from vllm_slo.sim.virtual_replicas import build_replicas  # imports vLLM

        self.jobs = jobs
        self.hardware = hardware
        self.watch = watch
        applications = sorted({job.application_of(asked) for job in jobs for asked in job.rounds})
        self.replicas = build_replicas(system, hardware, conditions, applications)
        self.fronts = [
            Front(
                self.replicas,
                conditions.routing,
                min(conditions.hops, len(self.replicas)),
                conditions.seed,
                conditions.state_interval_s,
                str(number or ""),
            )
            for number in range(conditions.fronts)
        ]
        self._turns = itertools.cycle(self.fronts)
        self._sent: dict[str, Front] = {}
        self.acceptance = conditions.acceptance
        self._system = own_text("system prompt", conditions.system_tokens)
        self._sends: list[tuple[float, int, int]] = [
            (job.arrival_s, number, 0) for number, job in enumerate(jobs)
        ]
        heapq.heapify(self._sends)
        self._refusals: list[tuple[float, str]] = []
        self._begun: list[list[RoundResult]] = [[] for _ in jobs]
        self._prompts: dict[int, list[int]] = {}
        self._texts: dict[int, list[int]] = {}
        self._ended: dict[int, JobResult] = {}
        self.aborted = False

    def run(self) -> None:
        """Run until every job has ended or ``watch`` stops it."""
        sends, replicas, frontend_s = self._sends, self.replicas, self.hardware.frontend_s
        refusals = self._refusals
        while not self.aborted:
            ready_s, replica, number = math.inf, None, 0
            for place, candidate in enumerate(replicas):
                if candidate.busy and candidate.now_s < ready_s:
                    ready_s, replica, number = candidate.now_s, candidate, place
            send_s = sends[0][0] + frontend_s if sends else math.inf
            if refusals and refusals[0][0] <= min(send_s, ready_s):
                now_s, name = heapq.heappop(refusals)
                self._refused_at(self._sent[name].refused(name, now_s), name)
            elif sends and send_s <= ready_s:
                self._send(*heapq.heappop(sends))
            elif replica is not None:
                ended = replica.step()
                for name in ended:
                    self._collect(replica, name)
                for front in self.fronts:
                    front.stepped(number)
            else:
                return

    def _send(self, sent_s: float, number: int, place: int) -> None:
        job = self.jobs[number]
        asked, details = job.rounds[place], job.rounds[place].details
        text = self._texts.pop(number, None)
        name = f"{number}.{place}"
        cached = {}
        if text is not None:
            text = text if details is None else text[: details.kept_tokens]
            if self._begun[number][-1].finished:  # the replica of that round holds the prefix
                cached[str(self._begun[number][-1].replica)] = len(text)
        prompt = round_prompt(asked, name, text or (), self._system)
        if len(job.rounds) > 1:
            self._prompts[number] = prompt
        request = RoundRequest(
            name,
            prompt,
            asked.output_tokens,
            slo_of(job, place),
            sent_s,
            sent_s + self.hardware.frontend_s,
            self.acceptance.get(job.application_of(asked), 0.0),
            tuple(accumulate(stage.tokens for stage in asked.stages))[:-1],
            0 if details is None else details.priority,
        )
        front = next(self._turns)
        self._sent[name] = front
        self._refused_at(front.send(request, cached), name)

    def _refused_at(self, at_s: float | None, name: str) -> None:
        if at_s is not None:
            heapq.heappush(self._refusals, (at_s, name))

    def _collect(self, replica: Replica, name: str) -> None:
        number, place = map(int, name.split("."))
        job = self.jobs[number]
        self._sent.pop(name).ended(name)
        result, text = replica.take(name)
        self._begun[number].append(result)
        following = job.rounds[place + 1] if place + 1 < len(job.rounds) else None
        if following is not None and (result.finished or following.details is not None):
            end_s = result.token_times_s[-1] if result.finished else replica.now_s
            sent_s = end_s + following.wait_s
            if following.details is not None:
                sent_s = max(sent_s, following.details.not_before_s)
            # Its client went on, so it had an answer, if not from here.
            made = answer_text(job.rounds[place].output_tokens)
            self._texts[number] = text if result.finished else [*self._prompts[number], *made]
            heapq.heappush(self._sends, (sent_s, number, place + 1))
            return
        self._prompts.pop(number, None)
        self._ended[number] = JobResult(job, tuple(self._begun[number]))
        if self.watch is not None and self.watch(self._ended[number]):
            self.aborted = True

    def results(self) -> list[JobResult]:
        return [self._ended[number] for number in sorted(self._ended)]


def simulate(
    jobs: Sequence[Job],
    system: System,
    hardware: Hardware,
    conditions: Conditions | None = None,
    *,
    watch: Watch | None = None,
) -> Run:
    """Serve ``jobs`` with ``system``.

    ``jobs``: with unique ids; arrival times in any order.

    Raises:
        SimulationError: there are no jobs, a job does not fit the engine, or a system that
            speculates has no draft.
    """
    from vllm_slo.sim.virtual_replicas import kv_tokens_for_requests  # imports vLLM

    conditions = conditions or Conditions()
    if system.speculates:
        hardware = hardware.speculating(rests=system.trees)
    if not jobs:
        raise SimulationError("jobs: there are none to simulate")
    longest = max(jobs, key=lambda job: job.longest_request)
    kv_tokens = kv_tokens_for_requests(system, hardware, conditions)
    if longest.longest_request > min(hardware.max_model_len, kv_tokens):
        raise SimulationError(
            f"job {longest.job_id}: its {longest.longest_request} tokens do not fit max_model_len "
            f"({hardware.max_model_len}) and the {kv_tokens} KV tokens that {hardware.name} has "
            f"for requests with {system.name}"
        )
    began_s = time.perf_counter()
    simulation = Simulation(jobs, system, hardware, conditions, watch)
    simulation.run()
    return Run(
        simulation.results(),
        max(replica.now_s for replica in simulation.replicas),
        sum(replica.steps for replica in simulation.replicas),
        conditions.replicas * system.engines * hardware.gpus,
        sum(replica.computed_tokens for replica in simulation.replicas),
        sum(replica.scheduler_s for replica in simulation.replicas),
        time.perf_counter() - began_s,
        simulation.aborted,
    )
