# SPDX-License-Identifier: Apache-2.0
"""An operator's traffic: recorded requests as jobs, with the operator's classes.

What is simulated of a recording:

- Each request arrives at its own time, with its own lengths. A prompt is cut if prompt and answer
  exceed the context of the hardware.
- Class and objectives are those that the server would read (`traces.classes`). The objectives hold
  in milliseconds, whatever the hardware. A class with stages has its tightest TPOT for the whole
  answer, because a recording does not say where stages end.
- Prompts with the same leading hash ids begin with the same tokens, so that the prefix cache of the
  simulated engine finds them.
- The requests of a session follow each other. Where the end of an answer is known, its client
  thinks for as long as it did then. Otherwise the next request comes at its own time. It is never
  sent before the answer to the one before it has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile

import msgspec
import numpy as np

from vllm_slo.bench.traces import adaserve_class
from vllm_slo.sim.arrivals import Fit, Floats, Stretch, Trace, stretch
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job, RequestDetails, Round, Stage
from vllm_slo.sim.workload import context_limit, fit_context
from vllm_slo.slo.model import SLO
from vllm_slo.traces.classes import TrafficClasses
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.selection import Recording

NO_CLASS = "(no class)"
"""The application of requests without a class."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A request of a recording: its number there, and when it arrives in the simulation."""

    row: int
    at_s: float
    request: TraceRequest


@dataclass(frozen=True)
class Traffic:
    """Recorded requests and their classes.

    Attributes:
        first_row: number of the first request in the recording that the rules count.
        lasts_s: seconds that the requests took to arrive; None: from the first to the last one, and
            one mean gap.
    """

    recording: Recording
    classes: TrafficClasses
    first_row: int = 0
    lasts_s: float | None = None

    @cached_property
    def _times_s(self) -> Floats:
        return np.array([request.at_s for request in self.recording.requests])

    @property
    def duration_s(self) -> float:
        if self.lasts_s is not None:
            return self.lasts_s
        requests = self.recording.requests
        span_s = requests[-1].at_s - requests[0].at_s
        return max(span_s * len(requests) / max(1, len(requests) - 1), 1e-9)

    @property
    def rate(self) -> float:
        """Requests per second of the recording."""
        return len(self.recording.requests) / self.duration_s

    @property
    def applications(self) -> list[str]:
        """Names of the classes of its requests, in alphabetical order."""
        arrivals = self._arrivals(range(len(self.recording.requests)))
        return sorted({self._application(arrival) for arrival in arrivals})

    def clipped(self, hardware: Hardware) -> int:
        """Requests whose prompt or answer is cut to the context of the hardware."""
        limit = context_limit(hardware)
        every = self.recording.requests
        return sum(request.prompt_tokens + request.output_tokens > limit for request in every)

    def jobs(self, hardware: Hardware) -> list[Job]:
        """All requests at their own times, by arrival; those of a session are one job.

        Raises:
            TraceError: recorded objectives are out of range.
        """
        return self._jobs(self._arrivals(range(len(self.recording.requests))), hardware)

    def stretch(self, rate: float, count: int, seed: int, fit: Fit = "rescale") -> Stretch:
        """Some of the requests, as ``arrivals.draw``; SimulationError if there are too few."""
        trace = Trace(self.recording.source, self._times_s, self.recording.requests)
        return stretch(trace, count, seed, rate, fit)

    def whole(self) -> Stretch:
        """All of the requests; at ``rate`` they arrive at their own times."""
        requests = self.recording.requests
        return Stretch(self._times_s * self.rate, requests, tuple(range(len(requests))))

    def jobs_of(self, chosen: Stretch, rate: float, hardware: Hardware) -> list[Job]:
        """As ``jobs``, of a stretch at ``rate`` requests/s.

        Think times within a session stay as they were recorded.
        """
        return self._jobs(self._arrivals(chosen.places, (chosen.at / rate).tolist()), hardware)

    def cut(self, from_s: float, to_s: float) -> Traffic:
        """The requests that arrive in [``from_s``, ``to_s``), times from ``from_s``."""
        low, high = np.searchsorted(self._times_s, (from_s, to_s)).tolist()
        requests = tuple(
            msgspec.structs.replace(request, at_s=request.at_s - from_s)
            for request in self.recording.requests[low:high]
        )
        recording = replace(self.recording, requests=requests)
        return replace(
            self, recording=recording, first_row=self.first_row + low, lasts_s=to_s - from_s
        )

    def parts(self, count: int) -> list[Traffic]:
        """``count`` stretches of equal duration, those without a request left out."""
        if count == 1:
            return [self]
        ends_s = np.linspace(0.0, self.duration_s, count + 1).tolist()
        parts = [self.cut(low, high) for low, high in pairwise(ends_s)]
        return [part for part in parts if part.recording.requests]

    # Jobs.

    def _arrivals(
        self, places: Iterable[int], times_s: Iterable[float] | None = None
    ) -> list[_Arrival]:
        requests, places = self.recording.requests, list(places)
        if times_s is None:
            times_s = [requests[place].at_s for place in places]
        return [
            _Arrival(self.first_row + int(place), float(at_s), requests[place])
            for place, at_s in zip(places, times_s, strict=True)
        ]

    def _jobs(self, arrivals: Sequence[_Arrival], hardware: Hardware) -> list[Job]:
        sessions: dict[object, list[tuple[_Arrival, int]]] = {}
        seen: set[int] = set()
        for arrival in arrivals:
            request = arrival.request
            new = next((n for n, i in enumerate(request.hash_ids) if i not in seen), None)
            shared = len(request.hash_ids) if new is None else new
            seen.update(request.hash_ids)
            alone = request.session is None
            key = arrival.row if alone else (request.tenant, request.session)
            sessions.setdefault(key, []).append((arrival, shared * request.block_tokens))
        return [self._job(members, hardware) for members in sessions.values()]

    def _job(self, members: Sequence[tuple[_Arrival, int]], hardware: Hardware) -> Job:
        rounds: list[Round] = []
        held, before = 0, None
        for arrival, shared in members:
            request = arrival.request
            prompt, (answer,) = fit_context(
                request.prompt_tokens, (request.output_tokens,), context_limit(hardware)
            )
            kept = 0 if before is None else min(_kept(before.request, request, held), prompt - 1)
            wait_s, not_before_s = 0.0, arrival.at_s
            if before is not None:
                think_s = self.recording.think_s(before.request, request)
                if think_s is not None:
                    wait_s, not_before_s = think_s, 0.0
            slo = self._slo(arrival, hardware)
            details = RequestDetails(
                slo,
                arrival.row,
                self._application(arrival),
                request.priority,
                kept,
                not_before_s,
                request.hash_ids,
                request.block_tokens,
                min(shared, prompt - 1),
                self.classes.config.tpot_window_tokens,
            )
            rounds.append(round_of(prompt - kept, answer, wait_s, details))
            held, before = prompt + answer, arrival
        first, _ = members[0]
        return Job(str(first.row), self._application(first), first.at_s, tuple(rounds))

    def _application(self, arrival: _Arrival) -> str:
        name = self.classes.class_of(arrival.request, arrival.row)
        if not name and arrival.request.slo_ratio:
            return adaserve_class(arrival.request.slo_ratio)
        return name or NO_CLASS

    def _slo(self, arrival: _Arrival, hardware: Hardware) -> SLO | None:
        """What the server reads; AdaServe's ratio is a multiple of a lone request's TPOT, or if it
        is negative a number of ms (AdaServe, 6.1)."""
        request = arrival.request
        slo = self.classes.slo_of(request, arrival.row)
        if slo is None and request.slo_ratio:
            ratio = request.slo_ratio
            tpot_ms = ratio * hardware.zero_load_tpot_s() * 1e3 if ratio > 0 else -ratio
            return SLO(tpot_ms=tpot_ms)
        return slo and with_one_stage(slo)


