# SPDX-License-Identifier: Apache-2.0
"""Jobs through one or more replicas in virtual time.

Events are sends (a client sends a round) and steps (an engine schedules, runs, answers). The
earliest goes first; a send before a step at the same instant, a lower-numbered engine before a
higher, earlier jobs before later ones. An engine sees what arrived during a step when the step is
over, as vLLM does.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol, get_args

import numpy as np

from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.step_time.model import BatchShape
from vllm_slo.core.types import RoutingPolicy
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.front import Front
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job, JobResult, RoundResult
from vllm_slo.sim.systems import System
from vllm_slo.sim.text import own_text
from vllm_slo.slo.model import SLO, Stage

Overhead = Literal["modelled", "measured", "none"]
Watch = Callable[[JobResult], bool]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the world is like beyond the hardware.

    Attributes:
        replicas: engines (or groups of them) that share the load.
        bias: true step time over the believed one.
        noise: relative standard deviation of a step's true time (lognormal, mean 1).
        seed: of that noise, and of which drafts are accepted.
        exact: vLLM's whole scheduler object instead of the light scheduler.
        hops: replicas that are asked for a promise before a request settles for best effort.
        routing: which replica a request goes to, as ``core.routing.policy`` names it.
        acceptance: application -> probability that a drafted token is accepted.
        overhead: what scheduling is charged on top of a step: ``modelled``, what it was measured to
            take on the real objects (nothing where the step times hold it already); ``measured``,
            what it takes here and now, which needs ``exact`` and is not repeatable; ``none``.
    """

    replicas: int = 1
    bias: float = 1.0
    noise: float = 0.0
    seed: int = 0
    exact: bool = False
    hops: int = 1 << 30
    routing: RoutingPolicy = "slo"
    acceptance: Mapping[str, float] = field(default_factory=dict)
    overhead: Overhead = "modelled"

    def __post_init__(self) -> None:
        for name, low in (("replicas", 1), ("hops", 1), ("seed", 0)):
            value = getattr(self, name)
            if value < low:
                raise SimulationError(f"{name}: must be at least {low}, not {value}")
        if not 0.0 < self.bias < math.inf:
            raise SimulationError(f"bias: must be a positive factor, not {self.bias}")
        if not 0.0 <= self.noise <= 1.0:
            raise SimulationError(f"noise: must lie between 0 and 1, not {self.noise}")
        if self.routing not in get_args(RoutingPolicy):
            raise SimulationError(
                f"routing: must be one of {', '.join(get_args(RoutingPolicy))}, "
                f"not {self.routing!r}"
            )
        if self.overhead not in get_args(Overhead):
            raise SimulationError(
                f"overhead: must be one of {', '.join(get_args(Overhead))}, not {self.overhead!r}"
            )
        if self.overhead == "measured" and not self.exact:
            raise SimulationError("overhead: to be measured it needs exact, too")
        for name, share in self.acceptance.items():
            if not 0.0 <= share <= 1.0:
                raise SimulationError(
                    f"acceptance of {name!r}: must lie between 0 and 1, not {share}"
                )

    def true_step_time(self, hardware: Hardware, engine: int) -> Callable[[BatchShape], float]:
        """What a step of ``engine`` really takes; the policies are told the unbiased model."""
        predict = hardware.step_time.predict_shape_s
        if self.noise == 0.0:
            return lambda shape: self.bias * predict(shape)
        rng = np.random.default_rng([self.seed, engine])
        sigma = math.sqrt(math.log1p(self.noise**2))

        def noisy(shape: BatchShape) -> float:
            return self.bias * predict(shape) * math.exp(rng.normal(-0.5 * sigma**2, sigma))

        return noisy

    @property
    def known(self) -> bool:
        """Whether the believed step times are the true ones."""
        return self.bias == 1.0 and self.noise == 0.0

    @property
    def margin(self) -> float:
        """What a baseline that predicts step times allows for; ours learns its own."""
        return self.bias * (1.0 + self.noise)


@dataclass(slots=True)
class Run:
    """What a simulation gave.

    Attributes:
        results: one for each job, in the order of the jobs; only those that ended if aborted.
        end_s: virtual time at which the last one ended.
        steps: engine steps taken.
        gpus: GPUs of the whole system.
        scheduler_s: wall-clock seconds spent in schedulers.
        wall_s: wall-clock seconds of the simulation.
        aborted: whether ``watch`` stopped it.
    """

    results: list[JobResult]
    end_s: float
    steps: int
    gpus: int
    scheduler_s: float
    wall_s: float
    aborted: bool


def slo_of(job: Job, place: int) -> SLO:
    """What the client of a job asks for in one of its rounds, by number; rounds are one session."""
    one, several = job.rounds[place], len(job.rounds) > 1
    tpots_ms = [None if math.isinf(s.tpot_s) else s.tpot_s * 1e3 for s in one.stages]
    staged = len(set(tpots_ms)) > 1
    marks = [*(f"end of stage {n}" for n in range(1, len(tpots_ms))), None]
    return SLO(
        ttft_ms=None if math.isinf(one.ttft_s) else one.ttft_s * 1e3,
        tpot_ms=None if staged else tpots_ms[0],
        stages=tuple(map(Stage, tpots_ms, marks)) if staged else None,
        session_id=job.job_id if several else None,
        session_last=place + 1 == len(job.rounds) if several else None,
        slo_class=job.application,
    )


@dataclass(frozen=True, slots=True)
class Offer:
    """A round on its way to a replica.

    Attributes:
        name: unique in the run.
        prompt: token ids.
        output_tokens: length of the answer; no policy is told.
        slo: what is asked for.
        sent_s, seen_s: when the client sent it, and when an engine can see it.
        acceptance: probability that a drafted token of its answer is accepted.
        stage_ends: number of the last token of each stage but the last; no policy is told before.
    """

    name: str
    prompt: list[int]
    output_tokens: int
    slo: SLO
    sent_s: float
    seen_s: float
    acceptance: float
    stage_ends: tuple[int, ...] = ()


class Replica(Protocol):
    """What serves requests on a clock of its own; ``steps`` and ``scheduler_s`` add up its work."""

    steps: int

    @property
    def scheduler_s(self) -> float: ...

    @property
    def busy(self) -> bool: ...

    @property
    def now_s(self) -> float:
        """When it can do something next."""

    def state(self) -> ReplicaState | None:
        """What a front is told; None from what promises nothing."""

    def promise(self, offer: Offer, ticket: int) -> bool:
        """Take the request if its objectives can be promised here and now."""

    def accept(self, offer: Offer, ticket: int) -> None:
        """Take the request."""

    def step(self) -> list[str]:
        """Do the next thing; names of the requests that ended."""

    def take(self, name: str) -> tuple[RoundResult, list[int]]:
        """What became of a request that ended, and its text: prompt and answer."""


class Simulation:
    """One run: clients on one side, replicas on the other, a heap of sends between them."""

    def __init__(
        self,
        jobs: Sequence[Job],
        system: System,
        hardware: Hardware,
        conditions: Conditions,
        watch: Watch | None,
    ) -> None:
        from vllm_slo.sim.replica import build_replicas  # brings vLLM along

        self.jobs = jobs
        self.hardware = hardware
        self.watch = watch
        applications = sorted({job.application for job in jobs})
        self.replicas = build_replicas(system, hardware, conditions, applications)
        self.front = Front(
            self.replicas,
            conditions.routing,
            min(conditions.hops, len(self.replicas)),
            conditions.seed,
        )
        self.acceptance = conditions.acceptance
        self._sends: list[tuple[float, int, int]] = [
            (job.arrival_s, number, 0) for number, job in enumerate(jobs)
        ]
        heapq.heapify(self._sends)
        self._begun: list[list[RoundResult]] = [[] for _ in jobs]
        self._texts: dict[int, list[int]] = {}
        self._ended: dict[int, JobResult] = {}
        self.aborted = False

    def run(self) -> None:
        """Until every job has ended, or ``watch`` says that it is enough."""
        sends, replicas, frontend_s = self._sends, self.replicas, self.hardware.frontend_s
        while not self.aborted:
            ready_s, replica, number = math.inf, None, 0
            for place, one in enumerate(replicas):
                if one.busy and one.now_s < ready_s:
                    ready_s, replica, number = one.now_s, one, place
            if sends and sends[0][0] + frontend_s <= ready_s:
                self._send(*heapq.heappop(sends))
            elif replica is not None:
                ended = replica.step()
                for name in ended:
                    self._collect(replica, name)
                self.front.stepped(number)
            else:
                return

    def _send(self, sent_s: float, number: int, place: int) -> None:
        job = self.jobs[number]
        one = job.rounds[place]
        text = self._texts.pop(number, None)
        name = f"{number}.{place}"
        prompt = [*(text or ()), *own_text(name, one.prompt_tokens)]
        cached = {}
        if text is not None:  # the prefix is cached where the round before ran
            cached[str(self._begun[number][-1].replica)] = len(text)
        offer = Offer(
            name,
            prompt,
            one.output_tokens,
            slo_of(job, place),
            sent_s,
            sent_s + self.hardware.frontend_s,
            self.acceptance.get(job.application, 0.0),
            tuple(accumulate(stage.tokens for stage in one.stages))[:-1],
        )
        self.front.send(offer, cached)

    def _collect(self, replica: Replica, name: str) -> None:
        number, place = map(int, name.split("."))
        job = self.jobs[number]
        self.front.ended(name)
        result, text = replica.take(name)
        self._begun[number].append(result)
        if result.finished and place + 1 < len(job.rounds):
            self._texts[number] = text
            end_s = result.token_times_s[-1]
            heapq.heappush(self._sends, (end_s + job.rounds[place + 1].wait_s, number, place + 1))
            return
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

    Args:
        jobs: with ids of their own; arrival times in any order.
        system: policy and its settings.
        hardware: step times, memory, seats of one engine.
        conditions: replicas, errors of the step-time model.
        watch: called with each job when it has ended; True stops the run.

    Raises:
        SimulationError: no jobs, one that the engine could never hold, or no draft for a system
            that speculates.
    """
    conditions = conditions or Conditions()
    if system.drafts:
        hardware = hardware.speculating()
    if not jobs:
        raise SimulationError("jobs: there are none to simulate")
    longest = max(jobs, key=lambda job: job.tokens)
    room = hardware.kv_tokens // hardware.block_size * hardware.block_size
    if longest.tokens > min(hardware.max_model_len, room):
        raise SimulationError(
            f"job {longest.job_id}: its {longest.tokens} tokens do not fit max_model_len "
            f"({hardware.max_model_len}) and kv_tokens ({room}) of {hardware.name}"
        )
    began_s = time.perf_counter()
    simulation = Simulation(jobs, system, hardware, conditions, watch)
    simulation.run()
    return Run(
        simulation.results(),
        max(replica.now_s for replica in simulation.replicas),
        sum(replica.steps for replica in simulation.replicas),
        conditions.replicas * system.engines * hardware.gpus,
        sum(replica.scheduler_s for replica in simulation.replicas),
        time.perf_counter() - began_s,
        simulation.aborted,
    )