def with_one_stage(slo: SLO) -> SLO:
    """The same with its tightest TPOT for the whole answer."""
    tightest_ms = slo.tightest_tpot_ms
    return replace(slo, stages=None, thinking_tpot_ms=None, tpot_ms=tightest_ms)


def round_of(prompt: int, answer: int, wait_s: float, details: RequestDetails) -> Round:
    """A round with the objectives of its request."""
    slo = details.slo or SLO()

    def seconds(limit_ms: float | None) -> float:
        return math.inf if limit_ms is None else limit_ms / 1e3

    stages = (Stage(answer, seconds(slo.tpot_ms)),)
    return Round(prompt, stages, seconds(slo.ttft_ms), wait_s, details)


def with_classes(jobs: Sequence[Job], classes: TrafficClasses) -> list[Job]:
    """A scenario's jobs with the operator's classes in place of the scenario's objectives.

    The rules see the application as the recorded class, and a job's place as its row.
    """
    return [_classed(job, row, classes) for row, job in enumerate(jobs)]


def _classed(job: Job, row: int, classes: TrafficClasses) -> Job:
    rounds, names = [], []
    session = job.job_id if len(job.rounds) > 1 else None
    for place, (asked, before) in enumerate(job.in_context()):
        request = TraceRequest(
            job.arrival_s,
            before + asked.prompt_tokens,
            asked.output_tokens,
            job.application,
            session=session,
        )
        slo = classes.slo_of(request, row)
        if slo is not None:
            slo = with_one_stage(slo)
        if slo is not None and session is not None:
            slo = replace(slo, session_last=place + 1 == len(job.rounds))
        names.append(classes.class_of(request, row) or NO_CLASS)
        details = RequestDetails(
            slo, row, names[-1], window_tokens=classes.config.tpot_window_tokens
        )
        rounds.append(round_of(asked.prompt_tokens, asked.output_tokens, asked.wait_s, details))
    return replace(job, application=names[0], rounds=tuple(rounds))


def _kept(before: TraceRequest, request: TraceRequest, held: int) -> int:
    """Leading tokens that a prompt repeats of the text before it, which has ``held`` tokens.

    Hash ids say so. Without them a prompt that is longer than the text continues it. One that is
    longer than the prompt before repeats that prompt, as where a client leaves out what the model
    thought. A shorter one repeats nothing.
    """
    same = before.prompt_tokens if request.prompt_tokens > before.prompt_tokens else 0
    if before.hash_ids and request.hash_ids:
        pairs = zip(before.hash_ids, request.hash_ids, strict=False)
        blocks = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        whole = before.prompt_tokens // before.block_tokens
        if blocks < whole:
            return blocks * request.block_tokens
        same = min(blocks * request.block_tokens, before.prompt_tokens)
    return held if request.prompt_tokens > held else same
